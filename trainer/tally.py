"""What went wrong with samples so far, and when it is too much: counted the same on every rank, kept in checkpoints.

    StepResult --after--> replaced ids, steps in a row with one | steps without a label, in a row | conformed media
                          over a budget: an error on every rank at the same step

A sample counts once, in however many epochs it is replaced. Budgets in a row tell a store or disk that fails (every
step has replaced samples) from a few bad files that are spread over the data.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainer.config import FitConfig
from trainer.errors import ReplacedBudgetError, SkippedBudgetError
from trainer.step import StepResult


@dataclass(slots=True, kw_only=True)
class Tally:
    """Counts of a whole run, resumed parts included.

    Attributes:
        replaced: ids of samples trained as zero-loss stand-ins.
        replaced_in_a_row: steps up to the last one that all had a replaced sample.
        skipped_steps: steps without any label token, which changed no weight.
        skipped_in_a_row: of them, those up to the last step.
        conformed: media that were made to fit their planned shape, summed over the steps.
        first_loss: training loss of the first step (NaN before it).
    """

    replaced: set[int] = field(default_factory=set)
    replaced_in_a_row: int = 0
    skipped_steps: int = 0
    skipped_in_a_row: int = 0
    conformed: int = 0
    first_loss: float = math.nan

    def add(self, step: int, result: StepResult, config: FitConfig) -> None:
        """Count a step (from 1) that was executed, before its weights are moved.

        Raises:
            ReplacedBudgetError, SkippedBudgetError: a budget is exceeded.
        """
        self.conformed += result.num_conformed
        self.replaced |= {item.sample_id for item in result.replaced}
        self.replaced_in_a_row = self.replaced_in_a_row + 1 if result.replaced else 0
        skipped = not result.weight_sum
        self.skipped_steps += skipped
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        self._check_replaced(step, result, config)
        if self.skipped_in_a_row > config.max_skipped_consecutive:
            raise SkippedBudgetError(
                f"step {step}: {self.skipped_in_a_row} steps in a row had no label token, the budget is "
                f"max_skipped_consecutive={config.max_skipped_consecutive}. Look at what carries labels with "
                f"'balancer-train plan --show-sample', label other turns with --train-on, or raise the budget."
            )

    def _check_replaced(self, step: int, result: StepResult, config: FitConfig) -> None:
        listed = "; ".join(f"{item.place}: {item.reason}" for item in result.replaced)
        if len(self.replaced) > config.max_replaced:
            raise ReplacedBudgetError(
                f"step {step}: {len(self.replaced)} samples could not be decoded as planned, the budget is "
                f"max_replaced={config.max_replaced}. Last ones: {listed}. Repair them or raise --max-replaced."
            )
        limit = config.max_replaced_consecutive
        if limit is not None and self.replaced_in_a_row > limit:
            raise ReplacedBudgetError(
                f"step {step}: {self.replaced_in_a_row} steps in a row had a sample that could not be decoded as "
                f"planned, the budget is max_replaced_consecutive={limit}. Last ones: {listed}. Look whether the store "
                f"that holds them fails, or raise --max-replaced-consecutive."
            )

    def to_progress(self) -> dict[str, Any]:
        """JSON values for a checkpoint."""
        return {
            "skipped_steps": self.skipped_steps,
            "skipped_in_a_row": self.skipped_in_a_row,
            "replaced": sorted(self.replaced),
            "replaced_in_a_row": self.replaced_in_a_row,
            "conformed": self.conformed,
            "first_loss": self.first_loss if math.isfinite(self.first_loss) else None,
        }

    @classmethod
    def from_progress(cls, progress: Mapping[str, Any]) -> "Tally":
        """The counts of a checkpoint; those in a row were not kept by earlier versions."""
        first_loss = progress["first_loss"]
        return cls(
            replaced={int(sample_id) for sample_id in progress["replaced"]},
            replaced_in_a_row=int(progress.get("replaced_in_a_row", 0)),
            skipped_steps=int(progress["skipped_steps"]),
            skipped_in_a_row=int(progress.get("skipped_in_a_row", 0)),
            conformed=int(progress["conformed"]),
            first_loss=math.nan if first_loss is None else float(first_loss),
        )
