"""Spellings of other trainers are answered with ours."""

import dataclasses

import pytest

from trainer.aliases import _TABLE, lookup
from trainer.config import FitConfig


@pytest.mark.parametrize(
    ("spelling", "ours", "part_of_answer"),
    [
        ("per_device_train_batch_size", "global_batch_size", "per-device size x accumulation x replicas"),
        ("--per-device-train-batch-size", "global_batch_size", "all ranks"),
        ("gradient_accumulation_steps", "num_microbatches", "the plan"),
        ("num_train_epochs", "epochs", "same"),
        ("learning_rate", "lr", "same"),
        ("cutoff_len", "capacity_tokens", "never cut"),
        ("max_length", "capacity_tokens", "micro-batch"),
        ("--seq-length", "capacity_tokens", "micro-batch"),
        ("packing", None, "packed without padding"),
        ("neat_packing", "policy", "joint"),
        ("--micro-batch-size", "capacity_tokens", "mean tokens"),
        ("--train-iters", "max_steps", "one of our steps"),
        ("--train-samples", "max_steps", "train_samples / global_batch_size"),
        ("lr_scheduler_type", "lr_schedule", "wsd"),
        ("warmup_ratio", "warmup_steps", "warmup_ratio x steps"),
        ("--min-lr", "min_lr_ratio", "min_lr / lr"),
        ("max_grad_norm", "clip_norm", "same"),
        ("output_dir", "output", "folder"),
        ("--pipeline-model-parallel-size", "pp_size", "encoder"),
        ("bf16", "dtype", "autocast"),
        ("report_to", None, "nothing is sent"),
    ],
)
def test_a_foreign_spelling_is_answered(spelling: str, ours: str | None, part_of_answer: str) -> None:
    alias = lookup(spelling)
    assert alias is not None
    assert alias.ours == ours
    assert part_of_answer in alias.answer


def test_case_and_dashes_do_not_matter() -> None:
    assert lookup("--Learning-Rate") == lookup("learning_rate")
    assert lookup("no_such_thing") is None


def test_answers_point_to_options_that_exist_and_hide_none_of_ours() -> None:
    ours = {field.name for field in dataclasses.fields(FitConfig)}
    for name, alias in _TABLE.items():
        assert alias.ours is None or alias.ours in ours | {"config"}, name
        assert name not in ours, f"{name} is an option of ours"
        assert name == name.lower()
        assert alias.answer.strip() == alias.answer
        assert not alias.answer.endswith("."), "the caller ends the sentence"
