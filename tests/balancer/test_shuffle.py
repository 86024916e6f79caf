"""The order of an epoch: every sample once, asked at any position, and in blocks only where a block's shards lie."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.errors import PlanError
from balancer.select import StepSelector
from balancer.shuffle import EpochOrder, epoch_order, shuffle_mode

SIZES = st.lists(st.integers(0, 30), min_size=1, max_size=20)


def numbered(sizes: list[int]) -> np.ndarray:
    """Shard of every sample, for shards of these sizes."""
    return np.repeat(np.arange(len(sizes)), sizes)


@given(SIZES, st.integers(1, 8), st.integers(0, 2**64 - 1), st.integers(0, 9), st.booleans())
def test_an_epoch_in_blocks_holds_every_sample_once(
    sizes: list[int], block: int, seed: int, epoch: int, mixed: bool
) -> None:
    groups = numbered(sizes)
    if mixed:  # an index whose rows do not follow its shards
        groups = np.random.default_rng(0).permutation(groups)
    ids = np.arange(len(groups)) * 2 + 5
    order = EpochOrder(ids, seed=seed, shuffle="block", groups=groups, block_shards=block)
    assert sorted(order.take(epoch, np.arange(len(ids))).tolist()) == ids.tolist()


@given(SIZES, st.integers(1, 8), st.data())
def test_any_position_of_any_epoch_can_be_asked_for_alone(sizes: list[int], block: int, data: st.DataObject) -> None:
    groups = numbered(sizes)
    if not len(groups):
        return
    order = EpochOrder(np.arange(len(groups)), seed=1, shuffle="block", groups=groups, block_shards=block)
    for epoch in (0, 3, 0):
        whole = order.take(epoch, np.arange(len(groups)))
        positions = np.array(data.draw(st.lists(st.integers(0, len(groups) - 1), max_size=9)), dtype=np.int64)
        fresh = EpochOrder(np.arange(len(groups)), seed=1, shuffle="block", groups=groups, block_shards=block)
        assert fresh.take(epoch, positions).tolist() == whole[positions].tolist()


@given(st.integers(2, 12), st.integers(1, 5), st.integers(0, 20))
def test_a_step_in_blocks_touches_at_most_the_shards_of_two_windows(num: int, block: int, seed: int) -> None:
    size, batch = 24, 16
    groups = numbered([size] * num)
    selector = StepSelector(
        np.arange(len(groups)), seed=seed, global_batch_size=batch, shuffle="block", groups=groups, block_shards=block
    )
    windows: list[set[int]] = []
    for step in range(selector.steps_per_epoch):
        shards = set(groups[selector.step_ids(step)[1]].tolist())
        assert len(shards) <= 2 * block
        windows.append(shards)
    # A shard is read in one stretch of steps and never opened again.
    for shard in range(num):
        steps = [step for step, shards in enumerate(windows) if shard in shards]
        assert steps[-1] - steps[0] <= -(-block * size // batch)


def test_inside_a_window_samples_are_mixed_over_its_shards() -> None:
    groups = numbered([100] * 8)
    order = EpochOrder(np.arange(800), seed=0, shuffle="block", groups=groups, block_shards=4)
    first = groups[order.take(0, np.arange(400))]
    counts = [np.bincount(first[k : k + 100], minlength=8) for k in range(0, 400, 100)]
    shards = np.flatnonzero(counts[0])
    assert len(shards) == 4
    for count in counts:
        assert set(np.flatnonzero(count)) == set(shards)
        assert count[shards].min() >= 10  # 25 on the average


def test_epochs_seeds_and_modes_differ_and_windows_too() -> None:
    groups = numbered([20] * 6)
    ids = np.arange(120)
    made = set()
    for seed in (0, 1):
        order = EpochOrder(ids, seed=seed, shuffle="block", groups=groups, block_shards=2)
        made |= {tuple(order.take(epoch, ids).tolist()) for epoch in (0, 1)}
        made |= {tuple(epoch_order(ids, seed, epoch).tolist()) for epoch in (0, 1)}
    made.add(tuple(epoch_order(ids, 0, 0, "none").tolist()))
    assert len(made) == 9
    order = EpochOrder(ids, seed=0, shuffle="block", groups=groups, block_shards=1)
    ranks = {tuple(np.argsort(order.take(0, np.arange(k, k + 20))).tolist()) for k in range(0, 120, 20)}
    assert len(ranks) == 6  # no two windows are mixed alike


def test_what_an_order_in_blocks_keeps_is_one_number_per_shard() -> None:
    sizes = [1000] * 50
    order = EpochOrder(np.arange(50_000), seed=0, shuffle="block", groups=numbered(sizes))
    order.take(0, np.arange(10))
    assert order._epoch is not None
    assert order._shards is not None
    kept = [order._epoch.shards, order._epoch.offsets, order._epoch.windows, order._shards.starts, order._shards.sizes]
    assert max(map(len, kept)) <= 51


def test_true_is_full_and_false_is_none() -> None:
    assert [shuffle_mode(shuffle) for shuffle in (True, False, "block")] == ["full", "none", "block"]
    ids = np.arange(30) * 3
    assert epoch_order(ids, 4, 1).tolist() == epoch_order(ids, 4, 1, "full").tolist()
    assert epoch_order(ids, 4, 1, shuffle=False).tolist() == ids.tolist()
    with pytest.raises(PlanError, match=r"shuffle='blocks' is not one of: full, block, none"):
        shuffle_mode("blocks")  # type: ignore[arg-type]


def test_blocks_without_shards_are_refused() -> None:
    with pytest.raises(PlanError, match=r"needs the shard number of every id .* none were given"):
        EpochOrder(np.arange(4), seed=0, shuffle="block")
    with pytest.raises(PlanError, match=r"\(3,\) were given for \(4,\) ids"):
        EpochOrder(np.arange(4), seed=0, shuffle="block", groups=np.zeros(3))
    with pytest.raises(PlanError, match="block_shards=0"):
        EpochOrder(np.arange(4), seed=0, shuffle="block", groups=np.zeros(4), block_shards=0)
