"""Mixtures: shares as asked, every sample once per epoch of its part, steps as a pure function, pasts that stay."""

import json
import pickle
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from balancer.cost_model import CostModel
from balancer.errors import PlanError
from balancer.layout import Layout
from balancer.mixture import MixturePart, MixtureSelector, mixture_parts
from balancer.mixture_report import mixture_report
from balancer.mixture_weights import MixtureWeights
from balancer.plan import Capacities
from balancer.plan_sequence import PlanSequence
from balancer.select import eligible_ids, split_held_out
from dataloaders.estimators import Qwen25VLEstimator
from dataloaders.index_concat import IndexConcat
from dataloaders.mixture_source import MixtureSource
from dataloaders.sample import load_sample
from dataloaders.scan import scan_source
from dataloaders.tar_source import TarSource
from dataloaders.weight_schedule import WeightSchedule, WeightStep

Schedules = Mapping[str, float | Sequence[tuple[int, float, int]]]


def parts_of(sizes: Sequence[int], *, llm: Sequence[int] | None = None) -> list[MixturePart]:
    """Parts a, b, ... with ids one after another; every sample of part k has llm[k] LLM tokens and as many visual."""
    starts = np.cumsum([0, *sizes]).tolist()
    tokens = llm or [100] * len(sizes)
    return [
        MixturePart(
            name=f"part{k}",
            ids=np.arange(start, start + size),
            llm_tokens=size * tokens[k],
            visual_tokens=size * tokens[k] // 2,
        )
        for k, (start, size) in enumerate(zip(starts, sizes, strict=False))
    ]


def weights_of(
    values: Sequence[float | Sequence[tuple[int, float, int]]], unit: str = "samples", **options: object
) -> MixtureWeights:
    """A weight, or (start, weight, over) entries, for part0, part1, ..."""
    schedules = {
        f"part{k}": WeightSchedule.constant(value)
        if isinstance(value, (int, float))
        else WeightSchedule(tuple(WeightStep(start=s, weight=w, over=o) for s, w, o in value))
        for k, value in enumerate(values)
    }
    return MixtureWeights(unit=unit, schedules=schedules, **options)  # type: ignore[arg-type]


def selector_of(
    parts: Sequence[MixturePart], weights: MixtureWeights, batch: int = 16, seed: int = 0
) -> MixtureSelector:
    return MixtureSelector(parts, weights, seed=seed, global_batch_size=batch)


def draws_of(selector: MixtureSelector, steps: range) -> dict[str, list[int]]:
    """What the steps draw, by part, in order; checks that a step is full and holds a sample once."""
    owner = {int(i): part.name for part in selector.parts for i in part.ids}
    drawn: dict[str, list[int]] = {part.name: [] for part in selector.parts}
    for step in steps:
        ids = selector.step_ids(step)[1].tolist()
        assert len(ids) == len(set(ids)) == selector.global_batch_size, f"step {step}: {ids}"
        for i in ids:
            drawn[owner[i]].append(i)
    return drawn


def check_epochs(parts: Sequence[MixturePart], drawn: Mapping[str, Sequence[int]]) -> None:
    """Every sample of a part once in each of its epochs, the last one being begun."""
    for part in parts:
        n, ids = len(part.ids), drawn[part.name]
        for start in range(0, len(ids), max(n, 1)):
            epoch = ids[start : start + n]
            assert len(set(epoch)) == len(epoch)
            assert set(epoch) <= set(part.ids.tolist())


@st.composite
def mixtures(draw: st.DrawFn) -> tuple[list[MixturePart], MixtureWeights, int]:
    """Parts of 1 to 90 samples with weights that may change or be 0, and a batch for which a selector exists."""
    sizes = draw(st.lists(st.integers(1, 90), min_size=1, max_size=6))
    values = draw(st.lists(st.sampled_from([0, 1e-6, 0.3, 1, 2.5, 7]), min_size=len(sizes), max_size=len(sizes)))
    if not any(values):
        values[0] = 1
    changes = [
        [(0, value, 0), (draw(st.integers(1, 9)), draw(st.sampled_from([0.5, 1.0, 4.0])), draw(st.integers(0, 40)))]
        if draw(st.booleans())
        else value
        for value in values
    ]
    unit = draw(st.sampled_from(["samples", "llm_tokens", "visual_tokens"]))
    parts = parts_of(sizes, llm=draw(st.lists(st.sampled_from([10, 400, 4000]), min_size=6, max_size=6)))
    weights = weights_of(changes, unit)
    for batch in (draw(st.integers(1, 40)), 4, 1):
        try:
            selector_of(parts, weights, batch)
            return parts, weights, batch
        except PlanError as error:
            refused = str(error)
        assert "and holds a sample once" in refused
    raise AssertionError("a batch of one sample always works")


@settings(max_examples=40)
@given(mixtures(), st.integers(0, 3))
def test_every_sample_once_per_epoch_of_its_part_and_once_per_step(
    mixture: tuple[list[MixturePart], MixtureWeights, int], seed: int
) -> None:
    parts, weights, batch = mixture
    selector = selector_of(parts, weights, batch, seed)
    drawn = draws_of(selector, range(50))
    check_epochs(parts, drawn)
    assert selector.draws_before(50) == {name: len(ids) for name, ids in drawn.items()}


@settings(max_examples=40)
@given(mixtures(), st.integers(0, 60))
def test_any_step_is_the_same_whatever_was_asked_before(
    mixture: tuple[list[MixturePart], MixtureWeights, int], step: int
) -> None:
    """DR-02: the state is the step; nothing else is remembered, and no rank or worker number enters (DU-05)."""
    parts, weights, batch = mixture
    alone = selector_of(parts, weights, batch).step_ids(step)[1]
    used = selector_of(parts, weights, batch)
    for other in (60, 0, step + 1, step):
        again = used.step_ids(other)[1]
    assert again.tolist() == alone.tolist()
    assert pickle.loads(pickle.dumps(used)).step_ids(step)[1].tolist() == alone.tolist()


@settings(max_examples=30)
@given(mixtures(), st.integers(1, 30), st.data())
def test_weights_that_change_keep_the_past_and_every_cursor(
    mixture: tuple[list[MixturePart], MixtureWeights, int], at: int, data: st.DataObject
) -> None:
    """DR-04 for mixtures: no sample is lost or repeated at the change."""
    parts, weights, batch = mixture
    values = data.draw(st.lists(st.sampled_from([0, 0.5, 1, 3]), min_size=len(parts), max_size=len(parts)))
    new = weights_of(values if any(values) else [1] * len(parts), data.draw(st.sampled_from(["samples", "llm_tokens"])))
    try:
        selector = selector_of(parts, weights.changed(at, new), batch)
    except PlanError as error:
        selector, refused = None, str(error)
    if selector is None:
        assert "in one step" in refused or "holds a sample once" in refused
        return
    before = selector_of(parts, weights, batch)
    for step in range(at):
        assert selector.step_ids(step)[1].tolist() == before.step_ids(step)[1].tolist()
    check_epochs(parts, draws_of(selector, range(at + 40)))
    assert selector.draws_before(at) == before.draws_before(at)


@pytest.mark.parametrize("unit", ["samples", "llm_tokens", "visual_tokens"])
@pytest.mark.parametrize("values", [(1, 1), (1, 3), (5, 1)])
def test_shares_are_as_asked_in_the_unit_of_the_weights(unit: str, values: tuple[int, int]) -> None:
    parts = parts_of([5000, 700], llm=[400, 4000])
    index = fake_index(np.repeat([400, 4000], [5000, 700]))
    report = mixture_report(selector_of(parts, weights_of(values, unit), 64), index, 0, 500)
    for part, value in zip(report.parts, values, strict=True):
        assert part.asked == pytest.approx(value / sum(values))
        assert report.achieved(part.name) == pytest.approx(part.asked, abs=0.002)


class FakeIndex(SimpleNamespace):
    """The columns that planning reads."""

    def __len__(self) -> int:
        return len(self.samples["llm_tokens"])


def fake_index(llm: np.ndarray, visual: np.ndarray | None = None) -> FakeIndex:
    tokens = {"llm_tokens": llm, "visual_tokens": llm // 2 if visual is None else visual}
    return FakeIndex(samples=tokens, shard_numbers=np.arange(len(llm)) // 10)


def test_weights_in_tokens_are_shares_of_tokens_and_weights_in_samples_are_not() -> None:
    """CE-11: mean lengths 400 and 4,000, weights 1 : 1, achieved shares after 10,000 samples."""
    rng = np.random.Generator(np.random.Philox(5))
    lengths = np.concatenate([rng.geometric(1 / 400, 30_000), rng.geometric(1 / 4000, 9_000)])
    index = fake_index(lengths)
    parts = mixture_parts(index, np.arange(39_000), {"part0": range(30_000), "part1": range(30_000, 39_000)})
    steps = 10_000 // 50
    in_tokens = mixture_report(selector_of(parts, weights_of([1, 1], "llm_tokens"), 50), index, 0, steps)
    assert [part.llm_token_share for part in in_tokens.parts] == pytest.approx([0.5, 0.5], abs=0.02)
    in_samples = mixture_report(selector_of(parts, weights_of([1, 1], "samples"), 50), index, 0, steps)
    assert [part.sample_share for part in in_samples.parts] == pytest.approx([0.5, 0.5], abs=0.001)
    assert in_samples.parts[1].llm_token_share / in_samples.parts[0].llm_token_share == pytest.approx(10, rel=0.06)


def test_the_report_adds_up_what_the_steps_hold() -> None:
    """Exact over any steps: less than an epoch of a part, several, and a begun one."""
    rng = np.random.Generator(np.random.Philox(1))
    index = fake_index(rng.integers(1, 500, 400), rng.integers(0, 90, 400))
    ranges = {"part0": range(300), "part1": range(300, 340), "part2": range(340, 400)}
    parts = mixture_parts(index, np.arange(400), ranges)
    selector = selector_of(parts, weights_of([5, 3, [(0, 0, 0), (12, 2, 0)]]))
    for start, stop in ((0, 1), (0, 10), (3, 4), (3, 60), (10, 77), (20, 20)):
        report = mixture_report(selector, index, start, stop)
        drawn = draws_of(selector, range(start, stop))
        for part in report.parts:
            ids = drawn[part.name]
            assert part.samples == len(ids)
            assert part.llm_tokens == index.samples["llm_tokens"][ids].sum()
            assert part.visual_tokens == index.samples["visual_tokens"][ids].sum()
        assert sum(part.llm_token_share for part in report.parts) == pytest.approx(float(stop > start))
        assert selector.shares(start, stop) == {part.name: part.sample_share for part in report.parts}


def test_the_report_names_parts_that_repeat_and_parts_that_are_not_read() -> None:
    index = fake_index(np.full(1040, 10))
    parts = mixture_parts(index, np.arange(1040), {"part0": range(1000), "part1": range(1000, 1040), "part2": range(0)})
    selector = selector_of(parts, weights_of([1, 1, 0]), batch=8)
    report = mixture_report(selector, index, 0, 50)
    assert report.parts[1].epochs == pytest.approx(5, abs=0.1)
    (note,) = report.notes()
    assert note.startswith("part 'part1' (40 samples) is read 5.0 times in 50 steps, more than 4: it may be learned by")
    assert report.notes(max_epochs=6) == []
    assert report.lines()[0].startswith(
        "part0: 49.75% of samples (asked 50.00%), 199 samples (49.75%), 1990 LLM tokens"
    )
    unread = mixture_report(selector_of(parts, weights_of([1, 0, 0]), batch=8), index, 0, 50)
    assert unread.notes() == ["part 'part1' (40 samples) is not read in the first 50 steps"]


def test_every_step_has_its_share_of_every_part_to_within_a_sample_or_two() -> None:
    sizes = [1000] * 50
    weights = [1 + k % 7 for k in range(50)]
    selector = selector_of(parts_of(sizes), weights_of(weights), batch=256)
    for step in (0, 1, 77, 10**6):
        before, after = selector.draws_before(step), selector.draws_before(step + 1)
        for k, weight in enumerate(weights):
            share = 256 * weight / sum(weights)
            assert abs(after[f"part{k}"] - before[f"part{k}"] - share) < 2.5


def test_a_tiny_weight_comes_up_as_rarely_as_it_says_and_a_zero_weight_never() -> None:
    selector = selector_of(parts_of([1000, 10, 10]), weights_of([1, 1e-6, 0]), batch=100)
    drawn = selector.draws_before(10**6)
    assert drawn["part2"] == 0
    assert abs(drawn["part1"] - 100) <= 3
    assert sum(drawn.values()) == 10**8


def test_one_part_alone_is_read_epoch_after_epoch_in_other_orders() -> None:
    """DR-14: the epoch advances by itself."""
    (part,) = parts_of([120])
    selector = selector_of([part], weights_of([1]), batch=40)
    drawn = draws_of(selector, range(6))["part0"]
    first, second = drawn[:120], drawn[120:]
    assert sorted(first) == sorted(second) == list(range(120))
    assert first != second
    assert draws_of(selector_of([part], weights_of([1]), batch=40), range(6))["part0"] == drawn
    assert draws_of(selector_of([part], weights_of([1]), batch=40, seed=1), range(3))["part0"] != first


def test_step_a_million_is_reached_without_the_steps_before_it() -> None:
    selector = selector_of(parts_of([10**6, 10**5, 3000]), weights_of([6, 3, [(0, 0, 0), (500, 1, 1000)]]), batch=64)
    before = selector.draws_before(10**6)
    where, ids = selector.step_ids(10**6)
    assert len(set(ids.tolist())) == 64
    assert (where.step, where.epoch) == (10**6, 10**6 // selector.steps_per_epoch)
    # The third part has had hundreds of epochs; its draws are those of a count that begins in the middle of one.
    assert before["part2"] // 3000 > 100
    mine = [i for i in ids.tolist() if i >= 1_100_000]
    assert mine == selector.draws("part2", before["part2"], len(mine)).tolist()


def test_an_order_depends_on_its_part_alone() -> None:
    """Another part, or another place in the list, moves no order; ids move with the place."""
    a, b, c = parts_of([500, 300, 200])
    both = selector_of([a, b], weights_of([1, 1]))
    more = MixtureSelector([c, b, a], weights_of([1, 1, 1]), seed=0, global_batch_size=16)
    for name in ("part0", "part1"):
        assert both.draws(name, 0, 900).tolist() == more.draws(name, 0, 900).tolist()


def test_an_added_part_joins_a_run_where_it_is() -> None:
    a, b, c = parts_of([500, 300, 200])
    old = weights_of([1, 1])
    selector = selector_of([a, b, c], old.changed(20, weights_of([1, 1, 2])))
    before = selector_of([a, b], old)
    assert [selector.step_ids(k)[1].tolist() for k in range(20)] == [before.step_ids(k)[1].tolist() for k in range(20)]
    assert selector.draws_before(20)["part2"] == 0
    assert selector.shares(20, 120)["part2"] == pytest.approx(0.5, abs=0.01)
    check_epochs([a, b, c], draws_of(selector, range(150)))


@pytest.mark.parametrize(("size", "batch"), [(1, 2), (3, 4), (7, 10), (5, 8), (30, 46)])
def test_a_part_of_which_a_step_may_draw_most_keeps_one_order_and_is_still_exact(size: int, batch: int) -> None:
    parts = parts_of([size, 1000])
    selector = selector_of(parts, weights_of([size * 0.7, batch - size * 0.7]), batch)
    assert selector.keeps_order == ("part0",)
    drawn = draws_of(selector, range(200))
    check_epochs(parts, drawn)
    assert drawn["part0"][:size] == drawn["part0"][size : 2 * size]


def test_a_step_never_needs_more_of_a_part_than_it_has() -> None:
    """DR-13: a part of 3 samples has a defined outcome at every weight."""
    with pytest.raises(PlanError, match=r"part 'part0' has 3 samples that can be drawn, but a step of 16 may draw \d+"):
        selector_of(parts_of([3, 100]), weights_of([1, 1]))
    counted = MixtureSelector(parts_of([3, 100]), weights_of([1, 1]), seed=0, global_batch_size=16, repeats=True)
    drawn = [i for step in range(9) for i in counted.step_ids(step)[1].tolist() if i < 3]
    assert max(Counter(drawn).values()) - min(Counter(drawn).values()) <= 1
    assert [sorted(drawn[k : k + 3]) for k in range(0, len(drawn) - 2, 3)] == [[0, 1, 2]] * (len(drawn) // 3)


def test_a_change_that_would_reorder_what_was_drawn_is_refused() -> None:
    parts = parts_of([12, 1000])
    weights = weights_of([1, 9])
    with pytest.raises(PlanError, match="may draw 9 of the 12 samples of part 'part0' in one step: above half of them"):
        selector_of(parts, weights.changed(10, weights_of([1, 1])))
    assert selector_of(parts, weights.changed(10, weights_of([1, 3]))).keeps_order == ()


def test_a_ramp_leads_from_one_share_to_the_other() -> None:
    weights = weights_of([1, [(0, 0, 0), (100, 3, 200)]])
    selector = selector_of(parts_of([4000, 4000]), weights, batch=64)
    shares = [selector.shares(start, start + 20)["part1"] for start in range(0, 400, 20)]
    assert shares[:5] == [0] * 5
    assert all(one < other for one, other in pairwise(shares[4:15]))
    assert shares[-1] == pytest.approx(0.75, abs=0.01)
    # In the middle of the ramp the weights are 1 : 1.5.
    assert selector.shares(195, 205)["part1"] == pytest.approx(0.6, abs=0.02)
    assert selector.asked(0, 100) == {"part0": 1.0, "part1": 0.0}
    assert selector.asked(300, 1300)["part1"] == pytest.approx(0.75)


def test_a_limited_part_stops_and_the_others_share_its_weight() -> None:
    weights = weights_of([2, 1, 1], max_epochs={"part0": 2})
    parts = parts_of([100, 1000, 1000])
    selector = selector_of(parts, weights)
    assert selector.num_steps is None
    drawn = selector.draws_before(10**4)
    assert 200 - 16 < drawn["part0"] <= 200
    assert selector.shares(1000, 2000) == pytest.approx({"part0": 0, "part1": 0.5, "part2": 0.5}, abs=1e-3)
    check_epochs(parts, draws_of(selector, range(60)))
    assert max(Counter(draws_of(selector, range(60))["part0"]).values()) <= 2


def test_when_every_part_has_reached_its_limit_the_mixture_ends() -> None:
    """DR-13: a finite run, whatever the sizes."""
    weights = weights_of([1, 1], max_epochs={"part0": 1, "part1": 3})
    selector = selector_of(parts_of([100, 50]), weights)
    assert selector.num_steps is not None
    drawn = draws_of(selector, range(selector.num_steps))
    assert 100 - 16 < len(drawn["part0"]) <= 100
    assert 150 - 16 < len(drawn["part1"]) <= 150
    assert selector.draws_before(10**9) == {name: len(ids) for name, ids in drawn.items()}
    with pytest.raises(PlanError, match=f"the mixture ends after {selector.num_steps} steps, when every part"):
        selector.step_ids(selector.num_steps)
    with pytest.raises(PlanError, match="a step of 16 samples reads every part with a weight more than `max_epochs`"):
        selector_of(parts_of([7, 7]), weights_of([1, 1], max_epochs={"part0": 1, "part1": 1}))


def test_a_limit_that_is_lowered_later_stops_at_once_and_leaves_the_past() -> None:
    parts = parts_of([64, 1000])
    weights = weights_of([1, 1])
    changed = weights.changed(40, weights_of([1, 1], max_epochs={"part0": 2}))
    selector, before = selector_of(parts, changed), selector_of(parts, weights)
    assert selector.draws_before(40) == before.draws_before(40)
    assert selector.draws_before(40)["part0"] > 2 * 64
    assert selector.draws_before(90)["part0"] == selector.draws_before(40)["part0"]


def test_an_epoch_is_as_many_samples_as_all_parts_hold() -> None:
    """DU-05: the length is a property of parts and batch, not of workers or ranks."""
    selector = selector_of(parts_of([100, 30]), weights_of([1, 5]), batch=12)
    assert selector.steps_per_epoch == 11
    assert [selector.step_ids(step)[0].epoch for step in (0, 10, 11, 22)] == [0, 0, 1, 2]
    assert (selector.step_ids(12)[0].cursor, selector.step_ids(12)[0].stop) == (12, 24)
    with pytest.raises(PlanError, match="step=-1: steps count from 0"):
        selector.step_ids(-1)


@pytest.mark.parametrize("shuffle", ["full", "block", "none"])
def test_every_way_of_shuffling_reads_every_sample_once_per_epoch(shuffle: str) -> None:
    index = fake_index(np.full(330, 10))
    ranges = {"part0": range(250), "part1": range(250, 330)}
    parts = mixture_parts(index, np.arange(330), ranges, shuffle=shuffle)  # type: ignore[arg-type]
    selector = MixtureSelector(
        parts,
        weights_of([2, 1]),
        seed=0,
        global_batch_size=16,
        shuffle=shuffle,
        block_shards=3,  # type: ignore[arg-type]
    )
    drawn = draws_of(selector, range(60))
    check_epochs(parts, drawn)
    if shuffle == "block":
        assert all(len({i // 10 for i in drawn["part0"][k : k + 30]}) <= 6 for k in range(0, 240, 30))


def test_a_mixture_is_planned_as_any_selection(
    counts_of: Callable[..., object], plain_model: Callable[[int], CostModel]
) -> None:
    parts = parts_of([60, 40])
    index = FakeIndex(
        samples={
            name: np.full(100, value, dtype=np.int64)
            for name, value in (
                ("llm_tokens", 10),
                ("label_tokens", 5),
                ("visual_tokens", 0),
                ("patches", 0),
                ("num_items", 0),
            )
        },
        items={
            name: np.zeros(0, np.int64) for name in ("patches", "visual_tokens", "full_total_sq", "window_total_sq")
        },
        item_offsets=np.zeros(101, np.int64),
    )
    selector = selector_of(parts, weights_of([1, 1]), batch=8)
    plans = PlanSequence(
        index=index,  # type: ignore[arg-type]
        ids=np.arange(100),
        global_batch_size=8,
        layout=Layout(dp_size=2),
        cost_model=plain_model(2),
        capacities=Capacities(tokens=100),
        selector=selector,
    )
    assert plans.steps_per_epoch == selector.steps_per_epoch == 13
    for step in (0, 12, 400):
        plan = plans.plan(step)
        planned = [i for rank in range(2) for m in range(plan.num_microbatches) for i in plan.members(rank, m).tolist()]
        assert sorted(planned) == sorted(selector.step_ids(step)[1].tolist())


def test_the_digest_tells_other_data_and_other_weights_apart() -> None:
    def digest(sizes: Sequence[int] = (50, 60), values: Sequence[float] = (1, 1), **options: int) -> str:
        return selector_of(parts_of(sizes), weights_of(values), **options).digest

    assert digest() == digest()
    assert len({digest(), digest((51, 60)), digest(values=(1, 2)), digest(seed=1), digest(batch=8)}) == 5


def test_weights_survive_a_checkpoint_with_their_past() -> None:
    weights = weights_of([1, [(0, 0.1, 0), (5, 2, 10)]], "llm_tokens", max_epochs={"part1": 3})
    changed = weights.changed(7, weights_of([0.3, 1])).changed(9, weights_of([0.3, 1], "visual_tokens"))
    state = json.loads(json.dumps(changed.to_state()))
    assert MixtureWeights.from_state(state) == changed
    assert [entry["since"] for entry in state] == [0, 7, 9]
    for damaged in (
        [],
        [{}],
        [{**state[0], "schedules": {"part0": [{"weight": 1, "from": 3}]}}],
        [{**state[0], "unit": 3}],
    ):
        with pytest.raises(PlanError):
            MixtureWeights.from_state(damaged)


def test_equal_weights_are_no_change_and_the_past_cannot_change() -> None:
    weights = weights_of([1, 2])
    assert weights.changed(9, weights_of([1, 2])) is weights
    later = weights.changed(9, weights_of([1, 3]))
    assert later.changed(9, weights_of([2, 3])) == weights.changed(9, weights_of([2, 3]))
    assert weights.changed(0, weights_of([1, 3])) == weights_of([1, 3])
    with pytest.raises(PlanError, match="cannot change at step 8: they last changed at step 9, and the past is fixed"):
        later.changed(8, weights_of([1, 1]))
    with pytest.raises(PlanError, match="have a past of their own"):
        weights.changed(20, later)


def test_a_change_to_the_same_shares_in_other_numbers_changes_no_step() -> None:
    parts = parts_of([500, 300])
    selector = selector_of(parts, weights_of([1, 2]))
    scaled = selector_of(parts, weights_of([1, 2]).changed(13, weights_of([2, 4])))
    assert [scaled.step_ids(k)[1].tolist() for k in range(40)] == [selector.step_ids(k)[1].tolist() for k in range(40)]


def test_weights_that_cannot_be_drawn_are_refused_with_the_part() -> None:
    parts = parts_of([10, 100])
    cases = [
        (lambda: weights_of([1, 1], "tokens"), "weights in 'tokens': the unit is one of samples, llm_tokens, visual"),
        (lambda: weights_of([0, 0]), "all weights are 0 from step 0 on"),
        (lambda: weights_of([[(0, 1, 0), (7, 0, 0)], 0]), "all weights are 0 from step 7 on"),
        (lambda: weights_of([1, 1e-13]), "the weight of part 'part1' at step 0 is 1e-13 beside 1"),
        (lambda: weights_of([]), "a mixture without parts"),
        (
            lambda: weights_of([1], max_epochs={"part1": 1}),
            "max_epochs names part 'part1', which is not in the mixture",
        ),
        (lambda: weights_of([1], max_epochs={"part0": 0}), "max_epochs=0 of part 'part0': at least 1"),
        (lambda: selector_of(parts, weights_of([1])), "no weight for 'part1'; weight 0 leaves a part out"),
        (lambda: selector_of(parts, weights_of([1, 1, 1])), "a weight names part 'part2', which is not in the mixture"),
        (lambda: selector_of([*parts, parts[0]], weights_of([1, 1])), "are not named differently"),
        (lambda: selector_of(parts, weights_of([1, 1]), batch=0), "global_batch_size=0"),
        (lambda: selector_of(parts_of([0]), weights_of([1])), "no samples to train on: every part is empty"),
        (lambda: selector_of(parts_of([0, 9]), weights_of([1, 1])), "part 'part0' has a weight, but no sample"),
        (
            lambda: selector_of(parts_of([9, 9], llm=[0, 9]), weights_of([1, 1], "visual_tokens"), 2),
            "part 'part0' has no visual tokens, so no number of its samples makes up a share",
        ),
    ]
    for make, text in cases:
        with pytest.raises(PlanError, match=text):
            make()
    empty = selector_of(parts_of([0, 90]), weights_of([0, 1]))
    assert empty.draws_before(10)["part0"] == 0


def test_too_many_changes_are_refused_instead_of_slow() -> None:
    schedules = {
        f"p{k}": WeightSchedule((WeightStep(weight=1), WeightStep(start=k + 1, weight=2, over=7777))) for k in range(50)
    }
    with pytest.raises(PlanError, match=r"the weights change 16[0-9][0-9] times; at most 1024"):
        MixtureWeights(unit="samples", schedules=schedules)


def test_ids_that_belong_to_no_part_are_an_error() -> None:
    with pytest.raises(PlanError, match="12 samples, but the parts hold 10 of them"):
        mixture_parts(fake_index(np.full(20, 1)), np.arange(12), {"a": range(10)})


def test_pieces_are_exact_numbers() -> None:
    """0.1 + 0.2 style sums would differ between hosts only if they were floats."""
    pieces = weights_of([[(0, 0.1, 0), (4, 0.3, 4)]]).pieces(["part0"])
    assert pieces[0] == (0, (Fraction(0.1),))
    assert [start for start, _ in pieces] == [0, 4, 5, 6, 7, 8]
    assert pieces[1][1][0] == Fraction(0.1) + (Fraction(0.3) - Fraction(0.1)) / 8
    assert pieces[-1] == (8, (Fraction(0.3),))


def test_from_real_indices_to_loaded_samples(small_shard: Path, plain_model: Callable[[int], CostModel]) -> None:
    """Eligibility, held-out split, planning and loading take a mixture as they take one source."""
    source = MixtureSource({"part0": TarSource(str(small_shard)), "part1": TarSource(str(small_shard))})
    estimator = Qwen25VLEstimator()
    index = IndexConcat({name: scan_source(part, estimator) for name, part in source.parts.items()})
    capacities = Capacities(tokens=10_000)
    eligible = eligible_ids(index, capacities)
    train, held_out = split_held_out(eligible.ids, share=0.2, seed=0)
    selector = selector_of(mixture_parts(index, train, source.ranges), weights_of([1, 1], "llm_tokens"), batch=4)
    plans = PlanSequence(
        index=index,
        ids=train,
        global_batch_size=4,
        layout=Layout(),
        cost_model=plain_model(2),
        capacities=capacities,
        selector=selector,
    )
    for step in range(plans.steps_per_epoch):
        plan = plans.plan(step)
        ids = [i for m in range(plan.num_microbatches) for i in plan.members(0, m).tolist()]
        assert not set(ids) & set(held_out.tolist())
        for i in ids:
            assert len(load_sample(source, index, i, estimator).tokens) == index.samples["llm_tokens"][i]


def test_parts_are_mixed_by_groups_where_they_are_given() -> None:
    index, ids = fake_index(np.full(40, 10)), np.arange(0, 40, 2)
    ranges = {"part0": range(30), "part1": range(30, 40)}
    by_four = np.arange(40) // 4
    for groups, expected in ((None, np.arange(40) // 10), (by_four, by_four)):
        parts = mixture_parts(index, ids, ranges, shuffle="block", groups=groups)
        found = np.concatenate([part.groups for part in parts if part.groups is not None])
        assert found.tolist() == expected[ids].tolist()
    assert mixture_parts(index, ids, ranges, groups=by_four)[0].groups is None
    with pytest.raises(PlanError, match="groups are given for"):
        mixture_parts(index, ids, ranges, shuffle="block", groups=by_four[:7])
    of_shards = selector_of(mixture_parts(index, ids, ranges, shuffle="block"), weights_of([1, 1], "samples"), 4)
    of_groups = selector_of(
        mixture_parts(index, ids, ranges, shuffle="block", groups=by_four), weights_of([1, 1], "samples"), 4
    )
    assert of_shards.digest != of_groups.digest
