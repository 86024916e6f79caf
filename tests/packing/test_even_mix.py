"""Even mix: the start for several stages, its limits, and `auto` keeping the better of two."""

import os
import subprocess
import sys

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from packing import partition
from packing.grouping import group_by_bin
from packing.makespan_bounds import partition_bound
from packing.partitioners.auto import auto
from packing.partitioners.even_mix import even_mix
from packing.partitioners.lpt import lpt
from packing.partitioners.lpt_refined import lpt_refined
from packing.problem import PartitionProblem

IntArray = npt.NDArray[np.int64]
quick = settings(max_examples=80, deadline=None)


def problem(
    weights: IntArray,
    num_parts: int,
    *,
    equal_count: bool = False,
    sizes: IntArray | None = None,
    capacity: int | None = None,
) -> PartitionProblem:
    bound = partition_bound(weights, num_parts, equal_count)
    return PartitionProblem(
        weights=weights,
        num_parts=num_parts,
        sizes=np.empty((len(weights), 0), np.int64) if sizes is None else sizes,
        capacity=np.array([] if capacity is None else [capacity], np.int64),
        equal_count=equal_count,
        lower_bound=bound,
        enough=bound,
    )


def makespan(instance: PartitionProblem, part_of: npt.NDArray[np.int32]) -> int:
    return int(group_by_bin(part_of, instance.weights, instance.num_parts)[2].max(initial=0))


def clips_and_videos(seed: int, num_items: int = 2048) -> IntArray:
    """Costs (encoder, LLM): many short clips of one ratio, some long videos whose LLM cost grows with the square."""
    generator = np.random.Generator(np.random.Philox(seed))
    length = np.exp(generator.normal(0, 0.5, num_items)) * np.where(generator.random(num_items) < 0.06, 25, 1)
    length = np.minimum(length, 60)
    llm = length + length**2 / 30
    both = np.stack([length / length.sum(), llm / llm.sum()], axis=1)
    costs: IntArray = np.rint(both * 1e13).astype(np.int64)
    return costs


def test_an_item_goes_where_its_stage_is_missing_and_lpt_does_not_put_it_there() -> None:
    instance = problem(np.array([[2, 0], [1, 1], [1, 1], [0, 2]], np.int64), 2)
    start = lpt(instance)
    mixed = even_mix(instance)
    assert start is not None
    assert mixed is not None
    assert (makespan(instance, start), makespan(instance, mixed)) == (3, 2)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("equal_count", [False, True])
def test_long_items_that_are_heavy_in_one_stage_leave_no_part_with_the_wrong_mix(seed: int, equal_count: bool) -> None:
    costs = clips_and_videos(seed)
    before = partition(costs, 16, algorithm="lpt_refined", equal_count=equal_count).gap
    after = partition(costs, 16, equal_count=equal_count).gap
    assert after < 1e-3
    assert after <= before / 2 or after <= 1e-4


def test_lpt_alone_fails_on_that_input_so_the_test_above_can_fail() -> None:
    assert max(partition(clips_and_videos(seed), 16, algorithm="lpt_refined").gap for seed in range(4)) > 2e-3


@st.composite
def problems(draw: st.DrawFn) -> PartitionProblem:
    num_stages = draw(st.integers(1, 4))
    num_parts = draw(st.integers(1, 6))
    unit = draw(st.sampled_from([1, 7, 2**40, 2**52]))
    rows = draw(st.lists(st.lists(st.integers(0, 12), min_size=num_stages, max_size=num_stages), max_size=40))
    weights = np.array(rows, np.int64).reshape(-1, num_stages) * unit
    sizes, capacity = None, None
    if draw(st.booleans()):
        column = draw(st.lists(st.integers(0, 9), min_size=len(rows), max_size=len(rows)))
        sizes = np.array(column, np.int64).reshape(-1, 1)
        capacity = max(9, int(sizes.sum() * 3 // (2 * num_parts)))
    return problem(weights, num_parts, equal_count=draw(st.booleans()), sizes=sizes, capacity=capacity)


@quick
@given(instance=problems())
@example(instance=problem(np.zeros((5, 2), np.int64), 3))
@example(instance=problem(np.ones((3, 2), np.int64), 70))
@example(instance=problem(np.full((200, 3), 2**62 // 200), 150, equal_count=True))
def test_capacities_and_counts_hold_and_no_part_stays_empty(instance: PartitionProblem) -> None:
    part_of = even_mix(instance)
    if part_of is None:
        assert instance.capacity.size
        return
    assert part_of.dtype == np.int32
    assert part_of.shape == (instance.num_items,)
    counts = np.bincount(part_of, minlength=instance.num_parts)
    assert len(counts) == instance.num_parts
    assert (counts > 0).sum() == min(instance.num_items, instance.num_parts) or instance.capacity.size
    if instance.equal_count:
        assert counts.max() - counts.min() <= 1
    if instance.capacity.size:
        used = group_by_bin(part_of, instance.sizes, instance.num_parts)[2]
        assert (used <= instance.capacity).all()


@quick
@given(instance=problems())
def test_auto_is_never_worse_than_refined_lpt(instance: PartitionProblem) -> None:
    plain = lpt_refined(instance)
    best = auto(instance)
    assert (plain is None) == (best is None)
    if plain is not None and best is not None:
        assert makespan(instance, best) <= makespan(instance, plain)


@pytest.mark.parametrize("num_parts", [65, 128, 300])
def test_more_parts_than_an_item_looks_at_are_all_filled_evenly(num_parts: int) -> None:
    costs = np.random.Generator(np.random.Philox(3)).integers(1, 2**30, (20 * num_parts, 2))
    instance = problem(costs, num_parts)
    part_of = even_mix(instance)
    assert part_of is not None
    assert makespan(instance, part_of) <= 1.01 * instance.lower_bound


def test_an_item_that_fits_only_outside_its_window_is_placed_there() -> None:
    # 100 parts with room for one large size each: the last one has to be found wherever it is.
    sizes = np.full((100, 1), 6, np.int64)
    instance = problem(np.ones((100, 2), np.int64), 100, sizes=sizes, capacity=10)
    part_of = even_mix(instance)
    assert part_of is not None
    assert sorted(part_of) == list(range(100))
    assert even_mix(problem(np.ones((101, 2), np.int64), 100, sizes=np.full((101, 1), 6), capacity=10)) is None


def test_results_are_the_same_without_compilation() -> None:
    code = (
        "import numpy as np\n"
        "from packing import partition\n"
        "costs = np.random.Generator(np.random.Philox(5)).integers(1, 2**15, (400, 3)) ** 3\n"
        "costs[:, 2] = costs[:, 0] // 3\n"
        "for equal in (False, True):\n"
        "    part_of = partition(costs, 12, equal_count=equal, sizes=costs[:, 0], capacity=2**51).part_of\n"
        "    print(part_of.tolist())\n"
    )
    printed = [
        subprocess.run(
            [sys.executable, "-W", "error", "-c", code],
            env={**os.environ, "NUMBA_DISABLE_JIT": disabled},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for disabled in ("0", "1")
    ]
    assert printed[0] == printed[1]
    assert printed[0].count("[") == 2
