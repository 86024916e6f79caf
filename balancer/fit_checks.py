"""Whether a stored calibration is one: values in range, evidence of every stage, and coefficients that are the model's.

    Fit --check_fit--> domains of its stages, or CostModelError with the place and the value

The file is data: a range that is missing or upside down would switch off the word about extrapolation, and a term that
was edited would look like a measurement. So the cost model is made again from the evidence and must come out the same.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from balancer.cost_terms import DOMAINS
from balancer.errors import CostModelError
from balancer.number_checks import is_number, is_whole
from balancer.observations import OPS, WINDOWED
from balancer.stage_fit import CONSTANT, TERM_FIELDS, Accuracy, StageFit, stage_cost_of

if TYPE_CHECKING:
    from balancer.fit_report import Fit

_LARGEST_WINDOW = 2**31
_LONGEST_TEXT = 10_000


def check_fit(fitted: "Fit") -> tuple[str, ...]:
    """Check a calibration as it was read; returns the domain of every stage.

    Raises:
        CostModelError: a value out of its range, a stage without evidence, or another model than the evidence says.
    """
    if not is_whole(fitted.causal_window, high=_LARGEST_WINDOW):
        raise _damaged("causal_window", fitted.causal_window, "a number of tokens, 0 for none")
    check_subject(fitted.subject)
    for stage in fitted.stages:
        _check_stage(stage, fitted.model.num_stages, causal_window=fitted.causal_window)
    acts = [(stage.stage, stage.op) for stage in fitted.stages]
    if len(set(acts)) != len(acts):
        raise _damaged("stages", acts, "each stage and op once")
    for row in fitted.verified:
        _check_accuracy(row, "verified")
        if (row.stage, row.op) not in acts:
            raise _damaged("verified", f"stage {row.stage} {row.op}", "of a stage and op that was fitted")
    return _check_model(fitted)


def check_subject(subject: Mapping[str, Any]) -> None:
    """Check that what was measured can be stored: names, and values that JSON has.

    Raises:
        CostModelError: anything else.
    """
    try:
        if not isinstance(subject, Mapping) or not all(_is_text(name) for name in subject):
            raise TypeError("no names")
        json.dumps(dict(subject), allow_nan=False)
    except (TypeError, ValueError, RecursionError):
        raise _damaged("subject", subject, "values by name, as JSON has them (text, finite numbers)") from None


def check_domains(domains: Sequence[str]) -> None:
    """Check the domains of the stages of a pipeline.

    Raises:
        CostModelError: one that does not exist, or another order than that of the chain.
    """
    unknown = next((index for index, domain in enumerate(domains) if domain not in DOMAINS), None)
    if unknown is not None:
        raise CostModelError(f"stage {unknown} of domain {ascii(domains[unknown])[:40]}; choose {', '.join(DOMAINS)}")
    if list(domains) != sorted(domains, key=DOMAINS.index):
        raise CostModelError(f"domains {', '.join(domains)[:200]}: the chain is {', '.join(DOMAINS)}, in this order")


def _check_stage(stage: StageFit, num_stages: int, *, causal_window: int) -> None:
    if not is_whole(stage.stage, high=num_stages - 1):
        raise _damaged("stage", stage.stage, f"one of the {num_stages} stages of the model")
    if stage.op not in OPS:
        raise _damaged(f"stage {stage.stage}: op", stage.op, f"one of {', '.join(OPS)}")
    place = f"stage {stage.stage} {stage.op}: "
    if stage.domain not in DOMAINS:
        raise _damaged(f"{place}domain", stage.domain, f"one of {', '.join(DOMAINS)}")
    if not is_whole(stage.num_microbatches, low=1):
        raise _damaged(f"{place}num_microbatches", stage.num_microbatches, "a whole number from 1 on")
    if not is_number(stage.repeats):
        raise _damaged(f"{place}repeats", stage.repeats, "a number from 0 on")
    if not is_number(stage.r2, low=-1e30, high=1.0 + 1e-9) and not _is_nan(stage.r2):
        raise _damaged(f"{place}r2", stage.r2, "a number up to 1, or null")
    _check_names(stage, place, causal_window=causal_window)
    for name, value in stage.terms.items():
        if not is_number(value):
            raise _damaged(f"{place}terms: {name}", value, "a number from 0 on")
    for name, (low, high) in stage.ranges.items():
        if not (is_whole(low) and is_whole(high, low=low)):
            raise _damaged(f"{place}ranges: {name}", (low, high), "the smallest and the largest count")
    if not isinstance(stage.held_out, Accuracy) or (stage.held_out.stage, stage.held_out.op) != (stage.stage, stage.op):
        raise _damaged(f"{place}held_out", stage.held_out, "errors of the same stage and op")
    _check_accuracy(stage.held_out, f"{place}held_out")


def _check_names(stage: StageFit, place: str, *, causal_window: int) -> None:
    """Terms that were fitted and those that were left out are all that have a range, the constant apart."""
    terms, left_out = set(stage.terms), set(stage.left_out)
    known = set(TERM_FIELDS) - (set() if causal_window else {WINDOWED})
    if CONSTANT not in terms or terms - known:
        raise _damaged(f"{place}terms", sorted(map(str, terms)), f"the constant and any of {', '.join(sorted(known))}")
    if terms & left_out or left_out - known or not all(_is_text(why) for why in stage.left_out.values()):
        raise _damaged(f"{place}left_out", dict(stage.left_out), "a reason for each of the other terms")
    candidates = (terms | left_out) - {CONSTANT}
    if not candidates or set(stage.ranges) != candidates:
        raise _damaged(f"{place}ranges", sorted(map(str, stage.ranges)), f"one for each of {_listed(candidates)}")


def _check_accuracy(row: Accuracy, place: str) -> None:
    for name in ("median", "p95", "largest"):
        if not is_number(getattr(row, name)):
            raise _damaged(f"{place}: {name}", getattr(row, name), "an error from 0 on")
    if not is_number(row.bias, low=-1e30):
        raise _damaged(f"{place}: bias", row.bias, "a number")
    if not is_whole(row.num_microbatches, low=1):
        raise _damaged(f"{place}: num_microbatches", row.num_microbatches, "a whole number from 1 on")


def _check_model(fitted: "Fit") -> tuple[str, ...]:
    """The model is what its evidence says, stage by stage."""
    model = fitted.model
    of_stage = [{fit.domain for fit in fitted.stages if fit.stage == stage} for stage in range(model.num_stages)]
    for stage, found in enumerate(of_stage):
        if len(found) != 1:
            raise _damaged(f"stage {stage}: domains", sorted(found), "evidence of every stage, of one domain")
    domains = tuple(found.pop() for found in of_stage)
    check_domains(domains)
    if model.domains not in ((), domains):
        raise _damaged("domains of the model", model.domains, f"those of its stages, {', '.join(domains)}")
    for stage, domain in enumerate(domains):
        if stage_cost_of(fitted.stages, stage, domain, fitted.causal_window) != model.stages[stage]:
            raise CostModelError(
                f"calibration: stage {stage} of the model is not what its terms say: it was edited by hand; measure "
                "again with balancer-train profile"
            )
    return domains


def _damaged(name: str, value: Any, expected: str) -> CostModelError:
    shown = ascii(value)  # the file may hold terminal escapes
    return CostModelError(f"calibration: {name}={shown[:100]}: expected {expected}; write it with Fit.to_json")


def _listed(names: Collection[str]) -> str:
    return ", ".join(sorted(names)) or "the terms"


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value.isprintable() and len(value) <= _LONGEST_TEXT


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and value != value  # noqa: PLR0124
