"""The cost model that a run plans with: closed form, or the file of a calibration; and a word where that file ends.

    --cost-model cost.json -> read_cost_model -> stages and model checked -> PlanSequence
    every plan             -> counts of its cells -> RangeWatch: one line per term and stage, once

A calibration of another split (domains, or layers of a stage) or of another model is refused: its times would look as
good as the right ones. Ranks do not matter: one rank and two have the same stages.
"""

import hashlib
import shlex
from collections.abc import Callable
from pathlib import Path

from balancer.cost_model import CostModel
from balancer.counts import StepCounts
from balancer.errors import CostModelError
from balancer.fit_report import Fit, read_cost_model
from balancer.layout import Layout
from balancer.observations import plan_cells
from balancer.plan import StepPlan
from trainer.config import PlacementOptions, StepOptions
from trainer.errors import ConfigError
from trainer.model_source import ModelSource, cost_model_for
from trainer.option_checks import GIB


def chosen_cost_model(path: Path | None, model: ModelSource, layout: Layout) -> tuple[CostModel, Fit | None]:
    """What `--cost-model` names, or the closed form of `model` where it names nothing.

    Raises:
        ConfigError: a file that cannot be read, or that was measured on another model or another split.
    """
    closed = cost_model_for(model.config, layout)
    if path is None:
        return closed, None
    try:
        costs, fitted = read_cost_model(_expanded(path))
    except CostModelError as error:
        raise ConfigError(f"--cost-model {error}. Write one with balancer-train profile.") from None
    command = f"balancer-train profile --model {shlex.quote(model.name)} --pp-size {layout.pp_size}"
    remedy = f"Measure this one: {command}"
    digest = None if fitted is None else fitted.subject.get("model_digest")
    if digest not in (None, model_digest(model)):
        raise ConfigError(
            f"--cost-model {path} was measured on {fitted.subject.get('model') if fitted else '?'!r}, a model of other "
            f"sizes than {model.name!r}. {remedy}"
        )
    other = costs.other_split(closed.domains, closed.layers)
    if other:
        raise ConfigError(f"--cost-model {path} {other} (pp_size={layout.pp_size}). {remedy}")
    return costs, fitted


def _expanded(path: Path) -> Path:
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise CostModelError(f"{path}: {error}") from None


def memory_model(options: PlacementOptions, model: ModelSource, layout: Layout) -> CostModel | None:
    """What models the bytes under `capacity_memory_gib`: the cost model of the run; None where bytes are not limited.

    Raises:
        ConfigError: as `chosen_cost_model`, a file that says nothing about bytes, or a limit that holds no sample.
    """
    if options.activation_bytes is None:
        return None
    path = options.cost_model if isinstance(options, StepOptions) else None
    costs, _ = chosen_cost_model(path, model, layout)
    if costs.memory is None:
        raise ConfigError(
            f"--capacity-memory-gib {options.capacity_memory_gib:g} needs modelled bytes, and --cost-model {path} has "
            f"no memory part. Leave one of the two out, or write the file anew with balancer-train profile."
        )
    least = int(costs.activation_constant_bytes().max())
    if least >= options.activation_bytes:
        raise ConfigError(
            f"capacity_memory_gib={options.capacity_memory_gib:g} holds no sample: a micro-batch without any takes "
            f"{least / GIB:.3g} GiB on stage {int(costs.activation_constant_bytes().argmax())}. Raise it."
        )
    return costs


def model_digest(model: ModelSource) -> str:
    """sha256 of the sizes of a model: its cost does not depend on its weights."""
    return hashlib.sha256(model.config.to_json().encode()).hexdigest()


class RangeWatch:
    """Reports, once per term and stage, that a plan holds micro-batches outside the calibrated ranges.

    Args:
        fitted: the calibration; None: nothing to watch.
        report: takes one line of text.
    """

    def __init__(self, fitted: Fit | None, report: Callable[[str], None]) -> None:
        self._fitted, self._report = fitted, report
        self._said: set[str] = set()

    def look(self, plan: StepPlan, counts: Callable[[], StepCounts]) -> None:
        """Compare a plan's cells with the ranges; `counts` of its samples are asked for only if there is a watch."""
        if self._fitted is None:
            return
        cells = plan_cells(plan, counts(), causal_window=self._fitted.causal_window)
        for sentence in self._fitted.extrapolates(cells):
            what = sentence.partition(":")[0]
            if what not in self._said:
                self._said.add(what)
                self._report(f"step {plan.step + 1} is planned beyond the calibration: {sentence}")
