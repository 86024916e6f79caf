"""Data that can only be read from front to back: what a stream offers, and streams over iterables.

    lane 0   part 0 [s0 s1 s2 ...]  part 1 [...]     a lane is a sub-stream with an order of its own (every k-th shard);
    lane 1   part 0 [s0 s1 ...]     part 1 [...]     its parts are read one after another
      |
      +-- read(lane, cursor) --> (position, sample), (position, sample), ...      position = part << 32 | number in part

The number of lanes belongs to the stream, not to the job: any number of ranks reads the same lanes, so what is read
does not depend on the world. A cursor is a position to go on from; `position + 1` always is one, also behind the end of
a part. Price: no random access. Going on inside a part reads that part from its start (of a plain tar the headers
alone), so a resume costs one part per lane at most, and a part is as small as the shards are.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Protocol, TypeAlias, runtime_checkable

from dataloaders.errors import DataError, MediaError, Reason, RecordError
from dataloaders.probe.limits import ProbeLimits
from dataloaders.raw_sample import BadRecord, RawSample
from dataloaders.record_parser import RecordLimits
from dataloaders.row_media import InlineMedium
from dataloaders.rows import RowFields, RowParser

PART_BITS = 32
MAX_PARTS = 2**30  # of all lanes together: sample ids stay below 2^62
DEFAULT_LANES = 16

StreamItem: TypeAlias = RawSample | BadRecord
ToSample: TypeAlias = Callable[[Any, str, str], RawSample]
"""(row, shard, key) -> sample; raises RecordError or MediaError for a row that cannot be one."""


@runtime_checkable
class StreamSource(Protocol):
    """Samples in lanes, each read from front to back.

    A stream may be read again, by any process, with the same result. Failing storage raises `OSError` or `SourceError`
    from the iterator; closing the iterator releases what it holds (handles, connections, processes).
    """

    @property
    def fingerprint(self) -> str:
        """Hex or other short text that changes when lanes or their order change."""
        ...

    @property
    def lanes(self) -> int:
        """Number of lanes, the same for any number of ranks."""
        ...

    def read(self, lane: int, cursor: int) -> Iterator[tuple[int, StreamItem]]:
        """(position, sample) of the lane's samples from the first with `position >= cursor` on, positions ascending.

        A sample that does not parse is a `BadRecord` at its position: never left out, never an error of the stream.
        """
        ...


def position_of(part: int, number: int) -> int:
    """Position of sample `number` of part `part` of a lane."""
    return part << PART_BITS | number


def part_of(position: int) -> tuple[int, int]:
    """(part, number) of a position or cursor."""
    return position >> PART_BITS, position & (1 << PART_BITS) - 1


def stream_sample_id(lane: int, position: int, *, lanes: int) -> int:
    """The id of a sample in plans and ledgers, below 2^62: unique in the stream, whoever reads it.

    Part p of lane l is shard p * lanes + l, so the id is (shard, number in the shard) where lanes deal out shards.
    """
    part, number = part_of(position)
    return (part * lanes + lane) << PART_BITS | number


def lane_of(sample_id: int, *, lanes: int) -> tuple[int, int]:
    """(lane, position): the inverse of `stream_sample_id`."""
    shard, number = sample_id >> PART_BITS, sample_id & (1 << PART_BITS) - 1
    part, lane = divmod(shard, lanes)
    return lane, position_of(part, number)


class RowToSample:
    """A row as `dataloaders.rows` reads it, with its media in the row itself.

    Media that are named (a path, a URL) are not followed: a stream has one order of reading, and files beside it have
    another. Such rows are bad records with a reason.
    """

    def __init__(
        self,
        *,
        fields: RowFields | None = None,
        limits: RecordLimits | None = None,
        media_limits: ProbeLimits | None = None,
    ) -> None:
        self._parser = RowParser(
            fields=fields or RowFields(),
            limits=limits or RecordLimits(),
            media_limits=media_limits or ProbeLimits(),
        )

    def __call__(self, row: Any, shard: str, key: str) -> RawSample:
        """The sample. Raises RecordError or MediaError."""
        if not isinstance(row, Mapping):
            raise RecordError(
                Reason.BAD_RECORD,
                f"a row is a {type(row).__name__}, not a mapping",
                place=f"shard {shard}, key {key}",
                remedy="Give `to_sample` to make samples of such rows.",
            )
        parsed = self._parser.parse(row, _refuse_reference, shard=shard, key=key)
        return RawSample(
            parsed.record, tuple(medium.data for medium in parsed.media if isinstance(medium, InlineMedium))
        )


def _refuse_reference(reference: str, place: str) -> int:
    raise RecordError(
        Reason.MISSING_MEDIA,
        f"the row names a medium ({reference[:80]!r}) and does not hold it",
        place=place,
        remedy="Open such data with an index (JsonlSource, ParquetSource), or give `to_sample` to fetch it.",
    )


def sample_or_bad(to_sample: ToSample, row: Any, shard: str, key: str) -> StreamItem:
    """The row as a sample; as a `BadRecord` where it cannot be one."""
    try:
        return row if isinstance(row, RawSample) else to_sample(row, shard, key)
    except (RecordError, MediaError) as error:
        return BadRecord(place=error.place or f"shard {shard}, key {key}", error=error)


class IterableStream:
    """Rows of re-iterables, a lane each (a `StreamSource`).

    Args:
        lanes: for each lane a re-iterable (a list, a dataset), or a function that returns a new iterator each time.
        to_sample: makes a sample of a row; None: `RowToSample()`. Rows that are `RawSample`s already stay as they are.
        fingerprint: name of the data; a state is only taken up by a stream of the same name.

    Raises:
        DataError: no lane, or one that can be read only once.
    """

    def __init__(
        self,
        lanes: Sequence[Iterable[Any] | Callable[[], Iterator[Any]]],
        *,
        to_sample: ToSample | None = None,
        fingerprint: str = "iterable",
    ) -> None:
        if not lanes:
            raise DataError(
                "a stream has at least one lane", place="IterableStream", remedy="Give one iterable or more."
            )
        for number, lane in enumerate(lanes):
            if isinstance(lane, Iterator):
                raise DataError(
                    f"lane {number} is a {type(lane).__name__}, which can be read only once",
                    place="IterableStream",
                    remedy="Give what starts anew: a list, a dataset, or a function that returns an iterator.",
                )
        self._lanes, self._to_sample = tuple(lanes), to_sample or RowToSample()
        text = f"iterable-stream-1\n{len(self._lanes)}\n{fingerprint}"
        self.fingerprint = hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()

    @property
    def lanes(self) -> int:
        """Number of lanes."""
        return len(self._lanes)

    def read(self, lane: int, cursor: int) -> Iterator[tuple[int, StreamItem]]:
        """Rows of the lane from number `cursor` on; of a sequence the earlier ones are not touched."""
        rows = self._lanes[lane]
        if isinstance(rows, Sequence):
            numbered: Iterator[Any] = (rows[number] for number in range(cursor, len(rows)))
        else:
            numbered = islice(iter(rows() if callable(rows) else rows), cursor, None)
        for number, row in enumerate(numbered, start=cursor):
            yield number, sample_or_bad(self._to_sample, row, f"lane {lane}", str(number))


class HFStream:
    """A streaming dataset of `datasets` (an `IterableDataset`) without decoding, a part for each of its shards.

    Every shard is opened on its own and skipped to its cursor, so state is ours: neither the dataset's state nor a
    shuffle buffer, which loses its content at every resume, is involved. Our windows shuffle instead.

    Args:
        dataset: neither shuffled by a buffer nor split by node; maps and filters are welcome if they are deterministic.
        lanes: None: as many as it has shards, at most 16.
        to_sample: as in `IterableStream`.
        name: of the data, for the fingerprint; None: what the dataset says of itself.

    Raises:
        DataError: a dataset that is shuffled or split already, or no such dataset.
    """

    def __init__(
        self, dataset: Any, *, lanes: int | None = None, to_sample: ToSample | None = None, name: str | None = None
    ) -> None:
        for needed in ("num_shards", "shard", "skip", "decode"):
            if not hasattr(dataset, needed):
                raise DataError(
                    f"a {type(dataset).__name__} is no streaming dataset: it has no `{needed}`",
                    place="HFStream",
                    remedy="Load it with streaming=True, with datasets >= 4.",
                )
        _refuse_reordered(dataset)
        # Media stay encoded: they are probed from their headers and decoded by the rank that trains on them. Without
        # features (a generator) nothing would be decoded, and `decode` raises.
        self._dataset = dataset.decode(False) if dataset.features else dataset
        self._to_sample = to_sample or RowToSample()
        self._num_shards = int(dataset.num_shards)
        self.lanes = checked_lanes(lanes, self._num_shards, "HFStream")
        said = name or f"{getattr(dataset, 'builder_name', None)}/{dataset.config_name}/{dataset.split}"
        self._name = said
        text = f"hf-stream-1\n{self.lanes}\n{self._num_shards}\n{said}"
        self.fingerprint = hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()

    def read(self, lane: int, cursor: int) -> Iterator[tuple[int, StreamItem]]:
        """Rows of the lane's shards from `cursor` on."""
        first, skipped = part_of(cursor)
        for part, shard in enumerate(range(lane, self._num_shards, self.lanes)):
            if part < first:
                continue
            start = skipped if part == first else 0
            rows = self._dataset.shard(num_shards=self._num_shards, index=shard)
            for number, row in enumerate(rows.skip(start) if start else rows, start=start):
                item = sample_or_bad(self._to_sample, row, f"{self._name}, shard {shard}", str(number))
                yield position_of(part, number), item


def _refuse_reordered(dataset: Any) -> None:
    """Raise DataError for a dataset whose order or share is decided inside it."""
    layer, seen = getattr(dataset, "_ex_iterable", None), 0
    reason = "is split by node already" if getattr(dataset, "_distributed", None) else ""
    while layer is not None and seen < 100 and not reason:
        if "Shuffled" in type(layer).__name__:
            reason = "shuffles with a buffer, whose content is lost at every resume"
        layer, seen = getattr(layer, "ex_iterable", None), seen + 1
    if reason:
        raise DataError(
            f"the dataset {reason}",
            place="HFStream",
            remedy="Leave out .shuffle() and split_dataset_by_node: windows are shuffled, lanes are dealt out here.",
        )


def checked_lanes(lanes: int | None, num_parts: int, place: str) -> int:
    """The number of lanes to read `num_parts` parts in."""
    if lanes is not None and lanes < 1:
        raise DataError(f"lanes={lanes}: a stream has at least one", place=place, remedy="Leave it out, or give more.")
    if num_parts > MAX_PARTS:
        raise DataError(f"{num_parts} shards, at most {MAX_PARTS} can be numbered", place=place)
    return max(1, min(lanes or DEFAULT_LANES, num_parts))
