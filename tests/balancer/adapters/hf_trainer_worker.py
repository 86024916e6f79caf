"""Tiny transformers models, data and Trainers, and what one rank of a gloo world makes of them.

torchrun ... python hf_trainer_worker.py FOLDER      rank 0 writes FOLDER/found.pt: a list by rank, runs by name
"""

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import Dataset

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from transformers import Qwen2Config, Qwen2ForCausalLM, Trainer, TrainingArguments
    from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
    )

    from balancer.adapters.hf import BalancedTrainerMixin

IMAGE, START, END = 90, 92, 93
SIZES = {
    "vocab_size": 96,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 32,
}
Run = dict[str, Any]


class Texts(Dataset[dict[str, Any]]):
    """Tokenised texts of 4 to 40 tokens; between one token and all of them are learned."""

    def __init__(self, num_samples: int) -> None:
        rng = np.random.Generator(np.random.Philox(3))
        self.lengths = rng.integers(4, 41, num_samples)
        self.items = []
        for length in self.lengths.tolist():
            tokens = rng.integers(0, 80, length)
            labels = np.where(np.arange(length) < rng.integers(0, length), -100, tokens)
            self.items.append({"input_ids": tokens.tolist(), "labels": labels.tolist()})

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return self.items[i]

    def cost(self, i: int) -> int:
        return int(self.lengths[i])

    def label_tokens(self, ids: Sequence[int]) -> int:
        return sum(label != -100 for i in ids for label in self.items[i]["labels"][1:])


class Pictures(Dataset[dict[str, Any]]):
    """Every other sample has one image of 4 or 16 visual tokens in it."""

    def __init__(self, num_samples: int) -> None:
        self.rng = np.random.Generator(np.random.Philox(5))
        self.items = [self._item(i) for i in range(num_samples)]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return self.items[i]

    def cost(self, i: int) -> int:
        return len(self.items[i]["input_ids"])

    def _item(self, i: int) -> dict[str, Any]:
        text = self.rng.integers(0, 80, int(self.rng.integers(4, 12))).tolist()
        if i % 2:
            return {"input_ids": text, "labels": text}
        side = 4 if i % 4 else 8
        grid = np.array([[1, side, side]])
        tokens = [text[0], START, *[IMAGE] * (side * side // 4), END, *text[1:]]
        positions, _ = new_picture_model().model.get_rope_index(
            torch.tensor([tokens]),
            mm_token_type_ids=torch.tensor([[int(token == IMAGE) for token in tokens]]),
            image_grid_thw=torch.from_numpy(grid),
            attention_mask=torch.ones(1, len(tokens), dtype=torch.long),
        )
        return {
            "input_ids": tokens,
            "labels": [-100] * (len(tokens) - len(text) + 1) + text[1:],
            "position_ids": positions[:, 0].numpy(),
            "pixel_values": self.rng.normal(size=(side * side, 3 * 2 * 14 * 14)).astype(np.float32),
            "image_grid_thw": grid,
        }


def new_model(**config: Any) -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    return Qwen2ForCausalLM(Qwen2Config(**{**SIZES, "attn_implementation": "sdpa", **config}))


def new_picture_model() -> Qwen2_5_VLForConditionalGeneration:
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [1, 2, 3]}
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 2, "intermediate_size": 40, "out_hidden_size": 24}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = Qwen2_5_VLConfig(
            vision_config={**vision, "fullatt_block_indexes": [0]},
            text_config={**SIZES, "rope_parameters": rope},
            image_token_id=IMAGE,
            video_token_id=91,
            vision_start_token_id=START,
            vision_end_token_id=END,
            attn_implementation="sdpa",
        )
        torch.manual_seed(0)
        return Qwen2_5_VLForConditionalGeneration(config)


def padded(features: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """A data_collator that pads."""
    longest = max(len(one["input_ids"]) for one in features)

    def rows(values: Callable[[Mapping[str, Any]], Sequence[int]], fill: int) -> torch.Tensor:
        return torch.tensor([[*values(one), *[fill] * (longest - len(one["input_ids"]))] for one in features])

    return {
        "input_ids": rows(lambda one: one["input_ids"], 0),
        "labels": rows(lambda one: one["labels"], -100),
        "attention_mask": rows(lambda one: [1] * len(one["input_ids"]), 0),
    }


def alone(features: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
    """A data_collator for batches of one sample, as a processor gives them; the model finds positions by itself."""
    (one,) = features
    tokens = torch.tensor([one["input_ids"]])
    batch = {"input_ids": tokens, "labels": torch.tensor([one["labels"]]), "attention_mask": torch.ones_like(tokens)}
    if "pixel_values" not in one:
        return batch
    media = {name: torch.as_tensor(one[name]) for name in ("pixel_values", "image_grid_thw")}
    return {**batch, **media, "mm_token_type_ids": (tokens == IMAGE).int()}


class Noting(Trainer):
    """Notes the divisor and the micro-batches of every step."""

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        batches, total = super().get_batch_samples(epoch_iterator, num_batches, device)
        self.notes.append({"total": int(total), "num_microbatches": len(batches)})
        return batches, total


class Balanced(BalancedTrainerMixin, Noting):
    """Notes the loader's samples too."""

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        batches, total = super().get_batch_samples(epoch_iterator, num_batches, device)
        current = self.callback_handler.train_dataloader.current
        self.notes[-1].update(epoch=current.epoch, step=current.step, step_samples=current.step_samples)
        return batches, total


def arguments(folder: Path, **given: Any) -> TrainingArguments:
    quiet = {"report_to": "none", "disable_tqdm": True, "dataloader_pin_memory": False, "use_cpu": True}
    sgd = {"optim": "sgd", "learning_rate": 0.5, "lr_scheduler_type": "linear", "logging_steps": 1}
    ddp = {"ddp_backend": "gloo"} if dist.is_torchelastic_launched() else {}
    few = {"num_train_epochs": 1, "save_strategy": "no", "train_sampling_strategy": "sequential", "seed": 7}
    return TrainingArguments(output_dir=str(folder), **{**quiet, **sgd, **ddp, **few, **given})


def new_trainer(kind: type[Noting], args: TrainingArguments, data: Any, **given: Any) -> Any:
    model = new_picture_model() if isinstance(data, Pictures) else new_model()
    trainer = kind(**{"model": model, "args": args, "train_dataset": data, **given})
    trainer.notes = []
    return trainer


def trained(trainer: Any, resume: Path | None = None) -> Run:
    """Weights behind the last step, what was logged behind each, and the notes."""
    result = trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
    logged = [one for one in trainer.state.log_history if "loss" in one]
    return {
        "weights": torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()]),
        "losses": [one["loss"] for one in logged],
        "grad_norms": [float(one["grad_norm"]) for one in logged],
        "epochs": [one["epoch"] for one in logged],
        "steps": result.global_step,
        "notes": trainer.notes,
    }


def runs_of_a_rank(folder: Path) -> dict[str, Run]:
    found = {}

    def run(name: str, kind: type[Noting], data: Any, *, size: int, count: int, **given: Any) -> None:
        batches = {"per_device_train_batch_size": size, "gradient_accumulation_steps": count}
        own = {key: given.pop(key) for key in ("data_collator", "balance") if key in given}
        resume = given.pop("resume", None)
        trainer = new_trainer(kind, arguments(folder / name, **batches, **given), data, **own)
        found[name] = trained(trainer, resume)

    run("plain", Noting, Texts(24), size=3, count=2, data_collator=padded)
    for count in (1, 2):
        run(f"free-{count}", Balanced, Texts(22), size=3, count=count, num_train_epochs=2)
    run("short", Balanced, Texts(15), size=3, count=2)
    run("collator", Balanced, Texts(22), size=3, count=2, data_collator=padded, num_train_epochs=2)
    run("workers", Balanced, Texts(22), size=3, count=2, num_train_epochs=2, dataloader_num_workers=1)
    run("pictures", Balanced, Pictures(10), size=2, count=2)
    shuffled = {"num_train_epochs": 2, "train_sampling_strategy": "random", "size": 3, "count": 2}
    run("whole", Balanced, Texts(22), save_strategy="steps", save_steps=1, **shuffled)
    for step in (1, 2, 3):
        dist.barrier()
        run(f"resumed-{step}", Balanced, Texts(22), resume=folder / "whole" / f"checkpoint-{step}", **shuffled)
    return found


def main() -> None:
    warnings.simplefilter("ignore")
    folder = Path(sys.argv[1])
    found = runs_of_a_rank(folder)
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, found)
    if dist.get_rank() == 0:
        torch.save(told, folder / "found.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
