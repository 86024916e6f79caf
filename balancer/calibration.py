"""Measured acts to a cost model: non-negative least squares on the physical terms of every stage and op.

    Observations --medians--> y [b] ns, X [b, p] counts        per (stage, op)
        | terms that never vary, or move with others, are left out by name
        | NNLS of X / y against 1: relative errors, columns scaled alike; Huber weights, repeated
        v
    coefficients >= 0 -> StageTerms -> CostModel;  StageFit: R2, errors of held-out micro-batches, ranges seen

    encoder   constant, patches, full_sq, window_sq, items          (only micro-batches with patches run it)
    llm       constant, tokens, token_sq, samples; visual on its first stage, labels on its last
    generator constant, samples, tokens, labels

Relative, because a step is as long as its longest chain, in which small micro-batches count like large ones.
Non-negative, because work takes time: a coefficient below zero would make a plan prefer more work. Residuals beyond
1.345 robust standard deviations weigh less (Huber), so a slow outlier in data without repetitions does not bend the
fit. Price: a term of a few percent of the time may come out as zero, and what it stands for is found in its neighbours.

No silent extrapolation: see `Fit.extrapolates`. The fit itself may differ between hosts in the last bit (LAPACK); it is
made once and stored, and its fingerprint is part of every plan's inputs.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from balancer.cost_model import CostModel
from balancer.cost_terms import DOMAINS, MAX_STAGES, StageMemory
from balancer.errors import CostModelError
from balancer.fit_checks import check_domains, check_subject
from balancer.fit_report import Fit
from balancer.number_checks import is_whole
from balancer.observations import OPS, WINDOWED, Observations, Op
from balancer.stage_fit import CONSTANT, Accuracy, StageFit, stage_cost_of

Domain = Literal["encoder", "llm", "generator"]
Floats = NDArray[np.float64]

MIN_MICROBATCHES = 3
_HUBER = 1.345
_ROUNDS = 12
# A column of which the kept ones explain all but this share (of its norm) cannot be told apart from them.
_INDEPENDENT_SHARE = 0.01
_LEAVE_ONE_OUT_UP_TO, _FOLDS = 64, 10


def fit(
    observations: Observations,
    *,
    domains: Sequence[str] | None = None,
    num_stages: int | None = None,
    layers: Sequence[int] = (),
    memory: tuple[StageMemory, ...] | None = None,
    subject: Mapping[str, Any] | None = None,
) -> Fit:
    """The cost model that explains `observations` best.

    Args:
        domains: encoder, llm or generator for every stage. Default: stage 0 the encoder, the others the LLM.
        num_stages: of the pipeline; default: those that were measured.
        layers: of every stage, where known: a plan for another split is then refused.
        memory: modelled bytes that the model shall carry; a measurement of time says nothing about them.
        subject: what was measured (model, device, clock, ...), stored with the fit.

    Raises:
        CostModelError: a stage without forward or backward acts, or with fewer than three micro-batches; a pipeline
            that cannot be; a subject that cannot be stored.
    """
    if not isinstance(observations, Observations):
        raise CostModelError(f"fit takes Observations, not {type(observations).__name__}; see Observations.of_step")
    check_subject(subject or {})
    medians = observations.medians()
    measured = int(medians.stage.max()) + 1 if len(medians) else 0
    if num_stages is not None and not is_whole(num_stages, low=1, high=MAX_STAGES):
        raise CostModelError(f"num_stages={str(num_stages)[:40]}: a pipeline has 1 to {MAX_STAGES} stages")
    if domains is None:
        domains = ["encoder", *["llm"] * ((num_stages or measured) - 1)]
    if num_stages not in (None, len(domains)) or measured > len(domains):
        raise CostModelError(f"acts of {measured} stages and num_stages={num_stages}, but {len(domains)} domains")
    check_domains(domains)
    fits = [
        _fit_stage(medians, stage, op, domains, repeats=len(observations) / max(1, len(medians)))
        for stage in range(len(domains))
        for op in OPS
        if len(medians.of(stage, op)[0])
    ]
    window = observations.causal_window
    stages = tuple(stage_cost_of(fits, stage, domain, window) for stage, domain in enumerate(domains))
    source = "calibration" + "".join(f", {name} {value}" for name, value in (subject or {}).items())
    model = CostModel(
        stages=stages,
        memory=memory,
        absolute=True,
        note=_note(fits),
        source=source,
        domains=tuple(domains),
        layers=tuple(layers),
    )
    return Fit(model=model, stages=tuple(fits), subject=dict(subject or {}), causal_window=window)


def accuracy(fitted: Fit, observations: Observations) -> tuple[Accuracy, ...]:
    """Predicted against measured (median of repetitions) per stage and op, on acts that were not fitted."""
    medians = observations.medians()
    rows = []
    for stage in fitted.stages:
        cell, duration = medians.of(stage.stage, stage.op)
        if len(cell):
            errors = stage.predict_ns(medians.cells[cell], medians.names) / duration - 1.0
            rows.append(Accuracy.of(stage.stage, stage.op, errors))
    return tuple(rows)


def _fit_stage(observations: Observations, stage: int, op: Op, domains: Sequence[str], *, repeats: float) -> StageFit:
    cell, duration = observations.of(stage, op)
    if len(cell) < MIN_MICROBATCHES:
        raise CostModelError(
            f"stage {stage} op {op} was measured on {len(cell)} micro-batches; a fit needs at least "
            f"{MIN_MICROBATCHES}, and a few times the number of its terms to be worth anything"
        )
    seen = observations.cells[cell]
    candidates = _candidates(domains, stage, observations.causal_window)
    columns = {name: seen[:, observations.names.index(name)].astype(np.float64) for name in candidates}
    measured = duration.astype(np.float64)
    kept, left_out = _independent(columns, measured)
    # axes: (micro-batch, term), the constant first
    table = np.stack([np.ones(len(cell)), *(columns[name] for name in kept)], axis=1)
    coefficients, factor = _solve(table, measured)
    predicted = table @ coefficients
    total = float(((measured - measured.mean()) ** 2).sum())
    names = (CONSTANT, *kept)
    return StageFit(
        stage=stage,
        op=op,
        domain=domains[stage],
        num_microbatches=len(cell),
        repeats=repeats,
        terms={name: float(value) for name, value in zip(names, coefficients, strict=True)},
        left_out=left_out,
        r2=1.0 - float(((measured - predicted) ** 2).sum()) / total if total else float("nan"),
        held_out=Accuracy.of(stage, op, _held_out_errors(table, measured, factor)),
        ranges={name: (int(values.min()), int(values.max())) for name, values in columns.items()},
    )


def _candidates(domains: Sequence[str], stage: int, causal_window: int) -> tuple[str, ...]:
    """Terms that can cost time on a stage, the most important first: of two that cannot be told apart it stays."""
    match domains[stage]:
        case "encoder":
            return ("patches", "full_sq", "window_sq", "items")
        case "generator":
            return ("tokens", "labels", "samples")
        case "llm":
            llm = [index for index, domain in enumerate(domains) if domain == "llm"]
            windowed = (WINDOWED,) if causal_window else ()
            first = ("visual",) if stage == llm[0] else ()
            last = ("labels",) if stage == llm[-1] else ()
            return ("tokens", "token_sq", *windowed, "samples", *last, *first)
    raise CostModelError(f"stage {stage} of domain {domains[stage]!r}; choose {', '.join(DOMAINS)}")


def _independent(columns: Mapping[str, Floats], measured: Floats) -> tuple[list[str], dict[str, str]]:
    """(terms to fit, reason by term left out): Gram-Schmidt in the order of importance on relative columns."""
    kept: list[str] = []
    left_out: dict[str, str] = {}
    basis = [_unit(1.0 / measured)]
    names = [CONSTANT]
    for name, values in columns.items():
        if values.min() == values.max():
            left_out[name] = f"never varies: {values[0]:.0f} in every micro-batch"
            continue
        column = _unit(values / measured)
        rest = column.copy()
        for vector in (*basis, *basis):  # twice is enough to be orthogonal
            rest = rest - float(vector @ rest) * vector
        if float(np.sqrt(rest @ rest)) >= _INDEPENDENT_SHARE:
            kept.append(name)
            basis.append(_unit(rest))
            names.append(name)
            continue
        likeness = {other: float(column @ _unit(columns[other] / measured)) for other in kept}
        nearest = max(likeness, key=lambda other: likeness[other], default=CONSTANT)
        alone = likeness.get(nearest, 0.0) ** 2 > 1.0 - _INDEPENDENT_SHARE**2
        left_out[name] = f"moves with {nearest}" if alone else f"moves with {', '.join(names)} together"
    return kept, left_out


def _unit(vector: Floats) -> Floats:
    scaled: Floats = vector / np.sqrt(vector @ vector)
    return scaled


def _solve(table: Floats, measured: Floats) -> tuple[Floats, Floats]:
    """(coefficients [p] >= 0, factor [b]) with the least relative error of table [b, p] @ coefficients, Huber.

    `factor` is what the residuals were multiplied with in the last round: robust weight and relative size in one.
    """
    weights, against = np.ones(len(measured)), measured
    coefficients = np.zeros(table.shape[1])
    for _ in range(_ROUNDS):
        factor = np.sqrt(weights) / against
        before, coefficients = coefficients, _least_squares(table, measured, factor)
        predicted = table @ coefficients
        # Relative to the prediction, so that a slow outlier stands out; not below a tenth of what was measured.
        against = np.maximum(predicted, 0.1 * measured)
        residual = np.abs(measured - predicted) / against
        spread = max(1.4826 * float(np.median(residual)), 1e-9)
        weights = np.minimum(1.0, _HUBER * spread / np.maximum(residual, 1e-30))
        if np.allclose(before, coefficients, rtol=1e-4, atol=0.0):
            break
    return coefficients, factor


def _least_squares(table: Floats, measured: Floats, factor: Floats) -> Floats:
    """Non-negative coefficients of least (factor * (table @ coefficients - measured))^2, columns scaled alike."""
    scaled = table * factor[:, None]
    sizes = scaled.max(axis=0)
    sizes[sizes == 0.0] = 1.0
    solution: Floats = nnls(scaled / sizes, measured * factor)[0] / sizes
    return solution


def _held_out_errors(table: Floats, measured: Floats, factor: Floats) -> Floats:
    """Relative errors [b] of predictions for micro-batches that their fit has not seen: leave one out, or ten folds.

    The weights are those of the whole fit, so that a fold costs one solution.
    """
    num_rows = len(measured)
    folds = num_rows if num_rows <= _LEAVE_ONE_OUT_UP_TO else _FOLDS
    errors = np.zeros(num_rows)
    for fold in range(folds):
        out = np.arange(num_rows) % folds == fold
        coefficients = _least_squares(table[~out], measured[~out], factor[~out])
        errors[out] = table[out] @ coefficients / measured[out] - 1.0
    return errors


def _note(fits: Sequence[StageFit]) -> str:
    left_out = [f"stage {f.stage} {f.op}: {name} {why}" for f in fits for name, why in f.left_out.items()]
    return "; ".join(["valid inside the ranges it was calibrated on", *left_out])
