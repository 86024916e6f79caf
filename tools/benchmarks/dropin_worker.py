"""One rank of `tools.benchmarks.dropin steps`: torchrun ... dropin_worker.py OPTIONS.json, rank 0 writes the result.

    fit     random cells, all ranks at once          -> CostModel, from rank 0 to all
    steps   a global batch  --4 methods--> this rank's micro-batches, loaded before anything is timed
                A B C D   D C B A   A B C D ...      each: barrier | forward, backward of M | sum gradients, AdamW |

Ranks meet once a step: gradients are summed in one collective behind the last backward, as DDP does under `no_sync`,
without overlap. AdamW runs with a learning rate of 0, so that all methods work on the same weights and their losses
must agree. `compute` is a rank's own time up to the collective; what is left of the step is waiting, the collective and
the optimizer.

Ours, `sequential` and `length_grouped` come through `BalancedDataLoader`, `batch_rebalance` through a plain DataLoader
with its lists of indices as batch sampler.
"""

import gc
import importlib
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from balancer.cost_model import CostModel
from balancer.counts import Int64Array, StepCounts
from tools.benchmarks.dropin_fit import CellFit, cell_ms, columns, fit_cells, random_cells
from tools.benchmarks.dropin_methods import METHODS, OURS, REBALANCE, StepSetup, place
from tools.benchmarks.dropin_mixes import Mix
from tools.benchmarks.dropin_models import Trainable, build

_FIT_SEED = 1000  # apart from the samples of the steps
_REST_RUNS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """What a world of ranks measures; as JSON in a file.

    Attributes:
        model, mixes: what runs on what. tiny: the smallest model.
        num_steps, rounds: steps of each mix; passes of all methods over a step are twice the rounds.
        fit_cells, fit_repeats: micro-batches to fit, and how often each runs.
    """

    model: str
    mixes: tuple[str, ...]
    output: str
    tiny: bool = False
    num_microbatches: int = 2
    batch_size: int = 6
    capacity_tokens: int | None = None
    capacity_patches: int | None = None
    num_steps: int = 20
    rounds: int = 2
    fit_cells: int = 36
    fit_repeats: int = 4
    seed: int = 0

    def setup(self, num_ranks: int) -> StepSetup:
        """The part that decides who runs what."""
        return StepSetup(
            num_ranks=num_ranks,
            num_microbatches=self.num_microbatches,
            batch_size=self.batch_size,
            capacity_tokens=self.capacity_tokens,
            capacity_patches=self.capacity_patches,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One measured step.

    Attributes:
        step, turn: of the mix; which pass over the step. method: who shared it out.
        step_ms: barrier to the end of the optimizer, on the slowest rank.
        compute_ms: own time of every rank [R]. predicted_ms: the same, predicted.
        predicted_step_ms: the longest of them, and what every step takes beside.
        wait_ms: until the micro-batches of the step were loaded, on the slowest rank; not part of the step.
        loss: of the step, over all its label tokens.
    """

    model: str
    mix: str
    step: int
    turn: int
    method: str
    num_microbatches: int
    step_ms: float
    compute_ms: tuple[float, ...]
    predicted_ms: tuple[float, ...]
    predicted_step_ms: float
    wait_ms: float
    loss: float


class Rank:
    """This process among the ranks: runs micro-batches of a model and tells what all ranks measured."""

    def __init__(self, model: Trainable) -> None:
        self.torch, self.dist = importlib.import_module("torch"), importlib.import_module("torch.distributed")
        self.model, self.rank, self.num_ranks = model, self.dist.get_rank(), self.dist.get_world_size()
        self._optimizer = self.torch.optim.AdamW(model.parameters, lr=0.0)
        self._flat = self.torch.zeros(sum(parameter.numel() for parameter in model.parameters))

    def gather(self, value: Any) -> list[Any]:
        """The value of every rank."""
        values = [None] * self.num_ranks
        self.dist.all_gather_object(values, value)
        return values

    def step(self, batches: Sequence[Any], label_tokens: int) -> tuple[float, list[float], float]:
        """(ms of the step on the slowest rank, own ms of every rank, loss) of one optimizer step."""
        prepared = [self.model.prepare(batch) for batch in batches]
        self.dist.barrier()
        start, loss = time.perf_counter(), 0.0
        for batch in prepared:
            part = self.model.loss_sum(batch) / label_tokens
            part.backward()
            loss += part.item()
        computed = time.perf_counter()
        self._sum_gradients()
        self._optimizer.step()
        end = time.perf_counter()
        self._optimizer.zero_grad(set_to_none=True)
        told = self.gather((1e3 * (end - start), 1e3 * (computed - start), loss))
        return max(t[0] for t in told), [t[1] for t in told], sum(t[2] for t in told)

    def cell_ms(self, batch: Any) -> float:
        """Forward and backward of one micro-batch on this rank alone."""
        prepared = self.model.prepare(batch)
        start = time.perf_counter()
        self.model.loss_sum(prepared).backward()
        elapsed = time.perf_counter() - start
        self._optimizer.zero_grad(set_to_none=True)
        return 1e3 * elapsed

    def _sum_gradients(self) -> None:
        """One collective over all parameters; those that this rank did not use (no media) count as zero."""
        parts = self._flat.split([parameter.numel() for parameter in self.model.parameters])
        for part, parameter in zip(parts, self.model.parameters, strict=True):
            if parameter.grad is None:
                part.zero_()
            else:
                part.copy_(parameter.grad.view(-1))
        self.dist.all_reduce(self._flat)
        for part, parameter in zip(parts, self.model.parameters, strict=True):
            parameter.grad = part.view_as(parameter)


def fit_on(rank: Rank, options: WorkerOptions) -> tuple[CellFit, float]:
    """(the fit that all ranks share, milliseconds of a step beside its micro-batches)."""
    collate = importlib.import_module("balancer.batch").collate
    largest = 2 * options.batch_size
    mixes = {name: Mix(name, 8 * largest, seed=_FIT_SEED + options.seed) for name in options.mixes}
    cells = random_cells(
        {name: mix.shapes for name, mix in mixes.items()}, count=options.fit_cells, largest=largest, seed=options.seed
    )
    table = np.concatenate([_columns_of(mixes, cell) for cell in cells])
    times: list[list[float]] = [[] for _ in cells]
    for turn in range(options.fit_repeats + 1):
        for number in np.random.Generator(np.random.Philox(turn)).permutation(len(cells)).tolist():
            batch = collate([mixes[name][sample] for name, sample in cells[number]])
            elapsed = rank.cell_ms(batch)
            if turn:  # the first pays for memory
                times[number].append(elapsed)
        rank.dist.barrier()
    told = rank.gather([statistics.median(own) for own in times])
    fitted = [fit_cells(table, np.mean(told, axis=0)) if rank.rank == 0 else None]
    rank.dist.broadcast_object_list(fitted)
    if fitted[0] is None:
        raise RuntimeError("rank 0 sent no fit")
    smallest = min(mixes.values(), key=lambda mix: int(mix.counts.llm_tokens.min()))
    batch = [collate([smallest[int(smallest.counts.llm_tokens.argmin())]])]
    rests = [rank.step(batch, 1) for _ in range(_REST_RUNS)]
    return fitted[0], statistics.median(step_ms - max(own) for step_ms, own, _ in rests)


def measure(rank: Rank, options: WorkerOptions, mix: Mix, fitted: CellFit, rest_ms: float) -> Iterator[Run]:
    """All methods on the steps of one mix, in turn."""
    setup = options.setup(rank.num_ranks)
    sources = {method: _steps_of(method, mix, setup, fitted.model, rank.rank) for method in METHODS}
    for step in range(options.num_steps):
        counts = _step_counts(mix, setup, step)
        label_tokens = int(counts.label_tokens.sum())
        taken = {method: _next_of(rank, source) for method, source in sources.items()}
        predicted = {method: _predicted(rank, batches, counts, fitted.model) for method, (batches, _) in taken.items()}
        for turn in range(2 * options.rounds):
            for method in METHODS if turn % 2 == 0 else reversed(METHODS):
                batches, wait_ms = taken[method]
                gc.collect()
                step_ms, own_ms, loss = rank.step(batches, label_tokens)
                yield Run(
                    model=rank.model.name,
                    mix=mix.name,
                    step=step,
                    turn=turn,
                    method=method,
                    num_microbatches=len(batches),
                    step_ms=step_ms,
                    compute_ms=tuple(own_ms),
                    predicted_ms=predicted[method],
                    predicted_step_ms=max(predicted[method]) + rest_ms,
                    wait_ms=wait_ms,
                    loss=loss,
                )


def _steps_of(method: str, mix: Mix, setup: StepSetup, cost_model: CostModel, dp_rank: int) -> Iterator[list[Any]]:
    """This rank's micro-batches of one step after another."""
    if method != REBALANCE:
        loader = importlib.import_module("balancer.loader").BalancedDataLoader(
            mix,
            setup.batch_size,
            parallel=setup.parallel(),
            cost=cost_model,
            cost_index=mix.index,
            capacity_tokens=setup.capacity_tokens,
            capacity_patches=setup.capacity_patches,
            policy=method,
            meet="step",
            yield_per="step",
        )
        yield from loader
        return
    lists, sizes = [], []
    for step in range(len(mix) // setup.global_batch_size):
        counts = _step_counts(mix, setup, step)
        cells, num_microbatches = place(method, counts, setup, cost_model)
        sizes.append(num_microbatches)
        for microbatch in range(num_microbatches):
            mine = (cells[:, 0] == dp_rank) & (cells[:, 1] == microbatch)
            lists.append(counts.sample_ids[mine].tolist())
    plain = importlib.import_module("torch.utils.data").DataLoader(
        mix, batch_sampler=lists, collate_fn=importlib.import_module("balancer.batch").collate
    )
    batches = iter(plain)
    for num_microbatches in sizes:
        yield [next(batches) for _ in range(num_microbatches)]


def _next_of(rank: Rank, source: Iterator[list[Any]]) -> tuple[list[Any], float]:
    """The micro-batches of the next step, and how long the slowest rank waited for them."""
    start = time.perf_counter()
    batches = next(source)
    return batches, max(rank.gather(1e3 * (time.perf_counter() - start)))


def _step_counts(mix: Mix, setup: StepSetup, step: int) -> StepCounts:
    size = setup.global_batch_size
    return StepCounts.from_index(mix.index, np.arange(step * size, (step + 1) * size))


def _predicted(rank: Rank, batches: Sequence[Any], counts: StepCounts, model: CostModel) -> tuple[float, ...]:
    """Own milliseconds of every rank for what it was given.

    Raises:
        RuntimeError: the ranks do not hold the samples of the step, each once.
    """
    told: list[list[list[int]]] = rank.gather([batch.sample_ids.tolist() for batch in batches])
    held = [(sample, r, m) for r, own in enumerate(told) for m, samples in enumerate(own) for sample in samples]
    table: Int64Array = np.array(sorted(held), dtype=np.int64).reshape(-1, 3)
    if table[:, 0].tolist() != counts.sample_ids.tolist():
        raise RuntimeError(f"the ranks hold samples {table[:, 0].tolist()}, the step {counts.sample_ids.tolist()}")
    shape = (rank.num_ranks, len(batches))
    return tuple(cell_ms(model, counts, table[:, 1:], shape).sum(axis=1).tolist())


def _columns_of(mixes: dict[str, Mix], cell: Sequence[tuple[str, int]]) -> Any:
    """Row of the fit's table for one cell; its samples are of one mix."""
    counts = StepCounts.from_index(mixes[cell[0][0]].index, [sample for _, sample in cell])
    return columns(counts, np.zeros(len(counts), np.int64), 1)


def main(path: str) -> None:
    """Measure what the file asks for."""
    given = json.loads(Path(path).read_text(encoding="utf-8"))
    options = WorkerOptions(**{**given, "mixes": tuple(given["mixes"])})
    torch, dist = importlib.import_module("torch"), importlib.import_module("torch.distributed")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = Rank(build(options.model, tiny=options.tiny))
    fitted, rest_ms = fit_on(rank, options)
    gc.collect()
    gc.freeze()
    size = options.setup(rank.num_ranks).global_batch_size * options.num_steps
    runs = [
        run
        for name in options.mixes
        for run in measure(rank, options, Mix(name, size, seed=options.seed), fitted, rest_ms)
    ]
    if rank.rank == 0:
        fit = {"median_error": fitted.median_error, "p95_error": fitted.p95_error, "rest_ms": rest_ms}
        content = {
            "ours": OURS,
            "fit": fit,
            "cost_model": fitted.model.to_json(),
            "runs": [asdict(run) for run in runs],
        }
        Path(options.output).write_text(json.dumps(content), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
