"""What counts as a number in options and files: no true or false, no infinity, no integer beyond all floats."""

from typing import Any, TypeGuard


def is_number(value: Any, *, low: float = 0.0, high: float = 1e30) -> TypeGuard[float]:
    """Whether `value` is an int or float from `low` to `high`; NaN is not."""
    return isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high


def is_whole(value: Any, *, low: int = 0, high: int = 2**63 - 1) -> TypeGuard[int]:
    """Whether `value` is an int from `low` to `high`."""
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
