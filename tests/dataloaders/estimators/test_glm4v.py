"""GLM-4.1V, 4.5V and 4.6V: the recorded oracle, the real image processors and prompts, sampling in golden clips."""

import importlib
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataloaders.counts import ItemCounts
from dataloaders.errors import DataError, Reason, UnfitError
from dataloaders.estimators import PatchEstimator, estimator_from_config
from dataloaders.estimators.glm4v import Glm4vConfig, Glm4vEstimator, Glm46VEstimator

Row = dict[str, Any]
CountsOf = Callable[[Any, Row], ItemCounts | None]
Refusal = Callable[..., UnfitError | None]
KINDS = ("glm4v", "glm46v")


def estimator_of(kind: str, image: dict[str, Any] | None = None, video: dict[str, Any] | None = None) -> Glm4vEstimator:
    found = estimator_from_config(
        {"config": {"model_type": kind}, "preprocessor_config": image or {}, "video_preprocessor_config": video or {}}
    )
    assert isinstance(found, Glm4vEstimator)
    return found


@pytest.mark.parametrize("model_type", ["glm4v", "glm4v_moe"])
@pytest.mark.parametrize("family", ["glm4v(4.1V/4.5V)", "glm4v(4.1V/4.5V)@video"])
def test_every_oracle_row_of_the_family_is_equal(
    family: str,
    model_type: str,
    oracle: Callable[[str], list[Row]],
    oracle_params: Callable[[str], Row],
    counts_of: CountsOf,
) -> None:
    rows, params = oracle(family), oracle_params(family)
    estimator = estimator_of(model_type, params if "@" not in family else {}, params if "@" in family else {})
    for row in rows:
        counts = counts_of(estimator, row)
        if counts is None:
            continue
        if row["kind"] == "video":
            timing = (row["src_frames"], row["fps"], row["duration"])
            assert estimator.num_sampled(*timing) == row["sampled_frames"], row
        assert (counts.patches, counts.visual_tokens) == (row["patches"], row["embed_tokens"]), row
        # Upstream: the helper of the processor leaves the texts out that its prompt has.
        leaves_out = row["kind"] == "video" and row["method"] == "helper"
        assert row["llm_tokens"] == (counts.visual_tokens if leaves_out else counts.llm_tokens), row


@pytest.mark.parametrize(
    ("clip", "tokens_41", "tokens_46"),
    [
        ((640, 360, 125, 25.0, 5.0), 1510, 4575),
        ((1280, 720, 300, 30.0, 10.0), 11_990, 29_160),
        ((320, 180, 1799, 29.97, 60.0267), 4190, 4370),
        ((640, 360, 7200, 30.0, 240.0), 27_970, 29_264),
    ],
)
def test_golden_videos(clip: tuple[int, int, int, float, float], tokens_41: int, tokens_46: int) -> None:
    assert estimator_of("glm4v").video(*clip).llm_tokens == tokens_41
    assert abs(estimator_of("glm46v").video(*clip).llm_tokens - tokens_46) <= 0.05 * tokens_46


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"size": {"shortest_edge": 12_544, "longest_edge": 9_633_792}},
        {"patch_size": 16, "size": {"shortest_edge": 200_000, "longest_edge": 500_000}},
    ],
)
def test_the_image_processor_of_transformers_agrees(kind: str, options: dict[str, Any]) -> None:
    pytest.importorskip("transformers")
    name = {"glm4v": "Glm4vImageProcessorPil", "glm46v": "Glm46VImageProcessorPil"}[kind]
    module = importlib.import_module(f"transformers.models.{kind}.image_processing_pil_{kind}")
    processor = getattr(module, name)(**options)
    estimator = estimator_of(kind, options)
    for width in (1, 13, 27, 28, 70, 211, 640, 1333):
        for height in (1, 14, 42, 97, 480, 1800):
            try:
                theirs = processor.get_number_of_image_patches(height, width)
            except ValueError:
                with pytest.raises(UnfitError):
                    estimator.image(width, height)
            else:
                assert estimator.image(width, height).patches == theirs, (width, height)
    picture = np.zeros((90, 131, 3), dtype=np.uint8)
    assert processor(picture)["image_grid_thw"].tolist() == [list(estimator.image(131, 90).grid)]


def test_sampling_of_the_older_model() -> None:
    estimator = estimator_of("glm4v")
    assert estimator.frame_indices(50, 25.0, 2.0).tolist() == [0, 13, 25, 38]
    assert estimator.frame_indices(1, 25.0, 0.04).tolist() == [0, 0]
    assert estimator.frame_indices(4, 1.0, 4.0).tolist() == [0, 1, 2, 3]  # duplicates are dropped
    long = estimator.frame_indices(54_000, 30.0, 1800.0)
    assert (len(long), long[0], long[-1]) == (600, 0, 53_999)
    # A duration of 0 counts as unknown and is rounded up to whole seconds.
    assert len(estimator.frame_indices(40, 25.0, 0.0)) == len(estimator.frame_indices(40, 25.0, 3.0))
    # More is asked of a long clip of few frames than it has.
    assert estimator.frame_indices(5, 0.01, 500.0).tolist() == [0, 1, 2, 3, 4, 4]


def test_sampling_of_the_younger_model() -> None:
    estimator = estimator_of("glm46v")
    assert len(estimator.frame_indices(300, 30.0, 10.0)) == 60
    assert len(estimator.frame_indices(1799, 29.97, 60.03)) == 120
    assert len(estimator.frame_indices(54_000, 30.0, 1800.0)) == 640
    assert estimator.frame_indices(10, 5.0, 2.0).tolist() == list(range(10))  # asked for 12, has 10
    with pytest.raises(UnfitError) as caught:
        estimator.video(64, 64, 4, 30.0, 4 / 30)
    assert (caught.value.reason, caught.value.nearest_frames) == (Reason.TOO_FEW_FRAMES, 5)


@given(num_frames=st.integers(1, 60), fps=st.floats(0.5, 240), step=st.integers(1, 2))
def test_a_clip_that_is_too_short_comes_with_a_length_that_is_taken(
    refusal: Refusal, num_frames: int, fps: float, step: int
) -> None:
    estimator = Glm46VEstimator(Glm4vConfig(temporal_patch=step))
    duration_s = num_frames / fps
    error = refusal(estimator.video, 64, 64, num_frames, fps, duration_s)
    if error is not None:
        assert error.nearest_frames is not None
        assert estimator.video(64, 64, error.nearest_frames, fps, duration_s).llm_tokens > 0
        assert estimator.video(64, 64, error.nearest_frames, fps, error.nearest_frames / fps).llm_tokens > 0


def loop_of_the_younger_model(num_frames: int, fps: float, step_s: float, until_s: int) -> list[int]:
    """Frame by frame, as the processor goes."""
    taken, due = [], 0.0
    for frame in range(num_frames):
        if frame * (1 / fps) >= due:
            due += step_s
            taken.append(frame)
            if due >= until_s:
                break
    return taken


@given(num_frames=st.integers(1, 3000), fps=st.floats(0.5, 240) | st.sampled_from([24.0, 25.0, 30.0, 29.97]))
def test_jumping_over_frames_equals_looking_at_each(num_frames: int, fps: float) -> None:
    from dataloaders.estimators.glm4v import _first_after

    duration_s = num_frames / fps
    for per_second in (6, 2, 1):
        expected = loop_of_the_younger_model(num_frames, fps, 1 / per_second, int(duration_s))
        clip = (num_frames, 1 / fps, 1 / per_second, int(duration_s))
        assert _first_after(*clip, num_frames) == expected
        assert _first_after(*clip, 3) == expected[:3]


def test_texts_and_delimiters() -> None:
    older, younger = estimator_of("glm4v"), estimator_of("glm46v")
    indices = np.array([0, 13, 25, 38])
    assert (list(older.group_texts(indices, 25.0)), list(younger.group_texts(indices, 25.0))) == (
        ["0", "1"],
        ["0.0 seconds", "1.0 seconds"],
    )
    counts = older.video(640, 360, 125, 25.0, 5.0)
    assert counts.llm_tokens - counts.visual_tokens == 5 * (1 + 2)
    assert isinstance(older, PatchEstimator)
    assert older.window_px == 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_prompt_of_transformers_has_the_same_texts(kind: str) -> None:
    torch = pytest.importorskip("torch")
    module = pytest.importorskip(f"transformers.models.{kind}.processing_{kind}")
    video_utils = pytest.importorskip("transformers.video_utils")
    processor = object.__new__(getattr(module, {"glm4v": "Glm4vProcessor", "glm46v": "Glm46VProcessor"}[kind]))
    processor.image_token = "\x02"
    estimator = estimator_of(kind)
    for num_frames, fps in ((125, 25.0), (7, 2.0), (900, 29.97)):
        indices = estimator.frame_indices(num_frames, fps, num_frames / fps)
        grid = torch.tensor([[math.ceil(len(indices) / 2), 4, 6]])
        processor.video_processor = type("Settings", (), {"merge_size": 2})()
        metadata = video_utils.VideoMetadata(total_num_frames=num_frames, fps=fps, frames_indices=indices.tolist())
        prompt = processor.replace_video_token({"video_grid_thw": grid, "video_metadata": [metadata]}, 0)
        texts = estimator.group_texts(indices, fps)
        frame = "<|begin_of_image|>" + "\x02" * 6 + "<|end_of_image|>"
        assert prompt == "".join(frame + text for text in texts)


def test_settings_of_images_are_not_min_pixels() -> None:
    assert estimator_of("glm4v", {"max_pixels": 28 * 28 * 4}).image(640, 480) == estimator_of("glm4v").image(640, 480)
    with pytest.raises(DataError, match="needs shortest_edge"):
        estimator_of("glm4v", {"size": {"longest_edge": 5}})
    with pytest.raises(DataError, match=r"Glm4vConfig\.fps"):
        estimator_of("glm4v", {}, {"fps": 0})


@settings(max_examples=40)
@given(width=st.integers(20, 2000), height=st.integers(20, 2000), num_frames=st.integers(9, 4000))
def test_explanations_end_with_the_counts(width: int, height: int, num_frames: int) -> None:
    for kind in KINDS:
        estimator = estimator_of(kind)
        clip = (width, height, num_frames, 30.0, num_frames / 30)
        assert estimator.explain_video(*clip)[-1] == f"LLM tokens: {estimator.video(*clip).llm_tokens}"
        image = estimator.image(width, height)
        assert estimator.explain_image(width, height)[-1] == f"LLM tokens: {image.llm_tokens}"
