"""What a calibration found, how good it is, and where it stops to hold; stored beside the model it made.

    Fit = CostModel + StageFit per (stage, op): coefficients, terms left out and why, R2, held-out errors, ranges
        --to_json--> cost.json --read_cost_model--> CostModel (and the Fit, where the file holds one)

A range is what one micro-batch held, smallest to largest. Outside of it a linear model is a guess: `extrapolates` says
which terms of which micro-batches are there, and how far the calibration went.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from balancer.cost_model import CostModel
from balancer.counts import Int64Array
from balancer.errors import CostModelError
from balancer.observations import COLUMNS, WINDOWED, Op

FIT_FORMAT_VERSION = 1
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """A calibrated cost model with its evidence.

    Attributes:
        model: what plans are made with.
        stages: per (stage, op), ordered by stage.
        subject: what was measured, as the caller said.
        causal_window: tokens that windowed text attention sees; 0: none.
        verified: errors on other micro-batches than those of the fit, if somebody measured them.
    """

    model: CostModel
    stages: tuple[StageFit, ...]
    subject: Mapping[str, Any] = field(default_factory=dict)
    causal_window: int = 0
    verified: tuple[Accuracy, ...] = ()

    def extrapolates(self, cells: Int64Array) -> tuple[str, ...]:
        """One sentence per term that leaves its range in some micro-batch; () where every prediction is inside.

        Args:
            cells: int64 [g, C], see `balancer.observations.cell_counts`.
        """
        names = (*COLUMNS, WINDOWED)[: cells.shape[1]]
        said: dict[str, None] = {}
        for stage in self.stages:
            present = cells[stage.runs(cells, names)]
            for name, (low, high) in stage.ranges.items():
                values = present[:, names.index(name)]
                outside = values[(values < low) | (values > high)]
                if len(outside):
                    said[
                        f"{name} of stage {stage.stage}: {int(outside.min())} to {int(outside.max())} in "
                        f"{len(outside)} of {len(present)} micro-batches, calibrated on {low} to {high}"
                    ] = None
        return tuple(said)

    def lines(self) -> list[str]:
        """The report as text, one line per stage and op, then what was left out."""
        rows = []
        for stage in self.stages:
            terms = "  ".join(f"{name} {value:.4g}" for name, value in stage.terms.items())
            rows.append(
                f"stage {stage.stage} {stage.op} ({stage.domain}, {stage.num_microbatches} micro-batches): "
                f"R2 {stage.r2:.4f}, held-out error median {stage.held_out.median:.1%}, p95 {stage.held_out.p95:.1%}; "
                f"ns per unit: {terms}"
            )
        rows += [
            f"stage {s.stage} {s.op}: {name} left out, {why}" for s in self.stages for name, why in s.left_out.items()
        ]
        rows += [
            f"stage {row.stage} {row.op} on {row.num_microbatches} other micro-batches: error median {row.median:.1%}, "
            f"p95 {row.p95:.1%}, bias {row.bias:+.1%}"
            for row in self.verified
        ]
        return rows

    def to_json(self) -> str:
        """Text that `from_json` and `read_cost_model` read; the coefficients survive to the bit."""
        content = {
            "fit_format_version": FIT_FORMAT_VERSION,
            "model": json.loads(self.model.to_json()),
            "stages": [_plain(asdict(stage)) for stage in self.stages],
            "subject": dict(self.subject),
            "causal_window": self.causal_window,
            "verified": [_plain(asdict(row)) for row in self.verified],
        }
        return json.dumps(content, indent=1, sort_keys=True, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> "Fit":
        """Read `to_json`'s text.

        Raises:
            CostModelError: not a fit, of another format version, or damaged.
        """
        try:
            data = json.loads(text)
            version = data.pop("fit_format_version")
            if version != FIT_FORMAT_VERSION:
                raise CostModelError(f"calibration of format {version}; this version reads {FIT_FORMAT_VERSION}")
            return cls(
                model=CostModel.from_json(json.dumps(data.pop("model"))),
                stages=tuple(_stage_fit(stage) for stage in data.pop("stages")),
                verified=tuple(Accuracy(**_numbers(row)) for row in data.pop("verified")),
                **data,
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            if isinstance(error, CostModelError):
                raise
            raise CostModelError(f"calibration cannot be read ({error!r}); write it with Fit.to_json") from error


def read_cost_model(path: str | Path) -> tuple[CostModel, Fit | None]:
    """The cost model in a file of `balancer-train profile` or of `CostModel.to_json`; with it the calibration, if any.

    Raises:
        CostModelError: a file that cannot be read as either; the text names it.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
        if '"fit_format_version"' in text:
            fitted = Fit.from_json(text)
            return fitted.model, fitted
        return CostModel.from_json(text), None
    except (OSError, UnicodeDecodeError, CostModelError) as error:
        raise CostModelError(f"{path}: {error}") from None


def _plain(content: dict[str, Any]) -> dict[str, Any]:
    """JSON has no NaN."""
    return {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in content.items()}


def _numbers(content: dict[str, Any]) -> dict[str, Any]:
    return {name: math.nan if value is None else value for name, value in content.items()}


def _stage_fit(content: dict[str, Any]) -> StageFit:
    values = _numbers(content)
    values["held_out"] = Accuracy(**_numbers(values["held_out"]))
    values["ranges"] = {name: (int(low), int(high)) for name, (low, high) in values["ranges"].items()}
    return StageFit(**values)
