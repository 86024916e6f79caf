"""Measured steps to ratios with intervals, and to the tables of docs/dropin_measured.md.

    runs (model, mix, step, turn, method) --ratio within (step, turn)--> median over turns: one ratio a step
        |-- median over steps, 95 % interval by resampling steps          how a step changes
        '-- sum over steps of it / sum of ours, the same interval          how a run changes

A ratio is taken within one pass over the methods, so that a machine which slows down disturbs both sides. Steps are
resampled, not passes: passes over one step are no new evidence about other steps. Ratios are times of the other method
over ours: above 1 ours is faster.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from balancer.metrics import imbalance
from tools.benchmarks.dropin_methods import METHODS, OURS
from tools.benchmarks.dropin_worker import Run

Floats = NDArray[np.float64]
RESAMPLES, LEVEL = 4000, 0.95
MAX_GAIN_ERROR = 0.10
MAX_LOSS_DIFFERENCE = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Interval:
    """A figure and the bounds of its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f} to {self.high:.3f})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """Another method beside ours on one mix.

    Attributes:
        step_ratio: median over steps. run_ratio: of the sums. predicted_step_ratio, predicted_run_ratio: the same.
    """

    model: str
    mix: str
    method: str
    num_steps: int
    step_ratio: Interval
    run_ratio: Interval
    predicted_step_ratio: float
    predicted_run_ratio: float

    @property
    def verdict(self) -> str:
        """What the interval of the run ratio says."""
        if self.run_ratio.low > 1.0:
            return "faster"
        return "slower" if self.run_ratio.high < 1.0 else "no difference shown"

    @property
    def gain_error(self) -> float:
        """Measured over predicted run ratio, minus 1."""
        return self.run_ratio.value / self.predicted_run_ratio - 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodRow:
    """One method on one mix; medians over steps.

    Attributes:
        step_ms: of the step. longest_ms, shortest_ms: own time of the busiest and the idlest rank.
        imbalance: max / mean of own times. num_microbatches: mean. wait_ms: for data, outside the step.
        prediction_error: |predicted / measured - 1| of the own time of a rank.
    """

    model: str
    mix: str
    method: str
    step_ms: float
    longest_ms: float
    shortest_ms: float
    imbalance: float
    num_microbatches: float
    wait_ms: float
    prediction_error: float


def compare(runs: Sequence[Run]) -> list[Compared]:
    """Every other method beside ours, on every model and mix.

    Raises:
        ValueError: methods whose losses differ: they did not train on the same samples.
    """
    rows = []
    for model, mix, own in _cases(runs):
        _check_losses(own)
        ours, predicted_ours = _table(own, OURS, _step_ms), _table(own, OURS, _predicted_ms)
        for method in METHODS:
            if method == OURS:
                continue
            theirs, predicted = _table(own, method, _step_ms), _table(own, method, _predicted_ms)
            rows.append(
                Compared(
                    model=model,
                    mix=mix,
                    method=method,
                    num_steps=len(ours),
                    step_ratio=interval(np.median(theirs / ours, axis=1), np.median),
                    run_ratio=_run_ratio(np.median(theirs, axis=1), np.median(ours, axis=1)),
                    predicted_step_ratio=float(np.median(predicted[:, 0] / predicted_ours[:, 0])),
                    predicted_run_ratio=float(predicted[:, 0].sum() / predicted_ours[:, 0].sum()),
                )
            )
    return rows


def by_method(runs: Sequence[Run]) -> list[MethodRow]:
    """Every method on every model and mix, in numbers of its own."""
    rows = []
    for model, mix, own in _cases(runs):
        for method in METHODS:
            mine = [run for run in own if run.method == method]
            errors = [
                abs(predicted / measured - 1.0)
                for run in mine
                for predicted, measured in zip(run.predicted_ms, run.compute_ms, strict=True)
            ]
            rows.append(
                MethodRow(
                    model=model,
                    mix=mix,
                    method=method,
                    step_ms=_median(run.step_ms for run in mine),
                    longest_ms=_median(max(run.compute_ms) for run in mine),
                    shortest_ms=_median(min(run.compute_ms) for run in mine),
                    imbalance=_median(imbalance(run.compute_ms) for run in mine),
                    num_microbatches=float(np.mean([run.num_microbatches for run in mine])),
                    wait_ms=_median(run.wait_ms for run in mine),
                    prediction_error=_median(errors),
                )
            )
    return rows


def interval(values: Floats, figure: Callable[..., Floats]) -> Interval:
    """`figure` of `values` [n] with its percentile bootstrap interval; `figure` takes axis=."""
    chosen = _resampled(len(values))
    drawn = figure(values[chosen], axis=1)
    return _interval(float(figure(values, axis=0)), drawn)


def steps_markdown(compared: Sequence[Compared], rows: Sequence[MethodRow]) -> str:
    """The tables, and a line for each thing that was asked for."""
    lines = [
        "| model | mix | against | steps | time of a step / ours, median (95 %) | predicted "
        "| time of all steps / ours (95 %) | predicted | measured over predicted | ours is |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.model} | {row.mix} | {row.method} | {row.num_steps} | {row.step_ratio} "
        f"| {row.predicted_step_ratio:.3f} | {row.run_ratio} | {row.predicted_run_ratio:.3f} | {row.gain_error:+.1%} "
        f"| {row.verdict} |"
        for row in compared
    ]
    lines += [
        "",
        "| model | mix | method | micro-batches | step ms | busiest rank ms | idlest rank ms | imbalance "
        "| wait for data ms | error of the prediction |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {row.model} | {row.mix} | {row.method} | {row.num_microbatches:.1f} | {row.step_ms:.0f} "
        f"| {row.longest_ms:.0f} | {row.shortest_ms:.0f} | {row.imbalance:.3f} | {row.wait_ms:.1f} "
        f"| {row.prediction_error:.1%} |"
        for row in rows
    ]
    return "\n".join([*lines, "", *verdicts(compared), ""])


def verdicts(compared: Sequence[Compared]) -> list[str]:
    """PASS or MISS of what was asked for."""
    slower = [row for row in compared if row.verdict == "slower"]
    video = [row for row in compared if row.mix == "video"]
    not_faster = [row for row in video if row.verdict != "faster"]
    apart = [row for row in compared if abs(row.gain_error) > MAX_GAIN_ERROR]
    asked = [
        ("never slower than another method", slower),
        ("faster than every other on the video-heavy mix", not_faster if video else None),
        (f"ratio within {MAX_GAIN_ERROR:.0%} of the predicted one", apart),
    ]
    return [f"- {text}: {_verdict(rows)}" for text, rows in asked]


def _verdict(misses: Sequence[Compared] | None) -> str:
    if misses is None:
        return "not measured"
    names = ", ".join(f"{row.model} {row.mix} against {row.method}" for row in misses)
    return f"MISS ({names})" if misses else "PASS"


def _cases(runs: Sequence[Run]) -> Iterable[tuple[str, str, list[Run]]]:
    for model, mix in dict.fromkeys((run.model, run.mix) for run in runs):
        yield model, mix, [run for run in runs if (run.model, run.mix) == (model, mix)]


def _table(runs: Sequence[Run], method: str, value: Callable[[Run], float]) -> Floats:
    """Values of one method, float64 [step, turn]."""
    mine = {(run.step, run.turn): value(run) for run in runs if run.method == method}
    steps, turns = sorted({step for step, _ in mine}), sorted({turn for _, turn in mine})
    return np.array([[mine[step, turn] for turn in turns] for step in steps])


def _step_ms(run: Run) -> float:
    return run.step_ms


def _predicted_ms(run: Run) -> float:
    return run.predicted_step_ms


def _run_ratio(theirs: Floats, ours: Floats) -> Interval:
    """Sum of theirs over sum of ours, [step] each."""
    chosen = _resampled(len(ours))
    return _interval(float(theirs.sum() / ours.sum()), theirs[chosen].sum(axis=1) / ours[chosen].sum(axis=1))


def _interval(value: float, drawn: Floats) -> Interval:
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Interval(value=value, low=float(low), high=float(high))


def _resampled(count: int) -> NDArray[np.int64]:
    """Rows drawn with replacement, int64 [RESAMPLES, count]; the same ones every time."""
    return np.random.Generator(np.random.Philox(0)).integers(0, count, (RESAMPLES, count))


def _median(values: Iterable[float]) -> float:
    return float(np.median(list(values)))


def _check_losses(runs: Sequence[Run]) -> None:
    for step in {run.step for run in runs}:
        losses = [run.loss for run in runs if run.step == step]
        if max(losses) - min(losses) > MAX_LOSS_DIFFERENCE * abs(max(losses)):
            raise ValueError(
                f"step {step} of {runs[0].model}, {runs[0].mix}: losses {min(losses)} to {max(losses)}: the methods "
                "did not train on the same samples"
            )
