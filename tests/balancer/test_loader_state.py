"""DR-01, DR-02, DR-04, DR-05, DR-07, DR-08, DR-13, DR-14: a saved position loses nothing and repeats nothing.

Every rank's loader runs in this process; a step is taken on all of them, as a training loop would.
"""

import json
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from torch.utils.data import Dataset, RandomSampler, Sampler  # noqa: E402

from balancer.errors import LoaderStateError, PlanError  # noqa: E402
from balancer.layout import ParallelSpec  # noqa: E402
from balancer.loader import BalancedDataLoader  # noqa: E402

State = dict[str, Any]


class Skewed(Dataset[int]):
    """Sample i is the number i; most are short, a few are very long."""

    def __init__(self, num_samples: int, seed: int = 0) -> None:
        rng = np.random.Generator(np.random.Philox(seed))
        self.costs = np.clip(np.exp(rng.normal(5.0, 1.2, num_samples)).astype(np.int64), 8, 4096)
        self.opened: list[int] = []

    def __len__(self) -> int:
        return len(self.costs)

    def __getitem__(self, i: int) -> int:
        self.opened.append(i)
        return i


class Ranks:
    """The loaders of all ranks of a run, taken step by step."""

    def __init__(
        self, dataset: Skewed, dp_size: int = 2, batch_size: int = 4, *, micro: int = 1, **options: Any
    ) -> None:
        options = {"shuffle": True, "cost": dataset.costs, **options}
        spec = ParallelSpec.pipeline(dp_size=dp_size, num_microbatches=micro)
        self.loaders = [
            BalancedDataLoader(dataset, batch_size, parallel=spec, dp_rank=rank, **options) for rank in range(dp_size)
        ]
        self._running: list[Iterator[Any]] = []

    def load(self, state: State) -> "Ranks":
        for loader in self.loaders:
            loader.load_state_dict(json.loads(json.dumps(state)))
        return self

    def state(self) -> State:
        """Where all ranks stand; they say the same."""
        first, *others = (loader.state_dict() for loader in self.loaders)
        assert all(other == first for other in others)
        return first

    def microbatch(self) -> list[int]:
        """The next micro-batch of every rank together; raises StopIteration at the end of the epoch."""
        self._running = self._running or [iter(loader) for loader in self.loaders]
        given = [next(batches, None) for batches in self._running]
        if all(batch is None for batch in given):
            raise StopIteration
        return [i for batch in given for i in batch.tolist()]

    def step(self) -> list[int]:
        """All samples of the next step, ascending; none at the end of the epoch."""
        ids: list[int] = []
        while True:
            try:
                ids += self.microbatch()
            except StopIteration:
                self._running = []
                return ids
            if self.loaders[0].current.is_last_microbatch:
                return sorted(ids)

    def steps(self, num_steps: int) -> list[list[int]]:
        return [self.step() for _ in range(num_steps)]

    def rest(self) -> list[list[int]]:
        """Every step that is left of the epoch."""
        return list(iter(self.step, []))


def flat(steps: list[list[int]]) -> list[int]:
    return [i for step in steps for i in step]


def test_a_resumed_run_goes_through_the_very_same_steps() -> None:
    """DR-01: 100 steps against 50, a new process, 50 more."""
    dataset = Skewed(800)
    whole = Ranks(dataset).rest()
    assert len(whole) == 100
    before = Ranks(dataset)
    first = before.steps(50)
    after = Ranks(dataset).load(before.state())
    assert first + after.rest() == whole


def test_resuming_costs_the_same_wherever_the_run_stood() -> None:
    """DR-01, DR-05: a million samples; the state is a few integers, and late steps need none of the early ones."""
    dataset = Skewed(1_000_000)
    run = Ranks(dataset, 1, 64)
    run.step()
    seconds = []
    for step in (1, 15_000):
        state = run.state() | {"step": step}
        assert len(json.dumps(state)) < 1000
        resumed = Ranks(dataset, 1, 64)
        started = time.perf_counter()
        resumed.load(state).step()
        seconds.append(time.perf_counter() - started)
        assert resumed.state() == state | {"step": step + 1}
    assert seconds[1] < 3 * seconds[0] + 0.5


@pytest.mark.parametrize(("dp_size", "batch_size", "micro"), [(2, 8, 1), (8, 2, 1), (2, 4, 2), (1, 4, 4), (4, 2, 2)])
def test_a_state_of_four_ranks_goes_on_with_other_ranks_and_microbatches(
    dp_size: int, batch_size: int, micro: int
) -> None:
    """DR-02: what is left is exactly what the run would have had, step by step."""
    dataset = Skewed(163)
    saved = Ranks(dataset, 4, 4)
    done = saved.steps(4)
    state = saved.state()
    expected = saved.rest()
    resumed = Ranks(dataset, dp_size, batch_size, micro=micro).load(state)
    left = resumed.rest()
    assert left[:6] == expected[:6]  # the whole steps; the rest of 3 samples is too short for some
    assert sum(map(len, left[6:])) <= 3
    ids = flat(done + left)
    assert len(set(ids)) == len(ids) == 163 - resumed.loaders[0].num_dropped
    assert resumed.loaders[0].num_dropped < dp_size


@pytest.mark.parametrize(("before", "after"), [(8, 16), (16, 8), (16, 4), (4, 12)])
def test_steps_of_another_size_go_on_where_one_of_them_begins(before: int, after: int) -> None:
    """DR-02: other samples per step are exact, or refused."""
    dataset = Skewed(100)
    saved = Ranks(dataset, 2, before // 2)
    done: list[int] = []
    for number in range(1, 100 // before + 1):
        done += saved.step()
        resumed = Ranks(dataset, 2, after // 2)
        if number * before % after == 0 or number == saved.loaders[0].steps_per_epoch:
            left = flat(resumed.load(saved.state()).rest())
            assert sorted(done + left) == list(range(100))
        else:
            said = f"behind {number} steps of {before} samples .* inside a step of {after} samples .* 2 ranks and 1"
            with pytest.raises(LoaderStateError, match=f"{said} micro-batches pass batch_size={before // 2},"):
                resumed.load(saved.state())


def test_ten_resumes_at_random_places_visit_every_sample_once() -> None:
    """DR-04: shuffling has no buffer that could be lost."""
    dataset = Skewed(999)
    rng = np.random.default_rng(4)
    run, seen = Ranks(dataset), []
    for _ in range(10):
        seen += flat(run.steps(int(rng.integers(0, 12))))
        run = Ranks(dataset).load(run.state())
    seen += flat(run.rest())
    dropped = run.loaders[0].num_dropped
    assert max(Counter(seen).values()) == 1
    assert len(seen) + dropped == 999
    assert dropped <= 1


def test_a_checkpoint_after_every_step_loses_no_leftovers() -> None:
    """DR-05: nothing waits in a packing buffer, because what a step holds follows from its number."""
    dataset = Skewed(160)
    seen: list[int] = []
    run = Ranks(dataset)
    for _ in range(20):
        seen += run.step()
        run = Ranks(dataset).load(run.state())
    assert sorted(seen) == list(range(160))
    assert run.step() == []


def test_a_chain_of_resumes_equals_one_run_and_loading_is_saving_again() -> None:
    """DR-07: five resumes of three steps, across the end of an epoch."""
    dataset = Skewed(80)
    whole = Ranks(dataset)
    expected = whole.rest() + whole.steps(5)
    chained: list[list[int]] = []
    run = Ranks(dataset)
    for _ in range(5):
        for _ in range(3):
            chained.append(run.step() or run.step())  # an epoch's end is no step
        state = run.state()
        run = Ranks(dataset).load(state)
        assert run.state() == state
        assert run.load(run.state()).state() == state
    assert chained == expected


@pytest.mark.parametrize("micro", [1, 3])
def test_a_step_that_was_interrupted_is_loaded_again_from_its_first_microbatch(micro: int) -> None:
    dataset = Skewed(96)
    whole = Ranks(dataset, 2, 4, micro=micro).rest()
    run = Ranks(dataset, 2, 4, micro=micro)
    run.step()
    for finished in range(1, 3):
        for index in range(micro):
            assert run.state()["step"] == finished
            run.microbatch()
            assert run.loaders[0].current.microbatch_index == index
    assert Ranks(dataset, 2, 4, micro=micro).load(run.state()).rest() == whole[3:]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_what_is_loaded_ahead_is_not_done(num_workers: int) -> None:
    dataset = Skewed(64)
    whole = Ranks(dataset, 1).rest()
    run = Ranks(dataset, 1, num_workers=num_workers)
    run.steps(2)
    assert run.state()["step"] == 2
    assert Ranks(dataset, 1, num_workers=1 - num_workers).load(run.state()).rest() == whole[2:]


def test_resuming_opens_the_first_new_microbatch_and_nothing_else() -> None:
    """DR-08: skipped samples are skipped in the plan."""
    dataset = Skewed(4000)
    run = Ranks(dataset, 1, 8, micro=2)
    state = run.state() | {"step": 120}
    resumed = Ranks(dataset, 1, 8, micro=2, collate_fn=torch.as_tensor).load(state)
    assert dataset.opened == []
    batches = iter(resumed.loaders[0])
    assert dataset.opened == []
    first = next(batches).tolist()
    second = next(batches).tolist()
    assert dataset.opened == first + second, "a step is handed out when all its micro-batches are there"
    assert (resumed.loaders[0].current.epoch, resumed.loaders[0].current.step) == (0, 120)


@pytest.mark.filterwarnings("ignore:This DataLoader will create 8 worker processes")
@pytest.mark.parametrize("num_workers", [0, 1, 8])
@pytest.mark.parametrize("num_samples", [0, 1, 3])
def test_datasets_smaller_than_ranks_or_workers_have_a_defined_outcome(num_samples: int, num_workers: int) -> None:
    """DR-13."""
    dataset = Skewed(num_samples)
    if not num_samples:
        with pytest.raises(PlanError, match="no samples to load: the dataset is empty"):
            Ranks(dataset, 1, 2, num_workers=num_workers)
        return
    run = Ranks(dataset, 1, 2, num_workers=num_workers)
    for epoch in range(2):
        assert run.state()["epoch"] == epoch
        assert sorted(flat(run.rest())) == list(range(num_samples))
    if num_samples == 1:
        with pytest.raises(PlanError, match="1 samples do not give each of 2 ranks one; use fewer ranks"):
            Ranks(dataset, 2, 2, num_workers=num_workers)
    else:
        run = Ranks(dataset, 2, 1, num_workers=num_workers)
        assert len(flat(run.rest())) + run.loaders[0].num_dropped == 3
        assert run.loaders[0].num_dropped == 1


def test_epochs_advance_by_themselves_and_every_order_is_known_from_the_seed() -> None:
    """DR-14."""
    dataset = Skewed(64)
    run, again, other = Ranks(dataset), Ranks(dataset), Ranks(dataset, seed=1)
    orders = [run.rest() for _ in range(3)]
    assert orders == [again.rest() for _ in range(3)]
    assert len({str(order) for order in (*orders, other.rest())}) == 4
    assert (run.state()["epoch"], run.state()["step"]) == (3, 0)
    for _ in range(2):
        for loader in again.loaders:
            loader.set_epoch(1)
    assert again.state()["epoch"] == 1
    assert again.rest() == orders[1]
    still = Ranks(dataset, shuffle=False)
    assert still.rest() == still.rest()


def test_setting_the_epoch_that_was_loaded_keeps_the_position_and_another_one_drops_it() -> None:
    dataset = Skewed(64)
    run = Ranks(dataset)
    first = run.rest()
    run.steps(3)
    state = run.state()
    assert (state["epoch"], state["step"]) == (1, 3)
    resumed = Ranks(dataset).load(state)
    expected = run.rest()
    for loader in resumed.loaders:
        loader.set_epoch(1)
    assert resumed.state() == state
    assert resumed.rest() == expected
    dropped = Ranks(dataset).load(state)
    for loader in dropped.loaders:
        loader.set_epoch(0)
    assert dropped.rest() == first


@pytest.mark.parametrize("epochs", [0, 2])
def test_the_state_says_which_epoch_was_set(epochs: int) -> None:
    run = Ranks(Skewed(16), 1)
    for _ in range(epochs):
        run.rest()
    run.loaders[0].set_epoch(7)
    assert (run.state()["epoch"], run.state()["step"]) == (7, 0)
    run.step()
    assert (run.state()["epoch"], run.state()["step"]) == (7, 1)


class ByEpoch(Sampler[int]):
    """An order that is a function of the epoch, with repeats."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples, self.epoch = num_samples, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(np.random.default_rng(self.epoch).integers(0, self.num_samples, 40).tolist())


def test_a_sampler_that_knows_its_epoch_can_be_resumed() -> None:
    dataset = Skewed(50)
    run = Ranks(dataset, 2, 3, shuffle=False, sampler=ByEpoch(50))
    run.rest()
    done = run.steps(2)
    resumed = Ranks(dataset, 2, 3, shuffle=False, sampler=ByEpoch(50)).load(run.state())
    left = resumed.rest()
    assert left == run.rest()
    assert sorted(flat(done + left)) == sorted(np.random.default_rng(1).integers(0, 50, 40).tolist())


def test_a_sampler_that_draws_anew_is_refused_inside_an_epoch_and_not_at_its_start() -> None:
    def drawn(seed: int) -> Ranks:
        sampler = RandomSampler(range(24), generator=torch.Generator().manual_seed(seed))  # type: ignore[arg-type]
        return Ranks(Skewed(24), 1, shuffle=False, sampler=sampler)

    run = drawn(1)
    run.step()
    assert run.state() == run.state(), "asking for the state draws nothing"
    assert len(run.loaders[0]) == 6
    state = run.state()
    with pytest.raises(LoaderStateError, match=r"another order for epoch 0 .* give it a set_epoch\(epoch\), or a gen"):
        drawn(2).load(state)
    assert len(drawn(1).load(state).rest()) == 5
    assert len(drawn(2).load(state | {"step": 0, "epoch": 3}).rest()) == 6


@pytest.mark.parametrize(
    ("changed", "options", "message"),
    [
        ({"format": 7}, {}, "format 7 is not 1: no state of this version"),
        ({"format": None}, {}, "format None is not 1"),
        ({"epoch": -1}, {}, "epoch=-1 of the state is no whole number from 0 on"),
        ({"step": True}, {}, "step=True of the state"),
        ({"step": 1.5}, {}, r"step=1\.5 of the state"),
        ({"step": None}, {}, "step=None of the state"),
        ({"step": 9}, {}, "behind step 9 of an epoch of 8 steps"),
        ({}, {"seed": 3}, "saved with seed=0, not 3: pass the same seed="),
        ({}, {"shuffle": False}, "saved with shuffle=True, not False: pass the same shuffle= or sampler="),
        ({}, {"cost": np.ones(64)}, "the data or their costs have changed; give the loader the same"),
        ({}, {"lookahead_steps": 2}, r"lookahead_steps=1\), which is inside a step of 8 samples \(lookahead_steps=2\)"),
        ({}, {"capacity_tokens": 2000, "oversize": "drop"}, "other samples are left out; pass the same capacities and"),
        ({"global_batch_size": 0}, {}, "global_batch_size=0 of the state is no whole number from 1 on"),
    ],
)
def test_states_that_cannot_be_gone_on_from_say_why(changed: State, options: State, message: str) -> None:
    dataset = Skewed(64, seed=2)
    assert dataset.costs.max() > 2000
    run = Ranks(dataset)
    run.steps(3)
    other = Ranks(dataset, **options)
    before = other.state()
    with pytest.raises(LoaderStateError, match=message):
        other.load(run.state() | changed)
    assert other.state() == before, "a refused state changes nothing"


def test_a_state_says_what_it_is_in_numbers_and_digests() -> None:
    run = Ranks(Skewed(64), 2, 4)
    run.steps(3)
    state = run.state()
    assert {name: state[name] for name in ("format", "epoch", "step", "steps_per_epoch", "global_batch_size")} == {
        "format": 1,
        "epoch": 0,
        "step": 3,
        "steps_per_epoch": 8,
        "global_batch_size": 8,
    }
    assert json.loads(json.dumps(state)) == state


SHAPES = [(1, 8, 1), (2, 4, 1), (4, 2, 1), (8, 1, 1), (2, 2, 2), (1, 2, 4), (1, 4, 2)]  # (ranks, batch, micro), 8 each
Part = tuple[tuple[int, int, int], int, int]


@settings(max_examples=30)
@given(
    num_samples=st.integers(8, 60),
    parts=st.lists(st.tuples(st.sampled_from(SHAPES), st.integers(0, 4), st.integers(0, 3)), min_size=1, max_size=5),
    lookahead_steps=st.sampled_from([1, 1, 3]),
    drop_last=st.booleans(),
    policy=st.sampled_from(["joint", "lpt", "sequential"]),
)
def test_any_chain_of_saves_and_loads_gives_every_sample_once(
    *, num_samples: int, parts: list[Part], lookahead_steps: int, drop_last: bool, policy: str
) -> None:
    """Each part has its ranks, finishes some steps, begins another one, and is gone."""
    dataset = Skewed(num_samples, seed=num_samples)
    seen: list[int] = []
    state: State | None = None
    most_dropped = 0
    for (dp_size, batch_size, micro), num_steps, begun in parts:
        options = {"lookahead_steps": lookahead_steps, "drop_last": drop_last, "policy": policy}
        run = Ranks(dataset, dp_size, batch_size, micro=micro, **options)
        if state is not None:
            run.load(state)
        left = run.loaders[0].steps_per_epoch - run.state()["step"]
        seen += flat(run.steps(min(num_steps, left)))
        for _ in range(min(begun, micro - 1) if num_steps < left - 1 else 0):  # the last step may be a short one
            run.microbatch()
        state = run.state()
        most_dropped = max(most_dropped, run.loaders[0].num_dropped)
    left_over = Ranks(dataset, dp_size, batch_size, micro=micro, **options)
    assert state is not None
    seen += flat(left_over.load(state).rest())
    assert left_over.loaders[0].num_dropped < (8 if drop_last else dp_size)
    assert max(Counter(seen).values(), default=0) <= 1
    assert num_samples - most_dropped <= len(seen) <= num_samples, "whoever ends an epoch leaves out what it must"


@pytest.mark.parametrize("workers", [[0, 1, 2], [2, 0, 1]])
def test_workers_may_change_from_one_part_to_the_next(workers: list[int]) -> None:
    dataset = Skewed(96)
    whole = Ranks(dataset, 2, 2, micro=2).rest()
    found: list[list[int]] = []
    run = None
    for number, num_workers in enumerate(workers):
        state = None if run is None else run.state()
        run = Ranks(dataset, 2 - number % 2, 2 + 2 * (number % 2), micro=2, num_workers=num_workers)
        if state is not None:
            run.load(state)
        found += run.steps(3)
        run.microbatch()
    assert found == whole[:9]
