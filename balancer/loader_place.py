"""Which replica this process is: from a layout, a device mesh, a process group, or nothing at all.

    parallel=                      replicas                         whose batches
    None                           the process group as pure DP     its rank          (no group: one process)
    Layout, ParallelSpec           dp_size                          rank // pipeline ranks
    DeviceMesh                     its data dimensions              its coordinate    (tp, cp, pp ranks share batches)

A rank that cannot be known is refused, not guessed: two ranks that read the same samples would train without a word.
"""

import logging
import os
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch.distributed as dist

from balancer.errors import LayoutError
from balancer.layout import Layout, Meet, ParallelSpec
from balancer.mesh import mesh_dp_rank

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where this process stands.

    Attributes:
        spec: what every step is planned for.
        dp_rank: whose batches.
        world_size: processes that read together; 1: nobody to agree with.
    """

    spec: ParallelSpec
    dp_rank: int
    world_size: int


def place_of(parallel: Any, dp_rank: int | None, *, meet: Meet) -> Place:
    """Resolve the loader's `parallel` and `dp_rank`.

    Raises:
        LayoutError: another kind of layout, a rank outside it or one that cannot be known, or a world of another size.
    """
    if meet not in get_args(Meet) or meet == "unit":
        raise LayoutError(f"meet={meet!r}: ranks that load data meet once a 'step' or in every 'microbatch'")
    joined = dist.is_available() and dist.is_initialized()
    world_size = dist.get_world_size() if joined else 1
    launched = dist.is_available() and dist.is_torchelastic_launched() and os.environ.get("WORLD_SIZE", "1") != "1"
    spec, of_mesh = _spec_of(parallel, world_size)
    if of_mesh is not None and dp_rank is None:
        dp_rank = of_mesh
    if not joined and dp_rank is None and (launched if parallel is None else spec.dp_size > 1):
        raise LayoutError(
            "which rank this is cannot be known: there is no process group yet. Call torch.distributed."
            "init_process_group before making the loader, or pass parallel= and dp_rank="
        )
    if parallel is None and not joined:
        _logger.info("no process group: balancing for one process (initialise it first, or pass parallel=)")
    if dp_rank is None:
        dp_rank = _own_rank(spec, world_size) if joined else 0
    if not 0 <= dp_rank < spec.dp_size:
        raise LayoutError(f"dp_rank={dp_rank} is outside dp_size={spec.dp_size}")
    return Place(
        spec=replace(spec, meet=meet, fill_cells=True),
        dp_rank=dp_rank,
        world_size=world_size if spec.dp_size > 1 else 1,
    )


def _spec_of(parallel: Any, world_size: int) -> tuple[ParallelSpec, int | None]:
    """(spec, DP rank if `parallel` knows it)."""
    if parallel is None:
        return ParallelSpec.pipeline(dp_size=world_size), None
    if isinstance(parallel, ParallelSpec):
        return parallel, None
    if isinstance(parallel, Layout):
        return ParallelSpec.of(parallel), None
    if hasattr(parallel, "mesh_dim_names"):
        return ParallelSpec.from_mesh(parallel), mesh_dp_rank(parallel)
    raise LayoutError(
        f"parallel={parallel!r}: give a balancer.ParallelSpec, a balancer.Layout or a torch DeviceMesh, or leave it "
        f"out for pure data parallelism"
    )


def _own_rank(spec: ParallelSpec, world_size: int) -> int:
    ranks = spec.dp_size * spec.num_ranks
    if ranks != world_size:
        raise LayoutError(
            f"parallel= is laid out for {ranks} processes (dp_size={spec.dp_size} x {spec.num_ranks} pipeline ranks), "
            f"but the process group has {world_size}; pass a layout of {world_size}, or dp_rank= if several ranks "
            f"share a replica's batches"
        )
    return dist.get_rank() // spec.num_ranks
