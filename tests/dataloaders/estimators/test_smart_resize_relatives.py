"""VideoLLaMA 3, PaddleOCR-VL and ERNIE 4.5 VL: the recorded oracle, the real image processors, sampling."""

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataloaders.counts import ItemCounts
from dataloaders.errors import DataError, MediaError, Reason, UnfitError
from dataloaders.estimators import PatchEstimator, Preprocessing, TokenEstimator, estimator_from_config
from dataloaders.estimators.ernie4_5_vl import Ernie45VLConfig, Ernie45VLEstimator
from dataloaders.estimators.paddleocr_vl import PaddleOCRVLEstimator
from dataloaders.estimators.video_llama_3 import VideoLlama3Estimator

Row = dict[str, Any]
CountsOf = Callable[[Any, Row], ItemCounts | None]
PROCESSORS = {
    "video_llama_3": "VideoLlama3ImageProcessorPil",
    "paddleocr_vl": "PaddleOCRVLImageProcessorPil",
    "ernie4_5_vl_moe": "Ernie4_5_VLMoeImageProcessorPil",
}


def estimator_of(
    kind: str,
    image: dict[str, Any] | None = None,
    video: dict[str, Any] | None = None,
    preprocessing: Preprocessing | None = None,
) -> TokenEstimator:
    files = {
        "config": {"model_type": kind},
        "preprocessor_config": image or {},
        "video_preprocessor_config": video or {},
    }
    return estimator_from_config(files, preprocessing=preprocessing)


@pytest.mark.parametrize("family", ["video_llama_3", "video_llama_3@video", "paddleocr_vl"])
def test_every_oracle_row_of_the_family_is_equal(
    family: str, oracle: Callable[[str], list[Row]], oracle_params: Callable[[str], Row], counts_of: CountsOf
) -> None:
    rows, params = oracle(family), oracle_params(family)
    image, video = ({}, params) if "@" in family else (params, {})
    estimator = estimator_of(family.partition("@")[0], image, video)
    for row in rows:
        counts = counts_of(estimator, row)
        if counts is None:
            continue
        if row["kind"] == "video":
            timing = (row["src_frames"], row["fps"], row["duration"])
            assert len(estimator.frame_indices(*timing)) == row["sampled_frames"], row
        # The table takes squares of 2 x 2 patches for images of VideoLLaMA 3, though its options and the processor
        # say 1 x 1 (see below), and leaves out the texts before frames.
        divisor = 4 if family == "video_llama_3" else 1
        assert (counts.patches, counts.visual_tokens // divisor) == (row["patches"], row["embed_tokens"]), row
        assert row["llm_tokens"] == row["embed_tokens"], row
        assert (counts.llm_tokens > counts.visual_tokens) is family.endswith("@video"), row


@pytest.mark.parametrize("kind", PROCESSORS)
@pytest.mark.parametrize("bounds", [{}, {"shortest_edge": 60_000, "longest_edge": 300_000}])
@pytest.mark.parametrize("cells", [{}, {"patch_size": 16, "merge_size": 2}])
def test_the_image_processor_of_transformers_agrees(kind: str, bounds: dict[str, int], cells: dict[str, int]) -> None:
    pytest.importorskip("transformers")
    module = importlib.import_module(f"transformers.models.{kind}.image_processing_pil_{kind}")
    options: dict[str, Any] = {**cells, **({"size": bounds} if bounds else {})}
    processor = getattr(module, PROCESSORS[kind])(**options)
    estimator = estimator_of(kind, options, {key: value for key, value in cells.items() if key == "patch_size"})
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


def test_the_prompt_of_video_llama_has_a_token_for_each_patch_of_an_image_and_texts_before_frames() -> None:
    torch = pytest.importorskip("torch")
    module = pytest.importorskip("transformers.models.video_llama_3.processing_video_llama_3")
    image_module = pytest.importorskip("transformers.models.video_llama_3.image_processing_pil_video_llama_3")
    processor = object.__new__(module.VideoLlama3Processor)
    processor.image_token, processor.video_token = "\x01", "\x02"
    processor.image_processor = image_module.VideoLlama3ImageProcessorPil()
    grid = processor.image_processor(np.zeros((90, 131, 3), dtype=np.uint8))["image_grid_thw"]
    tokens = processor.replace_image_token({"image_grid_thw": torch.as_tensor(grid)}, 0)
    estimator = estimator_of("video_llama_3")
    assert len(tokens) == estimator.image(131, 90).llm_tokens == estimator.image(131, 90).patches

    indices = estimator.frame_indices(300, 30.0, 10.0)
    metadata = pytest.importorskip("transformers.video_utils").VideoMetadata(
        total_num_frames=300, fps=30.0, frames_indices=indices.tolist()
    )
    inputs = {
        "video_grid_thw": torch.tensor([[10, 4, 6]]),
        "video_merge_sizes": torch.tensor([2]),
        "video_compression_mask": torch.ones(60, dtype=torch.bool),
        "video_metadata": [metadata],
    }
    prompt = processor.replace_video_token(inputs, 0)
    texts = estimator.group_texts(indices, 30.0)  # type: ignore[attr-defined]
    assert prompt == "".join(text + "\x02" * 6 for text in texts)


def test_golden_images() -> None:
    assert estimator_of("video_llama_3").image(640, 480).llm_tokens == 46 * 34
    assert estimator_of("paddleocr_vl").image(640, 480).llm_tokens == 23 * 17
    assert estimator_of("ernie4_5_vl").image(640, 480).llm_tokens == 23 * 17


def test_frames_of_video_llama_merge_and_share_one_budget() -> None:
    estimator = estimator_of("video_llama_3", {}, {"fps": 1})
    counts = estimator.video(640, 360, 300, 30.0, 10.0)
    assert counts.grid == (10, 12, 22)  # each frame within 602,112 // 10 px
    assert (counts.visual_tokens, counts.frames) == (10 * 66, 10)
    texts = estimator.group_texts(np.array([0, 30, 330]), 30.0)  # type: ignore[attr-defined]
    assert texts == ["Time 0.0s:", ",Time 1.0s:", ",Time 11.0s:"]
    assert not isinstance(estimator, PatchEstimator)
    assert "upper bound" in estimator.rule
    assert "upper bound" not in estimator_of("video_llama_3", {}, {"use_token_compression": False}).rule


def test_sampling_of_video_llama() -> None:
    saved = {"do_sample_frames": False}
    assert len(estimator_of("video_llama_3", {}, saved).frame_indices(300, 30.0, 10.0)) == 10
    assert len(estimator_of("video_llama_3", {}, saved, "transformers").frame_indices(300, 30.0, 10.0)) == 300
    assert estimator_of("video_llama_3").frame_indices(1, 25.0, 0.04).tolist() == [0]
    eight = estimator_of("video_llama_3", {}, {"num_frames": 8})
    with pytest.raises(UnfitError) as caught:
        eight.video(64, 64, 5, 25.0, 0.2)
    assert caught.value.nearest_frames == 8
    assert eight.video(64, 64, 8, 25.0, 0.2).frames == 8
    with pytest.raises(DataError, match="frame by frame"):
        estimator_of("video_llama_3", {}, {"temporal_patch_size": 2})


def test_more_frames_than_pixels_are_refused() -> None:
    few = {"size": {"shortest_edge": 100, "longest_edge": 1000}, "do_sample_frames": False}
    with pytest.raises(UnfitError, match="share 1000 px") as caught:
        estimator_of("video_llama_3", {}, few, "transformers").video(64, 64, 1001, 25.0, 40.0)
    assert caught.value.reason is Reason.TOO_LARGE


def test_paddleocr_takes_no_videos() -> None:
    estimator = estimator_of("paddleocr_vl")
    for call in (
        lambda: estimator.video(64, 64, 8, 4.0, 2.0),
        lambda: estimator.frame_indices(8, 4.0, 2.0),
        lambda: estimator.explain_video(64, 64, 8, 4.0, 2.0),
    ):
        with pytest.raises(MediaError) as caught:
            call()
        assert caught.value.reason is Reason.UNSUPPORTED_MEDIA


def test_ernie_joins_pairs_of_frames_behind_the_tower() -> None:
    estimator = estimator_of("ernie4_5_vl_moe", {}, {"fps": 2})
    counts = estimator.video(640, 360, 500, 25.0, 20.0)
    assert (counts.grid[0], counts.frames) == (40, 40)
    assert counts.patches == 8 * counts.llm_tokens == counts.full.total
    assert counts.full.count == 40
    every = estimator_of("ernie4_5_vl_moe").frame_indices(17, 25.0, 0.68)
    assert every.tolist() == [*range(17), 16]
    assert len(estimator_of("ernie4_5_vl_moe").frame_indices(5000, 25.0, 200.0)) == 180
    assert estimator.frame_indices(1, 25.0, 0.04).tolist() == [0, 0]


@given(num_frames=st.integers(1, 2000), fps=st.floats(0.5, 120), rate=st.none() | st.floats(0.5, 8))
def test_ernie_takes_an_even_number_of_ascending_frames(num_frames: int, fps: float, rate: float | None) -> None:
    indices = Ernie45VLEstimator(Ernie45VLConfig(fps=rate)).frame_indices(num_frames, fps, 1.0)
    assert len(indices) % 2 == 0
    assert (np.diff(indices) >= 0).all()
    assert 0 <= indices[0] <= indices[-1] < num_frames


@pytest.mark.parametrize(
    ("image", "video", "words"),
    [
        ({"max_pixels": 5}, {}, "max_pixels"),
        ({}, {"temporal_patch_size": 1}, "pairs of frames"),
        ({}, {"num_frames": 8}, "not within 16 to 180"),
        ({}, {"fps": -1}, "must be positive"),
        ({"size": {"longest_edge": 9}}, {}, "needs shortest_edge"),
    ],
)
def test_settings_of_ernie_that_the_processor_would_refuse(
    image: dict[str, Any], video: dict[str, Any], words: str
) -> None:
    with pytest.raises(DataError, match=words):
        estimator_of("ernie4_5_vl_moe", image, video)


@pytest.mark.parametrize("estimator", [VideoLlama3Estimator(), PaddleOCRVLEstimator(), Ernie45VLEstimator()])
@given(width=st.integers(1, 6000), height=st.integers(1, 6000))
def test_refused_shapes_come_with_one_that_is_taken(
    refusal: Callable[..., UnfitError | None], estimator: TokenEstimator, width: int, height: int
) -> None:
    error = refusal(estimator.image, width, height)
    if error is not None:
        assert error.nearest_size_px is not None
        width, height = error.nearest_size_px
    counts = estimator.image(width, height)
    assert estimator.explain_image(width, height)[-1] == f"LLM tokens: {counts.llm_tokens}"
