"""A shuffled order of any length without the order in memory: a keyed bijection of [0, n).

    position p in [0, n)  --Feistel rounds, keyed by (seed, epoch, stream)-->  q in [0, 2^b)  --q >= n: again-->  [0, n)

A word of b bits, the fewest that hold n - 1 (at least `_MIN_BITS`), is cut into two halves. Each round adds (xor) a
keyed mix of one half to the other, which can be undone whatever the mix is: the network is a bijection of [0, 2^b). A
result outside [0, n) is put in again until it falls inside (cycle walking); the cycle of p holds p itself, so this
ends, and what remains is a bijection of [0, n).

Example: n = 5, b = 6: 0 -> 41 -> 17 -> 3, so position 0 holds 3.

Price: about 10 ns per round and position, 2^b / n walks on the average (at most 2 from n = 2^5 on), and no more random
than a mixer of ten rounds is: it shuffles data, it hides nothing. Every line is integer arithmetic modulo 2^64, the
same on every host and in every NumPy version.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

from balancer.errors import PlanError

MAX_LENGTH = 2**62
_NUM_ROUNDS = 10
# Halves of a bit or two mix badly (all orders of 4 samples would not come equally often); a tiny n walks more instead.
_MIN_BITS = 6
_WORD = 2**64
_MASK = _WORD - 1
# Constants of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
_STEP, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


class KeyedPermutation:
    """A bijection of [0, n), a function of (n, seed, epoch, stream) alone; a few integers, whatever n is.

    Args:
        n: length, 1 to 2^62.
        seed, epoch, stream: key, each in [0, 2^64); streams keep apart what shares a seed (components of a mixture,
            windows).

    Raises:
        PlanError: a number outside its range.
    """

    __slots__ = ("_keys", "_left_bits", "_n", "_right_bits")

    def __init__(self, n: int, *, seed: int, epoch: int, stream: int = 0) -> None:
        if not 1 <= n <= MAX_LENGTH:
            raise PlanError(f"n={n}: a permutation has a length from 1 to 2^62")
        check_key(seed, epoch, stream)
        bits = max(_MIN_BITS, (n - 1).bit_length())
        self._n, self._left_bits, self._right_bits = n, bits // 2, bits - bits // 2
        self._keys = _round_keys(seed, epoch, stream)

    def __len__(self) -> int:
        return self._n

    def take(self, positions: ArrayLike) -> NDArray[np.int64]:
        """What stands at these positions of the shuffled order, int64 [k] for int64 [k].

        Raises:
            PlanError: a position outside [0, n).
        """
        wanted = np.asarray(positions, dtype=np.int64)
        if wanted.size and not (wanted.min() >= 0 and wanted.max() < self._n):
            raise PlanError(f"positions {wanted.min()} to {wanted.max()} are not all in [0, {self._n})")
        words = self._rounds(wanted.reshape(-1).astype(np.uint64))
        outside = np.flatnonzero(words >= self._n)
        while outside.size:
            words[outside] = self._rounds(words[outside])
            outside = outside[words[outside] >= self._n]
        return words.astype(np.int64).reshape(wanted.shape)

    def _rounds(self, words: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = words >> np.uint64(self._right_bits), words & np.uint64((1 << self._right_bits) - 1)
        for number, key in enumerate(self._keys):
            if number % 2:
                right = right ^ (_mixed(left ^ key) >> np.uint64(64 - self._right_bits))
            else:
                left = left ^ (_mixed(right ^ key) >> np.uint64(64 - self._left_bits))
        return (left << np.uint64(self._right_bits)) | right


def check_key(seed: int, epoch: int, stream: int = 0) -> None:
    """Raise PlanError unless all three are integers in [0, 2^64)."""
    if not all(0 <= number < _WORD for number in (seed, epoch, stream)):
        raise PlanError(f"seed={seed}, epoch={epoch}, stream={stream}: all are integers in [0, 2^64)")


def _round_keys(seed: int, epoch: int, stream: int) -> tuple[np.uint64, ...]:
    """One word per round; each part of the key is mixed before the next is added, so they do not cancel."""
    state = 0
    for part in (seed, epoch, stream):
        state = _mixed_word((state ^ part) + _STEP & _MASK)
    return tuple(np.uint64(_mixed_word(state + (k + 1) * _STEP & _MASK)) for k in range(_NUM_ROUNDS))


def _mixed_word(word: int) -> int:
    """SplitMix64's finaliser: a bijection of 64-bit words in which every bit of the input moves every bit out."""
    word = (word ^ word >> 30) * _FIRST & _MASK
    word = (word ^ word >> 27) * _SECOND & _MASK
    return word ^ word >> 31


def _mixed(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """`_mixed_word` of an array; uint64 arrays wrap around by themselves."""
    words = (words ^ words >> np.uint64(30)) * np.uint64(_FIRST)
    words = (words ^ words >> np.uint64(27)) * np.uint64(_SECOND)
    return words ^ words >> np.uint64(31)
