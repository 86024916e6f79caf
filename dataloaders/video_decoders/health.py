"""How decoders fare on a folder of files: the measurement behind `AUTO_ORDER` and the table of docs/decoding.md.

    truth: PyAV from the start, every frame  --the wanted numbers-->  compared with each decoder, pixel by pixel
    time:  CPU of this process, decoders in turn on each file, median of ratios to PyAV from the start
    leaks: resident memory over many opens of one small clip

Price: each file is decoded whole once and its wanted frames several times.
"""

import gc
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from dataloaders.errors import MediaError
from dataloaders.probe.limits import ProbeLimits
from dataloaders.video_decoders.base import BackendFailed, Clip, Picture, VideoDecoder
from dataloaders.video_decoders.builtin_clip import builtin_clip
from dataloaders.video_decoders.with_pyav import PyavDecoder

_TRUTH = "from the start"
_LEVELS = 2  # of 255: rounding differs between versions of the colour conversion


@dataclass(frozen=True, slots=True, kw_only=True)
class Health:
    """One decoder over all files of which the truth is known.

    Attributes:
        decoder: its name.
        files: sound files tried. exact: all wanted frames equal the truth, pixel by pixel. near: equal but for rounding
            (2 of 255). wrong: other pictures, in silence; these files by name.
        refused: files handed to PyAV instead: name -> reason.
        relative_cpu: median over the exact files of its CPU time over that of decoding from the start.
        cpu_ms: sum over the `num_common` files that every decoder of the run decodes.
        growth_bytes: growth of resident memory over `opens` opens of a small clip.
    """

    decoder: str
    files: int = 0
    exact: int = 0
    near: int = 0
    wrong: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    relative_cpu: float = float("nan")
    cpu_ms: float = float("nan")
    num_common: int = 0
    opens: int = 0
    growth_bytes: int = 0


@dataclass(slots=True)
class _Tally:
    exact: int = 0
    near: int = 0
    wrong: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    ratios: list[float] = field(default_factory=list)
    cpu_ms: dict[str, float] = field(default_factory=dict)

    def add(self, name: str, run: "_Run", truth: "_Run") -> None:
        """Note one file."""
        if run.refused:
            self.refused[name] = run.refused
            return
        apart = max(_distance(a, b) for a, b in zip(run.pictures, truth.pictures, strict=True))
        if apart > _LEVELS:
            self.wrong.append(name)
            return
        self.exact += apart == 0
        self.near += apart > 0
        self.cpu_ms[name] = run.median_ms
        self.ratios.append(run.median_ms / max(truth.median_ms, 1e-3))


@dataclass(slots=True)
class _Run:
    """One decoder on one file: pictures of the wanted frames, CPU ms of each round, or why not."""

    pictures: list[Picture] = field(default_factory=list)
    runs_ms: list[float] = field(default_factory=list)
    refused: str = ""

    @property
    def median_ms(self) -> float:
        return statistics.median(self.runs_ms)


def measure_health(
    files: Sequence[Path],
    decoders: Mapping[str, VideoDecoder],
    *,
    num_frames: int = 16,
    repeats: int = 3,
    opens: int = 200,
    limits: ProbeLimits | None = None,
) -> list[Health]:
    """A row for each decoder over the files that decode without a fault; `num_frames` of each, evenly spread."""
    limits, tallies, known = limits or ProbeLimits(), {name: _Tally() for name in decoders}, 0
    for path in files:
        clip = Clip(data=path.read_bytes(), limits=limits, place=str(path))
        try:
            wanted = _spread(clip, num_frames)
        except MediaError:
            continue
        if not wanted:
            continue
        known += 1
        runs = _rounds({_TRUTH: PyavDecoder(skip_groups=False), **decoders}, clip, wanted, repeats)
        for name in decoders:
            tallies[name].add(path.name, runs[name], runs[_TRUTH])
    everywhere = set.intersection(*(set(tally.cpu_ms) for tally in tallies.values())) if tallies else set()
    return [
        Health(
            decoder=name,
            files=known,
            exact=tally.exact,
            near=tally.near,
            wrong=tuple(tally.wrong),
            refused=tally.refused,
            relative_cpu=statistics.median(tally.ratios) if tally.ratios else float("nan"),
            cpu_ms=sum(tally.cpu_ms[file] for file in everywhere),
            num_common=len(everywhere),
            opens=opens,
            growth_bytes=memory_growth(decoders[name], opens) if opens else 0,
        )
        for name, tally in tallies.items()
    ]


def memory_growth(decoder: VideoDecoder, opens: int) -> int:
    """Bytes by which resident memory grows over `opens` opens of the built-in clip, after 50 to warm up; 0 without
    /proc."""
    clip = Clip(data=builtin_clip())
    before = 0
    for number in range(50 + opens):
        if number == 50:
            before = _resident_bytes()
        decoder.take(clip, (0, 7), np.shape)
    return _resident_bytes() - before


def _spread(clip: Clip, num_frames: int) -> list[int]:
    """Evenly spread frame numbers of a clip, by decoding it to its end; none where it is damaged: no truth is known."""
    # A number that no stream reaches makes it read to the end, where it tells how many frames there are.
    whole = PyavDecoder(skip_groups=False).take(clip, (clip.limits.max_frames,), np.shape)
    if whole.bad_packets or not whole.num_frames:
        return []
    return sorted({number * whole.num_frames // num_frames for number in range(num_frames)})


def _rounds(decoders: Mapping[str, VideoDecoder], clip: Clip, wanted: Sequence[int], repeats: int) -> dict[str, _Run]:
    """All decoders in turn, `repeats` times, so that a disturbance of the machine meets all of them."""
    runs = {name: _Run() for name in decoders}
    for _ in range(repeats):
        for name, run in runs.items():
            if run.refused:
                continue
            start_s = time.process_time()
            try:
                run.pictures = decoders[name].take(clip, wanted, np.copy).frames
            except (BackendFailed, MediaError) as error:
                run.refused = str(error)
            run.runs_ms.append(1e3 * (time.process_time() - start_s))
    return runs


def _distance(a: Picture, b: Picture) -> int:
    """Largest difference of two pictures, 256 where their shapes differ."""
    return int(np.abs(a.astype(np.int16) - b.astype(np.int16)).max()) if a.shape == b.shape else 256


def _resident_bytes() -> int:
    gc.collect()
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if statm.exists() else 0
