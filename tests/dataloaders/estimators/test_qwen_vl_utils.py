"""qwen-vl-utils before the processor: the recorded oracle, the second resize, timestamps, impossible settings."""

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataloaders.counts import ItemCounts
from dataloaders.errors import DataError, Reason, UnfitError
from dataloaders.estimators import PatchEstimator, TokenEstimator, estimator_from_config, registered_estimators
from dataloaders.estimators.qwen2_vl import Qwen2VLConfig, Qwen2VLEstimator
from dataloaders.estimators.qwen3_vl import Qwen3VLConfig, Qwen3VLEstimator
from dataloaders.estimators.qwen_vl_utils import QwenVLUtilsConfig, QwenVLUtilsEstimator

Row = dict[str, Any]
CountsOf = Callable[[Any, Row], ItemCounts | None]
Refusal = Callable[..., UnfitError | None]
PUBLISHED = {
    "qwen2_vl": {"patch_size": 14, "min_pixels": 3136, "max_pixels": 12845056},
    "qwen2_5_vl": {"patch_size": 14, "min_pixels": 3136, "max_pixels": 12845056},
    "qwen3_vl": {"patch_size": 16, "size": {"shortest_edge": 65_536, "longest_edge": 16_777_216}},
}


def estimator_of(model_type: str, **image: Any) -> TokenEstimator:
    files = {"config": {"model_type": model_type}, "preprocessor_config": {**PUBLISHED[model_type], **image}}
    return estimator_from_config(files, preprocessing="qwen_vl_utils")


@pytest.mark.parametrize(
    ("family", "model_type"),
    [
        ("qwen2_5_vl+qwen_vl_utils0.0.14", "qwen2_vl"),
        ("qwen2_5_vl+qwen_vl_utils0.0.14", "qwen2_5_vl"),
        ("qwen3_vl+qwen_vl_utils0.0.14", "qwen3_vl"),
        ("qwen2.5_vl+qwen_vl_utils0.0.14@video", "qwen2_5_vl"),
        ("qwen3_vl+qwen_vl_utils0.0.14@video", "qwen3_vl"),
    ],
)
def test_every_oracle_row_of_the_family_is_equal(
    family: str, model_type: str, oracle: Callable[[str], list[Row]], counts_of: CountsOf
) -> None:
    estimator, rows = estimator_of(model_type), oracle(family)
    for row in rows:
        counts = counts_of(estimator, row)
        if counts is None:
            continue
        if row["kind"] == "video":
            timing = (row["src_frames"], row["fps"], row["duration"])
            assert len(estimator.frame_indices(*timing)) == row["sampled_frames"], row
        # the rows of Qwen3-VL leave out the timestamps
        assert (counts.patches, counts.visual_tokens) == (row["patches"], row["embed_tokens"]), row


@pytest.mark.parametrize(
    ("model_type", "clip", "visual"),
    [
        ("qwen2_5_vl", (640, 360, 125, 25.0, 5.0), 1495),
        ("qwen2_5_vl", (640, 360, 54_000, 30.0, 1800.0), 114_816),
        ("qwen3_vl", (640, 360, 125, 25.0, 5.0), 1100),
        ("qwen3_vl", (640, 360, 54_000, 30.0, 1800.0), 84_480),
    ],
)
def test_golden_videos(model_type: str, clip: tuple[int, int, int, float, float], visual: int) -> None:
    estimator = estimator_of(model_type)
    counts = estimator.video(*clip)
    assert counts.visual_tokens == visual
    assert estimator.explain_video(*clip)[-1] == f"LLM tokens: {counts.llm_tokens}"
    assert (counts.llm_tokens > visual) is (model_type == "qwen3_vl")


def test_the_processor_resizes_images_again_and_videos_of_qwen2_alone() -> None:
    assert estimator_of("qwen2_5_vl").image(1920, 1080).llm_tokens == 2691
    assert estimator_of("qwen2_5_vl", max_pixels=28 * 28 * 256).image(1920, 1080).llm_tokens == 252
    assert len(estimator_of("qwen2_5_vl", max_pixels=28 * 28 * 256).explain_image(1920, 1080)) == 9
    assert estimator_of("qwen3_vl").image(64, 64).llm_tokens == 64
    assert len(estimator_of("qwen2_5_vl").video_budgets(8)) == 2  # type: ignore[attr-defined]
    assert len(estimator_of("qwen3_vl").video_budgets(8)) == 1  # type: ignore[attr-defined]


def test_it_is_what_the_decoder_needs() -> None:
    estimator = estimator_of("qwen2_5_vl")
    assert isinstance(estimator, PatchEstimator)
    assert (estimator.patch_px, estimator.window_px, estimator.tokens_per_second) == (14, 112, 2)
    assert estimator.seconds_per_grid(300, 30.0) == pytest.approx(1.0)
    older = QwenVLUtilsEstimator(Qwen2VLEstimator(Qwen2VLConfig()))
    assert older.seconds_per_grid(300, 30.0) == 1.0


@given(num_frames=st.integers(1, 60), fps=st.floats(0.2, 90), wanted=st.none() | st.integers(2, 40))
def test_a_clip_that_is_too_short_comes_with_a_length_that_is_taken(
    refusal: Refusal, num_frames: int, fps: float, wanted: int | None
) -> None:
    estimator = QwenVLUtilsEstimator(Qwen2VLEstimator(), QwenVLUtilsConfig(num_frames=wanted))
    error = refusal(estimator.video, 64, 64, num_frames, fps, 1.0)
    if error is None:
        assert 2 <= estimator.video(64, 64, num_frames, fps, 1.0).frames <= num_frames
    else:
        assert error.reason is Reason.TOO_FEW_FRAMES
        assert error.nearest_frames is not None
        assert estimator.video(64, 64, error.nearest_frames, fps, 1.0).frames <= error.nearest_frames


@pytest.mark.parametrize(
    "settings", [{"fps": 0}, {"frame_min_tokens": 900}, {"max_frames": 2}, {"num_frames": 1}, {"image_min_tokens": 0}]
)
def test_impossible_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="QwenVLUtilsConfig"):
        QwenVLUtilsConfig(**settings)


def test_squares_of_another_size_are_refused_where_nothing_corrects_them() -> None:
    inner = Qwen3VLEstimator(Qwen3VLConfig(merge_size=3))
    with pytest.raises(DataError, match="squares of 2 x 2"):
        QwenVLUtilsEstimator(inner, resizes_videos=False)


@pytest.mark.parametrize(
    "model_type", [kind for kind in registered_estimators() if kind.islower() and not kind.startswith("qwen")]
)
def test_other_families_are_not_prepared_by_it(model_type: str) -> None:
    with pytest.raises(DataError, match="qwen_vl_utils does not prepare"):
        estimator_from_config({"model_type": model_type}, preprocessing="qwen_vl_utils")
