"""`balancer-analyze verify` of runs by tokens, with tails, look-ahead, a limit on bytes and samples made to fit."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from balancer.cost_model import CostModel, StageCost, StageMemory, StageTerms
from balancer.layout import Layout
from balancer.ledger import LedgerWriter, ids_digest, read_lines
from balancer.ledger_lines import Line, RunLine, StepLine
from balancer.oversize import fit_oversize
from balancer.plan import Capacities
from balancer.plan_sequence import PlanSequence
from balancer.run_evidence import RunEvidence
from balancer.select import eligible_ids, split_held_out
from dataloaders.adjusted_file import read_adjusted, write_adjusted
from dataloaders.adjusted_index import AdjustedIndex
from dataloaders.encoder import ByteEncoder
from dataloaders.errors import IndexFormatError
from dataloaders.estimators import Qwen25VLConfig, Qwen25VLEstimator
from dataloaders.index import CostIndex, write_index
from dataloaders.scan import scan_source
from dataloaders.tar_source import TarSource
from tools.verify_command import VerifyReport, verify_run

ESTIMATOR = Qwen25VLEstimator(Qwen25VLConfig())
NUM_SAMPLES, BATCH = 23, 4
ROOMY = Capacities(tokens=4000)
Edit = Callable[[list[Line]], list[Line]]
Edited = Callable[[Path, Edit], VerifyReport]


def stage(attention: float) -> StageCost:
    terms = StageTerms(per_token_ns=1.0, per_token_sq_ns=attention)
    return StageCost(forward=terms, backward=terms)


COST = CostModel(stages=(stage(0.0), stage(0.25)), memory=(StageMemory(), StageMemory(per_token_bytes=10)))


@dataclass(frozen=True)
class Data:
    """Text samples in three shards, two of them long, and their index in a folder."""

    source: TarSource
    index: CostIndex


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory, write_shard: Callable[..., Path], chat_json: Any) -> Data:
    home = tmp_path_factory.mktemp("indexed")
    samples = [
        (f"{i:03}.json", chat_json("Why? " * (i % 5 + 1), "So. " * (i * i % 47 + 1))) for i in range(NUM_SAMPLES)
    ]
    source = TarSource([str(write_shard(home / f"s{k}.tar", samples[8 * k : 8 * k + 8])) for k in range(3)])
    return Data(source=source, index=write_index(home / "index", scan_source(source, ESTIMATOR)))


def make_run(
    folder: Path,
    data: Data,
    *,
    num_epochs: int = 3,
    in_memory: bool = False,
    capacities: Capacities = ROOMY,
    cut: bool = False,
    **selection: Any,
) -> Path:
    """A run of one start on two ranks, without plans: what is caught here, the ledger and the folder alone tell."""
    index = data.index
    if cut:
        fitted = fit_oversize(
            index, capacities, "truncate_text", source=data.source, estimator=ESTIMATOR, encoder=ByteEncoder()
        )
        index = fitted.index
    memory = COST if capacities.activation_bytes else None
    eligible = eligible_ids(index, capacities, "drop", cost_model=memory).ids
    ids = split_held_out(eligible, share=0.2, seed=5)[0]
    plans = PlanSequence(
        index=index,
        ids=ids,
        global_batch_size=BATCH,
        layout=Layout(dp_size=2),
        cost_model=COST,
        capacities=capacities,
        policy="sequential",
        seed=5,
        block_shards=2,
        **selection,
    )
    ahead = plans.lookahead_steps > 1
    run = RunLine(
        index=index.fingerprint,
        base_index=data.index.fingerprint if isinstance(index, AdjustedIndex) else "",
        source=index.key.source,
        index_folder="" if in_memory else str(data.index.folder),
        data="s.tar",
        num_samples=len(index),
        num_ids=len(ids),
        ids_digest=ids_digest(ids),
        seed=5,
        global_batch_size=BATCH,
        shuffle="full" if plans.shuffle is True else str(plans.shuffle),
        block_shards=2,
        eval_share=0.2,
        capacity_tokens=capacities.tokens,
        capacity_patches=2**40,
        capacity_bytes=capacities.activation_bytes or 0,
        step_tokens=plans.step_tokens or 0,
        tail=plans.tail,
        lookahead_steps=plans.lookahead_steps,
        lookahead_cost=COST.fingerprint if ahead else "",
    )
    folder.mkdir()
    RunEvidence(index=index, lookahead_cost=COST if ahead else None, memory_cost=memory).write(folder)
    with LedgerWriter(folder / "ledger.jsonl", run, step=0, world_size=2, dp_size=2) as writer:
        for step in range(num_epochs * plans.steps_per_epoch):
            where, chosen = plans.position(step), plans.sample_ids(step).tolist()
            ranks = (tuple(chosen[::2]), tuple(chosen[1::2]))
            writer.write(StepLine(step=step + 1, epoch=where.epoch, cursor=where.cursor, start=0, ids=ranks))
    return folder


SELECTIONS: dict[str, dict[str, Any]] = {
    "tokens": {"step_tokens": 500},
    "tokens in blocks": {"step_tokens": 500, "shuffle": "block"},
    "tokens ahead": {"step_tokens": 500, "lookahead_steps": 3},
    "drop": {"tail": "drop"},
    "repeat": {"tail": "repeat"},
    "ahead": {"lookahead_steps": 3},
    "drop ahead": {"tail": "drop", "lookahead_steps": 2},
    "repeat ahead": {"tail": "repeat", "lookahead_steps": 2},
    "cut": {"cut": True, "capacities": Capacities(tokens=120)},
    "cut ahead": {"cut": True, "capacities": Capacities(tokens=120), "lookahead_steps": 3},
    "bytes": {"capacities": Capacities(tokens=4000, activation_bytes=1200)},
}


@pytest.mark.parametrize("name", SELECTIONS)
def test_what_was_selected_is_selected_again(tmp_path: Path, data: Data, name: str) -> None:
    report = verify_run(make_run(tmp_path / "run", data, **SELECTIONS[name]))
    assert (report.findings, report.notes) == ((), ())
    assert (report.num_complete, report.unfinished) == (3, 0)
    assert report.num_selected == report.num_steps > 6
    assert report.ids_from == "index"


def line_of(lines: Sequence[Line], step: int) -> StepLine:
    return next(line for line in lines if isinstance(line, StepLine) and line.step == step)


def with_ids(lines: Sequence[Line], changed: dict[int, Sequence[Sequence[int]]]) -> list[Line]:
    """The lines with other ids in the steps that are named."""
    return [
        replace(line, ids=tuple(map(tuple, changed[line.step])))
        if isinstance(line, StepLine) and line.step in changed
        else line
        for line in lines
    ]


def exchange(one: int, two: int) -> Edit:
    """Exchange the first sample of two steps."""

    def edit(lines: list[Line]) -> list[Line]:
        first, second = line_of(lines, one).ids, line_of(lines, two).ids
        a, b = first[0][0], second[0][0]
        assert a != b
        return with_ids(lines, {one: [[b, *first[0][1:]], first[1]], two: [[a, *second[0][1:]], second[1]]})

    return edit


def lose(step: int) -> Edit:
    """Leave out the first sample of a step."""
    return lambda lines: with_ids(lines, {step: [line_of(lines, step).ids[0][1:], line_of(lines, step).ids[1]]})


def other_run(**changes: Any) -> Edit:
    """Say something else of the run."""

    def edit(lines: list[Line]) -> list[Line]:
        assert isinstance(lines[0], RunLine)
        return [replace(lines[0], **changes), *lines[1:]]

    return edit


@pytest.mark.parametrize("name", SELECTIONS)
@pytest.mark.parametrize(
    "edit",
    [exchange(1, 2), lose(2), other_run(seed=6), lambda lines: lines[:3] + lines[4:]],
    ids=["two samples exchanged inside a block", "a sample lost", "another seed", "a step left out"],
)
def test_a_wrong_ledger_is_caught_whatever_selects(
    tmp_path: Path, data: Data, edited: Edited, name: str, edit: Edit
) -> None:
    report = edited(make_run(tmp_path / "run", data, **SELECTIONS[name]), edit)
    assert not report.holds
    assert any(re.search("selected|eligible|missing", finding) for finding in report.findings), report.findings


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("tokens", {"step_tokens": 400}, "it belongs at epoch 0|are selected by seed and epoch"),
        ("tokens", {"step_tokens": 0}, r"step \d+ consumed \d+ samples; 4 are selected"),
        ("tokens", {"step_tokens": 1}, "what the run is cannot be: step_tokens=1 cuts"),
        ("tokens ahead", {"lookahead_steps": 2}, "are selected by seed and epoch"),
        ("tokens ahead", {"lookahead_steps": 0}, "what the run is cannot be: lookahead_steps=0"),
        ("drop", {"tail": "pad"}, "step 5 is at epoch 1, sample 0; it belongs at epoch 0, sample 16"),
        ("drop", {"tail": "wrap"}, "tail='wrap' is not one of"),
        ("drop", {"global_batch_size": 0}, "global_batch_size=0: a step holds at least one"),
        ("repeat", {"tail": "pad"}, "step 5 consumed 4 samples; 2 are selected"),
        ("ahead", {"lookahead_steps": 1}, "are selected by seed and epoch"),
        ("ahead", {"lookahead_cost": "f" * 64}, r"cost\.json is not the cost that the look-ahead of this run has"),
        ("cut", {"index": "f" * 64}, r"adjusted\.npz does not hold the samples made to fit of this run"),
        ("cut", {"capacity_tokens": 4000}, "were made to fit, but fit a micro-batch as they are"),
        ("bytes", {"capacity_bytes": 900}, "the eligible ids that follow from the index are not those of the run"),
    ],
)
def test_a_ledger_that_claims_another_selection_is_caught(
    *, tmp_path: Path, data: Data, edited: Edited, name: str, changes: dict[str, Any], message: str
) -> None:
    report = edited(make_run(tmp_path / "run", data, **SELECTIONS[name]), other_run(**changes))
    assert not report.holds
    assert any(re.search(message, finding) for finding in report.findings), report.findings


def test_a_sample_repeated_in_place_of_another_one_is_caught(tmp_path: Path, data: Data, edited: Edited) -> None:
    """The last step of an epoch under `repeat` takes the first samples of its order, no others."""

    def repeat_others(lines: list[Line]) -> list[Line]:
        second, last = line_of(lines, 2).ids, line_of(lines, 5).ids
        first = set(line_of(lines, 1).ids[0] + line_of(lines, 1).ids[1])
        assert len(first & {i for rank in last for i in rank}) == 2
        others = iter(second[0])
        return with_ids(lines, {5: [[next(others) if i in first else i for i in rank] for rank in last]})

    report = edited(make_run(tmp_path / "run", data, tail="repeat"), repeat_others)
    assert any("step 5" in finding for finding in report.findings)


@pytest.mark.parametrize("lookahead_steps", [1, 2])
@pytest.mark.parametrize("tail", ["pad", "drop", "repeat"])
def test_without_the_index_epochs_tell_the_ids_and_blocks_are_proven(
    tmp_path: Path, data: Data, edited: Edited, tail: str, lookahead_steps: int
) -> None:
    """Three epochs hold all ids also where each leaves some out."""
    options: dict[str, Any] = {"tail": tail, "lookahead_steps": lookahead_steps, "in_memory": True}
    report = verify_run(make_run(tmp_path / "run", data, **options))
    assert (report.findings, report.num_complete) == ((), 3)
    assert report.ids_from == ("epochs so far" if tail == "drop" else "first complete epoch")
    across = edited(make_run(tmp_path / "across", data, **options), exchange(2, 3))
    assert not across.holds
    inside = edited(make_run(tmp_path / "inside", data, **options), exchange(1, 2))
    if lookahead_steps == 1:
        assert report.num_selected == report.num_steps
        assert not inside.holds
    else:
        assert report.num_selected == 0
        assert any("which samples their block of 2 holds, not which step of it" in note for note in report.notes)
        assert inside.holds, "this much stays open, and the note says so"


def test_without_the_index_steps_by_tokens_are_counted_once_per_epoch(
    tmp_path: Path, data: Data, edited: Edited
) -> None:
    report = verify_run(make_run(tmp_path / "run", data, step_tokens=500, in_memory=True))
    assert (report.findings, report.num_complete, report.num_selected) == ((), 3, 0)
    assert any("was not computed again: that takes the index" in note for note in report.notes)
    lost = edited(make_run(tmp_path / "lost", data, step_tokens=500, in_memory=True), lose(2))
    assert any("1 of 18 samples are missing" in finding for finding in lost.findings)


def test_an_unfinished_block_and_epoch_are_no_finding(tmp_path: Path, data: Data, edited: Edited) -> None:
    folder = make_run(tmp_path / "run", data, lookahead_steps=3, num_epochs=2)
    (folder / "selection" / "cost.json").unlink()
    report = edited(folder, lambda lines: lines[: 2 + 7])
    assert report.findings == ()
    assert (report.num_steps, report.num_complete, report.unfinished) == (7, 1, 8)
    assert any("cost.json, the cost that look-ahead evens, is gone" in note for note in report.notes)
    strange = edited(folder, exchange(1, 7))
    assert any("steps 6 to 8" in finding for finding in strange.findings)


def test_files_of_the_selection_that_were_edited_are_findings_and_missing_ones_notes(
    tmp_path: Path, data: Data
) -> None:
    ahead = make_run(tmp_path / "ahead", data, lookahead_steps=3)
    path = ahead / "selection" / "cost.json"
    path.write_text(path.read_text().replace("0.25", "0.5"))
    assert any("cost.json is not what the run has written" in finding for finding in verify_run(ahead).findings)
    path.write_text(replace(COST, stages=COST.stages[::-1], memory=None).to_json())
    assert any("is not the cost that the look-ahead" in finding for finding in verify_run(ahead).findings)

    cut = make_run(tmp_path / "cut", data, **SELECTIONS["cut"])
    path = cut / "selection" / "adjusted.npz"
    path.write_bytes(path.read_bytes()[:-40])
    assert any("no adjusted samples of this index" in finding for finding in verify_run(cut).findings)
    path.unlink()
    report = verify_run(cut)
    assert report.holds
    assert any("adjusted.npz, which says how samples were made to fit, is gone" in note for note in report.notes)
    assert report.ids_from == "first complete epoch"

    limited = make_run(tmp_path / "bytes", data, **SELECTIONS["bytes"])
    (limited / "selection" / "memory.json").unlink()
    assert any("memory.json, which says what fits" in note for note in verify_run(limited).notes)


def test_a_resume_leaves_the_files_of_the_selection_as_they_are(tmp_path: Path, data: Data) -> None:
    folder = make_run(tmp_path / "run", data, **SELECTIONS["cut ahead"])
    before = {path.name: path.read_bytes() for path in (folder / "selection").iterdir()}
    assert set(before) == {"cost.json", "adjusted.npz"}
    RunEvidence(index=data.index, lookahead_cost=replace(COST, memory=None), memory_cost=COST).write(folder)
    assert set(before.items()) < {(path.name, path.read_bytes()) for path in (folder / "selection").iterdir()}


def test_adjusted_samples_are_read_as_written(tmp_path: Path, data: Data) -> None:
    fitted = fit_oversize(
        data.index, Capacities(tokens=120), "truncate_text", source=data.source, estimator=ESTIMATOR,
        encoder=ByteEncoder(),
    )  # fmt: skip
    assert isinstance(fitted.index, AdjustedIndex)
    write_adjusted(tmp_path / "adjusted.npz", fitted.index)
    again = read_adjusted(tmp_path / "adjusted.npz", data.index)
    assert again.fingerprint == fitted.index.fingerprint
    assert again.adjustments == fitted.index.adjustments
    assert np.array_equal(again.samples["llm_tokens"], fitted.index.samples["llm_tokens"])
    with pytest.raises(IndexFormatError, match=r"samples\.rows are not ascending rows of 2"):
        read_adjusted(tmp_path / "adjusted.npz", data.index.rows(0, 2))
    (tmp_path / "text.npz").write_text("no archive")
    with pytest.raises(IndexFormatError, match="no adjusted samples of this index"):
        read_adjusted(tmp_path / "text.npz", data.index)


def test_a_ledger_of_the_first_format_is_read_and_continued(tmp_path: Path, data: Data, edited: Edited) -> None:
    """It names none of the selections that came later, and their defaults are what held then."""
    folder = make_run(tmp_path / "run", data)
    report = edited(folder, other_run(format_version=1))
    assert (report.findings, report.num_selected) == ((), report.num_steps)
    line = next(read_lines(folder / "ledger.jsonl"))
    assert isinstance(line, RunLine)
    assert line.format_version == 1
    assert not line.differences(replace(line, format_version=2))
    assert line.differences(replace(line, tail="drop")) == ["tail was pad and is now drop"]
