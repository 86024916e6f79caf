"""A mixture written down: `mixture.yaml` (or .json), read strictly into plain dataclasses.

    unit: llm_tokens                         what weights are shares of: samples, llm_tokens or visual_tokens
    parts:
      - name: captions
        data: "captions/{000..063}.tar"      one or a list of what `open_source` takes; relative to this file
        weight: 1
      - name: pages
        data: [pages-a.jsonl, pages-b.jsonl]
        media_root: images                   folder of the media, where the data does not say it
        media_schemes: [https]               of URLs in records that may be fetched; none otherwise
        fields: {conversation: turns, images: pictures}    names of fields, where they are not the usual ones
        schedule:                            instead of a weight: changes at steps, at once or over a number of steps
          - {start: 0, weight: 1}
          - {start: 1000, weight: 3, over: 400}
        max_epochs: 4                        then the part is drawn no more

Unknown and repeated keys are errors that name the nearest key: a slip must not train for hours on something else. The
file is bounded in size, its YAML builds plain data only and has no aliases, which can grow without a bound.
"""

import difflib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, cast

import yaml

from dataloaders.errors import DataError
from dataloaders.rows import RowFields
from dataloaders.weight_schedule import UNITS, WeightSchedule, WeightStep

MAX_FILE_BYTES = 1024**2
MAX_PARTS = 1000
MAX_TEXT = 64 * 1024  # characters of one text; `1:1:1:...` as a number takes time with the square of its length
MAX_MESSAGE = 500
_TOP = ("unit", "parts")
_PART = (
    "name",
    "data",
    "weight",
    "schedule",
    "media_root",
    "media_schemes",
    "fields",
    "max_epochs",
)
_FIELDS = ("conversation", "text", "images", "videos")
_STEP = ("start", "weight", "over")
_Made = TypeVar("_Made")


@dataclass(frozen=True, slots=True, kw_only=True)
class MixturePartSpec:
    """A part as it is written down.

    Attributes:
        name: unique.
        data: what `open_source` takes; relative paths are resolved.
        schedule: its weight over the steps.
        media_root: folder of its media; None: where the data says.
        media_schemes: of URLs in its records that may be fetched.
        fields: names of the fields of its records; None: the usual ones.
        max_epochs: how often it may be read; None: without a limit.
    """

    name: str
    data: tuple[str, ...]
    schedule: WeightSchedule
    media_root: str | None = None
    media_schemes: tuple[str, ...] = ()
    fields: RowFields | None = None
    max_epochs: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureSpec:
    """A mixture as it is written down: the unit of its weights, and its parts in the order of their sample ids."""

    unit: str
    parts: tuple[MixturePartSpec, ...]


def read_mixture(path: str | Path) -> MixtureSpec:
    """The mixture in a YAML or JSON file.

    Raises:
        DataError: no such file, too large, neither YAML nor JSON, or an entry that does not fit: the text names it.
    """
    file = Path(os.path.expanduser(path))
    try:
        with file.open("rb") as handle:
            content = handle.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:  # before it is decoded: the cut may divide a character
            raise DataError(
                f"a mixture of more than {MAX_FILE_BYTES} bytes",
                place=str(path),
                remedy="Use wildcards for long lists.",
            )
        text = content.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"the mixture cannot be read: {error}", place=str(path), remedy="Check the path.") from error
    return parse_mixture(text, folder=file.absolute().parent, place=str(path), is_json=file.suffix == ".json")


def parse_mixture(text: str, *, folder: Path, place: str = "mixture", is_json: bool = False) -> MixtureSpec:
    """The mixture in a text.

    Args:
        folder: what relative paths start from.
        place: for messages.

    Raises:
        DataError: see `read_mixture`.
    """
    values = _Entry(_load(text, place, is_json), place, _TOP)
    unit = values.text("unit")
    if unit not in UNITS:
        raise values.error(f"unit is {unit!r}", _nearest(unit, UNITS))
    listed = values.entries("parts", _PART, MAX_PARTS)
    parts = tuple(_part(entry, folder) for entry in listed)
    names = [part.name for part in parts]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise values.error(f"part {twice[0]!r} is there twice", "Name every part differently.")
    return MixtureSpec(unit=unit, parts=parts)


def _part(entry: "_Entry", folder: Path) -> MixturePartSpec:
    name = entry.text("name")
    entry.place = f"{entry.place} ({name})"
    if entry.has("weight") == entry.has("schedule"):
        raise entry.error("it has " + ("both weight and schedule" if entry.has("weight") else "no weight"), "Give one.")
    media_root = entry.text("media_root") if entry.has("media_root") else None
    return MixturePartSpec(
        name=name,
        data=tuple(_resolved(text, folder) for text in entry.texts("data")),
        schedule=_schedule(entry),
        media_root=None if media_root is None else _resolved(media_root, folder),
        media_schemes=tuple(entry.texts("media_schemes")) if entry.has("media_schemes") else (),
        fields=_fields(entry.entry("fields", _FIELDS)) if entry.has("fields") else None,
        max_epochs=entry.integer("max_epochs", 1) if entry.has("max_epochs") else None,
    )


def _fields(entry: "_Entry") -> RowFields:
    names = {name: entry.text(name) for name in ("conversation", "text") if entry.has(name)}
    # One name stays a text, so that a source has the fingerprint that it has elsewhere.
    several = {name: entry.texts(name) for name in ("images", "videos") if entry.has(name)}
    lists = {name: found[0] if len(found) == 1 else tuple(found) for name, found in several.items()}
    return RowFields(
        conversation=names.get("conversation"),
        text=names.get("text"),
        images=lists.get("images"),
        videos=lists.get("videos"),
    )


def _schedule(entry: "_Entry") -> WeightSchedule:
    if entry.has("weight"):
        return entry.at(lambda: WeightSchedule.constant(entry.number("weight")))
    steps = tuple(
        step.at(
            lambda step=step: WeightStep(  # type: ignore[misc]
                start=step.integer("start", 0),
                weight=step.number("weight"),
                over=step.integer("over", 0) if step.has("over") else 0,
            )
        )
        for step in entry.entries("schedule", _STEP, MAX_PARTS)
    )
    return entry.at(lambda: WeightSchedule(steps))


def _resolved(text: str, folder: Path) -> str:
    """A path relative to the file; URLs, absolute paths and those of a home folder are as written."""
    if "://" in text or text.startswith(("/", "~", "file:", "pipe:")):
        return text
    return str(folder / text)


class _Entry:
    """A mapping of the file with the keys it may have, read key by key."""

    def __init__(self, values: Any, place: str, keys: Sequence[str]) -> None:
        self.place = place
        if not isinstance(values, Mapping):
            raise self.error(f"{_shown(values)} where keys are expected", f"Give {', '.join(keys)}.")
        for key in values:
            if key not in keys:
                raise self.error(f"unknown key {_shown(key)}", _nearest(str(key), keys))
        self._values = values

    def error(self, cause: str, remedy: str) -> DataError:
        """An error at this entry."""
        return DataError(cause, place=self.place, remedy=remedy)

    def at(self, make: Callable[[], _Made]) -> _Made:
        """What `make` returns; its errors name this entry."""
        try:
            return make()
        except DataError as error:
            if error.place:
                raise
            raise self.error(error.cause, error.remedy) from None

    def has(self, key: str) -> bool:
        """Whether the key is there."""
        return key in self._values

    def get(self, key: str) -> Any:
        """The value of a key that must be there."""
        if key not in self._values:
            raise self.error(f"{key} is missing", f"Add {key}.")
        return self._values[key]

    def text(self, key: str) -> str:
        """A text that is not empty."""
        value = self.get(key)
        if not isinstance(value, str) or not value or "\0" in value:
            raise self.error(f"{key} is {_shown(value)}", "It is a text; put it in quotes.")
        return value

    def texts(self, key: str) -> list[str]:
        """One text, or a list of texts."""
        value = self.get(key)
        values = value if isinstance(value, list) else [value]
        if not values or not all(isinstance(text, str) and text and "\0" not in text for text in values):
            raise self.error(f"{key} is {_shown(value)}", "It is a text or a list of texts; put them in quotes.")
        return values

    def number(self, key: str) -> float:
        """A number."""
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.error(f"{key} is {_shown(value)}", "It is a number, such as 0.5; YAML reads 1e-3 as a text.")
        try:
            return float(value)
        except OverflowError:
            raise self.error(f"{key} is {_shown(value)}", "It is too large.") from None

    def integer(self, key: str, least: int) -> int:
        """An integer of at least `least`."""
        value = self.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise self.error(f"{key} is {_shown(value)}", f"It is an integer of at least {least}.")
        return value

    def entry(self, key: str, keys: Sequence[str]) -> "_Entry":
        """A mapping with these keys."""
        return _Entry(self.get(key), f"{self.place}, {key}", keys)

    def entries(self, key: str, keys: Sequence[str], most: int) -> list["_Entry"]:
        """A list of mappings with these keys, not empty."""
        value = self.get(key)
        if not isinstance(value, list) or not 1 <= len(value) <= most:
            found = f"a list of {len(value)}" if isinstance(value, list) else _shown(value)
            raise self.error(f"{key} is {found}", f"It is a list of 1 to {most} entries.")
        return [_Entry(item, f"{self.place}, {key}[{number}]", keys) for number, item in enumerate(value)]


class _Loader(yaml.SafeLoader):
    """YAML of plain data that refuses repeated keys and aliases."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.events.AliasEvent):
            raise yaml.YAMLError(f"an alias in line {cast(Any, self).peek_event().start_mark.line + 1}; write it out")
        if self.check_event(yaml.events.ScalarEvent) and len(cast(Any, self).peek_event().value) > MAX_TEXT:
            raise yaml.YAMLError(f"a text of more than {MAX_TEXT} characters")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        _once(keys)
        return super().construct_mapping(node, deep=deep)


def _load(text: str, place: str, is_json: bool) -> Any:
    try:
        if is_json:
            return json.loads(text, object_pairs_hook=_pairs)
        return yaml.load(text, Loader=_Loader)  # derived from SafeLoader: builds plain data only
    except (
        yaml.YAMLError,
        ArithmeticError,
        AttributeError,
        LookupError,
        RecursionError,
        TypeError,
        ValueError,
    ) as error:
        # PyYAML's constructors raise whatever comes for a tag on a text that does not fit it, such as `!!bool perhaps`.
        why = "nested too deeply" if isinstance(error, RecursionError) else " ".join(str(error).split())[:MAX_MESSAGE]
        kind = "JSON" if is_json else "YAML"
        raise DataError(
            f"not a mixture in {kind}: {why}", place=place, remedy="docs/mixtures.md has an example."
        ) from None


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    _once([key for key, _ in pairs])
    return dict(pairs)


def _once(keys: Sequence[Any]) -> None:
    seen: set[Any] = set()
    for key in keys:
        if key in seen:
            raise ValueError(f"key {_shown(key)} is given twice")
        seen.add(key)


def _nearest(name: str, names: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"Did you mean {near[0]}?" if near else f"There are {', '.join(names)}."


def _shown(value: Any) -> str:
    """A value for messages, bounded."""
    if isinstance(value, (list, Mapping)):
        return f"a {'list' if isinstance(value, list) else 'mapping'} of {len(value)}"
    text = (
        repr(value)
        if not isinstance(value, int) or value.bit_length() < 200
        else f"an integer of {value.bit_length()} bits"
    )
    return text if len(text) <= 80 else f"{text[:77]}..."
