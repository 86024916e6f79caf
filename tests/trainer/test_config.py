"""Options: defaults that work, values that are refused with a reason, and names that exist elsewhere."""

import dataclasses
import math
import subprocess
import sys
import typing
from typing import Any

import pytest
import tyro

from balancer.weights import LOSS_REDUCTIONS
from trainer.config import (
    AnyScheduleName,
    CheckConfig,
    ExportConfig,
    FitConfig,
    LossReduction,
    LRSchedule,
    PlanConfig,
    Policy,
    ScheduleName,
)
from trainer.errors import ConfigError
from trainer.lr_schedule import SCHEDULES
from trainer.profile_config import ProfileConfig
from trainer.resume_options import CHANGEABLE_ON_RESUME, refuse_changed_trajectory


@pytest.mark.parametrize("cls", [FitConfig, CheckConfig, PlanConfig])
def test_every_config_has_defaults_that_pass_its_own_checks(cls: type[FitConfig | CheckConfig | PlanConfig]) -> None:
    assert cls().data is None


@pytest.mark.parametrize(
    ("options", "offending", "allowed"),
    [
        ({"lr": -1.0}, "lr=-1", "above 0"),
        ({"lr": math.nan}, "lr=nan", "finite"),
        ({"lr": math.inf}, "lr=inf", "finite"),
        ({"eps": 0.0}, "eps=0", "above 0"),
        ({"clip_norm": 0.0}, "clip_norm=0", "above 0"),
        ({"global_batch_size": 0}, "global_batch_size=0", "at least 1"),
        ({"num_microbatches": 0}, "num_microbatches=0", "at least 1"),
        ({"capacity_tokens": -5}, "capacity_tokens=-5", "at least 1"),
        ({"capacity_patches": 0}, "capacity_patches=0", "at least 1"),
        ({"capacity_memory_gib": 0.0}, "capacity_memory_gib=0", "GiB above 0"),
        ({"capacity_memory_gib": math.nan}, "capacity_memory_gib=nan", "GiB above 0"),
        ({"capacity_memory_gib": 1e9}, "capacity_memory_gib=1e+09", "at most 8388608"),
        ({"pp_size": 0}, "pp_size=0", "at least 1"),
        ({"seed": -1}, "seed=-1", "at least 0"),
        ({"max_steps": 0}, "max_steps=0", "at least 1"),
        ({"epochs": 0.0}, "epochs=0", "above 0"),
        ({"epochs": math.inf}, "epochs=inf", "above 0"),
        ({"epochs": 1.0, "max_steps": 3}, "epochs=1 and max_steps=3", "the one that shall decide"),
        ({"eval_share": 1.0}, "eval_share=1", "from 0 below 1"),
        ({"min_lr_ratio": 1.5}, "min_lr_ratio=1.5", "from 0 to 1"),
        ({"wsd_decay_share": 0.0}, "wsd_decay_share=0", "above 0"),
        ({"betas": (0.9, 1.0)}, "betas=(0.9, 1.0)", "below 1"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1", "from 0"),
        ({"warmup_steps": -1}, "warmup_steps=-1", "at least 0"),
        ({"keep_last": 0}, "keep_last=0", "at least 1"),
        ({"max_replaced": -1}, "max_replaced=-1", "at least 0"),
        ({"policy": "best"}, "policy='best'", "joint, lpt, sequential, length_grouped"),
        ({"train_on": "user"}, "train_on='user'", "assistant, last, all"),
        ({"num_microbatches": 2, "min_num_microbatches": 3}, "min_num_microbatches=3", "num_microbatches=2"),
        ({"model": ""}, "model=''", "preset"),
        ({"data": " "}, "data=''", "shards"),
        ({"remote_cache_gib": 0.0}, "remote_cache_gib=0", "above 0"),
    ],
)
def test_a_value_outside_its_range_is_named_with_what_is_allowed(
    options: dict[str, Any], offending: str, allowed: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        FitConfig(**options)
    assert offending in str(caught.value)
    assert allowed in str(caught.value)


def test_the_check_and_the_plan_refuse_what_training_refuses() -> None:
    with pytest.raises(ConfigError, match="capacity_tokens=0"):
        CheckConfig(capacity_tokens=0)
    with pytest.raises(ConfigError, match="policy='random' is not one of"):
        CheckConfig(policy="random")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="dp_size=0"):
        PlanConfig(dp_size=0)
    with pytest.raises(ConfigError, match="show_sample=-1"):
        PlanConfig(show_sample=-1)


@pytest.mark.parametrize(
    ("options", "steps_per_epoch", "expected"),
    [
        ({"data": "mine.tar"}, 7, 7),
        ({}, 7, 35),  # the demo corpus has a default of its own
        ({"epochs": 3.0}, 7, 21),
        ({"epochs": 0.5}, 7, 4),
        ({"epochs": 0.01}, 7, 1),
        ({"epochs": 0.1}, 30, 3),  # 0.1 * 30 is a little above 3 in floating point
        ({"max_steps": 5}, 7, 5),
        ({"max_steps": 50}, 7, 50),
    ],
)
def test_the_number_of_steps_is_known_before_the_first(
    options: dict[str, Any], steps_per_epoch: int, expected: int
) -> None:
    assert FitConfig(**options).num_steps(steps_per_epoch) == expected
    assert PlanConfig(**options).num_steps(steps_per_epoch) == expected


def test_patches_are_limited_by_the_token_capacity_unless_given() -> None:
    assert FitConfig(capacity_tokens=100).patch_limit == 400
    assert FitConfig(capacity_tokens=100, capacity_patches=64).patch_limit == 64
    assert ProfileConfig(capacity_tokens=100).patch_limit == 400


def test_a_limit_on_memory_is_in_gib() -> None:
    assert FitConfig().activation_bytes is None
    assert PlanConfig(capacity_memory_gib=1.5).activation_bytes == 3 * 2**29


def test_choices_are_the_ones_that_are_registered() -> None:
    from balancer.planner import DEFAULT_POLICY
    from balancer.policies import POLICIES
    from balancer.schedule import build_schedule, schedule_names

    assert set(typing.get_args(Policy)) == set(POLICIES)
    assert FitConfig().policy == DEFAULT_POLICY
    assert typing.get_args(LossReduction) == LOSS_REDUCTIONS
    assert typing.get_args(LRSchedule) == SCHEDULES
    assert set(typing.get_args(AnyScheduleName)) == set(schedule_names())
    for name in typing.get_args(ScheduleName):
        assert build_schedule(name, stage_ranks=[0, 0], num_microbatches=1).name == name


def test_a_resume_may_change_how_but_not_what_is_trained() -> None:
    before = FitConfig(seed=1, pp_size=1, num_workers=0)
    refuse_changed_trajectory(before, dataclasses.replace(before, pp_size=2, num_workers=3, resume=True, max_steps=9))
    with pytest.raises(ConfigError, match=r"seed was 1 and is now 2; global_batch_size was 16 and is now 8"):
        refuse_changed_trajectory(before, dataclasses.replace(before, seed=2, global_batch_size=8))


def test_what_a_resume_may_change_are_options() -> None:
    assert {field.name for field in dataclasses.fields(FitConfig)} >= CHANGEABLE_ON_RESUME
    assert not CHANGEABLE_ON_RESUME & {"data", "seed", "global_batch_size", "train_on", "model", "eval_share"}
    assert not CHANGEABLE_ON_RESUME & {"capacity_tokens", "capacity_memory_gib", "step_tokens", "tail", "oversize"}


@pytest.mark.parametrize("cls", [FitConfig, CheckConfig, PlanConfig, ProfileConfig, ExportConfig])
def test_every_option_has_a_help_text(cls: type, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tyro.cli(cls, args=["--help"])
    help_text = capsys.readouterr().out
    for field in dataclasses.fields(cls):
        position = help_text.find("--" + field.name.replace("_", "-"))
        assert position >= 0, field.name
        # A lone option would be followed by its default only.
        following = help_text[position : position + 400]
        assert len([word for word in following.split("(default")[0].split() if word.isalpha()]) >= 2, field.name


def test_configs_are_made_without_torch_and_numba() -> None:
    code = "import sys; import trainer.cli_parse; print([m for m in ('torch', 'numba', 'pyarrow') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
