"""One small collective per step, so that no rank starts a step that another one cannot run.

    every rank: (failed, label tokens, digest of inputs and plan) int64 [4]  --all-gather, gloo-->  [R, 4] on every rank
        some rank failed        the same RankError on every rank, with that rank's text
        digests differ          the same PlanMismatchError on every rank
        else                    the step's label tokens over all ranks

Ranks have to come here equally often, which plans see to: every rank has the same steps. The group is a gloo group of
its own, made once per world; whoever makes it must be joined by all ranks, so it is made at the first step.

Price: about a third of a millisecond for two ranks on one machine, and a rank waits here for the slowest loader instead
of in the first collective of the step.
"""

from collections.abc import Callable

import torch.distributed as dist

from balancer.exchange import RankGroup
from balancer.plan import require_same

_WORDS = 15  # hex digits of a digest that fit into an int64


class Agreement:
    """The ranks that load together.

    Args:
        world_size: processes; 1: alone, errors are raised as they are.
        dp_size: replicas among them; ranks of one replica load the same and count once.
    """

    def __init__(self, *, world_size: int, dp_size: int) -> None:
        self._ranks_per_replica = max(1, world_size // dp_size)
        self._alone = world_size == 1
        self._ranks: RankGroup | None = None

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
        """
        if self._alone:
            if error is not None:
                raise error
            return label_tokens
        ranks = self._group()
        own = [int(digest[:_WORDS], 16) for digest in digests]
        told = ranks.gather_numbers([error is not None, -1 if label_tokens is None else label_tokens, *own])
        ranks.raise_together(told[:, 0].tolist(), error, doing())
        if (told[:, 2:] != told[0, 2:]).any():
            require_same([tuple(text.split()) for text in ranks.gather_texts(" ".join(digests))])  # type: ignore[misc]
        labels = told[:, 1]
        return None if (labels < 0).any() else int(labels.sum()) // self._ranks_per_replica

    def _group(self) -> RankGroup:
        if self._ranks is None:
            self._ranks = RankGroup(_world_over_gloo())
        return self._ranks


_made: list[tuple[dist.ProcessGroup, dist.ProcessGroup]] = []


def _world_over_gloo() -> dist.ProcessGroup:
    """A gloo group of all ranks for loaders alone, made once per world: all ranks iterate alike."""
    world = dist.group.WORLD
    if world is None:
        raise RuntimeError("the process group was destroyed while a loader was in use")
    if not _made or _made[0][0] is not world:
        _made[:] = [(world, dist.new_group(backend="gloo"))]
    return _made[0][1]
