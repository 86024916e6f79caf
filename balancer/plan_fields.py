"""What the fields of a plan may hold: their types and ranges, checked the same for plans made and plans read.

    values of a StepPlan  --whole numbers, texts, ratios, arrays, dropped-->  the same in one form, or a PlanError
    text                  --decoded-->  field -> value, nothing converted: 1.0, true and "1" are no integers

A float would be cut off in silence by an integer array, and a lone surrogate has no bytes to digest, so both stop here,
with the name of the field.
"""

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from balancer.errors import PlanError
from balancer.number_checks import is_number
from balancer.whole_numbers import shown, whole_number

# Name -> dtype and axes; n samples, k media items with an encoder place, R DP ranks, P pipeline ranks,
# M micro-batches, S stages.
ARRAY_FIELDS: Mapping[str, tuple[type[np.signedinteger[Any]], str]] = {
    "sample_ids": (np.int64, "n"),
    "dp_rank": (np.int32, "n"),
    "microbatch": (np.int32, "n"),
    "slot": (np.int32, "n"),
    "cp_first_rank": (np.int32, "n"),
    "cp_degree": (np.int32, "n"),
    "item_row": (np.int32, "k"),
    "encoder_rank": (np.int32, "k"),
    "unit": (np.int32, "k"),
    "stage_ranks": (np.int32, "S"),
    "llm_tokens": (np.int64, "RM"),
    "patches": (np.int64, "RM"),
    "encoder_patches": (np.int64, "RM"),
    "visual_tokens": (np.int64, "RM"),
    "label_tokens": (np.int64, "RM"),
    "num_samples": (np.int64, "RM"),
    "forward_ns": (np.int64, "RMS"),
    "backward_ns": (np.int64, "RMS"),
    "weight_ns": (np.int64, "RMS"),
    "rank_makespan_ns": (np.int64, "R"),
    "stage_work_ns": (np.int64, "P"),
}
BOUNDS = ("work_bound_ns", "longest_bound_ns", "granularity_bound_ns", "pipeline_bound_ns")
BINDINGS = ("none", "data", "stage split", "largest sample", "capacity")
# Derived ratios: reported, but not part of the digest, which covers integers and names only.
RATIO_FIELDS = (
    "imbalance_before",
    "imbalance_after",
    "label_imbalance_before",
    "label_imbalance_after",
    "fill",
)
TEXT_FIELDS = (
    "policy",
    "policy_used",
    "schedule",
    "meet",
    "binding",
    "note",
    "stage_domains",
    "inputs_digest",
    "digest",
)
# Where a step lies may take all of an unsigned word, as seeds do; sizes index int32 arrays.
_PLACE, _SIZE, _TIME = (0, 2**64 - 1), (1, 2**31 - 1), (0, 2**63 - 1)
WHOLE_FIELDS: Mapping[str, tuple[int, int]] = {
    "format_version": _SIZE,
    **dict.fromkeys(("step", "epoch", "cursor"), _PLACE),
    **dict.fromkeys(("dp_size", "num_microbatches", "num_stages", "num_pipeline_ranks"), _SIZE),
    **dict.fromkeys(("makespan_ns", *BOUNDS, "lower_bound_ns", "makespan_before_ns"), _TIME),
}
_DIGEST = re.compile("[0-9a-f]{64}")


def whole_field(name: str, value: object, least: int, most: int) -> int:
    """A whole number from `least` to `most`, as a Python int.

    Raises:
        PlanError: a float, a bool, text, or outside the range.
    """
    return whole_number(
        name,
        value,
        error=PlanError,
        below=f"it is at least {least}",
        above=f"it is at most {most}",
        at_least=least,
        at_most=most,
    )


def text_field(name: str, value: object) -> str:
    """A text that has bytes in UTF-8.

    Raises:
        PlanError: something else, or a lone surrogate in it.
    """
    if not isinstance(value, str):
        raise PlanError(f"{name}={shown(value)} is no text")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise PlanError(f"{name}={shown(value)} is no valid text: {error.reason}") from error
    return value


def ratio_field(name: str, value: object) -> float:
    """A finite ratio that is not negative.

    Raises:
        PlanError: something else, NaN included.
    """
    if not is_number(value):
        raise PlanError(f"{name}={shown(value)} is no ratio: a finite number, at least 0")
    return float(value)


def array_field(name: str, values: object, dtype: type[np.signedinteger[Any]]) -> NDArray[np.signedinteger[Any]]:
    """A copy of integers as an array of `dtype`, any shape, read-only.

    Raises:
        PlanError: floats, booleans or text, rows of unequal length, or an integer that `dtype` does not hold.
    """
    try:
        given = np.asarray(values)
    except (ValueError, OverflowError) as error:
        raise PlanError(f"plan field {name} is no array of integers: {error}") from error
    if given.size and given.dtype.kind not in "iu":
        raise PlanError(f"plan field {name} is no array of {np.dtype(dtype)}: its values are of type {given.dtype}")
    range_ = np.iinfo(dtype)
    if given.size and (int(given.min()) < range_.min or int(given.max()) > range_.max):
        raise PlanError(
            f"plan field {name} is no array of {np.dtype(dtype)}: it holds {int(given.min())} to {int(given.max())}"
        )
    array = given.astype(dtype)  # always a copy
    array.flags.writeable = False
    return array


def dropped_field(dropped: object) -> tuple[tuple[int, str], ...]:
    """(sample id, reason) pairs, as tuples.

    Raises:
        PlanError: anything else.
    """
    if isinstance(dropped, str | bytes | Mapping) or not isinstance(dropped, Iterable):
        raise PlanError(f"dropped={shown(dropped)} is no list of pairs of sample id and reason")
    pairs: list[tuple[int, str]] = []
    for entry in dropped:
        if not isinstance(entry, tuple | list) or len(entry) != 2:
            raise PlanError(f"dropped: {shown(entry)} is no pair of sample id and reason")
        sample = whole_field("dropped sample", entry[0], 0, 2**63 - 1)
        pairs.append((sample, text_field("reason of a dropped sample", entry[1])))
    return tuple(pairs)


def decoded(text: str | bytes, *, version: int, names: frozenset[str]) -> dict[str, Any]:
    """The fields of a stored plan, by name; lists where the plan has arrays.

    Raises:
        PlanError: no JSON, another format version, missing or unknown fields, arrays that hold anything but integers
            or no sample, digests that are none.
    """
    try:
        content = json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:  # also integers of thousands of digits, and no UTF-8
        raise PlanError(f"not a step plan: {error}") from error
    found = content.get("format_version") if isinstance(content, dict) else None
    # 2.0 equals 2, and so does true in format 1.
    if type(found) is not int or found != version:
        what = shown(found) if isinstance(content, dict) else type(content).__name__
        raise PlanError(f"step plan of format {what}; this version reads format {version}")
    if set(content) != names:
        raise PlanError(f"step plan with missing or unknown fields: {shown(sorted(set(content) ^ names))}")
    for name, (_, axes) in ARRAY_FIELDS.items():
        if not _only_integers(content[name], len(axes)):
            raise PlanError(f"step plan whose {name} is no list of integers [{', '.join(axes)}]")
        if axes == "n" and not content[name]:
            raise PlanError(f"step plan without samples: {name} is empty")
    for name in ("inputs_digest", "digest"):
        if not isinstance(content[name], str) or not _DIGEST.fullmatch(content[name]):
            raise PlanError(
                f"step plan with {name}={shown(content[name])}: a stored plan carries 64 hexadecimal digits there"
            )
    return dict(content)


def _only_integers(values: object, depth: int) -> bool:
    """Whether these are lists, `depth` of them inside one another, of integers and nothing else; True is none."""
    if not isinstance(values, list):
        return False
    if depth == 1:
        return set(map(type, values)) <= {int}
    return all(_only_integers(row, depth - 1) for row in values)
