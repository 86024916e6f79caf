"""Decoded samples per second of our loader beside torch's: `python -m tools.benchmarks.loader --output FOLDER`.

    photographs in tar shards --plan--> cells of ids --+--> PlanLoader          patches, tokens, labels, positions
                                                       +--> torch, same work    DataLoader over SampleReader.read
                                                       +--> torch, images       DataLoader: open, resize, normalise
                                                       +--> torch, bytes        DataLoader: open, resize; no floats

All read the same samples in the same cells with as many workers. `images` is the usual transform and what a plain
loader delivers: per image float32 [C, H, W], normalised, of the planned size. PlanLoader delivers twice as many floats:
a patch of Qwen2.5-VL holds a still image twice. `bytes` is no complete loader: its uint8 [H, W, C] have yet to be
normalised and laid out, by the trainer; it shows what decoding alone costs.

A round runs each once, in turn; a ratio is taken within a round, so that a busy machine disturbs both sides alike.
`steady` leaves out the first cells, and with them the start of the workers. CPU time is that of trainer and workers
together, starts included; other programs hardly change it. `--memory` loads many small samples instead and follows the
workers' own memory.
"""

import argparse
import importlib
import io
import json
import os
import resource
import statistics
import sys
import tarfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from PIL import Image

from balancer.cost_model import CostModel, StageCost, StageTerms
from balancer.layout import Layout
from balancer.plan import Capacities
from balancer.plan_sequence import PlanSequence
from balancer.sample_reader import SampleReader
from balancer.worker_memory import own_bytes
from balancer.worker_process import Cell
from dataloaders.decode import PixelConfig
from dataloaders.estimators import Qwen25VLConfig, Qwen25VLEstimator
from dataloaders.sample import check_loadable, planned_items
from dataloaders.scan import scan_source
from dataloaders.tar_source import TarSource
from tools.benchmarks.measuring import environment
from tools.benchmarks.media_corpus import add_member, write_images

OURS, SAME_WORK = "PlanLoader", "torch, same work"
IMAGES, BYTES = "torch, images (float32, normalised)", "torch, bytes (uint8, neither normalised nor laid out)"
_CELL_PX = 28 * 28
_SAMPLES_PER_STEP = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """One pass of one loader over all cells.

    Attributes:
        whole_per_s: samples per second, the start of the workers included.
        steady_per_s: samples per second behind the first quarter of the cells.
        first_s: seconds until the first cell.
        cpu_ms: CPU time of this process and its workers, per sample.
    """

    method: str
    num_samples: int
    whole_per_s: float
    steady_per_s: float
    first_s: float
    cpu_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class SameWork:
    """A map-style dataset of cells: what a plain DataLoader does for the same batches."""

    reader: SampleReader

    def __getitem__(self, cell: Cell) -> Any:
        return self.reader.read(cell.sample_ids, step=cell.step, microbatch_index=cell.microbatch)


@dataclass(frozen=True, slots=True)
class Images:
    """A map-style dataset of cells: the usual transform of an image, to the same size as planned."""

    reader: SampleReader
    normalised: bool

    def __getitem__(self, cell: Cell) -> list[Any]:
        return [self._image(i) for i in cell.sample_ids]

    def _image(self, sample_id: int) -> Any:
        reader, torch = self.reader, importlib.import_module("torch")
        (item,) = planned_items(reader.index, sample_id, reader.estimator)
        with Image.open(io.BytesIO(reader.source.media_bytes(sample_id, 0))) as image:
            small = image.convert("RGB").resize((item.width_px, item.height_px), Image.Resampling.BICUBIC)
        values = torch.from_numpy(np.array(small))
        if not self.normalised:
            return values
        pixels = PixelConfig.of(check_loadable(reader.estimator))
        mean, std = (torch.tensor(numbers)[:, None, None] for numbers in (pixels.mean, pixels.std))
        # axes: height, width, channel -> channel, height, width
        return values.permute(2, 0, 1).contiguous().to(torch.float32).div_(255).sub_(mean).div_(std)


def reader_of(shards: Sequence[Path], *, max_pixels: int) -> tuple[SampleReader, PlanSequence]:
    """Reader and plans of one rank over the samples of `shards`."""
    source = TarSource([str(shard) for shard in shards])
    estimator = Qwen25VLEstimator(Qwen25VLConfig(min_pixels=4 * _CELL_PX, max_pixels=max_pixels))
    index = scan_source(source, estimator)
    terms = StageTerms(per_patch_ns=1.0, per_token_ns=1.0)
    plans = PlanSequence(
        index=index,
        ids=np.arange(len(source)),
        global_batch_size=min(_SAMPLES_PER_STEP, len(source)),
        layout=Layout(),
        cost_model=CostModel(stages=(StageCost(forward=terms, backward=terms),) * 2),
        capacities=Capacities(tokens=4096),
    )
    return SampleReader(source=source, index=index, estimator=estimator), plans


def methods(reader: SampleReader, plans: PlanSequence, num_workers: int) -> dict[str, Callable[[], Iterable[int]]]:
    """By name, something that yields the number of samples of one cell after another."""
    plan_loader = importlib.import_module("balancer.plan_loader")  # these two need torch, which `tools` does without
    data = importlib.import_module("torch.utils.data")
    steps = range(plans.steps_per_epoch)

    def planned() -> Any:
        return plan_loader.PlanLoader(reader, plans, dp_rank=0, steps=steps, num_workers=num_workers)

    cells = list(planned().cells())

    def ours() -> Iterable[int]:
        for step in planned():
            if step.error is not None:
                raise step.error
            yield from (batch.num_samples for batch in step.microbatches if batch is not None)

    def plain(dataset: SameWork | Images) -> Callable[[], Iterable[int]]:
        def run() -> Iterable[int]:
            loader = data.DataLoader(
                dataset, batch_size=None, sampler=cells, num_workers=num_workers, prefetch_factor=4
            )
            for cell, _ in zip(cells, loader, strict=True):
                yield len(cell.sample_ids)

        return run

    return {
        OURS: ours,
        SAME_WORK: plain(SameWork(reader)),
        IMAGES: plain(Images(reader, normalised=True)),
        BYTES: plain(Images(reader, normalised=False)),
    }


def one_pass(method: str, run: Callable[[], Iterable[int]]) -> Pass:
    """Time a pass."""
    start, cpu_s = time.perf_counter(), _cpu_s()
    times, counts = [], []
    for count in run():
        times.append(time.perf_counter() - start)
        counts.append(count)
    skip = max(1, len(times) // 4)
    return Pass(
        method=method,
        num_samples=sum(counts),
        whole_per_s=sum(counts) / times[-1],
        steady_per_s=sum(counts[skip:]) / (times[-1] - times[skip - 1]),
        first_s=times[0],
        cpu_ms=(_cpu_s() - cpu_s) / sum(counts) * 1e3,
    )


def _cpu_s() -> float:
    """CPU time of this process and of its workers that have ended."""
    return sum(
        used.ru_utime + used.ru_stime
        for used in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def markdown(passes: Sequence[Pass], num_workers: int) -> str:
    """A row a method; ratios of ours to it, median and range over the rounds."""
    by_method: dict[str, list[Pass]] = {}
    for entry in passes:
        by_method.setdefault(entry.method, []).append(entry)
    ours = by_method[OURS]
    lines = [
        f"## loader, {num_workers} workers, {ours[0].num_samples:,} samples, {len(ours)} rounds",
        "",
        "| loader | first cell s | samples/s, whole | samples/s, steady | ours / it, whole | ours / it, steady "
        "| CPU ms a sample |",
        "|---|---|---|---|---|---|---|",
    ]
    for method, own in by_method.items():
        whole = [a.whole_per_s / b.whole_per_s for a, b in zip(ours, own, strict=True)]
        steady = [a.steady_per_s / b.steady_per_s for a, b in zip(ours, own, strict=True)]
        figures = [
            f"{statistics.median(entry.first_s for entry in own):.2f}",
            *(_spread(values, ".1f") for values in ([e.whole_per_s for e in own], [e.steady_per_s for e in own])),
            *(_spread(values, ".2f") for values in (whole, steady)),
            _spread([entry.cpu_ms for entry in own], ".1f"),
        ]
        lines.append(f"| {method} | {' | '.join(figures)} |")
    return "\n".join([*lines, ""])


def _spread(values: Sequence[float], form: str) -> str:
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"


def write_small(folder: Path, count: int) -> list[Path]:
    """One shard of `count` pictures of 56 x 56 pixels."""
    random, shard = np.random.Generator(np.random.Philox(0)), folder / "small.tar"
    with tarfile.open(shard, "w") as tar:
        for i in range(count):
            picture = io.BytesIO()
            Image.fromarray(random.integers(0, 256, (56, 56, 3), dtype=np.uint8)).save(picture, "JPEG")
            add_member(tar, f"{i:06}.jpg", picture.getvalue())
            add_member(tar, f"{i:06}.txt", b"Noise.")
    return [shard]


def memory_lines(reader: SampleReader, plans: PlanSequence, *, num_samples: int, num_workers: int) -> Iterator[str]:
    """Own memory of every worker after each tenth of `num_samples`, over as many epochs as it takes."""
    plan_loader = importlib.import_module("balancer.plan_loader")
    steps = range(-(-num_samples // plans.global_batch_size))
    done, others = 0, _children()
    yield "samples  MiB of each worker's own memory\n\n"
    for step in plan_loader.PlanLoader(reader, plans, dp_rank=0, steps=steps, num_workers=num_workers):
        if step.error is not None:
            raise step.error
        before, done = done, done + len(step.plan.sample_ids)
        if done * 10 // num_samples > before * 10 // num_samples or not before:
            own = (f"{own_bytes(pid) / 2**20:6.1f}" for pid in sorted(_children() - others))
            yield f"{done:7,}  {'  '.join(own)}\n"


def _children() -> set[int]:
    """Processes that this one has started and that are there."""
    return set(map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; see the module."""
    parser = argparse.ArgumentParser(prog="tools.benchmarks.loader", description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, help="folder for loader.json and loader.md")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--samples", type=int, default=None, help="photographs (400), or samples of --memory (100,000)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory", action="store_true", help="follow the workers' memory instead")
    arguments = parser.parse_args(argv)
    with TemporaryDirectory() as folder:
        if arguments.memory:
            reader, plans = reader_of(write_small(Path(folder), 1024), max_pixels=4 * _CELL_PX)
            count, text = arguments.samples or 100_000, ""
            for line in memory_lines(reader, plans, num_samples=count, num_workers=arguments.workers):
                sys.stdout.write(line)
                sys.stdout.flush()
                text += line
            passes: list[Pass] = []
        else:
            reader, plans = reader_of(write_images(Path(folder), arguments.samples or 400), max_pixels=576 * _CELL_PX)
            cases = methods(reader, plans, arguments.workers)
            passes = [one_pass(name, run) for _ in range(arguments.rounds) for name, run in cases.items()]
            text = markdown(passes, arguments.workers)
            sys.stdout.write(text)
    if arguments.output is not None:
        arguments.output.mkdir(parents=True, exist_ok=True)
        (arguments.output / "loader.md").write_text(text, encoding="utf-8")
        content = {"environment": environment({}), "passes": [asdict(entry) for entry in passes]}
        (arguments.output / "loader.json").write_text(json.dumps(content, indent=1), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
