"""Two ranks of a gloo world that read streams: many scenarios in a row, because starting a world costs seconds.

    python stream_worker.py FOUND.json      rank 0 writes {scenario: [what each rank saw]}

Rank 1 is a fork of rank 0 from before the world is made: torch is imported once, and kernels are loaded once.
What a rank saw is {"value": ...} or {"raised": "Type: text"}.
"""

import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image

from balancer.cost_model import CostModel, StageCost, StageTerms
from balancer.exchange import RankGroup
from balancer.plan import Capacities
from balancer.plan_loader import StepBatches
from balancer.stream_loader import StreamLoader
from balancer.stream_plan import StreamState, WindowOptions
from dataloaders.estimators import estimator_from_config
from dataloaders.stream_source import IterableStream

WORLD_SIZE = 2
LANES, SAMPLES = 8, 200  # of all lanes together: SAMPLES for each rank
PROCESSOR = {
    "processor_class": "Qwen2_5_VLProcessor",
    "image_processor_type": "Qwen2VLImageProcessor",
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "min_pixels": 4 * 784,
    "max_pixels": 64 * 784,
}
ENCODER, LLM = StageTerms(per_patch_ns=1.0), StageTerms(per_token_ns=4.0)
MODEL = CostModel(stages=tuple(StageCost(forward=term, backward=term.scaled(2.0)) for term in (ENCODER, LLM)))
OPTIONS = WindowOptions(
    global_batch_size=128, capacities=Capacities(tokens=8192), cost_model=MODEL, samples_per_lane=24, seed=1
)
ESTIMATOR = estimator_from_config(PROCESSOR)
Rows = Callable[[], Iterator[Any]]


@cache
def picture(kind: int) -> bytes:
    """A small JPEG of one of 12 sizes."""
    buffer = io.BytesIO()
    rng = np.random.default_rng(kind)
    pixels = rng.integers(0, 256, size=(56 * (1 + kind % 4), 56 * (1 + kind // 4), 3), dtype=np.uint8)
    Image.fromarray(pixels).save(buffer, "JPEG", quality=30)
    return buffer.getvalue()


def chat(question: str, answer: str, **more: object) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}], **more}


def skewed(lane: int, number: int) -> dict[str, Any]:
    """Heavy-tailed texts, and pictures in every fifth sample; odd lanes, which odd ranks read, are far heavier."""
    rng = np.random.default_rng([lane, number])
    answer = "a" * int(min(1 + rng.pareto(1.3) * (60 if lane % 2 else 6), 1500))
    if number % 5:
        return chat("?", answer)
    return chat("<image>?", answer, images=[picture(int(rng.integers(12)))])


def numbered(lane: int, size: int, make: Callable[[int, int], Any] = skewed) -> Rows:
    return lambda: (make(lane, number) for number in range(size))


def ids_of(step: StepBatches) -> list[int]:
    if step.error is not None:
        raise step.error
    return [int(i) for batch in step.microbatches if batch is not None for i in batch.sample_ids]


class World:
    """This rank, and what all ranks have."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.group = dist.new_group(backend="gloo", timeout=timedelta(seconds=60))

    def gather(self, item: Any) -> list[Any]:
        items: list[Any] = [None] * self.size
        dist.all_gather_object(items, item)
        return items

    def loader(self, rows: list[Rows], *, together: bool = True, **more: Any) -> StreamLoader:
        changed = more.pop("changed", {})
        group = self.group if together else None
        return StreamLoader(IterableStream(rows), ESTIMATOR, replace(OPTIONS, **changed), group=group, **more)


def balance(world: World) -> dict[str, Any]:
    """The acceptance run in a quick form: everything read, exchanged and decoded."""
    size = SAMPLES * world.size // LANES
    planned = np.zeros((world.size, world.size), dtype=np.int64)
    run = world.loader(
        [numbered(lane, size) for lane in range(LANES)],
        on_window=lambda window: add(planned, window),
        round_bytes=100_000,
    )
    ids: list[int] = []
    steps = 0
    worst, busy = 0.0, np.zeros(world.size)
    for step in run:
        ids += ids_of(step)
        steps += 1
        worst = max(worst, step.plan.imbalance_after)
        busy += (step.plan.forward_ns + step.plan.backward_ns).sum(axis=(1, 2))
    wanted = sorted(lane << 32 | number for lane in range(LANES) for number in range(size))
    gathered = world.gather(ids)
    return {
        "sent": run.counters.sent_bytes,
        "received": run.counters.received_bytes,
        "kept": run.counters.kept_bytes,
        "rounds": run.counters.rounds,
        "planned": planned.tolist(),
        "steps": steps,
        "worst_step": worst,
        "run_imbalance": float(busy.max() / busy.mean()),
        "exactly_once": sorted(i for part in gathered for i in part) == wanted,
        "num_ids": len(ids),
    }


def add(planned: np.ndarray, window: Any) -> None:
    planned += window.plan.bytes_between()


def resize(world: World) -> dict[str, Any]:
    """One process, then all, then one again, changing inside windows and at their boundaries."""
    rows = [numbered(lane, size) for lane, size in enumerate((20, 3, 0, 11))]
    small = {"global_batch_size": 4, "samples_per_lane": 5}
    alone = world.loader(rows, together=False, changed=small, epochs=2)
    whole = [ids_of(step) for step in alone]
    found: list[list[int]] = []
    state: StreamState | None = None
    for stretch, length in enumerate((2, 3, 1, 4, 2, 100)):
        together = stretch % 2 == 1
        run = world.loader(rows, together=together, changed=small, epochs=2, state=state)
        steps = iter(run)
        for _ in range(length):
            step = next(steps, None)
            if step is None:
                break
            ids = ids_of(step)
            found.append([i for part in world.gather(ids) for i in part] if together else ids)
        steps.close()  # type: ignore[attr-defined]
        state = StreamState.from_json(run.state.to_json())
    return {
        "same_samples": [sorted(ids) for ids in found] == [sorted(ids) for ids in whole],
        "steps": len(found),
        "state": state.to_json() if state else "",
    }


def one_rank_dry(world: World) -> dict[str, Any]:
    """Lane 0 alone holds samples: the other rank reads nothing, and trains as many steps."""
    run = world.loader([numbered(0, 30), numbered(1, 0)], changed={"global_batch_size": 6})
    counts = [len(ids_of(step)) for step in run]
    return {"steps": len(counts), "samples": sum(counts), "sent": run.counters.sent_bytes}


def one_lane(world: World) -> dict[str, Any]:
    """Fewer lanes than ranks, and at the end fewer samples than ranks."""
    run = world.loader([numbered(0, 5)], changed={"global_batch_size": 4, "samples_per_lane": 4})
    steps = [(len(step.plan.sample_ids), len(ids_of(step))) for step in run]
    return {"steps": steps, "samples": sum(own for _, own in steps)}


def failing(world: World, error: Exception) -> int:
    """Lane 1 fails in its second window; how many steps there were before is in the text of the error."""

    def broken() -> Iterator[dict[str, Any]]:
        yield from (skewed(1, number) for number in range(5))
        raise error

    steps = 0
    run = world.loader([numbered(0, 50), broken], changed={"global_batch_size": 4, "samples_per_lane": 4})
    try:
        for step in run:
            ids_of(step)
            steps += 1
    except Exception as raised:
        raise RuntimeError(f"after {steps} steps: {type(raised).__name__}: {raised}") from raised
    return steps


def storage_fails(world: World) -> int:
    return failing(world, OSError("the disk is gone"))


def fault(world: World) -> int:
    return failing(world, TypeError("a fault of a row function"))


def bad_record(world: World) -> list[int]:
    rows = [
        numbered(0, 4),
        numbered(1, 4, lambda lane, number: {"no": "text"} if number == 2 else skewed(lane, number)),
    ]
    return [len(ids_of(step)) for step in world.loader(rows)]


def other_options(world: World) -> list[int]:
    run = world.loader([numbered(0, 9), numbered(1, 9)], changed={"seed": world.rank})
    return [len(ids_of(step)) for step in run]


def other_lanes(world: World) -> list[int]:
    """Rank 1 has more lanes: gloo would end a process that is told more numbers than it expects."""
    lanes = 2 + 40 * world.rank
    return [len(ids_of(step)) for step in world.loader([numbered(lane, 4) for lane in range(lanes)])]


def other_policy(world: World) -> list[int]:
    policy = "sequential" if world.rank else "lpt"
    run = world.loader([numbered(0, 9), numbered(1, 9)], changed={"policy": policy})
    return [len(ids_of(step)) for step in run]


def undecodable(world: World) -> dict[str, Any]:
    """A medium that is cut behind its header becomes a stand-in where the plan runs it, named as in the stream."""
    cut = chat("<image>?", "a", images=[picture(11)[:1500]])
    rows = [numbered(0, 3), numbered(1, 3, lambda lane, number: cut if number == 1 else skewed(lane, number))]
    found = [
        [item.sample_id, item.place]
        for step in world.loader(rows)
        for batch in step.microbatches
        if batch is not None
        for item in batch.replaced
    ]
    return {"replaced": found}


def texts(world: World) -> list[str]:
    return RankGroup(world.group).gather_texts("" if world.rank else "ü" * 5)


def nothing_to_send(world: World) -> list[int]:
    """Every pair of zero bytes, and one pair alone."""
    group = RankGroup(world.group)
    sizes = []
    for amount in (0, 7):
        moved = np.zeros((world.size, world.size), dtype=np.int64)
        moved[0, 1] = amount
        outgoing = [[b"x" * int(moved[world.rank, other])] for other in range(world.size)]
        sizes += [len(part) for part in group.send_bytes(outgoing, moved, round_bytes=3)]
    return sizes


SCENARIOS = {
    function.__name__: function
    for function in (
        balance,
        resize,
        one_rank_dry,
        one_lane,
        storage_fails,
        fault,
        bad_record,
        other_options,
        other_lanes,
        other_policy,
        undecodable,
        texts,
        nothing_to_send,
    )
}


def main() -> None:
    written = Path(sys.argv[1])
    torch.set_num_threads(1)
    for _ in StreamLoader(IterableStream([numbered(0, 5)]), ESTIMATOR, OPTIONS):  # whatever takes time at first use
        pass
    child = os.fork()
    run(0 if child else 1, written)
    if child and os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
        sys.exit("rank 1 has failed")


def run(rank: int, written: Path) -> None:
    store = written.with_suffix(".store").as_uri()
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=WORLD_SIZE, timeout=timedelta(seconds=60))
    world = World()
    found: dict[str, list[Any]] = {}
    for name, scenario in SCENARIOS.items():
        try:
            saw: dict[str, Any] = {"value": scenario(world)}
        except Exception as error:
            saw = {"raised": f"{type(error).__name__}: {error}"}
        found[name] = world.gather(saw)
    if world.rank == 0:
        written.write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
