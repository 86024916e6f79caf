"""MiniCPM-V 2.6: slices, the fixed number of tokens of each, line breaks and image ids."""

import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataloaders.errors import DataError, MediaError, Reason, UnfitError
from dataloaders.estimators import estimator_from_config
from dataloaders.estimators.minicpmv import MiniCPMVConfig, MiniCPMVEstimator

Oracle = Callable[[str], list[dict[str, Any]]]
Params = Callable[[str], dict[str, Any]]

FAMILY = "minicpm_v2.6(64/slice)"


def sliced_grid(width: int, height: int, most: int, scale: int) -> tuple[int, int] | None:
    """(columns, rows) as the processor of 2.6 looks for them: by columns, the first of equals."""
    log_ratio = math.log(width / height)
    multiple = min(math.ceil(width * height / (scale * scale)), most)
    if multiple <= 1:
        return None
    counts = [count for count in (multiple - 1, multiple, multiple + 1) if count != 1 and count <= most]
    grids = [(m, count // m) for count in counts for m in range(1, count + 1) if count % m == 0]
    best, least = (1, 1), float("inf")
    for columns, rows in grids:
        error = abs(log_ratio - math.log(columns / rows))
        if error < least:
            best, least = (columns, rows), error
    return best


def placeholder(config: MiniCPMVConfig, width: int, height: int) -> str:
    """What the processor writes for the first image, a letter for each token."""
    tile = "<" + "u" * config.queries + ">"
    grid = sliced_grid(width, height, config.max_slices, config.scale_px) if config.slice_mode else None
    text = "[0]" if config.use_image_id else ""
    return text + tile + ("" if grid is None else "\n".join([tile * grid[0]] * grid[1]))


def best_resize(width: float, height: float, config: MiniCPMVConfig) -> tuple[int, int]:
    ratio = width / height
    new_height = int(config.scale_px / math.sqrt(ratio))
    new_width = int(new_height * ratio)
    unit = config.patch_px
    return max(round(new_width / unit) * unit, unit), max(round(new_height / unit) * unit, unit)


configs = st.builds(
    MiniCPMVConfig,
    max_slices=st.integers(1, 16),
    scale_px=st.sampled_from([224, 448, 560]),
    patch_px=st.sampled_from([14, 16]),
    queries=st.sampled_from([64, 96]),
    use_image_id=st.booleans(),
)


def test_every_row_of_the_oracle_is_met(oracle: Oracle, oracle_params: Params) -> None:
    params = oracle_params(FAMILY)
    estimator = estimator_from_config(
        {
            "model_type": "minicpmv",
            "scale_resolution": params["scale"],
            "max_slice_nums": params["max_slice"],
            "image_feature_size": params["query"],
        }
    )
    rows = oracle(FAMILY)
    assert len(rows) > 1000
    for row in rows:
        counts = estimator.image(row["w"], row["h"])
        assert (counts.llm_tokens, counts.visual_tokens) == (row["llm_tokens"], row["embed_tokens"]), row
        # Those rows give patches as 1024 a tile, an approximation that their parameters state.
        assert row["patches"] == 1024 * counts.tiles
        if 1 / 4 < row["w"] / row["h"] < 4:
            assert counts.patches == pytest.approx(row["patches"], rel=0.08), row


@pytest.mark.parametrize(
    ("size", "tokens", "patches"),
    [
        ((224, 224), 66, 1024),
        ((640, 480), 198, 1036 + 2 * 1015),
        ((1024, 768), 331, 1036 + 4 * 1036),
        ((1920, 1080), 595, 43 * 24 + 8 * 30 * 34),
        ((2480, 3508), 597, 27 * 38 + 8 * 27 * 38),
        ((3000, 300), 462, 101 * 10 + 6 * 41 * 25),
        ((1, 1), 66, 1024),
    ],
)
def test_golden_values(size: tuple[int, int], tokens: int, patches: int) -> None:
    counts = MiniCPMVEstimator().image(*size)
    assert counts.llm_tokens == tokens
    assert counts.patches == pytest.approx(patches, rel=0.05)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 5000), st.integers(1, 5000), configs)
def test_counts_follow_the_processor(width: int, height: int, config: MiniCPMVConfig) -> None:
    counts, text = MiniCPMVEstimator(config).image(width, height), placeholder(config, width, height)
    assert (counts.llm_tokens, counts.visual_tokens) == (len(text), text.count("u"))
    assert counts.tiles == text.count("<")
    grid = sliced_grid(width, height, config.max_slices, config.scale_px)
    overview_width, overview_height = best_resize(width, height, config)
    assert (counts.width_px, counts.height_px) == (overview_width, overview_height)
    pixels = overview_width * overview_height
    if grid is not None:
        columns, rows = grid
        cell = (max(round(width / columns) * columns, columns) / columns, max(round(height / rows) * rows, rows) / rows)
        slice_width, slice_height = best_resize(*cell, config)
        pixels += columns * rows * slice_width * slice_height
    assert counts.patches == counts.full.total == pixels // config.patch_px**2


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4000), st.integers(1, 4000), configs, st.integers(1, 12))
def test_the_last_line_of_the_explanation_has_the_tokens(
    width: int, height: int, config: MiniCPMVConfig, num_images: int
) -> None:
    estimator = MiniCPMVEstimator(config)
    tokens = estimator.image(width, height, num_images=num_images).llm_tokens
    assert estimator.explain_image(width, height, num_images=num_images)[-1].endswith(f"= {tokens}")


def test_an_image_id_costs_its_delimiters_and_its_digits() -> None:
    with_id = MiniCPMVEstimator(MiniCPMVConfig(use_image_id=True))
    assert with_id.image(100, 100).llm_tokens == 66 + 3
    assert with_id.image(100, 100, num_images=10).llm_tokens == 66 + 3
    assert with_id.image(100, 100, num_images=11).llm_tokens == 66 + 4
    assert MiniCPMVEstimator().image(100, 100, num_images=11).llm_tokens == 66


def test_texts_are_counted_as_the_caller_says() -> None:
    estimator = estimator_from_config(
        {"model_type": "minicpmv", "use_image_id": True}, count_text=lambda text: 5 * len(text)
    )
    plain = estimator_from_config({"model_type": "minicpmv", "use_image_id": True})
    assert estimator.image(100, 100).llm_tokens == 66 + 2 + 5
    assert estimator.image(1920, 1080).llm_tokens == 594 + 5 + 2 + 5  # a line break and an id
    assert estimator.fingerprint != plain.fingerprint
    assert "counted by" in plain.rule


def test_without_slicing_the_image_stays_as_it_is() -> None:
    estimator = MiniCPMVEstimator(MiniCPMVConfig(slice_mode=False))
    counts = estimator.image(1930, 1080)
    assert (counts.llm_tokens, counts.patches, counts.tiles) == (66, 137 * 77, 1)
    with pytest.raises(UnfitError) as caught:
        estimator.image(100, 13)
    assert (caught.value.reason, caught.value.nearest_size_px) == (Reason.TOO_SMALL, (100, 14))
    assert estimator.image(100, 14).patches == 7


def test_a_side_below_a_pixel_is_refused_and_the_thinnest_strip_is_not() -> None:
    estimator = MiniCPMVEstimator()
    with pytest.raises(UnfitError) as caught:
        estimator.image(0, 9000)
    assert caught.value.nearest_size_px == (1, 9000)
    assert estimator.image(1, 9000).llm_tokens == 66


IMAGE = {"max_slice_nums": 4, "use_image_id": True}


@pytest.mark.parametrize(
    "source",
    [
        {"model_type": "minicpmv", **IMAGE},
        {"config": {"model_type": "minicpmv", "version": 2.6}, "preprocessor_config": IMAGE},
        {"config": {"model_type": "minicpmo", "version": "2.6"}, "preprocessor_config": IMAGE},
        {"preprocessor_config": {"processor_class": "MiniCPMVProcessor", **IMAGE}},
        {"processor_config": {"image_processor": {"image_processor_type": "MiniCPMVImageProcessor", **IMAGE}}},
    ],
)
def test_the_options_are_found_in_every_layout_of_a_folder(source: dict[str, object]) -> None:
    assert estimator_from_config(source).image(3000, 3000).llm_tokens == 5 * 66 + 1 + 3


def test_older_versions_and_videos_are_refused() -> None:
    with pytest.raises(DataError, match=r"version=2\.5: MiniCPM-V before 2\.6"):
        estimator_from_config({"config": {"model_type": "minicpmv", "version": 2.5}})
    with pytest.raises(DataError, match="max_slices=0"):
        MiniCPMVConfig(max_slices=0)
    with pytest.raises(MediaError, match="no videos"):
        MiniCPMVEstimator().video(640, 480, 10, 30.0, 0.3)


def test_an_estimator_crosses_processes() -> None:
    estimator = MiniCPMVEstimator(MiniCPMVConfig(max_slices=4))
    assert pickle.loads(pickle.dumps(estimator)).image(900, 700) == estimator.image(900, 700)
