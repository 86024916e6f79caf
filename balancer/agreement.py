"""One small collective per step, so that no rank starts a step that another one cannot run.

    every rank: (failed, label tokens, replica, digests of inputs and plan) int64 [5]  --all-gather, gloo-->  [R, 5]
        some rank failed        the same RankError on every rank, with that rank's text
        digests differ          the same PlanMismatchError on every rank
        replicas are not shared out evenly      the same LayoutError on every rank
        else                    the step's label tokens over all ranks

Ranks have to come here equally often, which plans see to: every rank has the same steps. The group is a gloo group of
its own, made once per world; whoever makes it must be joined by all ranks, so it is made at the first step.

Price: about a third of a millisecond for two ranks on one machine, and a rank waits here for the slowest loader instead
of in the first collective of the step.
"""

from collections.abc import Callable

import numpy as np
import torch.distributed as dist

from balancer.errors import LayoutError
from balancer.exchange import RankGroup
from balancer.plan import require_same

_WORDS = 15  # hex digits of a digest that fit into an int64


class Agreement:
    """The ranks that load together.

    Args:
        world_size: processes; 1: alone, errors are raised as they are.
        dp_size, dp_rank: replicas among them, and this rank's; ranks of one replica load the same and count once.
    """

    def __init__(self, *, world_size: int, dp_size: int, dp_rank: int) -> None:
        self._alone, self._dp_size, self._dp_rank = world_size == 1, dp_size, dp_rank

    def agree(
        self,
        error: Exception | None,
        label_tokens: int | None,
        digests: tuple[str, str],
        *,
        doing: Callable[[], str],
    ) -> int | None:
        """Label tokens of the step over all replicas; None where a rank does not know its own.

        Args:
            error: what this rank met. label_tokens: of this rank's micro-batches.
            digests: hex, of the inputs of the plan and of the plan.
            doing: says what was tried, for messages.

        Raises:
            RankError: some rank met an error. Alone, the error itself.
            PlanMismatchError: ranks planned from other inputs, or made other plans.
            LayoutError: two ranks take themselves for the same replica, or nobody for one.
        """
        if self._alone:
            if error is not None:
                raise error
            return label_tokens
        ranks = RankGroup(_world_over_gloo())
        own = [int(digest[:_WORDS], 16) for digest in digests]
        labels = -1 if label_tokens is None else label_tokens
        told = ranks.gather_numbers([error is not None, labels, self._dp_rank, *own])
        ranks.raise_together(told[:, 0].tolist(), error, doing())
        if (told[:, 3:] != told[0, 3:]).any():
            require_same([tuple(text.split()) for text in ranks.gather_texts(" ".join(digests))])  # type: ignore[misc]
        replicas, first, shares = np.unique(told[:, 2], return_index=True, return_counts=True)
        if len(replicas) != self._dp_size or (shares != shares[0]).any():
            raise LayoutError(
                f"the ranks load for the replicas {told[:, 2].tolist()}, in rank order, of dp_size={self._dp_size}: "
                f"each replica needs equally many ranks; pass each rank its own dp_rank=, or none"
            )
        return None if (told[:, 1] < 0).any() else int(told[first, 1].sum())


_made: list[tuple[dist.ProcessGroup, dist.ProcessGroup]] = []


def _world_over_gloo() -> dist.ProcessGroup:
    """A gloo group of all ranks for loaders alone, made once per world: all ranks iterate alike."""
    world = dist.group.WORLD
    if world is None:
        raise RuntimeError("the process group was destroyed while a loader was in use")
    if not _made or _made[0][0] is not world:
        _made[:] = [(world, dist.new_group(backend="gloo"))]
    return _made[0][1]
