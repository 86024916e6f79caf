"""DistributedDataParallel with gradients accumulated over the micro-batches of a step.

    torchrun --nproc-per-node 2 ddp_accumulate.py [NUM_EPOCHS]

Ranks meet once a step, in the backward of its last micro-batch, so the loader evens out whole steps: `meet="step"`.
"""

import os
import sys
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from balancer import BalancedDataLoader, ParallelSpec

CHECKPOINT = Path("checkpoint.pt")
NUM_MICROBATCHES = 2


class Stories(Dataset[torch.Tensor]):
    """Token sequences of very unequal length; 0 is padding."""

    def __init__(self) -> None:
        self.lengths = [8 + (i % 3 == 0) * 37 * i % 400 for i in range(63)]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.tensor([(i % 46 + 1) * pow(3, place, 47) % 47 for place in range(self.lengths[i])])

    def cost(self, i: int) -> int:
        return self.lengths[i]


def padded(rows: list[torch.Tensor]) -> torch.Tensor:
    return nn.utils.rnn.pad_sequence(rows, batch_first=True)


def main(num_epochs: int) -> None:
    dist.init_process_group()
    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(47, 32), nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 47)).to(device)
    replica = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    data, world_size = Stories(), dist.get_world_size()
    labels = {"label_tokens": [length - 1 for length in data.lengths]}
    loader = BalancedDataLoader(
        data, 8 // NUM_MICROBATCHES // world_size, shuffle=True, collate_fn=padded,
        parallel=ParallelSpec.from_env(num_microbatches=NUM_MICROBATCHES), meet="step",
        cost=data.cost, cost_index=labels,
    )  # fmt: skip
    parts = {"model": model, "optimizer": optimizer, "loader": loader}
    if CHECKPOINT.exists():
        saved = torch.load(CHECKPOINT, map_location=device)
        for name, part in parts.items():
            part.load_state_dict(saved[name])
    while loader.epoch < num_epochs:
        loss = torch.zeros((), device=device)
        for batch in loader:
            now, tokens = loader.current, batch.to(device)
            with nullcontext() if now.is_last_microbatch else replica.no_sync():
                logits = replica(tokens[:, :-1]).transpose(1, 2)
                loss_sum = nn.functional.cross_entropy(logits, tokens[:, 1:], ignore_index=0, reduction="sum")
                # Tokens of the whole step: nothing is divided by the number of micro-batches.
                (loss_sum / now.step_label_tokens * world_size).backward()
            loss += loss_sum.detach() / now.step_label_tokens
            if now.is_last_microbatch:
                optimizer.step()
                optimizer.zero_grad()
                dist.all_reduce(loss)  # for the log alone: each rank has its part of the mean
                if dist.get_rank() == 0:
                    print(f"step {now.step} loss {loss.item():.7f}", flush=True)
                loss.zero_()
                if dist.get_rank() == 0 and now.step % 5 == 4:
                    torch.save({name: part.state_dict() for name, part in parts.items()}, CHECKPOINT)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2)
