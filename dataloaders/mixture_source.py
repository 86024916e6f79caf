"""Several sources one after another as one: the sample ids of a mixture.

    captions  0 .. 999     ->  ids    0 ..  999
    pages     0 .. 249     ->  ids 1000 .. 1249        ranges = {"captions": range(0, 1000), "pages": range(1000, 1250)}

How often each part is drawn is no matter of the source (see `balancer.mixture`), so weights change without touching it.
A part that is added at the end leaves all ids as they were; any other change of the list renumbers what follows.

Price: one binary search per call.
"""

import hashlib
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dataloaders.errors import DataError
from dataloaders.probe.reader import ByteReader
from dataloaders.record import Record
from dataloaders.source import SampleSource, prefetch, shard_and_key


class Located(NamedTuple):
    """A sample of a mixture: the part that holds it, and its id there."""

    name: str
    source: SampleSource
    sample_id: int


class MixtureSource:
    """The samples of all parts under one numbering (a `SampleSource`).

    Args:
        parts: name -> source, in the order of the ids. A part may be empty.

    Attributes:
        parts: as given.
        ranges: name -> ids of its samples.
        fingerprint: of the parts' fingerprints in order; names do not matter.

    Raises:
        DataError: no part.
    """

    def __init__(self, parts: Mapping[str, SampleSource]) -> None:
        if not parts:
            raise DataError("a mixture without parts", remedy="Name at least one source.")
        self.parts = dict(parts)
        self.ranges = id_ranges({name: len(source) for name, source in self.parts.items()})
        self.fingerprint = mixture_fingerprint(source.fingerprint for source in self.parts.values())
        self._names = list(self.parts)
        self._starts = [ids.start for ids in self.ranges.values()]

    def __len__(self) -> int:
        return self.ranges[self._names[-1]].stop

    def __repr__(self) -> str:
        return f"MixtureSource({', '.join(f'{name}: {len(source)}' for name, source in self.parts.items())})"

    def locate(self, i: int) -> Located:
        """The part of sample `i`.

        Raises:
            IndexError: no such sample.
        """
        if not 0 <= i < len(self):
            raise IndexError(f"sample {i} is not among the {len(self)} of this mixture")
        number = bisect_right(self._starts, i) - 1  # the last part that starts here: empty ones before it hold nothing
        name = self._names[number]
        return Located(name, self.parts[name], i - self._starts[number])

    def record(self, i: int) -> Record:
        """Sample `i`, parsed by its part."""
        _, source, sample_id = self.locate(i)
        return source.record(sample_id)

    def media_reader(self, i: int, j: int) -> ByteReader:
        """Ranges of medium `j` of sample `i`."""
        _, source, sample_id = self.locate(i)
        return source.media_reader(sample_id, j)

    def media_bytes(self, i: int, j: int) -> bytes:
        """All bytes of medium `j` of sample `i`."""
        _, source, sample_id = self.locate(i)
        return source.media_bytes(sample_id, j)

    def place(self, i: int) -> str:
        """Part and place of sample `i`."""
        name, source, sample_id = self.locate(i)
        return f"{name}: {source.place(sample_id)}"

    def shard_and_key(self, i: int) -> tuple[str, str]:
        """Shard and key of sample `i` in its part."""
        _, source, sample_id = self.locate(i)
        return shard_and_key(source, sample_id)

    @property
    def groups(self) -> NDArray[np.int64] | None:
        """int64 [n]: the groups of the parts, numbered on; a part without is one group. None: no part has any."""
        own = [getattr(source, "groups", None) for source in self.parts.values()]
        if all(part is None for part in own):
            return None
        numbers, first = [], 0
        for part, source in zip(own, self.parts.values(), strict=True):
            within = np.zeros(len(source), dtype=np.int64) if part is None else np.asarray(part, dtype=np.int64)
            numbers.append(within + first)
            first += int(within.max(initial=-1)) + 1
        return np.concatenate(numbers)

    def prefetch(self, ids: Sequence[int], *, media: bool = True) -> None:
        """Pass the hint on, each part its own samples in the order of reading."""
        wanted: dict[str, list[int]] = {}
        for i in ids:
            name, _, sample_id = self.locate(int(i))
            wanted.setdefault(name, []).append(sample_id)
        for name, own in wanted.items():
            prefetch(self.parts[name], own, media=media)


def id_ranges(lengths: Mapping[str, int]) -> dict[str, range]:
    """Name -> sample ids, for parts of these lengths one after another."""
    ranges: dict[str, range] = {}
    start = 0
    for name, length in lengths.items():
        ranges[name] = range(start, start + length)
        start += length
    return ranges


def mixture_fingerprint(fingerprints: Iterable[str]) -> str:
    """Fingerprint of sources one after another."""
    return hashlib.sha256("\n".join(["mixture", *fingerprints]).encode()).hexdigest()
