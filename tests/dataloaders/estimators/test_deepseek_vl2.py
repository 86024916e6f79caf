"""DeepSeek-VL2: the best canvas, the line breaks, and the number of images of a sample."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataloaders.errors import DataError, MediaError, Reason, UnfitError
from dataloaders.estimators import estimator_from_config
from dataloaders.estimators.deepseek_vl2 import DeepseekVL2Config, DeepseekVL2Estimator

PUBLISHED = DeepseekVL2Config().candidates


def reference(width: int, height: int, config: DeepseekVL2Config, cropping: bool) -> tuple[int, int]:
    """(tokens, tiles with the global view) by the steps of the processor, on a list of placeholders."""
    side = config.candidates[0][0]
    best, most, least = (side, side), 0, float("inf")
    for canvas_width, canvas_height in config.candidates if cropping else ():
        scale = min(canvas_width / width, canvas_height / height)
        effective = min(int(width * scale) * int(height * scale), width * height)
        wasted = canvas_width * canvas_height - effective
        if effective > most or (effective == most and wasted < least):
            best, most, least = (canvas_width, canvas_height), effective, wasted
    h = w = math.ceil((side // config.patch_px) / config.downsample)
    across, down = best[0] // side, best[1] // side
    placeholders = ["image"] * h * (w + 1)
    placeholders += ["image"]
    placeholders += ["image"] * (down * h) * (across * w + 1)
    return len(placeholders), across * down + 1


@pytest.mark.parametrize(
    ("size", "tokens"),
    [
        ((224, 224), 421),
        ((640, 480), 1023),
        ((1024, 768), 1415),
        ((1920, 1080), 1807),
        ((2480, 3508), 2017),
        ((3000, 300), 1793),
        ((1, 1), 421),
    ],
)
def test_golden_values(size: tuple[int, int], tokens: int) -> None:
    estimator = DeepseekVL2Estimator()
    assert estimator.image(*size).llm_tokens == tokens
    assert estimator.image(*size, num_images=2).llm_tokens == tokens
    assert estimator.image(*size, num_images=3).llm_tokens == 421


def test_the_published_list_has_all_grids_of_up_to_nine_tiles() -> None:
    grids = {(width // 384, height // 384) for width, height in PUBLISHED}
    assert grids == {(i, j) for i in range(1, 10) for j in range(1, 10) if i * j <= 9}
    assert len(PUBLISHED) == len(grids)


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 4000),
    st.integers(1, 4000),
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=8),
    st.sampled_from([(384, 14, 2), (224, 16, 2), (448, 14, 3), (384, 16, 1)]),
)
def test_counts_follow_the_processor(
    width: int, height: int, num_images: int, grids: list[tuple[int, int]], numbers: tuple[int, int, int]
) -> None:
    side, patch, downsample = numbers
    candidates = tuple((side * i, side * j) for i, j in [(1, 1), *grids])
    config = DeepseekVL2Config(candidates=candidates, patch_px=patch, downsample=downsample)
    estimator = DeepseekVL2Estimator(config)
    counts = estimator.image(width, height, num_images=num_images)
    assert (counts.llm_tokens, counts.tiles) == reference(width, height, config, num_images <= 2)
    assert counts.visual_tokens == counts.llm_tokens
    assert counts.patches == counts.full.total == counts.tiles * (side // patch) ** 2
    assert estimator.explain_image(width, height, num_images=num_images)[-1].endswith(f"= {counts.llm_tokens}")


def test_a_strip_of_one_pixel_costs_what_any_image_does_and_an_empty_one_is_refused() -> None:
    estimator = DeepseekVL2Estimator()
    assert estimator.image(1, 4000).llm_tokens == estimator.image(4000, 1).llm_tokens == 421
    with pytest.raises(UnfitError) as caught:
        estimator.image(0, 4000)
    assert (caught.value.reason, caught.value.nearest_size_px) == (Reason.TOO_SMALL, (1, 4000))


@pytest.mark.parametrize(
    "source",
    [
        {"model_type": "deepseek_vl_v2", "candidate_resolutions": [[384, 384], [768, 768]]},
        {"config": {"model_type": "deepseek_vl_v2", "candidate_resolutions": [[384, 384], [768, 768]]}},
        {
            "config": {"model_type": "deepseek_vl_v2", "vision_config": {"patch_size": 14}},
            "preprocessor_config": {"candidate_resolutions": [[384, 384], [768, 768]], "patch_size": 14},
        },
        {
            "processor_config": {
                "processor_class": "DeepseekVLV2Processor",
                "candidate_resolutions": [[384, 384], [768, 768]],
                "downsample_ratio": 2,
            }
        },
    ],
)
def test_the_options_are_found_in_every_layout_of_a_folder(source: dict[str, object]) -> None:
    estimator = estimator_from_config(source)
    assert estimator.image(3000, 300).width_px == 768
    assert estimator.image(300, 300).llm_tokens == 421


def test_what_the_rule_does_not_cover_is_refused() -> None:
    with pytest.raises(DataError, match="DeepSeek-OCR, whose processor counts otherwise"):
        estimator_from_config({"model_type": "deepseek_vl_v2", "architectures": ["DeepseekOCRForCausalLM"]})
    with pytest.raises(DataError, match=r"\(700, 384\) is no multiple of the tile, 384 px"):
        DeepseekVL2Config(candidates=((384, 384), (700, 384)))
    with pytest.raises(DataError, match="candidates is empty"):
        DeepseekVL2Config(candidates=())
    with pytest.raises(DataError, match="candidate_resolutions=384: not a list"):
        estimator_from_config({"model_type": "deepseek_vl_v2", "candidate_resolutions": 384})
    with pytest.raises(MediaError, match="no videos"):
        DeepseekVL2Estimator().video(640, 480, 10, 30.0, 0.3)
