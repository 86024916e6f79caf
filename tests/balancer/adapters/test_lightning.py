"""Lightning's Trainer takes the loader as it is, runs one epoch of it after the other, and saves where it stands.

Trainers in this process, and one world of two gloo processes (library_worker.py).
"""

import importlib.util
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("lightning")
pytestmark = [
    pytest.mark.torch,
    # Lightning's own: torch's tree specs, and advice on workers, loggers and folders.
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:The '.*_dataloader' does not have many workers"),
    pytest.mark.filterwarnings("ignore:The dirpath has changed from"),
    pytest.mark.filterwarnings("ignore:You are using a custom batch sampler `BalancedBatchSampler` for prediction"),
]

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import lightning.pytorch as pl

from balancer.errors import BalancerError  # noqa: E402

WORKER = Path(__file__).with_name("library_worker.py")
Found = list[dict[str, Any]]


@pytest.fixture(scope="module")
def worker() -> Any:
    """The worker's module, for its dataset and modules."""
    spec = importlib.util.spec_from_file_location("library_worker", WORKER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def whole(worker: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any, Path]:
    """(module, trainer, folder of a checkpoint after each step) of three epochs of six steps, eleven micro-batches."""
    folder = tmp_path_factory.mktemp("whole")
    module = worker.lightning_module(21)
    trainer = worker.trainer(folder, max_epochs=3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module)
    return module, trainer, folder


def test_the_trainer_runs_the_loader_itself_one_epoch_after_the_other(whole: Any) -> None:
    module, trainer, _ = whole
    assert trainer.train_dataloader is module.loader
    assert trainer.global_step == 18, "a short last step is an optimizer step too"
    for epoch in range(3):
        of_epoch = [one for one in module.seen if one[0] == epoch]
        assert {one[1] for one in of_epoch} == {epoch}
        assert [one[2:4] for one in of_epoch] == [[6 * epoch + i // 2, i % 2] for i in range(11)]
        assert sorted(i for one in of_epoch for i in one[4]) == list(range(21))
    orders = [[one[4] for one in module.seen if one[0] == epoch] for epoch in range(3)]
    assert orders[0] != orders[1] != orders[2]
    assert module.loader.state_dict()["epoch"] == 2


@pytest.mark.parametrize("steps", [1, 5, 6, 8, 12, 17])
def test_a_checkpoint_goes_on_with_the_very_next_microbatch(
    whole: Any, worker: Any, tmp_path: Path, steps: int
) -> None:
    """Inside epochs, before the short last step, and where an epoch has just ended (6, 12)."""
    module, _, folder = whole
    resumed = worker.lightning_module(21)
    trainer = worker.trainer(tmp_path, max_epochs=3)
    trainer.fit(resumed, ckpt_path=str(folder / f"step={steps}.ckpt"), weights_only=False)
    assert [one[1:] for one in resumed.seen] == [one[1:] for one in module.seen if one[2] >= steps]
    assert trainer.global_step == 18
    for ours, reference in zip(resumed.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(ours, reference, rtol=0, atol=0)


def test_a_checkpoint_loads_into_another_number_of_workers(whole: Any, worker: Any, tmp_path: Path) -> None:
    module, _, folder = whole
    resumed = worker.lightning_module(21, num_workers=1, persistent_workers=True)
    worker.trainer(tmp_path, max_epochs=3).fit(resumed, ckpt_path=str(folder / "step=15.ckpt"), weights_only=False)
    assert [one[1:] for one in resumed.seen] == [one[1:] for one in module.seen if one[2] >= 15]


def test_an_iterator_runs_over_the_epoch_that_is_set_before_its_first_batch(worker: Any) -> None:
    """Lightning makes the iterator first and says the epoch then."""
    loader, third = worker.numbers_loader(21), worker.numbers_loader(21)
    third.set_epoch(2)
    expected = [worker.ids_of(batch) for batch in third]
    running = iter(loader)
    assert loader.epoch == 0, "an iterator that is not used takes no epoch"
    loader.sampler.set_epoch(2)
    assert [worker.ids_of(batch) for batch in running] == expected
    assert loader.epoch == 3


def test_a_loader_whose_iterator_was_never_used_can_be_closed(worker: Any) -> None:
    loader = worker.numbers_loader(21)
    unused = iter(loader)
    loader.close()
    del unused
    assert len(list(loader)) == 11
    assert loader.current.epoch == 0


def test_validation_uses_a_loader_of_its_own_every_time(worker: Any, tmp_path: Path) -> None:
    class Validated(type(worker.lightning_module(9))):  # type: ignore[misc]
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            validated[-1].extend(worker.ids_of(batch))

        def on_validation_epoch_start(self) -> None:
            validated.append([])

    validated: list[list[int]] = []
    module = Validated()
    spare = worker.numbers_loader(9, shuffle=False)
    worker.trainer(tmp_path, max_epochs=2, num_sanity_val_steps=1).fit(module, val_dataloaders=spare)
    assert len(validated[0]) < 9, "the sanity check"
    assert [sorted(ids) for ids in validated[1:]] == [list(range(9))] * 2


def test_predict_is_refused_with_what_to_do(worker: Any, tmp_path: Path) -> None:
    class Predicting(type(worker.lightning_module(9))):  # type: ignore[misc]
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return batch

    trainer = pl.Trainer(default_root_dir=tmp_path, accelerator="cpu", logger=False, enable_progress_bar=False)
    with pytest.raises(BalancerError) as raised:
        trainer.predict(Predicting(), worker.numbers_loader(9))
    assert str(raised.value).endswith(
        "Lightning's Trainer.predict hands one in to note indices: give it a plain DataLoader, or loop over this one "
        "and read loader.current.sample_ids"
    )


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory, run_two_ranks: Callable[..., None]) -> Found:
    folder = tmp_path_factory.mktemp("lightning")
    run_two_ranks(WORKER, "lightning", str(folder))
    return list(json.loads((folder / "found.json").read_text(encoding="utf-8")))


@pytest.mark.multirank
def test_two_ranks_under_ddp_get_every_sample_once_an_epoch(two_ranks: Found) -> None:
    """use_distributed_sampler=True leaves a loader alone whose sampler is one."""
    assert all(rank["same"] and rank["num_dropped"] == 0 and rank["steps"] == 6 for rank in two_ranks)
    for epoch in range(2):
        ids = [i for rank in two_ranks for one in rank["seen"] if one[0] == one[1] == epoch for i in one[4]]
        assert sorted(ids) == list(range(19))
    places = [[one[:4] for one in rank["seen"]] for rank in two_ranks]
    assert places[0] == places[1]


@pytest.mark.multirank
def test_two_ranks_go_on_from_a_checkpoint_inside_an_epoch(two_ranks: Found) -> None:
    for rank in two_ranks:
        assert rank["resumed"] == [one for one in rank["seen"] if one[2] >= 4]
        assert rank["resumed"]
