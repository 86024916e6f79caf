"""Reading a remote file from front to back without waiting for every block: for passes over headers.

    reads          |h|....|h|....|h|           small members: the blocks ahead are fetched side by side
    blocks     [   0   ][   1   ][   2   ] ...
    reads          |h|.............................|h|      a jump over `jump_bytes`: a small read there, no blocks

Price: where reads are less than `jump_bytes` apart, the file is fetched whole; where they jump, each costs one request
of `window_bytes` and one round trip. Memory: blocks_ahead + 2 blocks.
"""

from concurrent.futures import Future
from typing import Protocol, runtime_checkable

from dataloaders.storage.base import MIB, StoredFile


@runtime_checkable
class _Starts(Protocol):
    """A file that can begin fetching."""

    def start(self, offset: int, size: int) -> "Future[bytes]": ...


class ReadAhead:
    """Ranges of a file that are read about in order; local files are read as they are. For one thread.

    Args:
        file: open file.
        block_bytes: of one request.
        blocks_ahead: requests under way beyond the block that is read, once reads have been in order for a while.
        jump_bytes: reads that are further apart are not in order.
        window_bytes: fetched at the target of a jump.
    """

    def __init__(
        self,
        file: StoredFile,
        *,
        block_bytes: int = MIB // 2,
        blocks_ahead: int = 8,
        jump_bytes: int = MIB,
        window_bytes: int = 8192,
    ) -> None:
        self._file, self._remote = file, file if isinstance(file, _Starts) else None
        self._block_bytes, self._blocks_ahead = block_bytes, blocks_ahead
        self._jump_bytes, self._window_bytes = jump_bytes, window_bytes
        self._blocks: dict[int, Future[bytes]] = {}
        self._window: tuple[int, bytes] = (0, b"")
        self._reached = self._depth = 0
        self._last = -1

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self._file.size

    def read(self, offset: int, size: int) -> bytes:
        """Bytes [offset, offset + size), fewer at the end of the file.

        Raises:
            SourceError: as `StoredFile.read`.
        """
        end = min(offset + size, self.size)
        if offset >= end:
            return b""
        if self._remote is None:
            return self._file.read(offset, end - offset)
        start, data = self._window
        if start <= offset and end <= start + len(data):
            self._reached = max(self._reached, end)
            return data[offset - start : end - start]
        in_order = 0 <= offset - self._reached <= self._jump_bytes or self._has(offset, end)
        self._reached = end
        if not in_order:
            return self._jump(offset, end)
        parts = []
        while offset < end:
            number = offset // self._block_bytes
            block, first = self._block(self._remote, number), number * self._block_bytes
            parts.append(block[offset - first : end - first])
            offset = min(first + self._block_bytes, end)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def close(self) -> None:
        """Cancel what is under way."""
        for future in self._blocks.values():
            future.cancel()
        self._blocks.clear()

    def _has(self, offset: int, end: int) -> bool:
        first, last = offset // self._block_bytes, (end - 1) // self._block_bytes
        return all(number in self._blocks for number in range(first, last + 1))

    def _jump(self, offset: int, end: int) -> bytes:
        """Bytes at the target of a jump; blocks are given up until reads are in order again."""
        self.close()
        self._depth, self._last = 0, -1
        length = min(max(self._window_bytes, end - offset), self.size - offset)
        data = self._file.read(offset, length)
        self._window = (offset, data)
        return data[: end - offset]

    def _block(self, remote: _Starts, number: int) -> bytes:
        """Block `number`; those behind it are begun, ever more of them, and those before it are given up."""
        if number != self._last:
            if self._last >= 0:
                self._depth = min(max(self._depth * 2, 1), self._blocks_ahead)
            self._last = number
        for old in [old for old in self._blocks if old < number - 1]:
            self._blocks.pop(old).cancel()
        for ahead in range(number, number + 1 + self._depth):
            first = ahead * self._block_bytes
            if ahead not in self._blocks and first < self.size:
                self._blocks[ahead] = remote.start(first, min(self._block_bytes, self.size - first))
        try:
            return self._blocks[number].result()
        except BaseException:
            self.close()
            raise
