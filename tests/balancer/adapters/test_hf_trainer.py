"""Trainers with balanced batches learn what a plain Trainer learns from the same global batches, also when resumed.

Trainers in this process, and one world of two gloo processes (hf_trainer_worker.py) with several after one another. The
reference is a plain Trainer in one process whose padded batches are the whole steps.
"""

import importlib.util
import json
import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("accelerate")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("transformers.trainer")
    import transformers.trainer as trainer_module
    from transformers import TrainerCallback

import balancer  # noqa: E402
from balancer.adapters.hf import BalancedTrainerMixin, BalanceOptions  # noqa: E402
from balancer.adapters.hf_batch import HfCollate  # noqa: E402
from balancer.adapters.hf_loss import TokenLoss  # noqa: E402
from balancer.adapters.hf_resume import STATE_NAME, nothing_skipped  # noqa: E402
from balancer.errors import BalancerError, LoaderStateError, MissingCostError, PackingError  # noqa: E402
from balancer.loader import BalancedDataLoader  # noqa: E402

pytestmark = pytest.mark.torch

WORKER = Path(__file__).with_name("hf_trainer_worker.py")
Run = dict[str, Any]


def _load_worker() -> Any:
    spec = importlib.util.spec_from_file_location("hf_trainer_worker", WORKER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def worker() -> Any:
    """The worker's module, for its models, data and Trainers."""
    return _load_worker()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Run]], Path]:
    """(runs by name, for each of two ranks; folder of their checkpoints)."""
    folder = tmp_path_factory.mktemp("trainer")
    home = str(Path(balancer.__file__).parents[1])
    path = os.pathsep.join(part for part in (home, os.environ.get("PYTHONPATH")) if part)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--no-python"]
    done = subprocess.run(
        [*launcher, sys.executable, "-P", str(WORKER), str(folder)],
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return torch.load(folder / "found.pt", weights_only=False), folder


@pytest.fixture(scope="module")
def two_ranks(world: tuple[list[dict[str, Run]], Path]) -> list[dict[str, Run]]:
    return world[0]


@pytest.fixture(scope="module")
def reference(worker: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """`reference(num_samples, size, **arguments)`: a plain Trainer's run with padded batches of `size` samples."""
    folder, known = tmp_path_factory.mktemp("reference"), {}

    def run(num_samples: int, size: int, **given: Any) -> Run:
        key = (num_samples, size, *given.items())
        if key not in known:
            args = worker.arguments(folder, per_device_train_batch_size=size, **given)
            trainer = worker.new_trainer(worker.Noting, args, worker.Texts(num_samples), data_collator=worker.padded)
            known[key] = worker.trained(trainer)
        return known[key]

    return run


def balanced(worker: Any, folder: Path, data: Any, *, size: int = 3, count: int = 1, **given: Any) -> Any:
    """A balanced Trainer in this process; names of the Trainer's own options go to it, others to TrainingArguments."""
    own = {key: given.pop(key) for key in ("data_collator", "balance", "model", "callbacks", "eval_dataset",
                                           "compute_loss_func") if key in given}  # fmt: skip
    kind = given.pop("kind", worker.Balanced)
    batches = {"per_device_train_batch_size": size, "gradient_accumulation_steps": count}
    return worker.new_trainer(kind, worker.arguments(folder, **batches, **given), data, **own)


def assert_same(run: Run, expected: Run, *, within: float = 1e-5) -> None:
    """Losses, norms of gradients and weights."""
    assert run["losses"] == pytest.approx(expected["losses"], abs=within)
    assert run["grad_norms"] == pytest.approx(expected["grad_norms"], abs=within)
    assert run["steps"] == expected["steps"]
    assert float((run["weights"] - expected["weights"]).abs().max()) <= within


def moved(worker: Any, run: Run) -> float:
    """How far training has moved the weights: what `within` has to be compared with."""
    start = torch.cat([parameter.detach().flatten() for parameter in worker.new_model().parameters()])
    return float((run["weights"] - start).abs().max())


def test_the_reference_itself_learns_something_and_depends_on_the_size_of_steps(worker: Any, reference: Any) -> None:
    run = reference(22, 12, num_train_epochs=2)
    assert moved(worker, run) > 1e-2
    other = reference(22, 6, num_train_epochs=2)
    assert float((run["weights"] - other["weights"]).abs().max()) > 1e-3


# --- two ranks


@pytest.mark.multirank
@pytest.mark.parametrize(
    ("name", "num_samples", "size"),
    [("plain", 24, 12), ("free-1", 22, 6), ("free-2", 22, 12), ("short", 15, 12), ("collator", 22, 12)],
)
def test_two_ranks_learn_what_one_process_learns_from_whole_steps(
    *, two_ranks: Any, reference: Any, name: str, num_samples: int, size: int
) -> None:
    """LN-01, LN-04: any number of ranks and micro-batches, packed or padded, with a short last step."""
    epochs = {"num_train_epochs": 2} if name not in ("plain", "short") else {}
    expected = reference(num_samples, size, **epochs)
    for rank in two_ranks:
        assert_same(rank[name], expected)
    assert torch.equal(two_ranks[0][name]["weights"], two_ranks[1][name]["weights"])


@pytest.mark.multirank
@pytest.mark.parametrize(
    ("name", "steps"),
    [("free-1", [6, 6, 6, 4] * 2), ("free-2", [12, 10] * 2), ("short", [12, 3]), ("collator", [12, 10] * 2)],
)
def test_the_divisor_is_the_label_tokens_of_the_step_over_all_ranks_once(
    worker: Any, two_ranks: Any, name: str, steps: list[int]
) -> None:
    data = worker.Texts(sum(steps) // (2 if len(set(steps)) * 2 <= len(steps) else 1))
    begins = [sum(steps[:k]) % len(data) for k in range(len(steps))]
    expected = [data.label_tokens(range(begin, begin + num)) for begin, num in zip(begins, steps, strict=True)]
    for rank in two_ranks:
        notes = rank[name]["notes"]
        assert [one["total"] for one in notes] == expected
        assert [one["step_samples"] for one in notes] == steps
        assert [one["step"] for one in notes] == list(range(len(steps)))


@pytest.mark.multirank
def test_a_short_last_step_has_fewer_microbatches_on_every_rank(two_ranks: Any) -> None:
    for rank in two_ranks:
        assert [one["num_microbatches"] for one in rank["short"]["notes"]] == [2, 1]


@pytest.mark.multirank
def test_workers_change_nothing(two_ranks: Any) -> None:
    for rank in two_ranks:
        assert torch.equal(rank["workers"]["weights"], rank["free-2"]["weights"])
        assert rank["workers"]["notes"] == rank["free-2"]["notes"]


@pytest.mark.multirank
def test_a_vision_language_model_that_takes_no_divisor_is_divided_by_the_step_all_the_same(
    worker: Any, two_ranks: Any, tmp_path: Path
) -> None:
    """LN-02: Qwen2.5-VL gives means; the reference is one that has been told to take the divisor, sample by sample."""
    model = worker.new_picture_model()
    assert not model.accepts_loss_kwargs
    model.accepts_loss_kwargs = True
    args = worker.arguments(tmp_path, per_device_train_batch_size=1, gradient_accumulation_steps=8)
    data = worker.Pictures(10)
    expected = worker.trained(worker.new_trainer(worker.Noting, args, data, model=model, data_collator=worker.alone))
    assert expected["steps"] == 2
    for rank in two_ranks:
        assert_same(rank["pictures"], expected)
        assert [one["total"] for one in rank["pictures"]["notes"]] == [one["total"] for one in expected["notes"]]


@pytest.mark.multirank
@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_resumed_run_is_the_unstopped_one(two_ranks: Any, step: int) -> None:
    """DR-01: inside an epoch, at its end, inside the next one; two epochs in different orders."""
    for rank in two_ranks:
        whole, resumed = rank["whole"], rank[f"resumed-{step}"]
        assert [(one["epoch"], one["step_samples"]) for one in whole["notes"]] == [(0, 12), (0, 10), (1, 12), (1, 10)]
        assert resumed["notes"] == whole["notes"][step:], "no step is loaded twice, none is left out"
        assert torch.equal(resumed["weights"], whole["weights"])
        assert resumed["losses"] == whole["losses"], "the log goes on with what the checkpoint had"
        assert resumed["epochs"] == whole["epochs"]


@pytest.mark.multirank
@pytest.mark.parametrize("step", [1, 2, 3])
def test_a_checkpoint_of_two_ranks_goes_on_in_one_process(worker: Any, world: Any, tmp_path: Path, step: int) -> None:
    """DR-02: the position is the same for any number of ranks, as long as steps hold as many samples."""
    whole = world[0][0]["whole"]
    given = {"num_train_epochs": 2, "train_sampling_strategy": "random"}
    trainer = balanced(worker, tmp_path, worker.Texts(22), size=3, count=4, **given)
    run = worker.trained(trainer, world[1] / "whole" / f"checkpoint-{step}")
    assert_same(run, whole)
    assert [one["total"] for one in run["notes"]] == [one["total"] for one in whole["notes"]][step:]


@pytest.mark.multirank
def test_the_position_is_written_once_for_all_ranks(world: Any) -> None:
    state = json.loads((world[1] / "whole" / "checkpoint-3" / STATE_NAME).read_text(encoding="utf-8"))
    assert (state["epoch"], state["step"], state["global_batch_size"], state["seed"]) == (1, 1, 12, 7)


# --- one process: the loss


@pytest.mark.parametrize("count", [1, 2, 4])
def test_one_process_with_accumulation_learns_the_same(worker: Any, reference: Any, tmp_path: Path, count: int) -> None:
    run = worker.trained(balanced(worker, tmp_path, worker.Texts(22), size=12 // count, count=count))
    assert_same(run, reference(22, 12))


class Unlearned:
    """Texts of which the first ones have no label."""

    def __init__(self, worker: Any, num_unlearned: int) -> None:
        data = worker.Texts(8)
        blank = [{**one, "labels": [-100] * len(one["labels"])} for one in data.items[:num_unlearned]]
        self.items = blank + data.items[num_unlearned:]
        self.cost = [len(one["input_ids"]) for one in self.items]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, i: int) -> Any:
        return self.items[i]


@pytest.mark.parametrize("takes", [True, False])
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("num_unlearned", [3, 8])
def test_microbatches_and_steps_without_a_label_add_exactly_nothing(
    *, worker: Any, tmp_path: Path, takes: bool, packed: bool, num_unlearned: int
) -> None:
    """LN-05: also where the model by itself would give the mean of nothing."""
    model, data = worker.new_model(), Unlearned(worker, num_unlearned)
    model.accepts_loss_kwargs = takes
    collator = None if packed else worker.padded
    run = worker.trained(balanced(worker, tmp_path, data, size=1, count=4, model=model, data_collator=collator))
    assert all(torch.isfinite(run["weights"]))
    args = worker.arguments(tmp_path, per_device_train_batch_size=4)
    plain = worker.new_trainer(worker.Noting, args, data, data_collator=worker.padded)
    if num_unlearned == 3:
        assert_same(run, worker.trained(plain))
    else:
        assert run["losses"] == [0.0, 0.0]
        assert moved(worker, run) == 0.0


def test_a_model_that_takes_no_divisor_is_given_a_loss_that_does(worker: Any, reference: Any, tmp_path: Path) -> None:
    """LN-02: the loss does not depend on the number of micro-batches."""
    for count in (1, 2):
        model = worker.new_model()
        model.accepts_loss_kwargs = False
        trainer = balanced(worker, tmp_path, worker.Texts(22), size=12 // count, count=count, model=model)
        run = worker.trained(trainer)
        assert isinstance(trainer.compute_loss_func, TokenLoss)
        assert_same(run, reference(22, 12))


def test_the_token_loss_is_the_models_own(worker: Any) -> None:
    model, (first, second) = worker.new_model(), worker.Texts(2).items
    counts = []
    for one in (first, second):
        tokens, labels = torch.tensor([one["input_ids"]]), torch.tensor([one["labels"]])
        with torch.no_grad():
            out = model(input_ids=tokens, labels=labels)
        own = TokenLoss(model)
        assert float(own(out, labels)) == pytest.approx(float(out.loss))
        counts.append(int((labels[:, 1:] != -100).sum()))
        assert float(own(out, labels, num_items_in_batch=10)) == pytest.approx(float(out.loss) * counts[-1] / 10)
    assert counts[0] != counts[1]


def test_a_loss_of_the_users_own_is_left_alone(worker: Any, tmp_path: Path) -> None:
    seen = []

    def own(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> Any:
        seen.append(int(num_items_in_batch))
        return outputs.logits.square().sum() / num_items_in_batch

    data, model = worker.Texts(12), worker.new_model()
    model.accepts_loss_kwargs = False
    worker.trained(balanced(worker, tmp_path, data, count=2, model=model, compute_loss_func=own))
    assert seen == [data.label_tokens(range(6))] * 2 + [data.label_tokens(range(6, 12))] * 2


# --- one process: batches and data


def test_the_loader_has_the_trainers_options_and_accelerate_leaves_it_alone(worker: Any, tmp_path: Path) -> None:
    given = {"train_sampling_strategy": "random", "data_seed": 11, "dataloader_drop_last": True}
    workers = {"dataloader_num_workers": 1, "dataloader_prefetch_factor": 3, "dataloader_persistent_workers": True}
    options = BalanceOptions(capacity_tokens=160, align_tokens=16, policy="lpt")
    trainer = balanced(worker, tmp_path, worker.Texts(22), count=2, balance=options, **given, **workers)
    loader = trainer.get_train_dataloader()
    assert type(loader) is BalancedDataLoader
    assert trainer.accelerator._dataloaders == [loader]
    assert (loader.num_workers, loader.prefetch_factor, loader.persistent_workers) == (1, 3, True)
    assert (len(loader), loader.steps_per_epoch, loader.num_microbatches, loader.num_dropped) == (6, 3, 2, 4)
    used = loader.balanced.options
    assert (used.seed, used.policy, used.spec.meet, loader.balanced.shuffle) == (11, "lpt", "step", True)
    with loader:
        batches = list(loader)
    assert {batch["input_ids"].shape[1] % 16 for batch in batches} == {0}
    assert max(batch["input_ids"].shape[1] for batch in batches) <= 160
    assert {"cu_seq_lens_q", "position_ids"} <= batches[0].keys()
    assert "attention_mask" not in batches[0]


def test_a_subclass_may_carry_the_options(worker: Any, tmp_path: Path) -> None:
    class Lpt(worker.Balanced):  # type: ignore[name-defined, misc]
        balance = BalanceOptions(policy="lpt", meet="microbatch")

    loader = balanced(worker, tmp_path, worker.Texts(9), kind=Lpt, count=2).get_train_dataloader()
    assert (loader.balanced.options.policy, loader.balanced.options.spec.meet) == ("lpt", "microbatch")
    given = {"balance": BalanceOptions(), "count": 2}
    own = balanced(worker, tmp_path, worker.Texts(9), kind=Lpt, **given).get_train_dataloader()
    assert (own.balanced.options.policy, own.balanced.options.spec.meet) == ("joint", "step")


def test_a_data_collator_makes_the_batches_unless_they_are_to_be_padding_free(worker: Any, tmp_path: Path) -> None:
    given = {"data_collator": worker.padded, "balance": BalanceOptions(padding_free=True)}
    for options, key in (
        ({}, "cu_seq_lens_q"),
        ({"data_collator": worker.padded}, "attention_mask"),
        (given, "cu_seq_lens_q"),
        ({"data_collator": HfCollate(align_tokens=8)}, "cu_seq_lens_q"),
    ):
        loader = balanced(worker, tmp_path, worker.Texts(9), **options).get_train_dataloader()
        assert key in next(iter(loader))
    assert next(iter(loader))["input_ids"].shape[1] % 8 == 0
    limited = {"data_collator": HfCollate(align_tokens=8), "balance": BalanceOptions(capacity_tokens=999)}
    loader = balanced(worker, tmp_path, worker.Texts(9), **limited).get_train_dataloader()
    assert loader.balanced.options.capacities.tokens == 992, "room for the tail"
    positional = worker.Balanced(
        worker.new_model(), worker.arguments(tmp_path), worker.padded, train_dataset=worker.Texts(9)
    )
    assert "attention_mask" in next(iter(positional.get_train_dataloader()))


def test_columns_that_no_forward_reads_are_removed_but_lengths_are_costs(worker: Any, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    texts = worker.Texts(9)
    table = datasets.Dataset.from_list(
        [{**one, "name": [f"{i}"], "length": 1000 - i} for i, one in enumerate(texts.items)]
    )
    loader = balanced(worker, tmp_path, table).get_train_dataloader()
    assert set(loader.dataset.column_names) == {"input_ids", "labels", "length"}
    costs = loader.balanced.costs
    assert costs.index.samples["llm_tokens"].tolist() == [1000 - i for i in range(9)]
    assert costs.labels_known
    assert next(iter(loader))["input_ids"].shape[1] == int(texts.lengths[:3].sum())
    padded = balanced(worker, tmp_path, table, data_collator=worker.padded).get_train_dataloader()
    assert next(iter(padded))["input_ids"].shape[0] == 3
    kept = balanced(worker, tmp_path, table.remove_columns(["name", "length"]), remove_unused_columns=False)
    assert kept.get_train_dataloader().balanced.costs.index.samples["llm_tokens"].tolist() == texts.lengths.tolist()


def test_costs_may_be_given_and_are_asked_for(worker: Any, tmp_path: Path) -> None:
    items = worker.Texts(9).items
    options = BalanceOptions(cost=[len(one["input_ids"]) for one in items])
    assert len(balanced(worker, tmp_path, items, balance=options).get_train_dataloader()) == 3
    with pytest.raises(MissingCostError, match="Add cost=lengths"):
        balanced(worker, tmp_path, items).get_train_dataloader()


def test_evaluation_is_the_trainers_own(worker: Any, tmp_path: Path) -> None:
    given = {"eval_strategy": "steps", "eval_steps": 1, "prediction_loss_only": True, "per_device_eval_batch_size": 5}
    collators = {"data_collator": worker.padded, "balance": BalanceOptions(padding_free=True)}
    data = worker.Texts(12)
    trainer = balanced(worker, tmp_path, data, eval_dataset=worker.Texts(10), **collators, **given)
    run = worker.trained(trainer)
    assert type(trainer.get_eval_dataloader()) is not BalancedDataLoader
    assert [one["step"] for one in trainer.state.log_history if "eval_loss" in one] == [1, 2, 3, 4]
    without = worker.trained(balanced(worker, tmp_path, data))
    assert torch.equal(run["weights"], without["weights"]), "evaluating in between changes nothing"


def test_a_loader_that_is_made_while_training_is_another_one(worker: Any, tmp_path: Path) -> None:
    class Asking(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *args: Any, **given: Any) -> None:
            trainer.get_train_dataloader()

    trainer = balanced(worker, tmp_path, worker.Texts(22), count=2, callbacks=[Asking()], num_train_epochs=2)
    notes = worker.trained(trainer)["notes"]
    assert [one["step"] for one in notes] == list(range(8))


def test_training_twice_begins_twice(worker: Any, tmp_path: Path) -> None:
    trainer = balanced(worker, tmp_path, worker.Texts(22), count=2, max_steps=6, train_sampling_strategy="random")
    for _ in range(2):
        trainer.notes.clear()
        run = worker.trained(trainer)
        assert [(one["epoch"], one["step"]) for one in run["notes"]] == [(0, 0), (0, 1), (0, 2), (0, 3), (1, 4), (1, 5)]


# --- one process: checkpoints


@pytest.fixture(scope="module")
def whole(worker: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Path]:
    """Two epochs of three steps (6, 6, 3 samples) in random order, with dropout, and the folder of its checkpoints."""
    folder = tmp_path_factory.mktemp("whole")
    return worker.trained(_dropping(worker, folder, save_strategy="steps", save_steps=1)), folder


def _dropping(worker: Any, folder: Path, **given: Any) -> Any:
    model = worker.new_model(attention_dropout=0.2)
    options = {"num_train_epochs": 2, "train_sampling_strategy": "random", "model": model, "size": 3, "count": 2}
    return balanced(worker, folder, worker.Texts(15), **{**options, **given})


@pytest.mark.parametrize("step", [1, 2, 3, 4, 5])
def test_resuming_repeats_and_omits_nothing(worker: Any, whole: Any, tmp_path: Path, step: int) -> None:
    """DR-01: with the random numbers of dropout as well."""
    expected, folder = whole
    run = worker.trained(_dropping(worker, tmp_path), folder / f"checkpoint-{step}")
    assert run["notes"] == expected["notes"][step:]
    assert run["losses"] == expected["losses"]
    assert torch.equal(run["weights"], expected["weights"])


def test_a_chain_of_resumes_is_one_run(worker: Any, whole: Any, tmp_path: Path) -> None:
    """DR-07: every process makes one step, and the next one goes on from its checkpoint."""

    class Stopping(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            control.should_training_stop = True

    notes, resume = [], None
    for step in range(1, 7):
        trainer = _dropping(worker, tmp_path, save_strategy="steps", save_steps=1, callbacks=[Stopping()])
        run = worker.trained(trainer, resume)
        notes += run["notes"]
        resume = tmp_path / f"checkpoint-{step}"
    assert notes == whole[0]["notes"]
    assert torch.equal(run["weights"], whole[0]["weights"])


def test_resuming_loads_no_sample_of_the_steps_before(worker: Any, whole: Any, tmp_path: Path) -> None:
    """DR-08: nothing is loaded to be skipped."""

    class Counting(worker.Texts):  # type: ignore[name-defined, misc]
        def __getitem__(self, i: int) -> Any:
            self.loaded.append(i)
            return super().__getitem__(i)

    data = Counting(15)
    data.loaded = []
    trainer = balanced(worker, tmp_path, data, count=2, num_train_epochs=2, train_sampling_strategy="random")
    trainer.train(resume_from_checkpoint=str(whole[1] / "checkpoint-5"))
    assert len(data.loaded) == 3


@pytest.mark.parametrize("moment", ["on_step_begin", "on_pre_optimizer_step", "on_step_end"])
def test_a_checkpoint_in_the_middle_of_a_step_loads_that_step_again(
    worker: Any, whole: Any, tmp_path: Path, moment: str
) -> None:
    """A checkpoint on a signal may come before the optimizer has made the step whose batches are there."""

    class Saving(TrainerCallback):  # type: ignore[misc]
        def _save(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            if state.global_step == 1:
                trainer._save_checkpoint(trainer.model, trial=None)

    setattr(Saving, moment, Saving._save)
    trainer = _dropping(worker, tmp_path, callbacks=[Saving()])
    trainer.train()
    state = json.loads((tmp_path / "checkpoint-1" / STATE_NAME).read_text(encoding="utf-8"))
    assert (state["epoch"], state["step"]) == (0, 1)


def test_a_checkpoint_without_a_position_is_refused_unless_data_are_not_to_be_skipped(
    worker: Any, whole: Any, tmp_path: Path
) -> None:
    plain = worker.new_trainer(
        worker.Noting,
        worker.arguments(tmp_path, per_device_train_batch_size=6, save_strategy="steps", save_steps=1),
        worker.Texts(15),
        data_collator=worker.padded,
    )
    plain.train()
    with pytest.raises(
        LoaderStateError, match=r"balanced_loader.json is missing: the checkpoint was saved without Bal"
    ):
        _dropping(worker, tmp_path / "other").train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    trainer = _dropping(worker, tmp_path / "other", ignore_data_skip=True)
    run = worker.trained(trainer, tmp_path / "checkpoint-1")
    assert [one["step"] for one in run["notes"]] == [0, 1, 2, 3, 4], "its epoch from the start, six steps in all"


def test_steps_of_another_size_and_another_seed_are_refused(worker: Any, whole: Any, tmp_path: Path) -> None:
    """DR-02: never silently from a wrong place."""
    checkpoint = str(whole[1] / "checkpoint-2")
    with pytest.raises(LoaderStateError, match=r"have 6 samples, those of this run 12: .* ranks at 6$"):
        _dropping(worker, tmp_path, count=4).train(resume_from_checkpoint=checkpoint)
    with pytest.raises(LoaderStateError, match="pass the same seed="):
        _dropping(worker, tmp_path, data_seed=1).train(resume_from_checkpoint=checkpoint)
    trainer = _dropping(worker, tmp_path, size=6, count=1)
    assert [one["step"] for one in worker.trained(trainer, Path(checkpoint))["notes"]] == [2, 3, 4, 5]


def test_other_loaders_are_still_skipped_and_the_function_is_put_back() -> None:
    def fail_inside() -> None:
        with nothing_skipped():
            assert trainer_module.skip_first_batches is not plain
            assert [batch.tolist() for batch in trainer_module.skip_first_batches(loader, 2)] == [[4, 5]]
            raise RuntimeError("stop")

    plain = trainer_module.skip_first_batches
    loader = torch.utils.data.DataLoader(list(range(6)), batch_size=2)
    with pytest.raises(RuntimeError, match="stop"):
        fail_inside()
    assert trainer_module.skip_first_batches is plain


# --- refusals


class Endless(torch.utils.data.IterableDataset):  # type: ignore[misc]
    def __iter__(self) -> Iterator[int]:
        yield 0


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            {"train_sampling_strategy": "group_by_length"},
            r"='group_by_length' decides .* choose 'random' or 'sequential'",
        ),
        ({"train_sampling_strategy": "batch_rebalance"}, "train_sampling_strategy='batch_rebalance' decides"),
        ({"auto_find_batch_size": True}, r"auto_find_batch_size=True .*BalanceOptions\(capacity_tokens=...\)"),
        ({"accelerator_config": {"split_batches": True}}, "accelerator_config.split_batches cuts batches again"),
        ({"accelerator_config": {"dispatch_batches": True}}, "accelerator_config.dispatch_batches cuts"),
    ],
)
def test_arguments_that_contradict_a_plan_are_refused(
    worker: Any, tmp_path: Path, given: dict[str, Any], text: str
) -> None:
    with pytest.raises(BalancerError, match="^this Trainer cannot be given balanced batches: .*" + text):
        balanced(worker, tmp_path, worker.Texts(9), **given).train()


def test_everything_in_the_way_is_named_at_once(worker: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = balanced(worker, tmp_path, Endless(), max_steps=1, average_tokens_across_devices=False)
    monkeypatch.setattr(trainer.args, "_n_gpu", 2)
    monkeypatch.setattr(type(trainer.args), "world_size", 2)
    monkeypatch.setattr(trainer, "get_cp_size", lambda: 2)
    with pytest.raises(BalancerError) as error:
        trainer.get_train_dataloader()
    for text in (
        "an iterable train_dataset has no index to plan with; give a map-style one",
        "one process with 2 GPUs (DataParallel) would split each batch anew; start one process per GPU with torchrun",
        "cp_size=2: ranks would share batches",
        "average_tokens_across_devices=False divides by the label tokens of one rank",
    ):
        assert text in str(error.value)
    trainer.train_dataset = None
    with pytest.raises(BalancerError, match="it has no train_dataset"):
        trainer.get_train_dataloader()


def test_losses_that_cannot_be_divided_by_the_step_are_refused(worker: Any, tmp_path: Path) -> None:
    """LN-02: models that give means, with a loss that is not a causal language model's or has more parts."""

    def trainer(**given: Any) -> Any:
        model = worker.new_model()
        model.accepts_loss_kwargs = False
        return balanced(worker, tmp_path, worker.Texts(9), model=model, **given)

    smoothed = trainer(label_smoothing_factor=0.1)
    with pytest.raises(
        BalancerError, match="label_smoothing_factor with Qwen2ForCausalLM, which does not take num_item"
    ):
        smoothed.get_train_dataloader()
    routed = trainer()
    routed.model.config.output_router_logits = True
    with pytest.raises(BalancerError, match="adds a loss of its router; pass a compute_loss_func= for both"):
        routed.get_train_dataloader()
    other = trainer(count=2)
    other._loss_shifts_labels = False
    with pytest.raises(BalancerError, match="Qwen2ForCausalLM does not take num_items_in_batch, so its loss is a mean"):
        other.get_train_dataloader()
    alone = trainer()
    alone._loss_shifts_labels = False
    assert len(alone.get_train_dataloader()) == 3, "a step of one micro-batch may be a mean"


def test_batches_without_labels_to_count_are_refused_where_a_step_has_several(worker: Any, tmp_path: Path) -> None:
    def unlabelled(features: Any) -> Any:
        return {name: one for name, one in worker.padded(features).items() if name != "labels"}

    with pytest.raises(BalancerError, match="batches of data_collator have no labels to count, so a loss would be a m"):
        balanced(worker, tmp_path, worker.Texts(9), count=2, data_collator=unlabelled).train()


def test_a_model_that_mixes_the_samples_of_a_pack_is_refused_before_training(worker: Any, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.MambaForCausalLM(
        transformers.MambaConfig(vocab_size=96, hidden_size=24, num_hidden_layers=1, state_size=4)
    )
    with pytest.raises(PackingError, match="carry state from one sample of a pack"):
        balanced(worker, tmp_path, worker.Texts(9), model=model).train()
    padded = balanced(worker, tmp_path, worker.Texts(9), model=model, data_collator=worker.padded)
    assert len(padded.get_train_dataloader()) == 3


def test_a_count_that_changes_while_training_is_refused(worker: Any, tmp_path: Path) -> None:
    class Changing(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            args.gradient_accumulation_steps = 1

    with pytest.raises(BalancerError, match="the Trainer took 1 micro-batches, and the step of the loader has more"):
        balanced(worker, tmp_path, worker.Texts(22), count=2, callbacks=[Changing()]).train()


def test_a_loader_that_is_not_ours_is_refused(worker: Any, tmp_path: Path) -> None:
    class Replaced(worker.Balanced):  # type: ignore[name-defined, misc]
        def get_train_dataloader(self) -> Any:
            return worker.Trainer.get_train_dataloader(self)

    with pytest.raises(
        BalancerError, match="Trainer loads from a DataLoaderShard: get_train_dataloader of BalancedTra"
    ):
        balanced(worker, tmp_path, worker.Texts(9), kind=Replaced, data_collator=worker.padded).train()


def test_options_of_another_kind_are_refused(worker: Any, tmp_path: Path) -> None:
    with pytest.raises(BalancerError, match=r"balance is a dict; give balancer.adapters.hf.BalanceOptions\(...\)"):
        balanced(worker, tmp_path, worker.Texts(9), balance={"policy": "lpt"})


def test_a_trainer_of_another_version_is_refused(worker: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = balanced(worker, tmp_path, worker.Texts(9))
    monkeypatch.delattr(trainer_module.Trainer, "_run_epoch")
    with pytest.raises(BalancerError, match=r"has another Trainer \(no _run_epoch\); install one that is as 5.24"):
        trainer.get_train_dataloader()


def test_the_mixin_is_a_trainer_in_front_of_others(worker: Any) -> None:
    assert issubclass(BalancedTrainerMixin, trainer_module.Trainer)
    assert worker.Balanced.__mro__.index(BalancedTrainerMixin) < worker.Balanced.__mro__.index(worker.Noting)
