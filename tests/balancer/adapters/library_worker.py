"""Loaders under accelerate and Lightning: a dataset, loops, and what one rank of a gloo world sees of them.

torchrun ... python library_worker.py accelerate|lightning FOLDER      rank 0 writes FOLDER/found.json, a list by rank
"""

import gc
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import Dataset

from balancer.layout import ParallelSpec
from balancer.loader import BalancedDataLoader


class Numbers(Dataset[torch.Tensor]):
    """Sample i is [i]; costs are uneven."""

    def __init__(self, num_samples: int) -> None:
        self.costs = np.random.Generator(np.random.Philox(0)).integers(1, 50, num_samples)

    def __len__(self) -> int:
        return len(self.costs)

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.tensor([float(i)])

    def cost(self, i: int) -> int:
        return int(self.costs[i])


def numbers_loader(num_samples: int, *, dp_size: int = 1, **options: Any) -> BalancedDataLoader[Any]:
    """Two samples per rank and micro-batch, two micro-batches per step."""
    given = {"parallel": ParallelSpec.pipeline(dp_size=dp_size, num_microbatches=2), "shuffle": True, **options}
    return BalancedDataLoader(Numbers(num_samples), 2, **given)


def ids_of(batch: torch.Tensor) -> list[int]:
    return [int(i) for i in batch.flatten().tolist()]


def accumulated(accelerator: Any, model: Any, optimizer: Any, loader: Any) -> list[dict[str, Any]]:
    """One epoch of mean-of-the-step gradients; what each micro-batch was."""
    seen = []
    for batch in loader:
        with accelerator.accumulate(model):
            size = loader.current.step_samples
            share = accelerator.num_processes * accelerator.gradient_accumulation_steps / size
            accelerator.backward(model(batch / 10).square().sum() * share)
            optimizer.step()
            optimizer.zero_grad()
        seen.append(
            {
                "ids": ids_of(batch),
                "all_ids": [i for ids in accelerator.gather_for_metrics(ids_of(batch), True) for i in np.ravel(ids)],
                "step": loader.current.step,
                "is_last": loader.current.is_last_microbatch,
                "synchronised": accelerator.sync_gradients,
                "at_end": accelerator.gradient_state.end_of_dataloader,
            }
        )
    return seen


def weights_of_one_process(steps: list[list[int]], lr: float) -> list[float]:
    """Weight and bias after a plain step on the mean of each list of samples."""
    model = new_model()
    for ids in steps:
        model.zero_grad()
        model(torch.tensor(ids, dtype=torch.float32)[:, None] / 10).square().mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(lr * parameter.grad)
    return [float(p.detach()) for p in model.parameters()]


def new_model() -> torch.nn.Linear:
    torch.manual_seed(0)
    return torch.nn.Linear(1, 1)


def under_accelerate(folder: Path) -> dict[str, Any]:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    loader = numbers_loader(19, dp_size=2)
    model = new_model()
    model, optimizer, prepared = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.01), loader)
    first = accumulated(accelerator, model, optimizer, prepared)
    weights = [float(p.detach()) for p in model.parameters()]
    expected = []
    for step, batch in enumerate(prepared):
        expected.append(ids_of(batch))
        if step == 1:
            accelerator.save_state(str(folder / "state"))
    accelerator.wait_for_everyone()
    accelerator.load_state(str(folder / "state"))
    again = [ids_of(batch) for batch in prepared]
    return {
        "same": prepared is loader,
        "first": first,
        "weights": weights,
        "rest": expected[2:],
        "resumed": again,
        "num_dropped": loader.num_dropped,
    }


def lightning_module(num_samples: int, *, dp_size: int = 1, **options: Any) -> Any:
    """A module that makes its loader and notes what it is trained on."""
    import lightning.pytorch as pl

    class Noting(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.seen, self.loader = new_model(), [], None

        def train_dataloader(self) -> Any:
            self.loader = numbers_loader(num_samples, dp_size=dp_size, **options)
            return self.loader

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            current = self.loader.current
            self.seen.append([self.current_epoch, current.epoch, current.step, current.microbatch_index, ids_of(batch)])
            return self.layer(batch / 10).square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.01)

    return Noting()


def trainer(folder: Path, *, max_epochs: int, **options: Any) -> Any:
    """A quiet Trainer that keeps a checkpoint of every step, named step=1.ckpt and so on."""
    import lightning.pytorch as pl
    from lightning.pytorch.callbacks import ModelCheckpoint

    keep = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    given = {"accelerator": "cpu", "devices": 1, "accumulate_grad_batches": 2, **quiet, **options}
    return pl.Trainer(default_root_dir=folder, max_epochs=max_epochs, callbacks=[keep], **given)


def under_lightning(folder: Path) -> dict[str, Any]:
    both = {"devices": 2, "strategy": "ddp", "use_distributed_sampler": True}
    module = lightning_module(19, dp_size=2)
    whole = trainer(folder, max_epochs=2, **both)
    whole.fit(module)
    resumed = lightning_module(19, dp_size=2)
    trainer(folder / "resumed", max_epochs=2, **both).fit(
        resumed, ckpt_path=str(folder / "step=4.ckpt"), weights_only=False
    )
    return {
        "same": whole.train_dataloader is module.loader,
        "seen": module.seen,
        "resumed": resumed.seen,
        "steps": whole.global_step,
        "num_dropped": module.loader.num_dropped,
    }


def main() -> None:
    warnings.simplefilter("ignore")
    folder = Path(sys.argv[2])
    found = {"accelerate": under_accelerate, "lightning": under_lightning}[sys.argv[1]](folder)
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, found)
    if dist.get_rank() == 0:
        (folder / "found.json").write_text(json.dumps(told, default=int), encoding="utf-8")
    gc.collect()  # trainers and DDP's reducers are in cycles; they must not outlive their groups
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
