"""Checks that options of every subcommand share: each names the option, the value that was given and what is allowed.

Nothing here imports torch, numba or `balancer`.
"""

import dataclasses
import math
import typing
from typing import Literal

from trainer.errors import ConfigError

# Read by pydantic when a config comes from YAML: a key that is no field is an error, not a default.
STRICT_KEYS = {"extra": "forbid"}

MAX_INTEGER = 2**53  # sums and products of options stay within 64 bits, and every JSON reader keeps them
MAX_THREADS = 1024  # with far more of them OpenMP ends the process without a word
GIB = 1024**3


def check_choices(config: object) -> None:
    """Raise ConfigError for a field whose type is a choice and whose value is none of them."""
    hints = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):  # type: ignore[arg-type]
        hint, value = hints[field.name], getattr(config, field.name)
        if typing.get_origin(hint) is Literal and value not in typing.get_args(hint):
            allowed = ", ".join(typing.get_args(hint))
            raise ConfigError(f"{field.name}={value!r} is not one of: {allowed}.")


def at_least(config: object, low: int, *names: str, high: int = MAX_INTEGER) -> None:
    """Raise ConfigError for a whole number outside `low` to `high`; None passes."""
    for name in names:
        value = getattr(config, name)
        if value is not None and value < low:
            raise ConfigError(f"{name}={value}: a whole number of at least {low} is needed.")
        if value is not None and value > high:
            raise ConfigError(f"{name}={value}: a whole number of at most {high} is needed.")


def positive(config: object, *names: str) -> None:
    """Raise ConfigError for a number that is not finite and above 0; None passes."""
    for name in names:
        value = getattr(config, name)
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise ConfigError(f"{name}={value:g}: a finite number above 0 is needed.")


def within(config: object, low: float, high: float, *names: str, below_high: bool = False) -> None:
    """Raise ConfigError for a number outside `low` to `high` (`below_high`: `high` itself is outside too)."""
    for name in names:
        value = getattr(config, name)
        if not (low <= value < high if below_high else low <= value <= high):
            until = "below" if below_high else "to"
            raise ConfigError(f"{name}={value:g}: a number from {low:g} {until} {high:g} is needed.")


def patch_limit(capacity_tokens: int, capacity_patches: int | None) -> int:
    """Patches per micro-batch: as given, or what a micro-batch full of 2x2-merged visual tokens holds."""
    return 4 * capacity_tokens if capacity_patches is None else capacity_patches
