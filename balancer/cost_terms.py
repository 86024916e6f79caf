"""Coefficients of a stage, and their evaluation: counts to integer nanoseconds or bytes, the same on every host.

    counts  int64 [n] per column --- one product per term, rounded to an integer; integers added ---> int64 [n, S]

A term is *one* IEEE multiplication of an exact integer count and a coefficient; the product is rounded to an integer
and only integers are added: no BLAS, no fused operation, no order to depend on, so hosts agree to the bit. Price: up
to half a unit of rounding per term. Stages with equal coefficients are evaluated once, in blocks of rows that stay in
the cache.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Literal, NamedTuple

import numpy as np

from balancer.counts import Int64Array, StepCounts
from balancer.errors import CostModelError
from balancer.number_checks import is_number, is_whole

Column = Literal["samples", "items", "tokens", "labels", "visual", "patches", "full_sq", "window_sq"]
Columns = Mapping[Column, Int64Array]
DOMAINS = ("encoder", "llm", "generator")
MAX_STAGES = 4096

_LARGEST_TERM = 2.0**58
# Three days of one micro-batch: thousands of them still add up in int64.
_LARGEST_CONSTANT_NS = 2.0**48
# Squares of longer samples leave int64.
_LARGEST_TOKENS = 2**31
_BLOCK_ROWS = 16384


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTerms:
    """Coefficients of one stage in one direction, in nanoseconds per unit.

    Attributes:
        constant_ns: per micro-batch that runs the stage at all (launch overhead); not part of a sample's cost.
        per_patch_ns, per_token_ns, per_label_ns: linear terms.
        per_full_sq_ns, per_window_sq_ns: per squared patch of full and window attention segments.
        per_token_sq_ns: per squared LLM token of a sample (causal attention: half the pairs are already taken off).
        per_sample_ns, per_item_ns, per_visual_ns: per sample, media item, and LLM position with a visual embedding.
        per_causal_window_ns: per unit of l^2 - max(l - causal_window, 0)^2, twice the pairs of causal attention that
            sees the last `causal_window` tokens only; the same unit as `per_token_sq_ns`, which it equals for short l.
        causal_window: that window in tokens; 0 where the term is not used.

    Raises:
        CostModelError: a coefficient that is negative, not finite or beyond what integer nanoseconds hold, or a
            windowed term without a window.
    """

    constant_ns: float = 0.0
    per_patch_ns: float = 0.0
    per_token_ns: float = 0.0
    per_label_ns: float = 0.0
    per_full_sq_ns: float = 0.0
    per_window_sq_ns: float = 0.0
    per_token_sq_ns: float = 0.0
    per_sample_ns: float = 0.0
    per_item_ns: float = 0.0
    per_visual_ns: float = 0.0
    per_causal_window_ns: float = 0.0
    causal_window: int = 0

    def __post_init__(self) -> None:
        for name in COEFFICIENTS:
            value = getattr(self, name)
            limit = _LARGEST_CONSTANT_NS if name == "constant_ns" else _LARGEST_TERM
            if not is_number(value, high=limit):
                raise CostModelError(
                    f"{name}={str(value)[:40]}: a cost coefficient is finite and not negative, at most {limit:.3g} ns"
                )
        window_fits = is_whole(self.causal_window, high=_LARGEST_TOKENS)
        if not window_fits or (self.per_causal_window_ns > 0.0 and self.causal_window == 0):
            raise CostModelError(
                f"causal_window={str(self.causal_window)[:40]} with per_causal_window_ns={self.per_causal_window_ns}: "
                "a window is a positive number of tokens"
            )

    def scaled(self, factor: float) -> "StageTerms":
        """The same terms, each coefficient multiplied by `factor`."""
        scaled = {name: getattr(self, name) * factor for name in COEFFICIENTS}
        return StageTerms(**scaled, causal_window=self.causal_window)


COEFFICIENTS = tuple(field.name for field in fields(StageTerms) if field.name.endswith("_ns"))
_HALF_OF_BACKWARD = StageTerms()  # known by identity: an equal one means that nothing has a weight gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """Terms of one stage.

    Attributes:
        forward, backward: one forward; one whole backward.
        weight: the part of `backward` that makes weight gradients and may run later (default: half of it).

    Raises:
        CostModelError: a weight part that is larger than the backward it belongs to.
    """

    forward: StageTerms
    backward: StageTerms
    weight: StageTerms = _HALF_OF_BACKWARD

    def __post_init__(self) -> None:
        if self.weight is _HALF_OF_BACKWARD:
            object.__setattr__(self, "weight", self.backward.scaled(0.5))
        for name in COEFFICIENTS:
            part, whole = getattr(self.weight, name), getattr(self.backward, name)
            if part > whole:
                raise CostModelError(f"weight part {name}={part} exceeds the backward it belongs to, {whole}")
        if self.weight.per_causal_window_ns > 0.0 and self.weight.causal_window != self.backward.causal_window:
            raise CostModelError(
                f"weight part with causal_window={self.weight.causal_window}; the backward has "
                f"{self.backward.causal_window}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """Modelled bytes that one micro-batch keeps on a stage between its forward and its backward, at their peak.

    Integers, so a micro-batch holds exactly the sum of its samples plus `constant_bytes`; formulas are in
    `balancer.activation_memory`.

    Raises:
        CostModelError: a number of bytes that is negative or no integer of 64 bits.
    """

    constant_bytes: int = 0
    per_sample_bytes: int = 0
    per_item_bytes: int = 0
    per_token_bytes: int = 0
    per_label_bytes: int = 0
    per_visual_bytes: int = 0
    per_patch_bytes: int = 0

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not is_whole(value):
                raise CostModelError(f"{field.name}={str(value)[:40]}: bytes are integers from 0")


_TIME_COLUMNS: tuple[tuple[str, Column], ...] = (
    ("per_sample_ns", "samples"),
    ("per_item_ns", "items"),
    ("per_patch_ns", "patches"),
    ("per_visual_ns", "visual"),
    ("per_token_ns", "tokens"),
    ("per_label_ns", "labels"),
    ("per_full_sq_ns", "full_sq"),
    ("per_window_sq_ns", "window_sq"),
)
_BYTE_COLUMNS: tuple[tuple[str, Column], ...] = (
    ("per_sample_bytes", "samples"),
    ("per_item_bytes", "items"),
    ("per_patch_bytes", "patches"),
    ("per_visual_bytes", "visual"),
    ("per_token_bytes", "tokens"),
    ("per_label_bytes", "labels"),
)


def sample_columns(counts: StepCounts) -> Columns:
    """Columns with one row per sample."""
    return {
        "samples": np.ones(len(counts), dtype=np.int64),
        "items": counts.num_items,
        "tokens": counts.llm_tokens,
        "labels": counts.label_tokens,
        "visual": counts.visual_tokens,
        "patches": counts.patches,
        "full_sq": counts.full_total_sq,
        "window_sq": counts.window_total_sq,
    }


def item_columns(counts: StepCounts) -> Columns:
    """Columns with one row per media item; what only samples have is absent."""
    return {
        "items": np.ones(len(counts.item_patches), dtype=np.int64),
        "patches": counts.item_patches,
        "visual": counts.item_visual_tokens,
        "full_sq": counts.item_full_sq,
        "window_sq": counts.item_window_sq,
    }


def times_ns(stages: Sequence[StageTerms], columns: Columns, row_ids: Int64Array) -> Int64Array:
    """Nanoseconds of every row on every stage, int64 [n, S], without constants.

    Args:
        stages: S terms.
        columns: int64 [n] each; a column that is absent counts nothing.
        row_ids: int64 [n]: what an error calls a row.

    Raises:
        CostModelError: a time beyond the range of int64 nanoseconds.
    """
    if "tokens" in columns and len(row_ids) and int(columns["tokens"].max()) > _LARGEST_TOKENS:
        row = int(columns["tokens"].argmax())
        raise CostModelError(
            f"sample {int(row_ids[row])} has {int(columns['tokens'][row])} tokens: its square leaves int64; "
            "check its counts"
        )
    recipes = [_recipe(terms, columns) for terms in stages]
    for term in dict.fromkeys(term for recipe in recipes for term in recipe):
        _check_range(term, columns[term.column], row_ids)
    return _evaluate(recipes, columns, len(row_ids))


def stage_bytes(stages: Sequence[StageMemory], columns: Columns, row_ids: Int64Array) -> Int64Array:
    """Bytes of every row on every stage, int64 [n, S], without constants: exact integers.

    Raises:
        CostModelError: a sum beyond the range of int64.
    """
    result = np.zeros((len(row_ids), len(stages)), dtype=np.int64)
    for index, memory in enumerate(stages):
        for name, column in _BYTE_COLUMNS:
            coefficient = getattr(memory, name)
            if coefficient and column in columns:
                _check_range(_Term(column, float(coefficient)), columns[column], row_ids, unit="bytes")
                result[:, index] += columns[column] * coefficient
    return result


class _Term(NamedTuple):
    """What identifies a product.

    Attributes:
        column, coefficient: its factors.
        squared: the column enters as l^2 - max(l - window, 0)^2, with window 0 as l^2.
    """

    column: Column
    coefficient: float
    squared: bool = False
    window: int = 0

    def values(self, column: Int64Array) -> Int64Array:
        """The integer factor, from (a block of) the column."""
        if not self.squared:
            return column
        squares = column * column
        if self.window:
            outside = np.maximum(column - self.window, 0)
            squares -= outside * outside
        return squares


def _recipe(terms: StageTerms, columns: Columns) -> tuple[_Term, ...]:
    """The products that make up a stage."""
    found = [
        *(_Term(column, getattr(terms, name)) for name, column in _TIME_COLUMNS),
        _Term("tokens", terms.per_token_sq_ns, squared=True),
        _Term("tokens", terms.per_causal_window_ns, squared=True, window=terms.causal_window),
    ]
    return tuple(term for term in found if term.coefficient > 0.0 and term.column in columns)


def _check_range(term: _Term, column: Int64Array, row_ids: Int64Array, unit: str = "ns") -> None:
    if not len(column):
        return
    largest = float(term.values(column.max(keepdims=True))[0]) * term.coefficient
    if largest > _LARGEST_TERM:
        row = int(row_ids[int(column.argmax())])
        raise CostModelError(
            f"sample {row} costs {largest:.3g} {unit}, beyond what integer "
            f"{'nanoseconds' if unit == 'ns' else 'bytes'} hold; check its counts and the rate of the cost model"
        )


def _evaluate(recipes: Sequence[tuple[_Term, ...]], columns: Columns, num_rows: int) -> Int64Array:
    """Sum of rounded products per stage, block by block; equal products and equal stages are computed once."""
    result = np.zeros((num_rows, len(recipes)), dtype=np.int64)
    size = min(_BLOCK_ROWS, num_rows)
    product = np.empty(size, dtype=np.float64)
    rounded = {term: np.empty(size, dtype=np.int64) for recipe in recipes for term in recipe}
    stages_of: dict[tuple[_Term, ...], list[int]] = {}
    for index, recipe in enumerate(recipes):
        stages_of.setdefault(recipe, []).append(index)
    for start in range(0, num_rows, _BLOCK_ROWS):
        rows = slice(start, min(start + _BLOCK_ROWS, num_rows))
        block = slice(0, rows.stop - start)
        for term, integers in rounded.items():
            np.multiply(term.values(columns[term.column][rows]), term.coefficient, out=product[block])
            np.rint(product[block], out=product[block])
            integers[block] = product[block]
        for recipe, indices in stages_of.items():
            if recipe:
                total = rounded[recipe[0]][block]
                for term in recipe[1:]:
                    total = total + rounded[term][block]
                for index in indices:
                    result[rows, index] = total
    return result
