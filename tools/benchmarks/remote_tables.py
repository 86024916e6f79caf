"""What `tools.benchmarks.remote` measures, and its tables.

RemotePass, RemotePass, ... --markdown--> speed by shuffle; requests and bytes; what a run does once
"""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from tools.benchmarks.counting_reader import Totals
from tools.benchmarks.loader import Pass
from tools.benchmarks.server_process import ServerLoad

LOCAL, REMOTE = "local", "remote"


@dataclass(frozen=True, slots=True, kw_only=True)
class RemotePass:
    """One pass over the epoch.

    Attributes:
        shuffle: block, full. place: local, remote. num_ranks: processes, each with its workers.
        timing: samples and times; of several ranks, None.
        wanted_bytes: of the members of the samples that were read.
        workers: sums over the workers. server: what it did meanwhile; None where nothing was asked of it.
        elsewhere: CPU time that other programs took, as a share of all cores; NaN where it cannot be told.
    """

    shuffle: str
    place: str
    num_ranks: int
    timing: Pass | None
    wanted_bytes: int
    workers: Totals
    server: ServerLoad | None
    elsewhere: float

    @property
    def amplification(self) -> float:
        """Bytes that the server sent per byte of a member."""
        return self.server.bytes_sent / self.wanted_bytes if self.server is not None else float("nan")


@dataclass(frozen=True, slots=True, kw_only=True)
class Preparation:
    """What a run does once: the pass over the headers of the shards, and the scan that makes the index.

    Attributes:
        header_s, scan_s: wall time. header_load, scan_load: what the server did for it.
        corpus_bytes: of all shards.
    """

    header_s: float
    scan_s: float
    header_load: ServerLoad
    scan_load: ServerLoad
    corpus_bytes: int


def markdown(passes: Sequence[RemotePass], preparation: Preparation, title: str) -> str:
    """All tables."""
    return "\n".join([f"## {title}", "", *_speed(passes), "", *_requests(passes), "", *_prepared(preparation), ""])


def _speed(passes: Sequence[RemotePass]) -> list[str]:
    lines = [
        "| shuffle | local samples/s | remote samples/s | remote / local, steady | remote / local, whole pass "
        "| cores taken by other programs: local, remote |",
        "|---|---|---|---|---|---|",
    ]
    for shuffle in dict.fromkeys(entry.shuffle for entry in passes):
        sides = [
            [entry for entry in passes if (entry.shuffle, entry.place) == (shuffle, place) and entry.timing]
            for place in (LOCAL, REMOTE)
        ]
        local, remote = ([entry.timing for entry in side if entry.timing] for side in sides)
        steady = [b.steady_per_s / a.steady_per_s for a, b in zip(local, remote, strict=True)]
        whole = [b.whole_per_s / a.whole_per_s for a, b in zip(local, remote, strict=True)]
        figures = [_spread([one.steady_per_s for one in side], ".0f") for side in (local, remote)]
        others = ", ".join(f"{statistics.median(entry.elsewhere for entry in side):.0%}" for side in sides)
        words = [shuffle, *figures, _spread(steady, ".2f"), _spread(whole, ".2f"), others]
        lines.append(f"| {' | '.join(words)} |")
    return lines


def _requests(passes: Sequence[RemotePass]) -> list[str]:
    lines = [
        "| shuffle, ranks | requests | bytes sent / members' | 503s | stalls | retries | hedged | in flight, most "
        "| CPU s: workers (of it network), server |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for shuffle, ranks in dict.fromkeys((entry.shuffle, entry.num_ranks) for entry in passes):
        own = [entry for entry in passes if (entry.shuffle, entry.num_ranks, entry.place) == (shuffle, ranks, REMOTE)]
        loads = [entry.server for entry in own if entry.server is not None]
        figures = [
            _spread([load.requests for load in loads], ",.0f"),
            _spread([entry.amplification for entry in own], ".3f"),
            _spread([load.errors for load in loads], ".0f"),
            _spread([load.stalls for load in loads], ".0f"),
            _spread([entry.workers.retries for entry in own], ".0f"),
            _spread([entry.workers.hedged for entry in own], ".0f"),
            str(max(load.max_in_flight for load in loads)),
            f"{statistics.median(entry.workers.cpu_s for entry in own):.1f} "
            f"({statistics.median(entry.workers.network_cpu_s for entry in own):.1f}), "
            f"{statistics.median(load.cpu_s for load in loads):.1f}",
        ]
        lines.append(f"| {shuffle}, {ranks} | {' | '.join(figures)} |")
    return lines


def _prepared(preparation: Preparation) -> list[str]:
    lines = ["| once | seconds | requests | bytes read | share of the shards' bytes |", "|---|---|---|---|---|"]
    parts = (
        ("pass over the headers", preparation.header_s, preparation.header_load),
        ("scan", preparation.scan_s, preparation.scan_load),
    )
    for name, seconds, load in parts:
        share = load.bytes_sent / preparation.corpus_bytes
        lines.append(f"| {name} | {seconds:.1f} | {load.requests:,} | {load.bytes_sent:,} | {share:.1%} |")
    return lines


def _spread(values: Sequence[float], form: str) -> str:
    if not values:
        return "-"
    return f"{statistics.median(values):{form}} ({min(values):{form}} to {max(values):{form}})"
