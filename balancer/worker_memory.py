"""Memory of loader workers over time, and an alarm when it only ever grows.

    (samples, bytes) after every so many samples --least squares behind the warm-up--> bytes per 1000 samples

Counted is anonymous memory, a worker's own: pages of a mapped index or of files in the page cache are no leak. Price: a
data set whose samples grow larger and larger looks like a leak until its largest ones have been seen.
"""

import os
import time
from dataclasses import dataclass, field
from pathlib import Path

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryWatch:
    """When to look at the memory of a worker and when to speak.

    Attributes:
        every_samples: samples between two looks.
        warmup_samples: looks before so many samples do not count: caches fill, imports happen.
        min_growth_bytes, min_slope_bytes: growth behind the warm-up, and growth per 1000 samples, from which on, both
            together, there is an alarm.
        log_interval_s: seconds between two lines about a worker.
    """

    every_samples: int = 256
    warmup_samples: int = 1024
    min_growth_bytes: int = 512 << 20
    min_slope_bytes: int = 8 << 20
    log_interval_s: float = 600.0


@dataclass(slots=True)
class MemoryTrend:
    """Line through the looks at one process, as running sums."""

    watch: MemoryWatch
    next_look: int = 0
    first_bytes: int = 0
    alarmed: bool = False
    logged_s: float = field(default_factory=time.monotonic)
    _sums: list[float] = field(default_factory=lambda: [0.0] * 5)  # n, x, y, xx, xy

    def add(self, samples: int, num_bytes: int) -> None:
        """Note one look after `samples` samples of this process."""
        self.next_look = samples + self.watch.every_samples
        if samples < self.watch.warmup_samples:
            return
        self.first_bytes = self.first_bytes or num_bytes
        # Differences to the first look, in thousands of samples, so that the sums stay exact enough.
        x, y = samples / 1e3, float(num_bytes - self.first_bytes)
        for place, term in enumerate((1.0, x, y, x * x, x * y)):
            self._sums[place] += term

    @property
    def slope_bytes(self) -> float:
        """Growth in bytes per 1000 samples; 0 before three looks."""
        n, x, y, xx, xy = self._sums
        spread = n * xx - x * x
        return (n * xy - x * y) / spread if n >= 3 and spread > 0 else 0.0

    def leaks(self, num_bytes: int) -> bool:
        """Whether a process that now has `num_bytes` should be reported; True once."""
        grown = num_bytes - self.first_bytes if self.first_bytes else 0
        found = grown >= self.watch.min_growth_bytes and self.slope_bytes >= self.watch.min_slope_bytes
        found = found and not self.alarmed
        self.alarmed |= found
        return found


def own_bytes(pid: int) -> int:
    """Anonymous resident memory of a process; 0 where it cannot be told."""
    try:
        words = Path(f"/proc/{pid}/statm").read_text().split()
    except OSError:
        return 0
    return (int(words[1]) - int(words[2])) * _PAGE_BYTES
