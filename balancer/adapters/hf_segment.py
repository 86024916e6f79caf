"""One sample in transformers' spelling, before the samples of a micro-batch are put one behind the other.

    LoadedSample (labels shifted, positions [3, t], media in order)  --loaded_segment--+
    mapping of tokenised features (a row of a Hugging Face dataset)  --mapped_segment--+--> Segment
    nothing: the alignment tail                                      --tail_segment----+

A segment has as many positions as tokens and labels by construction, the tail included, so that no padding can grow one
array and forget another. Label i is the token at i itself, as transformers' losses expect, which shift on their own;
the first label is -100, as nothing in front of a sample may learn to predict it.

Price: strings and numbers in a mapping (columns such as `length`) are left out without a word, and an array of an
unknown name is refused rather than handed on unflattened.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from balancer.errors import BalancerError
from dataloaders.chat import IGNORED_LABEL
from dataloaders.sample import LoadedSample

_NOT_NEEDED = {"attention_mask", "mm_token_type_ids", "second_per_grid_ts"}  # positions are there, nothing is padded
_READ = {"input_ids", "labels", "position_ids"}
_MEDIA = {"pixel_values": "image_grid_thw", "pixel_values_videos": "video_grid_thw"}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Media:
    """Pictures, or clips, of one sample in order: patches [P, d] in pieces, grids int64 [K, 3]; both may be empty."""

    patches: tuple[NDArray[np.float32], ...] = ()
    grids: NDArray[np.int64]


def no_media() -> Media:
    """None of a kind."""
    return Media(grids=np.zeros((0, 3), dtype=np.int64))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Segment:
    """A sample of t tokens.

    Attributes:
        tokens: int64 [t].
        labels: int64 [t], not shifted; the first one is -100.
        positions: int64 [1, t], or [4, t]: the text row 0, 1, ..., then time, height and width.
        images, videos: media by kind, each in the order of their placeholders.
    """

    tokens: NDArray[np.int64]
    labels: NDArray[np.int64]
    positions: NDArray[np.int64]
    images: Media
    videos: Media


def tail_segment(length: int, *, pad_token_id: int, position_axes: int) -> Segment:
    """`length` padding tokens without a label, at positions 0, 1, ...: what aligns a pack."""
    row = np.arange(length, dtype=np.int64)
    return Segment(
        tokens=np.full(length, pad_token_id, dtype=np.int64),
        labels=np.full(length, IGNORED_LABEL, dtype=np.int64),
        positions=_rows(np.tile(row, (3, 1)), position_axes),
        images=no_media(),
        videos=no_media(),
    )


def loaded_segment(
    sample: LoadedSample, *, image_token_id: int | None, video_token_id: int | None, position_axes: int
) -> Segment:
    """A `LoadedSample`; whether a medium is an image or a video follows from the placeholder at its first position.

    A stand-in has padding where its placeholders would be; it gets those of a video where the grid has several slices.

    Raises:
        BalancerError: no tokens, a label behind the end, media without pixels, or placeholders that do not fit.
    """
    place = f"sample {sample.sample_id} ({sample.place})"
    _check_not_empty(len(sample.tokens), place)
    if sample.labels[-1] != IGNORED_LABEL:
        raise BalancerError(f"{place}: the last position has a label, but nothing follows it; labels must be shifted")
    labels = np.full(len(sample.labels), IGNORED_LABEL, dtype=np.int64)
    labels[1:] = sample.labels[:-1]
    tokens = sample.tokens.astype(np.int64)
    images, videos = no_media(), no_media()
    if len(sample.grids):
        images, videos = _media_by_kind(sample, tokens, place, image=image_token_id, video=video_token_id)
    _check_placeholders(tokens, len(sample.visual_index), place, image=image_token_id, video=video_token_id)
    return Segment(
        tokens=tokens,
        labels=labels,
        positions=_rows(sample.position_ids, position_axes),
        images=images,
        videos=videos,
    )


def mapped_segment(
    features: Mapping[str, Any], *, place: str, position_axes: int, ignore: frozenset[str] = frozenset()
) -> Segment:
    """Tokenised features: `input_ids` and `labels` [t], with media `pixel_values` [P, d] and `image_grid_thw` [K, 3].

    Arrays may be lists, numpy or torch, with a leading axis of one as processors give it.

    Args:
        place: names the sample in errors.
        position_axes: 3: media need `position_ids` [3, t] or [4, t].
        ignore: names that are left out.

    Raises:
        BalancerError: a feature that is missing, unknown, padded, or of another length than the tokens.
    """
    _check_names(features, ignore, place)
    tokens = _per_token(features, "input_ids", place)
    _check_not_empty(len(tokens), place)
    labels = _per_token(features, "labels", place).copy()
    if len(labels) != len(tokens):
        raise BalancerError(f"{place}: {len(labels)} labels for {len(tokens)} tokens")
    labels[0] = IGNORED_LABEL
    if "attention_mask" in features and not np.all(_numpy(features["attention_mask"])):
        raise BalancerError(f"{place}: attention_mask has zeros. Tokenise without padding: a pack needs none.")
    images, videos = (_media_of(features, pixels, grids, place) for pixels, grids in _MEDIA.items())
    has_media = len(images.grids) + len(videos.grids) > 0
    return Segment(
        tokens=tokens,
        labels=labels,
        positions=_positions_of(features, len(tokens), place, position_axes=position_axes, has_media=has_media),
        images=images,
        videos=videos,
    )


def _media_by_kind(
    sample: LoadedSample, tokens: NDArray[np.int64], place: str, *, image: int | None, video: int | None
) -> tuple[Media, Media]:
    """(images, videos); writes the placeholders of a stand-in into `tokens`."""
    if image is None and video is None:
        raise BalancerError(
            f"{place} has media, but image_token_id and video_token_id are unknown. Use HfCollate.for_model(model), or "
            f"pass the ids of the model's config."
        )
    ends = np.cumsum(sample.grids.prod(axis=1))
    begins = ends - sample.grids.prod(axis=1)
    kinds = []
    for item, at in enumerate(_visual_positions(sample, ends, place)):
        if sample.replaced is not None and tokens[at[0]] not in (image, video):
            likely = (video, image) if sample.grids[item, 0] > 1 else (image, video)
            tokens[at] = next(one for one in likely if one is not None)
        kinds.append(int(tokens[at[0]]))
        if kinds[-1] not in (image, video) or np.any(tokens[at] != kinds[-1]):
            raise BalancerError(
                f"{place}: medium {item} stands at token id {kinds[-1]}, but image_token_id={image} and "
                f"video_token_id={video}. Pass the ids of the model's config to HfCollate."
            )
    images, videos = (
        Media(
            patches=tuple(sample.patches[begins[item] : ends[item]] for item in items),
            grids=sample.grids[items].astype(np.int64, copy=False).reshape(-1, 3),
        )
        for items in ([item for item, one in enumerate(kinds) if one == kind] for kind in (image, video))
    )
    return images, videos


def _visual_positions(sample: LoadedSample, ends: NDArray[np.int64], place: str) -> list[NDArray[np.int64]]:
    """Positions of each medium in its sample; `ends` [K] count patches, merge ** 2 of which are one visual token."""
    num_patches, num_visual = int(ends[-1]), len(sample.visual_index)
    if len(sample.patches) != num_patches:
        raise BalancerError(f"{place} has {len(sample.patches)} of {num_patches} patches; load it with pixels")
    merged = num_patches // max(num_visual, 1)
    if not num_visual or np.any(ends % merged) or num_visual * merged != num_patches:
        raise BalancerError(f"{place}: {num_visual} visual tokens cannot stand for {num_patches} patches in its grids")
    return np.split(sample.visual_index, (ends // merged)[:-1])


def _check_placeholders(
    tokens: NDArray[np.int64], num_visual: int, place: str, *, image: int | None, video: int | None
) -> None:
    ids = [one for one in (image, video) if one is not None]
    found = int(np.isin(tokens, ids).sum())
    if ids and found != num_visual:
        raise BalancerError(
            f"{place}: {found} placeholders for {num_visual} visual embeddings. Text must not be tokenised to the ids "
            f"of placeholders ({', '.join(map(str, ids))})."
        )


def _rows(positions: NDArray[np.int64], position_axes: int) -> NDArray[np.int64]:
    """[3, t] -> [1, t], or [4, t] with the text row in front."""
    text = np.arange(positions.shape[1], dtype=np.int64)[None]
    return text if position_axes == 1 else np.concatenate([text, positions]).astype(np.int64, copy=False)


def _positions_of(
    features: Mapping[str, Any], length: int, place: str, *, position_axes: int, has_media: bool
) -> NDArray[np.int64]:
    given = features.get("position_ids")
    if given is None:
        if has_media and position_axes == 3:
            raise BalancerError(
                f"{place} has media but no position_ids, and those of a pack cannot be found behind its first sample. "
                f"Compute them per sample in the dataset's transform: "
                f"features['position_ids'] = model.model.get_rope_index(...)[0]; or use balancer.SampleDataset."
            )
        return _rows(np.tile(np.arange(length), (3, 1)), position_axes)
    rows = _numpy(given).astype(np.int64)
    rows = rows.reshape(-1, rows.shape[-1]) if rows.size else rows.reshape(0, 0)
    wanted = (1,) if position_axes == 1 else (3, 4) if has_media else (1, 3, 4)
    if rows.shape[-1] != length or len(rows) not in wanted:
        raise BalancerError(
            f"{place}: position_ids have the shape {_numpy(given).shape} where {length} tokens and {position_axes} "
            f"position axes were expected. HfCollate.for_model(model) sets position_axes."
        )
    if len(rows) != 3 and np.any(np.diff(rows[0]) != 1):
        raise BalancerError(
            f"{place}: the text positions do not count up one by one, so transformers would see several samples in it. "
            f"Give each sample of a pack as an item of its own."
        )
    if position_axes == 1:
        return rows
    return _rows(np.tile(rows, (3, 1)) if len(rows) == 1 else rows[-3:], position_axes)


def _media_of(features: Mapping[str, Any], pixels_name: str, grids_name: str, place: str) -> Media:
    pixels, grids = features.get(pixels_name), features.get(grids_name)
    if pixels is None and grids is None:
        return no_media()
    if pixels is None or grids is None:
        missing = pixels_name if pixels is None else grids_name
        raise BalancerError(f"{place}: {missing} is missing; {pixels_name} and {grids_name} go together")
    cells = _numpy(grids).astype(np.int64).reshape(-1, 3)
    patches = _numpy(pixels).astype(np.float32, copy=False)
    if patches.ndim != 2 or len(patches) != int(cells.prod(axis=1).sum()):
        raise BalancerError(
            f"{place}: {pixels_name} has the shape {patches.shape}, but {grids_name} has "
            f"{int(cells.prod(axis=1).sum())} patches"
        )
    return Media(patches=(patches,) if len(cells) else (), grids=cells)


def _check_names(features: Mapping[str, Any], ignore: frozenset[str], place: str) -> None:
    known = _READ | _NOT_NEEDED | set(_MEDIA) | set(_MEDIA.values()) | ignore
    for name, value in features.items():
        if name in known or value is None or isinstance(value, str | bytes | bool | int | float | np.generic):
            continue
        raise BalancerError(
            f"{place}: feature {name!r} ({type(value).__name__}) cannot be flattened. Remove the column, "
            f"or leave it out with HfCollate(ignore=frozenset({{{name!r}}}))."
        )


def _per_token(features: Mapping[str, Any], name: str, place: str) -> NDArray[np.int64]:
    """int64 [t] from [t] or [1, t]."""
    if features.get(name) is None:
        has = ", ".join(features) or "nothing"
        raise BalancerError(f"{place} has no {name!r} (it has: {has}). Labels of plain text are a copy of input_ids.")
    values = _numpy(features[name])
    if values.ndim == 2 and len(values) == 1:
        values = values[0]
    if values.ndim != 1:
        raise BalancerError(f"{place}: {name} has the shape {values.shape}; one sample has [tokens]")
    return values.astype(np.int64, copy=False)


def _check_not_empty(length: int, place: str) -> None:
    if not length:
        raise BalancerError(f"{place} has no tokens, which makes no segment of a pack. Filter such samples.")


def _numpy(value: Any) -> NDArray[Any]:
    if isinstance(value, torch.Tensor):
        # numpy has no bfloat16
        value = (value.float() if value.is_floating_point() else value).detach().cpu().numpy()
    return np.asarray(value)
