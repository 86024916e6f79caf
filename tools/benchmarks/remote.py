"""Loading from an unreliable, distant server beside loading from disk: `python -m tools.benchmarks.remote --output F`.

    tar shards --+--> TarSource(path)                                  --+
                 +--> range server, a process: 50 ms, 503s, stalls       +--> PlanLoader, 2 workers: samples/s
                        --> TarSource(http://...)                      --+      same plans, in turn: local, remote

A round runs both in turn; a ratio is taken within a round, so that a busy machine disturbs both sides alike. A pass in
which other programs took more than a share of the cores is thrown away and run again. Bytes are counted by the server,
and set against the bytes of the members (texts and media) of the samples that were read, each counted once. Several
ranks are processes that read one epoch of a plan for them all. Header pass and scan, done once a run, are measured
apart. Price: server and workers share the cores, so the remote side pays for the server, too; the table says how much.
"""

import argparse
import dataclasses
import importlib
import json
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from balancer.cost_model import CostModel, StageCost, StageTerms
from balancer.layout import Layout
from balancer.plan import Capacities
from balancer.plan_sequence import PlanSequence
from dataloaders.estimators import Qwen25VLConfig, Qwen25VLEstimator
from dataloaders.scan import build_index
from dataloaders.tar_source import TarSource
from tools.benchmarks.counting_reader import CountingReader, totals
from tools.benchmarks.loader import Pass, one_pass
from tools.benchmarks.measuring import environment
from tools.benchmarks.range_server import Behaviour
from tools.benchmarks.remote_corpus import SIZES_PX, write_remote_corpus
from tools.benchmarks.remote_tables import LOCAL, REMOTE, Preparation, RemotePass, markdown
from tools.benchmarks.server_process import ServerLoad, ServerProcess

_PLAN_LOADER = "balancer.plan_loader"
_CELL_PX = 28 * 28
_SAMPLES_PER_STEP = 32
_ESTIMATOR = Qwen25VLEstimator(Qwen25VLConfig(min_pixels=4 * _CELL_PX, max_pixels=576 * _CELL_PX))


@dataclass(frozen=True, slots=True)
class _Clock:
    """Seconds: wall, busy cores of the machine (NaN where it does not tell), CPU of this process."""

    wall_s: float
    busy_s: float
    own_s: float

    @classmethod
    def now(cls) -> "_Clock":
        try:
            # user, nice, system, idle, iowait, irq, softirq, steal
            ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
            busy_s = (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")
        except OSError:
            busy_s = float("nan")
        return cls(time.perf_counter(), busy_s, time.process_time())

    def since(self, before: "_Clock") -> "_Clock":
        """The difference to an earlier time."""
        return _Clock(self.wall_s - before.wall_s, self.busy_s - before.busy_s, self.own_s - before.own_s)


class Bench:
    """Sources and plans over one corpus, local and served."""

    def __init__(
        self, folder: Path, shards: Sequence[Path], server: ServerProcess, *, block_shards: int, num_workers: int
    ) -> None:
        self.server, self._block_shards, self._num_workers = server, block_shards, num_workers
        self._local = TarSource([str(shard) for shard in shards])
        before, start = server.load(), time.perf_counter()
        self._remote = TarSource([server.url(shard.name) for shard in shards])
        passed, headers = time.perf_counter(), server.load()
        self._index = build_index(self._remote, _ESTIMATOR, folder / "remote")
        scanned, scan = time.perf_counter(), server.load()
        self.preparation = Preparation(
            header_s=passed - start,
            scan_s=scanned - passed,
            header_load=headers.since(before),
            scan_load=scan.since(headers),
            corpus_bytes=sum(shard.stat().st_size for shard in shards),
        )
        same = build_index(self._local, _ESTIMATOR, folder / "local")
        if same.fingerprint != self._index.fingerprint:
            raise RuntimeError("the indexes of the local and of the remote shards differ")

    def run(self, shuffle: str, place: str, folder: Path) -> RemotePass:
        """One epoch of one rank in this process."""
        reader, plans = self._parts(shuffle, place, folder, dp_size=1)
        importlib.import_module(_PLAN_LOADER)  # not to be timed
        before = self.server.load(), _Clock.now()
        timing = one_pass(place, lambda: _counts(reader, plans, 0, self._num_workers))
        if timing.num_samples != len(self._index):
            raise RuntimeError(f"{timing.num_samples} of {len(self._index)} samples arrived")
        return self._pass(shuffle, place, folder, before, timing=timing)

    def run_ranks(self, shuffle: str, folder: Path, num_ranks: int) -> RemotePass:
        """One epoch of several ranks, each in a process of its own, from the server."""
        reader, plans = self._parts(shuffle, REMOTE, folder, dp_size=num_ranks)
        context = multiprocessing.get_context("spawn")
        counts: Any = context.Queue()
        before = self.server.load(), _Clock.now()
        ranks = [
            context.Process(target=_rank, args=(reader, plans, rank, self._num_workers, counts))
            for rank in range(num_ranks)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        arrived = sum(counts.get() for process in ranks if process.exitcode == 0)
        if arrived != len(self._index):
            raise RuntimeError(f"{arrived} of {len(self._index)} samples arrived")
        return self._pass(shuffle, REMOTE, folder, before, num_ranks=num_ranks)

    def _parts(self, shuffle: str, place: str, folder: Path, *, dp_size: int) -> tuple[CountingReader, PlanSequence]:
        folder.mkdir()
        source = self._local if place == LOCAL else self._remote
        reader = CountingReader(source=source, index=self._index, estimator=_ESTIMATOR, folder=str(folder))
        terms = StageTerms(per_patch_ns=1.0, per_token_ns=1.0)
        plans = PlanSequence(
            index=self._index,
            ids=np.arange(len(self._index)),
            global_batch_size=min(_SAMPLES_PER_STEP, len(self._index)),
            layout=Layout(dp_size=dp_size),
            cost_model=CostModel(stages=(StageCost(forward=terms, backward=terms),) * 2),
            capacities=Capacities(tokens=4096),
            shuffle="full" if shuffle == "full" else "block",
            block_shards=self._block_shards,
        )
        return reader, plans

    def _pass(
        self,
        shuffle: str,
        place: str,
        folder: Path,
        before: "tuple[ServerLoad, _Clock]",
        *,
        timing: Pass | None = None,
        num_ranks: int = 1,
    ) -> RemotePass:
        load, spent = self.server.load().since(before[0]), _Clock.now().since(before[1])
        workers = totals(folder)
        # What two ranks' own processes take is not told apart from other programs.
        ours_s = spent.own_s + workers.cpu_s + load.cpu_s if num_ranks == 1 else float("nan")
        return RemotePass(
            shuffle=shuffle,
            place=place,
            num_ranks=num_ranks,
            timing=timing,
            wanted_bytes=self._wanted_bytes(),
            workers=workers,
            server=None if place == LOCAL else load,
            elsewhere=(spent.busy_s - ours_s) / (spent.wall_s * (os.cpu_count() or 1)),
        )

    def _wanted_bytes(self) -> int:
        table = self._local.table
        return sum(table.size(row) for i in range(len(table)) for row in table.rows(i))


def _counts(reader: CountingReader, plans: PlanSequence, rank: int, num_workers: int) -> Iterable[int]:
    """Samples of one cell after another of an epoch."""
    plan_loader = importlib.import_module(_PLAN_LOADER)  # needs torch, which `tools` does without
    steps = range(plans.steps_per_epoch)
    for step in plan_loader.PlanLoader(reader, plans, dp_rank=rank, steps=steps, num_workers=num_workers):
        if step.error is not None:
            raise step.error
        yield from (batch.num_samples for batch in step.microbatches if batch is not None)


def _rank(reader: CountingReader, plans: PlanSequence, rank: int, num_workers: int, counts: Any) -> None:
    """One rank's process."""
    counts.put(sum(_counts(reader, plans, rank, num_workers)))


def _quiet_pass(
    bench: Bench, shuffle: str, place: str, folders: Iterator[Path], arguments: argparse.Namespace
) -> RemotePass:
    """A pass that other programs did not disturb; the least disturbed of several tries if there was none."""
    tries: list[RemotePass] = []
    for _ in range(arguments.tries):
        tries.append(bench.run(shuffle, place, next(folders)))
        if not tries[-1].elsewhere > arguments.elsewhere:
            break
    return min(tries, key=lambda entry: entry.elsewhere)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; see the module."""
    arguments = _arguments(argv)
    behaviour = Behaviour(
        latency_s=arguments.latency_s,
        error_share=arguments.error_share,
        stall_share=arguments.stall_share,
        stall_s=arguments.stall_s,
    )
    with TemporaryDirectory() as folder:
        data, notes = Path(folder, "data"), Path(folder, "notes")
        data.mkdir()
        notes.mkdir()
        shards = write_remote_corpus(
            data,
            num_shards=arguments.shards,
            samples_per_shard=arguments.samples_per_shard,
            sizes_px=((arguments.side_px, arguments.side_px),) if arguments.side_px else SIZES_PX,
        )
        with ServerProcess(data, behaviour) as server:
            bench = Bench(notes, shards, server, block_shards=arguments.block_shards, num_workers=arguments.workers)
            passes: list[RemotePass] = []
            folders = (notes / f"{number}" for number in count())
            for shuffle in arguments.shuffles.split(","):
                for number in range(arguments.rounds):
                    for place in (LOCAL, REMOTE) if number % 2 == 0 else (REMOTE, LOCAL):
                        passes.append(_quiet_pass(bench, shuffle, place, folders, arguments))
            if arguments.ranks > 1:
                passes.append(bench.run_ranks("block", notes / "ranks", arguments.ranks))
    title = (
        f"{arguments.shards} shards of {arguments.samples_per_shard}, blocks of {arguments.block_shards}, "
        f"{arguments.workers} workers, {arguments.rounds} rounds"
    )
    text = markdown(passes, bench.preparation, title)
    if arguments.output is not None:
        arguments.output.mkdir(parents=True, exist_ok=True)
        (arguments.output / "remote.md").write_text(text, encoding="utf-8")
        content = {
            "environment": environment({}),
            "behaviour": dataclasses.asdict(behaviour),
            "preparation": asdict(bench.preparation),
            "passes": [asdict(entry) for entry in passes],
        }
        (arguments.output / "remote.json").write_text(json.dumps(content, indent=1), encoding="utf-8")
    sys.stdout.write(text)
    return 0


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tools.benchmarks.remote", description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, help="folder for remote.json and remote.md")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--elsewhere", type=float, default=0.15, help="share of the cores that others may take")
    parser.add_argument("--tries", type=int, default=5, help="of a pass, until others leave it alone")
    parser.add_argument("--ranks", type=int, default=2, help="processes of the pass with several ranks; 1: none")
    parser.add_argument("--shuffles", default="block,full")
    parser.add_argument("--shards", type=int, default=8)
    parser.add_argument("--samples-per-shard", type=int, default=250)
    parser.add_argument("--block-shards", type=int, default=4)
    parser.add_argument("--side-px", type=int, default=0, help="square pictures of this side instead of photographs")
    parser.add_argument("--latency-s", type=float, default=0.05, help="added to every answer")
    parser.add_argument("--error-share", type=float, default=0.02, help="of answers that are a 503")
    parser.add_argument("--stall-share", type=float, default=0.005, help="of answers that come after --stall-s")
    parser.add_argument("--stall-s", type=float, default=10.0)
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
