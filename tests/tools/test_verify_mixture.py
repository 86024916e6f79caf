"""`balancer-analyze verify` on mixtures: each part exactly once per epoch of its own, also where weights changed."""

import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from balancer.cost_model import CostModel, StageCost, StageTerms
from balancer.layout import Layout
from balancer.ledger import LedgerWriter, ids_digest, read_lines
from balancer.ledger_lines import Line, PartLine, RunLine, StartLine, StepLine
from balancer.mixture import MixtureSelector, mixture_parts
from balancer.mixture_weights import MixtureWeights
from balancer.plan import Capacities
from balancer.plan_sequence import PlanSequence
from balancer.select import eligible_ids, split_held_out
from dataloaders.estimators import Qwen25VLConfig, Qwen25VLEstimator
from dataloaders.index import CostIndex, write_index
from dataloaders.index_concat import IndexConcat
from dataloaders.scan import scan_source
from dataloaders.tar_source import TarSource
from dataloaders.weight_schedule import WeightSchedule
from tools.cli import main
from tools.verify_command import VerifyReport, verify_run

CAPACITIES = Capacities(tokens=4000, patches=16000)
BATCH, SEED, SHARE = 6, 5, 0.1
SIZES = {"captions": 19, "pages": 26, "spare": 4}
Edit = Callable[[list[Line]], list[Line]]
Edited = Callable[[Path, Edit], VerifyReport]


@pytest.fixture(scope="module")
def parts(
    tmp_path_factory: pytest.TempPathFactory, write_shard: Callable[..., Path], chat_json: Any
) -> dict[str, CostIndex]:
    """Indices of three parts of text samples; the last one is never drawn."""
    home, made = tmp_path_factory.mktemp("parts"), {}
    for name, count in SIZES.items():
        samples = [(f"{i:03}.json", chat_json("Why? " * (i % 5 + 1), "So. " * (i % 3 + 1))) for i in range(count)]
        shards = [str(write_shard(home / f"{name}{k}.tar", samples[9 * k : 9 * k + 9])) for k in range(-(-count // 9))]
        index = scan_source(TarSource(shards), Qwen25VLEstimator(Qwen25VLConfig()))
        made[name] = write_index(home / name, index)
    return made


def weights(captions: float, pages: float, *, unit: str = "samples") -> MixtureWeights:
    given = {"captions": captions, "pages": pages, "spare": 0}
    schedules = {name: WeightSchedule.constant(weight) for name, weight in given.items()}
    return MixtureWeights(unit=unit, schedules=schedules)


def make_run(
    folder: Path,
    parts: Mapping[str, CostIndex],
    *,
    shuffle: str = "full",
    in_memory: bool = False,
    changed: MixtureWeights | None = None,
    steps: int = 16,
) -> Path:
    """Ledger and plans of a run that was killed twice, changed its ranks, and its weights at both resumes."""
    index = IndexConcat(parts)
    ids = split_held_out(eligible_ids(index, CAPACITIES).ids, share=SHARE, seed=SEED)[0]
    own = mixture_parts(index, ids, index.ranges, shuffle=shuffle)  # type: ignore[arg-type]
    run = RunLine(
        index=index.fingerprint,
        source=index.key.source,
        index_folder="",
        data="mixture.yaml",
        num_samples=len(index),
        num_ids=len(ids),
        ids_digest=ids_digest(ids),
        seed=SEED,
        global_batch_size=BATCH,
        shuffle=shuffle,
        block_shards=2,
        eval_share=SHARE,
        capacity_tokens=4000,
        capacity_patches=16000,
        selector="mixture",
        parts=tuple(
            PartLine(
                name=part.name,
                index=parts[part.name].fingerprint,
                source=parts[part.name].key.source,
                index_folder="" if in_memory else str(parts[part.name].folder),
                data=f"{part.name}.tar",
                num_samples=len(parts[part.name]),
                num_ids=len(part.ids),
                ids_digest=ids_digest(part.ids),
                llm_tokens=part.llm_tokens,
                visual_tokens=part.visual_tokens,
            )
            for part in own
        ),
    )
    term = StageCost(forward=StageTerms(per_token_ns=1.0), backward=StageTerms(per_token_ns=2.0))
    (folder / "plans").mkdir(parents=True)
    held, saved = weights(1, 1), 0
    later = [held, changed or weights(2, 1), weights(1, 1, unit="llm_tokens")]
    for (dp_size, until, saves), new in zip(((2, 5, 4), (3, 9, 7), (1, steps, steps)), later, strict=True):
        held = held.changed(saved, new)
        selector = MixtureSelector(
            own,
            held,
            seed=SEED,
            global_batch_size=BATCH,
            shuffle=shuffle,  # type: ignore[arg-type]
            block_shards=2,
        )
        plans = PlanSequence(
            index=index,
            ids=ids,
            global_batch_size=BATCH,
            layout=Layout(dp_size=dp_size),
            cost_model=CostModel(stages=(term, term)),
            capacities=CAPACITIES,
            selector=selector,
        )
        writer = LedgerWriter(
            folder / "ledger.jsonl", run, step=saved, world_size=dp_size, dp_size=dp_size, weights=held.to_state()
        )
        with writer:
            for step in range(saved, until):
                plan = plans.plan(step)
                cells = [
                    tuple(int(i) for m in range(plan.num_microbatches) for i in plan.members(rank, m))
                    for rank in range(dp_size)
                ]
                (folder / "plans" / f"step_{step + 1:06d}.json").write_text(plan.to_json())
                start = writer.start.number
                writer.write(
                    StepLine(step=step + 1, epoch=plan.epoch, cursor=plan.cursor, start=start, ids=tuple(cells))
                )
        saved = saves
    return folder


def change(lines: list[Line], at: int, **values: Any) -> list[Line]:
    return [*lines[:at], replace(lines[at], **values), *lines[at + 1 :]]


def position(lines: list[Line], kind: type, number: int) -> int:
    """Where step `number`, or start `number`, is."""
    return next(
        k
        for k, line in enumerate(lines)
        if isinstance(line, kind)
        and (line.step if isinstance(line, StepLine) else getattr(line, "number", 0)) == number
    )


@pytest.mark.parametrize("shuffle", ["full", "block", "none"])
@pytest.mark.parametrize("in_memory", [False, True])
def test_parts_are_proven_each_by_epochs_of_its_own_across_changes_of_weights_and_ranks(
    tmp_path: Path, parts: Mapping[str, CostIndex], shuffle: str, in_memory: bool
) -> None:
    report = verify_run(make_run(tmp_path / "run", parts, shuffle=shuffle, in_memory=in_memory))
    assert report.findings == ()
    assert report.holds
    assert (report.num_steps, report.num_samples, report.num_starts, report.num_discarded) == (16, 96, 3, 3)
    assert report.weight_changes == (4, 7)
    read = {part.name: part.num_complete * part.num_ids + part.unfinished for part in report.parts}
    assert sum(read.values()) == 96
    assert read["spare"] == 0
    assert [part.num_complete > 1 for part in report.parts] == [True, True, False]
    assert report.num_placed == 16
    assert report.num_selected == (0 if in_memory else 16)
    assert report.ids_from == ("" if in_memory else "index")
    assert any("each came once per epoch of its part" in note for note in report.notes) == in_memory


def swap_one(lines: list[Line], step: int, other: int) -> list[Line]:
    """The first sample of the step becomes the first of another step."""
    at, source = position(lines, StepLine, step), lines[position(lines, StepLine, other)]
    line = lines[at]
    assert isinstance(line, StepLine)
    assert isinstance(source, StepLine)
    return change(lines, at, ids=((source.ids[0][0], *line.ids[0][1:]), *line.ids[1:]))


def repeat_a_sample(lines: list[Line]) -> list[Line]:
    return swap_one(lines, 2, 1)


def lose_a_sample(lines: list[Line]) -> list[Line]:
    at = position(lines, StepLine, 3)
    line = lines[at]
    assert isinstance(line, StepLine)
    return change(lines, at, ids=(line.ids[0][1:], *line.ids[1:]))


def leave_out_the_change_of_weights(lines: list[Line]) -> list[Line]:
    first = lines[position(lines, StartLine, 0)]
    assert isinstance(first, StartLine)
    return change(lines, position(lines, StartLine, 1), weights=first.weights)


def change_the_past(lines: list[Line]) -> list[Line]:
    at = position(lines, StartLine, 1)
    line = lines[at]
    assert isinstance(line, StartLine)
    schedule = {**line.weights[0]["schedules"], "captions": [{"start": 0, "weight": 5.0, "over": 0}]}
    return change(lines, at, weights=({**line.weights[0], "schedules": schedule}, *line.weights[1:]))


def damage_the_weights(lines: list[Line]) -> list[Line]:
    return change(lines, position(lines, StartLine, 1), weights=({"unit": "bananas"},))


def read_a_part_that_was_left_out(lines: list[Line]) -> list[Line]:
    at = position(lines, StepLine, 1)
    line = lines[at]
    assert isinstance(line, StepLine)
    assert isinstance(lines[0], RunLine)
    stranger = lines[0].num_samples - 1
    return change(lines, at, ids=((stranger, *line.ids[0][1:]), *line.ids[1:]))


def claim_a_smaller_part(lines: list[Line]) -> list[Line]:
    assert isinstance(lines[0], RunLine)
    captions, *others = lines[0].parts
    return change(lines, 0, parts=(replace(captions, num_samples=captions.num_samples - 1), *others))


def claim_other_tokens(lines: list[Line]) -> list[Line]:
    assert isinstance(lines[0], RunLine)
    captions, *others = lines[0].parts
    return change(lines, 0, parts=(replace(captions, llm_tokens=5 * captions.llm_tokens), *others))


def claim_empty_steps(lines: list[Line]) -> list[Line]:
    return change(lines, 0, global_batch_size=0)


def another_epoch(lines: list[Line]) -> list[Line]:
    return change(lines, position(lines, StepLine, 5), epoch=3)


TAMPERINGS = [
    (repeat_a_sample, r"step 2, part '\w+': samples \d+ come again before the others of epoch 0 of this part"),
    (lose_a_sample, r"step 3 consumed 5 samples; 6 are selected"),
    (leave_out_the_change_of_weights, r"step [567] consumed \d samples of part '\w+'; its weights ask for \d"),
    (change_the_past, "start 1: its weights are others than before for steps that were run"),
    (damage_the_weights, "start 1: its weights cannot be: the saved weights of the mixture are damaged"),
    (read_a_part_that_was_left_out, "step 1 consumed 1 samples of part 'spare'; its weights ask for 0"),
    (claim_a_smaller_part, "its parts do not make up the 49 samples of the run"),
    (claim_other_tokens, r"step \d+ consumed \d samples of part|are not those of the run"),
    (claim_empty_steps, "step 1 of such a run cannot be: global_batch_size=0: a step holds at least one sample"),
    (another_epoch, "step 5 is at epoch 3, sample 24; it belongs at epoch 0, sample 24"),
]


@pytest.mark.parametrize(("edit", "message"), TAMPERINGS)
@pytest.mark.parametrize("in_memory", [False, True])
def test_tampering_with_a_mixture_is_found_out_even_with_checks_written_anew(
    *, tmp_path: Path, parts: Mapping[str, CostIndex], edit: Edit, message: str, in_memory: bool, edited: Edited
) -> None:
    folder = make_run(tmp_path / "run", parts, in_memory=in_memory)
    shutil.rmtree(folder / "plans")
    report = edited(folder, edit)
    assert not report.holds
    assert [finding for finding in report.findings if re.search(message, finding)], report.findings


def test_samples_that_change_places_within_an_epoch_are_found_with_the_indices_and_by_the_plans(
    tmp_path: Path, parts: Mapping[str, CostIndex], edited: Edited
) -> None:
    def swap(lines: list[Line]) -> list[Line]:
        """Two samples of one part, of steps 1 and 2."""
        one, two = position(lines, StepLine, 1), position(lines, StepLine, 2)
        first, second = lines[one], lines[two]
        assert isinstance(first, StepLine)
        assert isinstance(second, StepLine)
        a = next(i for i in first.ids[0] if i < SIZES["captions"])
        b = next(i for rank in second.ids for i in rank if i < SIZES["captions"])

        def swapped(ids: tuple[tuple[int, ...], ...]) -> tuple[tuple[int, ...], ...]:
            return tuple(tuple({a: b, b: a}.get(i, i) for i in rank) for rank in ids)

        return change(change(lines, one, ids=swapped(first.ids)), two, ids=swapped(second.ids))

    with_index = make_run(tmp_path / "indexed", parts)
    shutil.rmtree(with_index / "plans")
    found = edited(with_index, swap).findings
    assert any("step 1: samples" in finding and "not selected by seed and epoch" in finding for finding in found)
    without = make_run(tmp_path / "in-memory", parts, in_memory=True)
    assert any("or in another order, than its plan says" in finding for finding in edited(without, swap).findings)


def test_weights_that_were_lost_with_a_process_leave_no_trace_in_the_proof(
    tmp_path: Path, parts: Mapping[str, CostIndex], edited: Edited
) -> None:
    """The second start dies before its first checkpoint; the third continues the first one with weights of its own."""
    folder = make_run(tmp_path / "run", parts)
    lines = [line for line in read_lines(folder / "ledger.jsonl") if not isinstance(line, StepLine) or line.step <= 4]
    kept = [line for line in lines if not (isinstance(line, StartLine) and line.number == 2)]
    assert isinstance(kept[-1], StartLine)
    held = weights(1, 1).changed(4, weights(1, 3))
    third = replace(kept[-1], number=2, weights=tuple(held.to_state()))
    assert edited(folder, lambda _: [*kept, third]).holds


def test_the_report_names_the_parts(
    tmp_path: Path, parts: Mapping[str, CostIndex], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(make_run(tmp_path / "run", parts))]) == 0
    printed = capsys.readouterr().out
    assert re.search(r"of captions .* \d epochs of \d+ and \d+ samples of the next", printed)
    assert re.search(r"weights changed after steps .* 4, 7", printed)
