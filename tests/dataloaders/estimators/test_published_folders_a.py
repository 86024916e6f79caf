"""Model folders as they are published and as transformers saves them: every layout gives the same known counts.

    old    config.json, preprocessor_config.json, video_preprocessor_config.json, processor_config.json
    new    config.json, processor_config.json with image_processor and video_processor nested in it

The settings are those of published models, written from memory; the counts were run with their processors.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataloaders.errors import DataError, MediaError, UnfitError
from dataloaders.estimators import estimator_from_config
from dataloaders.estimators.nearest_ratio import NearestRatio, grids

Files = dict[str, Any]

CELLS = {"patch_size": 14, "temporal_patch_size": 2, "merge_size": 2}
QWEN2 = {"min_pixels": 3136, "max_pixels": 12845056, **CELLS, "image_processor_type": "Qwen2VLImageProcessor"}
QWEN3 = {
    **CELLS,
    "patch_size": 16,
    "size": {"longest_edge": 16777216, "shortest_edge": 65536},
    "image_processor_type": "Qwen2VLImageProcessorFast",
}
QWEN3_VIDEO = {**QWEN3, "size": {"longest_edge": 25165824, "shortest_edge": 4096}}
QWEN3_VIDEO |= {"image_processor_type": None, "video_processor_type": "Qwen3VLVideoProcessor"}
GLM = {**CELLS, "size": {"shortest_edge": 12544, "longest_edge": 9633792}, "do_rescale": True}
GLM_VIDEO = {**GLM, "size": {"shortest_edge": 12544, "longest_edge": 47040000}}
CLIP = {
    "crop_size": {"height": 336, "width": 336},
    "do_center_crop": True,
    "size": {"shortest_edge": 336},
    "resample": 3,
    "image_processor_type": "CLIPImageProcessor",
}
CLIP_TOWER = {"model_type": "clip_vision_model", "image_size": 336, "patch_size": 14}
SIGLIP_TOWER = {"model_type": "siglip_vision_model", "image_size": 384, "patch_size": 14}
LLAVA = {"num_additional_image_tokens": 1, "patch_size": 14, "vision_feature_select_strategy": "default"}
PINPOINTS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
ONEVISION = {
    "size": {"height": 384, "width": 384},
    "image_grid_pinpoints": [[i * 384, j * 384] for i in range(1, 7) for j in range(1, 7)],
    "image_processor_type": "LlavaOnevisionImageProcessor",
}
INTERNVL = {
    "crop_size": None,
    "crop_to_patches": False,
    "max_patches": 12,
    "min_patches": 1,
    "size": {"height": 448, "width": 448},
    "image_processor_type": "GotOcr2ImageProcessorFast",
}
PIXTRAL = {
    "patch_size": {"height": 16, "width": 16},
    "size": {"longest_edge": 1024},
    "image_processor_type": "PixtralImageProcessor",
}
PAN = {f"pan_and_scan_{name}": None for name in ("max_num_crops", "min_crop_size", "min_ratio_to_activate")}
SIGLIP = {"size": {"height": 224, "width": 224}, "image_processor_type": "SiglipImageProcessor", "do_convert_rgb": None}

# name: (processor class, config.json, image settings, video settings, settings of the processor,
#        LLM tokens of 640x480, 1920x1080, 3000x300 and 1x1 px)
MODELS: dict[str, tuple[str, Files, Files, Files | None, Files, tuple[int, int, int, int]]] = {
    "Qwen2-VL": ("Qwen2VLProcessor", {"model_type": "qwen2_vl"}, QWEN2, None, {}, (391, 2691, 1177, 4)),
    "Qwen2.5-VL": ("Qwen2_5_VLProcessor", {"model_type": "qwen2_5_vl"}, QWEN2, None, {}, (391, 2691, 1177, 4)),
    "Qwen3-VL": ("Qwen3VLProcessor", {"model_type": "qwen3_vl"}, QWEN3, QWEN3_VIDEO, {}, (300, 2040, 846, 64)),
    "GLM-4.1V": (
        "Glm4vProcessor",
        {"model_type": "glm4v"},
        {**GLM, "image_processor_type": "Glm4vImageProcessor"},
        {**GLM_VIDEO, "video_processor_type": "Glm4vVideoProcessor"},
        {},
        (391, 2691, 1177, 9),
    ),
    "GLM-4.6V": (
        "Glm46VProcessor",
        {"model_type": "glm46v"},
        {**GLM, "image_processor_type": "Glm46VImageProcessor"},
        {**GLM_VIDEO, "video_processor_type": "Glm46VVideoProcessor"},
        {},
        (391, 2691, 1177, 9),
    ),
    "LLaVA-1.5": (
        "LlavaProcessor",
        {"model_type": "llava", "vision_config": CLIP_TOWER},
        CLIP,
        None,
        LLAVA,
        (576, 576, 576, 576),
    ),
    "LLaVA-NeXT": (
        "LlavaNextProcessor",
        {"model_type": "llava_next", "vision_config": CLIP_TOWER, "image_grid_pinpoints": PINPOINTS},
        {**CLIP, "image_grid_pinpoints": PINPOINTS, "image_processor_type": "LlavaNextImageProcessor"},
        None,
        LLAVA,
        (2340, 1948, 1160, 1176),
    ),
    "LLaVA-OneVision": (
        "LlavaOnevisionProcessor",
        {"model_type": "llava_onevision", "vision_config": SIGLIP_TOWER, "vision_aspect_ratio": "anyres_max_9"},
        ONEVISION,
        {"size": {"height": 384, "width": 384}, "video_processor_type": "LlavaOnevisionVideoProcessor"},
        {"num_image_tokens": 729, "vision_feature_select_strategy": "full"},
        (2929, 7269, 3500, 1485),
    ),
    "InternVL3-hf": (
        "InternVLProcessor",
        {"model_type": "internvl", "vision_config": {"image_size": [448, 448], "patch_size": [14, 14]}},
        INTERNVL,
        {"size": {"height": 448, "width": 448}, "video_processor_type": "InternVLVideoProcessor"},
        {"image_seq_length": 256},
        (3330, 2306, 2818, 258),
    ),
    "Pixtral": (
        "PixtralProcessor",
        {"model_type": "llava", "vision_config": {"model_type": "pixtral", "image_size": 1024, "patch_size": 16}},
        PIXTRAL,
        None,
        {"patch_size": 16},
        (1230, 2340, 455, 2),
    ),
    "Mistral-Small-3.1": (
        "PixtralProcessor",
        {"model_type": "mistral3", "spatial_merge_size": 2, "vision_config": {"model_type": "pixtral"}},
        {**PIXTRAL, "patch_size": 14, "size": {"longest_edge": 1540}},
        None,
        {"patch_size": 14, "spatial_merge_size": 2},
        (432, 1736, 336, 2),
    ),
    "PaliGemma 2": (
        "PaliGemmaProcessor",
        {"model_type": "paligemma", "vision_config": {"model_type": "siglip_vision_model", "patch_size": 14}},
        {**SIGLIP, "image_seq_length": 256},
        None,
        {},
        (256, 256, 256, 256),
    ),
    "Gemma 3": (
        "Gemma3Processor",
        {"model_type": "gemma3", "mm_tokens_per_image": 256, "vision_config": {"image_size": 896, "patch_size": 14}},
        {
            **PAN,
            "do_pan_and_scan": None,
            "image_seq_length": 256,
            "size": {"height": 896, "width": 896},
            "image_processor_type": "Gemma3ImageProcessor",
        },
        None,
        {"image_seq_length": 256},
        (260, 260, 260, 260),
    ),
}
SIZES = ((640, 480), (1920, 1080), (3000, 300), (1, 1))
TEXTS = {"text_config": {"model_type": "qwen2", "vocab_size": 9}, "architectures": None, "auto_map": {"x": "y"}}


def old(name: str) -> Files:
    kind, config, image, video, processor, _ = MODELS[name]
    told = {"processor_class": kind, "resample": 3, "unheard_of": {"key": [1]}}
    files = {"config": config | TEXTS, "preprocessor_config": image | told}
    if video is not None:
        files["video_preprocessor_config"] = video | told
    return files | ({"processor_config": processor | told} if processor else {})


def new(name: str) -> Files:
    kind, config, image, video, processor, _ = MODELS[name]
    nested = {"processor_class": kind, "image_processor": image, **processor}
    return {
        "config": config | TEXTS,
        "processor_config": nested | ({} if video is None else {"video_processor": video}),
    }


def counts_of(source: Any) -> tuple[int, ...]:
    estimator = estimator_from_config(source)
    return tuple(estimator.image(*size).llm_tokens for size in SIZES)


@pytest.mark.parametrize("layout", [old, new])
@pytest.mark.parametrize("name", MODELS)
def test_a_published_folder_gives_its_known_counts_in_every_layout(name: str, layout: Any, tmp_path: Path) -> None:
    expected, files = MODELS[name][-1], layout(name)
    assert counts_of(files) == counts_of({f"{key}.json": content for key, content in files.items()}) == expected
    # Without config.json the processor's class tells the rule.
    assert counts_of({key: content for key, content in files.items() if key != "config"}) == expected
    for key, content in files.items():
        (tmp_path / f"{key}.json").write_text(json.dumps(content))
    (tmp_path / "generation_config.json").write_text("{}")
    assert counts_of(tmp_path) == counts_of(str(tmp_path)) == expected


@pytest.mark.parametrize("name", MODELS)
def test_both_layouts_are_one_configuration(name: str) -> None:
    assert estimator_from_config(old(name)).fingerprint == estimator_from_config(new(name)).fingerprint


@pytest.mark.parametrize("name", MODELS)
def test_a_saved_processor_alone_may_be_given_as_one_flat_mapping(name: str) -> None:
    flat = new(name)["processor_config"]
    assert counts_of(flat) == counts_of(flat | {"model_type": MODELS[name][1]["model_type"]}) == MODELS[name][-1]


def test_what_is_nested_wins_over_the_files_of_an_older_version_as_in_transformers() -> None:
    stale = {"size": {"longest_edge": 200_000, "shortest_edge": 65536}, "image_processor_type": "Qwen2VLImageProcessor"}
    files = new("Qwen3-VL") | {"preprocessor_config": stale, "video_preprocessor_config": stale}
    assert estimator_from_config(files).fingerprint == estimator_from_config(new("Qwen3-VL")).fingerprint
    del files["processor_config"]["video_processor"]
    mixed = estimator_from_config(files)
    assert mixed.image(640, 480).llm_tokens == 300
    assert mixed.video(640, 480, 20, 10.0, 2.0).visual_tokens < 300


def test_processors_beside_a_model_are_not_passed_over() -> None:
    files = {"config": {"model_type": "qwen2_vl"}, "image_processor": {"max_pixels": 28 * 28 * 16}}
    assert estimator_from_config(files).image(1000, 1000).llm_tokens == 16
    with pytest.raises(DataError, match="image_processor"):
        estimator_from_config({"config": {"model_type": "qwen2_vl"}, "processor_config": {"image_processor": "x"}})


@pytest.mark.parametrize("name", ["Qwen2-VL", "Qwen3-VL", "GLM-4.1V", "GLM-4.6V", "LLaVA-NeXT", "Pixtral", "Gemma 3"])
def test_an_image_processor_alone_is_enough_where_its_class_tells_the_rule(name: str) -> None:
    image = MODELS[name][2]
    found = estimator_from_config({"preprocessor_config": image}).image(640, 480).llm_tokens
    assert found == MODELS[name][-1][0]
    with pytest.raises(DataError, match="mystery"):  # an unknown model is not guessed from a class that many share
        estimator_from_config({"config": {"model_type": "mystery"}, "preprocessor_config": image})


def test_a_video_processor_tells_models_apart_that_share_an_image_processor() -> None:
    files = {key: content for key, content in new("Qwen3-VL").items() if key != "config"}
    del files["processor_config"]["processor_class"]
    assert estimator_from_config(files).rule.startswith("Qwen3-VL")


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("width", [0, 1, 7, 5600, 10**6, 10**12])
@pytest.mark.parametrize("height", [0, 1, 28, 5601, 10**9])
def test_whatever_the_size_it_is_counted_or_refused_with_one_that_works(
    name: str, width: int, height: int, refusal: Callable[..., UnfitError | None]
) -> None:
    estimator = estimator_from_config(old(name))
    error = refusal(estimator.image, width, height)
    size = (width, height) if error is None else error.nearest_size_px
    assert size is not None
    counts = estimator.image(*size)
    assert counts.llm_tokens > 0
    assert str(counts.llm_tokens) in estimator.explain_image(*size)[-1]


RATES = [0.0, -1.0, 5e-324, 1e-9, 29.97, 1e300, float("inf"), float("nan")]


@pytest.mark.parametrize("name", MODELS)
@given(
    frames=st.integers(0, 40),
    fps=st.sampled_from(RATES) | st.floats(),
    duration=st.sampled_from(RATES) | st.floats(),
)
def test_absurd_rates_and_times_are_counted_or_refused(name: str, frames: int, fps: float, duration: float) -> None:
    estimator = estimator_from_config(old(name))
    try:
        counts = estimator.video(640, 360, frames, fps, duration)
    except MediaError:
        return
    assert counts.llm_tokens > 0
    assert 0 <= estimator.frame_indices(frames, fps, duration).min() < frames


def test_a_long_clip_does_not_take_long_to_count() -> None:
    estimator = estimator_from_config(old("GLM-4.6V"))
    assert estimator.video(640, 360, 2_000_000, 2.0, 0.0).frames <= 640


def test_frames_are_counted_at_the_size_of_their_own_settings() -> None:
    files = old("LLaVA-OneVision")
    files["video_preprocessor_config"]["size"] = {"height": 196, "width": 196}
    counts = estimator_from_config(files).video(640, 360, 3, 25.0, 0.12)
    assert (counts.height_px, counts.width_px, counts.patches) == (196, 196, 3 * 14 * 14)


@given(
    width=st.integers(1, 3000),
    height=st.integers(1, 3000),
    bounds=st.tuples(st.integers(1, 12), st.integers(0, 24)),
    remote_code=st.booleans(),
)
def test_the_nearest_ratio_equals_looking_at_every_grid_in_order(
    width: int, height: int, bounds: tuple[int, int], remote_code: bool
) -> None:
    shapes = grids(bounds[0], sum(bounds), remote_code=remote_code)
    best, least = (0, 0), float("inf")
    for columns, rows in shapes:
        difference = abs(width / height - columns / rows)
        if difference < least or (difference == least and width * height > 0.5 * 100 * 100 * columns * rows):
            best, least = (columns, rows), difference
    assert NearestRatio(shapes, 100 * 100).nearest(width, height) == best
