"""`balancer-analyze verify`: a sound ledger is proven, with and without the index; a tampered one is not."""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from balancer.cost_model import CostModel, StageCost, StageTerms
from balancer.layout import Layout
from balancer.ledger import LedgerMark, LedgerWriter, ids_digest, read_lines
from balancer.ledger_groups import recorded_groups, runs_digest
from balancer.ledger_lines import Line, RunLine, StartLine, StepLine
from balancer.plan import Capacities
from balancer.plan_sequence import PlanSequence
from balancer.select import eligible_ids, split_held_out
from dataloaders.estimators import Qwen25VLConfig, Qwen25VLEstimator
from dataloaders.index import CostIndex, write_index
from dataloaders.scan import scan_source
from dataloaders.tar_source import TarSource
from tools.cli import main
from tools.verify_command import VerifyReport, print_report, verify_run

CAPACITIES = Capacities(tokens=4000, patches=16000)
NUM_SAMPLES, BATCH = 23, 4
Edit = Callable[[list[Line]], list[Line]]
Edited = Callable[[Path, Edit], VerifyReport]


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory, write_shard: Callable[..., Path], chat_json: Any) -> CostIndex:
    """23 text samples in three shards, written to a folder."""
    home = tmp_path_factory.mktemp("indexed")
    samples = [(f"{i:03}.json", chat_json("Why? " * (i % 5 + 1), "So. " * (i % 3 + 1))) for i in range(NUM_SAMPLES)]
    shards = [str(write_shard(home / f"s{k}.tar", samples[8 * k : 8 * k + 8])) for k in range(3)]
    return write_index(home / "index", scan_source(TarSource(shards), Qwen25VLEstimator(Qwen25VLConfig())))


def make_run(
    folder: Path,
    index: CostIndex,
    *,
    shuffle: str = "full",
    in_memory: bool = False,
    steps: int = 13,
    groups: np.ndarray | None = None,
) -> Path:
    """The ledger and plans of a run that was killed twice and changed its world from 2 to 3 to 1 ranks."""
    ids = split_held_out(eligible_ids(index, CAPACITIES).ids, share=0.2, seed=5)[0]
    run = RunLine(
        index=index.fingerprint,
        source=index.key.source,
        index_folder="" if in_memory else str(index.folder),
        data="s.tar",
        num_samples=len(index),
        num_ids=len(ids),
        ids_digest=ids_digest(ids),
        seed=5,
        global_batch_size=BATCH,
        shuffle=shuffle,
        block_shards=2,
        groups_digest=runs_digest(recorded_groups(groups, index.shard_numbers)),
        group_runs=recorded_groups(groups, index.shard_numbers),
        eval_share=0.2,
        capacity_tokens=4000,
        capacity_patches=16000,
    )
    term = StageCost(forward=StageTerms(per_token_ns=1.0), backward=StageTerms(per_token_ns=2.0))
    (folder / "plans").mkdir(parents=True)
    saved = 0
    mark: LedgerMark | None = None
    for dp_size, until, saves in ((2, 5, 4), (3, 9, 8), (1, steps, steps)):
        plans = PlanSequence(
            index=index,
            ids=ids,
            global_batch_size=BATCH,
            layout=Layout(dp_size=dp_size),
            cost_model=CostModel(stages=(term, term)),
            capacities=CAPACITIES,
            seed=5,
            shuffle=shuffle,  # type: ignore[arg-type]
            block_shards=2,
            groups=groups,
        )
        path = folder / "ledger.jsonl"
        with LedgerWriter(path, run, step=saved, world_size=dp_size, dp_size=dp_size, mark=mark) as writer:
            for step in range(saved, until):
                plan = plans.plan(step)
                cells = [
                    tuple(int(i) for m in range(plan.num_microbatches) for i in plan.members(rank, m))
                    for rank in range(dp_size)
                ]
                (folder / "plans" / f"step_{step + 1:06d}.json").write_text(plan.to_json())
                replaced = cells[0][:1] if step == 2 else ()
                writer.write(
                    StepLine(
                        step=step + 1,
                        epoch=plan.epoch,
                        cursor=plan.cursor,
                        start=writer.start.number,
                        ids=tuple(cells),
                        replaced=replaced,
                    )
                )
                mark = writer.mark if step + 1 == saves else mark
        saved = saves
    return folder


def test_an_edit_that_no_resume_has_read_is_found(tmp_path: Path, index: CostIndex) -> None:
    """A resume reads the first line and those from its checkpoint on; the proof reads all of them."""
    path = make_run(tmp_path / "run", index, steps=9) / "ledger.jsonl"
    run = next(iter(read_lines(path)))
    assert isinstance(run, RunLine)
    lines = path.read_bytes().splitlines(keepends=True)
    mark = LedgerMark(
        begin=sum(map(len, lines[:-1])), before=json.loads(lines[-2])["check"], check=json.loads(lines[-1])["check"]
    )
    at = next(k for k, text in enumerate(lines) if json.loads(text).get("cursor") == BATCH)
    ids = json.dumps(json.loads(lines[at])["ids"], separators=(",", ":")).encode()
    swapped = json.dumps(json.loads(lines[at])["ids"][::-1], separators=(",", ":")).encode()
    assert swapped != ids
    path.write_bytes(b"".join([*lines[:at], lines[at].replace(ids, swapped), *lines[at + 1 :]]))
    with LedgerWriter(path, run, step=9, world_size=1, dp_size=1, mark=mark) as writer:
        assert writer.start.discarded == 0
    report = verify_run(tmp_path / "run")
    assert not report.holds
    assert f"line {at + 1}: it does not match its check" in report.findings[0]


def step_at(lines: list[Line], step: int) -> int:
    return next(k for k, line in enumerate(lines) if isinstance(line, StepLine) and line.step == step)


@pytest.mark.parametrize("shuffle", ["full", "block", "none"])
@pytest.mark.parametrize("in_memory", [False, True])
def test_a_run_that_was_killed_and_changed_its_ranks_is_proven(
    tmp_path: Path, index: CostIndex, shuffle: str, in_memory: bool
) -> None:
    report = verify_run(make_run(tmp_path / "run", index, shuffle=shuffle, in_memory=in_memory))
    assert report.findings == ()
    assert report.holds
    assert (report.num_steps, report.num_ids) == (13, 18)
    assert (report.num_complete, report.unfinished, report.num_samples) == (2, 12, 48)
    assert (report.num_starts, report.num_discarded) == (3, 2)
    assert [(w.first_step, w.last_step, w.world_size) for w in report.worlds] == [(1, 4, 2), (5, 8, 3), (9, 13, 1)]
    assert len(report.replaced) == 1
    assert report.num_placed == 13
    if in_memory and shuffle == "block":
        assert report.num_selected == 0
        assert any("was not computed again" in note for note in report.notes)
    else:
        assert report.num_selected == 13
        assert report.ids_from == ("first complete epoch" if in_memory else "index")


@pytest.mark.parametrize("in_memory", [False, True])
def test_blocks_of_groups_that_no_index_knows_are_proven_by_the_ledger_alone(
    tmp_path: Path, index: CostIndex, in_memory: bool, edited: Edited
) -> None:
    """Row groups of Parquet, say: an index knows files."""
    groups = np.arange(NUM_SAMPLES) // 3
    report = verify_run(make_run(tmp_path / "run", index, shuffle="block", in_memory=in_memory, groups=groups))
    assert report.findings == ()
    assert (report.num_selected, report.num_complete) == (13, 2)
    as_shards = edited(tmp_path / "run", lambda lines: [replace(lines[0], group_runs=(), groups_digest=""), *lines[1:]])  # type: ignore[type-var]
    assert (
        as_shards.holds == in_memory
    )  # not in what the ledger says then, which is all that is known without the index


def test_before_the_first_epoch_is_complete_selection_needs_the_index(
    tmp_path: Path, index: CostIndex, edited: Edited
) -> None:
    report = verify_run(make_run(tmp_path / "run", index, in_memory=True, steps=9))
    assert report.holds
    assert report.num_complete == 1
    short = edited(make_run(tmp_path / "short", index, in_memory=True), lambda lines: lines[:5])
    assert short.holds
    assert (short.num_selected, short.unfinished) == (0, 12)
    assert any("the selection of 3 steps was not computed again" in note for note in short.notes)


def lose_an_id(lines: list[Line]) -> list[Line]:
    at = step_at(lines, 3)
    step = lines[at]
    assert isinstance(step, StepLine)
    return [*lines[:at], replace(step, ids=(step.ids[0][:-1], *step.ids[1:]), replaced=()), *lines[at + 1 :]]


def repeat_an_id(lines: list[Line]) -> list[Line]:
    first, at = lines[step_at(lines, 1)], step_at(lines, 3)
    step = lines[at]
    assert isinstance(step, StepLine)
    assert isinstance(first, StepLine)
    ids = (first.ids[0][:1] + step.ids[0][1:], *step.ids[1:])
    return [*lines[:at], replace(step, ids=ids, replaced=()), *lines[at + 1 :]]


def swap_ranks(lines: list[Line]) -> list[Line]:
    at = step_at(lines, 2)
    step = lines[at]
    assert isinstance(step, StepLine)
    return [*lines[:at], replace(step, ids=step.ids[::-1]), *lines[at + 1 :]]


def leave_out_a_step(lines: list[Line]) -> list[Line]:
    at = step_at(lines, 4)
    return lines[:at] + lines[at + 1 :]


def another_seed(lines: list[Line]) -> list[Line]:
    assert isinstance(lines[0], RunLine)
    return [replace(lines[0], seed=6), *lines[1:]]


def another_world(lines: list[Line]) -> list[Line]:
    assert isinstance(lines[1], StartLine)
    return [lines[0], replace(lines[1], world_size=4, dp_size=4), *lines[2:]]


def swap_steps(lines: list[Line]) -> list[Line]:
    one, two = step_at(lines, 1), step_at(lines, 2)
    first, second = lines[one], lines[two]
    assert isinstance(first, StepLine)
    assert isinstance(second, StepLine)
    moved = [*lines]
    moved[one], moved[two] = replace(first, ids=second.ids), replace(second, ids=first.ids)
    return moved


def start_elsewhere(lines: list[Line]) -> list[Line]:
    at = next(k for k, line in enumerate(lines) if isinstance(line, StartLine) and line.number == 1)
    start = lines[at]
    assert isinstance(start, StartLine)
    return [*lines[:at], replace(start, step=3), *lines[at + 1 :]]


def replace_a_stranger(lines: list[Line]) -> list[Line]:
    at = step_at(lines, 3)
    step = lines[at]
    assert isinstance(step, StepLine)
    return [*lines[:at], replace(step, replaced=(999,)), *lines[at + 1 :]]


TAMPERINGS = [
    (lose_an_id, r"step 3 consumed 3 samples; 4 are selected|step 3: samples \d+ are selected"),
    (repeat_an_id, r"step 3: samples \d+ were consumed, but are not selected|epoch 0: samples \d+ come more than once"),
    (swap_ranks, "step 2: rank 0 consumed other samples, or in another order, than its plan says"),
    (leave_out_a_step, "step 5 follows step 3|start 1 continues after step 4, but the steps before it end at 3"),
    (another_seed, "step 1: samples .* are selected by seed and epoch, but were not consumed|an option was changed"),
    (another_world, "step 1 lists 2 DP ranks, its start has 4"),
    (swap_steps, "step 1: samples .* were consumed, but are not selected by seed and epoch"),
    (start_elsewhere, "start 1 continues after step 3, but the steps before it end at 4"),
    (replace_a_stranger, "step 3: samples 999 were replaced, but not consumed"),
]


@pytest.mark.parametrize(("edit", "message"), TAMPERINGS)
@pytest.mark.parametrize("in_memory", [False, True])
def test_a_tampered_ledger_is_found_out_even_with_checks_written_anew(
    *, tmp_path: Path, index: CostIndex, edit: Edit, message: str, in_memory: bool, edited: Edited
) -> None:
    folder = make_run(tmp_path / "run", index, in_memory=in_memory)
    report = edited(folder, edit)
    assert not report.holds
    found = [finding for finding in report.findings if re.search(message, finding)]
    assert found, report.findings


@pytest.mark.parametrize(("edit", "message"), [entry for entry in TAMPERINGS if entry[0] is not swap_ranks])
def test_most_tampering_is_found_without_the_plans_too(
    tmp_path: Path, index: CostIndex, edit: Edit, message: str, edited: Edited
) -> None:
    folder = make_run(tmp_path / "run", index)
    shutil.rmtree(folder / "plans")
    assert not edited(folder, edit).holds


def test_a_hand_that_edits_one_line_breaks_the_chain_of_checks(tmp_path: Path, index: CostIndex) -> None:
    folder = make_run(tmp_path / "run", index)
    path = folder / "ledger.jsonl"
    path.write_text(path.read_text().replace('"seed":5', '"seed":7'))
    report = verify_run(folder)
    assert not report.holds
    assert "line 1: it does not match its check" in report.findings[0]


def test_another_index_in_the_same_place_is_not_used(tmp_path: Path, index: CostIndex, edited: Edited) -> None:
    folder = make_run(tmp_path / "run", index)

    def other_index(lines: list[Line]) -> list[Line]:
        assert isinstance(lines[0], RunLine)
        return [replace(lines[0], index="f" * 64), *lines[1:]]

    report = edited(folder, other_index)
    assert report.holds
    assert report.ids_from == "first complete epoch"
    assert any(f"that of the run is {'f' * 64}" in note for note in report.notes)


def test_a_selector_that_cannot_be_computed_again_is_said(tmp_path: Path, index: CostIndex, edited: Edited) -> None:
    folder = make_run(tmp_path / "run", index)

    def mixture(lines: list[Line]) -> list[Line]:
        assert isinstance(lines[0], RunLine)
        return [replace(lines[0], selector="MixtureSelector"), *lines[1:]]

    report = edited(folder, mixture)
    assert report.holds
    assert report.num_selected == 0
    assert any("selected by 'MixtureSelector'" in note for note in report.notes)
    assert not edited(folder, swap_ranks).holds


def test_the_command_prints_a_report_or_json_and_its_exit_code_tells(
    tmp_path: Path, index: CostIndex, capsys: pytest.CaptureFixture[str], edited: Edited
) -> None:
    folder = make_run(tmp_path / "run", index)
    assert main(["verify", str(folder)]) == 0
    printed = capsys.readouterr()
    assert "exactly once" in printed.out
    assert "3 (3) in steps 5-8" in printed.out
    assert main(["verify", str(folder), "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["holds"] is True
    assert content["worlds"][0] == {"first_step": 1, "last_step": 4, "world_size": 2, "dp_size": 2}
    edited(folder, lose_an_id)
    assert main(["verify", str(folder), "--json"]) == 1
    printed = capsys.readouterr()
    assert json.loads(printed.out)["holds"] is False
    assert "does not prove that every sample was consumed once" in printed.err
    assert main(["verify", str(folder)]) == 1
    assert "WRONG: step 3" in capsys.readouterr().out


def test_a_run_without_a_finished_step_proves_nothing_and_is_no_error(
    tmp_path: Path, index: CostIndex, capsys: pytest.CaptureFixture[str], edited: Edited
) -> None:
    folder = make_run(tmp_path / "run", index)
    report = edited(folder, lambda lines: lines[:2])
    assert (report.findings, report.num_steps, report.num_starts) == ((), 0, 1)
    console = Console(width=200)
    print_report(report, console)
    printed = capsys.readouterr().out
    assert "no step was finished: nothing to prove" in printed
    assert "yes" not in printed
    assert main(["verify", str(folder)]) == 0


def test_no_run_and_no_ledger_are_usage_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(tmp_path / "gone")]) == 2
    assert main(["verify", str(tmp_path)]) == 2
    assert "ledger.jsonl does not exist" in capsys.readouterr().err


def test_an_empty_ledger_proves_nothing(tmp_path: Path) -> None:
    (tmp_path / "ledger.jsonl").touch()
    assert verify_run(tmp_path).findings == ("the ledger is empty",)
    assert not np.any(verify_run(tmp_path).worlds)
