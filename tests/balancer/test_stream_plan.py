"""Windows of a stream: the same plan from any division of the rows, nothing lost, and a state that goes on exactly."""

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from balancer.cost_model import CostModel, StageCost, StageTerms
from balancer.counts import COUNT_COLUMNS, Int64Array
from balancer.errors import OversizeError, PlanError
from balancer.layout import Layout
from balancer.plan import Capacities
from balancer.stream_plan import (
    DRY,
    ROW_COLUMNS,
    StreamDropped,
    StreamState,
    WindowOptions,
    WindowPlan,
    check_dropped,
    plan_window,
    window_order,
    window_table,
)
from dataloaders.errors import DataError
from dataloaders.stream_source import stream_sample_id

ENCODER, LLM = StageTerms(per_patch_ns=1.0), StageTerms(per_token_ns=1.0)
MODEL = CostModel(stages=tuple(StageCost(forward=term, backward=term.scaled(2.0)) for term in (ENCODER, LLM)))
OPTIONS = WindowOptions(global_batch_size=8, capacities=Capacities(tokens=500), cost_model=MODEL, seed=5)
LANES = 6


def state_of(**changed: object) -> StreamState:
    return replace(StreamState(fingerprint="f", cursors=(0,) * LANES), **changed)  # type: ignore[arg-type]


def row(lane: int, position: int, tokens: int, *, usable: bool = True) -> list[int]:
    counts = {"llm_tokens": tokens, "label_tokens": tokens // 2}
    return [
        lane,
        position,
        int(usable),
        100 * usable + tokens * usable,
        *(counts.get(name, 0) for name in COUNT_COLUMNS),
    ]


@st.composite
def windows(draw: st.DrawFn) -> Int64Array:
    """Rows of up to six lanes, some of them unusable, some lanes empty."""
    rows = [
        row(lane, position, draw(st.integers(1, 400)), usable=draw(st.integers(0, 5)) > 0)
        for lane in range(LANES)
        for position in range(draw(st.integers(0, 7)))
    ]
    return np.array(rows, dtype=np.int64).reshape(-1, len(ROW_COLUMNS))


def dealt(rows: Int64Array, ranks: int) -> list[Int64Array]:
    """The rows as `ranks` ranks read them."""
    return [rows[rows[:, 0] % ranks == rank] for rank in range(ranks)]


def plan(
    rows: Int64Array, ranks: int, *, options: WindowOptions = OPTIONS, state: StreamState | None = None
) -> WindowPlan:
    return plan_window(dealt(rows, ranks), state or state_of(), options, Layout(dp_size=ranks), lanes=LANES)


@settings(max_examples=25)
@given(windows(), st.integers(1, 5))
def test_every_usable_sample_is_in_one_step_and_every_other_in_none(rows: Int64Array, ranks: int) -> None:
    window = plan(rows, ranks)
    usable = [stream_sample_id(int(r[0]), int(r[1]), lanes=LANES) for r in rows if r[2]]
    assert sorted(int(i) for step in window.steps for i in step.sample_ids) == sorted(usable)
    assert (window.runner >= 0).sum() == len(usable)
    for step in window.steps:
        assert int(step.num_samples.sum()) == len(step.sample_ids) <= OPTIONS.global_batch_size
    sizes = [len(step.sample_ids) for step in window.steps]
    assert not sizes or max(sizes) - min(sizes) <= 1
    assert len(sizes) == -(-len(usable) // OPTIONS.global_batch_size)


@settings(max_examples=25)
@given(windows(), st.integers(2, 5))
def test_which_samples_a_step_holds_does_not_depend_on_the_ranks(rows: Int64Array, ranks: int) -> None:
    alone, together = plan(rows, 1), plan(rows, ranks)
    assert [list(step.sample_ids) for step in alone.steps] == [list(step.sample_ids) for step in together.steps]
    assert alone.window_digest == together.window_digest


@settings(max_examples=25)
@given(windows(), st.randoms(use_true_random=False))
def test_any_division_of_the_rows_gives_the_same_plan(rows: Int64Array, random: object) -> None:
    order = list(range(len(rows)))
    random.shuffle(order)  # type: ignore[attr-defined]
    parts = np.array_split(rows[order], 3)
    other = plan_window(parts, state_of(), OPTIONS, Layout(dp_size=3), lanes=LANES)
    assert other.digest == plan(rows, 3).digest


@settings(max_examples=25)
@given(windows(), st.integers(1, 4), st.integers(0, 3))
def test_routes_cover_every_sample_of_the_steps_that_are_left_once(rows: Int64Array, ranks: int, done: int) -> None:
    window = plan(rows, ranks)
    moved = window.bytes_between(from_step=done)
    seen: list[int] = []
    for source in range(ranks):
        for destination in range(ranks):
            route = window.route(source, destination, from_step=done)
            assert moved[source, destination] == window.column("payload_bytes")[route].sum()
            assert set(window.column("lane")[route] % ranks) <= {source}
            seen += route.tolist()
    wanted = [int(row) for chosen in window.step_rows[done:] for row in chosen]
    assert sorted(seen) == sorted(wanted)


def full(size: int) -> Int64Array:
    return np.array([row(lane, k, 10 + k) for lane in range(LANES) for k in range(size)], dtype=np.int64)


def test_order_is_another_one_in_every_window_and_epoch_and_none_without_shuffling() -> None:
    orders = {
        tuple(window_order(30, OPTIONS, state_of(window=window, epoch=epoch))) for window in (0, 1) for epoch in (0, 1)
    }
    assert len(orders) == 4
    unshuffled = replace(OPTIONS, shuffle=False)
    assert list(window_order(30, unshuffled, state_of())) == list(range(30))
    first = plan(full(4), 2, options=unshuffled).steps[0].sample_ids
    assert [int(i) >> 32 for i in first] == [0, 1, 2, 3, 4, 5, 0, 1]  # lane after lane, as the stream flows


def test_skew_over_the_lanes_does_not_skew_the_ranks() -> None:
    rng = np.random.default_rng(0)
    rows = np.array(
        [
            row(lane, k, int(min(400, 5 + rng.pareto(1.2) * (40 if lane % 2 else 4))))
            for lane in range(LANES)
            for k in range(64)
        ],
        dtype=np.int64,
    )
    window = plan(rows, 2, options=replace(OPTIONS, global_batch_size=64))
    by_reader = [int(rows[rows[:, 0] % 2 == rank, 4].sum()) for rank in range(2)]
    assert max(by_reader) / np.mean(by_reader) > 1.4
    busy = np.sum([(step.forward_ns + step.backward_ns).sum(axis=(1, 2)) for step in window.steps], axis=0)
    assert busy.max() / busy.mean() <= 1.1
    assert max(step.imbalance_after for step in window.steps) <= 1.1


def test_fewer_samples_than_ranks_leave_cells_empty() -> None:
    window = plan(full(1)[:2], 5)
    (step,) = window.steps
    assert int(step.num_samples.sum()) == 2
    assert (step.num_samples.sum(axis=1) == 0).sum() == 3


def test_a_window_without_a_usable_sample_has_no_step() -> None:
    window = plan(np.array([row(0, 0, 5, usable=False)], dtype=np.int64), 2)
    assert window.steps == ()
    assert not window.bytes_between().any()
    assert len(plan(full(1)[:0], 2).steps) == 0


def test_a_recorded_table_gives_the_plan_again() -> None:
    window = plan(full(5), 3)
    again = plan_window([window.table], window.start, OPTIONS, Layout(dp_size=3), lanes=LANES)
    assert again.digest == window.digest


def test_data_that_changed_inside_a_window_are_refused() -> None:
    window = plan(full(4), 1)
    state = state_of().within(1, window.window_digest)
    plan(full(4), 2, state=state)  # the same rows: another number of ranks is fine
    changed = full(4)
    changed[3, 4] += 1
    with pytest.raises(PlanError, match="window 0 is not what it was when the state was saved"):
        plan(changed, 2, state=state)


def test_rows_that_name_a_sample_twice_are_refused() -> None:
    with pytest.raises(PlanError, match="name a position twice"):
        window_table([full(2), full(1)], lanes=LANES)
    with pytest.raises(PlanError, match="outside 0 to 3"):
        window_table([full(1)], lanes=4)


@given(
    st.lists(st.integers(DRY, 2**62), min_size=1, max_size=5),
    st.tuples(*[st.integers(0, 2**40)] * 4),
    st.text(max_size=10),
)
def test_a_state_comes_back_from_its_text(cursors: Sequence[int], numbers: tuple[int, ...], text: str) -> None:
    epoch, window, first, done = numbers
    state = StreamState(
        fingerprint="f", cursors=tuple(cursors), epoch=epoch, window=window, first_step=first, step_in_window=done,
        window_digest=text,
    )  # fmt: skip
    assert StreamState.from_json(state.to_json()) == state
    assert state.step == first + done


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"fingerprint":"f"}', "{" * 9000])
def test_a_text_that_is_no_state_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="not the state of a stream"):
        StreamState.from_json(text)


def test_a_state_with_impossible_numbers_is_refused() -> None:
    good = state_of().to_json()
    for wrong in ('"epoch":-1', '"epoch":true', '"epoch":"0"', '"epoch":0.0'):
        with pytest.raises(PlanError):
            StreamState.from_json(good.replace('"epoch":0', wrong))
    with pytest.raises(PlanError):
        StreamState.from_json(good.replace("[0,", '["0",'))


def test_the_epoch_follows_when_every_lane_is_dry() -> None:
    state = state_of(window=3, first_step=7)
    assert state.after_window(2, [5] * LANES) == state_of(window=4, first_step=9, cursors=(5,) * LANES)
    assert state.after_window(2, [DRY] * LANES) == state_of(window=4, first_step=9, epoch=1)
    mixed = [DRY] * (LANES - 1) + [4]
    assert state.after_window(2, mixed).cursors == tuple(mixed)


def test_the_selection_fingerprint_knows_what_selects_and_nothing_else() -> None:
    def fingerprint(**changed: object) -> str:
        return replace(OPTIONS, **changed).selection_fingerprint("s", "c")  # type: ignore[arg-type]

    other = ({"seed": 6}, {"global_batch_size": 9}, {"samples_per_lane": 9}, {"shuffle": False})
    assert len({fingerprint(), *(fingerprint(**changed) for changed in other)}) == 5
    assert fingerprint() == fingerprint(policy="sequential", bad_records="skip", oversize="drop")
    assert OPTIONS.selection_fingerprint("t", "c") != fingerprint()


def test_samples_that_may_not_be_left_out_are_listed() -> None:
    large = StreamDropped(sample_id=1, place="shard a, key 1", reason="oversize: 900 tokens > 500", message="")
    bad = [
        StreamDropped(sample_id=k, place=f"shard a, key {k}", reason="unusable: corrupt", message="broken")
        for k in range(30)
    ]
    with pytest.raises(OversizeError, match=r"1 samples of the window.*\n  shard a, key 1: oversize: 900 tokens > 500"):
        check_dropped([large], OPTIONS)
    with pytest.raises(DataError, match="30 samples of the window cannot be used") as error:
        check_dropped(bad, OPTIONS)
    assert "key 19: broken" in str(error.value)
    assert "and 10 more" in str(error.value)
    check_dropped([large, *bad], replace(OPTIONS, oversize="drop", bad_records="skip"))


@pytest.mark.parametrize("changed", [{"global_batch_size": 0}, {"samples_per_lane": 0}, {"oversize": "shrink"}])
def test_options_out_of_range_are_refused(changed: dict[str, object]) -> None:
    make: Callable[..., WindowOptions] = replace
    with pytest.raises(PlanError, match=next(iter(changed))):
        make(OPTIONS, **changed)
