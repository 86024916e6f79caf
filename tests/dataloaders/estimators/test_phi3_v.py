"""Phi-3.5-vision: tokens of the enlarged canvas, rows, global view; nothing depends on a table."""

import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataloaders.errors import DataError, MediaError, Reason, UnfitError
from dataloaders.estimators import TokenEstimator, estimator_from_config
from dataloaders.estimators.phi3_v import Phi3VConfig, Phi3VEstimator

Oracle = Callable[[str], list[dict[str, Any]]]
Params = Callable[[str], dict[str, Any]]


def reference(width: int, height: int, num_crops: int) -> tuple[int, int, int]:
    """(tokens, crops across, crops down) by the steps of the processor, on a canvas that is turned and back."""
    turned = width < height
    if turned:
        width, height = height, width
    ratio = width / height
    scale = 1
    while scale * math.ceil(scale / ratio) <= num_crops:
        scale += 1
    new_width = (scale - 1) * 336
    new_height = int(new_width / ratio)
    padded = math.ceil(new_height / 336) * 336
    canvas_height, canvas_width = (new_width, padded) if turned else (padded, new_width)
    across, down = canvas_width // 336, canvas_height // 336
    return (canvas_height // 336 * canvas_width // 336 + 1) * 144 + 1 + (down + 1) * 12, across, down


def refusal(estimator: TokenEstimator, width: int, height: int) -> UnfitError | None:
    """The error of an image of this size, if there is one."""
    try:
        estimator.image(width, height)
    except UnfitError as error:
        return error
    return None


def test_every_row_of_the_oracle_is_met(oracle: Oracle, oracle_params: Params) -> None:
    family = "phi3.5_vision(hd16)"
    estimator = estimator_from_config({"model_type": "phi3_v", "num_crops": oracle_params(family)["num_crops"]})
    rows = oracle(family)
    assert len(rows) > 1000
    for row in rows:
        counts = estimator.image(row["w"], row["h"])
        assert (counts.llm_tokens, counts.visual_tokens, counts.patches) == (
            row["llm_tokens"],
            row["embed_tokens"],
            row["patches"],
        ), row


@pytest.mark.parametrize(
    ("num_crops", "size", "tokens"),
    [
        (16, (224, 224), 2509),
        (16, (640, 480), 1921),
        (16, (1920, 1080), 2353),
        (16, (2480, 3508), 1933),
        (16, (3000, 300), 1609),
        (16, (1, 1), 2509),
        (4, (336, 336), 757),
        (1, (640, 480), 313),
    ],
)
def test_golden_values(num_crops: int, size: tuple[int, int], tokens: int) -> None:
    assert Phi3VEstimator(Phi3VConfig(num_crops=num_crops)).image(*size).llm_tokens == tokens


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 5000), st.integers(1, 5000), st.integers(1, 40))
def test_counts_follow_the_processor(width: int, height: int, num_crops: int) -> None:
    estimator = Phi3VEstimator(Phi3VConfig(num_crops=num_crops))
    tokens, across, down = reference(width, height, num_crops)
    if min(across, down) < 1:
        with pytest.raises(UnfitError):
            estimator.image(width, height)
        return
    counts = estimator.image(width, height)
    assert (counts.llm_tokens, counts.width_px, counts.height_px) == (tokens, across * 336, down * 336)
    assert counts.tiles == across * down + 1 <= num_crops + 1
    assert counts.patches == counts.full.total == counts.tiles * 577
    assert counts.padded_patches == (num_crops + 1) * 577
    assert estimator.explain_image(width, height)[-1].endswith(f"= {tokens}")


@settings(max_examples=60, deadline=None)
@given(st.integers(-2, 60_000), st.integers(-2, 60_000), st.integers(1, 16))
def test_the_nearest_size_of_a_refused_one_is_taken(width: int, height: int, num_crops: int) -> None:
    estimator = Phi3VEstimator(Phi3VConfig(num_crops=num_crops))
    error = refusal(estimator, width, height)
    if error is not None:
        assert error.nearest_size_px is not None
        assert min(error.nearest_size_px) >= min(width, height)
        estimator.image(*error.nearest_size_px)


def test_a_side_that_would_vanish_is_refused_with_the_nearest_that_would_not() -> None:
    estimator = Phi3VEstimator(Phi3VConfig(num_crops=4))
    with pytest.raises(UnfitError, match="resized to nothing") as caught:
        estimator.image(1, 4000)  # 4 crops of 336 px for 4000 px: 1 px becomes a third
    assert (caught.value.reason, caught.value.nearest_size_px) == (Reason.EXTREME_ASPECT, (3, 4000))


@pytest.mark.parametrize(
    "source",
    [
        {"model_type": "phi3_v", "num_crops": 4},
        {"config": {"model_type": "phi3_v"}, "preprocessor_config": {"num_crops": 4, "num_img_tokens": 144}},
        {"preprocessor_config": {"processor_class": "Phi3VProcessor", "num_crops": 4}},
        {"processor_config": {"image_processor": {"image_processor_type": "Phi3VImageProcessor", "num_crops": 4}}},
    ],
)
def test_the_options_are_found_in_every_layout_of_a_folder(source: dict[str, object]) -> None:
    assert estimator_from_config(source).image(336, 336).llm_tokens == 757


def test_the_class_default_is_one_crop_and_other_token_counts_are_refused() -> None:
    assert estimator_from_config({"model_type": "phi3_v"}).image(10, 10).tiles == 2
    with pytest.raises(DataError, match="num_img_tokens=100"):
        estimator_from_config({"model_type": "phi3_v", "num_img_tokens": 100})
    with pytest.raises(DataError, match="num_crops=0"):
        Phi3VConfig(num_crops=0)
    with pytest.raises(MediaError, match="no videos"):
        Phi3VEstimator().frame_indices(10, 30.0, 0.3)
