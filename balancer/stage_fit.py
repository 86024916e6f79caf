"""What a calibration found on one stage and op, how good it is, and what it says the stage costs.

StageFit per (stage, op) --stage_cost_of--> StageCost: forward from F; backward from B, or from I + W
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from balancer.cost_terms import StageCost, StageTerms
from balancer.counts import Int64Array
from balancer.errors import CostModelError
from balancer.observations import COLUMNS, WINDOWED, Op

CONSTANT = "constant"
# Term of a fit -> coefficient of StageTerms.
TERM_FIELDS: Mapping[str, str] = MappingProxyType(
    {
        CONSTANT: "constant_ns",
        "samples": "per_sample_ns",
        "items": "per_item_ns",
        "tokens": "per_token_ns",
        "labels": "per_label_ns",
        "visual": "per_visual_ns",
        "patches": "per_patch_ns",
        "full_sq": "per_full_sq_ns",
        "window_sq": "per_window_sq_ns",
        "token_sq": "per_token_sq_ns",
        WINDOWED: "per_causal_window_ns",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Accuracy:
    """Relative errors |predicted / measured - 1| of one stage and op over micro-batches.

    Attributes:
        median, p95, largest: of the absolute errors. bias: median of the signed ones (above 0: predicted too long).
    """

    stage: int
    op: Op
    num_microbatches: int
    median: float
    p95: float
    largest: float
    bias: float

    @classmethod
    def of(cls, stage: int, op: Op, errors: NDArray[np.float64]) -> "Accuracy":
        """From signed relative errors [b], b >= 1."""
        size = np.abs(errors)
        return cls(
            stage=stage,
            op=op,
            num_microbatches=len(errors),
            median=float(np.median(size)),
            p95=float(np.quantile(size, 0.95)),
            largest=float(size.max()),
            bias=float(np.median(errors)),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFit:
    """One stage and op.

    Attributes:
        domain: encoder, llm or generator.
        num_microbatches: distinct ones that were measured. repeats: mean number of times.
        terms: nanoseconds per unit, the constant included; a term that was fitted and costs nothing is 0.
        left_out: reason by term that the data cannot tell apart.
        r2: share of the variance of the times that is explained, in sample; NaN where they do not vary.
        held_out: errors on micro-batches that the fit has not seen.
        ranges: smallest and largest count in one micro-batch, of every term that can cost time here.
    """

    stage: int
    op: Op
    domain: str
    num_microbatches: int
    repeats: float
    terms: Mapping[str, float]
    left_out: Mapping[str, str]
    r2: float
    held_out: Accuracy
    ranges: Mapping[str, tuple[int, int]]

    def predict_ns(self, cells: Int64Array, names: tuple[str, ...] = COLUMNS) -> NDArray[np.float64]:
        """Nanoseconds of micro-batches with the given counts, [g, C] -> [g]; one that holds nothing costs nothing."""
        total = np.full(len(cells), self.terms.get(CONSTANT, 0.0))
        for index, name in enumerate(names):
            total += self.terms.get(name, 0.0) * cells[:, index].astype(np.float64)
        return np.where(self.runs(cells, names), total, 0.0)

    def runs(self, cells: Int64Array, names: tuple[str, ...] = COLUMNS) -> NDArray[np.bool_]:
        """Which micro-batches run this stage at all, bool [g]."""
        present: NDArray[np.bool_] = cells[:, names.index("patches" if self.domain == "encoder" else "tokens")] > 0
        return present


def stage_cost_of(fits: Sequence[StageFit], stage: int, domain: str, causal_window: int) -> StageCost:
    """The cost of a stage from what was found on it.

    Raises:
        CostModelError: no forward, or no whole backward.
    """
    by_op = {fitted.op: _stage_terms(fitted.terms, causal_window) for fitted in fits if fitted.stage == stage}
    if "F" not in by_op or not ("B" in by_op or {"I", "W"} <= set(by_op)):
        raise CostModelError(
            f"stage {stage} ({domain}) has acts of {', '.join(by_op) or 'no op'}; F and B, or F, I and W, are needed. "
            f"Measure micro-batches that run it (images for an encoder), or leave the stage out."
        )
    if "B" in by_op:
        return StageCost(forward=by_op["F"], backward=by_op["B"])
    whole = {name: getattr(by_op["I"], name) + getattr(by_op["W"], name) for name in TERM_FIELDS.values()}
    backward = StageTerms(**whole, causal_window=by_op["W"].causal_window)
    return StageCost(forward=by_op["F"], backward=backward, weight=by_op["W"])


def _stage_terms(terms: Mapping[str, float], causal_window: int) -> StageTerms:
    window = causal_window if terms.get(WINDOWED, 0.0) > 0.0 else 0
    return StageTerms(**{TERM_FIELDS[name]: value for name, value in terms.items()}, causal_window=window)
