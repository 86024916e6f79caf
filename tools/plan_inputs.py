"""From the options of `balancer-analyze plan` to what is planned: samples, costs, layout, capacities.

    INDEX, or data --scan--> CostIndex --oversize, eligible--> ids + what is left out and why    \
    --model, --hardware  --CostModel.from_config--> costs per stage of the layout                 PlanInputs -> sequence
    --dp --pp --encoder --chunks --schedule --meet --> ParallelSpec, schedule                     /

A closed-form cost model can be made for any layout of the same ranks, which is what the comparison of layouts needs; a
measured one is of one layout alone.
"""

import re
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path

import numpy as np

from balancer.cost_model import CostModel
from balancer.errors import CostModelError, LayoutError, PlanError, ScheduleError
from balancer.fit_report import Fit, read_cost_model
from balancer.flops import FREEZABLE, RECOMPUTABLE
from balancer.hardware import NOMINAL, hardware, hardware_names
from balancer.layout import EncoderPlace, Layout, ParallelSpec
from balancer.model_config import model_shape, preset_names
from balancer.model_shape import ModelShape
from balancer.oversize import fit_oversize
from balancer.plan import Capacities
from balancer.plan_sequence import PlanSequence
from balancer.policies import get_policy, policy_names
from balancer.schedule import build_schedule, canonical_name, schedule_names
from balancer.select import Eligibility, eligible_ids
from dataloaders.encoder import ByteEncoder
from dataloaders.index import CostIndex
from tools.data_report import is_index
from tools.errors import AnalyzeError, UsageError
from tools.plan_command import PlanCommand
from tools.plan_data import NoRecords, Progress, estimator_of, open_data, processor_folder
from tools.plan_family import check_default_rules, of_another_family

BALANCERS = ("joint", "lpt")
"""Policies that stand for the balancer where one must: the first that was asked for."""
_SPREAD = ("phased", "nested")
_ALIKE = 0.6  # of the letters of a name that may be meant
_ARGUMENTS = (
    *("dp_size", "pp_size", "num_chunks", "encoder", "meet", "layers_per_stage", "frozen", "recompute", "lora_rank"),
    *("num_microbatches", "min_num_microbatches", "num_microbatches_multiple"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutChoice:
    """A layout and how it is run.

    Attributes:
        encoder: where the encoder is.
        schedule: registered name.
    """

    encoder: EncoderPlace
    schedule: str
    parallel: ParallelSpec


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanInputs:
    """What is planned.

    Attributes:
        command: the options.
        data: names of the data, as given.
        index: counts of all samples, after the oversize policy.
        eligibility: samples that are planned, and all others with reasons.
        shape: of the model; None with a measured cost model.
        costs, choice: the layout that was asked for.
        fit: evidence and ranges of a measured cost model.
        policies: to compare, in a fixed order.
        warnings: what the reader must know first: data that were counted for another model.
        notes: what the reader must know, one sentence each.
    """

    command: PlanCommand
    data: str
    index: CostIndex
    eligibility: Eligibility
    shape: ModelShape | None
    costs: CostModel
    choice: LayoutChoice
    fit: Fit | None
    capacities: Capacities
    policies: tuple[str, ...]
    warnings: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def main_policy(self) -> str:
        """The policy that stands for the balancer."""
        return next((name for name in BALANCERS if name in self.policies), self.policies[-1])

    def sequence(self, choice: LayoutChoice | None = None, *, lookahead_steps: int | None = None) -> PlanSequence:
        """Plans of every step: of the layout and look-ahead that were asked for, or of others on the same ranks."""
        command = self.command
        chosen = self.choice if choice is None else choice
        costs = self.costs if choice is None else self.costs_of(choice)
        # What look-ahead evens must not depend on the layout, or layouts would be compared on different steps.
        blind = self.costs if self.shape is None else closed_form(command, self.shape, one_rank(self.shape), layers=())
        return PlanSequence(
            index=self.index,
            ids=self.eligibility.ids,
            global_batch_size=command.step_samples,
            step_tokens=command.step_tokens,
            tail=command.tail,
            lookahead_steps=lookahead_steps or command.lookahead_steps,
            selection_cost=blind,
            layout=Layout(),
            parallel=chosen.parallel,
            cost_model=costs,
            capacities=self.capacities,
            schedule=chosen.schedule,
            policy=self.main_policy,
            seed=command.seed,
            shuffle=command.shuffle,
            dropped=self.eligibility.dropped,
        )

    def costs_of(self, choice: LayoutChoice) -> CostModel:
        """The cost model of a layout: closed form, or the measured one where its stages are the same."""
        if self.shape is None:
            return self.costs
        same = choice.parallel.stage_ranks == self.choice.parallel.stage_ranks
        return self.costs if same else closed_form(self.command, self.shape, choice.parallel, layers=())


def prepare(command: PlanCommand, progress: Progress | None = None) -> PlanInputs:
    """Open or scan the data, read the model, and check that the layout can run.

    Raises:
        UsageError: names of nothing, or options that do not go together.
        AnalyzeError: no sample is left to plan.
        BalancerError, DataError: a damaged index or model, or oversize samples under `error`, listing them.
    """
    policies = _policies(command)
    _check_names(command)
    shape = _shape(command)
    choice = chosen_layout(command, encoder=command.encoder or _default_encoder(shape), schedule=command.schedule)
    costs, fit = _costs(command, shape, choice.parallel)
    capacities = Capacities(
        tokens=command.capacity_tokens,
        patches=command.patch_limit,
        items=command.capacity_items,
        activation_bytes=command.activation_bytes,
    )
    if not any(is_index(name) for name in command.sources) and processor_folder(command) is None:
        check_default_rules(command, shape)
    opened = open_data(command, progress)
    index, notes = opened.index, list(opened.notes)
    fitted = fit_oversize(
        index,
        capacities,
        command.oversize,
        source=opened.source or NoRecords(),
        estimator=estimator_of(command, opened),
        encoder=ByteEncoder() if opened.rules is None else opened.rules.encoder,
    )
    rest = "error" if command.oversize == "error" else "drop"
    eligibility = eligible_ids(fitted.index, capacities, rest, why=fitted.why, cost_model=costs)
    if not len(eligibility.ids):
        first = f": the first is left out as {eligibility.dropped[0].reason}" if eligibility.dropped else ""
        raise AnalyzeError(
            f"no sample of {len(index)} is left to plan{first}. Raise the capacities of a micro-batch "
            "(--capacity-tokens ...), or repair the samples."
        )
    warning = of_another_family(command, shape, index.rules.get("media", ""), is_index=opened.rules is None)
    cost_note = costs.note.replace(hardware(NOMINAL).note, "").strip("; ")  # the report has its own words for that
    said = (fitted.report.text(), _dropped(command, eligibility), cost_note, _encoderless(fitted.index, choice))
    notes += [text for text in said if text]
    return PlanInputs(
        command=command,
        data=", ".join(command.sources),
        index=fitted.index,
        eligibility=eligibility,
        shape=shape,
        costs=costs,
        choice=choice,
        fit=fit,
        capacities=capacities,
        policies=policies,
        warnings=(warning,) if warning else (),
        notes=tuple(notes),
    )


def chosen_layout(command: PlanCommand, *, encoder: EncoderPlace, schedule: str | None) -> LayoutChoice:
    """The layout of the ranks that the options name, with the encoder and the schedule given here.

    Raises:
        UsageError: degrees that make no layout, or a schedule that does not exist or cannot run it.
    """
    if encoder == "spread" and (schedule or "nested").lower() in set(schedule_names()) - set(_SPREAD):
        raise UsageError(f"--encoder spread --schedule {schedule}: a spread encoder needs --schedule phased or nested.")
    try:
        parallel = ParallelSpec.pipeline(
            dp_size=command.dp_size,
            pp_size=command.pp_size,
            encoder=encoder,
            num_chunks=command.num_chunks,
            num_microbatches=command.num_microbatches,
            min_num_microbatches=command.min_num_microbatches,
            num_microbatches_multiple=command.num_microbatches_multiple,
            meet=command.meet,
        )
        name = canonical_name(schedule or default_schedule(command, encoder))
        llm = parallel.domain("llm")
        # A number of micro-batches that every schedule of this layout takes: whole groups of ranks.
        build_schedule(name, parallel=parallel, num_microbatches=len(llm.ranks) if llm else 1)
    except (LayoutError, ScheduleError) as error:
        raise UsageError(
            f"{in_options(str(error))}. Change --schedule, --encoder, --chunks, --pp or the number of micro-batches."
        ) from None
    return LayoutChoice(encoder=encoder, schedule=name, parallel=parallel)


def in_options(text: str) -> str:
    """A message of the planner with the names of its arguments as options: `pp_size=3` as `--pp-size 3`."""

    def option(found: re.Match[str]) -> str:
        values = " ".join(re.sub(r"[\[\]()',]", " ", found[2]).split())
        return f"--{found[1].replace('_', '-')} {values}"

    text = re.sub(r" with stage_ranks=\[[^\]]*\]", "", text)
    return re.sub(rf"\b({'|'.join(_ARGUMENTS)})=(\[[^\]]*\]|\([^)]*\)|'[^']*'|-?\d+)", option, text)


def default_schedule(command: PlanCommand, encoder: EncoderPlace) -> str:
    """The schedule of a layout where none is named."""
    if encoder == "spread":
        return "nested"
    return "interleaved1f1b" if command.num_chunks > 1 else "1f1b"


def one_rank(shape: ModelShape) -> ParallelSpec:
    """All of a model on one rank."""
    return ParallelSpec.pipeline(encoder=_default_encoder(shape))


def closed_form(
    command: PlanCommand, shape: ModelShape, parallel: ParallelSpec, *, layers: tuple[int, ...]
) -> CostModel:
    """Costs of the model on the stages of a layout; `layers` per LLM stage, () for an even split."""
    return CostModel.from_config(
        shape,
        parallel,
        command.hardware,
        frozen=command.frozen,
        recompute=command.recompute,
        lora_rank=command.lora_rank,
        layers_per_stage=layers or None,
    )


def _policies(command: PlanCommand) -> tuple[str, ...]:
    asked = [name for text in command.policies for name in text.replace(",", " ").split()]
    try:
        names = {get_policy(name).name for name in asked} or set(policy_names())
    except PlanError as error:
        raise UsageError(f"--policies: {error}.") from None
    # From no balancing at all to ours; what is registered beside them comes between, by name.
    known = {"sequential": 0, "length_grouped": 1, "lpt": 3, "joint": 4}
    return tuple(sorted(names, key=lambda name: (known.get(name, 2), name)))


def _check_names(command: PlanCommand) -> None:
    """Modules and accelerators that do not exist: the planner takes any accelerator, a person has mistyped one."""
    for option, names, known in (
        ("--frozen", command.frozen, FREEZABLE),
        ("--recompute", command.recompute, (*RECOMPUTABLE, "all")),
    ):
        wrong = [name for name in names if name not in known]
        if wrong:
            raise UsageError(f"{option} {' '.join(wrong)}: there is no such module. Modules: {', '.join(known)}.")
    if command.hardware.lower() == NOMINAL or hardware(command.hardware).known:
        return
    asked = command.hardware.lower()
    likeness = {name: SequenceMatcher(None, asked, name[: len(asked)]).ratio() for name in hardware_names()}
    near = [name for name in sorted(likeness, key=lambda name: -likeness[name]) if likeness[name] >= _ALIKE][:3]
    meant = f"Did you mean {' or '.join(near)}? " if near else ""
    raise UsageError(
        f"--hardware {command.hardware} is not known. {meant}Known are {', '.join(hardware_names())}; without "
        "--hardware times are ratios."
    )


def _shape(command: PlanCommand) -> ModelShape | None:
    if command.model is None:
        return None
    if command.model.lower() not in preset_names() and not _exists(command.model):
        raise UsageError(
            f"--model {command.model[:200]}: neither a preset ({', '.join(preset_names())}) nor a path to a folder "
            "with a config.json."
        )
    return model_shape(command.model)


def _default_encoder(shape: ModelShape | None) -> EncoderPlace:
    return "none" if shape is not None and shape.encoder is None else "own"


def _costs(command: PlanCommand, shape: ModelShape | None, parallel: ParallelSpec) -> tuple[CostModel, Fit | None]:
    if shape is not None:
        try:
            return closed_form(command, shape, parallel, layers=command.layers_per_stage), None
        except CostModelError as error:
            raise UsageError(
                f"{in_options(str(error))}. Change --model, --encoder, --layers-per-stage, --frozen or --recompute."
            ) from None
    name = str(command.cost_model or "")
    if not _exists(name) or not Path(name).expanduser().is_file():
        raise UsageError(f"--cost-model {name[:200]}: no such file. Write one with balancer-train profile.")
    path = Path(name).expanduser()
    costs, fit = read_cost_model(path)
    other = costs.other_split(parallel.domain_of_stage)
    if other:
        raise UsageError(
            f"--cost-model {path} {other}. Measure this layout, or give --pp, --encoder and --chunks of the measured "
            "one."
        )
    return costs, fit


def _exists(name: str) -> bool:
    """Whether there is a path of that name; what can be no path (too long, `~` of an unknown user) is none."""
    try:
        return Path(name).expanduser().exists()
    except (OSError, RuntimeError, ValueError):
        return False


def _dropped(command: PlanCommand, eligibility: Eligibility) -> str:
    """That training does not leave out by itself what this command does; "" where it is nothing."""
    if command.oversize != "drop" or not eligibility.num_oversize:
        return ""
    return (
        f"{eligibility.num_oversize} samples are larger than a micro-batch and left out here; balancer-train stops at "
        "them unless it is told --oversize drop, shrink or truncate_text"
    )


def _encoderless(index: CostIndex, choice: LayoutChoice) -> str:
    """What is missing where media meet a layout without an encoder; "" where nothing is."""
    with_media = int((np.asarray(index.samples["patches"]) > 0).sum())
    if choice.encoder != "none" or not with_media:
        return ""
    return f"{with_media} samples hold media, and no encoder is planned: only their tokens in the LLM cost time"
