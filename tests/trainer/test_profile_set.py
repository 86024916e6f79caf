"""The micro-batches that are measured: inside the capacities, spread over their ranges, counted as they are built."""

import numpy as np
import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from balancer.observations import COLUMNS, cell_counts  # noqa: E402
from trainer.errors import ConfigError  # noqa: E402
from trainer.model import preset  # noqa: E402
from trainer.model.vit import vision_order  # noqa: E402
from trainer.profile_set import (  # noqa: E402
    MicroBatchShape,
    SampleShape,
    build,
    counts,
    designed_set,
    pixel_pool,
    workload_set,
)

CONFIG = preset("check")
LIMITS = {"capacity_tokens": 1024, "capacity_patches": 4096, "merge": CONFIG.vision.merge}
SETS = {"designed": designed_set, "workload": workload_set}


def cells_of(shapes: tuple[MicroBatchShape, ...]) -> dict[str, np.ndarray]:
    samples, where = counts(shapes, CONFIG)
    cells = cell_counts(samples, where, num_cells=len(shapes))
    return {name: cells[:, index] for index, name in enumerate(COLUMNS)}


@pytest.mark.parametrize("name", list(SETS))
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("patches", [4096, 64])
def test_no_microbatch_is_empty_or_above_the_capacities(name: str, seed: int, patches: int) -> None:
    cells = cells_of(SETS[name](count=40, seed=seed, **{**LIMITS, "capacity_patches": patches}))
    assert cells["tokens"].min() > 0
    assert cells["tokens"].max() <= 1024
    assert cells["patches"].max() <= patches
    assert (cells["labels"] <= cells["tokens"]).all()


def test_the_designed_set_reaches_the_ends_of_its_ranges_and_tells_its_columns_apart() -> None:
    cells = cells_of(designed_set(count=40, seed=0, **LIMITS))
    assert cells["tokens"].max() == 1024
    assert cells["tokens"].min() <= 16 + 8
    assert cells["token_sq"].max() == 1024**2  # one text that fills a micro-batch
    assert (cells["patches"] == 0).sum() >= 4
    assert cells["patches"].max() > 0.9 * 4 * 1024
    for first, second in [("tokens", "patches"), ("tokens", "samples"), ("patches", "full_sq"), ("tokens", "token_sq")]:
        assert np.corrcoef(cells[first], cells[second])[0, 1] < 0.95


def test_a_set_is_the_same_for_the_same_seed_and_another_for_another() -> None:
    for make in SETS.values():
        assert make(count=20, seed=3, **LIMITS) == make(count=20, seed=3, **LIMITS)
        assert make(count=20, seed=3, **LIMITS) != make(count=20, seed=4, **LIMITS)


def test_what_is_built_holds_what_was_counted() -> None:
    shapes = designed_set(count=20, seed=1, **LIMITS)
    cells, pixels = cells_of(shapes), pixel_pool(shapes, CONFIG)
    for row, shape in enumerate(shapes):
        batch = build(shape, CONFIG, seed=row, pixels=pixels)
        assert batch.tokens.numel() == cells["tokens"][row]
        assert batch.num_label_tokens == cells["labels"][row]
        assert batch.visual_index.numel() == cells["visual"][row]
        assert batch.patches.shape[0] == cells["patches"][row] == shape.num_patches
        assert batch.num_samples == cells["samples"][row]
        assert len(batch.grids) == cells["items"][row]
        assert int(batch.cu_seqlens.diff().square().sum()) == cells["token_sq"][row]
        if cells["patches"][row]:
            grids = tuple(map(tuple, batch.grids.tolist()))
            order = vision_order(grids, merge=CONFIG.vision.merge, window_cells=CONFIG.vision.window_cells)
            assert int(order.full.long().diff().square().sum()) == cells["full_sq"][row]
            assert int(order.window.long().diff().square().sum()) == cells["window_sq"][row]


def test_a_capacity_in_which_nothing_can_vary_is_refused() -> None:
    with pytest.raises(ConfigError, match="profiling needs at least 64"):
        designed_set(count=20, seed=0, **{**LIMITS, "capacity_tokens": 63})


def test_pixels_beyond_all_memory_are_refused_before_they_are_made() -> None:
    huge = MicroBatchShape(samples=(SampleShape(text_tokens=2, label_tokens=1, grids=((2**20, 64, 64),)),))
    with pytest.raises(ConfigError, match=r"micro-batches of 4294967296 patches need .* GiB for pixels alone"):
        pixel_pool([huge], CONFIG)
