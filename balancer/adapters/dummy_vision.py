"""A transformers model that runs its vision tower as often on every rank: `run_dummy_vision(model)`.

    forward(input_ids, pixel_values=None, pixel_values_videos=None)       a text-only micro-batch
      | before      which of the two are missing is noted
      v
    embed_tokens(input_ids) -> embeds    + 0 * tower(zero patches)        once for each that is missing
      |                                                                   here: where the tower runs in other forwards
      v
    the rest of the forward, unchanged

Models of this family call their tower once for images and once for videos. Under FSDP or ZeRO-3 each call gathers
parameters on all ranks together, so a rank with images must not meet one with images *and* videos without this: every
forward then has exactly two calls. Nothing else changes, losses and gradients stay as they are.

Price: one or two tower passes over merge^2 patches in each forward, in training and evaluation alike; `remove()` before
generating. `torch.compile` breaks its graph at the embedding.
"""

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from balancer.errors import BalancerError

Inputs = Mapping[str, torch.Tensor]


class DummyVision:
    """The hooks on a model; see `run_dummy_vision`.

    Args:
        core: module that has `get_image_features` and embeds tokens.
        dummies: by the forward's argument (`pixel_values`): the method that encodes it and the inputs of a dummy.
    """

    def __init__(self, core: nn.Module, dummies: Mapping[str, tuple[str, Inputs]]) -> None:
        self._core, self._dummies = core, dummies
        self._signature = inspect.signature(core.forward)
        self._missing: list[str] = []
        embedding = core.get_input_embeddings()  # type: ignore[operator]
        self._handles = [
            core.register_forward_pre_hook(self._before, with_kwargs=True),
            embedding.register_forward_hook(self._embedded),
            core.register_forward_hook(self._after, always_call=True),
        ]

    def remove(self) -> None:
        """Take the hooks off; the model is what it was."""
        for handle in self._handles:
            handle.remove()

    def _before(self, core: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = self._signature.bind_partial(*args, **kwargs).arguments
        missing = [name for name in self._dummies if given.get(name) is None]
        if missing and given.get("input_ids") is None:
            raise BalancerError(
                f"{type(core).__name__} is called without {' and '.join(missing)} and without input_ids: dummy media "
                "are put in where tokens are embedded; pass input_ids, not inputs_embeds"
            )
        self._missing = missing

    def _embedded(self, embedding: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor | None:
        missing, self._missing = self._missing, []  # once a forward: the table is also looked up for placeholders
        for name in missing:
            method, inputs = self._dummies[name]
            here = {key: value.to(output.device) for key, value in inputs.items()}
            for part in _tensors(getattr(self._core, method)(**here)):
                output = output + (part * 0).sum().to(output.device, output.dtype)
        return output if missing else None

    def _after(self, core: nn.Module, args: tuple[Any, ...], output: object) -> None:
        self._missing = []


def run_dummy_vision(model: nn.Module, *, videos: bool = True, dummy: Inputs | None = None) -> DummyVision:
    """Make every forward of `model` run its vision tower, on zero patches with weight zero where media are missing.

    Call it on every rank, before or after `fully_shard`.

    Args:
        model: a transformers model with `get_image_features`, as it is or wrapped.
        videos: also once for missing videos, where the model has `get_video_features`. False is enough where no sample
            of the data has a video.
        dummy: arguments of `get_image_features` for one small image, for towers that do not take flattened patches
            and a grid; videos are then left out.

    Returns:
        The hooks, to `remove()` them.

    Raises:
        BalancerError: no such model, or a tower whose smallest input cannot be derived from its config.
    """
    core = _core_of(model)
    if dummy is not None:
        return DummyVision(core, {"pixel_values": ("get_image_features", dict(dummy))})
    patches, grid = _smallest(core)
    dummies: dict[str, tuple[str, Inputs]] = {
        "pixel_values": ("get_image_features", {"pixel_values": patches, "image_grid_thw": grid})
    }
    if videos and "pixel_values_videos" in inspect.signature(core.forward).parameters:
        of_videos = {"pixel_values_videos": patches, "video_grid_thw": grid}
        dummies["pixel_values_videos"] = ("get_video_features", of_videos)
    return DummyVision(core, dummies)


def _core_of(model: nn.Module) -> nn.Module:
    """The innermost module that encodes images in its forward: heads and wrappers only pass them on."""
    found = [
        module
        for module in model.modules()
        if callable(getattr(module, "get_image_features", None))
        and "pixel_values" in inspect.signature(module.forward).parameters
    ]
    if not found:
        raise BalancerError(
            f"{type(model).__name__} has no get_image_features and no pixel_values in its forward: dummy media are for "
            "transformers models with a vision tower; in a model of your own use balancer.dummy_media"
        )
    return found[-1]


def _smallest(core: nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """(patches [merge^2, d] of zeros, grid [1, 3]) from the vision config."""
    vision = getattr(core.config, "vision_config", None)
    channels = getattr(vision, "in_channels", getattr(vision, "in_chans", None))
    patch_px, merge = getattr(vision, "patch_size", None), getattr(vision, "spatial_merge_size", None)
    frames = getattr(vision, "temporal_patch_size", None)
    if not all(isinstance(value, int) for value in (channels, patch_px, merge, frames)):
        raise BalancerError(
            f"the smallest image of {type(core).__name__} cannot be derived: its vision config has no in_channels, "
            "patch_size, spatial_merge_size and temporal_patch_size; give dummy={...}, the arguments of its "
            "get_image_features for one small image"
        )
    patches = torch.zeros(merge * merge, channels * frames * patch_px * patch_px)  # type: ignore[operator]
    return patches, torch.tensor([[1, merge, merge]])


def _tensors(output: object) -> Iterator[torch.Tensor]:
    """All floating tensors of nested outputs."""
    if isinstance(output, torch.Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, Mapping):
        for value in output.values():
            yield from _tensors(value)
    elif isinstance(output, list | tuple):
        for value in output:
            yield from _tensors(value)
