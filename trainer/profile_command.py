"""`balancer-train profile`: run a designed set of micro-batches, fit the cost model, say how good it is, store it.

    designed_set                            \
                                             build -> per repetition, in a new order: executor (F and B of all stages)
    workload_set (other seed, other shapes) /            -> Observations
        designed ones -> calibration.fit -> Fit;  the others -> accuracy of the Fit           --> cost.json

One process measures every stage of any split: the stages lie on it one behind the other. Under torchrun each rank runs
its own, one micro-batch at a time, as in training but without neighbours that compute at the same moment; price: what
ranks of one host take from each other (memory bandwidth) is not in the numbers.

The first run of every micro-batch is thrown away: it pays for memory and kernels that later ones reuse. What is fitted
and what checks the fit are measured in turn, so that a machine which slows down in between does not pass for a bad fit;
price: it does not tell either that the numbers hold tomorrow.
"""

import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
from rich.console import Console

from balancer.batch import MicroBatch
from balancer.calibration import accuracy, fit
from balancer.cost_model import CostModel
from balancer.fit_report import Accuracy, Fit
from balancer.layout import Layout
from balancer.observations import Observations, cell_counts
from balancer.printable import printable
from balancer.records import ActionRecord
from balancer.schedule import build_schedule
from trainer.calibrated import model_digest
from trainer.comm import Comm, communicator, launched_world_size, single_process
from trainer.config import FitConfig
from trainer.errors import ConfigError
from trainer.executor import Edge, Executor, Piece
from trainer.model_source import ModelSource, cost_model_for, load_model_source
from trainer.pieces import ModelPieces
from trainer.profile_config import ProfileConfig
from trainer.profile_set import MicroBatchShape, build, counts, designed_set, pixel_pool, workload_set

TIMERS: dict[str, Callable[[], float]] = {"wall": time.perf_counter, "cpu": time.thread_time}
# Whatever the seed of the designed set, the check draws from another one.
_VERIFY_SEED = 2**62
_FIT_DEFAULTS = {field.name: field.default for field in fields(FitConfig)}


class Subject:
    """The stages that this rank measures, and how to run one micro-batch through them.

    Args:
        model: which model.
        config: split, arithmetic and clock.
        comm: of a torchrun job with one replica, or of one process, which then holds all stages.
    """

    def __init__(self, model: ModelSource, config: ProfileConfig, comm: Comm) -> None:
        self.model, self._comm = model, comm
        self.layout = Layout(dp_size=1, pp_size=config.pp_size)
        autocast = config.dtype == "bf16" and comm.device.type == "cuda"
        alone = comm.world_size == 1
        parts = [
            ModelPieces.build(
                model, layout=self.layout, pp_rank=pp_rank, seed=config.seed, device=comm.device, autocast=autocast
            )
            for pp_rank in (range(config.pp_size) if alone else [comm.pp_rank])
        ]
        self._parts, self._timer = parts, TIMERS[config.clock]
        self._stage_ranks = [0] * self.layout.num_stages if alone else list(self.layout.stage_ranks())
        self._stages: dict[int, Piece] = {stage: piece for part in parts for stage, piece in part.by_stage().items()}

    def run(self, batch: MicroBatch) -> tuple[ActionRecord, ...]:
        """Forward and backward of one micro-batch; the timed acts of this rank."""
        schedule = build_schedule("1f1b", stage_ranks=self._stage_ranks, num_microbatches=1)
        num_visual = int(batch.visual_index.numel())
        schedule = schedule if num_visual else schedule.without({(0, 0)})
        edges: list[Edge] = self._parts[0].edges_of([num_visual], [int(batch.tokens.numel())])
        executor = Executor(pieces=self._stages, edges=edges, comm=self._comm, timer=self._timer)
        moved = batch.to(self._comm.device, self._parts[0].dtype)
        if self._comm.device.type == "cuda":
            torch.cuda.synchronize(self._comm.device)
        return executor.run(schedule, [moved], loss_scale=1.0 / max(1.0, batch.weight_sum)).actions

    def observe(self, shapes: Sequence[MicroBatchShape], *, repeats: int, seed: int) -> Observations:
        """Measure all `shapes`, `repeats` times after one run that does not count; the same on every rank."""
        rng = np.random.Generator(np.random.Philox(seed))
        pixels = pixel_pool(shapes, self.model.config)
        batches = [build(shape, self.model.config, seed=seed + row, pixels=pixels) for row, shape in enumerate(shapes)]
        acts: list[tuple[int, ActionRecord]] = []
        for repetition in range(repeats + 1):
            for row in rng.permutation(len(batches)).tolist():
                measured = self.run(batches[row])
                acts += [(row, act) for act in measured if repetition]
        for part in self._parts:
            part.zero_grad()
        acts = [item for items in self._comm.gather(acts) for item in items]
        samples, cell_of_sample = counts(shapes, self.model.config)
        return Observations(
            cells=cell_counts(samples, cell_of_sample, num_cells=len(shapes)),
            cell=np.array([row for row, _ in acts], dtype=np.int64),
            stage=np.array([act.stage for _, act in acts], dtype=np.int64),
            op=np.array([act.op for _, act in acts], dtype="U1"),
            # Records are rounded to 100 ns; an act is never free.
            duration_ns=np.array([max(100, round((act.end_ms - act.start_ms) * 1e6)) for _, act in acts]),
        )


def profile(model: ModelSource, config: ProfileConfig, comm: Comm) -> Fit:
    """Measure, fit and verify; the same result on every rank.

    Raises:
        ConfigError: capacities too small to profile, or a split that the model does not have.
    """
    subject = Subject(model, config, comm)
    merge = model.config.vision.merge
    limits = {"capacity_tokens": config.capacity_tokens, "capacity_patches": config.patch_limit, "merge": merge}
    shapes = designed_set(count=config.profile_microbatches, seed=config.seed, **limits)
    others = workload_set(count=config.verify_microbatches, seed=config.seed ^ _VERIFY_SEED, **limits)
    observed = subject.observe([*shapes, *others], repeats=config.repeats, seed=config.seed)
    closed: CostModel = cost_model_for(model.config, subject.layout)
    fitted = fit(
        observed.between(0, len(shapes)),
        domains=closed.domains,
        layers=closed.layers,
        memory=closed.memory,
        subject=_described(model, config, comm),
    )
    fitted = replace(fitted, verified=accuracy(fitted, observed.between(len(shapes), len(observed.cells))))
    doubts = fitted.doubts()
    if not doubts:
        return fitted
    note = "; ".join([f"NOT TO BE TRUSTED: {text}" for text in doubts] + [fitted.model.note])
    return replace(fitted, model=replace(fitted.model, note=note))  # whoever plans with the file reads it too


def run_profile(config: ProfileConfig) -> int:
    """Profile, print the report and write `config.output`; returns the exit code."""
    model = load_model_source(config.model)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    if launched_world_size() not in (1, config.pp_size):
        raise ConfigError(
            f"torchrun started {launched_world_size()} processes for pp_size={config.pp_size}: profile measures one "
            f"replica. Start {config.pp_size} processes, or one, which then runs all stages in turn."
        )
    if launched_world_size() == 1:
        _finish(config, profile(model, config, single_process()))
        return 0
    with communicator(pp_size=config.pp_size) as comm:
        fitted = profile(model, config, comm)
        if comm.is_main:
            _finish(config, fitted)
    return 0


def _finish(config: ProfileConfig, fitted: Fit) -> None:
    console = Console(soft_wrap=True)
    config.output.parent.mkdir(parents=True, exist_ok=True)
    config.output.write_text(fitted.to_json() + "\n", encoding="utf-8")
    for line in fitted.lines():
        console.print(line, markup=False, highlight=False)
    if fitted.verified:
        console.print(f"predicted against measured, other shapes: {_worst(fitted.verified)}", highlight=False)
    doubts = fitted.doubts()
    for text in doubts:
        console.print(f"WARNING: {text}", markup=False, highlight=False)
    console.print(_last_line(config, trusted=not doubts), markup=False, highlight=False)


def _last_line(config: ProfileConfig, *, trusted: bool) -> str:
    path = printable(str(config.output))
    if trusted:
        return f"wrote {path}; plan with it: {fit_command(config)}"
    return (
        f"wrote {path}, but this fit is not to be trusted, see the warnings: train without --cost-model, or profile "
        "again as they say"
    )


def fit_command(config: ProfileConfig) -> str:
    """The command that trains with the file: with the options that must be those of the measurement, where given."""
    options = [f"--{name.replace('_', '-')} {_quoted(value)}" for name, value in _shared_options(config)]
    return " ".join(["balancer-train fit", *options, f"--cost-model {_quoted(config.output)}"])


def _shared_options(config: ProfileConfig) -> Iterator[tuple[str, Any]]:
    """(name, value) of what a measurement holds for, except where both commands have it by default."""
    yield "model", config.model
    for name in ("pp_size", "capacity_tokens", "capacity_patches", "threads", "dtype"):
        value = getattr(config, name)
        if value != _FIT_DEFAULTS[name]:
            yield name, value


def _quoted(value: Any) -> str:
    return shlex.quote(printable(str(value)))


def _worst(rows: Sequence[Accuracy]) -> str:
    median, p95 = max(row.median for row in rows), max(row.p95 for row in rows)
    return f"median error at most {median:.1%}, p95 at most {p95:.1%} in every stage and op"


def _described(model: ModelSource, config: ProfileConfig, comm: Comm) -> dict[str, Any]:
    device = torch.cuda.get_device_name(comm.device) if comm.device.type == "cuda" else "cpu"
    return {
        "model": model.name,
        "model_digest": model_digest(model),
        "pp_size": config.pp_size,
        "device": device,
        "dtype": config.dtype,
        "threads": torch.get_num_threads(),
        "clock": config.clock if comm.device.type == "cpu" else "cuda events",
        "torch": torch.__version__,
        "seed": config.seed,
    }
