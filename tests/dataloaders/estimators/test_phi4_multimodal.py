"""Phi-4-multimodal: tokens are those of the processor's mask, whatever the size, the crops and the patches."""

import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataloaders.errors import DataError, MediaError, Reason, UnfitError
from dataloaders.estimators import TokenEstimator, estimator_from_config
from dataloaders.estimators.phi4_multimodal import Phi4MultimodalConfig, Phi4MultimodalEstimator

Oracle = Callable[[str], list[dict[str, Any]]]
Params = Callable[[str], dict[str, Any]]

sides = st.integers(1, 6000)
configs = st.builds(
    Phi4MultimodalConfig,
    crop_px=st.sampled_from([224, 336, 378, 384, 448]),
    patch_px=st.sampled_from([14, 16]),
    max_crops=st.integers(1, 40),
)


def reference(width: int, height: int, config: Phi4MultimodalConfig) -> tuple[int, int] | None:
    """(tokens, crops) as the processor gets them, by building the mask; None: it raises."""
    size, patch = config.crop_px, config.patch_px
    across, down = math.ceil(width / float(size)), math.ceil(height / float(size))
    if across * down > config.max_crops:
        best, least, aspect = (1, 1), float("inf"), width / height
        ratios = {
            (i, j)
            for n in range(1, config.max_crops + 1)
            for i in range(1, n + 1)
            for j in range(1, n + 1)
            if i * j <= config.max_crops
        }
        for i, j in sorted(ratios, key=lambda ratio: ratio[0] * ratio[1]):
            off = abs(aspect - i / j)
            if off < least or (off == least and width * height > 0.5 * size * size * i * j):
                best, least = (i, j), off
        across, down = best
    scale_x, scale_y = size * across / width, size * down / height
    new_width, new_height = size * across, size * down
    if scale_x < scale_y:
        new_height = int(height * scale_x)
    else:
        new_width = int(width * scale_y)
    if min(new_width, new_height) < 10:
        return None
    side = size // patch
    mask = np.ones((side * down, side * across), dtype=np.int64)
    if (pad := size * across - new_width) >= patch:
        mask[:, -math.floor(pad / patch) :] = 0
    if (pad := size * down - new_height) >= patch:
        mask[-math.floor(pad / patch) :, :] = 0
    crops = mask.reshape(down, side, across, side).transpose(0, 2, 1, 3)[:, :, 0::2, 0::2]
    kept = crops.transpose(0, 2, 1, 3).reshape(down * crops.shape[2], across * crops.shape[3])
    return 256 + 1 + int(kept.sum()) + int(kept[:, 0].sum()) + 16, across * down


def refusal(estimator: TokenEstimator, width: int, height: int) -> UnfitError | None:
    """The error of an image of this size, if there is one."""
    try:
        estimator.image(width, height)
    except UnfitError as error:
        return error
    return None


def test_every_row_of_the_oracle_is_met(oracle: Oracle, oracle_params: Params) -> None:
    params = oracle_params("phi4_multimodal")
    estimator = estimator_from_config(
        {"model_type": "phi4_multimodal", "dynamic_hd": params["dynamic_hd"], "size": params["tile"]}
    )
    failed = 0
    for row in oracle("phi4_multimodal"):
        if row["error"]:
            with pytest.raises(UnfitError) as caught:
                estimator.image(row["w"], row["h"])
            assert caught.value.reason is Reason.EXTREME_ASPECT
            failed += 1
            continue
        counts = estimator.image(row["w"], row["h"])
        assert (counts.llm_tokens, counts.visual_tokens, counts.patches) == (
            row["llm_tokens"],
            row["embed_tokens"],
            row["patches"],
        ), row
    assert failed == 4


@pytest.mark.parametrize(
    ("size", "tokens"),
    [((224, 224), 545), ((640, 480), 1065), ((1920, 1080), 3918), ((2480, 3508), 9345), ((3000, 300), 1629)],
)
def test_golden_values(size: tuple[int, int], tokens: int) -> None:
    assert Phi4MultimodalEstimator().image(*size).llm_tokens == tokens


@settings(max_examples=150, deadline=None)
@given(sides, sides, configs)
def test_tokens_equal_a_mask_that_is_really_built(width: int, height: int, config: Phi4MultimodalConfig) -> None:
    estimator, expected = Phi4MultimodalEstimator(config), reference(width, height, config)
    if expected is None:
        with pytest.raises(UnfitError):
            estimator.image(width, height)
        return
    counts = estimator.image(width, height)
    assert (counts.llm_tokens, counts.tiles - 1) == expected
    assert counts.patches == counts.full.total == counts.tiles * (config.crop_px // config.patch_px) ** 2
    assert counts.padded_patches == (config.max_crops + 1) * (config.crop_px // config.patch_px) ** 2
    assert counts.padded_patches >= counts.patches
    assert f"= {counts.llm_tokens}" in estimator.explain_image(width, height)[-1]


@settings(max_examples=60, deadline=None)
@given(st.integers(-1, 60_000), st.integers(-1, 60_000), configs)
def test_the_nearest_size_of_a_refused_one_is_taken(width: int, height: int, config: Phi4MultimodalConfig) -> None:
    estimator = Phi4MultimodalEstimator(config)
    error = refusal(estimator, width, height)
    if error is not None:
        assert error.nearest_size_px is not None
        assert min(error.nearest_size_px) >= min(width, height)
        estimator.image(*error.nearest_size_px)


def test_the_nearest_size_grows_the_shorter_side_no_more_than_needed() -> None:
    with pytest.raises(UnfitError, match=r"resized to 2x448 px, where the processor needs 10 px") as caught:
        Phi4MultimodalEstimator().image(2, 448)
    assert caught.value.nearest_size_px == (10, 448)
    with pytest.raises(UnfitError, match="a side is below 1 px") as caught:
        Phi4MultimodalEstimator().image(0, 448)
    assert (caught.value.reason, caught.value.nearest_size_px) == (Reason.TOO_SMALL, (10, 448))


@pytest.mark.parametrize(
    "source",
    [
        {"model_type": "phi4mm", "dynamic_hd": 12},
        {"config": {"model_type": "phi4mm"}, "preprocessor_config": {"dynamic_hd": 12}},
        {"preprocessor_config": {"image_processor_type": "Phi4MultimodalImageProcessorFast", "dynamic_hd": 12}},
        {"processor_config": {"processor_class": "Phi4MMProcessor", "image_processor": {"dynamic_hd": 12}}},
        {
            "config": {"model_type": "phi4_multimodal"},
            "preprocessor_config.json": {"dynamic_hd": 12, "size": {"height": 448, "width": 448}, "patch_size": 14},
        },
    ],
)
def test_the_options_are_found_in_every_layout_of_a_folder(source: dict[str, object]) -> None:
    estimator = estimator_from_config(source)
    assert isinstance(estimator, TokenEstimator)
    assert estimator.image(1920, 1080).tiles == 9
    assert estimator.fingerprint == Phi4MultimodalEstimator(Phi4MultimodalConfig(max_crops=12)).fingerprint


def test_bad_options_and_videos_are_refused() -> None:
    with pytest.raises(DataError, match=r"size=.*squares alone"):
        estimator_from_config({"model_type": "phi4mm", "size": {"height": 448, "width": 336}})
    with pytest.raises(DataError, match="max_crops=0"):
        Phi4MultimodalConfig(max_crops=0)
    with pytest.raises(DataError, match="crop_px=8 is below patch_px=14"):
        Phi4MultimodalConfig(crop_px=8)
    with pytest.raises(MediaError) as caught:
        Phi4MultimodalEstimator().video(640, 480, 10, 30.0, 0.3)
    assert caught.value.reason is Reason.UNSUPPORTED_MEDIA


def test_an_estimator_crosses_processes() -> None:
    estimator = Phi4MultimodalEstimator(Phi4MultimodalConfig(max_crops=9))
    copy = pickle.loads(pickle.dumps(estimator))
    assert copy.image(5000, 3000) == estimator.image(5000, 3000)
    assert copy.fingerprint != Phi4MultimodalEstimator().fingerprint
