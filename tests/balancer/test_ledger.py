"""The ledger of a run: whole lines only, of one run, cut back to what later weights descend from."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.errors import LedgerError
from balancer.ledger import LedgerWriter, ids_digest, read_lines, refuse_other_run
from balancer.ledger_lines import LEDGER_FORMAT_VERSION, PartLine, RunLine, StartLine, StepLine

RUN = RunLine(
    index="aaaa",
    source="bbbb",
    index_folder="",
    data="a.tar",
    num_samples=10,
    num_ids=10,
    ids_digest=ids_digest(range(10)),
    seed=2**64 - 1,
    global_batch_size=2,
    shuffle="full",
    block_shards=16,
    eval_share=0.1,
)


def start(path: Path, step: int, *, steps: Sequence[int] = (), world_size: int = 2, run: RunLine = RUN) -> StartLine:
    """A start that executes `steps` and is then killed."""
    with LedgerWriter(path, run, step=step, world_size=world_size, dp_size=world_size) as writer:
        for number in steps:
            writer.write(line(number, writer.start.number))
        return writer.start


def line(step: int, number: int = 0) -> StepLine:
    return StepLine(step=step, epoch=0, cursor=2 * step - 2, start=number, ids=((2 * step,), (2 * step + 1,)))


def steps_of(path: Path) -> list[tuple[int, int]]:
    """(step, start) of every step in the ledger."""
    return [(entry.step, entry.start) for entry in read_lines(path) if isinstance(entry, StepLine)]


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "new" / "ledger.jsonl"
    step = StepLine(step=1, epoch=0, cursor=0, start=0, ids=((3, 1), (), (7,)), replaced=(1,))
    with LedgerWriter(path, RUN, step=0, world_size=6, dp_size=3) as writer:
        writer.write(step)
        writer.sync()
    first = StartLine(number=0, step=0, world_size=6, dp_size=3, discarded=0)
    assert list(read_lines(path)) == [RUN, first, step]
    assert all(json.loads(text)["kind"] for text in path.read_text().splitlines())


def test_a_start_cuts_off_what_its_checkpoint_does_not_know_and_counts_it(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    start(path, 0, steps=[1, 2, 3, 4])
    again = start(path, 2, steps=[3], world_size=3)
    assert again == StartLine(number=1, step=2, world_size=3, dp_size=3, discarded=2)
    assert steps_of(path) == [(1, 0), (2, 0), (3, 1)]


def test_a_start_that_executed_nothing_leaves_its_line_and_its_count(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    start(path, 0, steps=[1, 2, 3])
    start(path, 2)
    start(path, 2, steps=[3, 4])
    starts = [entry for entry in read_lines(path) if isinstance(entry, StartLine)]
    assert [(entry.number, entry.step, entry.discarded) for entry in starts] == [(0, 0, 0), (1, 2, 1), (2, 2, 0)]


def test_falling_back_to_an_older_checkpoint_keeps_the_count_of_the_starts_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    start(path, 0, steps=[1, 2, 3, 4, 5])
    start(path, 4, steps=[5, 6])  # discards 5
    last = start(path, 1)  # discards 2, 3, 4, the start with its one, 5 and 6
    assert (last.number, last.discarded) == (2, 6)
    assert steps_of(path) == [(1, 0)]
    assert start(path, 1).number == 3


@given(kills=st.lists(st.tuples(st.integers(0, 6), st.integers(1, 5)), max_size=8))
def test_every_executed_step_is_in_the_history_or_among_the_discarded(
    kills: list[tuple[int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("ledgers") / "ledger.jsonl"
    finished = executed = 0
    for more, every in kills:
        saved = finished - finished % every
        start(path, saved, steps=range(saved + 1, saved + more + 1))
        finished, executed = saved + more, executed + more
    entries = list(read_lines(path)) if kills else []
    starts = [entry for entry in entries if isinstance(entry, StartLine)]
    history = [entry.step for entry in entries if isinstance(entry, StepLine)]
    assert history == list(range(1, finished + 1))
    assert len(history) + sum(entry.discarded for entry in starts) == executed
    assert [entry.number for entry in starts] == sorted({entry.number for entry in starts})


@pytest.mark.parametrize("cut", [1, 20, 60])
def test_a_last_line_cut_short_by_a_crash_is_left_out_and_written_over(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "ledger.jsonl"
    start(path, 0, steps=[1, 2, 3])
    path.write_bytes(path.read_bytes()[:-cut])
    assert steps_of(path) == [(1, 0), (2, 0)]
    start(path, 2, steps=[3])
    assert steps_of(path) == [(1, 0), (2, 0), (3, 1)]


def test_a_file_cut_inside_its_first_line_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    start(path, 0)
    path.write_bytes(path.read_bytes()[:30])
    start(path, 0, steps=[1])
    assert next(read_lines(path)) == RUN


@pytest.mark.parametrize(
    ("old", "new"),
    [('"seed":18446744073709551615', '"seed":3'), ("[[4],[5]]", "[[5],[4]]"), ("[[4],[5]]", "[[4],[6]]")],
)
def test_an_edited_line_does_not_match_its_check(tmp_path: Path, old: str, new: str) -> None:
    path = tmp_path / "ledger.jsonl"
    start(path, 0, steps=[1, 2, 3])
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    with pytest.raises(LedgerError, match=r"line \d: it does not match its check: this line or the one before"):
        list(read_lines(path))


def test_a_line_taken_out_breaks_the_check_of_the_next(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    start(path, 0, steps=[1, 2, 3])
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:3] + lines[4:]))
    with pytest.raises(LedgerError, match="line 4: it does not match its check"):
        list(read_lines(path))


@pytest.mark.parametrize(
    "text",
    [
        "nonsense",
        "[]",
        "{}",
        '{"kind":"other","check":"0"}',
        '{"kind":"step","step":1,"check":"0"}',
        '{"kind":"start","number":-1,"step":0,"world_size":1,"dp_size":1,"discarded":0,"check":"0"}',
        '{"kind":"start","number":1e300,"step":0,"world_size":1,"dp_size":1,"discarded":0,"check":"0"}',
        "[" * 100_000,
    ],
)
def test_a_line_that_is_none_is_an_error_with_its_place(tmp_path: Path, text: str) -> None:
    path = tmp_path / "ledger.jsonl"
    path.write_text(text + "\n")
    with pytest.raises(LedgerError, match=r"ledger\.jsonl, line 1: no line of a ledger"):
        list(read_lines(path))


def test_another_format_version_is_named(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    start(path, 0, run=replace(RUN, format_version=LEDGER_FORMAT_VERSION + 1))
    with pytest.raises(LedgerError, match=f"format version {LEDGER_FORMAT_VERSION + 1}; this version reads"):
        list(read_lines(path))


def test_the_ledger_of_other_data_is_refused_with_both_named(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    start(path, 0, steps=[1])
    before = path.read_bytes()
    other = replace(RUN, index="cccc", data="b.tar")
    for refuse in (lambda: refuse_other_run(path, other), lambda: start(path, 1, run=other)):
        with pytest.raises(LedgerError, match=r"index was aaaa and is now cccc \(data a\.tar then, b\.tar now\)"):
            refuse()
    assert path.read_bytes() == before
    refuse_other_run(path, replace(RUN, index_folder="/moved", data="moved.tar"))
    refuse_other_run(tmp_path / "none.jsonl", other)


def test_the_digest_of_ids_is_of_the_set_and_counts_repeats() -> None:
    assert ids_digest([3, 1, 2]) == ids_digest(np.array([1, 2, 3], dtype=np.int32))
    assert ids_digest([1, 1, 2]) != ids_digest([1, 2])
    assert ids_digest([]) != ids_digest([0])


PART = PartLine(
    name="captions",
    index="aa",
    source="bb",
    index_folder="/cache/aa",
    data="captions.tar",
    num_samples=10,
    num_ids=9,
    ids_digest=ids_digest(range(9)),
    llm_tokens=2**40,
    visual_tokens=0,
)
MIXTURE = replace(RUN, selector="mixture", parts=(PART, replace(PART, name="pages")))
WEIGHTS = [{"since": 0, "unit": "samples", "schedules": {"captions": [{"start": 0, "weight": 0.1}]}, "max_epochs": {}}]


def test_parts_and_weights_of_a_mixture_are_read_as_written(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with LedgerWriter(path, MIXTURE, step=0, world_size=1, dp_size=1, weights=WEIGHTS) as writer:
        start_line = writer.start
    assert start_line.weights == tuple(WEIGHTS)
    assert list(read_lines(path)) == [MIXTURE, start_line]


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ((PART,), "parts were captions, pages and are now captions: a resume keeps them"),
        (MIXTURE.parts[::-1], "parts were captions, pages and are now pages, captions"),
        (
            (PART, replace(PART, name="pages", num_ids=8, data="b.tar")),
            r"part 'pages' has changed: num_ids was 9 and is now 8 \(data captions\.tar then, b\.tar now\)",
        ),
    ],
)
def test_other_parts_of_a_mixture_are_named_and_not_what_follows_from_them(
    tmp_path: Path, parts: tuple[PartLine, ...], message: str
) -> None:
    path = tmp_path / "ledger.jsonl"
    start(path, 0, run=MIXTURE)
    with pytest.raises(LedgerError, match=message) as caught:
        refuse_other_run(path, replace(MIXTURE, parts=parts, index="cccc", num_ids=5, seed=1))
    assert "index was" not in str(caught.value)
    assert "seed was 18446744073709551615 and is now 1" in str(caught.value)
    moved = tuple(replace(part, index_folder="/elsewhere", data="x") for part in MIXTURE.parts)
    refuse_other_run(path, replace(MIXTURE, parts=moved))


def test_a_ledger_that_does_not_reach_the_checkpoint_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with pytest.raises(LedgerError, match="ends at step 0, but the checkpoint holds 2 steps"):
        start(path, 2)
    assert not path.exists()
    start(path, 0, steps=[1, 2])
    before = path.read_bytes()
    with pytest.raises(LedgerError, match="ends at step 2, but the checkpoint holds 3 steps"):
        start(path, 3)
    assert path.read_bytes() == before


@pytest.mark.parametrize("share", [10**400, -(10**400), "x", None, []], ids=lambda share: str(share)[:5])
def test_a_number_that_no_float_holds_is_no_line_of_a_ledger(tmp_path: Path, share: object) -> None:
    path = tmp_path / "ledger.jsonl"
    start(path, 0)
    first, *rest = path.read_text(encoding="utf-8").splitlines(keepends=True)
    content = {**json.loads(first), "eval_share": share}
    path.write_text(json.dumps(content) + "\n" + "".join(rest), encoding="utf-8")
    with pytest.raises(LedgerError, match="no line of a ledger"):
        list(read_lines(path))
