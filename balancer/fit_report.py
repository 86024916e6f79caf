"""What a calibration found, how good it is, and where it stops to hold; stored beside the model it made.

    Fit = CostModel + StageFit per (stage, op): coefficients, terms left out and why, R2, held-out errors, ranges
        --to_json--> cost.json --read_cost_model--> CostModel (and the Fit, where the file holds one)

A range is what one micro-batch held, smallest to largest. Outside of it a linear model is a guess: `extrapolates` says
which terms of which micro-batches are there, and how far the calibration went.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from balancer.cost_model import CostModel
from balancer.counts import Int64Array
from balancer.errors import CostModelError
from balancer.fit_checks import check_fit
from balancer.observations import COLUMNS, WINDOWED
from balancer.stage_fit import Accuracy, StageFit

__all__ = ["Accuracy", "Fit", "StageFit", "read_cost_model"]

FIT_FORMAT_VERSION = 1
MAX_FILE_BYTES = 64 * 1024**2
UNTRUSTED_MEDIAN = 0.25
"""Median relative error of a stage and op beyond which a plan had better use the closed form."""
_ROWS_PER_TERM = 4  # micro-batches that a term needs to be told apart from noise


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

    def doubts(self) -> tuple[str, ...]:
        """Why the fit is not to be trusted: one sentence per stage and op that it predicts badly; () where it is."""
        said = []
        for stage in self.stages:
            medians = [stage.held_out.median]
            medians += [row.median for row in self.verified if (row.stage, row.op) == (stage.stage, stage.op)]
            if max(medians) <= UNTRUSTED_MEDIAN:
                continue
            few = stage.num_microbatches < _ROWS_PER_TERM * len(stage.terms)
            why = (
                f"{stage.num_microbatches} micro-batches are few for {len(stage.terms)} terms: measure more"
                if few
                else "times vary by more than their counts explain: measure on a quiet machine, with more repeats"
            )
            said.append(
                f"stage {stage.stage} {stage.op} ({stage.domain}) is predicted with a median error of "
                f"{max(medians):.0%}; {why}"
            )
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
            CostModelError: not a fit, of another format version, damaged, or evidence that does not belong to the
                model (`balancer.fit_checks`).
        """
        try:
            data = json.loads(text)
            version = data.pop("fit_format_version")
            if version != FIT_FORMAT_VERSION:
                raise CostModelError(f"calibration of format {version}; this version reads {FIT_FORMAT_VERSION}")
            fitted = cls(
                model=CostModel.from_json(json.dumps(data.pop("model"))),
                stages=tuple(_stage_fit(stage) for stage in data.pop("stages")),
                verified=tuple(Accuracy(**_numbers(row)) for row in data.pop("verified")),
                **data,
            )
            domains = check_fit(fitted)
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            if isinstance(error, CostModelError):
                raise
            raise CostModelError(f"calibration cannot be read ({error!r:.200}); write it with Fit.to_json") from error
        # Files of older versions name the domains beside the model only.
        return fitted if fitted.model.domains else replace(fitted, model=replace(fitted.model, domains=domains))


def read_cost_model(path: str | Path) -> tuple[CostModel, Fit | None]:
    """The cost model in a file of `balancer-train profile` or of `CostModel.to_json`; with it the calibration, if any.

    Raises:
        CostModelError: a file that cannot be read as either; the text names it.
    """
    try:
        text = _text_of(Path(path))
        if '"fit_format_version"' in text:
            fitted = Fit.from_json(text)
            return fitted.model, fitted
        return CostModel.from_json(text), None
    except (OSError, UnicodeDecodeError, CostModelError) as error:
        raise CostModelError(f"{path}: {error}") from None


def _text_of(path: Path) -> str:
    if path.exists() and not path.is_file():  # a pipe would wait for its writer, a device may never end
        raise CostModelError("no regular file")
    with path.open("rb") as stream:
        content = stream.read(MAX_FILE_BYTES + 1)
    if len(content) > MAX_FILE_BYTES:
        raise CostModelError(f"more than {MAX_FILE_BYTES} bytes: this is no cost model")
    return content.decode("utf-8")


def _plain(content: dict[str, Any]) -> dict[str, Any]:
    """JSON has no NaN."""
    return {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in content.items()}


def _numbers(content: dict[str, Any]) -> dict[str, Any]:
    return {name: math.nan if value is None else value for name, value in content.items()}


def _stage_fit(content: dict[str, Any]) -> StageFit:
    values = _numbers(content)
    values["held_out"] = Accuracy(**_numbers(values["held_out"]))
    values["ranges"] = {name: (low, high) for name, (low, high) in values["ranges"].items()}
    return StageFit(**values)
