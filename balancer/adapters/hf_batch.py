"""Padding-free batches for transformers' models: the samples of a micro-batch as one row, with their boundaries.

    n samples (LoadedSample or tokenised mappings)
        | hf_segment: each sample on its own: labels, positions, media by kind
        v
    n segments + alignment tail
        | concatenate; nothing is offset, nothing is computed across samples
        v
    input_ids [1, T], labels [1, T], position_ids [1, T] or [4, 1, T], cu_seq_lens_q/k [n + 1], max_length_q/k,
    pixel_values [P, d], image_grid_thw [K, 3], pixel_values_videos, video_grid_thw, use_cache=False

Three readers find the boundaries in three ways. Flash attention takes `cu_seq_lens_*` and `max_length_*`. The masks of
sdpa, eager and flex attention are cut where the text positions do not go on by one; a model with three position axes
looks at the first of *four* rows for that, and takes three rows, or one, for a single sample. And no mask is cut at all
when the model makes a cache, which it does unless told otherwise: so `use_cache=False` is part of the batch.

Price: no attention mask, so a model must keep samples apart by itself (`balancer.adapters.packable` checks it); loss
weights have no place in these batches: a loss is the mean over label tokens, sum / `num_items_in_batch`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import numpy as np
import torch
from numpy.typing import NDArray

from balancer.adapters.hf_segment import Media, Segment, loaded_segment, mapped_segment, tail_segment
from balancer.errors import BalancerError
from balancer.room import joined
from dataloaders.chat import IGNORED_LABEL
from dataloaders.sample import LoadedSample


@dataclass(frozen=True, slots=True, kw_only=True)
class HfCollate:
    """A picklable `collate_fn`: the samples of one micro-batch -> one padding-free batch.

    Attributes:
        align_tokens: T is filled up to a multiple of this; the tail is a segment of its own without labels, at
            positions from 0, and counts in `max_length_*`.
        image_token_id, video_token_id: placeholders; needed where samples have media.
        position_axes: 1, or 3 for rotary positions in time, height and width. None: 3 where placeholders are known.
            A model with three axes needs 3 for text too: from fewer than four rows it cannot see boundaries.
        pad_token_id: token of the tail.
        no_cache: puts `use_cache=False` into the batch; False only for a forward that does not take it.
        ignore: names of array features of mappings to leave out.
    """

    align_tokens: int = 1
    image_token_id: int | None = None
    video_token_id: int | None = None
    position_axes: int | None = None
    pad_token_id: int = 0
    no_cache: bool = True
    ignore: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if self.align_tokens < 1:
            raise BalancerError(f"align_tokens={self.align_tokens}: at least 1")
        if self.position_axes not in (None, 1, 3):
            raise BalancerError(f"position_axes={self.position_axes}: 1 or 3")
        if self.pad_token_id in (self.image_token_id, self.video_token_id):
            raise BalancerError(
                f"pad_token_id={self.pad_token_id} is a placeholder, for which the model expects pixels"
            )

    @classmethod
    def for_model(cls, model: Any, *, align_tokens: int = 1, pad_token_id: int = 0) -> "HfCollate":
        """With what the config of a transformers model says; `model` may be the config itself."""
        config = getattr(model, "config", model)
        return cls(
            align_tokens=align_tokens,
            image_token_id=_first(config, "image_token_id", "image_token_index"),
            video_token_id=_first(config, "video_token_id", "video_token_index"),
            position_axes=3 if has_three_axes(config) else 1,
            pad_token_id=pad_token_id,
        )

    @property
    def num_position_axes(self) -> int:
        """1 or 3."""
        if self.position_axes is not None:
            return self.position_axes
        return 1 if self.image_token_id is None and self.video_token_id is None else 3

    def __call__(self, samples: Sequence[LoadedSample | Mapping[str, Any]]) -> dict[str, Any]:
        """One batch; shapes are those of the module's docstring.

        Raises:
            BalancerError: no samples, or one that cannot be flattened; the text names it.
        """
        if not samples:
            raise BalancerError("a micro-batch needs at least one sample")
        segments = [self._segment(sample, slot) for slot, sample in enumerate(samples)]
        num_tail = -sum(len(segment.tokens) for segment in segments) % self.align_tokens
        if num_tail:
            segments.append(
                tail_segment(num_tail, pad_token_id=self.pad_token_id, position_axes=self.num_position_axes)
            )
        _check_boundaries(segments)
        batch = _flattened(segments)
        return {**batch, "use_cache": False} if self.no_cache else batch

    def _segment(self, sample: object, slot: int) -> Segment:
        axes = self.num_position_axes
        if isinstance(sample, LoadedSample):
            return loaded_segment(
                sample, image_token_id=self.image_token_id, video_token_id=self.video_token_id, position_axes=axes
            )
        place = f"sample {slot} of the micro-batch"
        if isinstance(sample, Mapping):
            return mapped_segment(sample, place=place, position_axes=axes, ignore=self.ignore)
        raise BalancerError(
            f"{place} is a {type(sample).__name__}; output='hf' takes LoadedSample or mappings with input_ids, labels"
        )


def count_labels(batch: Mapping[str, Any]) -> int:
    """Label tokens of a batch of `HfCollate`: those a loss sums over, as the first one of each sample is -100."""
    return int((batch["labels"] != IGNORED_LABEL).sum())


def is_flat(batch: object) -> TypeGuard[Mapping[str, Any]]:
    """Whether this is a batch of `HfCollate`."""
    return isinstance(batch, Mapping) and {"cu_seq_lens_q", "labels"} <= batch.keys()


def num_tail_tokens(batch: Mapping[str, Any], num_samples: int) -> int:
    """Tokens of the alignment tail: the segment behind the `num_samples` samples of the batch; 0 without one.

    A batch that only stands in for a missing sample (`num_samples` 0) has one segment and no tail of its own.
    """
    lengths = batch["cu_seq_lens_q"].diff().tolist()
    return int(lengths[-1]) if len(lengths) > max(num_samples, 1) else 0


def has_three_axes(config: Any) -> bool:
    """Whether a transformers config has rotary positions in time, height and width."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    per_layer_kind = [value for value in rope.values() if isinstance(value, Mapping)]
    return any("mrope_section" in one for one in (rope, *per_layer_kind))


def _first(config: Any, *names: str) -> int | None:
    return next((int(value) for name in names if (value := getattr(config, name, None)) is not None), None)


def _flattened(segments: Sequence[Segment]) -> dict[str, Any]:
    bounds = np.concatenate([[0], np.cumsum([len(segment.tokens) for segment in segments])]).astype(np.int32)
    cu_seq_lens, longest = torch.from_numpy(bounds), int(np.diff(bounds).max())
    positions = torch.from_numpy(np.concatenate([segment.positions for segment in segments], axis=1))
    return {
        "input_ids": _row(segment.tokens for segment in segments),
        "labels": _row(segment.labels for segment in segments),
        # axes: [1, T] = (batch, tokens); [4, T] -> (rows, batch, tokens)
        "position_ids": positions if len(positions) == 1 else positions[:, None],
        "cu_seq_lens_q": cu_seq_lens,
        "cu_seq_lens_k": cu_seq_lens,
        "max_length_q": longest,
        "max_length_k": longest,
        **_media("pixel_values", "image_grid_thw", [segment.images for segment in segments]),
        **_media("pixel_values_videos", "video_grid_thw", [segment.videos for segment in segments]),
    }


def _row(parts: Iterable[NDArray[np.int64]]) -> torch.Tensor:
    """[1, T]."""
    return torch.from_numpy(np.concatenate(list(parts)))[None]


def _media(pixels_name: str, grids_name: str, media: Sequence[Media]) -> dict[str, torch.Tensor]:
    """Nothing where there are none: transformers runs the vision tower on whatever it is given."""
    patches = [part for one in media for part in one.patches]
    if not patches:
        return {}
    pixels = patches[0] if len(patches) == 1 else joined(patches)
    pixels = pixels if pixels.flags.writeable else pixels.copy()  # torch does not know memory that is only read
    grids = np.concatenate([one.grids for one in media])
    return {pixels_name: torch.from_numpy(pixels), grids_name: torch.from_numpy(grids)}


def _check_boundaries(segments: Sequence[Segment]) -> None:
    """Refuse positions that go on over a boundary: masks would not be cut there, whatever `cu_seq_lens` say."""
    for slot, segment in enumerate(segments[1:], 1):
        if segment.positions[0, 0] == segments[slot - 1].positions[0, -1] + 1:
            raise BalancerError(
                f"sample {slot} of the micro-batch starts at position {segment.positions[0, 0]}, right behind the end "
                f"of the sample in front: transformers would see one sample. Count the position_ids of each sample "
                f"from the same start."
            )
