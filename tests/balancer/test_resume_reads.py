"""What a resume reads of ledger and records: the head and what follows the checkpoint, unless its marks do not fit."""

import io
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.errors import LedgerError, RecordFormatError
from balancer.ledger import LedgerMark, LedgerWriter, ids_digest, read_lines
from balancer.ledger_lines import RunLine, StartLine, StepLine
from balancer.records import RecordWriter, StepRecord, read_records

NUM_STEPS, NUM_BEYOND = 100_000, 7
READ_AHEAD_BYTES = 3 * 2**18  # what opening a file and seeking in it twice may read ahead
RUN = RunLine(
    index="aaaa",
    source="bbbb",
    index_folder="",
    data="a.tar",
    num_samples=10,
    num_ids=10,
    ids_digest=ids_digest(range(10)),
    seed=3,
    global_batch_size=2,
    shuffle="full",
    block_shards=16,
)


def line(step: int, number: int = 0) -> StepLine:
    return StepLine(step=step, epoch=0, cursor=2 * step - 2, start=number, ids=((2 * step,), (2 * step + 1,)))


def record(step: int) -> StepRecord:
    return StepRecord(
        step=step,
        epoch=0,
        loss=2.5,
        lr=1e-3,
        grad_norm=0.7,
        label_tokens=10,
        llm_tokens=30,
        useful_tokens_per_s=100.0,
        executed_tokens_per_s=120.0,
        step_ms=250.0,
        data_wait_ms=1.5,
    )


def start(
    path: Path, step: int, until: int, *, saves: int = 0, mark: LedgerMark | None = None, run: RunLine = RUN
) -> tuple[StartLine, LedgerMark]:
    """A start that goes on from `step`, executes steps up to `until` and is killed; the mark of its last save."""
    with LedgerWriter(path, run, step=step, world_size=2, dp_size=2, mark=mark) as writer:
        saved = writer.mark
        for number in range(step + 1, until + 1):
            writer.write(line(number, writer.start.number))
            saved = writer.mark if number == saves else saved
        return writer.start, saved


@pytest.fixture
def ledger(tmp_path: Path) -> tuple[Path, LedgerMark]:
    """Seven steps of two starts, with the mark of step 5."""
    path = tmp_path / "ledger.jsonl"
    _, mark = start(path, 0, 4, saves=3)
    return path, start(path, 3, 7, saves=5, mark=mark)[1]


@pytest.fixture
def records(tmp_path: Path) -> tuple[Path, int]:
    """Records of five steps, and where that of step 3 begins."""
    path = tmp_path / "steps.jsonl"
    with RecordWriter(path) as writer:
        for step in (1, 2, 3):
            writer.write(record(step))
        begin = writer.last_record
        for step in (4, 5):
            writer.write(record(step))
    assert begin is not None
    return path, begin


@contextmanager
def bytes_read(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Sizes of all reads from files that are opened meanwhile with `Path.open` for binary reading."""
    sizes: list[int] = []

    class Counted(io.FileIO):
        def readinto(self, buffer: Any) -> int | None:
            sizes.append(super().readinto(buffer) or 0)
            return sizes[-1]

        def readall(self) -> bytes:
            content = super().readall()
            sizes.append(len(content))
            return content

    plain = Path.open

    def counting(self: Path, mode: str = "r", *args: Any, **options: Any) -> Any:
        if mode == "rb":
            return io.BufferedReader(Counted(self))
        return plain(self, mode, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", counting)
        yield sizes


def test_a_resume_at_step_100_000_reads_the_head_and_the_tail_of_the_ledger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "ledger.jsonl"
    _, mark = start(path, 0, NUM_STEPS + NUM_BEYOND, saves=NUM_STEPS)
    size = path.stat().st_size
    with bytes_read(monkeypatch) as sizes:
        again, _ = start(path, NUM_STEPS, NUM_STEPS + 1, mark=mark)
    assert 0 < sum(sizes) < READ_AHEAD_BYTES < size // 10
    assert (again.number, again.discarded) == (1, NUM_BEYOND)
    with bytes_read(monkeypatch) as sizes:
        assert sum(isinstance(entry, StepLine) for entry in read_lines(path)) == NUM_STEPS + 1, "the chain is unbroken"
    assert sum(sizes) == path.stat().st_size, "all reads are counted"


def test_a_resume_at_step_100_000_reads_one_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, begin = tmp_path / "steps.jsonl", None
    with RecordWriter(path) as writer:
        for step in range(1, NUM_STEPS + NUM_BEYOND + 1):
            writer.write(record(step))
            begin = writer.last_record if step == NUM_STEPS else begin
    size = path.stat().st_size
    with bytes_read(monkeypatch) as sizes, RecordWriter(path, finished_steps=NUM_STEPS, last_record=begin) as writer:
        writer.write(record(NUM_STEPS + 1))
    assert 0 < sum(sizes) < READ_AHEAD_BYTES < size // 10
    tail = path.read_bytes()[begin:].decode().splitlines()
    assert [StepRecord.from_json(text).step for text in tail] == [NUM_STEPS, NUM_STEPS + 1]


@given(kills=st.lists(st.tuples(st.integers(0, 6), st.integers(1, 5), st.booleans()), max_size=8))
def test_with_and_without_marks_the_same_bytes_are_written(
    kills: list[tuple[int, int, bool]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("ledgers")
    marked, plain = folder / "marked.jsonl", folder / "plain.jsonl"
    marks: dict[int, LedgerMark] = {}
    finished = 0
    for more, every, drops_newest in kills:
        saved = finished - finished % every
        if drops_newest:  # the newest checkpoint is damaged: the run falls back to the one before
            saved = max(0, saved - every)
        start(plain, saved, saved + more)
        with LedgerWriter(marked, RUN, step=saved, world_size=2, dp_size=2, mark=marks.get(saved)) as writer:
            for step in range(saved + 1, saved + more + 1):
                writer.write(line(step, writer.start.number))
                marks[step] = writer.mark
        finished = saved + more
        assert marked.read_bytes() == plain.read_bytes()


Change = Callable[[LedgerMark], LedgerMark | None]


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda mark: None, id="none is known"),
        pytest.param(lambda mark: LedgerMark(begin=1, before=mark.before, check=mark.check), id="inside the head"),
        pytest.param(lambda mark: LedgerMark(begin=mark.begin + 1, before=mark.before, check=mark.check), id="inside"),
        pytest.param(lambda mark: LedgerMark(begin=2**62, before=mark.before, check=mark.check), id="beyond the end"),
        pytest.param(lambda mark: LedgerMark(begin=mark.begin, before="", check=mark.check), id="another line before"),
        pytest.param(lambda mark: LedgerMark(begin=mark.begin, before=mark.before, check=""), id="another check"),
    ],
)
def test_a_mark_that_does_not_fit_costs_a_pass_and_nothing_else(
    ledger: tuple[Path, LedgerMark], change: Change
) -> None:
    path, mark = ledger
    content = path.read_bytes()
    begun, _ = start(path, 5, 6, mark=mark)
    expected = path.read_bytes()
    path.write_bytes(content)
    assert start(path, 5, 6, mark=change(mark))[0] == begun
    assert path.read_bytes() == expected


def test_the_mark_of_another_step_is_not_followed(ledger: tuple[Path, LedgerMark]) -> None:
    path, mark = ledger
    begun, _ = start(path, 4, 4, mark=mark)
    assert (begun.step, begun.discarded) == (4, 3)
    assert [entry.step for entry in read_lines(path) if isinstance(entry, StepLine)] == [1, 2, 3, 4]


def test_the_run_is_compared_also_where_the_mark_fits(ledger: tuple[Path, LedgerMark]) -> None:
    path, mark = ledger
    before = path.read_bytes()
    other = RunLine(**{name: getattr(RUN, name) for name in RUN.__slots__} | {"seed": 4})
    with pytest.raises(LedgerError, match="seed was 3 and is now 4"):
        start(path, 5, 5, mark=mark, run=other)
    assert path.read_bytes() == before


def test_a_ledger_shorter_than_its_mark_is_refused_as_without_one(ledger: tuple[Path, LedgerMark]) -> None:
    path, mark = ledger
    os.truncate(path, mark.begin)
    with pytest.raises(LedgerError, match="ends at step 4, but the checkpoint holds 5 steps"):
        start(path, 5, 5, mark=mark)


def test_a_marked_line_that_was_edited_is_named_by_its_number(ledger: tuple[Path, LedgerMark]) -> None:
    path, mark = ledger
    content = path.read_bytes()
    assert content.count(b"[[10],[11]]") == 1
    path.write_bytes(content.replace(b"[[10],[11]]", b"[[11],[10]]"))
    with pytest.raises(LedgerError, match="line 8: it does not match its check"):
        start(path, 5, 5, mark=mark)


def test_damage_after_the_mark_is_named_by_its_number(ledger: tuple[Path, LedgerMark]) -> None:
    path, mark = ledger
    path.write_bytes(path.read_bytes().replace(b"[[12],[13]]", b"[[13],[12]]"))
    with pytest.raises(LedgerError, match="line 9: it does not match its check"):
        start(path, 5, 5, mark=mark)


def test_damage_before_the_mark_is_found_by_a_pass_over_the_ledger_after_the_resume(
    ledger: tuple[Path, LedgerMark],
) -> None:
    path, mark = ledger
    path.write_bytes(path.read_bytes().replace(b"[[4],[5]]", b"[[5],[4]]"))
    start(path, 5, 9, mark=mark)
    with pytest.raises(LedgerError, match="line 4: it does not match its check"):
        list(read_lines(path))


@pytest.mark.parametrize("cut", [1, 20, 60])
def test_a_last_line_cut_short_is_written_over_and_not_counted(ledger: tuple[Path, LedgerMark], cut: int) -> None:
    path, mark = ledger
    os.truncate(path, path.stat().st_size - cut)
    begun, _ = start(path, 5, 6, mark=mark)
    assert (begun.number, begun.discarded) == (2, 1)
    assert [entry.step for entry in read_lines(path) if isinstance(entry, StepLine)] == [1, 2, 3, 4, 5, 6]


def test_a_mark_outlives_a_checkpoint_as_json() -> None:
    mark = LedgerMark(begin=2**40, before="ab", check="cd")
    assert LedgerMark.from_state(json.loads(json.dumps(mark.to_state()))) == mark


@pytest.mark.parametrize("state", [None, [], "x", {}, {"begin": 0}, {"begin": True}, {"begin": -3}, {"begin": 2**64}])
def test_what_is_no_mark_is_none(state: object) -> None:
    texts = {"before": "", "check": ""}
    assert LedgerMark.from_state({**texts, **state} if isinstance(state, dict) else state) is None
    assert LedgerMark.from_state({"begin": 1, "before": 0, "check": ""}) is None


@pytest.mark.parametrize("shift", [None, -5, 1, 2**62])
def test_a_place_of_the_last_record_that_does_not_fit_costs_a_pass_and_nothing_else(
    records: tuple[Path, int], shift: int | None
) -> None:
    path, begin = records
    with RecordWriter(path, finished_steps=3, last_record=None if shift is None else begin + shift) as writer:
        writer.write(record(4))
    assert [entry.step for entry in read_records(path)] == [1, 2, 3, 4]


def test_the_place_of_another_record_is_not_followed(records: tuple[Path, int]) -> None:
    path, begin = records
    with RecordWriter(path, finished_steps=2, last_record=begin):
        pass
    assert [entry.step for entry in read_records(path)] == [1, 2]


def test_records_beyond_the_last_one_are_cut_off_whatever_they_hold(records: tuple[Path, int]) -> None:
    path, begin = records
    path.write_bytes(path.read_bytes()[:-10] + b"\n\0\0\0\n")
    with RecordWriter(path, finished_steps=3, last_record=begin) as writer:
        assert writer.last_record is None
        writer.write(record(4))
        writer.sync()
    assert [entry.step for entry in read_records(path)] == [1, 2, 3, 4]


def test_a_damaged_last_record_is_named_by_its_number(records: tuple[Path, int]) -> None:
    path, begin = records
    content = path.read_bytes()
    path.write_bytes(content[:begin] + b"\xff" + content[begin + 1 :])
    with pytest.raises(RecordFormatError, match=r"steps\.jsonl, line 3"):
        RecordWriter(path, finished_steps=3, last_record=begin)


def test_a_log_cut_inside_its_last_record_keeps_what_is_whole(records: tuple[Path, int]) -> None:
    path, begin = records
    os.truncate(path, begin + 20)
    RecordWriter(path, finished_steps=3, last_record=begin).close()
    assert [entry.step for entry in read_records(path)] == [1, 2]


def test_the_only_record_begins_at_byte_0(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    with RecordWriter(path) as writer:
        writer.write(record(1))
        assert writer.last_record == 0
    RecordWriter(path, finished_steps=1, last_record=0).close()
    assert [entry.step for entry in read_records(path)] == [1]
