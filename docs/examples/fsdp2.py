"""FSDP2 (`fully_shard`): the same two lines as under DDP, and a checkpoint of whole tensors.

    torchrun --nproc-per-node 2 fsdp2.py [NUM_EPOCHS]

Every rank runs every layer equally often, because each has a sample in every micro-batch. Models that skip a part for
some samples (a vision tower, for text) need `media_presence`, see docs/loader.md.
"""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict as checkpoints
from torch.distributed.fsdp import fully_shard
from torch.utils.data import Dataset

from balancer import BalancedDataLoader

CHECKPOINT = Path("checkpoint.pt")
WHOLE = checkpoints.StateDictOptions(full_state_dict=True, cpu_offload=True, broadcast_from_rank0=True)


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
    for layer in (model[1], model[3], model):
        fully_shard(layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    data, world_size = Stories(), dist.get_world_size()
    labels = {"label_tokens": [length - 1 for length in data.lengths]}
    loader = BalancedDataLoader(
        data, 8 // world_size, shuffle=True, collate_fn=padded, cost=data.cost, cost_index=labels
    )
    if CHECKPOINT.exists():
        saved = torch.load(CHECKPOINT)
        loader.load_state_dict(saved["loader"])
        checkpoints.set_state_dict(
            model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"], options=WHOLE
        )
    while loader.epoch < num_epochs:
        for batch in loader:
            now, tokens = loader.current, batch.to(device)
            logits = model(tokens[:, :-1]).transpose(1, 2)
            loss_sum = nn.functional.cross_entropy(logits, tokens[:, 1:], ignore_index=0, reduction="sum")
            # FSDP averages gradients over ranks, as DDP does: times world_size makes them sums.
            loss = loss_sum / now.step_label_tokens
            (loss * world_size).backward()
            optimizer.step()
            optimizer.zero_grad()
            loss = loss.detach()
            dist.all_reduce(loss)  # for the log alone: each rank has its part of the mean
            if dist.get_rank() == 0:
                print(f"step {now.step} loss {loss.item():.7f}", flush=True)
            if now.step % 5 == 4:
                whole_model, whole_optimizer = checkpoints.get_state_dict(model, optimizer, options=WHOLE)
                if dist.get_rank() == 0:
                    saved = {"model": whole_model, "optimizer": whole_optimizer, "loader": loader.state_dict()}
                    torch.save(saved, CHECKPOINT)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2)
