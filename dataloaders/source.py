"""What a data set has to offer to be indexed, planned and read: random access by sample id."""

from typing import Protocol, runtime_checkable

from dataloaders.probe.reader import ByteReader
from dataloaders.record import Record


@runtime_checkable
class SampleSource(Protocol):
    """Samples 0 .. len - 1, in a fixed order.

    A source is picklable and opens its files lazily in the process that reads: it travels to loader workers.
    `record` raises `RecordError` for a record that does not parse; failing storage raises `OSError` or `SourceError`.
    """

    @property
    def fingerprint(self) -> str:
        """Hex or other short text that changes when samples, their order or their sizes change."""
        ...

    def __len__(self) -> int:
        """Number of samples."""
        ...

    def record(self, i: int) -> Record:
        """Sample `i`, parsed; its media are in the order of their placeholders."""
        ...

    def media_reader(self, i: int, j: int) -> ByteReader:
        """Ranges of medium `j` of sample `i`, for header probing."""
        ...

    def media_bytes(self, i: int, j: int) -> bytes:
        """All encoded bytes of medium `j` of sample `i`."""
        ...

    def place(self, i: int) -> str:
        """Where sample `i` lies, for messages."""
        ...
