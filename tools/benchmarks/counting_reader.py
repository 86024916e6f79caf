"""A reader whose loader workers leave word of what they did: requests of their storage, CPU time, by process.

    worker: load, load, ..., pack --> FOLDER/PID.json (replaced whole) --parent: totals(folder)--> Totals

Price: one small file is written per cell.
"""

import json
import os
import resource
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from balancer.packed_cell import PackedCell
from balancer.sample_reader import SampleReader
from dataloaders.sample import LoadedSample
from dataloaders.storage import StorageCounters
from dataloaders.tar_source import TarSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Sums over the workers of one pass (`max_in_flight`: the highest of one worker).

    Attributes:
        requests, bytes_read, retries, hedged, prefetch_hits, wasted_bytes: see `StorageCounters`.
        cpu_s: CPU seconds of the workers, their start included.
        network_cpu_s: of these, of the thread that talks to the server.
    """

    requests: int = 0
    bytes_read: int = 0
    retries: int = 0
    hedged: int = 0
    prefetch_hits: int = 0
    wasted_bytes: int = 0
    max_in_flight: int = 0
    cpu_s: float = 0.0
    network_cpu_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CountingReader(SampleReader):
    """A `SampleReader` that writes the figures of its process to `folder` with every cell."""

    folder: str

    def pack(self, samples: Sequence[LoadedSample], *, step: int = 0, microbatch_index: int = 0) -> PackedCell:
        """As `SampleReader.pack`."""
        cell = SampleReader.pack(self, samples, step=step, microbatch_index=microbatch_index)
        self._leave_word()
        return cell

    def _leave_word(self) -> None:
        source = self.source
        counters = asdict(source.storage.counters if isinstance(source, TarSource) else StorageCounters())
        usage = resource.getrusage(resource.RUSAGE_SELF)
        own = {"cpu_s": usage.ru_utime + usage.ru_stime, "network_cpu_s": _thread_cpu_s("fsspecIO")}
        known = {entry.name for entry in fields(Totals)}
        text = json.dumps({name: value for name, value in (counters | own).items() if name in known})
        path = Path(self.folder, f"{os.getpid()}.json")
        path.with_suffix(".new").write_text(text)
        path.with_suffix(".new").replace(path)


def totals(folder: Path) -> Totals:
    """Sums over the workers that wrote to `folder`."""
    found = [Totals(**json.loads(path.read_text())) for path in sorted(folder.glob("*.json"))]
    sums = {entry.name: sum(getattr(one, entry.name) for one in found) for entry in fields(Totals)}
    return Totals(**{**sums, "max_in_flight": max((one.max_in_flight for one in found), default=0)})


def _thread_cpu_s(name: str) -> float:
    """CPU seconds of this process's threads of a name (of Python: the system does not know it)."""
    total = 0
    for number in [thread.native_id for thread in threading.enumerate() if thread.name == name]:
        line = Path(f"/proc/self/task/{number}/stat").read_text()
        rest = line[line.rindex(")") + 2 :].split()
        total += int(rest[11]) + int(rest[12])
    return total / os.sysconf("SC_CLK_TCK")
