"""What a micro-batch costs on the machine that measures: a linear fit of whole micro-batches, forward and backward.

    random cells of the mixes, each run a few times on all ranks at once --> y [b] ms, counts [b, C]
        | NNLS of X / y against 1 (relative errors; work takes time, so no coefficient below zero)
        v
    CostModel (encoder, LLM): a third forward, two thirds backward     ms of any cell, makespan of any placement

A transformers model is one graph from pixels to loss, so there are no acts of single stages to calibrate with
(`balancer.calibration`); the whole is measured instead. All ranks measure at the same time, as they train: what they
take from one another (memory bandwidth) is in the coefficients. Price: which stage took the time is a guess of the
fit, which only matters to a pipeline, and a rank that runs alone, because the other one waits, is a little faster than
predicted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from balancer.cost_model import CostModel, StageCost, StageTerms
from balancer.counts import Int64Array, StepCounts
from balancer.observations import COLUMNS, cell_counts
from tools.benchmarks.dropin_mixes import SampleShape

Floats = NDArray[np.float64]

_ENCODER_TERMS: Mapping[str, str] = {
    "encodes": "constant_ns",
    "items": "per_item_ns",
    "patches": "per_patch_ns",
    "full_sq": "per_full_sq_ns",
    "window_sq": "per_window_sq_ns",
}
_LLM_TERMS: Mapping[str, str] = {
    "constant": "constant_ns",
    "samples": "per_sample_ns",
    "tokens": "per_token_ns",
    "labels": "per_label_ns",
    "token_sq": "per_token_sq_ns",
}
TERMS = (*_ENCODER_TERMS, *_LLM_TERMS)
MIN_CELLS = 3
_FORWARD_SHARE = 1 / 3


@dataclass(frozen=True, slots=True, kw_only=True)
class CellFit:
    """A fitted model of whole micro-batches.

    Attributes:
        model: the same as a cost model of two stages.
        median_error, p95_error: |predicted / measured - 1| over the fitted cells.
    """

    model: CostModel
    median_error: float
    p95_error: float


def random_cells(
    mixes: Mapping[str, Sequence[SampleShape]], *, count: int, largest: int, seed: int
) -> list[list[tuple[str, int]]]:
    """`count` cells of (mix, sample): mixes in turn, 1 to `largest` samples each, as many small ones as large ones."""
    generator = np.random.Generator(np.random.Philox(seed))
    names, cells = list(mixes), []
    for number in range(count):
        name = names[number % len(names)]
        size = min(len(mixes[name]), round(float(np.exp(generator.uniform(0.0, np.log(largest))))))
        chosen = generator.choice(len(mixes[name]), size, replace=False)
        cells.append([(name, int(sample)) for sample in chosen])
    return cells


def columns(counts: StepCounts, cell_of_sample: Int64Array, num_cells: int) -> Floats:
    """What a cell is predicted from, float64 [b, C] with columns `TERMS`."""
    table = cell_counts(counts, cell_of_sample, num_cells=num_cells).astype(np.float64)
    by_name = {name: table[:, place] for place, name in enumerate(COLUMNS)}
    by_name["encodes"] = (by_name["patches"] > 0).astype(np.float64)
    by_name["constant"] = (by_name["samples"] > 0).astype(np.float64)
    return np.stack([by_name[name] for name in TERMS], axis=1)


def fit_cells(table: Floats, measured_ms: Floats) -> CellFit:
    """The model that explains `measured_ms` [b] of cells with `table` [b, C] best.

    Raises:
        ValueError: fewer cells than a fit is worth anything with.
    """
    if len(measured_ms) < MIN_CELLS:
        raise ValueError(f"{len(measured_ms)} micro-batches were measured; a fit needs at least {MIN_CELLS}")
    relative = table / measured_ms[:, np.newaxis]
    # Columns of equal length, or the solver's tolerance would decide by units.
    norms = np.linalg.norm(relative, axis=0)
    scale = np.where(norms > 0, norms, 1.0)
    solution, _ = nnls(relative / scale, np.ones(len(measured_ms)))
    coefficients = solution / scale
    errors = np.abs(table @ coefficients / measured_ms - 1.0)
    ns = dict(zip(TERMS, 1e6 * coefficients, strict=True))
    return CellFit(
        model=CostModel(
            stages=(_stage(ns, _ENCODER_TERMS), _stage(ns, _LLM_TERMS)),
            absolute=True,
            source="fit of whole micro-batches",
            domains=("encoder", "llm"),
        ),
        median_error=float(np.median(errors)),
        p95_error=float(np.quantile(errors, 0.95)),
    )


def cell_ms(model: CostModel, counts: StepCounts, cells: Int64Array, shape: tuple[int, int]) -> Floats:
    """Predicted milliseconds of every micro-batch of a placement, float64 [R, M].

    Args:
        cells: int64 [n, 2], (rank, micro-batch) of every sample.
        shape: (R, M).
    """
    table = columns(counts, cells[:, 0] * shape[1] + cells[:, 1], shape[0] * shape[1])
    ns = np.zeros(len(TERMS))
    for stage, terms in zip(model.stages, (_ENCODER_TERMS, _LLM_TERMS), strict=True):
        for name, coefficient in terms.items():
            ns[TERMS.index(name)] = getattr(stage.forward, coefficient) + getattr(stage.backward, coefficient)
    return (table @ ns).reshape(shape) / 1e6


def _stage(ns: Mapping[str, float], terms: Mapping[str, str]) -> StageCost:
    given: dict[str, Any] = {coefficient: ns[name] for name, coefficient in terms.items()}
    whole = StageTerms(**given)
    return StageCost(forward=whole.scaled(_FORWARD_SHARE), backward=whole.scaled(1 - _FORWARD_SHARE))
