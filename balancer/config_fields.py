"""A Hugging Face `config.json` as a bounded, typed view: what is missing or of the wrong type is named with its place.

    ConfigFields(path) --.section("vision_config")--> ConfigFields --.integer("hidden_size")--> 1280

Published configs hold only what differs from the defaults of their class, so a reader passes those defaults along;
a field without one is an error, never a guess.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from balancer.errors import CostModelError

CONFIG_FILE = "config.json"
MAX_CONFIG_BYTES = 16 * 1024**2
_MAX_DIMENSION = 2**40


class ConfigFields:
    """Fields of one JSON object.

    Args:
        values: the object.
        place: how errors call it.
        defaults: fields that `values` may leave out.
    """

    def __init__(self, values: Mapping[str, Any], place: str, defaults: Mapping[str, Any] | None = None) -> None:
        self.values: Mapping[str, Any] = {**(defaults or {}), **values}
        self.place = place

    @classmethod
    def from_path(cls, path: Path) -> "ConfigFields":
        """Read a `config.json`, or the one in a folder.

        Raises:
            CostModelError: no such file, a pipe or device, more than 16 MiB, or not a JSON object.
        """
        file = path / CONFIG_FILE if path.is_dir() else path
        try:
            if file.exists() and not file.is_file():  # a pipe would wait for its writer, a device may never end
                raise CostModelError(f"{file} is no regular file: name a folder with a {CONFIG_FILE}, or that file")
            with file.open("rb") as stream:
                content = stream.read(MAX_CONFIG_BYTES + 1)
        except OSError as error:
            raise CostModelError(f"{file} cannot be read: {error.strerror or error}") from None
        if len(content) > MAX_CONFIG_BYTES:
            raise CostModelError(f"{file} has more than {MAX_CONFIG_BYTES} bytes: it is no model config")
        try:
            values = json.loads(content)
        except (ValueError, RecursionError) as error:
            raise CostModelError(f"{file} is not JSON: {error}") from None
        if not isinstance(values, dict):
            raise CostModelError(f"{file} holds a {type(values).__name__}, not an object with a model's fields")
        return cls(values, str(file))

    @property
    def model_type(self) -> str:
        """The family's name; empty if the config does not say."""
        value = self.values.get("model_type", "")
        return value if isinstance(value, str) else ""

    def has(self, name: str) -> bool:
        """Whether a field is there and not null."""
        return self.values.get(name) is not None

    def section(self, *names: str, defaults: Mapping[str, Any] | None = None) -> "ConfigFields":
        """The first of these objects that is there.

        Raises:
            CostModelError: none is there, or it is no object.
        """
        name = self._first(names)
        value = self.values[name]
        if not isinstance(value, dict):
            raise CostModelError(f"{self.place}: {name} is a {type(value).__name__}, not an object")
        return ConfigFields(value, f"{self.place}: {name}", defaults)

    def with_defaults(self, defaults: Mapping[str, Any]) -> "ConfigFields":
        """The same fields over `defaults`."""
        return ConfigFields(self.values, self.place, defaults)

    def integer(self, *names: str, default: int | None = None, minimum: int = 1) -> int:
        """The first of these fields that is there, as an integer; a list of equal sides counts as its first.

        Raises:
            CostModelError: missing without a default, no integer, or out of range.
        """
        if default is not None and not any(self.has(name) for name in names):
            return default
        name = self._first(names)
        value = self.values[name]
        if isinstance(value, list) and value and all(side == value[0] for side in value):
            value = value[0]
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= _MAX_DIMENSION:
            raise CostModelError(f"{self.place}: {name}={value!r}: an integer from {minimum} on")
        return value

    def number(self, name: str) -> float:
        """A field as a finite number above 0.

        Raises:
            CostModelError: missing or no such number.
        """
        value = self.values[self._first((name,))]
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < _MAX_DIMENSION:
            raise CostModelError(f"{self.place}: {name}={value!r}: a number above 0")
        return float(value)

    def flag(self, name: str, *, default: bool) -> bool:
        """A field as true or false.

        Raises:
            CostModelError: another type.
        """
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise CostModelError(f"{self.place}: {name}={value!r}: true or false")
        return value

    def texts(self, name: str) -> tuple[str, ...]:
        """A list of texts; empty if missing."""
        return tuple(str(value) for value in self._list(name))

    def integers(self, name: str) -> tuple[int, ...]:
        """A list of integers from 0 on; empty if missing.

        Raises:
            CostModelError: another type inside.
        """
        values = self._list(name)
        if any(isinstance(value, bool) or not isinstance(value, int) or value < 0 for value in values):
            raise CostModelError(f"{self.place}: {name}={str(values)[:80]}: a list of integers from 0 on")
        return tuple(values)

    def _list(self, name: str) -> list[Any]:
        value = self.values.get(name)
        if value is None:
            return []
        if not isinstance(value, list):
            raise CostModelError(f"{self.place}: {name} is a {type(value).__name__}, not a list")
        return value

    def _first(self, names: tuple[str, ...]) -> str:
        found = next((name for name in names if self.has(name)), None)
        if found is None:
            kind = f" (model_type {self.model_type!r})" if self.model_type else ""
            raise CostModelError(
                f"{self.place}{kind} has no {' or '.join(names)}: this model's cost cannot be read from its "
                "config; add the field, or describe the model with a ModelShape"
            )
        return found
