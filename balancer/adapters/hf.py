"""transformers' Trainer with balanced batches: one more base class.

    class MyTrainer(BalancedTrainerMixin, Trainer): ...

    MyTrainer(model, args, train_dataset=data, balance=BalanceOptions(cost=lengths)).train()

    get_train_dataloader   BalancedDataLoader, a step = gradient_accumulation_steps micro-batches of every rank
    get_batch_samples      the micro-batches of one step, and num_items_in_batch: the label tokens of all of them
    compute_loss           the Trainer's: sum of token losses / num_items_in_batch x ranks, which DDP then averages
    compute_loss_func      set for models that would give the mean of each micro-batch (`balancer.adapters.hf_loss`)
    checkpoint-N/          + balanced_loader.json, where the loader stands, the same for any number of ranks
    resume                 goes on from there; no batch is loaded to be skipped

A step holds the samples of per_device_train_batch_size x ranks x gradient_accumulation_steps, and its loss and
gradients are those of one large batch. Batches are padding-free (`balancer.adapters.hf_batch`), unless the Trainer was
given a `data_collator`. Evaluation and prediction are the Trainer's own, with its loader and its collator.

Prices. per_device_train_batch_size is a mean. A padded batch costs more than its tokens, which balancing does not see.
Where a rank may be without media, a vision tower under FSDP or ZeRO-3 needs `media_presence="aligned"` or
`run_dummy_vision(model)`. Resuming needs the same number of samples per step (`balancer.adapters.hf_resume`).
"""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import torch
import transformers.trainer as trainer_module
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, seed_worker

from balancer.adapters.hf_batch import HfCollate
from balancer.adapters.hf_checks import check_trainer, has_own_loss, needs_token_loss, several_microbatches
from balancer.adapters.hf_loss import TokenLoss
from balancer.adapters.hf_resume import go_on, nothing_skipped, save_position
from balancer.adapters.packable import check_packable
from balancer.batch_sampler import Oversize
from balancer.dataset_costs import LENGTH_COLUMNS
from balancer.errors import BalancerError
from balancer.layout import Meet, ParallelSpec
from balancer.loader import BalancedDataLoader
from balancer.loader_costs import Cost
from balancer.planner import DEFAULT_POLICY

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BalanceOptions:
    """What a Trainer's own arguments do not say; see `BalancedDataLoader` for all that is not explained here.

    Attributes:
        cost, cost_index: None: what the dataset knows, for instance the lengths of a `datasets.Dataset`.
        capacity_tokens, capacity_patches, policy, lookahead_steps, oversize, align_tokens: as in the loader.
        meet: None: once a `step` under DDP, which the Trainer synchronises on the last micro-batch only; in every
            `microbatch` under FSDP and DeepSpeed, which gather weights in each.
        media_presence: `any` or `aligned`.
        padding_free: batches of one row without padding; False: those of the Trainer's `data_collator`. None:
            padding-free, unless the Trainer was given a `data_collator`. With True, that one is for evaluation alone.
        probe_model: whether `check_packable` may run the model before training, to see that it keeps samples apart.
    """

    cost: Cost | None = None
    cost_index: Any = None
    capacity_tokens: int | None = None
    capacity_patches: int | None = None
    policy: str = DEFAULT_POLICY
    meet: Meet | None = None
    lookahead_steps: int = 1
    oversize: Oversize = "error"
    align_tokens: int = 1
    media_presence: Literal["any", "aligned"] = "any"
    padding_free: bool | None = None
    probe_model: bool = True


class BalancedTrainerMixin(trainer_module.Trainer):
    """Put in front of Trainer, or of a subclass of it.

    Args:
        args, kwargs: of the Trainer.
        balance: None: the class attribute `balance`, which a subclass may set.

    Raises:
        BalancerError: when training starts: options that contradict balanced batches.
        PackingError: when training starts: a model that mixes the samples of a padding-free batch.
        LoaderStateError: a checkpoint that the loader cannot go on from.
    """

    balance = BalanceOptions()
    _made_loader: BalancedDataLoader[Any] | None = None
    _before_step: tuple[int, dict[str, Any]] = (-1, {})

    def __init__(self, *args: Any, balance: BalanceOptions | None = None, **kwargs: Any) -> None:
        if balance is not None and not isinstance(balance, BalanceOptions):
            raise BalancerError(f"balance is a {type(balance).__name__}; give balancer.adapters.hf.BalanceOptions(...)")
        self.balance = type(self).balance if balance is None else balance
        given = kwargs.get("data_collator", args[2] if len(args) > 2 else None)
        super().__init__(*args, **kwargs)
        self._default_collator = self.data_collator if given is None else None

    def get_train_dataloader(self) -> BalancedDataLoader[Any]:
        """A loader at the start of epoch 0; accelerate has it, and leaves it as it is."""
        check_trainer(self)
        if needs_token_loss(self) or isinstance(self.compute_loss_func, TokenLoss):
            self.compute_loss_func = TokenLoss(self.model)  # anew: model_init may have made another model
        args, balance = self.args, self.balance
        padding_free = self._is_padding_free()
        collate = (
            self._flattening()
            if padding_free
            else self._get_collator_with_removed_columns(self.data_collator, description="Training")
        )
        loader: BalancedDataLoader[Any] = BalancedDataLoader(
            self._training_data(),
            self._train_batch_size,
            shuffle=args.train_sampling_strategy == "random",
            num_workers=args.dataloader_num_workers,
            collate_fn=collate,
            pin_memory=args.dataloader_pin_memory,
            drop_last=args.dataloader_drop_last,
            worker_init_fn=partial(seed_worker, num_workers=args.dataloader_num_workers, rank=args.process_index),
            multiprocessing_context=args.dataloader_multiprocessing_context,
            prefetch_factor=args.dataloader_prefetch_factor,
            persistent_workers=args.dataloader_persistent_workers,
            in_order=args.dataloader_in_order,
            parallel=ParallelSpec.pipeline(dp_size=args.world_size, num_microbatches=args.gradient_accumulation_steps),
            cost=balance.cost,
            cost_index=balance.cost_index,
            capacity_tokens=balance.capacity_tokens,
            capacity_patches=balance.capacity_patches,
            policy=balance.policy,
            meet=balance.meet or self._meet(),
            lookahead_steps=balance.lookahead_steps,
            output="hf" if padding_free else "batch",
            seed=args.seed if args.data_seed is None else args.data_seed,
            oversize=balance.oversize,
            align_tokens=_align_tokens(balance, collate),
            media_presence=balance.media_presence,
        )
        self._made_loader = self.accelerator.prepare(loader)
        return loader

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], torch.Tensor | int | None]:
        """This rank's micro-batches of a step, and the label tokens of the step over all ranks, counted once.

        Raises:
            BalancerError: `num_batches` end inside a step, or hold no labels to divide by.
            RankError: loading failed on some rank.
        """
        loader = self._running_loader()
        self._before_step = self.state.global_step, loader.state_dict()
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        if batches and (loader.current is None or not loader.current.is_last_microbatch):
            raise BalancerError(
                f"the Trainer took {len(batches)} micro-batches, and the step of the loader has more; do not change "
                f"gradient_accumulation_steps while training"
            )
        return batches, num_items

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> torch.Tensor | int | None:
        """Label tokens of the step: the loader's number, or counted where only a collator knows them."""
        if batch_samples and isinstance(batch_samples[0], dict) and "num_items_in_batch" in batch_samples[0]:
            totals = [batch.pop("num_items_in_batch") for batch in batch_samples]
            # A tensor: a compiled model would be compiled anew for every number.
            return torch.tensor(totals[0], device=device)
        total = super()._get_num_items_in_batch(batch_samples, device)
        if batch_samples and total is None and several_microbatches(self) and not has_own_loss(self):
            raise BalancerError(
                "batches of data_collator have no labels to count, so a loss would be a mean over each micro-batch, "
                "and these are unequal; give labels, or a compute_loss that divides by the size of the step"
            )
        # A step without a label has a sum of no losses, which is 0 over anything but 0.
        return total.clamp(min=1) if isinstance(total, torch.Tensor) else total

    def _running_loader(self) -> BalancedDataLoader[Any]:
        """The one that is trained on; others may have been made since."""
        return _ours(self.callback_handler.train_dataloader)

    def _is_padding_free(self) -> bool:
        if self.balance.padding_free is not None:
            return self.balance.padding_free
        return self.data_collator is self._default_collator or isinstance(self.data_collator, HfCollate)

    def _flattening(self) -> HfCollate:
        """What makes batches of one row, for a model that is found to keep the samples of a row apart."""
        own, model = self.data_collator, cast(Any, self.model)
        collate = (
            own if isinstance(own, HfCollate) else HfCollate.for_model(model, align_tokens=self.balance.align_tokens)
        )
        # Where weights are sharded, or will be filled in later, no rank can run the model alone.
        whole = not (self.is_fsdp_enabled or self.is_deepspeed_enabled or self.is_distributed_loading_by_transformers)
        with self.accelerator.autocast():
            check_packable(model, probe=self.balance.probe_model and whole, collate=collate)
        return collate

    def _training_data(self) -> Any:
        """The training set without columns that no forward reads; those of lengths are read as costs."""
        data: Any = self.train_dataset
        if not (hasattr(data, "column_names") and hasattr(data, "remove_columns")):
            return data
        kept = {*self._remove_unused_columns(data, description="Training").column_names, *LENGTH_COLUMNS}
        return data.remove_columns([name for name in data.column_names if name not in kept])

    def _meet(self) -> Meet:
        """Where ranks wait for one another."""
        each = self.accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False)
        sharded = self.is_fsdp_enabled or self.is_deepspeed_enabled or self.is_distributed_loading_by_transformers
        return "microbatch" if each or sharded else "step"

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if self.args.should_save:
            name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            save_position(Path(self._get_output_dir(trial=trial)) / name, self._position())
        super()._save_checkpoint(model, trial)

    def _position(self) -> dict[str, Any]:
        """Behind the last step that the optimizer has made: batches of one that is under way are loaded again."""
        global_step, before = self._before_step
        return before if global_step == self.state.global_step else self._running_loader().state_dict()

    def _init_training_state(
        self,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        resume_from_checkpoint: str | None,
        trial: Any,
    ) -> tuple[int, int]:
        """(epoch, micro-batches of it that were trained on): where the loader stands."""
        begin: tuple[int, int] = super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
        )
        if resume_from_checkpoint is None or self.args.ignore_data_skip:
            return begin
        epoch, step = go_on(_ours(self._made_loader), Path(resume_from_checkpoint))
        return epoch, step * self.args.gradient_accumulation_steps

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        with nothing_skipped():
            super()._run_epoch(*args, **kwargs)  # type: ignore[no-untyped-call]
        _logger.info("%s", self._running_loader().report().text())


def _ours(loader: Any) -> BalancedDataLoader[Any]:
    if not isinstance(loader, BalancedDataLoader):
        raise BalancerError(
            f"the Trainer loads from a {type(loader).__name__}: get_train_dataloader of BalancedTrainerMixin was "
            f"replaced. Put the mixin in front of the other base classes"
        )
    return loader


def _align_tokens(balance: BalanceOptions, collate: Any) -> int:
    """Of the option, else of a collation that was given: capacities have to leave room for it."""
    return (
        collate.align_tokens if isinstance(collate, HfCollate) and balance.align_tokens == 1 else balance.align_tokens
    )
