"""Configs as YAML: strict on the way in (pydantic), complete on the way out, and equal after a round trip.

Unknown, repeated and nested keys are errors that name the file, the key and its nearest counterpart: a key that
silently falls back to a default trains for hours on something else.
"""

import dataclasses
import difflib
import functools
import typing
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar, cast

import yaml
from pydantic import TypeAdapter, ValidationError

from trainer.aliases import lookup
from trainer.config import Config, FitConfig, PlanConfig
from trainer.errors import ConfigError

AnyConfig = TypeVar("AnyConfig", bound=Config)


def to_yaml(config: Config) -> str:
    """All options as YAML, in the order of their definition; `from_yaml` gives an equal config back."""
    values = option_values(config)
    # YAML folds these line breaks of Unicode into spaces unless they are escaped.
    plain = not any(mark in str(value) for value in values.values() for mark in "\x85\u2028\u2029")
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=plain, width=10_000)


def from_yaml(text: str, cls: type[AnyConfig], *, place: str = "YAML") -> AnyConfig:
    """A config from YAML text; keys that are left out have their defaults, `-` and `_` are the same in keys.

    A `plan` accepts every key of `fit`, so that a training config can be planned as it is.

    Raises:
        ConfigError: no mapping, an unknown, nested or repeated key, or a value that does not fit.
    """
    values = _mapping(text, place)
    allowed = option_names(cls)
    ignorable = option_names(FitConfig) if cls is PlanConfig else []
    for key, value in values.items():
        if key in allowed or key in ignorable:
            continue
        if isinstance(value, Mapping):
            inner = ", ".join(f"{key}.{name}" for name in value)
            raise ConfigError(f"{place}: section {inner or key}: options are not nested. Write them without {key!r}.")
        raise ConfigError(unknown_name(f"{place}: key {key!r}", key, allowed))
    try:
        return cast(
            AnyConfig, _validator(cls).validate_python({key: value for key, value in values.items() if key in allowed})
        )
    except ValidationError as error:
        raise ConfigError("; ".join(_describe(place, problem, allowed) for problem in error.errors())) from None


def option_values(config: Config) -> dict[str, Any]:
    """All options and their values as plain YAML values, in the order of their definition."""
    return {name: _plain(getattr(config, name)) for name in option_names(type(config))}


def option_names(cls: type[AnyConfig]) -> list[str]:
    """Fields of a config in the order of their definition."""
    return [field.name for field in dataclasses.fields(cls)]


def switches(cls: type[AnyConfig]) -> set[str]:
    """Options that are on or off."""
    hints = typing.get_type_hints(cls)
    return {name for name in option_names(cls) if hints[name] is bool}


def flag(name: str) -> str:
    """An option as it is written on the command line."""
    return "--" + name.replace("_", "-")


def unknown_name(what: str, name: str, names: Iterable[str], *, as_flag: bool = False) -> str:
    """Message about a name nobody knows: its counterpart here, else the nearest name, else where to look.

    Args:
        what: names the place and the unknown name.
        name: the unknown name with underscores.
        names: names that exist in this place.
        as_flag: spell suggestions as flags, not as keys.
    """
    names = sorted(names)
    spell = flag if as_flag else str
    alias = lookup(name)
    if alias is not None and alias.ours in names:
        return f"{what} is a spelling of {alias.origin}; did you mean {spell(alias.ours)}? {alias.answer}."
    if alias is not None:
        return f"{what} is a spelling of {alias.origin}; {alias.answer}."
    words = set(name.split("_"))
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.6) or [k for k in names if words & set(k.split("_"))]
    if near:
        return f"{what}: did you mean {spell(near[0])}?"
    return f"{what}: no option has a similar name; --help lists them all."


@functools.cache
def _validator(cls: type[Config]) -> TypeAdapter[Any]:
    return TypeAdapter(cls)


class _Loader(yaml.SafeLoader):
    """YAML that refuses a repeated key instead of keeping the last one."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise ConfigError(f"key {key!r} is given twice (line {key_node.start_mark.line + 1})")
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


def _mapping(text: str, place: str) -> dict[str, Any]:
    try:
        values = yaml.load(text, Loader=_Loader)  # derived from SafeLoader: builds plain data only
    except yaml.YAMLError as error:
        raise ConfigError(f"{place} is not YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise ConfigError(f"{place} is nested too deeply. Write one `name: value` per line.") from None
    except (ConfigError, TypeError) as error:
        raise ConfigError(f"{place}: {error}") from None
    if values is None:
        return {}
    if not isinstance(values, Mapping):
        raise ConfigError(f"{place} holds a {type(values).__name__}, not options. Write one `name: value` per line.")
    return {str(key).replace("-", "_"): value for key, value in values.items()}


def _describe(place: str, problem: Any, names: Iterable[str]) -> str:
    cause = problem.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):
        return f"{place}: {cause}"
    # pydantic adds the branches of a union to the path; only field names and positions mean something to a user.
    key = ".".join(str(part) for part in problem["loc"] if isinstance(part, int) or part in names)
    if problem["type"] == "missing":
        return f"{place}: {key} is missing"
    return f"{place}: {key}={problem['input']!r}: {problem['msg']}"


def _plain(value: object) -> object:
    """Only what YAML's safe subset can hold."""
    if isinstance(value, Path):
        return str(value)
    return list(value) if isinstance(value, tuple) else value
