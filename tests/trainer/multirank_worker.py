"""One rank of a gloo world that runs many scenarios in a row, because starting a world costs seconds.

    torchrun ... python multirank_worker.py OPTIONS.json      rank 0 writes {scenario: [what each rank saw]}

What a rank saw is {"value": ...} or {"raised": "Type: text"}, with the seconds it took.
"""

import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from balancer import BalancedDataLoader
from balancer.layout import Layout
from balancer.plan import Capacities
from balancer.plan_loader import PlanLoader, SampleReader
from balancer.plan_sequence import PlanSequence
from trainer import comm as comm_module
from trainer import fit_command
from trainer.check import CheckSubject, check_layout
from trainer.check_command import build_subject
from trainer.comm import Comm, communicator
from trainer.config import CheckConfig, FitConfig
from trainer.fit_command import run_fit
from trainer.model_source import cost_model_for
from trainer.reference import reference_step
from trainer.step import StepRunner

Options = dict[str, Any]
Scenario = Callable[[Comm, Options], Any]


def fit(comm: Comm, options: Options, name: str, **changed: Any) -> int:
    """`run_fit` in the groups of this world instead of groups of its own."""

    @contextmanager
    def shared(*, pp_size: int) -> Iterator[Comm]:
        if pp_size != comm.layout.pp_size:
            raise RuntimeError(f"this scenario is laid out for pp_size={comm.layout.pp_size}")
        yield comm

    fit_command.communicator = shared  # type: ignore[assignment]
    fixed = {**options["fit"], "pp_size": comm.layout.pp_size}
    fixed["cache_dir"] = Path(fixed["cache_dir"])
    return run_fit(FitConfig(output=Path(options["out"]) / name, **{**fixed, **changed}))


def fits(comm: Comm, options: Options) -> int:
    return fit(comm, options, options["name"] + ("" if comm.layout.pp_size == 1 else "-pp"))


def mixture(comm: Comm, options: Options) -> int:
    return fit(comm, options, "mixture", data=None, mixture=Path(options["mixture"]), max_steps=6)


def fewer_samples_than_ranks(comm: Comm, options: Options) -> int:
    return fit(comm, options, "one-sample", data=options["one_sample"])


def stand_in(comm: Comm, options: Options) -> int:
    return fit(comm, options, f"stand-in-pp{comm.layout.pp_size}", data=options["truncated"], max_replaced=1)


def stand_in_beyond_the_budget(comm: Comm, options: Options) -> int:
    return fit(comm, options, f"budget-pp{comm.layout.pp_size}", data=options["truncated"], max_replaced=0)


def subject_of(options: Options, **changed: Any) -> CheckSubject:
    fixed = {"data": options["fit"]["data"], "cache_dir": Path(options["fit"]["cache_dir"]), "global_batch_size": 12}
    return build_subject(CheckConfig(**{**fixed, **changed}))


def laid_out(subject: CheckSubject, comm: Comm) -> PlanSequence:
    cost_model = cost_model_for(subject.model.config, comm.layout)
    return dataclasses.replace(subject.plans, layout=comm.layout, cost_model=cost_model)


def check(comm: Comm, options: Options) -> list[bool]:
    rows = check_layout(subject_of(options), comm, num_microbatches=(3,), dtypes=(torch.float64,))
    return [row.passed for row in rows]


def run_step(comm: Comm, subject: CheckSubject, reader: SampleReader | None = None) -> tuple[Any, float]:
    """One step in fp64: (result, largest gradient error of this rank's tensors relative to the largest gradient)."""
    plans = laid_out(subject, comm)
    reader = reader or subject.reader
    ids = plans.sample_ids(0).tolist()
    _, expected = reference_step(subject.pieces(Layout(), 0, torch.float64, comm.device), subject.reader, ids, comm)
    pieces = subject.pieces(comm.layout, comm.pp_rank, torch.float64, comm.device)
    loader = PlanLoader(reader, plans, dp_rank=comm.dp_rank, steps=range(1))
    batches = next(iter(loader))
    result = StepRunner(pieces, comm).run(batches, planned_weight=plans.weight_sum(0, reader.loss_reduction))
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    errors = [
        float((torch.zeros_like(p) if p.grad is None else p.grad).sub(expected[name]).abs().max())
        for name, p in pieces.named_parameters()
    ]
    return result, max(errors) / largest


def image_text_image(comm: Comm, options: Options) -> dict[str, Any]:
    """Three micro-batches of three lengths; the middle one has no pixels."""
    subject = subject_of(options)
    ids = np.array([4, 2, 1])
    plans = dataclasses.replace(subject.plans, ids=ids, num_microbatches=3, policy="sequential", shuffle=False)
    result, error = run_step(comm, dataclasses.replace(subject, plans=plans))
    plan = laid_out(dataclasses.replace(subject, plans=plans), comm).plan(0)
    return {
        "error": error,
        "tokens": plan.llm_tokens.tolist(),
        "patches": plan.patches.tolist(),
        "acts": sorted(f"{a.rank}:{a.stage}{a.op}{a.microbatch}" for a in result.actions),
    }


def tampered_plan(comm: Comm, options: Options) -> Any:
    subject = subject_of(options)
    if comm.rank == comm.world_size - 1:
        plans = dataclasses.replace(subject.plans, capacities=Capacities(tokens=5000))
        subject = dataclasses.replace(subject, plans=plans)
    return run_step(comm, subject)


@dataclasses.dataclass
class Unreadable:
    """A source whose storage fails on this rank."""

    source: Any

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)

    def record(self, i: int) -> Any:
        raise OSError(f"storage of sample {i} is gone")


def unreadable_on_the_last_rank(comm: Comm, options: Options) -> Any:
    subject = subject_of(options)
    reader = subject.reader
    if comm.rank == comm.world_size - 1:
        reader = dataclasses.replace(reader, source=Unreadable(reader.source))
    return run_step(comm, subject, reader)


class Lengths(Dataset[torch.Tensor]):
    """README's dataset: a vector per sample and what it costs."""

    def __init__(self) -> None:
        self.lengths = np.random.Generator(np.random.Philox(3)).integers(1, 200, 26)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.full((4,), float(i)) / 26

    def cost(self, i: int) -> int:
        return int(self.lengths[i])


def ddp(comm: Comm, options: Options) -> dict[str, Any]:
    """A user's own loop with DistributedDataParallel; the loss is a mean over the samples of the global batch."""
    dataset = Lengths()
    loader = BalancedDataLoader(dataset, batch_size=4, shuffle=True)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    reference = torch.nn.Linear(4, 1)
    reference.load_state_dict(model.state_dict())
    wrapped = DistributedDataParallel(model)
    seen, costs, errors = [], [], []
    for batch in loader:
        ids = (batch[:, 0] * 26).round().long().tolist()
        everyone = comm.gather(ids)
        total = sum(map(len, everyone))
        wrapped.zero_grad()
        # DDP averages over ranks, so a sum over all samples needs the world size back.
        (wrapped(batch).square().sum() * comm.world_size / total).backward()
        reference.zero_grad()
        together = torch.stack([dataset[i] for ids_of_rank in everyone for i in ids_of_rank])
        reference(together).square().mean().backward()
        errors.append(float((model.weight.grad - reference.weight.grad).abs().max()))
        seen.append(everyone)
        costs.append([sum(dataset.cost(i) for i in ids_of_rank) for ids_of_rank in everyone])
    return {"steps": len(loader), "seen": seen, "costs": costs, "error": max(errors), "dropped": loader.num_dropped}


# Scenario -> pp_size of the layout it runs in (0: as many as there are ranks).
SCENARIOS: dict[str, tuple[Scenario, int]] = {
    "fits": (fits, 1),
    "fits-pp": (fits, 0),
    "fits-pp2": (fits, 2),
    "check-pp": (check, 0),
    "check-pp2": (check, 2),
    "mixture": (mixture, 1),
    "fewer-samples-than-ranks": (fewer_samples_than_ranks, 1),
    "stand-in": (stand_in, 1),
    "stand-in-pp": (stand_in, 0),
    "budget-pp": (stand_in_beyond_the_budget, 0),
    "image-text-image-pp": (image_text_image, 0),
    "tampered-plan": (tampered_plan, 1),
    "tampered-plan-pp": (tampered_plan, 0),
    "unreadable": (unreadable_on_the_last_rank, 1),
    "unreadable-pp": (unreadable_on_the_last_rank, 0),
    "ddp": (ddp, 1),
}


def observed(scenario: Scenario, comm: Comm, options: Options) -> dict[str, Any]:
    start = time.perf_counter()
    try:
        found: dict[str, Any] = {"value": scenario(comm, options)}
    except Exception as error:
        found = {"raised": f"{type(error).__name__}: {error}"}
    return {**found, "seconds": time.perf_counter() - start}


def main() -> None:
    torch.set_num_threads(1)
    options = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    found = {}
    with communicator(timeout_s=60.0, device=torch.device("cpu")) as world:
        comms: dict[int, Comm] = {1: world}
        for name in options["scenarios"]:
            scenario, pp_size = SCENARIOS[name]
            pp_size = pp_size or world.world_size
            if pp_size not in comms:
                layout = Layout.for_world(world.world_size, pp_size=pp_size)
                comms[pp_size] = comm_module._connect(layout, world.rank, world.device)
            seen = observed(scenario, comms[pp_size], options)
            found[name] = world.gather(seen)
        if world.is_main:
            Path(options["found"]).write_text(json.dumps(found), encoding="utf-8")


if __name__ == "__main__":
    main()
