"""DistributedDataParallel: one line makes the loader, one divides the loss.

    torchrun --nproc-per-node 2 ddp.py [NUM_EPOCHS]

Goes on from checkpoint.pt if there is one, with any number of ranks that divides 8.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from balancer import BalancedDataLoader

CHECKPOINT = Path("checkpoint.pt")


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
        data, 8 // world_size, shuffle=True, collate_fn=padded, cost=data.cost, cost_index=labels
    )
    parts = {"model": model, "optimizer": optimizer, "loader": loader}
    if CHECKPOINT.exists():
        saved = torch.load(CHECKPOINT, map_location=device)
        for name, part in parts.items():
            part.load_state_dict(saved[name])
    while loader.epoch < num_epochs:
        for batch in loader:
            now, tokens = loader.current, batch.to(device)
            logits = replica(tokens[:, :-1]).transpose(1, 2)
            loss_sum = nn.functional.cross_entropy(logits, tokens[:, 1:], ignore_index=0, reduction="sum")
            # DDP averages gradients over ranks: times world_size makes them sums.
            loss = loss_sum / now.step_label_tokens
            (loss * world_size).backward()
            optimizer.step()
            optimizer.zero_grad()
            loss = loss.detach()
            dist.all_reduce(loss)  # for the log alone: each rank has its part of the mean
            if dist.get_rank() == 0:
                print(f"step {now.step} loss {loss.item():.7f}", flush=True)
            if dist.get_rank() == 0 and now.step % 5 == 4:
                torch.save({name: part.state_dict() for name, part in parts.items()}, CHECKPOINT)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2)
