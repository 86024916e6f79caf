"""One rank's part of a window: bounded look-ahead, rows as an index has them, and payloads that arrive whole."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from balancer.cost_model import CostModel
from balancer.counts import COUNT_COLUMNS, StepCounts
from balancer.plan import Capacities
from balancer.stream_plan import DRY, ROW_COLUMNS, WindowOptions
from balancer.stream_window import LaneReaders, RankWindow, WindowScanner
from dataloaders.errors import DataError, Reason, RecordError
from dataloaders.estimators import Qwen25VLEstimator
from dataloaders.index import ITEM_COLUMNS, SAMPLE_COLUMNS
from dataloaders.raw_sample import BadRecord, RawSample
from dataloaders.record import Record, TextPart, Turn
from dataloaders.scan import scan_source
from dataloaders.scan_rows import ScanOptions
from dataloaders.stream_source import IterableStream, StreamItem
from dataloaders.tar_source import TarSource
from dataloaders.tar_stream import TarStream

PlainModel = Callable[[int], CostModel]


def sample(text: str, key: str = "k", **extra: object) -> RawSample:
    turns = (Turn(role="user", parts=(TextPart("?"),)), Turn(role="assistant", parts=(TextPart(text),)))
    return RawSample(Record(shard="s", key=key, turns=turns, extra=extra))


class Lanes:
    """A stream of given items that counts how far each lane was read, and which iterators were closed."""

    fingerprint = "lanes"

    def __init__(self, lanes: list[list[StreamItem | Exception]]) -> None:
        self._items, self.lanes = lanes, len(lanes)
        self.read_until = [0] * len(lanes)
        self.opened: list[tuple[int, int]] = []
        self.closed: list[int] = []

    def read(self, lane: int, cursor: int) -> Iterator[tuple[int, StreamItem]]:
        self.opened.append((lane, cursor))
        try:
            for position in range(cursor, len(self._items[lane])):
                item = self._items[lane][position]
                if isinstance(item, Exception):
                    raise item
                self.read_until[lane] = max(self.read_until[lane], position + 1)
                yield position, item
        finally:
            self.closed.append(lane)


@pytest.fixture
def scanner(plain_model: PlainModel) -> WindowScanner:
    return WindowScanner(
        lanes=2,
        source="source",
        estimator=Qwen25VLEstimator(),
        scan=ScanOptions(),
        options=WindowOptions(global_batch_size=4, capacities=Capacities(tokens=5000), cost_model=plain_model(2)),
    )


def test_a_lane_gives_its_quota_and_is_read_on_without_being_opened_again() -> None:
    source = Lanes([[sample(str(k)) for k in range(5)], [sample("only")]])
    readers = LaneReaders(source, [0, 1])
    first = readers.take((0, 0), samples=2, max_bytes=10**9)
    assert [(take.lane, len(take.items), take.cursor) for take in first] == [(0, 2, 2), (1, 1, DRY)]
    assert source.read_until[0] == 2
    second = readers.take((2, DRY), samples=2, max_bytes=10**9)
    assert [(len(take.items), take.cursor) for take in second] == [(2, 4), (0, DRY)]
    third = readers.take((4, DRY), samples=2, max_bytes=10**9)
    assert [(len(take.items), take.cursor) for take in third] == [(1, DRY), (0, DRY)]
    assert source.opened == [(0, 0), (1, 0)]
    readers.close()
    assert sorted(source.closed) == [0, 1]


def test_another_cursor_opens_the_lane_there_and_closes_what_was_open() -> None:
    source = Lanes([[sample(str(k)) for k in range(5)]])
    readers = LaneReaders(source, [0])
    readers.take((0,), samples=2, max_bytes=10**9)
    (take,) = readers.take((1,), samples=1, max_bytes=10**9)
    assert [position for position, _ in take.items] == [1]
    assert source.opened == [(0, 0), (0, 1)]
    assert source.closed == [0]
    readers.close()


def test_look_ahead_is_bounded_in_bytes_and_one_large_sample_still_passes() -> None:
    source = Lanes([[sample("x", extra_text="y") for _ in range(50)]])
    readers = LaneReaders(source, [0])
    (take,) = readers.take((0,), samples=100, max_bytes=4096)
    assert len(take.items) == 4
    (take,) = readers.take((4,), samples=100, max_bytes=1)
    assert len(take.items) == 1
    readers.close()


def test_an_error_of_a_lane_is_raised_and_nothing_stays_open() -> None:
    source = Lanes([[sample("a"), OSError("the disk is gone")], [sample("b")]])
    readers = LaneReaders(source, [0, 1])
    with pytest.raises(OSError, match="the disk is gone"):
        readers.take((0, 0), samples=5, max_bytes=10**9)
    readers.close()
    assert 0 in source.closed
    assert sorted(source.closed) == sorted(lane for lane, _ in source.opened)


def test_a_stream_that_goes_back_is_a_fault_and_no_repetition() -> None:
    class Back(Lanes):
        def read(self, lane: int, cursor: int) -> Iterator[tuple[int, StreamItem]]:
            yield 5, sample("a")
            yield 3, sample("b")

    readers = LaneReaders(Back([[]]), [0])
    with pytest.raises(DataError, match="gives position 3 where 6 or a later one comes next"):
        readers.take((0,), samples=5, max_bytes=10**9)
    readers.close()


def test_closing_ends_a_reading_that_is_under_way() -> None:
    going, stopped = threading.Event(), threading.Event()

    def endless() -> Iterator[RawSample]:
        while True:
            going.set()
            yield sample("x")

    readers = LaneReaders(IterableStream([endless]), [0])

    def take() -> None:
        readers.take((0,), samples=10**9, max_bytes=10**15)
        stopped.set()

    thread = threading.Thread(target=take, daemon=True)
    thread.start()
    assert going.wait(30)
    readers.close()
    thread.join(30)
    assert stopped.is_set()


def test_rows_and_payloads_are_what_an_index_of_the_same_tar_says(small_shard: Path, scanner: WindowScanner) -> None:
    stream, source = TarStream(str(small_shard)), TarSource(str(small_shard))
    readers = LaneReaders(stream, [0])
    window = scanner.rows(readers.take((0,), samples=10, max_bytes=10**9))
    readers.close()
    index = scan_source(source, scanner.estimator)
    counts = StepCounts.from_index(index, range(len(index)))
    assert window.dropped == ()
    assert window.cursors == {0: DRY}
    assert window.rows[:, 1].tolist() == list(range(6))
    for column, name in enumerate(COUNT_COLUMNS, start=4):
        np.testing.assert_array_equal(window.rows[:, column], getattr(counts, name))
    assert window.rows[:, 3].tolist() == [len(payload) for payload in window.payloads]
    order = [4, 0, 5, 3]
    memory, arrived = scanner.unpack([memoryview(window.payloads[i]) for i in order])
    for name in SAMPLE_COLUMNS:
        np.testing.assert_array_equal(arrived.samples[name], index.samples[name][order])
    for here, i in enumerate(order):
        rows, there = arrived.item_rows(here), index.item_rows(i)
        for name in ITEM_COLUMNS:
            np.testing.assert_array_equal(
                arrived.items[name][rows.start : rows.stop], index.items[name][there.start : there.stop]
            )
        assert memory.record(here).turns == source.record(i).turns
        assert arrived.keys(here) == index.keys(i)


def test_bad_and_oversize_samples_are_rows_without_a_payload(scanner: WindowScanner) -> None:
    error = RecordError(Reason.CORRUPT, "broken", place="shard s, key 1")
    items: list[StreamItem | Exception] = [
        sample("fine"),
        BadRecord(place="shard s, key 1", error=error),
        sample("x" * 300, key="large"),
        sample("odd", key="odd", raw=b"bytes"),
    ]
    bounded = replace(scanner, options=replace(scanner.options, capacities=Capacities(tokens=200)))
    readers = LaneReaders(Lanes([items, []]), [0, 1])
    window = bounded.rows(readers.take((0, 0), samples=10, max_bytes=10**9))
    readers.close()
    assert window.rows[:, 2].tolist() == [1, 0, 0, 0]
    assert [bool(payload) for payload in window.payloads] == [True, False, False, False]
    assert window.rows[1:, 3].tolist() == [0, 0, 0]
    reasons = [drop.reason for drop in window.dropped]
    assert reasons[0] == "unusable: corrupt"
    assert reasons[1].startswith("oversize: 3")
    assert reasons[2] == "unusable: bad_record"
    assert "key odd" in window.dropped[2].place
    assert "a value is a bytes" in window.dropped[2].message


def test_a_damaged_payload_is_an_error(scanner: WindowScanner) -> None:
    readers = LaneReaders(Lanes([[sample("a")]]), [0])
    window = scanner.rows(readers.take((0,), samples=1, max_bytes=10**9))
    readers.close()
    (payload,) = window.payloads
    for broken in (payload[:10], payload[:-1], payload + b"x"):
        with pytest.raises(DataError):
            scanner.unpack([broken])
    assert len(scanner.unpack([])[1]) == 0


def test_a_rank_without_lanes_has_an_empty_part(scanner: WindowScanner) -> None:
    readers = LaneReaders(Lanes([[sample("a")]]), [])
    window = scanner.rows(readers.take((0,), samples=1, max_bytes=10**9))
    readers.close()
    assert window.rows.shape == RankWindow.empty().rows.shape == (0, len(ROW_COLUMNS))
    assert window.cursors == {}
