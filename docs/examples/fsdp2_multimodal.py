"""FSDP2 with a vision tower, where a rank may have text alone: `media_presence="dummy"`.

    torchrun --nproc-per-node 2 fsdp2_multimodal.py SHARD.tar [NUM_EPOCHS]

A sharded tower runs on all ranks together or not at all. Here a micro-batch without media carries one smallest medium
of zeros, and `place_visual` adds what the tower makes of it with weight zero.
"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

from balancer import BalancedDataLoader, MicroBatch, SampleDataset
from balancer.dummy_media import place_visual

# Stands for a model folder, whose processor decides how many patches a picture has and whose tokenizer makes tokens.
FILES = {"config": {"model_type": "qwen2_5_vl"}, "preprocessor_config": {"min_pixels": 3136, "max_pixels": 100352}}
VOCABULARY, WIDTH = 264, 32


class Model(nn.Module):
    """A tower and a head; a decoder would stand between, with attention within `cu_seqlens`."""

    def __init__(self, patch_dim: int, merge: int) -> None:
        super().__init__()
        self.merge = merge
        self.tower = nn.Sequential(nn.Linear(patch_dim, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))
        self.embed, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, batch: MicroBatch) -> torch.Tensor:
        # [P, width] -> [P / merge^2, merge^2, width] -> [V, width]
        visual = self.tower(batch.patches).unflatten(0, (-1, self.merge**2)).mean(1)
        return self.head(place_visual(self.embed(batch.tokens), visual, batch.visual_index))


def main(shard: str, num_epochs: int) -> None:
    dist.init_process_group()
    device = torch.device(f"cuda:{os.environ['LOCAL_RANK']}" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    data, world_size = SampleDataset.open(shard, FILES), dist.get_world_size()
    model = Model(data.patch_dim, data.merge).to(device)
    for part in (model.tower, model):
        fully_shard(part)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = BalancedDataLoader(
        data, 2 // world_size, shuffle=True, media_presence="dummy"
    )  # the data know their costs
    for _ in range(num_epochs):
        for batch in loader:
            logits = model(batch.to(device))
            loss_sum = nn.functional.cross_entropy(logits, batch.labels.to(device), reduction="sum")  # already shifted
            loss = loss_sum / batch.step_label_tokens
            (loss * world_size).backward()
            optimizer.step()
            optimizer.zero_grad()
            seen = torch.stack([loss.detach(), torch.tensor(float(batch.num_dummy_patches > 0), device=device)])
            dist.all_reduce(seen)
            if dist.get_rank() == 0:
                print(f"step {batch.step} loss {seen[0].item():.7f} ranks without media {seen[1].item():.0f}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 2)
