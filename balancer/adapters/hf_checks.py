"""What a transformers Trainer can be told that contradicts balanced batches: refused before the first one is loaded.

    trainer --> what is wrong with its data, its processes, its batch options, its loss --> one error with all of it

The loss matters most. Ranks and micro-batches have unequal numbers of label tokens, so a loss that is a mean over its
own micro-batch gives the tokens of short ones more weight; nothing fails, the model just learns something else. Causal
language models that cannot be told what to divide by are given a loss that can (`balancer.adapters.hf_loss`).

Price: a model that takes `num_items_in_batch` and does not divide by it passes. So does every `compute_loss` of a
subclass: it gets the label tokens of the step and has to use them.
"""

from collections.abc import Iterator
from typing import Any

import transformers
import transformers.trainer as trainer_module
from torch.utils.data import IterableDataset
from transformers.trainer import Trainer

from balancer.errors import BalancerError

_ORDERS = ("random", "sequential")
_OVERRIDDEN = ("get_batch_samples", "_get_num_items_in_batch", "_init_training_state", "_run_epoch", "_save_checkpoint")


def check_trainer(trainer: Any) -> None:
    """Return if batches of the trainer can be balanced.

    Raises:
        BalancerError: all that is in the way, each with what to do.
    """
    wrong = [*_version(), *_data(trainer), *_processes(trainer), *_batches(trainer), *_loss(trainer)]
    if wrong:
        raise BalancerError("this Trainer cannot be given balanced batches: " + "; ".join(wrong))


def has_own_loss(trainer: Any) -> bool:
    """Whether a subclass computes the loss: it is given the label tokens of the step, and has to know what to do."""
    return type(trainer).compute_loss is not Trainer.compute_loss


def needs_token_loss(trainer: Any) -> bool:
    """Whether the loss is the mean of a causal language model that cannot be told what to divide by."""
    told = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None or has_own_loss(trainer)
    return not told and bool(trainer._loss_shifts_labels)


def several_microbatches(trainer: Any) -> bool:
    """Whether a step has more than one micro-batch over all ranks."""
    return int(trainer.args.world_size * trainer.args.gradient_accumulation_steps) > 1


def _version() -> Iterator[str]:
    missing = [name for name in _OVERRIDDEN if not hasattr(Trainer, name)]
    if missing or not hasattr(trainer_module, "skip_first_batches"):
        yield (
            f"transformers {transformers.__version__} has another Trainer (no {', '.join(missing) or 'skipping'}); "
            f"install one that is as 5.24"
        )


def _data(trainer: Any) -> Iterator[str]:
    if trainer.train_dataset is None:
        yield "it has no train_dataset"
    elif isinstance(trainer.train_dataset, IterableDataset) or not hasattr(trainer.train_dataset, "__len__"):
        yield (
            "an iterable train_dataset has no index to plan with; give a map-style one (len and [i]), or use "
            "balancer.stream_loader.StreamLoader in a loop of your own"
        )
    strategy = str(getattr(trainer.args, "train_sampling_strategy", "random"))
    if strategy not in _ORDERS:
        yield (
            f"train_sampling_strategy='{strategy}' decides which samples make a batch, as the balancer does; "
            f"choose {' or '.join(map(repr, _ORDERS))}"
        )


def _processes(trainer: Any) -> Iterator[str]:
    if trainer.args.n_gpu > 1:
        yield (
            f"one process with {trainer.args.n_gpu} GPUs (DataParallel) would split each batch anew; start one process "
            f"per GPU with torchrun, or show it one GPU with CUDA_VISIBLE_DEVICES"
        )
    for name, size in (("tp", trainer.get_tp_size()), ("cp", trainer.get_cp_size()), ("sp", trainer.get_sp_size())):
        if size > 1:
            yield (
                f"{name}_size={size}: ranks would share batches, which only a loader in a loop of your own does "
                f"(BalancedDataLoader with parallel=mesh)"
            )


def _batches(trainer: Any) -> Iterator[str]:
    args = trainer.args
    for name in ("split_batches", "dispatch_batches"):
        if getattr(args.accelerator_config, name, None):
            yield f"accelerator_config.{name} cuts batches again after they were balanced; leave it out"
    if args.auto_find_batch_size:
        yield (
            "auto_find_batch_size=True would change the size of a step while it runs; set "
            "per_device_train_batch_size, and limit micro-batches with BalanceOptions(capacity_tokens=...)"
        )


def _loss(trainer: Any) -> Iterator[str]:
    if trainer.args.world_size > 1 and not trainer.args.average_tokens_across_devices:
        yield (
            "average_tokens_across_devices=False divides by the label tokens of one rank, and ranks have unequal "
            "numbers of them; leave it True"
        )
    if trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None or has_own_loss(trainer):
        return
    name, model = type(trainer.model).__name__, trainer.model
    if not needs_token_loss(trainer):
        if several_microbatches(trainer):
            yield (
                f"{name} does not take num_items_in_batch, so its loss is a mean over each micro-batch, and these are "
                f"unequal; pass compute_loss_func=, which divides a sum by num_items_in_batch"
            )
        return
    if trainer.args.label_smoothing_factor:
        yield f"label_smoothing_factor with {name}, which does not take num_items_in_batch; pass a compute_loss_func="
    if getattr(model.config.get_text_config(), "output_router_logits", False):
        yield (
            f"{name} does not take num_items_in_batch, and adds a loss of its router; pass a compute_loss_func= for "
            f"both, or load it with output_router_logits=False"
        )
