"""Llama 4 and Mllama against the reference table, the installed processor, a plain search, and their own properties."""

import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataloaders.errors import DataError, MediaError, Reason, UnfitError
from dataloaders.estimators import TokenEstimator, estimator_from_config
from dataloaders.estimators.tile_canvas import TileCanvas

Oracle = Callable[[str], list[dict[str, Any]]]


def llama4(vision: dict[str, Any] | None = None, **image: Any) -> TokenEstimator:
    files = {
        "config": {"model_type": "llama4", "vision_config": vision or {}},
        "preprocessor_config": {"max_patches": 16, "size": {"height": 336, "width": 336}, **image},
    }
    return estimator_from_config(files)


def mllama(**image: Any) -> TokenEstimator:
    files = {
        "config": {"model_type": "mllama", "vision_config": {"patch_size": 14}},
        "preprocessor_config": {"max_image_tiles": 4, "size": {"height": 560, "width": 560}, **image},
    }
    return estimator_from_config(files)


def test_llama4_equals_every_row_of_the_table(oracle: Oracle) -> None:
    estimator = llama4()
    for row in oracle("llama4"):
        counts = estimator.image(row["w"], row["h"])
        got = (counts.patches, counts.visual_tokens, counts.llm_tokens)
        assert got == (row["patches"], row["embed_tokens"], row["llm_tokens"]), row


def test_mllama_equals_every_row_of_the_table_but_runs_four_tiles_always(oracle: Oracle) -> None:
    """The table's patches are those of the tiles in use; the processor pads every image to four."""
    estimator = mllama()
    for row in oracle("mllama(3.2V,cross-attn)"):
        counts = estimator.image(row["w"], row["h"])
        assert (counts.visual_tokens, counts.llm_tokens) == (row["embed_tokens"], row["llm_tokens"]), row
        assert counts.patches == counts.tiles * 1601 == row["patches"], row
        assert counts.encoded_patches == counts.full.total == 4 * 1601


@pytest.mark.parametrize(
    ("size", "tiles", "tokens"),
    [
        ((336, 336), 1, 147),
        ((1, 1), 1, 147),
        ((640, 480), 5, 727),
        ((1024, 768), 13, 1887),
        ((1920, 1080), 16, 2322),
        ((3000, 300), 10, 1452),
        ((300, 3000), 10, 1452),
    ],
)
def test_known_images_of_llama4(size: tuple[int, int], tiles: int, tokens: int) -> None:
    counts = llama4().image(*size)
    assert (counts.tiles, counts.llm_tokens) == (tiles, tokens)
    assert counts.patches == counts.full.total == tiles * 577


def test_options_of_llama4_change_the_counts() -> None:
    assert llama4(resize_to_max_canvas=True).image(300, 300).tiles == 17
    assert llama4(max_patches=1).image(5000, 300).llm_tokens == 147
    small = llama4(vision={"patch_size": 28}, size={"height": 112, "width": 112}).image(100, 100)
    assert (small.patches, small.llm_tokens) == (17, 4 + 3)
    shuffled = estimator_from_config({"model_type": "llama4", "pixel_shuffle_ratio": 0.25}).image(100, 100)
    assert shuffled.llm_tokens == 576 // 16 + 3


def test_options_of_mllama_change_the_counts() -> None:
    counts = mllama(max_image_tiles=6, size={"height": 28, "width": 28}).image(84, 56)
    assert (counts.tiles, counts.patches, counts.visual_tokens) == (6, 30, 30)
    assert estimator_from_config({"model_type": "mllama"}).image(10, 10).encoded_patches == 4 * 257


@pytest.mark.parametrize(("tile", "most"), [(56, 4), (28, 9), (40, 1), (32, 6)])
def test_mllama_equals_the_installed_processor(tile: int, most: int) -> None:
    module = pytest.importorskip("transformers.models.mllama.image_processing_pil_mllama")
    image = pytest.importorskip("PIL.Image")
    options = {"size": {"height": tile, "width": tile}, "max_image_tiles": most}
    processor, estimator = module.MllamaImageProcessorPil(**options), mllama(**options)
    for width in (1, 20, tile - 1, tile, 2 * tile, 2 * tile + 1, 500):
        for height in (1, 33, tile, tile + 1, 3 * tile, 400):
            inputs = processor([[image.new("RGB", (width, height))]], return_tensors="np")
            counts = estimator.image(width, height)
            assert inputs["num_tiles"] == [[counts.tiles]], (width, height)
            slots = inputs["pixel_values"].shape[2]
            assert counts.encoded_patches == slots * ((tile // 14) ** 2 + 1)


Options = tuple[int, int, bool, bool]  # side of a tile, tiles at most, enlarge, single precision


def plain_search(width: int, height: int, options: Options) -> set[tuple[int, int]]:
    """All canvases that the reference may choose: of the chosen scale, the least area."""
    tile, most, enlarge, single = options
    real = np.float32 if single else np.float64
    shapes = [(rows, cols) for rows in range(1, most + 1) for cols in range(1, most // rows + 1)]
    scales = [min(real(rows * tile) / real(height), real(cols * tile) / real(width)) for rows, cols in shapes]
    up = [scale for scale in scales if scale >= 1]
    chosen = (max(up) if enlarge else min(up)) if up else max(scales)
    fitting = [shape for shape, scale in zip(shapes, scales, strict=True) if scale == chosen]
    least = min(rows * cols for rows, cols in fitting)
    return {(rows, cols) for rows, cols in fitting if rows * cols == least}


@given(
    width=st.integers(1, 6000),
    height=st.integers(1, 6000),
    options=st.tuples(st.sampled_from([224, 336, 560]), st.integers(1, 20), st.booleans(), st.booleans()),
)
def test_the_canvas_is_that_of_a_plain_search(width: int, height: int, options: Options) -> None:
    tile, most, enlarge, single = options
    canvas = TileCanvas(tile, most, single_precision=single, enlarge=enlarge)
    assert canvas.fit(width, height) in plain_search(width, height, options)


@given(width=st.integers(1, 60_000), height=st.integers(1, 60_000))
def test_explanations_end_with_the_counts(width: int, height: int) -> None:
    for estimator in (llama4(), mllama()):
        counts = estimator.image(width, height)
        *_, last = estimator.explain_image(width, height)
        assert last.startswith("LLM tokens: ")
        assert last.endswith(f"= {counts.llm_tokens}")


@pytest.mark.parametrize(
    ("build", "named"),
    [
        (lambda: llama4(do_resize=False), "do_resize"),
        (lambda: mllama(do_resize=False), "do_resize"),
        (lambda: mllama(do_pad=False), "do_pad"),
        (lambda: llama4(size={"height": 336, "width": 224}), "equal"),
        (lambda: mllama(size={"longest_edge": 560}), "equal"),
        (lambda: llama4(max_patches=0), "max_tiles"),
    ],
)
def test_options_that_are_not_covered_are_refused_by_name(build: Callable[[], TokenEstimator], named: str) -> None:
    with pytest.raises(DataError, match=named):
        build()


@pytest.mark.parametrize("estimator", [llama4(), mllama()])
def test_sizes_below_a_pixel_and_videos_are_refused(estimator: TokenEstimator) -> None:
    with pytest.raises(UnfitError) as small:
        estimator.image(0, 7)
    assert small.value.nearest_size_px == (1, 7)
    assert estimator.image(*small.value.nearest_size_px).tiles >= 1
    with pytest.raises(MediaError) as video:
        estimator.video(640, 480, 10, 25.0, 0.4)
    assert video.value.reason is Reason.UNSUPPORTED_MEDIA
    again = pickle.loads(pickle.dumps(estimator))
    assert (again.fingerprint, again.image(700, 500)) == (estimator.fingerprint, estimator.image(700, 500))
