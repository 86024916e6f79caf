"""Memory in which the samples of a cell put their patches one behind the other, so that packing them copies nothing.

    sample 0 --allocate(p0, d)--> [p0, d] --+
    sample 1 --allocate(p1, d)--> [p1, d] --+--> one flat float32 array --joined--> [p0 + p1 + ..., d], a view
    ...                                   --+

A worker's room is a memory file that goes to the trainer as it is (`balancer.worker_files`). Price: the arrays are good
until the next cell is loaded; a reader that keeps a sample longer must copy it.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray


class Room:
    """Flat memory that is given out piece by piece.

    Args:
        floats: float32 [n], contiguous.
    """

    def __init__(self, floats: NDArray[np.float32]) -> None:
        self._floats, self._num_used = floats, 0

    @classmethod
    def of(cls, num_bytes: int) -> "Room":
        """A room of ordinary memory."""
        return cls(np.empty(num_bytes // 4, dtype=np.float32))

    @property
    def used_bytes(self) -> int:
        """Bytes given out."""
        return 4 * self._num_used

    def allocate(self, num_rows: int, width: int) -> NDArray[np.float32]:
        """The next [num_rows, width], not filled; an array of its own when there is no room left."""
        begin, end = self._num_used, self._num_used + num_rows * width
        if end > len(self._floats):
            return np.empty((num_rows, width), dtype=np.float32)
        self._num_used = end
        return self._floats[begin:end].reshape(num_rows, width)

    def offset_of(self, chunk: memoryview) -> int | None:
        """Bytes from the start of the room to `chunk`; None when it lies elsewhere."""
        if not chunk.nbytes or not self._num_used:
            return None
        offset = np.frombuffer(chunk, dtype=np.uint8).ctypes.data - self._floats.ctypes.data
        return int(offset) if 0 <= offset <= self.used_bytes - chunk.nbytes else None


def joined(parts: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
    """`parts` [p, d] one behind the other: [P, d], a view where they lie so already in a flat array."""
    filled = [part for part in parts if len(part)] or list(parts[:1])
    whole = filled[0].base
    if isinstance(whole, np.ndarray) and whole.ndim == 1 and whole.dtype == np.float32 and whole.flags.c_contiguous:
        begins = [(part.ctypes.data - whole.ctypes.data) // 4 for part in filled]
        ends = [begin + part.size for begin, part in zip(begins, filled, strict=True)]
        ours = all(part.base is whole and part.flags.c_contiguous for part in filled)
        if ours and all(end == begin for end, (_, begin) in zip(ends, pairwise(begins), strict=False)):
            return whole[begins[0] : ends[-1]].reshape(-1, filled[0].shape[1])
    return np.concatenate(parts)
