"""What a loader has done in an epoch, in numbers that add up: nothing is dropped, repeated or padded in silence.

samples of the dataset = used + left out at the end of the epoch + unusable or oversize + not reached yet
"""

from dataclasses import dataclass

from balancer.plan import StepPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderReport:
    """One epoch so far.

    Attributes:
        epoch: from 0. num_steps: handed out; num_microbatches: of this rank.
        samples_used: over all ranks. samples_of_rank: of this rank.
        samples_left_out: by the end of every such epoch, because they do not make a step.
        samples_unusable: of the dataset, in no epoch: unusable, or larger than a micro-batch under oversize="drop".
        label_tokens: over all ranks (None: not known). padded_tokens: of this rank, by `align_tokens`.
        imbalance_before, imbalance_after: mean over steps of max / mean busy time over ranks, predicted: in drawn
            order, and balanced.
        bound_ratio: mean over steps of predicted makespan / lower bound. 1: no placement takes less.
        gain: predicted time in drawn order / predicted time balanced, over all steps.
        data_wait_ms, agreement_wait_ms: mean time per step that the loop waited for batches of this rank, and for the
            other ranks to have theirs.
    """

    epoch: int
    num_steps: int
    num_microbatches: int
    samples_used: int
    samples_of_rank: int
    samples_left_out: int
    samples_unusable: int
    label_tokens: int | None
    padded_tokens: int
    imbalance_before: float
    imbalance_after: float
    bound_ratio: float
    gain: float
    data_wait_ms: float
    agreement_wait_ms: float

    def text(self) -> str:
        """In one line."""
        return (
            f"epoch {self.epoch}: {self.num_steps} steps, {self.samples_used} samples used, {self.samples_left_out} "
            f"left out at the end, {self.samples_unusable} unusable or oversize; predicted imbalance "
            f"{self.imbalance_before:.3f} -> {self.imbalance_after:.3f}, {self.gain:.2f}x the speed of drawn order, "
            f"{self.bound_ratio:.3f} of the lower bound; waited {self.data_wait_ms:.1f} ms a step for data, "
            f"{self.agreement_wait_ms:.1f} ms for other ranks"
        )


@dataclass(slots=True, kw_only=True)
class Tally:
    """Sums over the steps of an epoch."""

    epoch: int = 0
    num_steps: int = 0
    num_microbatches: int = 0
    samples_used: int = 0
    samples_of_rank: int = 0
    label_tokens: int | None = 0
    padded_tokens: int = 0
    data_wait_ms: float = 0.0
    agreement_wait_ms: float = 0.0
    _before: float = 0.0
    _after: float = 0.0
    _bound: float = 0.0
    _before_ns: int = 0
    _after_ns: int = 0

    def add(self, plan: StepPlan, *, samples_of_rank: int, label_tokens: int | None, padded_tokens: int) -> None:
        """A step that is being handed out."""
        self.num_steps += 1
        self.num_microbatches += plan.num_microbatches
        self.samples_used += len(plan.sample_ids)
        self.samples_of_rank += samples_of_rank
        known = self.label_tokens is not None and label_tokens is not None
        self.label_tokens = (self.label_tokens or 0) + (label_tokens or 0) if known else None
        self.padded_tokens += padded_tokens
        self._before += plan.imbalance_before
        self._after += plan.imbalance_after
        self._bound += plan.makespan_ns / plan.lower_bound_ns if plan.lower_bound_ns else 1.0
        self._before_ns += plan.makespan_before_ns
        self._after_ns += plan.makespan_ns

    def report(self, *, samples_left_out: int, samples_unusable: int) -> LoaderReport:
        """The sums as they stand."""
        steps = max(1, self.num_steps)
        return LoaderReport(
            epoch=self.epoch,
            num_steps=self.num_steps,
            num_microbatches=self.num_microbatches,
            samples_used=self.samples_used,
            samples_of_rank=self.samples_of_rank,
            samples_left_out=samples_left_out,
            samples_unusable=samples_unusable,
            label_tokens=self.label_tokens,
            padded_tokens=self.padded_tokens,
            imbalance_before=self._before / steps,
            imbalance_after=self._after / steps,
            bound_ratio=self._bound / steps,
            gain=self._before_ns / self._after_ns if self._after_ns else 1.0,
            data_wait_ms=self.data_wait_ms / steps,
            agreement_wait_ms=self.agreement_wait_ms / steps,
        )
