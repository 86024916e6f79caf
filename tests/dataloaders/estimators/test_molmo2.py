"""Molmo2: overlapping crops, pooled rows and their ends; frames with their times."""

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataloaders.errors import DataError, Reason, UnfitError
from dataloaders.estimators import estimator_from_config
from dataloaders.estimators.molmo2 import Molmo2Config, Molmo2Estimator

configs = st.builds(
    Molmo2Config,
    crop_px=st.sampled_from([336, 378]),
    max_crops=st.integers(1, 24),
    margin_patches=st.sampled_from([(4, 4), (0, 0), (3, 1)]),
    pooling=st.sampled_from([(2, 2), (3, 2)]),
    row_ends=st.booleans(),
    global_row_ends=st.booleans(),
    num_frames=st.integers(1, 80),
    max_fps=st.sampled_from([1.0, 2.0, 3.0]),
)


def best_grid(width: int, height: int, most: int, window: int) -> tuple[int, int]:
    """(rows, columns), scale by scale in single precision, as the processor compares them."""
    grids = sorted(
        ((i, j) for i in range(1, most + 1) for j in range(1, most + 1) if i * j <= most),
        key=lambda grid: (grid[0] * grid[1], grid[0]),
    )
    with np.errstate(divide="ignore"):
        scales = [
            min(np.float32(i * window) / np.float32(height), np.float32(j * window) / np.float32(width))
            for i, j in grids
        ]
    if all(scale < 1 for scale in scales):
        return grids[scales.index(max(scales))]
    scales = [np.float32(10e9) if scale < 1 else scale for scale in scales]
    return grids[scales.index(min(scales))]


@pytest.mark.parametrize(
    ("size", "tokens"),
    [
        ((224, 224), 410),
        ((640, 480), 752),
        ((1024, 768), 982),
        ((1920, 1080), 1189),
        ((2480, 3508), 992),
        ((3000, 300), 1334),
        ((1, 1), 410),
    ],
)
def test_golden_images(size: tuple[int, int], tokens: int) -> None:
    # The published processor ends the rows of the canvas alone.
    estimator = estimator_from_config({"model_type": "molmo2", "use_single_crop_col_tokens": False})
    assert estimator.image(*size).llm_tokens == tokens
    # The class default ends those of the global view too: 14 rows.
    assert estimator_from_config({"model_type": "molmo2"}).image(*size).llm_tokens == tokens + 14


@pytest.mark.parametrize(
    ("clip", "tokens"),
    [
        ((640, 360, 150, 30.0, 5.0), 879),
        ((1280, 720, 300, 30.0, 10.0), 1759),
        ((320, 180, 1803, 30.0, 60.1), 5684),
        ((640, 360, 7200, 30.0, 240.0), 5729),
        ((640, 360, 54000, 30.0, 1800.0), 5782),
    ],
)
def test_golden_videos(clip: tuple[int, int, int, float, float], tokens: int) -> None:
    assert Molmo2Estimator().video(*clip).llm_tokens == tokens


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 4000), st.integers(1, 4000), configs)
def test_images_follow_the_processor(width: int, height: int, config: Molmo2Config) -> None:
    margin = sum(config.margin_patches)
    window = config.crop_px // 14 - margin
    rows, columns = best_grid(width - margin * 14, height - margin * 14, config.max_crops, window * 14)
    views = [
        (rows * window + margin, columns * window + margin, config.row_ends),
        (config.crop_px // 14, config.crop_px // 14, config.global_row_ends),
    ]
    text = ""
    for down, across, ends in views:
        row = "v" * math.ceil(across / config.pooling[1]) + ";" * ends
        text += "(" + row * math.ceil(down / config.pooling[0]) + ")"
    estimator = Molmo2Estimator(config)
    counts = estimator.image(width, height)
    assert (counts.llm_tokens, counts.visual_tokens) == (len(text), text.count("v"))
    assert counts.patches == counts.full.total == (rows * columns + 1) * (config.crop_px // 14) ** 2
    assert estimator.explain_image(width, height)[-1].endswith(f"= {len(text)}")


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 5000), st.floats(0.5, 120.0), configs)
def test_an_explanation_of_a_video_ends_with_its_tokens(num_frames: int, fps: float, config: Molmo2Config) -> None:
    estimator, clip = Molmo2Estimator(config), (num_frames, fps, num_frames / fps)
    counts, indices = estimator.video(320, 240, *clip), estimator.frame_indices(*clip)
    assert estimator.explain_video(320, 240, *clip)[-1].endswith(f"= {counts.llm_tokens}")
    assert counts.frames == len(indices)
    assert indices[0] == 0
    assert list(indices) == sorted(indices)


@pytest.mark.torch
@pytest.mark.parametrize("options", [{}, {"num_frames": 8}, {"max_fps": 5}, {"fps": 3}])
@pytest.mark.parametrize("clip", [(150, 30.0), (1, 25.0), (7, 2.0), (1803, 29.97), (333, 7.5), (64, 2.0)])
def test_frames_are_those_of_the_installed_processor(clip: tuple[int, float], options: dict[str, Any]) -> None:
    pytest.importorskip("torch")
    videos = pytest.importorskip("transformers.models.molmo2.video_processing_molmo2")
    metadata = pytest.importorskip("transformers.video_utils").VideoMetadata
    num_frames, fps = clip
    about = metadata(total_num_frames=num_frames, fps=fps, duration=num_frames / fps)
    expected = videos.Molmo2VideoProcessor().sample_frames(about, **options).tolist()
    estimator = estimator_from_config({"config": {"model_type": "molmo2"}, "video_preprocessor_config": options})
    assert estimator.frame_indices(num_frames, fps, num_frames / fps).tolist() == expected


def test_texts_are_counted_as_the_caller_says() -> None:
    texts: list[str] = []

    def count(text: str) -> int:
        texts.append(text)
        return 10

    estimator = Molmo2Estimator(count_text=count, text_rule="tens")
    assert estimator.video(320, 240, 3, 2.0, 1.5).llm_tokens == 3 * (83 + 10)
    assert texts == ["0.0 ", " 0.5 ", " 1.0 "]
    assert estimator.fingerprint != Molmo2Estimator().fingerprint


def test_switches_of_the_processor_are_found() -> None:
    processor = {"processor_class": "Molmo2Processor", "image_use_col_tokens": False, "video_use_col_tokens": True}
    estimator = estimator_from_config({"processor_config": processor})
    assert estimator.image(224, 224).llm_tokens == 2 * (2 + 14 * 14)
    assert estimator.video(320, 240, 1, 2.0, 0.5).llm_tokens == 2 + 9 * 10 + 4


def test_what_the_rule_does_not_cover_is_refused() -> None:
    for video, message in (
        ({"fps": 1, "num_frames": 8}, "the processor takes one"),
        ({"do_sample_frames": False}, "do_sample_frames is false"),
    ):
        with pytest.raises(DataError, match=message):
            estimator_from_config({"config": {"model_type": "molmo2"}, "video_preprocessor_config": video})
    with pytest.raises(DataError, match="leave nothing"):
        Molmo2Config(margin_patches=(20, 10))
    with pytest.raises(DataError, match="needs two numbers"):
        estimator_from_config({"model_type": "molmo2", "pooling_size": 2})
    with pytest.raises(UnfitError) as caught:
        Molmo2Estimator().video(320, 240, 0, 30.0, 1.0)
    assert (caught.value.reason, caught.value.nearest_frames) == (Reason.TOO_FEW_FRAMES, 1)
    with pytest.raises(UnfitError) as caught:
        Molmo2Estimator().image(0, 5)
    assert caught.value.nearest_size_px == (1, 5)
