"""The vision tower: window order, isolation of items and slices, restored order, refusals."""

from itertools import pairwise

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from trainer.errors import ConfigError  # noqa: E402
from trainer.model.vit import VisionConfig, VisionTower, vision_order  # noqa: E402

pytestmark = pytest.mark.torch

SIZES = {"dim": 8, "num_heads": 2, "mlp_dim": 12, "out_dim": 6}


def tower(*, depth: int = 2, full: tuple[int, ...] = (1,)) -> VisionTower:
    torch.manual_seed(0)
    return VisionTower(VisionConfig(depth=depth, full_attention_layers=full, **SIZES)).double()


def pixels(*grids: tuple[int, int, int], seed: int = 0) -> torch.Tensor:
    num_patches = sum(t * h * w for t, h, w in grids)
    return torch.randn(num_patches, 1176, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def encode(model: VisionTower, patches: torch.Tensor, *grids: tuple[int, int, int]) -> torch.Tensor:
    return model(patches, torch.tensor(grids))


def order(*grids: tuple[int, int, int]):
    return vision_order(grids, merge=2, window_cells=4)


def test_windows_of_four_by_four_blocks_are_gathered_row_by_row():
    plan = order((1, 12, 10))  # 6 x 5 blocks: windows of 4x4, 4x1, 2x4 and 2x1 blocks
    assert plan.window.tolist() == [0, 64, 80, 112, 120]
    assert plan.blocks[:16].tolist() == [5 * row + column for row in range(4) for column in range(4)]
    assert plan.blocks[16:20].tolist() == [4, 9, 14, 19]
    assert plan.blocks[28:].tolist() == [24, 29]


@pytest.mark.parametrize("grids", [((1, 2, 2),), ((3, 18, 6), (1, 8, 8)), ((1, 2, 40), (2, 40, 2), (1, 16, 24))])
def test_window_order_is_a_permutation_cut_by_window_time_and_item(grids):
    plan = order(*grids)
    num_blocks = sum(t * h * w // 4 for t, h, w in grids)
    assert sorted(plan.blocks.tolist()) == list(range(num_blocks))
    assert torch.equal(plan.blocks[plan.inverse], torch.arange(num_blocks))
    # identity of each block: (item, time, window row, window column)
    owner = np.concatenate(
        [
            np.stack([np.full((t, h // 2, w // 2), item), *np.indices((t, h // 2, w // 2))], -1).reshape(-1, 4)
            for item, (t, h, w) in enumerate(grids)
        ]
    )[plan.blocks.numpy()] // [1, 1, 4, 4]
    bounds = (plan.window // 4).tolist()
    segments = [{tuple(row) for row in owner[a:b]} for a, b in pairwise(bounds)]
    assert all(len(segment) == 1 for segment in segments)
    assert len(set().union(*segments)) == len(segments)
    assert plan.full.diff().tolist() == [h * w for t, h, w in grids for _ in range(t)]


def test_positions_follow_merge_blocks():
    plan = order((2, 2, 4))
    one_slice = [[0, 0], [0, 1], [1, 0], [1, 1], [0, 2], [0, 3], [1, 2], [1, 3]]
    assert plan.positions.tolist() == one_slice * 2


def test_the_order_is_computed_once_per_set_of_grids():
    assert order((1, 6, 6), (2, 4, 4)) is order((1, 6, 6), (2, 4, 4))


def test_output_has_one_row_per_merge_block():
    grids = [(1, 4, 6), (2, 2, 2)]
    assert encode(tower(), pixels(*grids), *grids).shape == (8, 6)


def test_an_item_gives_the_same_rows_alone_and_among_others():
    grids = [(1, 10, 12), (2, 6, 8), (1, 2, 2)]
    model, patches = tower(), pixels(*grids)
    together = encode(model, patches, *grids)
    starts = np.cumsum([0, *(t * h * w for t, h, w in grids)])
    for item, grid in enumerate(grids):
        alone = encode(model, patches[starts[item] : starts[item + 1]], grid)
        torch.testing.assert_close(together[starts[item] // 4 : starts[item + 1] // 4], alone, rtol=0, atol=1e-12)


def test_changing_one_image_leaves_the_embeddings_of_the_other_bit_equal():
    grids = [(1, 6, 6), (1, 6, 6)]
    model, patches = tower().float(), pixels(*grids).float()
    before = encode(model, patches, *grids)
    patches[:36] += 100
    after = encode(model, patches, *grids)
    assert not torch.equal(before[:9], after[:9])
    assert torch.equal(before[9:], after[9:])


def test_temporal_slices_do_not_see_each_other():
    model, patches = tower(full=(0, 1)), pixels((2, 4, 4))
    before = encode(model, patches, (2, 4, 4))
    patches[16:] += 1
    after = encode(model, patches, (2, 4, 4))
    assert torch.equal(before[:4], after[:4])
    assert not torch.equal(before[4:], after[4:])


def test_window_layers_stay_in_the_window_and_full_layers_cross_it():
    grid = (1, 16, 8)  # two windows, one above the other
    for full, reaches in (((), False), ((1,), True)):
        model, patches = tower(full=full), pixels(grid)
        before = encode(model, patches, grid)
        patches[64:] += 1  # lower window
        after = encode(model, patches, grid)
        assert torch.equal(before[:16], after[:16]) is not reaches
        assert not torch.equal(before[16:], after[16:])


def test_rows_and_columns_matter():
    model = tower(full=(0, 1))
    same = torch.ones(16, 1176, dtype=torch.float64)
    same[0] = 2.0  # one odd patch at the top left
    out = encode(model, same, (1, 4, 4))
    assert not torch.allclose(out[1], out[2])  # right neighbour and lower neighbour


def test_gradients_reach_every_parameter():
    model = tower()
    encode(model, pixels((1, 4, 4)), (1, 4, 4)).square().sum().backward()
    assert all(p.grad is not None and torch.count_nonzero(p.grad) for p in model.parameters())


def test_patches_of_another_dtype_are_converted():
    model = tower().float()
    assert encode(model, pixels((1, 2, 2)), (1, 2, 2)).dtype == torch.float32


@pytest.mark.parametrize(
    ("patches", "grids", "message"),
    [
        (torch.zeros(16, 1176), [(1, 4, 2)], "do not fit 1 grids of 8 patches"),
        (torch.zeros(16, 100), [(1, 4, 4)], "of 1176 values"),
        (torch.zeros(15, 1176), [(1, 5, 3)], "multiples of merge=2"),
        (torch.zeros(0, 1176), [(0, 4, 4)], "t at least 1"),
    ],
)
def test_grids_that_do_not_describe_the_patches_are_refused(patches, grids, message):
    with pytest.raises(ConfigError, match=message):
        tower().float()(patches, torch.tensor(grids))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dim": 12}, "multiple of 4 [*] num_heads=8"),
        ({"window_px": 100}, "multiple of patch_px [*] merge = 28"),
        ({"full_attention_layers": (2,)}, "layers are 0..1"),
        ({"mlp_dim": 0}, "vision mlp_dim=0"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        VisionConfig(**({"depth": 2, "full_attention_layers": (1,)} | SIZES | change))
