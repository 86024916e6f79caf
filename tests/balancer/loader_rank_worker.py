"""One rank of a gloo world that loads data: many scenarios in a row, because starting a world costs seconds.

    torchrun ... python loader_rank_worker.py FOUND.json      rank 0 writes {scenario: [what each rank saw]}

What a rank saw is {"value": ...} or {"raised": "Type: text"}, with the seconds it took. Every rank hashes strings with
a seed of its own, so whatever depends on the order of a set differs between them.
"""

import os
import sys

if "PYTHONHASHSEED" not in os.environ:
    own = {**os.environ, "PYTHONHASHSEED": str(1 + int(os.environ["RANK"]))}
    os.execve(sys.executable, [sys.executable, "-P", *sys.argv], own)

import json
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, RandomSampler

from balancer.batch import MicroBatch
from balancer.layout import ParallelSpec
from balancer.loader import BalancedDataLoader
from dataloaders.chat import IGNORED_LABEL
from dataloaders.sample import LoadedSample

VOCABULARY = 17


class Numbers(Dataset[int]):
    """Sample i is the number i; `failing` ones do what `how` says."""

    def __init__(
        self,
        num_samples: int = 32,
        *,
        failing: Callable[[int], bool] | None = None,
        how: Callable[[], None] | None = None,
    ) -> None:
        self.num_samples, self.failing, self.how = num_samples, failing, how

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, i: int) -> int:
        if self.failing is not None and self.how is not None and self.failing(i):
            self.how()
        return i


class Texts(Dataset[Any]):
    """Sample i has `lengths[i]` tokens, of which `labels[i]` are learned."""

    def __init__(self, lengths: Any, labels: Any) -> None:
        self.lengths, self.labels = np.asarray(lengths), np.asarray(labels)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> LoadedSample:
        length, learned = int(self.lengths[i]), int(self.labels[i])
        rng = np.random.default_rng(i)
        labels = np.full(length, IGNORED_LABEL, dtype=np.int32)
        labels[length - learned :] = rng.integers(0, VOCABULARY, learned)
        return LoadedSample(
            sample_id=i,
            place=f"text {i}",
            tokens=rng.integers(0, VOCABULARY, length).astype(np.int32),
            labels=labels,
            position_ids=np.tile(np.arange(length, dtype=np.int64), (3, 1)),
            visual_index=np.zeros(0, dtype=np.int64),
            patches=np.zeros((0, 12), dtype=np.float32),
            grids=np.zeros((0, 3), dtype=np.int64),
        )

    def cost(self, i: int) -> int:
        return int(self.lengths[i])


def skewed(num_samples: int, seed: int = 0) -> np.ndarray:
    rng = np.random.Generator(np.random.Philox(seed))
    return np.clip(np.exp(rng.normal(3.0, 1.0, num_samples)).astype(np.int64), 4, 300)


def outcomes(loader: BalancedDataLoader[Any]) -> list[Any]:
    """What an iteration gives from its start to its end: [step, micro-batch], or the text of an error in its place."""
    found: list[Any] = []
    batches = iter(loader)
    while len(found) < 40:
        try:
            next(batches)
        except StopIteration:
            return found
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
        else:
            assert loader.current is not None
            found.append([loader.current.step, loader.current.microbatch_index])
    raise RuntimeError(f"an iteration without an end: {found}")


def fixed(num_microbatches: int) -> ParallelSpec:
    return ParallelSpec.pipeline(dp_size=2, num_microbatches=num_microbatches)


def no_disk() -> None:
    raise OSError("the disk is gone")


def die() -> None:
    time.sleep(0.3)  # until the loop waits for this batch
    os._exit(3)


def fails_on_one(rank: int) -> list[Any]:
    dataset = Numbers(failing=lambda i: rank == 1 and i // 8 == 1, how=no_disk)
    return outcomes(BalancedDataLoader(dataset, 2, parallel=fixed(2), cost=skewed(32)))


def fails_on_both(rank: int) -> list[Any]:
    dataset = Numbers(failing=lambda i: i // 8 == 1, how=no_disk)
    return outcomes(BalancedDataLoader(dataset, 4, cost=skewed(32), num_workers=1))


def stops_on_one(rank: int) -> list[Any]:
    """A StopIteration that a dataset lets out."""
    dataset = Numbers(failing=lambda i: rank == 1 and i // 8 == 1, how=lambda: next(iter(())))
    return outcomes(BalancedDataLoader(dataset, 2, parallel=fixed(2), cost=skewed(32)))


def same_replica_twice(rank: int) -> list[Any]:
    return outcomes(BalancedDataLoader(Numbers(), 2, parallel=fixed(2), cost=skewed(32), dp_rank=0))


def loses_a_worker(rank: int) -> list[Any]:
    dataset = Numbers(failing=lambda i: rank == 1 and i // 8 == 1, how=die)
    loader = BalancedDataLoader(dataset, 2, parallel=fixed(2), cost=skewed(32), num_workers=1, prefetch_factor=1)
    return outcomes(loader)


def goes_on_after_an_error(rank: int) -> dict[str, Any]:
    """The loop ends on both ranks at one place; a new iteration has all samples of the next epoch."""
    dataset = Numbers(failing=lambda i: rank == 0 and i // 8 == 2, how=no_disk)
    loader = BalancedDataLoader(dataset, 4, cost=skewed(32))
    steps = 0
    try:
        for _ in loader:
            steps += 1
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
    state = loader.state_dict()
    dataset.failing = None
    return {"steps": steps, "said": said, "state": state["step"], "ids": [i for b in loader for i in b.tolist()]}


def other_costs(rank: int) -> Any:
    return list(BalancedDataLoader(Numbers(), 4, cost=skewed(32, seed=rank)))


def other_seed(rank: int) -> Any:
    return list(BalancedDataLoader(Numbers(), 4, cost=skewed(32), shuffle=True, seed=rank))


def other_policy(rank: int) -> Any:
    return list(BalancedDataLoader(Numbers(), 4, cost=skewed(32), policy=("joint", "sequential")[rank]))


def other_number_of_samples(rank: int) -> Any:
    """The steps that both have are the same; one rank has one step more."""
    num_samples = 32 + 8 * rank
    return list(BalancedDataLoader(Numbers(num_samples), 4, cost=np.full(num_samples, 7), capacity_tokens=100))


def other_capacity(rank: int) -> Any:
    """Ranks would form another number of micro-batches each."""
    costs = np.array([9] * 6 + [1] * 4)
    return list(BalancedDataLoader(Numbers(10), 5, cost=costs, capacity_tokens=(10, 20)[rank]))


def other_epoch(rank: int) -> Any:
    loader = BalancedDataLoader(Numbers(), 4, cost=skewed(32), shuffle=True)
    loader.set_epoch(rank)
    return list(loader)


def other_order_of_a_sampler(rank: int) -> Any:
    sampler = RandomSampler(Numbers(), generator=torch.Generator().manual_seed(rank))
    return list(BalancedDataLoader(Numbers(), 4, cost=skewed(32), sampler=sampler))


def other_length_of_a_sampler(rank: int) -> Any:
    return list(BalancedDataLoader(Numbers(), 4, cost=skewed(32), sampler=range(16 + 8 * rank)))


def same_order_of_a_sampler(rank: int) -> list[int]:
    sampler = RandomSampler(Numbers(), generator=torch.Generator().manual_seed(5))
    loader = BalancedDataLoader(Numbers(), 4, cost=skewed(32), sampler=sampler)
    return [i for _ in range(2) for batch in loader for i in batch.tolist()]


def digests(rank: int) -> dict[str, Any]:
    loader = BalancedDataLoader(Numbers(90), 4, parallel=fixed(3), cost=skewed(90), shuffle=True, lookahead_steps=2)
    plans = loader.balanced.plans(0)
    return {
        "hash": hash("a string") % 2**20,
        "inputs": [plans.plan(0, step).inputs_digest for step in range(plans.steps_per_epoch)],
        "plans": [plans.plan(0, step).digest for step in range(plans.steps_per_epoch)],
        "state": loader.state_dict(),
        "batches": len(list(loader)),
    }


def label_tokens(rank: int) -> dict[str, Any]:
    """Labels as they are; the costs know nothing of them, and the samples of one step have none."""
    lengths, labels = skewed(35), skewed(35) // 2
    labels[8:16] = 0
    loader = BalancedDataLoader(Texts(lengths, labels), 2, parallel=fixed(2))
    told, own = [], []
    for batch in loader:
        told.append([batch.step, batch.step_label_tokens])
        own.append([batch.step, int((batch.labels != IGNORED_LABEL).sum())])
    return {"told": told, "own": own, "report": loader.report().label_tokens, "all": int(labels.sum())}


class Scorer(torch.nn.Module):
    """Scores of the next token from the mean of a sample so far: samples of a pack must be kept apart."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(VOCABULARY, 6, dtype=torch.float64)
        self.score = torch.nn.Linear(6, VOCABULARY, dtype=torch.float64)

    def forward(self, batch: MicroBatch) -> torch.Tensor:
        """Sum of the losses of all tokens that are learned; zero, with its graph, where there are none."""
        embedded, bounds = self.embed(batch.tokens), batch.cu_seqlens.tolist()
        parts = [embedded[start:stop].cumsum(0) for start, stop in pairwise(bounds)]
        positions = batch.position_ids[0].double() + 1
        scores = self.score(torch.cat(parts) / positions[:, None])
        return cross_entropy(scores, batch.labels, ignore_index=IGNORED_LABEL, reduction="sum")


def trained(rank: int, dataset: Texts, *, num_microbatches: int, batch_size: int, **options: Any) -> dict[str, Any]:
    """Plain DDP, gradients of every step against one process that runs the samples of the step one by one."""
    loader = BalancedDataLoader(dataset, batch_size, parallel=fixed(num_microbatches), shuffle=True, **options)
    model, alone = Scorer(), Scorer()
    ddp = DistributedDataParallel(model)
    errors, losses, own_labels, loss = [], [], [], 0.0
    ids: list[int] = []
    for batch in loader:
        with nullcontext() if batch.is_last_microbatch else ddp.no_sync():
            part = ddp(batch) / max(1, batch.step_label_tokens)
            (part * dist.get_world_size()).backward()  # DDP divides by the number of ranks
        loss += float(part.detach())
        ids += batch.sample_ids.tolist()
        own_labels.append(batch.num_label_tokens)
        if batch.is_last_microbatch:
            total = torch.tensor([loss], dtype=torch.float64)
            dist.all_reduce(total)
            losses.append(float(total))
            everywhere: list[Any] = [None, None]
            dist.all_gather_object(everywhere, ids)
            errors.append(largest_error(model, alone, dataset, [i for part in everywhere for i in part]))
            model.zero_grad()
            ids, loss = [], 0.0
    return {"errors": errors, "losses": losses, "own_labels": own_labels}


def largest_error(model: Scorer, alone: Scorer, dataset: Texts, ids: list[int]) -> float:
    """Largest difference of gradients, as a share of the largest gradient."""
    one_by_one = BalancedDataLoader(dataset, 1, sampler=ids, parallel=ParallelSpec.pipeline(dp_size=1), dp_rank=0)
    alone.zero_grad()
    total = int(dataset.labels[ids].sum())
    for batch in one_by_one:
        (alone(batch) / max(1, total)).backward()
    pairs = list(zip(model.parameters(), alone.parameters(), strict=True))
    largest = max(float(b.grad.abs().max()) for _, b in pairs)
    return max(float((a.grad - b.grad).abs().max()) for a, b in pairs) / (largest or 1.0)


def ddp(rank: int) -> dict[str, Any]:
    """Two and two hundred label tokens in neighbouring micro-batches, all ways to cut a step."""
    rng = np.random.default_rng(1)
    lengths = rng.choice([2, 4, 40, 200], 30)
    dataset = Texts(lengths, np.maximum(1, lengths - rng.integers(0, 30, 30)))
    found = {}
    for name, shape in (("1 x 8", (1, 8)), ("2 x 4", (2, 4)), ("4 x 2", (4, 2)), ("8 x 1", (8, 1))):
        micro, batch_size = shape
        found[name] = trained(rank, dataset, num_microbatches=micro, batch_size=batch_size, meet="microbatch")
    found["drawn order"] = trained(rank, dataset, num_microbatches=4, batch_size=2, policy="sequential")
    return found


def no_labels_on_one(rank: int) -> dict[str, Any]:
    """Samples in order, so that rank 1 has those without labels; the second step has none at all."""
    labels = [3, 3, 3, 3, 0, 0, 0, 0, *[0] * 8]
    dataset = Texts([6] * 16, labels)
    loader = BalancedDataLoader(dataset, 4, policy="sequential")
    model = DistributedDataParallel(Scorer())
    steps = []
    for batch in loader:
        model.zero_grad()
        loss = model(batch) / max(1, batch.step_label_tokens)
        (loss * 2).backward()
        grads = [float(p.grad.abs().sum()) for p in model.parameters()]
        total = loss.detach().clone()
        dist.all_reduce(total)
        steps.append(
            {"own": batch.num_label_tokens, "step": batch.step_label_tokens, "loss": float(total), "grads": grads}
        )
    return {"steps": steps, "ids": [int(labels[i]) for i in loader.sampler]}


def two_loaders_at_once(rank: int) -> list[int]:
    """Evaluation in the middle of an epoch of training."""
    training = BalancedDataLoader(Numbers(16), 2, cost=skewed(16), shuffle=True)
    evaluation = BalancedDataLoader(Numbers(6), 1, cost=skewed(6))
    ids = []
    for number, batch in enumerate(training):
        ids += batch.tolist()
        if number == 1:
            ids += [100 + i for held_out in evaluation for i in held_out.tolist()]
    return ids


SCENARIOS: tuple[Callable[[int], Any], ...] = (
    fails_on_one,
    fails_on_both,
    loses_a_worker,
    goes_on_after_an_error,
    other_costs,
    other_seed,
    other_policy,
    other_number_of_samples,
    other_capacity,
    other_epoch,
    other_order_of_a_sampler,
    other_length_of_a_sampler,
    same_order_of_a_sampler,
    digests,
    label_tokens,
    ddp,
    no_labels_on_one,
    two_loaders_at_once,
    stops_on_one,
    same_replica_twice,
)


def run(scenario: Callable[[int], Any], rank: int) -> dict[str, Any]:
    started = time.perf_counter()
    try:
        saw: dict[str, Any] = {"value": scenario(rank)}
    except Exception as error:
        saw = {"raised": f"{type(error).__name__}: {error}"}
    return {**saw, "seconds": time.perf_counter() - started}


def in_world() -> Iterator[tuple[str, list[Any]]]:
    rank = dist.get_rank()
    for scenario in SCENARIOS:
        dist.barrier()
        everywhere: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everywhere, run(scenario, rank))
        yield scenario.__name__, everywhere


def main() -> None:
    written = Path(sys.argv[1])
    torch.set_num_threads(1)
    list(BalancedDataLoader(Numbers(8), 2, cost=skewed(8), parallel=fixed(2), dp_rank=0))  # loads kernels
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    found = dict(in_world())
    if dist.get_rank() == 0:
        written.write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
