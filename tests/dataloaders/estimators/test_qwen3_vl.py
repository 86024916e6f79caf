"""Qwen3-VL: the recorded oracle, the real image processor and prompt, timestamps, clips that are too short."""

import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataloaders.counts import ItemCounts, SegmentStats
from dataloaders.errors import DataError, MediaError, Reason, UnfitError
from dataloaders.estimators import PatchEstimator, estimator_from_config
from dataloaders.estimators.qwen3_vl import Qwen3VLConfig, Qwen3VLEstimator

Row = dict[str, Any]
CountsOf = Callable[[Any, Row], ItemCounts | None]
Refusal = Callable[..., UnfitError | None]
IMAGE = {"patch_size": 16, "size": {"shortest_edge": 65_536, "longest_edge": 16_777_216}}
VIDEO = {"patch_size": 16, "size": {"shortest_edge": 4096, "longest_edge": 25_165_824}}


def estimator_of(
    image: dict[str, Any] | None = None, video: dict[str, Any] | None = None, model_type: str = "qwen3_vl"
) -> Qwen3VLEstimator:
    files = {"model_type": model_type, "vision_config": {"patch_size": 16}}
    found = estimator_from_config(
        {"config": files, "preprocessor_config": image or {}, "video_preprocessor_config": video}
    )
    assert isinstance(found, Qwen3VLEstimator)
    return found


@pytest.mark.parametrize("model_type", ["qwen3_vl", "qwen3_vl_moe", "qwen3_5"])
@pytest.mark.parametrize(
    "family",
    ["qwen3_vl", "qwen3_vl@video class default", "qwen3_vl@video hub cfg", "qwen3_vl@video hub cfg capped"],
)
def test_every_oracle_row_of_the_family_is_equal(
    family: str,
    model_type: str,
    oracle: Callable[[str], list[Row]],
    oracle_params: Callable[[str], Row],
    counts_of: CountsOf,
) -> None:
    rows, params = oracle(family), oracle_params(family)
    image, video = (IMAGE, params) if "@video" in family else (params, None)
    if family.endswith("capped"):
        # The helper of transformers 5.24 forgets the cap that its own processing applies: only real runs are truth.
        rows = [row for row in rows if row["method"] == "run"]
    assert len(rows) > 20
    estimator = estimator_of(image, video, model_type)
    for row in rows:
        counts = counts_of(estimator, row)
        if counts is None:
            continue
        if row["kind"] == "video":
            timing = (row["src_frames"], row["fps"], row["duration"])
            assert estimator.num_sampled(*timing) == row["sampled_frames"], row
        assert (counts.patches, counts.visual_tokens, counts.llm_tokens) == (
            row["patches"],
            row["embed_tokens"],
            row["llm_tokens"],
        ), row


@pytest.mark.parametrize(
    ("clip", "published", "by_default"),
    [
        ((640, 360, 125, 25.0, 5.0), 1140, 370),
        ((1280, 720, 300, 30.0, 10.0), 8880, 400),
        ((320, 180, 1799, 29.97, 60.03), 4130, 710),
        ((640, 360, 7200, 30.0, 240.0), 13_090, 2530),
    ],
)
def test_golden_videos(clip: tuple[int, int, int, float, float], published: int, by_default: int) -> None:
    assert estimator_of(IMAGE, VIDEO).video(*clip).llm_tokens == published
    assert estimator_of(IMAGE, {"patch_size": 16}).video(*clip).llm_tokens == by_default


def test_the_cap_bounds_a_short_clip() -> None:
    clip = (1280, 720, 300, 30.0, 10.0)
    assert estimator_of(IMAGE, {**VIDEO, "cap_pixels_per_frame": True}).video(*clip).llm_tokens == 7280
    for off in (None, False):
        assert estimator_of(IMAGE, {**VIDEO, "cap_pixels_per_frame": off}).video(*clip).llm_tokens == 8880


def test_golden_images_and_no_windows() -> None:
    estimator = estimator_of(IMAGE)
    assert isinstance(estimator, PatchEstimator)
    assert (estimator.window_px, estimator.tokens_per_second, estimator.patch_px) == (0, 0.0, 16)
    counts = estimator.image(640, 480)
    assert (counts.llm_tokens, counts.grid, counts.window) == (300, (1, 30, 40), SegmentStats())
    assert estimator.image(1, 1).llm_tokens == 64


def test_without_a_patch_size_the_tower_decides() -> None:
    assert estimator_of({"min_pixels": 4096}).patch_px == 16
    assert estimator_of({"patch_size": 14}).patch_px == 14


def test_timestamps_are_means_of_pairs_and_their_text_is_counted() -> None:
    estimator = estimator_of(IMAGE, VIDEO)
    indices = estimator.frame_indices(125, 25.0, 5.0)
    assert indices.tolist() == [0, 14, 28, 41, 55, 69, 83, 96, 110, 124]
    assert list(estimator.group_texts(indices, 25.0)) == [
        "<0.3 seconds>",
        "<1.4 seconds>",
        "<2.5 seconds>",
        "<3.6 seconds>",
        "<4.7 seconds>",
    ]
    counts = estimator.video(640, 360, 125, 25.0, 5.0)
    assert counts.llm_tokens - counts.visual_tokens == 5 * (6 + 2)
    assert estimator.group_texts(np.array([0, 1, 2]), 2.0) == ["<0.2 seconds>", "<1.0 seconds>"]


def test_texts_are_counted_by_the_given_tokenizer_and_it_is_in_the_fingerprint() -> None:
    rough = estimator_of(IMAGE, VIDEO)
    files = {"config": {"model_type": "qwen3_vl"}, "preprocessor_config": IMAGE, "video_preprocessor_config": VIDEO}
    by_letters = estimator_from_config(files, count_text=len)
    counts = by_letters.video(640, 360, 125, 25.0, 5.0)
    assert counts.llm_tokens - counts.visual_tokens == 5 * (len("<0.3 seconds>") + 2)
    assert by_letters.fingerprint != rough.fingerprint
    assert pickle.loads(pickle.dumps(by_letters)).video(640, 360, 125, 25.0, 5.0) == counts


def test_odd_numbers_of_frames_are_padded_and_the_resize_does_not_see_it() -> None:
    estimator = estimator_of(IMAGE, {**VIDEO, "size": {"shortest_edge": 4096, "longest_edge": 3 * 100_000}})
    counts = estimator.video(1280, 720, 3, 25.0, 0.12)
    assert (estimator.num_sampled(3, 25.0, 0.12), counts.grid[0], counts.frames) == (3, 2, 4)
    assert counts.height_px * counts.width_px <= 100_000


@given(num_frames=st.integers(1, 50), fps=st.floats(0.5, 60), least=st.integers(1, 4), step=st.integers(1, 3))
def test_a_clip_that_is_too_short_comes_with_a_length_that_is_taken(
    refusal: Refusal, num_frames: int, fps: float, least: int, step: int
) -> None:
    estimator = Qwen3VLEstimator(Qwen3VLConfig(min_frames=least, temporal_patch=step))
    error = refusal(estimator.video, 64, 64, num_frames, fps, 1.0)
    if error is None:
        assert num_frames >= step
    else:
        assert error.reason is Reason.TOO_FEW_FRAMES
        assert error.nearest_frames is not None
        assert estimator.video(64, 64, error.nearest_frames, fps, 1.0).llm_tokens > 0
        assert min(num_frames, estimator.num_sampled(num_frames, fps, 1.0)) < step


def test_one_frame_is_refused_and_the_shape_of_a_strip_too() -> None:
    estimator = estimator_of(IMAGE, VIDEO)
    with pytest.raises(UnfitError) as caught:
        estimator.video(64, 64, 1, 25.0, 0.04)
    assert (caught.value.reason, caught.value.nearest_frames) == (Reason.TOO_FEW_FRAMES, 2)
    with pytest.raises(UnfitError) as caught:
        estimator.video(40, 9000, 300, 30.0, 10.0)
    assert caught.value.reason is Reason.EXTREME_ASPECT
    assert caught.value.nearest_size_px == (45, 9000)
    assert estimator.video(45, 9000, 300, 30.0, 10.0).llm_tokens > 0


def test_a_clip_without_a_rate_takes_it_from_its_duration() -> None:
    estimator = estimator_of(IMAGE, VIDEO)
    assert estimator.video(640, 360, 125, math.nan, 5.0) == estimator.video(640, 360, 125, 25.0, 5.0)
    with pytest.raises(MediaError, match="no usable frame rate"):
        estimator.video(640, 360, 125, 0.0, 0.0)


def test_sampling_options() -> None:
    assert estimator_of({}, {"num_frames": 6}).num_sampled(100, 25.0, 4.0) == 6
    assert estimator_of({}, {"num_frames": 6}).frame_indices(3, 25.0, 1.0).tolist() == [0, 0, 1, 1, 2, 2]
    assert estimator_of({}, {"do_sample_frames": False}).num_sampled(100, 25.0, 4.0) == 100
    assert estimator_of({}, {"fps": 5, "max_frames": 17}).num_sampled(100, 25.0, 4.0) == 17
    with pytest.raises(DataError, match="give one of them"):
        estimator_of({}, {"fps": 5, "num_frames": 8})


@pytest.mark.parametrize("settings", [{"max_pixels": 5}, {"fps": 0.0}, {"num_frames": 1}, {"std": (0.5, 0.0, 0.5)}])
def test_impossible_configurations_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="Qwen3VLConfig"):
        Qwen3VLConfig(**settings)


@settings(max_examples=40)
@given(width=st.integers(20, 2000), height=st.integers(20, 2000), num_frames=st.integers(2, 4000), fps=st.floats(1, 60))
def test_explanations_end_with_the_counts(width: int, height: int, num_frames: int, fps: float) -> None:
    estimator = estimator_of(IMAGE, VIDEO)
    lines = estimator.explain_video(width, height, num_frames, fps, 1.0)
    counts = estimator.video(width, height, num_frames, fps, 1.0)
    assert lines[-1] == f"LLM tokens: {counts.llm_tokens}"
    assert f"{counts.llm_tokens - counts.visual_tokens} tokens" in lines[-2]
    image = estimator.image(width, height)
    assert estimator.explain_image(width, height)[-1] == f"LLM tokens: {image.llm_tokens}"


class _Metadata:
    fps = 25.0
    frames_indices = (0, 14, 28, 41, 55, 69, 83)


def test_the_prompt_of_transformers_has_as_many_tokens() -> None:
    torch = pytest.importorskip("torch")
    processing = pytest.importorskip("transformers.models.qwen3_vl.processing_qwen3_vl")
    processor = object.__new__(processing.Qwen3VLProcessor)
    processor.vision_start_token, processor.video_token, processor.vision_end_token = "\x01", "\x02", "\x03"
    processor.video_processor = type("Settings", (), {"merge_size": 2, "temporal_patch_size": 2})()
    metadata = _Metadata()
    metadata.frames_indices = list(_Metadata.frames_indices)  # type: ignore[assignment]
    grid = torch.tensor([[4, 6, 10]])
    prompt = processor.replace_video_token({"video_grid_thw": grid, "video_metadata": [metadata]}, 0)
    texts = Qwen3VLEstimator().group_texts(np.array(_Metadata.frames_indices), 25.0)
    assert prompt == "".join(f"{text}\x01{chr(2) * 15}\x03" for text in texts)
