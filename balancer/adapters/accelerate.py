"""`accelerator.prepare(loader)` leaves the loader as it is, and the loader does what accelerate's own would have done.

    accelerator.prepare(loader)   reads `_is_accelerate_prepared`: True, so that no rank's batches are split again
    first batch of an iteration   GradientState is told that an iteration runs
    every batch                   moved to accelerate's device
    last batch of the epoch       `end_of_dataloader`: `accelerator.accumulate` synchronises before its count is full
    end, or let go                GradientState forgets the iteration
    save_state, load_state        keep the loader's `state_dict`

With `gradient_accumulation_steps` = micro-batches of a step (or a multiple), `accumulate` synchronises on the last one
of a step, also of a short last step. `accelerator.backward` divides by that count, while a loss over the label tokens
of a step is whole already: multiply it by the count.

Prices. Make the loader after the Accelerator, which starts the process group. `Accelerator(device_placement=False)`,
`prepare(device_placement=[False])`, `split_batches`, `even_batches` and `dispatch_batches` say nothing to this loader;
tensors are moved asynchronously where `pin_memory=True`. Ranks have batches of unequal length and nothing pads them:
`accelerator.gather_for_metrics` drops nothing, but needs tensors of one shape on all ranks, or use_gather_object=True.
`accelerator.skip_first_batches` gives a plain DataLoader; resume with `load_state_dict` instead.
"""

import logging
import weakref
from collections.abc import Callable
from typing import Any

_logger = logging.getLogger(__name__)


class AcceleratePrepared:
    """A loader that accelerate takes as it is.

    Attributes:
        use_stateful_dataloader: `Accelerator.save_state` keeps, and `load_state` loads, what `state_dict` says.
    """

    use_stateful_dataloader = True
    _asked_by_accelerate = False
    _told_of_counts = False

    @property
    def _is_accelerate_prepared(self) -> bool:
        """True. accelerate reads it in `prepare` and nowhere else, which is how the loader knows of an Accelerator."""
        self._asked_by_accelerate = True
        return True

    @_is_accelerate_prepared.setter
    def _is_accelerate_prepared(self, prepared: bool) -> None:
        """accelerate marks what it has prepared."""


class AcceleratePass:
    """One iteration, as accelerate's GradientState looks at it.

    Attributes:
        end_of_dataloader: the batch in use is the last one of the epoch.
        remainder: samples to keep of it; 0: all.
    """

    def __init__(self, device: Any = None, *, non_blocking: bool = False) -> None:
        self.end_of_dataloader, self.remainder = False, 0
        self.end: Callable[[], Any] = _nothing
        self._device, self._non_blocking = device, non_blocking

    def hand_out(self, batch: Any, *, is_last: bool) -> Any:
        """The batch on accelerate's device."""
        self.end_of_dataloader = is_last
        if self._device is None:
            return batch
        from accelerate.utils import send_to_device

        return send_to_device(batch, self._device, non_blocking=self._non_blocking)


def begin_pass(
    loader: AcceleratePrepared, iteration: object, *, num_microbatches: int | None, non_blocking: bool
) -> AcceleratePass:
    """The pass of an iterator that is about to hand out its first batch; one without effect if no Accelerator asked.

    It ends with the iterator too: a loop that is left early would otherwise stay accelerate's active one.
    """
    if not loader._asked_by_accelerate:
        return AcceleratePass()
    from accelerate.state import DistributedType, GradientState, PartialState

    state, gradients = PartialState(), GradientState()
    _check_counts(loader, gradients.num_steps, num_microbatches)
    device = None if state.distributed_type == DistributedType.XLA else state.device
    begun = AcceleratePass(device, non_blocking=non_blocking)
    gradients._add_dataloader(begun)
    begun.end = weakref.finalize(iteration, _forget, gradients, begun)
    begun.end.atexit = False
    return begun


def _nothing() -> None:
    """No Accelerator is to be told."""


def _forget(gradients: Any, begun: AcceleratePass) -> None:
    if gradients.initialized:
        gradients._remove_dataloader(begun)


def _check_counts(loader: AcceleratePrepared, num_steps: int, num_microbatches: int | None) -> None:
    """Say once where `accumulate` counts past the end of a step.

    No error: accelerate has one count, and a loader for evaluation may have steps of its own.
    """
    if num_steps == 1 or loader._told_of_counts or (num_microbatches and num_steps % num_microbatches == 0):
        return
    loader._told_of_counts = True
    have = f"{num_microbatches} micro-batches" if num_microbatches else "as many micro-batches as they need"
    _logger.warning(
        "gradient_accumulation_steps=%d counts micro-batches, but the loader's steps have %s: accumulate() will "
        "synchronise inside a step; pass parallel=ParallelSpec.from_env(num_microbatches=%d), or another count",
        num_steps, have, num_steps,
    )  # fmt: skip
