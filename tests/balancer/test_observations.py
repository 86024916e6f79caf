"""Measured acts joined with counts: exact sums per cell, the median of repetitions, refusals of what does not fit."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.counts import StepCounts
from balancer.errors import CostModelError
from balancer.layout import ParallelSpec
from balancer.observations import COLUMNS, WINDOWED, Observations, cell_counts, plan_cells
from balancer.plan import Capacities, StepPlan
from balancer.planner import plan_step
from balancer.records import ActionRecord, StepRecord

NUM_COLUMNS = len(COLUMNS)


def observed(rows: list[tuple[int, int, str, int]], num_cells: int = 4) -> Observations:
    """Acts (cell, stage, op, ns) on cells whose counts are all 1."""
    return Observations(
        cells=np.ones((num_cells, NUM_COLUMNS), dtype=np.int64),
        cell=np.array([row[0] for row in rows], dtype=np.int64),
        stage=np.array([row[1] for row in rows], dtype=np.int64),
        op=np.array([row[2] for row in rows], dtype="U1"),
        duration_ns=np.array([row[3] for row in rows], dtype=np.int64),
    )


def record_of(plan: StepPlan, actions: tuple[ActionRecord, ...]) -> StepRecord:
    names = ("loss", "lr", "grad_norm", "useful_tokens_per_s", "executed_tokens_per_s", "step_ms", "data_wait_ms")
    floats = dict.fromkeys(names, 1.0)
    return StepRecord(step=1, epoch=0, label_tokens=1, llm_tokens=1, actions=actions, plan_digest=plan.digest, **floats)


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 2)), min_size=1, max_size=30))
def test_cells_add_up_exactly_and_squares_are_summed_not_the_sum_squared(samples: list[tuple[int, int]]) -> None:
    tokens = np.array([length for length, _ in samples])
    where = np.array([cell for _, cell in samples])
    zeros = np.zeros_like(tokens)
    counts = StepCounts(
        sample_ids=np.arange(len(tokens)),
        llm_tokens=tokens,
        label_tokens=zeros,
        visual_tokens=zeros,
        patches=zeros,
        num_items=zeros,
        full_total_sq=zeros,
        window_total_sq=zeros,
    )
    cells = cell_counts(counts, where, num_cells=3, causal_window=8)
    for cell in range(3):
        mine = [length for length, place in samples if place == cell]
        pairs = 2 * sum(min(seen, 8) for length in mine for seen in range(1, length + 1))
        assert cells[cell, COLUMNS.index("samples")] == len(mine)
        assert cells[cell, COLUMNS.index("tokens")] == sum(mine)
        assert cells[cell, COLUMNS.index("token_sq")] == sum(length * length for length in mine)
        # l^2 - (l - w)^2 for l > w is twice the pairs, up to the diagonal that every query sees
        assert cells[cell, len(COLUMNS)] == pairs - sum(min(length, 8) for length in mine)


def test_a_record_is_joined_with_its_plan_by_replica_and_microbatch(counts_of, plain_model) -> None:
    counts = counts_of([10, 20, 30, 40], patches=[0, 16, 0, 32], sample_ids=[7, 3, 9, 5])
    plan = plan_step(
        counts,
        parallel=ParallelSpec.pipeline(dp_size=2, num_microbatches=2),
        cost_model=plain_model(),
        capacities=Capacities(tokens=60),
        policy="sequential",
    )
    acts = tuple(
        ActionRecord(rank=r, dp_rank=r, stage=1, op="F", microbatch=m, start_ms=0.0, end_ms=1.0 + 10 * r + m)
        for r in range(2)
        for m in range(2)
    )
    observations = Observations.of_step(record_of(plan, acts), plan, counts)
    for cell, ns in zip(observations.cell.tolist(), observations.duration_ns.tolist(), strict=True):
        rank, microbatch = divmod(cell, 2)
        assert ns == (1 + 10 * rank + microbatch) * 1_000_000
        assert observations.column("tokens")[cell] == plan.llm_tokens[rank, microbatch]
        assert observations.column("patches")[cell] == plan.patches[rank, microbatch]
    assert (plan_cells(plan, counts) == observations.cells).all()


def test_a_record_of_another_plan_and_a_sample_without_counts_are_refused(counts_of, plain_model) -> None:
    counts = counts_of([10, 20])
    options = {"cost_model": plain_model(), "capacities": Capacities(tokens=60)}
    plan = plan_step(counts, parallel=ParallelSpec.pipeline(), **options)
    other = plan_step(counts_of([10, 21]), parallel=ParallelSpec.pipeline(), **options)
    with pytest.raises(CostModelError, match="belongs to plan"):
        Observations.of_step(record_of(other, ()), plan, counts)
    with pytest.raises(CostModelError, match="1 samples of the plan have no counts"):
        plan_cells(plan, counts_of([10]))


def test_the_median_of_repetitions_stays_and_a_first_run_that_was_slow_moves_nothing() -> None:
    repeated = observed([(0, 0, "F", 900), (0, 0, "F", 100), (0, 0, "F", 110), (1, 0, "F", 50), (0, 0, "B", 7)])
    medians = repeated.medians()
    assert len(medians) == 3
    cell, duration = medians.of(0, "F")
    assert dict(zip(cell.tolist(), duration.tolist(), strict=True)) == {0: 110, 1: 50}
    assert medians.of(0, "B")[1].tolist() == [7]
    assert medians.of(1, "F")[1].tolist() == []


def test_parts_are_joined_with_cells_of_their_own_and_cut_again() -> None:
    first, second = observed([(3, 0, "F", 1)]), observed([(0, 1, "B", 2), (2, 1, "B", 3)])
    joined = Observations.joined([first, second])
    assert joined.cell.tolist() == [3, 4, 6]
    cut = joined.between(4, 8)
    assert (cut.cell.tolist(), cut.duration_ns.tolist(), len(cut.cells)) == ([0, 2], [2, 3], 4)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"op": np.array(["X"])}, "acts of op 'X'"),
        ({"duration_ns": np.array([0])}, "took 0 ns"),
        ({"cell": np.array([4])}, "acts of cell 4; there are cells 0 to 3"),
        ({"stage": np.array([0, 1])}, "2 values of stage for 1 acts"),
        ({"cells": np.ones((4, 2), dtype=np.int64)}, "expected columns samples"),
        ({"cells": np.ones(4, dtype=np.int64)}, r"cells has shape \(4,\); expected \[g, C\]"),
        ({"cells": np.full((4, NUM_COLUMNS), np.nan)}, "cells holds float64: integers are needed"),
        ({"cells": np.full((4, NUM_COLUMNS), -1)}, "cells hold a count of -1"),
        ({"duration_ns": np.array([np.nan])}, "duration_ns holds float64"),
        ({"duration_ns": np.array([np.inf])}, "duration_ns holds float64"),
        ({"duration_ns": np.array([1.5])}, "duration_ns holds float64"),
        ({"duration_ns": np.array(["5"])}, "duration_ns holds <U1"),
        ({"duration_ns": np.array([2**63], dtype=np.uint64)}, "beyond int64"),
        ({"duration_ns": np.array([2**62])}, "more than three days"),
        ({"duration_ns": np.array([[5]])}, r"duration_ns has shape \(1, 1\)"),
        ({"stage": np.array([10**9])}, "acts of stage 1000000000: a pipeline has stages 0 to 4095"),
        ({"stage": np.array([-1])}, "acts of stage -1"),
        ({"stage": np.array([None])}, "stage holds object"),
        ({"causal_window": -4}, "causal_window=-4: a number of tokens"),
        ({"causal_window": "x"}, "causal_window=x"),
    ],
)
def test_what_does_not_fit_together_is_refused(changed: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(CostModelError, match=message):
        dataclasses.replace(observed([(0, 0, "F", 5)]), **changed)


def test_parts_with_different_windows_are_not_joined() -> None:
    windowed = Observations(
        cells=np.ones((1, NUM_COLUMNS + 1), dtype=np.int64),
        cell=np.zeros(1, dtype=np.int64),
        stage=np.zeros(1, dtype=np.int64),
        op=np.array(["F"]),
        duration_ns=np.ones(1, dtype=np.int64),
        causal_window=8,
    )
    assert windowed.names[-1] == WINDOWED
    with pytest.raises(CostModelError, match="windows \\[0, 8\\]"):
        Observations.joined([observed([]), windowed])
