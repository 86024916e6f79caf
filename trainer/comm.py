"""Every collective and every message of the trainer goes through here, over groups that are made once.

    world rank = dp_rank * pp_size + pp_rank
    stage group: the ranks that hold the same pieces (one per replica)   -> gradient sums
    replica group: the pipeline ranks of one replica                      -> norms over stages
    channels: one process group per directed pair of neighbours            -> activations forward, gradients back

A channel has a group of its own so that its messages are FIFO and never matched with those of another direction.
One process alone has no process group: the same calls return their input. `cluster` is the label of the rank's
cluster; today all ranks share one.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from balancer.layout import Layout
from trainer.errors import ConfigError, LostRankError

Item = TypeVar("Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class Comm:
    """The groups of this rank.

    Attributes:
        layout: degrees of the job.
        rank, dp_rank, pp_rank: this process.
        device: where messages and pieces live.
        stage_group: ranks with the same pp_rank (None in one process).
        replica_group: ranks with the same dp_rank (None in one process).
        channels: (source rank, destination rank, "forward" | "backward") -> group, only those of this rank.
        cluster: label of the cluster this rank belongs to.
    """

    layout: Layout
    rank: int
    device: torch.device
    stage_group: dist.ProcessGroup | None = None
    replica_group: dist.ProcessGroup | None = None
    channels: dict[tuple[int, int, str], dist.ProcessGroup] = field(default_factory=dict)
    cluster: str = "default"

    @property
    def dp_rank(self) -> int:
        """Replica of this process."""
        return self.layout.coordinates(self.rank)[0]

    @property
    def pp_rank(self) -> int:
        """Pipeline rank of this process."""
        return self.layout.coordinates(self.rank)[1]

    @property
    def world_size(self) -> int:
        """Number of processes."""
        return self.layout.world_size

    @property
    def is_main(self) -> bool:
        """Whether this rank writes files and prints."""
        return self.rank == 0

    def sum_over_stage_group(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum in place over the replicas' copies of this rank's pieces."""
        if self.layout.dp_size > 1:
            dist.all_reduce(tensor, group=self.stage_group)
        return tensor

    def sum_over_replica_group(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum in place over the pipeline ranks of this replica."""
        if self.layout.pp_size > 1:
            dist.all_reduce(tensor, group=self.replica_group)
        return tensor

    def sum_over_world(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum in place over all ranks."""
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return tensor

    def gather(self, item: Item) -> list[Item]:
        """`item` of every rank, in rank order, on every rank. Doubles as the barrier of a step boundary."""
        if self.world_size == 1:
            return [item]
        items: list[Any] = [None] * self.world_size
        dist.all_gather_object(items, item)
        return items

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.world_size > 1:
            dist.barrier()

    def send(self, tensor: torch.Tensor, destination: int, direction: str) -> dist.Work:
        """Start sending on the channel to `destination`; keep the tensor alive until the work is waited for."""
        work = dist.isend(tensor, destination, group=self.channels[self.rank, destination, direction])
        return _started(work)

    def receive(self, tensor: torch.Tensor, source: int, direction: str) -> dist.Work:
        """Start receiving into `tensor` from the channel of `source`."""
        work = dist.irecv(tensor, source, group=self.channels[source, self.rank, direction])
        return _started(work)


def _started(work: dist.Work | None) -> dist.Work:
    if work is None:  # torch returns None to ranks outside the group
        raise ConfigError("a message was addressed to a channel this rank is not part of")
    return work


def single_process(device: torch.device | None = None) -> Comm:
    """The communicator of one process alone."""
    return Comm(layout=Layout(), rank=0, device=device or default_device())


def default_device() -> torch.device:
    """This rank's CUDA device where there is one, else the CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    return torch.device("cpu")


def launched_world_size() -> int:
    """World size set by torchrun; 1 without it."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@contextmanager
def communicator(*, pp_size: int = 1, timeout_s: float = 600.0, device: torch.device | None = None) -> Iterator[Comm]:
    """Process groups from torchrun's environment for `pp_size` pipeline ranks per replica; torn down at the end.

    Raises:
        LayoutError: `pp_size` does not divide the world.
        LostRankError: another rank ended, was killed, or did not answer within `timeout_s`.
    """
    world_size = launched_world_size()
    layout = Layout.for_world(world_size, pp_size=pp_size)
    device = device or default_device()
    if world_size == 1:
        yield single_process(device)
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout_s))
    try:
        yield _connect(layout, dist.get_rank(), device)
        dist.barrier()  # a rank that leaves early would break its peers' last messages
    except RuntimeError as error:
        if not _is_lost_peer(error):
            raise
        raise LostRankError(
            f"lost contact with another rank: {str(error).splitlines()[0]} Look at what the rank that ended first has "
            f"printed; --resume then continues from the newest checkpoint."
        ) from error
    finally:
        dist.destroy_process_group()


def _is_lost_peer(error: RuntimeError) -> bool:
    """Whether torch reports a broken or silent connection; gloo's errors have no type of their own."""
    return isinstance(error, dist.DistError) or "/gloo/" in str(error)


def _connect(layout: Layout, rank: int, device: torch.device) -> Comm:
    """Create all groups in the same order on every rank (torch requires it) and keep this rank's."""
    dp_ranks, pp_ranks = range(layout.dp_size), range(layout.pp_size)
    stage_group = _own_group(rank, [[layout.rank(dp, pp) for dp in dp_ranks] for pp in pp_ranks])
    replica_group = _own_group(rank, [[layout.rank(dp, pp) for pp in pp_ranks] for dp in dp_ranks])
    channels: dict[tuple[int, int, str], dist.ProcessGroup] = {}
    for dp in dp_ranks:
        for pp in pp_ranks[:-1]:
            low, high = layout.rank(dp, pp), layout.rank(dp, pp + 1)
            for source, destination, direction in ((low, high, "forward"), (high, low, "backward")):
                group = dist.new_group([low, high])
                if rank in (low, high):
                    channels[source, destination, direction] = group
    return Comm(
        layout=layout,
        rank=rank,
        device=device,
        stage_group=stage_group,
        replica_group=replica_group,
        channels=channels,
    )


def _own_group(rank: int, members: Sequence[Sequence[int]]) -> dist.ProcessGroup | None:
    own = None
    for ranks in members:
        group = dist.new_group(list(ranks))
        if rank in ranks:
            own = group
    return own
