"""How a cost is spread over samples: bins that double, and in each its share of the samples and of the cost.

    LLM tokens         samples                     cost
      256 to 511       ████████████  61.2 %        ███  14.0 %
      512 to 1,023     ██████        30.1 %        ███  15.3 %
      ...
      65,536 to ...    .              0.1 %        ████████ 44.9 %       <- what dominates

Bins are powers of two, so a tail of four orders of magnitude fits a page, and a bin means the same in every report.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

BAR_CHARS = 16
_EIGHTHS = " ▏▎▍▌▋▊▉"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bin:
    """Samples whose count is in [low, high]: how many, and their sum; shares of all samples and of the whole sum."""

    low: int
    high: int
    samples: int
    total: int
    sample_share: float
    total_share: float


def histogram(values: NDArray[Any]) -> tuple[Bin, ...]:
    """Bins from the smallest to the largest value, empty ones in between included; zeros have a bin of their own.

    Between zeros and the first number above them there is nothing to see, so empty bins are left out there.
    """
    counts = np.asarray(values, dtype=np.int64)
    if not len(counts):
        return ()
    # 0 -> bin 0, 1 -> 1, 2..3 -> 2, 4..7 -> 3, ...: exact, where a logarithm of a float is not.
    powers = np.left_shift(np.int64(1), np.arange(63, dtype=np.int64))
    where = np.searchsorted(powers, counts, side="right")
    samples, num, whole = np.bincount(where), len(counts), int(counts.sum())
    bins = []
    first = int(where[where > 0].min(initial=where.max()))
    for number in (*([0] if samples[0] else []), *range(max(first, 1), int(where.max()) + 1)):
        total = int(counts[where == number].sum())
        low, high = (0, 0) if number == 0 else (2 ** (number - 1), 2**number - 1)
        bins.append(
            Bin(
                low=low,
                high=high,
                samples=int(samples[number]),
                total=total,
                sample_share=int(samples[number]) / num,
                total_share=total / whole if whole else 0.0,
            )
        )
    return tuple(bins)


def histogram_table(title: str, bins: tuple[Bin, ...]) -> Table:
    """The bins as bars of text."""
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for name in ("from", "to", "samples"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("share of samples", no_wrap=True)
    table.add_column("share of the sum", no_wrap=True)
    for row in bins:
        shares = (f"{_bar(share)} {share:6.1%}" for share in (row.sample_share, row.total_share))
        table.add_row(f"{row.low:,}", f"{row.high:,}", f"{row.samples:,}", *shares)
    return table


def ticks(bins: tuple[Bin, ...], most: int) -> Iterator[tuple[int, Bin]]:
    """At most `most` bins to label, evenly spaced, the first one included."""
    step = max(1, -(-len(bins) // most))
    yield from ((index, row) for index, row in enumerate(bins) if index % step == 0)


def _bar(share: float) -> str:
    """A bar of `BAR_CHARS` characters at a share of 1; a share above zero never vanishes."""
    eighths = round(share * BAR_CHARS * 8)
    if share > 0:
        eighths = max(eighths, 1)
    full, rest = divmod(eighths, 8)
    return ("█" * full + (_EIGHTHS[rest] if rest else "")).ljust(BAR_CHARS)
