"""Whole numbers from callers: checked once at the door, with the name of what they are.

Python and numpy integers pass; booleans, floats (also 2.0), text, None and NaN do not. A float would be cut off in
silence later, or compare unequal to the integer in a digest.
"""

import operator

import numpy as np

from balancer.errors import BalancerError


def whole_number(
    name: str, value: object, *, error: type[BalancerError], below: str, above: str, at_least: int, at_most: int
) -> int:
    """`value` as a Python int.

    Args:
        name: what it is called in the message.
        value: what the caller gave.
        error: class of the error.
        below, above: what the message says of a value under `at_least` or over `at_most`, and what to do.
        at_least, at_most: the range, ends included.

    Raises:
        error: no integer, or outside the range.
    """
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer):
        raise error(f"{name}={shown(value)} is no whole number")
    number = operator.index(value)
    if number < at_least:
        raise error(f"{name}={shown(number)}: {below}")
    if number > at_most:
        raise error(f"{name}={shown(number)}: {above}")
    return number


def shown(value: object) -> str:
    """A value in a message: short, without control characters, and also for integers too long to print."""
    if isinstance(value, int) and value.bit_length() > 256:
        return f"an integer of {value.bit_length()} bits"
    text = ascii(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
