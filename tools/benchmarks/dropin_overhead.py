"""What the loader itself costs: the `overhead` part of `tools.benchmarks.dropin`.

    loading    BalancedDataLoader | DataLoader with the same index lists, dataset, collate: whole passes, in pairs
               ours, plain   plain, ours   ours, plain ...                         ratio of each pair
    waiting    the caller computes, then asks: time inside next(), step by step    ours - plain, in pairs of passes
               the caller sleeps (other threads run) or multiplies matrices (cores and memory are busy)

A plain DataLoader gets its lists ready-made, which is less than any sampler has to do. Loading is measured twice: with
a small JPEG a sample, decoded, scaled and normalised, as image loaders do it, and with pictures that are decoded
already, where all that is left to hide a plan behind is a copy. The target is judged on the first; the second shows
what a step costs in time of the processor. Waiting is measured on large steps: planning them takes longest. `period` is
computing and waiting together: a thread that plans takes its time from the computation, if not from the wait.

One process stands for one rank of many: the collective per step (about 0.3 ms for two ranks) is not in here; it is in
the waits of the `steps` part.
"""

import gc
import importlib
import io
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from balancer.layout import Layout
from tools.benchmarks.dropin_mixes import Mix

Start = Callable[[], Iterator[Any]]
Pixels = NDArray[np.uint8]

MAX_RATIO, MAX_WAIT_MS = 1.03, 1.0
JPEG, PIXELS = "JPEG", "pixels"
_SIDE = 224
_SKIPPED = 3  # first steps of a pass: workers start, the first plan is waited for
SLEEP, MATMUL = "sleep", "matmul"


@dataclass(frozen=True, slots=True, kw_only=True)
class OverheadOptions:
    """Sizes of the measurement.

    Attributes:
        loading_steps, loading_pairs: batches of a pass, and pairs of passes.
        waiting_samples: of a step over all ranks. waiting_ranks: among which they are shared out.
        waiting_steps, waiting_pairs: as above. compute_ms: what the caller computes between two steps, about.
    """

    batch_size: int = 32
    loading_ranks: int = 8
    loading_steps: int = 30
    loading_pairs: int = 10
    waiting_samples: int = 8192
    waiting_ranks: int = 256
    waiting_steps: int = 24
    waiting_pairs: int = 4
    compute_ms: float = 100.0
    workers: tuple[int, ...] = (0, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadingRow:
    """Passes over the same batches; `ratio` is ours / plain of a pair."""

    items: str
    num_workers: int
    plain_ms: float
    ours_ms: float
    ratio: float
    ratio_min: float
    ratio_max: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitingRow:
    """Milliseconds per step; `added_*` are medians over steps and pairs of ours - plain."""

    num_workers: int
    compute: str
    plain_wait_ms: float
    ours_wait_ms: float
    added_wait_ms: float
    added_wait_max_ms: float
    added_period_ms: float


class Pictures:
    """A map-style dataset of pictures, normalised; `decoded`: kept as pixels, which costs less than a tenth."""

    def __init__(self, num_samples: int, *, decoded: bool = False) -> None:
        self._num_samples = num_samples
        self._pictures: list[bytes | Pixels] = [_pixels(file) if decoded else file for file in map(_jpeg, range(8))]

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, i: int) -> NDArray[np.float32]:
        kept = self._pictures[i % len(self._pictures)]
        picture: NDArray[np.float32] = (_pixels(kept) if isinstance(kept, bytes) else kept).astype(np.float32)
        picture -= 127.5
        picture *= 1.0 / 64.0
        return picture.transpose(2, 0, 1)


def _jpeg(seed: int) -> bytes:
    """A smooth picture of 320 x 240 pixels, about 20 kB."""
    random = np.random.Generator(np.random.Philox(seed))
    coarse = Image.fromarray(random.integers(0, 256, (24, 32, 3), dtype=np.uint8))
    file = io.BytesIO()
    coarse.resize((320, 240), Image.Resampling.BICUBIC).save(file, "JPEG", quality=90)
    return file.getvalue()


def _pixels(file: bytes) -> Pixels:
    with Image.open(io.BytesIO(file)) as picture:
        return np.asarray(picture.convert("RGB").resize((_SIDE, _SIDE), Image.Resampling.BICUBIC))


class Numbers:
    """A map-style dataset that costs nothing, so that only the loader is waited for."""

    def __init__(self, num_samples: int) -> None:
        self._num_samples = num_samples

    def __len__(self) -> int:
        return self._num_samples

    def __getitem__(self, i: int) -> int:
        return i


def stacked(samples: list[NDArray[np.float32]]) -> NDArray[np.float32]:
    """[n, ...]: what a collate function does at the least."""
    return np.stack(samples)


def numbers(samples: list[int]) -> NDArray[np.int64]:
    """int64 [n]."""
    return np.array(samples, dtype=np.int64)


def loaders(
    dataset: Any, collate: Callable[[list[Any]], Any], *, costs: Any, batch_size: int, num_ranks: int, num_workers: int
) -> tuple[Start, Start]:
    """(ours, plain): each call starts one pass over the same batches of rank 0."""
    ours = importlib.import_module("balancer.loader").BalancedDataLoader(
        dataset,
        batch_size,
        shuffle=True,
        num_workers=num_workers,
        collate_fn=collate,
        cost=costs,
        parallel=Layout(dp_size=num_ranks),
        dp_rank=0,
    )
    lists = list(ours.batch_sampler)
    plain = importlib.import_module("torch.utils.data").DataLoader(
        dataset, batch_sampler=lists, num_workers=num_workers, collate_fn=collate
    )

    def first_epoch() -> Iterator[Any]:
        ours.set_epoch(0)
        yield from ours

    def once() -> Iterator[Any]:
        yield from plain

    return first_epoch, once


def loading(options: OverheadOptions) -> list[LoadingRow]:
    """Whole passes of both loaders, by number of workers."""
    num_samples = options.loading_steps * options.batch_size * options.loading_ranks
    costs = Mix("vlm", num_samples, with_pixels=False).counts.llm_tokens
    rows = []
    for items, num_workers in product((JPEG, PIXELS), options.workers):
        both = loaders(
            Pictures(num_samples, decoded=items == PIXELS),
            stacked,
            costs=costs,
            batch_size=options.batch_size,
            num_ranks=options.loading_ranks,
            num_workers=num_workers,
        )
        pairs = in_pairs(_pass_ms, *both, pairs=options.loading_pairs)
        ratios = [ours / plain for ours, plain in pairs]
        rows.append(
            LoadingRow(
                items=items,
                num_workers=num_workers,
                ours_ms=statistics.median(ours for ours, _ in pairs),
                plain_ms=statistics.median(plain for _, plain in pairs),
                ratio=statistics.median(ratios),
                ratio_min=min(ratios),
                ratio_max=max(ratios),
            )
        )
    return rows


def waiting(options: OverheadOptions) -> list[WaitingRow]:
    """Time inside next() of both loaders, by number of workers and by what the caller does."""
    num_samples = options.waiting_samples * options.waiting_steps
    costs = Mix("vlm", num_samples, with_pixels=False).counts
    columns = np.stack([costs.patches, costs.llm_tokens], axis=1)
    work: dict[str, Callable[[], object]] = {
        SLEEP: lambda: time.sleep(options.compute_ms / 1e3),
        MATMUL: matmul_of(options.compute_ms),
    }
    rows = []
    for num_workers in options.workers:
        both = loaders(
            Numbers(num_samples),
            numbers,
            costs=columns,
            batch_size=options.waiting_samples // options.waiting_ranks,
            num_ranks=options.waiting_ranks,
            num_workers=num_workers,
        )
        for name, compute in work.items():
            pairs = in_pairs(partial(waits, compute=compute), *both, pairs=options.waiting_pairs)
            rows.append(_waiting_row(num_workers, name, pairs))
    return rows


def waits(start: Start, compute: Callable[[], object]) -> tuple[list[float], list[float]]:
    """(ms inside next(), ms of computing and next()) of every step of a pass but the first ones."""
    batches = start()
    inside: list[float] = []
    periods: list[float] = []
    next(batches)
    while True:
        begin = time.perf_counter()
        compute()
        asked = time.perf_counter()
        try:
            next(batches)
        except StopIteration:
            return inside[_SKIPPED:], periods[_SKIPPED:]
        end = time.perf_counter()
        inside.append(1e3 * (end - asked))
        periods.append(1e3 * (end - begin))


def in_pairs(
    measure: Callable[[Start], Any],
    ours: Start,
    plain: Start,
    *,
    pairs: int,
) -> list[tuple[Any, Any]]:
    """(ours, plain) of every pair: ours first in one, last in the next; one unmeasured pass of each before."""
    for one in (ours, plain):
        measure(one)
    found = []
    for number in range(pairs):
        gc.collect()
        if number % 2 == 0:
            first = measure(ours)
            found.append((first, measure(plain)))
        else:
            last = measure(plain)
            found.append((measure(ours), last))
    return found


def matmul_of(milliseconds: float) -> Callable[[], object]:
    """Products of matrices on torch's threads that take about this long together."""
    torch = importlib.import_module("torch")
    matrix = torch.randn(768, 768, generator=torch.Generator().manual_seed(0))
    times = []
    for _ in range(8):
        start = time.perf_counter()
        torch.mm(matrix, matrix)
        times.append(time.perf_counter() - start)
    count = max(1, round(milliseconds / 1e3 / min(times)))
    return lambda: [torch.mm(matrix, matrix) for _ in range(count)]


def _pass_ms(start: Start) -> float:
    begin = time.perf_counter()
    for _ in start():
        pass
    return 1e3 * (time.perf_counter() - begin)


def _waiting_row(num_workers: int, compute: str, pairs: Sequence[tuple[Any, Any]]) -> WaitingRow:
    """From ((waits, periods) of ours, the same of plain) of every pair; step k of one beside step k of the other."""
    by_step = [
        (a - b, c - d)
        for (ours, our_periods), (plain, periods) in pairs
        for a, b, c, d in zip(ours, plain, our_periods, periods, strict=True)
    ]
    return WaitingRow(
        num_workers=num_workers,
        compute=compute,
        ours_wait_ms=statistics.median(wait for (ours, _), _ in pairs for wait in ours),
        plain_wait_ms=statistics.median(wait for _, (plain, _) in pairs for wait in plain),
        added_wait_ms=statistics.median(wait for wait, _ in by_step),
        added_wait_max_ms=max(wait for wait, _ in by_step),
        added_period_ms=statistics.median(period for _, period in by_step),
    )


def overhead_markdown(options: OverheadOptions, loaded: Sequence[LoadingRow], waited: Sequence[WaitingRow]) -> str:
    """The tables of docs/dropin_measured.md."""
    worst, longest = max(row.ratio for row in loaded if row.items == JPEG), max(row.added_wait_ms for row in waited)
    lines = [
        "| samples | workers | plain ms a batch | ours ms a batch | ours / plain, median (min to max) |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.items} | {row.num_workers} | {row.plain_ms / options.loading_steps:.2f} "
        f"| {row.ours_ms / options.loading_steps:.2f} | {row.ratio:.3f} ({row.ratio_min:.3f} to {row.ratio_max:.3f}) |"
        for row in loaded
    ]
    lines += [
        "",
        "| workers | the caller | plain wait ms | our wait ms | added wait ms, median | longest | added to period ms |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.num_workers} | {row.compute} | {row.plain_wait_ms:.3f} | {row.ours_wait_ms:.3f} "
        f"| {row.added_wait_ms:+.3f} | {row.added_wait_max_ms:+.2f} | {row.added_period_ms:+.2f} |"
        for row in waited
    ]
    return "\n".join(
        [
            *lines,
            "",
            f"- ours / plain at most {MAX_RATIO}, {JPEG}: {_verdict(worst <= MAX_RATIO)} ({worst:.3f})",
            f"- added wait below {MAX_WAIT_MS:.0f} ms at {options.waiting_samples:,} samples a step: "
            f"{_verdict(longest < MAX_WAIT_MS)} ({longest:+.3f} ms)",
            "",
        ]
    )


def _verdict(reached: bool) -> str:
    return "PASS" if reached else "MISS"
