"""What rank 0 writes while a run trains, in one place: plans, step records, the ledger, bad samples.

before step 1    selection/                 (what a proof needs to select again, see balancer.run_evidence)
before a step    plans/step_N.json          (a message about a step that fails refers to its plan)
in a step        bad_samples.jsonl          (also those of a step that exceeds a budget, and of validations)
after a step     ledger.jsonl, steps.jsonl  (flushed before the next step can move a weight)
before a checkpoint                         ledger synced: no checkpoint knows more steps than the ledger
in a checkpoint   where the last lines of both lie, so that a resume reads them and what follows, not the run
"""

from collections.abc import Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import numpy as np

from balancer.ledger import MAX_ID, LedgerMark, LedgerWriter, ids_digest
from balancer.ledger_groups import recorded_groups, runs_digest
from balancer.ledger_lines import MIXTURE_SELECTOR, STEP_SELECTOR, RunLine, StepLine
from balancer.mixture import MixtureSelector
from balancer.plan import StepPlan
from balancer.plan_sequence import PlanSequence
from balancer.records import RecordWriter, Replaced, StepRecord
from balancer.run_evidence import RunEvidence
from dataloaders.adjusted_index import AdjustedIndex
from dataloaders.index import CostIndex
from trainer.bad_samples import BadSamples
from trainer.comm import Comm
from trainer.config import FitConfig
from trainer.data import DataSide, read_groups
from trainer.mixture import part_lines
from trainer.run_folder import RunFolder

REACHED_KEY = "reached"  # in the progress of a checkpoint


class RunLog:
    """The files of one start of a run.

    Args:
        folder: of the run.
        run: first line of its ledger.
        side: training data, for the list of bad samples.
        plans: of the training; the ledger keeps the weights of a mixture.
        finished_steps: steps that the training has behind it.
        reached: what `sync` gave for the checkpoint of these steps; files that it does not fit are read whole.

    Raises:
        LedgerError, RecordFormatError: files of the folder are damaged or of another run.
    """

    def __init__(
        self,
        folder: RunFolder,
        run: RunLine,
        side: DataSide,
        plans: PlanSequence,
        *,
        finished_steps: int,
        comm: Comm,
        reached: Mapping[str, Any] | None = None,
    ) -> None:
        selector = plans.selector
        self._folder = folder
        ledger, last_record = _reached(reached)
        with ExitStack() as stack:
            self._records = stack.enter_context(
                RecordWriter(folder.steps_path, finished_steps=finished_steps, last_record=last_record)
            )
            self._ledger = stack.enter_context(
                LedgerWriter(
                    folder.ledger_path,
                    run,
                    step=finished_steps,
                    world_size=comm.world_size,
                    dp_size=comm.layout.dp_size,
                    weights=selector.weights.to_state() if isinstance(selector, MixtureSelector) else (),
                    mark=ledger,
                )
            )
            self._bad = stack.enter_context(BadSamples(folder.bad_samples_path, side, finished_steps=finished_steps))
            self._open = stack.pop_all()

    def before(self, plan: StepPlan) -> None:
        """Store the plan of a step that is about to run."""
        self._folder.write_plan(plan)

    def replaced(self, plan: StepPlan, items: tuple[Replaced, ...]) -> None:
        """List samples that were replaced in a step."""
        if items:
            self._bad.add(plan.step + 1, items)

    def left_out_of_validation(self, step: int, items: tuple[Replaced, ...], index: CostIndex) -> None:
        """List held-out samples, by their own index, that a validation after `step` steps could not read."""
        if items:
            self._bad.add_held_out(step, items, index)

    def after(self, plan: StepPlan, record: StepRecord, consumed: tuple[tuple[int, ...], ...]) -> None:
        """Record a step that has moved the weights; `consumed` are the ids of each DP rank."""
        self._ledger.write(
            StepLine(
                step=record.step,
                epoch=plan.epoch,
                cursor=plan.cursor,
                start=self._ledger.start.number,
                ids=consumed,
                replaced=tuple(sorted(item.sample_id for item in record.replaced)),
            )
        )
        self._records.write(record)

    def sync(self) -> dict[str, Any]:
        """Bring ledger and records to the disk; JSON values that say how far they reach."""
        self._ledger.sync()
        self._records.sync()
        return {"ledger": self._ledger.mark.to_state(), "last_record": self._records.last_record}

    def close(self) -> None:
        """Close all files; a second call does nothing."""
        self._open.close()

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _reached(reached: Mapping[str, Any] | None) -> tuple[LedgerMark | None, int | None]:
    """(mark of the ledger, bytes before the last record); None for what a checkpoint does not tell."""
    if not isinstance(reached, Mapping):
        return None, None
    begin = reached.get("last_record")
    return LedgerMark.from_state(reached.get("ledger")), begin if type(begin) is int and 0 <= begin < MAX_ID else None


def run_line(config: FitConfig, side: DataSide, train_ids: np.ndarray, evidence: RunEvidence) -> RunLine:
    """What a run is, for its ledger; price: one pass over the ids, and in block shuffle over the index."""
    index, cost = side.index, evidence.lookahead_cost
    scanned = index.base if isinstance(index, AdjustedIndex) else index
    groups = read_groups(side, config)
    runs = () if groups is None else recorded_groups(groups, index.shard_numbers)
    return RunLine(
        index=index.fingerprint,
        base_index="" if scanned is index else scanned.fingerprint,
        source=side.source.fingerprint,
        index_folder=str(scanned.folder or ""),
        data=str(config.mixture or config.data or "the demo corpus"),
        num_samples=len(index),
        num_ids=len(train_ids),
        ids_digest=ids_digest(train_ids),
        seed=config.seed,
        global_batch_size=config.global_batch_size,
        shuffle=config.shuffle,
        block_shards=config.shuffle_block_shards,
        groups_digest=runs_digest(runs),
        group_runs=runs,
        eval_share=0.0 if config.eval_data else config.eval_share,
        capacity_tokens=config.capacity_tokens,
        capacity_patches=config.patch_limit,
        capacity_bytes=config.activation_bytes or 0,
        step_tokens=config.step_tokens or 0,
        tail=config.tail,
        lookahead_steps=config.lookahead_steps,
        lookahead_cost="" if cost is None else cost.fingerprint,
        selector=STEP_SELECTOR if side.mixture is None else MIXTURE_SELECTOR,
        parts=part_lines(side, train_ids),
    )
