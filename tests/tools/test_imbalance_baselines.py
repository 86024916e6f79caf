"""Public balancers written anew: they keep the rules of the originals, and break what the originals break."""

import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tools.benchmarks.baseline_context_parallel import hybrid_context_parallel
from tools.benchmarks.baseline_encoders import loongforge, lpt_per_stage
from tools.benchmarks.baseline_outliers import OutlierDelay
from tools.benchmarks.baseline_rebalance import batch_rebalance
from tools.benchmarks.baseline_reordering import disttrain
from tools.benchmarks.baseline_step import StepGrid, in_order
from tools.benchmarks.baseline_types import IntArray
from tools.benchmarks.imbalance_baselines import BALANCERS
from tools.benchmarks.imbalance_cases import LAYOUTS, Step, make_step
from tools.benchmarks.imbalance_judge import judge, lay
from tools.benchmarks.workloads import WORKLOADS, workload

SHAPE = (4, 4)
PIPELINE = LAYOUTS[2]


def step_of(name: str, shape: tuple[int, int] = SHAPE, *, per_cell: int = 8, seed: int = 0) -> Step:
    return make_step(workload(name, shape[0] * shape[1] * per_cell, seed), "coarse", *shape, seed)


def grid_of(step: Step) -> StepGrid:
    return step.grid(step.problem(PIPELINE, "step"))


def small_grid(
    lengths: list[int],
    num_ranks: int,
    num_slots: int,
    *,
    costs: list[tuple[int, int]] | None = None,
    patches: list[int] | None = None,
) -> StepGrid:
    """Samples by hand; costs (encoder, LLM) default to (0, length)."""
    sizes = np.array(lengths, np.int64)
    both = np.array(costs if costs is not None else [(0, length) for length in lengths], np.int64)
    media = np.array(patches if patches is not None else [0] * len(lengths), np.int64)
    return StepGrid(
        costs=both,
        sizes=sizes,
        capacity=int(sizes.sum()),
        num_ranks=num_ranks,
        num_slots=num_slots,
        text=sizes,
        images=(media > 0).astype(np.int64),
        patches=media,
        rank_forward=both // 3,
        rank_backward=both - both // 3,
    )


def loads(grid: StepGrid, cells: IntArray, costs: IntArray) -> IntArray:
    """Sums of costs [n] over cells, int64 [R, M]."""
    sums = np.zeros((grid.num_ranks, grid.num_slots), np.int64)
    np.add.at(sums, (cells[:, 0], cells[:, 1]), costs)
    return sums


@pytest.mark.parametrize("name", BALANCERS)
@pytest.mark.parametrize("samples", WORKLOADS)
def test_a_baseline_runs_every_sample_once_and_keeps_the_capacity_unless_it_is_marked(name: str, samples: str) -> None:
    step, balancer = step_of(samples), BALANCERS[name]
    problem = step.problem(PIPELINE, "step")
    placed = balancer.place(grid_of(step))
    assert placed.cells.shape == (len(step.counts), 2)
    assert placed.cells[:, 0].max() < SHAPE[0]
    verdict = judge(problem, lay(problem, placed), "step")
    assert verdict.lost == 0 or balancer.may_lose
    assert verdict.cells_above == 0 or balancer.may_exceed
    assert (placed.encoder_cells is not None) == balancer.exchanges
    again = balancer.place(grid_of(step))
    assert np.array_equal(placed.cells, again.cells)
    if placed.encoder_cells is not None and again.encoder_cells is not None:
        assert np.array_equal(placed.encoder_cells, again.encoder_cells)


@pytest.mark.parametrize("name", [name for name, found in BALANCERS.items() if found.may_exceed or found.may_lose])
def test_marks_of_baselines_are_earned(name: str) -> None:
    balancer = BALANCERS[name]
    lost = above = 0
    for samples in ("text", "internvl"):
        for shape, per_cell in (((8, 1), 3), ((8, 4), 2), ((8, 4), 8)):
            step = step_of(samples, shape, per_cell=per_cell)
            problem = step.problem(PIPELINE, "step")
            verdict = judge(problem, lay(problem, balancer.place(grid_of(step))), "step")
            lost, above = lost + verdict.lost, above + verdict.cells_above
    assert (lost > 0) == balancer.may_lose
    assert (above > 0) == balancer.may_exceed


def test_sequential_keeps_the_order_and_equal_counts() -> None:
    cells = in_order(small_grid([1] * 7, 2, 2))
    assert cells.tolist() == [[0, 0], [0, 0], [0, 1], [0, 1], [1, 0], [1, 0], [1, 1]]


def test_batch_rebalance_gives_long_samples_small_groups_in_the_first_slot() -> None:
    cells = batch_rebalance(small_grid([9, 8, 3, 3, 2, 2, 1, 1], 2, 2))
    assert cells[:2].tolist() == [[0, 0], [1, 0]]
    assert set(cells[2:, 1].tolist()) == {1}
    with pytest.raises(ValueError, match="3 samples do not fill 4 groups"):
        batch_rebalance(small_grid([3, 2, 1], 2, 2))


@pytest.mark.torch
@pytest.mark.parametrize("name", ["text", "vlm", "video"])
@pytest.mark.parametrize(("shape", "per_cell"), [((2, 2), 4), ((8, 1), 8), ((3, 5), 3), ((8, 4), 8)])
def test_batch_rebalance_is_that_of_transformers(name: str, shape: tuple[int, int], per_cell: int) -> None:
    pytest.importorskip("torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pytest.importorskip("transformers.trainer_pt_utils")
    if not hasattr(trainer, "BatchRebalanceSampler"):
        pytest.skip("this transformers has no batch_rebalance")
    from tools.benchmarks.peers import transformers_rebalance

    grid = grid_of(step_of(name, shape, per_cell=per_cell, seed=3))
    assert np.array_equal(batch_rebalance(grid), transformers_rebalance(grid))


def test_disttrain_starts_with_the_smallest_and_keeps_the_next_smallest_for_the_end() -> None:
    # One rank, six samples of one micro-batch each: encoder times 6 1 4 2 5 3, LLM 12.
    costs = [(3 * encoder, 36) for encoder in (6, 1, 4, 2, 5, 3)]
    cells = disttrain(small_grid([1] * 6, 1, 6, costs=costs))
    order = np.argsort(cells[:, 1]).tolist()
    assert order[0] == 1
    assert order[-1] == 3
    # What comes back first leaves an interval of 36 for two thirds of it; the largest forward fits it best.
    assert order[1] == 0


def test_disttrain_evens_out_ranks_by_total_cost_with_equal_counts() -> None:
    grid = grid_of(step_of("vlm"))
    cells = disttrain(grid)
    assert set(np.bincount(cells[:, 0]).tolist()) == {len(grid) // grid.num_ranks}
    totals = loads(grid, cells, np.array(grid.totals)).sum(axis=1)
    assert totals.max() < 1.01 * totals.mean()


def test_per_stage_balances_each_stage_of_a_micro_batch_by_itself() -> None:
    # Encoder 8 8 0 0, LLM 1 1 9 9: no single assignment of these four evens out both on two ranks, two do.
    grid = small_grid([1] * 4, 2, 1, costs=[(8, 1), (8, 9), (0, 1), (0, 9)], patches=[8, 8, 0, 0])
    placed = lpt_per_stage(grid)
    assert placed.encoder_cells is not None
    assert loads(grid, placed.cells, grid.costs[:, 1]).tolist() == [[10], [10]]
    assert loads(grid, placed.encoder_cells, grid.costs[:, 0]).tolist() == [[8], [8]]


def test_loongforge_leaves_what_is_nearly_even_alone_and_rebalances_the_rest() -> None:
    even = small_grid([5, 5, 5, 5, 5, 5, 6, 6], 2, 1)
    assert np.array_equal(loongforge(even).cells, in_order(even))
    skewed = small_grid([9, 8, 7, 6, 1, 2, 3, 4], 2, 1)
    totals = loads(skewed, loongforge(skewed).cells, skewed.sizes)
    assert totals.tolist() == [[20], [20]]
    one_giant = small_grid([90, 8, 7, 6, 1, 2, 3, 4], 2, 1)
    assert np.array_equal(loongforge(one_giant).cells, in_order(one_giant))


def test_loongforge_remembers_what_ranks_did_in_earlier_micro_batches() -> None:
    # Rank 0 gets the giant of slot 0, which is left alone; slot 1 makes up for it.
    grid = small_grid([60, 4, 9, 9, 4, 4, 9, 9], 2, 2)
    totals = loads(grid, loongforge(grid).cells, grid.sizes)
    assert totals[0, 0] == 64
    assert totals[1, 1] > totals[0, 1]


@given(st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=12), min_size=1, max_size=6), st.integers(1, 6))
@settings(deadline=None, max_examples=60)
def test_outlier_delay_runs_every_sample_exactly_once(steps: list[list[int]], num_cells: int) -> None:
    delay = OutlierDelay(40, num_cells)
    seen: list[tuple[int, int]] = []
    for lengths in steps:
        cells = delay.step(lengths, [length * length for length in lengths])
        assert len(cells) == num_cells
        seen += [name for names in cells for name in names]
        for names in cells:
            assert sum(steps[step][row] for step, row in names) <= 40
    assert len(seen) + len(delay.waiting) == sum(map(len, steps))
    seen += [name for cells in delay.flush() for names in cells for name in names]
    assert sorted(seen) == [(step, row) for step, lengths in enumerate(steps) for row in range(len(lengths))]


def test_outlier_delay_waits_for_one_long_sample_a_micro_batch() -> None:
    delay = OutlierDelay(100, 2)
    first = delay.step([80, 5, 5, 5], [6400, 25, 25, 25])
    assert [len(names) for names in first] == [2, 1]
    assert delay.waiting == [(0, 0)]
    second = delay.step([90, 5, 5], [8100, 25, 25])
    assert sorted(len([name for name in names if name in ((0, 0), (1, 0))]) for names in second) == [1, 1]
    assert not delay.waiting
    with pytest.raises(ValueError, match="a sample of 101 tokens fits into no micro-batch of 100"):
        delay.step([101], [1])


@given(st.lists(st.integers(1, 3_000), min_size=1, max_size=60), st.sampled_from([1, 2, 4, 8]), st.integers(1, 4))
@settings(deadline=None, max_examples=60)
def test_hybrid_context_parallel_ends_and_runs_every_sample_once(lengths: list[int], ranks: int, slots: int) -> None:
    waves = hybrid_context_parallel(small_grid(lengths, ranks, slots))
    assert sorted(item for wave in waves for group in wave for item in group.items) == list(range(len(lengths)))
    for wave in waves:
        assert sum(group.degree for group in wave) == ranks
        assert all(group.items for group in wave)


def test_hybrid_context_parallel_gives_a_giant_a_group() -> None:
    waves = hybrid_context_parallel(small_grid([800, *[100] * 8], 8, 2))
    # A micro-batch holds 100 tokens on average, so the giant needs all eight ranks.
    assert [group.degree for group in waves[0]] == [8]
    assert waves[0][0].items == [0]
