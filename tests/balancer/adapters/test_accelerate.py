"""DU-07: accelerate takes the loader as it is; counts, devices and saved states work as with a loader of its own.

Loops in this process, and one world of two gloo processes for all that ranks have to agree on (library_worker.py).
"""

import importlib.util
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("accelerate")
pytestmark = pytest.mark.torch

from accelerate import Accelerator  # noqa: E402
from accelerate.state import AcceleratorState, GradientState, PartialState  # noqa: E402

from balancer.layout import ParallelSpec  # noqa: E402

WORKER = Path(__file__).with_name("library_worker.py")
Found = list[dict[str, Any]]


@pytest.fixture(scope="module")
def worker() -> Any:
    """The worker's module, for its dataset and loops."""
    spec = importlib.util.spec_from_file_location("library_worker", WORKER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(autouse=True)
def fresh_accelerate() -> Iterator[None]:
    """accelerate keeps its state in the process; every test begins without one."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def test_prepare_returns_the_loader_itself_and_its_batches_unchanged(worker: Any) -> None:
    """DU-07: nothing is sharded again, dispatched or concatenated."""
    plain = [worker.ids_of(batch) for batch in worker.numbers_loader(21)]
    loader, accelerator = worker.numbers_loader(21), Accelerator(cpu=True)
    assert accelerator.prepare(loader) is loader
    assert accelerator.prepare_data_loader(loader) is loader, "a second time, as find_executable_batch_size does it"
    assert accelerator._dataloaders == [loader]
    assert [worker.ids_of(batch) for batch in loader] == plain
    assert sorted(i for ids in plain for i in ids) == list(range(21))


def test_gradients_are_synchronised_on_the_last_microbatch_of_every_step_also_of_a_short_last_one(worker: Any) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = worker.new_model()
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), 0.01), worker.numbers_loader(21)
    )
    for _ in range(2):
        seen = worker.accumulated(accelerator, model, optimizer, loader)
        assert [one["synchronised"] for one in seen] == [one["is_last"] for one in seen] == [False, True] * 5 + [True]
        assert [one["at_end"] for one in seen] == [False] * 10 + [True]
        assert all(one["ids"] == one["all_ids"] for one in seen), "gather_for_metrics drops nothing"


def test_a_step_handed_out_at_once_is_the_end_when_it_is_the_last(worker: Any) -> None:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(worker.numbers_loader(21, yield_per="step"))
    ends = [(len(batches), accelerator.gradient_state.end_of_dataloader) for batches in loader]
    assert ends == [(2, False)] * 5 + [(1, True)]


@pytest.mark.parametrize("yield_per", ["microbatch", "step"])
def test_batches_of_a_prepared_loader_are_on_the_device_of_accelerate(worker: Any, yield_per: str) -> None:
    accelerator = Accelerator(cpu=True)
    PartialState._shared_state["device"] = torch.device("meta")
    loader = worker.numbers_loader(9, yield_per=yield_per)
    assert next(iter(loader))[0].device.type == "cpu", "an Accelerator that was not given the loader has no say"
    accelerator.prepare(loader)
    batch = next(iter(loader))
    assert {item.device.type for item in batch} == {"meta"}


def test_packs_go_to_the_device_but_for_what_is_read_on_the_cpu(worker: Any) -> None:
    """A batch with a `to` of its own is moved by it."""

    class Batch:
        device = "none"

        def to(self, device: Any) -> "Batch":
            self.device = str(device)
            return self

    loader = Accelerator(cpu=True).prepare(worker.numbers_loader(9, collate_fn=lambda samples: Batch()))
    assert [batch.device for batch in loader] == ["cpu"] * len(loader)


def test_accelerate_forgets_an_iteration_that_ended_and_one_that_was_left(worker: Any) -> None:
    accelerator = Accelerator(cpu=True)
    loader, other = accelerator.prepare(worker.numbers_loader(21), worker.numbers_loader(9))
    state = accelerator.gradient_state
    for number, _ in enumerate(loader):
        assert state.in_dataloader
        for _ in other:
            break  # an evaluation that is cut short does not hide where training is
        assert state.end_of_dataloader == (number == 10)
    assert not state.in_dataloader
    assert state.dataloader_references == [None]
    inner = iter(loader)
    next(inner)
    assert state.in_dataloader
    del inner
    assert state.dataloader_references == [None]
    assert state.remainder == -1


def test_a_loader_that_no_accelerator_took_tells_accelerate_nothing(worker: Any) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    for _ in worker.numbers_loader(9):
        assert not accelerator.gradient_state.in_dataloader


def test_an_iteration_may_outlive_the_accelerator(worker: Any) -> None:
    running = iter(Accelerator(cpu=True).prepare(worker.numbers_loader(9)))
    next(running)
    GradientState._reset_state()
    assert len(list(running)) == 4


@pytest.mark.parametrize(
    ("given", "have"),
    [
        ({}, "2 micro-batches"),
        (
            {"parallel": ParallelSpec.pipeline(dp_size=1), "capacity_tokens": 80},
            "as many micro-batches as they need",
        ),
    ],
)
def test_a_count_that_ends_inside_a_step_is_said_once(
    worker: Any, given: dict[str, Any], have: str, caplog: pytest.LogCaptureFixture
) -> None:
    loader = Accelerator(cpu=True, gradient_accumulation_steps=3).prepare(worker.numbers_loader(9, **given))
    with caplog.at_level(logging.WARNING, "balancer"):
        for _ in range(2):
            list(loader)
    (record,) = [record for record in caplog.records if record.name.startswith("balancer.")]
    assert record.getMessage() == (
        f"gradient_accumulation_steps=3 counts micro-batches, but the loader's steps have {have}: accumulate() will "
        f"synchronise inside a step; pass parallel=ParallelSpec.from_env(num_microbatches=3), or another count"
    )


@pytest.mark.parametrize(
    ("count", "given"), [(1, {}), (2, {}), (4, {}), (3, {"yield_per": "step"}), (3, {"parallel": None})]
)
def test_counts_that_end_with_a_step_are_not_spoken_of(
    *, worker: Any, count: int, given: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    loader = Accelerator(cpu=True, gradient_accumulation_steps=count).prepare(worker.numbers_loader(9, **given))
    with caplog.at_level(logging.WARNING, "balancer"):
        list(loader)
    assert not [record for record in caplog.records if record.name.startswith("balancer.")]


@pytest.mark.parametrize("num_workers", [0, 1])
def test_save_state_and_load_state_keep_where_the_loader_stands(worker: Any, tmp_path: Path, num_workers: int) -> None:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(worker.numbers_loader(21, num_workers=num_workers))
    rest = []
    for batch in loader:
        if loader.current.step >= 3:
            rest.append(worker.ids_of(batch))
        elif loader.current.step == 2 and loader.current.is_last_microbatch:
            accelerator.save_state(str(tmp_path))
    loader = worker.numbers_loader(21)
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(loader)
    accelerator.load_state(str(tmp_path))
    assert [worker.ids_of(batch) for batch in loader] == rest
    assert loader.epoch == 1


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory, run_two_ranks: Callable[..., None]) -> Found:
    folder = tmp_path_factory.mktemp("accelerate")
    run_two_ranks(WORKER, "accelerate", str(folder))
    return list(json.loads((folder / "found.json").read_text(encoding="utf-8")))


@pytest.mark.multirank
def test_two_ranks_lose_and_double_no_sample(two_ranks: Found) -> None:
    """DU-07: nineteen samples on two ranks, two per micro-batch: the last step is short."""
    assert all(rank["same"] and rank["num_dropped"] == 0 for rank in two_ranks)
    assert sorted(i for rank in two_ranks for one in rank["first"] for i in one["ids"]) == list(range(19))
    for own, other in zip(*(rank["first"] for rank in two_ranks), strict=True):
        assert own["all_ids"] == other["all_ids"] == own["ids"] + other["ids"]
        assert own["step"] == other["step"]


@pytest.mark.multirank
def test_two_ranks_train_as_one_process_does_on_the_same_steps(two_ranks: Found, worker: Any) -> None:
    first = two_ranks[0]["first"]
    assert [one["synchronised"] for one in first] == [one["is_last"] for one in first] == [False, True] * 2 + [True]
    assert [one["at_end"] for one in first] == [False] * 4 + [True]
    steps = [[i for one in first if one["step"] == step for i in one["all_ids"]] for step in range(3)]
    for rank in two_ranks:
        assert rank["weights"] == pytest.approx(worker.weights_of_one_process(steps, 0.01), abs=1e-6)


@pytest.mark.multirank
def test_two_ranks_go_on_where_save_state_was_called(two_ranks: Found) -> None:
    for rank in two_ranks:
        assert rank["resumed"] == rank["rest"]
        assert rank["rest"]
