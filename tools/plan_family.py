"""Whose processor counted the data, and whose costs they are planned with: said where the two are not of one family.

    rule of the counts   "LLaVA, transformers 5.24 processor: ..."   --family_of-->     "LLaVA"
    model of the costs   preset, folder or config.json               --model_family-->  "LLaVA"

Patches and visual tokens of one family mean nothing under the costs of another: a picture of 1,000 px is 1,300 tokens
to one and 576 to the next.
"""

from pathlib import Path

from balancer.model_config import preset_names
from balancer.model_presets import PRESET_CONFIGS
from balancer.model_shape import ModelShape
from dataloaders.errors import DataError
from dataloaders.estimators import estimator_from_config
from tools.errors import UsageError
from tools.model_folder import PUBLISHED, load_estimator
from tools.plan_command import PlanCommand

_SAME_COUNTS = {"Qwen2-VL": "Qwen2.5-VL"}  # one rule; only the defaults of videos differ
_PLANNED_AS = "what this model would get may be far from that"


def family_of(rule: str) -> str:
    """The family that a rule in words begins with; "" where there is no rule."""
    family = rule.partition(",")[0].strip()
    return _SAME_COUNTS.get(family, family)


def model_family(model: str | None) -> str:
    """The family of a model's own processor; "" where no rule for it is known, or for None (measured costs)."""
    if model is None:
        return ""
    try:
        if model.lower() in preset_names():
            return family_of(estimator_from_config(dict(PRESET_CONFIGS[model.lower()])).rule)
        folder = config_folder(model)
        return "" if folder is None else family_of(load_estimator(folder).rule)
    except DataError:
        return ""


def config_folder(model: str) -> Path | None:
    """The folder of a model that is a folder or its config.json; None for a preset."""
    if model.lower() in preset_names():
        return None
    path = Path(model).expanduser()
    if path.is_file() and path.name == "config.json":
        path = path.parent
    return path if path.is_dir() else None


def check_default_rules(command: PlanCommand, shape: ModelShape | None) -> None:
    """Refuse to count data by the published Qwen2.5-VL settings for a model of another family.

    Raises:
        UsageError: with the remedy.
    """
    own = model_family(command.model)
    default = family_of(estimator_from_config(PUBLISHED).rule)
    if shape is None or shape.encoder is None or own in ("", default):
        return
    raise UsageError(
        f"--model {command.model} is {own} and brings no processor of its own, so media would be counted by the "
        f"published {default} settings: {_PLANNED_AS}. Name a folder that holds its processor's files: --processor "
        "FOLDER."
    )


def of_another_family(command: PlanCommand, shape: ModelShape | None, rule: str, *, is_index: bool) -> str:
    """What the reader must know first where data were counted for another family than the model's; "" otherwise."""
    counted, own = family_of(rule), model_family(command.model)
    if shape is None or shape.encoder is None or not counted or not own or counted == own:
        return ""
    remedy = (
        "index the data with the model's own processor (balancer-analyze index DATA --model FOLDER)"
        if is_index
        else "name the model's own with --processor FOLDER"
    )
    return (
        f"media are counted by the rules of {counted}, but the costs are those of {own} ({command.model}): "
        f"{_PLANNED_AS}; {remedy}"
    )
