"""Degrees of parallelism as a launcher or a device mesh states them. Reads attributes only: no torch, no group.

    DeviceMesh dims   pp   dp_replicate  dp_shard   tp      read from mesh_dim_names, shape, get_coordinate()
                      |    +-- product ------+      |
                      v            v                v
                   pp_size      dp_size          ranks that share the batches of their replica: not counted

    mesh (pp 2, dp_shard 4, tp 2), rank at (1, 3, 0)   ->   dp_size 4, pp_size 2, dp_rank 3

The data rank counts data dims in the order of the mesh, the last one fastest, so it is the same function on every rank.
Price: names decide. An expert dim (`ep`) whose ranks hold data of their own has to be named in `dp`.
"""

import math
import os
from collections.abc import Mapping, Sequence
from typing import Protocol

from balancer.errors import LayoutError

DATA_DIMS = ("dp", "dp_replicate", "dp_shard", "dp_shard_mod_ep", "dp_shard_in_ep", "fsdp", "hsdp")
PIPELINE_DIMS = ("pp",)
SHARING_DIMS = ("tp", "cp", "ep", "sp", "etp")


class MeshLike(Protocol):
    """The part of `torch.distributed.device_mesh.DeviceMesh` that is read."""

    @property
    def mesh_dim_names(self) -> tuple[str, ...] | None:
        """Name of every dim, outermost first."""

    @property
    def shape(self) -> Sequence[int]:
        """Ranks along every dim."""

    def get_coordinate(self) -> Sequence[int] | None:
        """Place of this process along every dim; None outside the mesh."""


Names = str | Sequence[str] | None


def mesh_sizes(mesh: MeshLike, *, dp: Names = None, pp: str | None = None) -> tuple[int, int]:
    """(dp_size, pp_size) of a mesh.

    Args:
        mesh: with named dims.
        dp: names of the dims that count as data; every other one but `pp` then shares batches. None: those of
            `DATA_DIMS`, and a dim that is neither data nor pipeline must be one of `SHARING_DIMS`.
        pp: name of the pipeline dim; None: "pp" where there is one.

    Raises:
        LayoutError: dims without names, a name that the mesh does not have or that nobody knows, a dim in two roles.
    """
    names = _names_of(mesh)
    data, pipeline = _roles(names, dp, pp)
    sizes = dict(zip(names, (int(size) for size in mesh.shape), strict=True))
    return math.prod(sizes[name] for name in data), math.prod(sizes[name] for name in pipeline)


def mesh_dp_rank(mesh: MeshLike, dp: Names = None, *, pp: str | None = None) -> int:
    """Data rank of this process in a mesh, 0 to dp_size - 1; arguments as for `mesh_sizes`.

    Ranks that differ in other dims only have the same data rank: they get the same batches.

    Raises:
        LayoutError: as `mesh_sizes`, or this process is outside the mesh.
    """
    names = _names_of(mesh)
    data, _ = _roles(names, dp, pp)
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        raise LayoutError(
            f"this process is not part of the DeviceMesh {_shown(mesh, names)}: only its members have a data rank; "
            "build the loader on those, or give the mesh that covers all processes"
        )
    rank = 0
    for name, place, size in zip(names, coordinate, mesh.shape, strict=True):
        if name in data:
            rank = rank * int(size) + int(place)
    return rank


def launched_world_size(environ: Mapping[str, str] | None = None) -> int:
    """Number of processes that torchrun (or any `env://` launcher) has started.

    Args:
        environ: None: that of this process.

    Raises:
        LayoutError: WORLD_SIZE is missing or no whole number from 1 on.
    """
    text = (os.environ if environ is None else environ).get("WORLD_SIZE")
    if text is None:
        raise LayoutError(
            "WORLD_SIZE is not set: start the script with torchrun, which sets it, or give the degrees yourself, "
            "ParallelSpec.pipeline(dp_size=1) for one process"
        )
    if not (text.isascii() and text.isdigit() and len(text) <= 20 and int(text) >= 1):
        raise LayoutError(f"WORLD_SIZE={text[:40]!r} is no number of processes; torchrun sets a whole number from 1 on")
    return int(text)


def _names_of(mesh: MeshLike) -> tuple[str, ...]:
    names = getattr(mesh, "mesh_dim_names", None)
    if not hasattr(mesh, "get_coordinate"):
        raise LayoutError(f"mesh is a {type(mesh).__name__}; give a torch DeviceMesh, or the degrees themselves")
    if not names or not all(isinstance(name, str) for name in names):
        raise LayoutError(
            f"the dims of the DeviceMesh {tuple(mesh.shape)} have no names, so nobody knows which of them is data; "
            'make it with init_device_mesh(..., mesh_dim_names=("dp", ...))'
        )
    return tuple(names)


def _roles(names: tuple[str, ...], dp: Names, pp: str | None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Dims that are data, and the one that is the pipeline, if there is one."""
    wanted = None if dp is None else (dp,) if isinstance(dp, str) else tuple(dp)
    for role, given in (("dp", wanted or ()), ("pp", () if pp is None else (pp,))):
        missing = [name for name in given if name not in names]
        if missing:
            raise LayoutError(f"{role}={missing[0]!r} is no dim of the mesh; its dims are {', '.join(names)}")
    pipeline = tuple(name for name in names if name in (PIPELINE_DIMS if pp is None else (pp,)))
    both = [name for name in pipeline if name in (wanted or ())]
    if both:
        raise LayoutError(f"dim {both[0]!r} cannot be data and pipeline at once: name it in dp or in pp")
    if wanted is not None:
        return tuple(name for name in names if name in wanted), pipeline
    data = tuple(name for name in names if name in DATA_DIMS and name not in pipeline)
    unknown = [name for name in names if name not in (*data, *pipeline, *SHARING_DIMS)]
    if unknown:
        raise LayoutError(
            f"dim {unknown[0]!r} of the mesh ({', '.join(names)}) is not known: data are {', '.join(DATA_DIMS)}, the "
            f"pipeline is pp, {', '.join(SHARING_DIMS)} share the batches of their replica. Say which dims are data "
            f"with dp=(...), and which one is the pipeline with pp=..."
        )
    return data, pipeline


def _shown(mesh: MeshLike, names: tuple[str, ...]) -> str:
    return " x ".join(f"{name} {int(size)}" for name, size in zip(names, mesh.shape, strict=True))
