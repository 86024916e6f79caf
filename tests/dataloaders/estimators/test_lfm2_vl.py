"""LFM2-VL: golden values (its processor needs torchvision, so it is not run here) and its own properties."""

import pickle
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataloaders.errors import DataError, MediaError, Reason, UnfitError
from dataloaders.estimators import TokenEstimator, estimator_from_config


def lfm2_vl(processor: dict[str, Any] | None = None, **image: Any) -> TokenEstimator:
    files = {
        "config": {"model_type": "lfm2_vl"},
        "preprocessor_config": {"image_processor_type": "Lfm2VlImageProcessorFast", **image},
    }
    return estimator_from_config(files if processor is None else {**files, "processor_config": processor})


@pytest.mark.parametrize(
    ("size", "tiles", "visual_tokens", "llm_tokens"),
    [
        ((1, 1), 1, 64, 66),
        ((256, 256), 1, 64, 66),
        ((512, 512), 1, 256, 258),
        ((640, 480), 1, 234, 236),  # 300 tokens, shrunk to 18 x 13
        ((720, 720), 1, 256, 258),  # 22.5 rounds half to even: 22 x 22 = 484 tokens, at most 512
        ((724, 724), 5, 4 * 256 + 256, 1280 + 7),  # 23 x 23 = 529: cut
        ((1024, 768), 7, 6 * 256 + 234, 1770 + 9),
        ((3000, 300), 11, 10 * 256 + 5 * 50, 2810 + 13),
    ],
)
def test_known_images(size: tuple[int, int], tiles: int, visual_tokens: int, llm_tokens: int) -> None:
    counts = lfm2_vl().image(*size)
    assert (counts.tiles, counts.visual_tokens, counts.llm_tokens) == (tiles, visual_tokens, llm_tokens)
    assert counts.encoded_patches == counts.full.total == tiles * 1024


def test_options_change_the_counts() -> None:
    assert lfm2_vl(do_image_splitting=False).image(1024, 768).llm_tokens == 236
    assert lfm2_vl(use_thumbnail=False).image(1024, 768).llm_tokens == 6 * 257 + 2
    assert lfm2_vl({"use_image_special_tokens": False}).image(1024, 768).llm_tokens == 1770
    assert lfm2_vl(max_pixels_tolerance=10.0).image(1024, 768).llm_tokens == 236
    assert lfm2_vl(max_image_tokens=64, min_image_tokens=16, tile_size=256).image(300, 300).patches == 256
    assert lfm2_vl(encoder_patch_size=8, max_tiles=2).image(640, 320).tiles == 3


@given(width=st.integers(0, 20_000), height=st.integers(0, 20_000))
def test_what_is_refused_comes_with_a_size_that_is_taken(width: int, height: int) -> None:
    estimator = lfm2_vl()
    size = (width, height)
    try:
        counts = estimator.image(*size)
    except UnfitError as error:
        size = error.nearest_size_px or (0, 0)
        counts = estimator.image(*size)
    assert 1 <= counts.tiles <= 11
    assert counts.grid[1] * counts.grid[2] <= 1024
    *_, last = estimator.explain_image(*size)
    assert last.endswith(f"= {counts.llm_tokens}")


def test_a_strip_that_outgrows_its_mask_is_refused() -> None:
    with pytest.raises(UnfitError, match="more than 1024 patches") as caught:
        lfm2_vl().image(10_000, 20)
    assert caught.value.reason is Reason.EXTREME_ASPECT


@pytest.mark.parametrize(
    ("build", "named"),
    [
        (lambda: lfm2_vl(do_pad=False), "do_pad"),
        (lambda: lfm2_vl(min_tiles=11), "min_tiles"),
        (lambda: lfm2_vl(max_image_tokens=63), "min_tokens"),
        (lambda: lfm2_vl(encoder_patch_size=0), "patch_px"),
    ],
)
def test_options_that_are_not_covered_are_refused_by_name(build: Callable[[], TokenEstimator], named: str) -> None:
    with pytest.raises(DataError, match=named):
        build()


def test_videos_are_refused_and_the_estimator_pickles() -> None:
    estimator = lfm2_vl()
    with pytest.raises(MediaError) as caught:
        estimator.video(640, 480, 10, 25.0, 0.4)
    assert caught.value.reason is Reason.UNSUPPORTED_MEDIA
    again = pickle.loads(pickle.dumps(estimator))
    assert (again.fingerprint, again.image(900, 700)) == (estimator.fingerprint, estimator.image(900, 700))
