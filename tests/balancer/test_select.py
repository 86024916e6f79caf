"""Selection: blind to policy and layout, reproducible, and nothing leaves it without a reason."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.errors import OversizeError, PlanError
from balancer.plan import Capacities
from balancer.select import (
    TAILS,
    StepRange,
    StepSelector,
    Tail,
    TailPolicy,
    eligible_ids,
    num_steps,
    split_held_out,
    step_ids,
    step_range,
    steps_per_epoch,
)
from balancer.shuffle import epoch_order


@dataclass(frozen=True)
class FakeBad:
    sample_id: int
    reason: str


class FakeIndex:
    """An index with one row per token count; rows in `bad` are unusable."""

    def __init__(self, tokens: list[int], patches: list[int] | None = None, bad: dict[int, str] | None = None) -> None:
        zeros = [0] * len(tokens)
        confidence = np.zeros(len(tokens), dtype=np.int8)
        self.bad = [FakeBad(row, reason) for row, reason in (bad or {}).items()]
        confidence[[entry.sample_id for entry in self.bad]] = 3
        self.samples = {
            "llm_tokens": np.array(tokens),
            "patches": np.array(patches or zeros),
            "num_items": np.array(zeros),
            "confidence": confidence,
        }
        self.items: dict[str, np.ndarray] = {}
        self.item_offsets = np.zeros(len(tokens) + 1, dtype=np.int64)

    def shard(self, i: int) -> str:
        return "s.tar"

    def keys(self, i: int) -> str:
        return f"key{i:03}"

    def __len__(self) -> int:
        return len(self.samples["llm_tokens"])


def test_oversize_error_lists_every_sample_with_need_and_limit() -> None:
    """PK-02, first half; CE-05."""
    index = FakeIndex([5, 12, 3, 11], patches=[0, 99, 0, 1])
    with pytest.raises(OversizeError) as caught:
        eligible_ids(index, Capacities(tokens=10, patches=50))
    text = str(caught.value)
    assert text.startswith("2 of 4 samples exceed the capacity of a micro-batch:")
    assert "sample 1 (shard s.tar, key key001): 12 tokens > 10, 99 patches > 50" in text
    assert "sample 3 (shard s.tar, key key003): 11 tokens > 10" in text
    assert "oversize policy 'drop', or make them fit with 'shrink' or 'truncate_text'" in text


def test_oversize_drop_counts_what_it_leaves_out() -> None:
    """PK-02, second half; CE-05."""
    eligibility = eligible_ids(FakeIndex([5, 12, 3]), Capacities(tokens=10), oversize="drop")
    assert eligibility.ids.tolist() == [0, 2]
    assert [(drop.sample_id, drop.reason) for drop in eligibility.dropped] == [(1, "oversize: 12 tokens > 10")]
    assert eligibility.num_oversize == 1


def test_unusable_rows_are_listed_with_their_reason_and_not_called_oversize() -> None:
    index = FakeIndex([5, 12, 3], bad={1: "truncated"})
    eligibility = eligible_ids(index, Capacities(tokens=10))
    assert eligibility.ids.tolist() == [0, 2]
    assert [drop.reason for drop in eligibility.dropped] == ["unusable: truncated"]
    assert eligibility.num_oversize == 0


@given(st.lists(st.integers(0, 20), max_size=20), st.data())
def test_kept_and_dropped_together_are_the_index(tokens: list[int], data) -> None:
    rows = st.sampled_from(range(len(tokens))) if tokens else st.nothing()
    index = FakeIndex(tokens, bad=dict.fromkeys(data.draw(st.sets(rows)), "corrupt"))
    eligibility = eligible_ids(index, Capacities(tokens=10), oversize="drop")
    dropped = [drop.sample_id for drop in eligibility.dropped]
    assert sorted([*eligibility.ids.tolist(), *dropped]) == list(range(len(tokens)))
    assert dropped == sorted(dropped)


def test_all_dropped_is_a_clear_error_before_any_step() -> None:
    """PK-04."""
    eligibility = eligible_ids(FakeIndex([20, 30]), Capacities(tokens=10), oversize="drop")
    assert len(eligibility.dropped) == 2
    with pytest.raises(PlanError, match=r"no samples to train on: .* every sample was dropped as unusable or oversize"):
        steps_per_epoch(len(eligibility.ids), 4)


@pytest.mark.parametrize("policy", ["shrink", "truncate_text", "truncate"])
def test_policies_that_change_samples_are_applied_elsewhere_and_refused_here(policy: str) -> None:
    with pytest.raises(PlanError, match=rf"{policy!r} does not exist here; available: error, drop .*fit_oversize"):
        eligible_ids(FakeIndex([1]), Capacities(tokens=10), oversize=policy)


def test_why_a_sample_could_not_be_made_to_fit_is_said_instead_of_its_numbers() -> None:
    index, why = FakeIndex([5, 12, 13]), {1: "media alone needs 11 tokens > 10", 0: "never asked for"}
    eligibility = eligible_ids(index, Capacities(tokens=10), "drop", why=why)
    assert [(drop.sample_id, drop.reason) for drop in eligibility.dropped] == [
        (1, "oversize: media alone needs 11 tokens > 10"),
        (2, "oversize: 13 tokens > 10"),
    ]


@given(st.sets(st.integers(0, 500), max_size=60), st.integers(0, 2**64 - 1), st.integers(0, 9))
def test_an_epoch_holds_every_sample_once(ids: set[int], seed: int, epoch: int) -> None:
    rows = np.array(sorted(ids), dtype=np.int64)
    assert sorted(epoch_order(rows, seed, epoch).tolist()) == rows.tolist()


def test_the_order_depends_on_seed_and_epoch_and_on_nothing_else() -> None:
    ids = np.arange(100)
    orders = {tuple(epoch_order(ids, seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}
    assert len(orders) == 4
    np.testing.assert_array_equal(epoch_order(ids, 7, 3), epoch_order(ids, 7, 3))
    np.testing.assert_array_equal(epoch_order(ids, 7, 3, shuffle=False), ids)


def test_the_order_is_the_one_it_always_was() -> None:
    """A change here reorders every run: it belongs in the changelog under ITERATION ORDER."""
    assert epoch_order(np.arange(10), 0, 0).tolist() == PINNED_ORDER


PINNED_ORDER = [6, 9, 1, 3, 7, 0, 5, 8, 4, 2]


@pytest.mark.parametrize(("seed", "epoch"), [(-1, 0), (2**64, 0), (0, -1)])
def test_seeds_outside_64_bits_are_refused(seed: int, epoch: int) -> None:
    with pytest.raises(PlanError, match=r"all are integers in \[0, 2\^64\)"):
        epoch_order(np.arange(3), seed, epoch)


@given(st.integers(0, 50), st.floats(0.0, 0.99), st.integers(0, 9))
def test_a_split_separates_all_samples_into_two_sorted_halves(n: int, share: float, seed: int) -> None:
    train, held_out = split_held_out(np.arange(n), share, seed)
    assert sorted([*train.tolist(), *held_out.tolist()]) == list(range(n))
    assert train.tolist() == sorted(train.tolist())
    assert held_out.tolist() == sorted(held_out.tolist())
    if n >= 2 and share > 0.0:
        assert len(held_out) == min(max(1, round(share * n)), n - 1)
    else:
        assert len(held_out) == 0


def test_held_out_samples_follow_the_seed() -> None:
    picks = {tuple(split_held_out(np.arange(40), 0.25, seed)[1]) for seed in range(5)}
    assert len(picks) == 5


def test_held_out_samples_are_not_simply_the_first_of_an_epoch() -> None:
    held_out = set(split_held_out(np.arange(40), 0.25, 3)[1].tolist())
    assert held_out != set(epoch_order(np.arange(40), 3, 0)[:10].tolist())


@pytest.mark.parametrize("share", [-0.1, 1.0, float("nan")])
def test_a_share_that_is_none_is_refused(share: float) -> None:
    with pytest.raises(PlanError, match="held-out share"):
        split_held_out(np.arange(4), share, 0)


@given(st.integers(1, 60), st.integers(1, 20), st.integers(1, 3), st.sampled_from(TAILS))
def test_the_number_of_steps_is_known_and_equals_the_number_executed(
    n: int, batch: int, epochs: int, tail: TailPolicy
) -> None:
    if tail == "drop" and batch > n:
        with pytest.raises(PlanError, match=f"set global_batch_size to at most {n}"):
            num_steps(n, batch, epochs, tail)
        return
    total = num_steps(n, batch, epochs, tail)
    selector = StepSelector(np.arange(n), seed=1, global_batch_size=batch, tail=tail)
    steps = [selector.step_ids(step) for step in range(total)]
    assert [where.step for where, _ in steps] == list(range(total))
    for epoch in range(epochs):
        seen = [i for where, ids in steps if where.epoch == epoch for i in ids.tolist()]
        assert len(set(seen)) == (n // batch * batch if tail == "drop" else n)
    assert selector.step_ids(total)[0] == StepRange(step=total, epoch=epochs, cursor=0, stop=min(batch, n))


@given(st.integers(1, 60), st.integers(1, 20), st.integers(0, 3), st.sampled_from(TAILS))
def test_every_sample_of_an_epoch_is_in_a_step_or_in_its_tail_and_the_counts_say_so(
    n: int, batch: int, epoch: int, tail: TailPolicy
) -> None:
    if tail == "drop" and batch > n:
        return
    selector = StepSelector(np.arange(n), seed=3, global_batch_size=batch, tail=tail)
    first = epoch * selector.steps_per_epoch
    steps = [selector.step_ids(first + k)[1].tolist() for k in range(selector.steps_per_epoch)]
    left_out, held = selector.tail_dropped(epoch).tolist(), [i for ids in steps for i in ids]
    assert sorted({*held, *left_out}) == list(range(n))
    assert not set(held) & set(left_out)
    assert len(left_out) == selector.tail.num_dropped
    assert len(held) - len(set(held)) == selector.tail.num_repeated
    assert all(len(set(ids)) == len(ids) for ids in steps), "a sample at most once per step"
    whole = [len(ids) == batch for ids in steps]
    assert all(whole[:-1])
    assert whole[-1] == (n % batch == 0 or tail == "drop" or (tail == "repeat" and n >= batch))


def test_a_repeating_tail_takes_the_first_samples_of_the_same_epoch() -> None:
    ids = np.arange(10)
    selector = StepSelector(ids, seed=7, global_batch_size=4, tail="repeat")
    for epoch in range(2):
        order = epoch_order(ids, 7, epoch).tolist()
        assert selector.step_ids(3 * epoch + 2)[1].tolist() == [*order[8:], *order[:2]]
    assert selector.tail == Tail(policy="repeat", num_short=2, num_repeated=2)


def test_a_dropping_tail_leaves_out_other_samples_in_every_epoch() -> None:
    selector = StepSelector(np.arange(21), seed=0, global_batch_size=4, tail="drop")
    assert len({tuple(selector.tail_dropped(epoch).tolist()) for epoch in range(6)}) > 1


@pytest.mark.parametrize(
    ("n", "tail", "text"),
    [
        (10, "pad", "the last step of every epoch holds 2 samples (tail=pad)"),
        (10, "drop", "2 samples are left out of every epoch (tail=drop), other ones each time"),
        (10, "repeat", "2 samples of every epoch come twice, to fill its last step (tail=repeat)"),
        (3, "repeat", "the last step of every epoch holds 3 samples (tail=repeat)"),
        (8, "repeat", ""),
    ],
)
def test_a_tail_is_said_in_words(n: int, tail: TailPolicy, text: str) -> None:
    assert Tail.of(n, 4, tail).text() == text


def test_a_tail_that_does_not_exist_is_refused() -> None:
    with pytest.raises(PlanError, match="tail='wrap' is not one of: pad, drop, repeat"):
        StepSelector(np.arange(4), seed=0, global_batch_size=2, tail="wrap")  # type: ignore[arg-type]


@given(st.integers(0, 40), st.integers(1, 9))
def test_any_step_can_be_asked_for_alone(step: int, batch: int) -> None:
    """A resume starts in the middle: the selector's kept order must not matter."""
    ids = np.arange(13) * 3
    selector = StepSelector(ids, seed=5, global_batch_size=batch)
    for before in (0, step + 7, step):
        where, rows = selector.step_ids(before)
    alone, rows_alone = step_ids(ids, step, seed=5, global_batch_size=batch)
    assert where == alone
    np.testing.assert_array_equal(rows, rows_alone)


def test_fewer_samples_than_a_batch_make_one_short_step() -> None:
    where, rows = step_ids(np.array([4, 9]), 0, seed=0, global_batch_size=8)
    assert (where.cursor, where.stop) == (0, 2)
    assert sorted(rows.tolist()) == [4, 9]


def test_impossible_step_options_are_refused() -> None:
    with pytest.raises(PlanError, match="global_batch_size=0"):
        steps_per_epoch(3, 0)
    with pytest.raises(PlanError, match="epochs=0"):
        num_steps(3, 1, 0)
    with pytest.raises(PlanError, match="step=-1"):
        step_range(-1, num_samples=3, global_batch_size=1)
