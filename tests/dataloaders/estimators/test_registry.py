"""The registry, the folders it reads, and the statistics of segments that estimators share."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataloaders.errors import DataError
from dataloaders.estimators import Qwen25VLEstimator, estimator_from_config, register_estimator
from dataloaders.estimators.base import full_segments, temporal_grid, window_segments

PUBLISHED = {"min_pixels": 3136, "max_pixels": 12845056}


@given(t=st.integers(1, 4), h=st.integers(1, 40), w=st.integers(1, 40), window=st.sampled_from([2, 4, 8]))
def test_window_statistics_equal_counting_every_window(t: int, h: int, w: int, window: int) -> None:
    lengths = [
        len(range(top, min(top + window, h))) * len(range(left, min(left + window, w)))
        for _ in range(t)
        for top in range(0, h, window)
        for left in range(0, w, window)
    ]
    stats = window_segments((t, h, w), window)
    assert (stats.count, stats.total, stats.longest) == (len(lengths), sum(lengths), max(lengths))
    assert stats.total_sq == sum(length * length for length in lengths)
    full = full_segments((t, h, w))
    assert (full.count, full.total, full.total_sq, full.longest) == (t, t * h * w, t * (h * w) ** 2, h * w)


@pytest.mark.torch
@pytest.mark.parametrize("grid", [(1, 34, 46), (2, 8, 8), (3, 10, 16), (1, 2, 2), (1, 18, 6)])
def test_window_lengths_match_the_model(grid: tuple[int, int, int]) -> None:
    torch = pytest.importorskip("torch")
    vision_utils = pytest.importorskip("transformers.vision_utils")
    _, boundaries = vision_utils.get_vision_window_index(
        torch.tensor([list(grid)]), spatial_merge_size=2, window_size=112, patch_size=14
    )
    lengths = np.diff(np.unique(np.asarray(boundaries)))
    stats = window_segments(grid, 8)
    assert (stats.count, stats.total_sq, stats.longest) == (len(lengths), int((lengths**2).sum()), int(lengths.max()))


def test_ce07_temporal_positions_are_frames_rounded_up() -> None:
    golden = {1: [1, 2, 3, 4, 5, 6, 7, 8, 9], 2: [1, 1, 2, 2, 3, 3, 4, 4, 5], 3: [1, 1, 1, 2, 2, 2, 3, 3, 3]}
    for temporal, expected in golden.items():
        assert [temporal_grid(frames, temporal) for frames in range(1, 10)] == expected


def write(folder: Path, **files: object) -> Path:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


def test_model_folder_is_read_file_by_file(tmp_path: Path) -> None:
    folder = write(
        tmp_path,
        config={"model_type": "qwen2_5_vl", "vision_config": {"window_size": 224, "tokens_per_second": 4}},
        preprocessor_config={**PUBLISHED, "patch_size": 14, "image_mean": [0.5, 0.5, 0.5]},
        video_preprocessor_config={"size": {"shortest_edge": 3136, "longest_edge": 12845056}, "max_frames": 64},
    )
    estimator = estimator_from_config(folder)
    assert isinstance(estimator, Qwen25VLEstimator)
    c = estimator.config
    assert (c.min_pixels, c.max_pixels, c.window_px, c.tokens_per_second) == (3136, 12845056, 224, 4)
    assert (c.mean, c.video_max_pixels, c.video_max_frames, c.video_total_pixels) == (
        (0.5, 0.5, 0.5),
        12845056,
        64,
        None,
    )
    nested = write(
        tmp_path,
        preprocessor_config={},
        processor_config={"image_processor": {"max_pixels": 7840}, "video_processor": {"cap_pixels_per_frame": True}},
    )
    (nested / "video_preprocessor_config.json").unlink()
    c = estimator_from_config(str(nested)).config  # type: ignore[attr-defined]
    assert (c.max_pixels, c.video_total_pixels) == (7840, 128_000 * 784 * 0.9)


def test_flat_mapping_is_enough() -> None:
    estimator = estimator_from_config({"model_type": "qwen2_5_vl", "max_pixels": 28 * 28 * 16})
    assert estimator.image(1000, 1000).llm_tokens == 16


@pytest.mark.parametrize(
    ("files", "words"),
    [
        ({}, "none of config.json"),
        ({"config": {"model_type": "mystery"}}, "register_estimator"),
        ({"config": {}}, "without model_type"),
        ({"config": "{"}, "not JSON"),
        ({"config": "[1]"}, "type list"),
        ({"config": {"model_type": "qwen2_5_vl"}, "preprocessor_config": {"do_resize": False}}, "do_resize"),
        (
            {"config": {"model_type": "qwen2_5_vl"}, "preprocessor_config": {"patch_size": "x"}},
            "expected types: patch_size='x'",
        ),
        ({"config": {"model_type": "qwen2_5_vl"}, "preprocessor_config": {"image_mean": 3}}, "expected types"),
    ],
)
def test_folders_that_do_not_work_say_why(files: dict[str, object], words: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=words):
        estimator_from_config(write(tmp_path, **files))


def test_a_mapping_that_names_no_known_file_is_refused() -> None:
    files = {"config": {"model_type": "qwen2_5_vl"}, "preprocessor": {"max_pixels": 784}}
    with pytest.raises(
        DataError, match=r"names 'preprocessor' beside .*: config, preprocessor_config, .*image_processor"
    ):
        estimator_from_config(files)
    whole = {"config.json": {"model_type": "qwen2_5_vl"}, "tokenizer_config.json": {}, "generation_config.json": {}}
    assert isinstance(estimator_from_config(whole), Qwen25VLEstimator)


def test_a_name_that_is_no_folder_is_told_as_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, config={"model_type": "qwen2_5_vl"})
    with pytest.raises(DataError, match=rf"a file, not a folder at .*config.json. Name its folder: {tmp_path}"):
        estimator_from_config(tmp_path / "config.json")
    with pytest.raises(
        DataError, match=r"no such folder at Qwen/Qwen2.5-VL-7B-Instruct.*hub are not resolved: download"
    ):
        estimator_from_config("Qwen/Qwen2.5-VL-7B-Instruct")
    with pytest.raises(DataError, match=r"no such folder at gone. Name a model folder in Hugging Face format.$"):
        estimator_from_config("gone")
    with pytest.raises(DataError, match=r"no such folder at a/b/c. [^.]*.$"):
        estimator_from_config("a/b/c")


def test_the_home_folder_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "m").mkdir()
    write(tmp_path / "m", config={"model_type": "qwen2_5_vl"})
    assert isinstance(estimator_from_config("~/m"), Qwen25VLEstimator)


def test_a_family_can_be_registered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dataloaders.estimators._registry", {})
    estimator = Qwen25VLEstimator()
    register_estimator("mine", lambda files: estimator)
    assert estimator_from_config({"model_type": "mine"}) is estimator
    with pytest.raises(DataError, match="registered already"):
        register_estimator("mine", lambda files: estimator)
