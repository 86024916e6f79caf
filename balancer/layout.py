"""Where things run: parallel degrees and the mapping of ranks. Pure numbers, no torch, no process group.

    world rank = dp_rank * pp_size + pp_rank        (pipeline neighbours are rank neighbours)

The first form holds data-parallel replicas of a pipeline whose stage 0 may be the encoder; layouts per domain
(encoder and LLM each with their own degrees) grow from `Layout` later.
"""

from dataclasses import dataclass

from balancer.errors import LayoutError


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Degrees of parallelism of one domain or of the whole job.

    Attributes:
        dp_size: data-parallel replicas.
        pp_size: pipeline ranks of one replica. 1: every piece on one rank; P > 1: the encoder is stage 0 and the
            LLM layers are split over stages 1..P-1.
        tp_size, cp_size, ep_size: tensor, context and expert degrees; only 1 runs today.

    Raises:
        LayoutError: a degree below 1, or a degree that no executor runs yet.
    """

    dp_size: int = 1
    pp_size: int = 1
    tp_size: int = 1
    cp_size: int = 1
    ep_size: int = 1

    def __post_init__(self) -> None:
        for name in ("dp_size", "pp_size", "tp_size", "cp_size", "ep_size"):
            value = getattr(self, name)
            if value < 1:
                raise LayoutError(f"{name}={value}: a degree of parallelism is at least 1")
        for name in ("tp_size", "cp_size", "ep_size"):
            if getattr(self, name) != 1:
                raise LayoutError(f"{name}={getattr(self, name)} is not available yet; use {name}=1")

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.dp_size * self.pp_size * self.tp_size * self.cp_size

    def coordinates(self, rank: int) -> tuple[int, int]:
        """(dp_rank, pp_rank) of a world rank."""
        if not 0 <= rank < self.world_size:
            raise LayoutError(
                f"rank {rank} is outside a world of {self.world_size} (dp {self.dp_size} x pp {self.pp_size})"
            )
        return divmod(rank, self.pp_size)

    def rank(self, dp_rank: int, pp_rank: int) -> int:
        """World rank of a (dp_rank, pp_rank)."""
        return dp_rank * self.pp_size + pp_rank

    @classmethod
    def for_world(cls, world_size: int, *, pp_size: int = 1) -> "Layout":
        """The layout that fills `world_size` processes with replicas of `pp_size` pipeline ranks."""
        if pp_size < 1 or world_size % pp_size:
            divisors = [size for size in range(1, world_size + 1) if world_size % size == 0]
            nearest = min(divisors, key=lambda size: abs(size - pp_size))
            raise LayoutError(
                f"pp_size={pp_size} does not divide the world of {world_size} processes; "
                f"the nearest that does is {nearest}"
            )
        return cls(dp_size=world_size // pp_size, pp_size=pp_size)

    def stage_ranks(self) -> list[int]:
        """Pipeline rank of each cost stage (encoder, LLM 0, LLM 1, ...)."""
        return [0, *range(1, self.pp_size)] if self.pp_size > 1 else [0, 0]

    @property
    def num_stages(self) -> int:
        """Cost stages S: the encoder and at least one LLM stage."""
        return max(self.pp_size, 2)
