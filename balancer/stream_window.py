"""This rank's part of a window: its lanes read ahead, their headers scanned, and every sample made ready to travel.

    lanes of this rank --take(quota)--> samples --scan_rows--> rows [k, C]   (what all ranks hear of)
                                                  to_bytes --> payloads [k]  (what the rank that runs them receives)

    payload = row of the sample table | rows of its media in the item table | RawSample    (all sizes follow from rows)

The index rows travel with the sample, so the destination probes no header again: it opens a small index in memory and
reads samples as from any other source. Bad samples and samples above the capacities are rows without a payload, and are
listed with place and reason. Nothing here needs torch or another rank; it runs in a thread beside training.

Price: encoded samples of a window are held once where they are read, and once more where they go; scanning is Python
that shares the interpreter with training.
"""

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from threading import Event
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from balancer.counts import COUNT_COLUMNS, Int64Array, StepCounts
from balancer.select import eligible_ids
from balancer.stream_plan import DRY, ROW_COLUMNS, StreamDropped, WindowOptions
from dataloaders.errors import DataError, Reason, RecordError
from dataloaders.estimators import TokenEstimator
from dataloaders.index import ITEM_COLUMNS, SAMPLE_COLUMNS, CostIndex
from dataloaders.raw_sample import BadRecord, MemorySource, RawSample
from dataloaders.sample import check_loadable
from dataloaders.scan_rows import ScanOptions, raise_unfit, scan_rows
from dataloaders.stream_source import StreamItem, StreamSource, stream_sample_id

_SAMPLE_ROW = np.dtype([(name, np.dtype(dtype).newbyteorder("<")) for name, dtype in SAMPLE_COLUMNS.items()])
_ITEM_ROW = np.dtype([(name, np.dtype(dtype).newbyteorder("<")) for name, dtype in ITEM_COLUMNS.items()])


@dataclass(frozen=True, slots=True, kw_only=True)
class LaneTake:
    """What a lane gave to a window: (position, sample) pairs, and the cursor to go on from (`DRY`: it has ended)."""

    lane: int
    items: tuple[tuple[int, StreamItem], ...]
    cursor: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RankWindow:
    """This rank's samples of a window.

    Attributes:
        rows: int64 [k, C], see `ROW_COLUMNS`.
        payloads: [k], b"" for a row that is not usable.
        cursors: lane -> cursor behind the window.
        dropped: the rows that are not usable.
    """

    rows: Int64Array
    payloads: tuple[bytes, ...]
    cursors: dict[int, int]
    dropped: tuple[StreamDropped, ...]

    @classmethod
    def empty(cls) -> "RankWindow":
        """No row of no lane."""
        return cls(rows=np.zeros((0, len(ROW_COLUMNS)), dtype=np.int64), payloads=(), cursors={}, dropped=())


class LaneReaders:
    """Open lanes of one rank, read side by side.

    Args:
        lanes: those of this rank.
        threads: lanes that are read at once.
    """

    def __init__(self, source: StreamSource, lanes: Sequence[int], *, threads: int = 4) -> None:
        self._source, self._lanes = source, tuple(lanes)
        self._open: dict[int, tuple[int, Iterator[tuple[int, StreamItem]]]] = {}
        self._stopped = Event()
        self._pool = ThreadPoolExecutor(max(1, min(threads, len(self._lanes))), thread_name_prefix="stream-lane")

    def take(self, cursors: Sequence[int], *, samples: int, max_bytes: int) -> list[LaneTake]:
        """The next window of every lane, from `cursors` (of all lanes of the stream) on.

        A lane that stands at its cursor is read on; another one is opened there.

        Raises:
            OSError, DataError: as the stream does; of the first lane that fails.
        """
        futures = [
            self._pool.submit(self._take, lane, cursors[lane], samples=samples, max_bytes=max_bytes)
            for lane in self._lanes
        ]
        return [future.result() for future in futures]

    def stop(self) -> None:
        """Let a `take` that is under way end after the sample it reads; nothing can be taken any more."""
        self._stopped.set()

    def close(self) -> None:
        """Stop reading and release what the lanes hold."""
        self.stop()
        self._pool.shutdown(wait=True, cancel_futures=True)
        for lane in list(self._open):
            self._close(lane)

    def _take(self, lane: int, cursor: int, *, samples: int, max_bytes: int) -> LaneTake:
        if cursor == DRY:
            self._close(lane)
            return LaneTake(lane=lane, items=(), cursor=DRY)
        at, iterator = self._open.pop(lane, (-1, iter(())))
        if at != cursor:
            _close(iterator)
            iterator = self._source.read(lane, cursor)
        items: list[tuple[int, StreamItem]] = []
        used = 0
        try:
            while len(items) < samples and used < max_bytes and not self._stopped.is_set():
                following = next(iterator, None)
                if following is None:
                    _close(iterator)
                    return LaneTake(lane=lane, items=tuple(items), cursor=DRY)
                position, item = following
                if position < cursor:
                    raise DataError(
                        f"lane {lane} gives position {position} where {cursor} or a later one comes next",
                        place=type(self._source).__name__,
                        remedy="This is a fault of the stream: positions ascend, and reading starts at the cursor.",
                    )
                items.append((position, item))
                cursor, used = position + 1, used + _encoded_bytes(item)
        except BaseException:
            _close(iterator)
            raise
        self._open[lane] = (cursor, iterator)
        return LaneTake(lane=lane, items=tuple(items), cursor=cursor)

    def _close(self, lane: int) -> None:
        if lane in self._open:
            _close(self._open.pop(lane)[1])


def _close(iterator: Iterator[tuple[int, StreamItem]]) -> None:
    close = getattr(iterator, "close", None)
    if close is not None:
        with suppress(Exception):  # what a stream says while it is put away is of no use any more
            close()


def _encoded_bytes(item: StreamItem) -> int:
    return sum(map(len, item.media)) + 1024 if isinstance(item, RawSample) else 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowScanner:
    """How samples become rows and payloads; the same on every rank.

    Attributes:
        lanes: of the whole stream.
        source: its fingerprint.
    """

    lanes: int
    source: str
    estimator: TokenEstimator
    scan: ScanOptions
    options: WindowOptions

    @property
    def fingerprint(self) -> str:
        """Of all that decides which samples a step holds."""
        return self.options.selection_fingerprint(self.source, repr(self.scan.key(self.source, self.estimator)))

    def rows(self, takes: Sequence[LaneTake]) -> RankWindow:
        """Scan what the lanes gave.

        Raises:
            DataError: a sample can be costed but not loaded; or media are unfit under unfit=error, listing them.
        """
        placed = [(take.lane, position, item) for take in takes for position, item in take.items]
        blobs, items = _blobs([item for _, _, item in placed])
        index = scan_rows(MemorySource(items, fingerprint="window"), self.estimator, self.scan)
        raise_unfit(index)
        check_loadable(self.estimator, index)
        left_out = eligible_ids(index, self.options.capacities, oversize="drop").dropped
        reasons = {drop.sample_id: drop.reason for drop in left_out}
        payloads = [b"" if i in reasons else payload for i, payload in enumerate(_payloads(index, blobs))]
        counts = StepCounts.from_index(index, range(len(index)))
        table = np.zeros((len(index), len(ROW_COLUMNS)), dtype=np.int64)
        for number, (lane, position, _) in enumerate(placed):
            table[number, :4] = lane, position, number not in reasons, len(payloads[number])
        for column, name in enumerate(COUNT_COLUMNS, start=4):
            table[:, column] = getattr(counts, name)
        messages = {bad.sample_id: (bad.place, bad.message) for bad in index.bad}
        dropped = tuple(
            StreamDropped(
                sample_id=stream_sample_id(*placed[i][:2], lanes=self.lanes),
                place=messages[i][0] if i in messages else f"shard {index.shard(i)}, key {index.keys(i)}",
                reason=reason,
                message=messages[i][1] if i in messages else reason,
            )
            for i, reason in reasons.items()
        )
        return RankWindow(
            rows=table,
            payloads=tuple(payloads),
            cursors={take.lane: take.cursor for take in takes},
            dropped=dropped,
        )

    def unpack(self, payloads: Sequence[bytes | bytearray | memoryview]) -> tuple[MemorySource, CostIndex]:
        """(source, index) of samples that have arrived; sample i of both is payload i.

        Raises:
            DataError: a payload is damaged.
        """
        parts = [_split(payload) for payload in payloads]
        samples = np.concatenate([np.zeros(0, dtype=_SAMPLE_ROW), *(sample for sample, _, _ in parts)])
        items = np.concatenate([np.zeros(0, dtype=_ITEM_ROW), *(rows for _, rows, _ in parts)])
        raw = [sample for _, _, sample in parts]
        index = CostIndex(
            key=self.scan.key(self.source, self.estimator),
            samples={name: samples[name].astype(dtype) for name, dtype in SAMPLE_COLUMNS.items()},
            items={name: items[name].astype(dtype) for name, dtype in ITEM_COLUMNS.items()},
            names=pa.table(
                {
                    "shard": pa.array([sample.record.shard for sample in raw], pa.string()),
                    "key": pa.array([sample.record.key for sample in raw], pa.string()),
                }
            ),
            bad=[],
            reasons=[""],
        )
        return MemorySource(raw, fingerprint=self.source), index


def _blobs(items: Sequence[StreamItem]) -> tuple[list[bytes], list[StreamItem]]:
    """(bytes of every sample, samples); one that cannot travel is a bad record from here on."""
    blobs: list[bytes] = []
    kept: list[StreamItem] = []
    for item in items:
        blob, made = b"", item
        if isinstance(item, RawSample):
            try:
                blob = item.to_bytes()
            except DataError as error:
                reason = RecordError(Reason.BAD_RECORD, error.cause, place=error.place, remedy=error.remedy)
                made = BadRecord(place=item.record.place, error=reason)
        blobs.append(blob)
        kept.append(made)
    return blobs, kept


def _payloads(index: CostIndex, blobs: Sequence[bytes]) -> list[bytes]:
    samples = _records(index.samples, _SAMPLE_ROW, len(index))
    items = _records(index.items, _ITEM_ROW, int(index.item_offsets[-1]))
    bounds = index.item_offsets
    return [
        b"".join([samples[i : i + 1].tobytes(), items[bounds[i] : bounds[i + 1]].tobytes(), blob])
        for i, blob in enumerate(blobs)
    ]


def _records(columns: Mapping[str, NDArray[Any]], dtype: np.dtype[np.void], count: int) -> NDArray[np.void]:
    rows = np.zeros(count, dtype=dtype)
    for name in dtype.names or ():
        rows[name] = columns[name]
    return rows


def _split(payload: bytes | bytearray | memoryview) -> tuple[NDArray[np.void], NDArray[np.void], RawSample]:
    """(row of the sample [1], rows of its media [m], sample)."""
    view = memoryview(payload)
    start = _SAMPLE_ROW.itemsize
    if len(view) < start:
        raise DataError(f"a payload of {len(view)} bytes is no sample", remedy="Start again from the last state.")
    sample = np.frombuffer(view[:start], dtype=_SAMPLE_ROW)
    num_items = int(sample["num_items"][0])
    stop = start + num_items * _ITEM_ROW.itemsize
    if num_items < 0 or stop > len(view):
        raise DataError(f"a payload of {len(view)} bytes cannot hold {num_items} media", remedy="Start again.")
    raw = RawSample.from_bytes(view[stop:])
    if len(raw.media) != num_items:
        raise DataError(f"a payload holds {len(raw.media)} media and rows of {num_items}", remedy="Start again.")
    return sample, np.frombuffer(view[start:stop], dtype=_ITEM_ROW), raw
