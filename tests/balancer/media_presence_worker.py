"""One rank of an FSDP2 world in which rank 1 has text only: what each scenario's gradients differ by from one process.

    torchrun ... python media_presence_worker.py FOUND.json      rank 0 writes {scenario: [what each rank saw]}

Every model is sharded block by block over two ranks, resharded after each forward (ZeRO-3). A tower that runs on one
rank only would wait for ever, or gather what the other rank sends for another layer, which gloo aborts.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

from balancer.adapters.dummy_vision import run_dummy_vision
from balancer.batch import MicroBatch, collate
from balancer.dummy_media import place_visual, with_dummy_media
from dataloaders.sample import LoadedSample

IGNORED, VOCABULARY, DIM, MERGE, PATCH_DIM = -100, 96, 32, 2, 24
IMAGE, VIDEO = 90, 91

Seen = dict[str, Any]
Forward = Callable[[nn.Module, Any], torch.Tensor]


class Block(nn.Module):
    """A residual layer."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(torch.tanh(self.up(hidden)))


class Tower(nn.Module):
    """Patches [P, d] -> visual tokens [P / merge^2, D]."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.merger = nn.Linear(PATCH_DIM, DIM), nn.Linear(DIM * MERGE**2, DIM)
        self.blocks = nn.ModuleList([Block(DIM), Block(DIM)])

    def forward(self, patches: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(patches)
        for block in self.blocks:
            hidden = block(hidden)
        return self.merger(hidden.reshape(-1, DIM * MERGE**2))


class UserModel(nn.Module):
    """A vision-language model of a user's own, which reads a MicroBatch."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.visual = nn.Embedding(256, DIM), Tower()
        self.layers, self.head = nn.ModuleList([Block(DIM), Block(DIM)]), nn.Linear(DIM, 256)

    def forward(self, batch: MicroBatch) -> torch.Tensor:
        embeds = self.tokens(batch.tokens)
        if len(batch.patches):
            embeds = place_visual(embeds, self.visual(batch.patches), batch.visual_index)
        segment = torch.bucketize(torch.arange(len(embeds)), batch.cu_seqlens[1:].long(), right=True)
        mask = (segment[:, None] == segment).tril()
        hidden = scaled_dot_product_attention(embeds[None], embeds[None], embeds[None], attn_mask=mask)[0]
        for layer in self.layers:
            hidden = layer(hidden)
        return cross_entropy(self.head(hidden), batch.labels, ignore_index=IGNORED, reduction="sum")


def user_sample(sample_id: int, length: int, visual: int = 0) -> LoadedSample:
    rng = np.random.Generator(np.random.Philox(sample_id))
    return LoadedSample(
        sample_id=sample_id,
        place=f"sample {sample_id}",
        tokens=rng.integers(0, 256, length).astype(np.int32),
        labels=rng.integers(0, 256, length).astype(np.int32),
        position_ids=np.tile(np.arange(length), (3, 1)),
        visual_index=np.arange(1, 1 + visual),
        patches=rng.random((visual * MERGE**2, PATCH_DIM), dtype=np.float32),
        grids=np.array([[1, MERGE, MERGE * visual]] if visual else [], dtype=np.int64).reshape(-1, 3),
    )


def user_step() -> list[list[MicroBatch]]:
    """Micro-batches [R, M]: rank 1 never has media, in the last micro-batch nobody has."""
    return [
        [
            collate([user_sample(0, 12, 3), user_sample(1, 7)]),
            collate([user_sample(2, 9, 2)]),
            collate([user_sample(3, 5)]),
        ],
        [collate([user_sample(4, 20)]), collate([user_sample(5, 6), user_sample(6, 8)]), collate([user_sample(7, 11)])],
    ]


def tiny_qwen() -> nn.Module:
    """Qwen2.5-VL with two layers each, random weights, sdpa, float32."""
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": VOCABULARY,
            "hidden_size": DIM,
            "intermediate_size": 2 * DIM,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0},
            "bos_token_id": 0,
            "eos_token_id": 1,
            "pad_token_id": 2,
        },
        vision_config={
            "depth": 2,
            "hidden_size": DIM,
            "intermediate_size": 2 * DIM,
            "num_heads": 2,
            "out_hidden_size": DIM,
            "patch_size": 2,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": 2,
            "in_channels": 3,
            "window_size": 8,
            "fullatt_block_indexes": [1],
        },
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=92,
        vision_end_token_id=93,
        attn_implementation="sdpa",
    )
    return Qwen2_5_VLForConditionalGeneration(config)


def hf_batch(seed: int, length: int, *, image: int = 0, video: int = 0) -> dict[str, torch.Tensor]:
    """A sample of `length` tokens, of which `image` and `video` are visual tokens; labels are shifted already."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 80, (1, length), generator=generator)
    ids[0, 1 : 1 + image] = IMAGE
    ids[0, 1 + image : 1 + image + video] = VIDEO
    labels = torch.randint(3, 80, (length,), generator=generator)
    batch = {"input_ids": ids, "labels": labels, "position_ids": torch.arange(length).repeat(3, 1, 1)}
    for num, pixels, grid in (
        (image, "pixel_values", "image_grid_thw"),
        (video, "pixel_values_videos", "video_grid_thw"),
    ):
        if num:
            batch[pixels] = torch.rand((num * MERGE**2, 3 * 2 * 2 * 2), generator=generator)
            batch[grid] = torch.tensor([[1, MERGE, MERGE * num]])
    return batch


def hf_step() -> list[list[dict[str, torch.Tensor]]]:
    """Micro-batches [R, M]: an image, an image and a video, text; rank 1 has text, text, and a video."""
    return [
        [hf_batch(0, 14, image=4), hf_batch(1, 16, image=2, video=3), hf_batch(2, 7)],
        [hf_batch(3, 9), hf_batch(4, 12), hf_batch(5, 13, video=5)],
    ]


def hf_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    logits = model(**inputs, use_cache=False).logits[0]
    return cross_entropy(logits.float(), batch["labels"], reduction="sum")


def user_loss(model: nn.Module, batch: MicroBatch) -> torch.Tensor:
    loss = model(batch)
    assert isinstance(loss, torch.Tensor)
    return loss


def num_labels(batch: Any) -> int:
    labels = batch["labels"] if isinstance(batch, dict) else batch.labels
    return int((labels != IGNORED).sum())


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """Of every parameter, whole; a missing one stays out."""
    return {
        name: parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def sharded(model: nn.Module, blocks: list[nn.Module], prepare: Callable[[nn.Module], object] | None) -> nn.Module:
    if prepare is not None:
        prepare(model)
    for block in blocks:
        fully_shard(block, reshard_after_forward=True)
    fully_shard(model, reshard_after_forward=True)
    return model


def compared(
    make: Callable[[], nn.Module],
    shard: Callable[[nn.Module], nn.Module],
    step: list[list[Any]],
    forward: Forward,
    *,
    ready: Callable[[Any], Any] = lambda batch: batch,
) -> Seen:
    """Gradients of a sharded step against the loop over all its batches in one process, without any dummy."""
    total = sum(num_labels(batch) for row in step for batch in row)
    torch.manual_seed(0)
    reference = make()
    losses = [forward(reference, batch) for row in step for batch in row]
    for loss in losses:
        (loss / total).backward()
    torch.manual_seed(0)
    model = shard(make())
    mine = torch.zeros(())
    for batch in step[dist.get_rank()]:
        loss = forward(model, ready(batch))
        (loss * dist.get_world_size() / total).backward()  # FSDP averages over ranks
        mine += loss.detach()
    dist.all_reduce(mine)
    expected, found = gradients(reference), gradients(model)
    return {
        "missing": sorted(set(expected) ^ set(found)),
        "difference": max(float((found[name] - expected[name]).abs().max()) for name in expected),
        "largest": max(float(value.abs().max()) for value in expected.values()),
        "of_tower": max(float(value.abs().max()) for name, value in expected.items() if "visual" in name),
        "loss_difference": abs(float(mine) - sum(float(loss.detach()) for loss in losses)) / total,
    }


def user_model() -> Seen:
    def shard(model: nn.Module) -> nn.Module:
        assert isinstance(model, UserModel)
        return sharded(model, [*model.visual.blocks, model.visual, *model.layers], None)

    return compared(
        UserModel, shard, user_step(), user_loss, ready=lambda batch: with_dummy_media(batch, MERGE, PATCH_DIM)
    )


def qwen(*, before: bool, tower_alone: bool) -> Seen:
    """The hooks are put on before or after sharding; the tower is one shard or one per block."""

    def shard(model: nn.Module) -> nn.Module:
        visual, language = model.model.visual, model.model.language_model  # type: ignore[union-attr]
        blocks = [visual] if tower_alone else [*visual.blocks, visual]
        made = sharded(model, [*blocks, *language.layers], run_dummy_vision if before else None)  # type: ignore[list-item,misc]
        if not before:
            run_dummy_vision(made)
        return made

    return compared(tiny_qwen, shard, hf_step(), hf_loss)


SCENARIOS: dict[str, Callable[[], Seen]] = {
    "user-model": user_model,
    "qwen-hooks-before-sharding": lambda: qwen(before=True, tower_alone=False),
    "qwen-hooks-after-sharding": lambda: qwen(before=False, tower_alone=True),
}


def main(found: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    seen: dict[str, list[Any]] = {}
    for name, scenario in SCENARIOS.items():
        rows: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(rows, scenario())
        seen[name] = rows
    if dist.get_rank() == 0:
        found.write_text(json.dumps(seen), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
