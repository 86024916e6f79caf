"""What the options of a loader mean for its parts (collation, capacity, prefetch), and which ones are refused."""

from collections.abc import Callable, Sequence
from typing import Any, get_args

from torch.utils.data import IterableDataset

from balancer.adapters.hf_batch import HfCollate
from balancer.errors import BalancerError
from balancer.loader_collate import Collate, MediaPresence, Output
from balancer.sample_dataset import SampleDataset
from balancer.weights import LOSS_REDUCTIONS


def collate_for(
    dataset: Any,
    collate_fn: Callable[[list[Any]], Any] | None,
    *,
    output: Output,
    align_tokens: int,
    media_presence: MediaPresence,
    loss_reduction: str,
) -> tuple[Callable[[list[Any]], Any], bool]:
    """(what makes a batch of samples, whether it makes one of no sample too).

    Raises:
        BalancerError: options that only batches of ours have, beside a `collate_fn` of the user's.
    """
    for name, value, allowed in (("output", output, Output), ("media_presence", media_presence, MediaPresence)):
        if value not in get_args(allowed):
            raise BalancerError(f"{name}={value!r}: choose one of {', '.join(get_args(allowed))}")
    if loss_reduction not in LOSS_REDUCTIONS:
        raise BalancerError(f"loss_reduction={loss_reduction!r}: choose one of {', '.join(LOSS_REDUCTIONS)}")
    if isinstance(align_tokens, bool) or not isinstance(align_tokens, int) or align_tokens < 1:
        raise BalancerError(f"align_tokens={align_tokens}: at least 1")
    if output == "hf":
        if loss_reduction != "token_mean":
            raise BalancerError(f"loss_reduction={loss_reduction!r} with output='hf': its losses are means over tokens")
        flatten = _flattening(dataset, collate_fn, align_tokens=align_tokens, media_presence=media_presence)
    elif collate_fn is not None:
        _check_own(output=output, align_tokens=align_tokens, media_presence=media_presence)
        return collate_fn, False
    else:
        flatten = None
    samples = _samples_of(dataset)
    patch_dim = None if samples is None else samples.patch_dim
    dummy = (samples.merge, samples.patch_dim) if samples is not None and media_presence == "dummy" else None
    needs_packs = flatten is None and (output == "dict" or align_tokens != 1 or media_presence == "dummy")
    made = Collate(
        loss_reduction=loss_reduction,
        align_tokens=align_tokens,
        flatten=flatten,
        dummy=dummy,
        patch_dim=patch_dim,
        needs_packs=needs_packs,
    )
    return made, samples is not None


def _check_own(*, output: Output, align_tokens: int, media_presence: MediaPresence) -> None:
    """Refuse options that only batches of ours have."""
    ours = {
        f"output={output!r}": output != "batch",
        f"align_tokens={align_tokens}": align_tokens != 1,
        "media_presence='dummy'": media_presence == "dummy",
    }
    wrong = [name for name, is_set in ours.items() if is_set]
    if wrong:
        raise BalancerError(
            f"{', '.join(wrong)} beside collate_fn: that function makes the batch. Leave it out, or do this in it"
        )


def _flattening(
    dataset: Any, collate_fn: Any, *, align_tokens: int, media_presence: MediaPresence
) -> Callable[[Sequence[Any]], dict[str, Any]]:
    """What makes transformers' batches: the user's `HfCollate`, or one with the placeholders of the dataset."""
    if media_presence == "dummy":
        raise BalancerError(
            "media_presence='dummy' with output='hf': transformers refuses pixels without placeholders, so the model "
            "itself has to run its tower on them; leave it out and call balancer.adapters.dummy_vision."
            "run_dummy_vision(model)"
        )
    if collate_fn is None:
        samples = _samples_of(dataset)
        image, video = (None, None) if samples is None else samples.placeholder_ids
        return HfCollate(align_tokens=align_tokens, image_token_id=image, video_token_id=video)
    if not isinstance(collate_fn, HfCollate) or align_tokens not in (1, collate_fn.align_tokens):
        raise BalancerError(
            "output='hf' with a collate_fn of another kind, or with another align_tokens; leave collate_fn out, or "
            "pass balancer.adapters.hf_batch.HfCollate.for_model(model, align_tokens=...)"
        )
    return collate_fn


def check_of_torch(dataset: Any, *, batch_size: Any, batch_sampler: Any, in_order: bool) -> None:
    """Refuse arguments of DataLoader that contradict a plan.

    Raises:
        BalancerError: a batch sampler, no batches, a dataset without an index, or batches in any order.
    """
    if batch_sampler is not None:
        raise BalancerError(
            "batch_sampler= decides who gets which sample, which is what the balancer plans; pass sampler= for the "
            "order and batch_size= for the mean size instead (no DistributedSampler). Lightning's Trainer.predict "
            "hands one in to note indices: give it a plain DataLoader, or loop over this one and read "
            "loader.current.sample_ids"
        )
    if batch_size is None:
        raise BalancerError("batch_size=None switches batching off; give the mean number of samples per micro-batch")
    if isinstance(dataset, IterableDataset):
        raise BalancerError(
            "an IterableDataset has no index to plan with; use a map-style dataset (len and [i]), or "
            "balancer.stream_loader.StreamLoader for streams"
        )
    if not in_order:
        raise BalancerError("in_order=False lets micro-batches come in any order, but a plan is an order; leave it out")


def check_microbatches(fixed: int | None, *, output: Output) -> None:
    """Refuse batches for a loop that counts, where steps do not have one count of micro-batches.

    Raises:
        BalancerError: `output="hf"` with a free number.
    """
    if output == "hf" and fixed is None:
        raise BalancerError(
            "output='hf' needs a fixed number of micro-batches, that of gradient_accumulation_steps: pass "
            "parallel=ParallelSpec.from_env(num_microbatches=...)"
        )


def prefetch_for(fixed: int | None, *, num_workers: int, given: int | None) -> int | None:
    """Batches that each worker loads ahead; None: torch's default.

    Two steps are under way, as torch has two batches per worker: the next one is there when this one ends.
    """
    if given is None and num_workers and (fixed or 1) > 1:
        return max(2, -(-2 * (fixed or 1) // num_workers))
    return given


def rounded_capacity(capacity_tokens: int | None, align_tokens: int) -> int | None:
    """The largest multiple of `align_tokens` within the capacity: a pack and its tail fit together.

    Raises:
        BalancerError: the capacity is below one multiple.
    """
    if capacity_tokens is None or align_tokens == 1:
        return capacity_tokens
    if capacity_tokens < align_tokens:
        raise BalancerError(f"capacity_tokens={capacity_tokens} holds no multiple of align_tokens={align_tokens}")
    return capacity_tokens // align_tokens * align_tokens


def _samples_of(dataset: Any) -> SampleDataset | None:
    """The SampleDataset behind views that only choose samples (torch's Subset)."""
    while not isinstance(dataset, SampleDataset):
        inner = getattr(dataset, "dataset", None)
        if inner is None or not hasattr(dataset, "indices"):
            return None
        dataset = inner
    return dataset
