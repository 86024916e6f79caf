"""`BalancedDataLoader` beside torch's DataLoader, on what torch documents: who swaps them gets the same.

With one process and equal costs there is nothing to balance, so both must hand out the very same batches in order.
"""

import os
import pickle
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from torch.utils.data import (  # noqa: E402
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    Subset,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from balancer.errors import BalancerError  # noqa: E402
from balancer.loader import BalancedDataLoader  # noqa: E402

NUM_SAMPLES = 11


class Numbers(Dataset[Any]):
    """Sample i is `form(i)`; all cost the same."""

    def __init__(self, form: Callable[[int], Any] = int, num_samples: int = NUM_SAMPLES) -> None:
        self.form, self.num_samples = form, num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, i: int) -> Any:
        return self.form(i)

    def cost(self, i: int) -> int:
        return 5


def generator(seed: int) -> Any:
    return torch.Generator().manual_seed(seed)


def run(loader: Any) -> list[Any]:
    """Batches, or the kind of error in the place where a batch is missing; errors do not end an iteration of torch."""
    found: list[Any] = []
    batches = iter(loader)
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            return found
        except Exception as error:
            found.append(type(error))
        else:
            found.append(batch)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def check_same(dataset: Any, batch_size: int = 4, *, sampler: Callable[[], Any] | None = None, **options: Any) -> None:
    """One epoch of either loader; `sampler` is made anew for each, because samplers draw from generators."""
    plain, ours = (
        kind(dataset, batch_size, sampler=None if sampler is None else sampler(), **options)
        for kind in (DataLoader, BalancedDataLoader)
    )
    expected = run(plain)
    assert same(run(ours), expected)
    assert len(ours) == len(plain) == len(expected)


def a_tensor(i: int) -> Any:
    return torch.full((2, 3), i)


def a_pair(i: int) -> tuple[int, Any]:
    return i, torch.tensor([i, -i])


def a_record(i: int) -> dict[str, Any]:
    return {"id": i, "x": torch.tensor([float(i)]), "name": f"n{i}", "more": {"twice": np.float32(2 * i)}}


def a_list(i: int) -> list[float]:
    return [i / 2, i / 4]


@pytest.mark.parametrize("form", [int, float, str, a_tensor, a_pair, a_record, a_list])
def test_samples_of_every_kind_are_collated_alike(form: Callable[[int], Any]) -> None:
    check_same(Numbers(form))


@pytest.mark.parametrize("batch_size", [1, 2, 5, 11, 12])
@pytest.mark.parametrize("drop_last", [False, True])
def test_batch_sizes_and_drop_last(batch_size: int, *, drop_last: bool) -> None:
    if drop_last and batch_size > NUM_SAMPLES:
        assert len(DataLoader(Numbers(), batch_size, drop_last=True)) == 0
        with pytest.raises(BalancerError, match=r"do not give each of 1 ranks one; .*drop_last=False"):
            BalancedDataLoader(Numbers(), batch_size, drop_last=True)  # an epoch of nothing is a mistake, said at once
        return
    check_same(Numbers(), batch_size, drop_last=drop_last)


def test_arguments_may_be_given_by_place_as_in_torch() -> None:
    def doubled(items: list[int]) -> list[int]:
        return [2 * item for item in items]

    given = (Numbers(), 3, False, None, None, 0, doubled, False, True, 0, None, None, None)
    assert run(BalancedDataLoader(*given)) == run(DataLoader(*given))
    assert BalancedDataLoader(Numbers()).batch_size == DataLoader(Numbers()).batch_size == 1


class EveryOther:
    """An order that is a plain iterable with a length."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(0, NUM_SAMPLES, 2))

    def __len__(self) -> int:
        return 6


SAMPLERS = {
    "sequential": lambda: SequentialSampler(Numbers()),
    "random": lambda: RandomSampler(Numbers(), generator=generator(3)),
    "random with replacement": lambda: RandomSampler(
        Numbers(), replacement=True, num_samples=17, generator=generator(3)
    ),
    "subset": lambda: SubsetRandomSampler([1, 3, 5, 8], generator=generator(1)),
    "weighted, repeats": lambda: WeightedRandomSampler(torch.arange(11.0) + 1, 23, generator=generator(1)),
    "list": lambda: [7, 7, 1, 0, 7],
    "any iterable": EveryOther,
}


@pytest.mark.parametrize("kind", SAMPLERS)
@pytest.mark.parametrize("drop_last", [False, True])
def test_a_sampler_gives_the_order(kind: str, *, drop_last: bool) -> None:
    check_same(Numbers(), 4, sampler=SAMPLERS[kind], drop_last=drop_last)


def test_a_sampler_is_asked_again_for_every_epoch_and_never_in_between() -> None:
    dataset = Numbers()
    plain = DataLoader(dataset, 4, sampler=RandomSampler(dataset, generator=generator(3)))
    ours = BalancedDataLoader(dataset, 4, sampler=RandomSampler(dataset, generator=generator(3)))
    for _ in range(3):
        expected = [batch.tolist() for batch in plain]
        assert len(ours) == 3
        found = []
        for batch in ours:
            found.append(batch.tolist())
            assert (len(ours), ours.steps_per_epoch, ours.num_dropped) == (3, 3, 0)
            assert ours.report().samples_used == sum(map(len, found))
        assert found == expected


def test_a_sampler_that_leaves_the_dataset_is_refused() -> None:
    for wrong, said in (([0, 11], r"\[11\] for a dataset of 11"), ([-1], r"\[-1\]"), ([[0, 1]], "pass batches as")):
        with pytest.raises(BalancerError, match=said):
            list(BalancedDataLoader(Numbers(), 2, sampler=wrong))  # type: ignore[arg-type]


def test_datasets_that_are_asked_for_whole_batches() -> None:
    asked: list[list[int]] = []

    class Batched(Numbers):
        def __getitems__(self, indices: list[int]) -> list[int]:
            asked.append(indices)
            return [10 * i for i in indices]

    check_same(Batched())
    assert asked[:3] == asked[3:] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]


def test_subsets_and_plain_sequences_are_datasets() -> None:
    check_same(Subset(Numbers(), [9, 2, 4, 1, 0]), 2)
    found = run(BalancedDataLoader(range(7), 3, cost=[1] * 7))  # type: ignore[arg-type]
    assert same(found, run(DataLoader(range(7), 3)))  # type: ignore[arg-type]


@pytest.mark.parametrize("form", [a_record, a_pair])
def test_batches_can_be_pickled_and_pinned_or_not_they_are_the_same(form: Callable[[int], Any]) -> None:
    batches = run(BalancedDataLoader(Numbers(form), 4))
    assert same(pickle.loads(pickle.dumps(batches)), batches)


@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set as true but no accelerator:UserWarning")
@pytest.mark.parametrize("num_workers", [0, 1])
def test_pinned_memory_without_a_gpu_changes_nothing(num_workers: int) -> None:
    check_same(Numbers(a_record), pin_memory=True, num_workers=num_workers)


def test_it_is_a_dataloader_with_the_attributes_of_one() -> None:
    dataset = Numbers()
    loader = BalancedDataLoader(dataset, 3, num_workers=2, drop_last=True, timeout=7, generator=generator(1))
    assert isinstance(loader, DataLoader)
    assert (loader.batch_size, loader.drop_last, loader.dataset) == (3, True, dataset)
    assert list(loader.sampler) == list(range(9))
    assert (loader.num_workers, loader.timeout, loader.pin_memory, loader.persistent_workers) == (2, 7, False, False)
    assert loader.prefetch_factor == DataLoader(dataset, 3, num_workers=2).prefetch_factor
    assert loader.generator.initial_seed() == 1
    assert list(loader.batch_sampler) == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    for name in ("batch_size", "sampler", "dataset"):
        with pytest.raises(ValueError, match="should not be set after"):
            setattr(loader, name, 1)


def test_an_exhausted_iterator_stays_exhausted_and_the_loader_can_be_iterated_again() -> None:
    loader = BalancedDataLoader(Numbers(), 4)
    batches = iter(loader)
    assert len(list(batches)) == 3
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(batches)
    assert loader.epoch == 1
    assert len(list(loader)) == 3


@pytest.mark.parametrize("options", [{}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}])
def test_breaking_off_and_iterating_again(options: dict[str, Any]) -> None:
    with BalancedDataLoader(Numbers(), 4, **options) as loader:
        for batch in loader:
            assert batch.tolist() == [0, 1, 2, 3]
            break
        assert [batch.tolist() for batch in loader] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10]]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_two_iterators_do_not_disturb_each_other(num_workers: int) -> None:
    loader = BalancedDataLoader(Numbers(), 4, num_workers=num_workers)
    one, other = iter(loader), iter(loader)
    found = [(next(one).tolist(), next(other).tolist()) for _ in range(3)]
    assert found == [([0, 1, 2, 3],) * 2, ([4, 5, 6, 7],) * 2, ([8, 9, 10],) * 2]
    assert next(one, None) is next(other, None) is None


def test_kept_workers_serve_the_newest_iterator_alone() -> None:
    """torch hands out one iterator again and again; an older one of ours must not take what the newer one drew."""
    with BalancedDataLoader(Numbers(), 4, num_workers=1, persistent_workers=True) as loader:
        older = iter(loader)
        next(older)
        newer = iter(loader)
        assert next(newer).tolist() == [0, 1, 2, 3]
        assert next(older, None) is None
        assert [batch.tolist() for batch in newer] == [[4, 5, 6, 7], [8, 9, 10]]
        assert (loader.current.epoch, loader.state_dict()["epoch"], loader.state_dict()["step"]) == (1, 2, 0)


def test_a_closed_iterator_is_over_and_its_epoch_is_not() -> None:
    for num_workers in (0, 1):
        loader = BalancedDataLoader(Numbers(), 4, num_workers=num_workers)
        batches = iter(loader)
        next(batches)
        loader.close()
        loader.close()
        assert next(batches, None) is None
        state = loader.state_dict()
        assert (state["epoch"], state["step"]) == (0, 1)


# Worker processes.


def with_worker(i: int) -> tuple[int, int, int]:
    info = get_worker_info()
    return (i, -1, -1) if info is None else (i, info.id, info.num_workers)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_samples_are_loaded_by_the_workers_that_torch_would_use(num_workers: int) -> None:
    check_same(Numbers(with_worker), num_workers=num_workers)


@pytest.mark.slow
@pytest.mark.parametrize("context", ["spawn", torch.multiprocessing.get_context("forkserver")])
def test_workers_may_be_spawned(context: Any) -> None:
    options = {"num_workers": 2, "multiprocessing_context": context, "cost": [3] * 7}
    with BalancedDataLoader(range(7), 3, **options) as loader:  # type: ignore[arg-type]
        assert [batch.tolist() for batch in loader] == [[0, 1, 2], [3, 4, 5], [6]]


def test_worker_init_fn_and_the_seeds_of_workers_are_those_of_torch() -> None:
    def seeded(worker: int) -> None:
        torch.manual_seed(torch.initial_seed() + 1000 * worker)

    def draw(i: int) -> int:
        return int(torch.randint(1 << 30, ())) + i

    options = {"num_workers": 2, "worker_init_fn": seeded}
    plain = DataLoader(Numbers(draw), 4, generator=generator(5), **options)  # type: ignore[arg-type]
    ours = BalancedDataLoader(Numbers(draw), 4, generator=generator(5), **options)  # type: ignore[arg-type]
    for _ in range(2):
        assert same(run(ours), run(plain))


def test_a_generator_seeds_workers_and_never_the_order() -> None:
    first, second = (
        [batch.tolist() for batch in BalancedDataLoader(Numbers(), 4, shuffle=True, seed=2, generator=generator(seed))]
        for seed in (1, 2)
    )
    assert first == second
    assert sorted(i for batch in first for i in batch) == list(range(NUM_SAMPLES))


def process(i: int) -> int:
    return os.getpid()


def test_persistent_workers_live_over_epochs_and_others_do_not() -> None:
    def processes_of(*, persistent: bool) -> list[set[int]]:
        options = {"num_workers": 2, "persistent_workers": persistent, "prefetch_factor": 1}
        with BalancedDataLoader(Numbers(process), 2, **options) as loader:  # type: ignore[arg-type]
            return [{int(pid) for batch in loader for pid in batch} for _ in range(3)]

    kept, started = processes_of(persistent=True), processes_of(persistent=False)
    assert len(set.union(*kept)) == 2
    assert len(set.union(*started)) == 6
    assert os.getpid() not in set.union(*kept, *started)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefetch_factor": 2}, "prefetch_factor option could only be specified in multiprocessing"),
        ({"persistent_workers": True}, "persistent_workers option needs num_workers > 0"),
        ({"num_workers": -1}, "num_workers option should be non-negative"),
        ({"timeout": -1}, "timeout option should be non-negative"),
        ({"multiprocessing_context": "spawn"}, "multiprocessing_context can only be used with multi-process loading"),
        ({"num_workers": 1, "multiprocessing_context": "smoke"}, "should specify a valid start method"),
    ],
)
def test_what_torch_refuses_is_refused_in_its_words(options: dict[str, Any], message: str) -> None:
    for kind in (DataLoader, BalancedDataLoader):
        with pytest.raises(ValueError, match=message):
            kind(Numbers(), 4, **options)


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


@pytest.mark.parametrize(
    ("dataset", "options", "message"),
    [
        (Stream(), {}, "no index to plan with"),
        (Numbers(), {"batch_sampler": [[0]]}, "pass sampler= for the order and batch_size="),
        (Numbers(), {"batch_size": None}, "give the mean number of samples per micro-batch"),
        (Numbers(), {"num_workers": 1, "in_order": False}, "in_order"),
        (Numbers(), {"batch_size": 0}, "batch_size=0: at least one"),
        (Numbers(), {"batch_size": True}, "batch_size=True"),
        (Numbers(), {"yield_per": "epoch"}, "yield_per='epoch': choose one of microbatch, step"),
        (Numbers(), {"output": "numpy"}, "output='numpy': choose one of batch, hf, dict"),
        (Numbers(), {"output": "dict", "collate_fn": list}, "that function makes the batch. Leave it out"),
        (Numbers(), {"align_tokens": 0}, "align_tokens=0"),
        (Numbers(), {"oversize": "shrink"}, "choose 'error' or 'drop'"),
    ],
)
def test_what_contradicts_a_plan_is_refused_with_a_remedy(dataset: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(BalancerError, match=message):
        BalancedDataLoader(dataset, **options)


# Errors.


def fails_at_five(i: int) -> int:
    if i == 5:
        raise KeyError("no five")
    return i


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_error_of_the_dataset_is_raised_in_its_place_and_iteration_can_go_on(num_workers: int) -> None:
    check_same(Numbers(fails_at_five), num_workers=num_workers)
    loader = BalancedDataLoader(Numbers(fails_at_five), 4, num_workers=num_workers)
    batches = iter(loader)
    next(batches)
    with pytest.raises(KeyError, match="no five" if not num_workers else "Caught KeyError in DataLoader worker"):
        next(batches)
    assert (loader.state_dict()["step"], next(batches).tolist()) == (1, [8, 9, 10])
    assert loader.current.sample_ids.tolist() == [8, 9, 10]


def test_an_error_of_collation_or_of_a_worker_s_start_is_raised_too() -> None:
    def refuses(items: list[int]) -> Any:
        raise TypeError("cannot be stacked")

    with pytest.raises(TypeError, match="cannot be stacked"):
        next(iter(BalancedDataLoader(Numbers(), 4, collate_fn=refuses)))
    with pytest.raises(RuntimeError, match="each element in list of batch should be of equal size"):
        next(iter(BalancedDataLoader(Numbers(lambda i: [0] * i), 4)))
    with pytest.raises(TypeError, match="Caught TypeError in DataLoader worker process 0"):
        next(iter(BalancedDataLoader(Numbers(), 4, num_workers=1, worker_init_fn=refuses)))  # type: ignore[arg-type]


def after_an_error(loader: BalancedDataLoader[Any]) -> list[Any]:
    """Batches and errors of an iteration; every batch is what the loader says that it is."""
    found: list[Any] = []
    batches = iter(loader)
    for _ in range(20):
        try:
            batch = next(batches)
        except StopIteration:
            return found
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
        else:
            assert batch.tolist() == loader.current.sample_ids.tolist()
            found.append(batch.tolist())
    raise AssertionError(f"an iteration without an end: {found}")


def stops_at_five(i: int) -> int:
    return next(iter(())) if i == 5 else i


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_stop_iteration_of_a_dataset_is_an_error_of_its_step(num_workers: int) -> None:
    found = after_an_error(BalancedDataLoader(Numbers(stops_at_five), 4, num_workers=num_workers))
    assert found[1].startswith("RuntimeError: a sample could not be loaded: the dataset or collate_fn raised Stop")
    assert [found[0], found[2]] == [[0, 1, 2, 3], [8, 9, 10]]


def test_an_interrupt_inside_a_step_ends_the_iteration_and_names_the_step_as_not_done() -> None:
    """What is left of the step must not pass for the next one."""
    armed = [True]

    def interrupted(i: int) -> int:
        if i == 5 and armed.pop():
            raise KeyboardInterrupt
        return i

    loader = BalancedDataLoader(Numbers(interrupted), 4)
    batches = iter(loader)
    next(batches)
    with pytest.raises(KeyboardInterrupt):
        next(batches)
    assert next(batches, None) is None
    assert (loader.state_dict()["epoch"], loader.state_dict()["step"]) == (0, 1)


def test_an_error_says_which_samples_were_being_loaded() -> None:
    def fails(i: int) -> int:
        raise OSError(f"no {i}")

    with pytest.raises(OSError, match="no 0") as caught:
        next(iter(BalancedDataLoader(Numbers(fails), 4)))
    assert caught.value.__notes__ == ["while loading samples 0, 1, 2, 3"]


def slow_at_five(i: int) -> int:
    time.sleep(1.4 if i == 5 else 0.0)
    return i


def test_a_batch_that_does_not_come_in_time_is_an_error_and_never_taken_for_the_next_one() -> None:
    loader = BalancedDataLoader(Numbers(slow_at_five, 20), 4, num_workers=1, timeout=1)
    found = after_an_error(loader)
    assert found[:2] == [[0, 1, 2, 3], "RuntimeError: DataLoader timed out after 1 seconds"]
    assert all("timed out" in entry for entry in found[2:])
    assert (loader.state_dict()["epoch"], loader.state_dict()["step"]) in ((0, 1), (1, 0))


def dies_at_five(i: int) -> int:
    if i == 5:
        time.sleep(0.3)  # until the loop waits for this batch
        os._exit(3)
    return i


@pytest.mark.parametrize("num_workers", [1, 2])
def test_a_worker_that_is_gone_is_an_error_and_no_early_end_of_the_epoch(num_workers: int) -> None:
    loader = BalancedDataLoader(Numbers(dies_at_five, 24), 4, num_workers=num_workers, prefetch_factor=1)
    found = after_an_error(loader)
    assert found[0] == [0, 1, 2, 3]
    assert "DataLoader worker (pid" in found[1]
    assert len(found) == 6, "an error for each step that cannot be had, or those that can"
    assert not any(isinstance(entry, str) and "worker" not in entry for entry in found)
