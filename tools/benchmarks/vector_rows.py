"""Section `vector`: bins of two and three capacities."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tools.benchmarks.baseline_types import IntArray
from tools.benchmarks.measuring import Row
from tools.benchmarks.options import Options
from tools.benchmarks.packing_rows import Cell, cell_rows
from tools.benchmarks.workloads import Workload, clipped


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Further capacities beside tokens, chosen by `share`: 1 lets the columns bind alike, 1.5 lets tokens dominate."""

    columns: tuple[str, ...]
    share: float

    def sizes(self, samples: Workload, max_tokens: int) -> tuple[IntArray, tuple[int, ...]]:
        """Sizes int64 [n, d] and capacities. A column's capacity is share * max_tokens * total / total of tokens,
        rounded up, at least 1; sizes above a capacity are clipped to it."""
        tokens = clipped(samples.tokens, max_tokens)
        columns, capacity = [tokens], [max_tokens]
        for name in self.columns:
            column: IntArray = getattr(samples, name)
            limit = int(np.ceil(self.share * max_tokens * float(column.sum()) / float(tokens.sum())))
            columns.append(clipped(column, max(limit, 1)))
            capacity.append(max(limit, 1))
        return np.stack(columns, axis=1), tuple(capacity)

    def in_words(self, capacity: tuple[int, ...]) -> str:
        """The capacities of a cell."""
        parts = [f"{value:,} {name}" for value, name in zip(capacity, ("tokens", *self.columns), strict=True)]
        return " + ".join(parts) + (", all bind" if self.share == 1.0 else ", tokens bind")


VECTOR_WORKLOADS = ("vlm", "video", "servegen", "internvl", "real_internvl", "real_image_captions")
VECTOR_LIMITS = (
    Limits(columns=("images",), share=1.0),
    Limits(columns=("images",), share=1.5),
    Limits(columns=("patches",), share=1.0),
    Limits(columns=("patches", "images"), share=1.0),
)
VECTOR_CAPACITIES = (4_096, 32_768)


def vector_cells(options: Options, num_items: int | None = None) -> Iterator[Cell]:
    """All inputs of the section, with `num_items` samples if given."""
    for name in options.names(VECTOR_WORKLOADS):
        samples = options.samples(name, num_items)
        for limits in VECTOR_LIMITS:
            for max_tokens in VECTOR_CAPACITIES:
                if max_tokens not in options.capacities or not samples.images.any():
                    continue
                sizes, capacity = limits.sizes(samples, max_tokens)
                setting = limits.in_words(capacity)
                yield Cell(section="vector", samples=samples, sizes=sizes, capacity=capacity, setting=setting)


def vector_rows(options: Options) -> Iterator[Row]:
    """Two and three capacities."""
    for cell in vector_cells(options):
        yield from cell_rows(cell, options)
