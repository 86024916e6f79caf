"""A model's chat template: found in its folder, rendered in a sandbox, with the spans that it marks as generated.

    chat_template.jinja --compile--> ChatTemplate --render(messages)--> Rendered(text, answers [(start, end), ...])

    {% for m in messages %}<|im_start|>{{ m.role }}
    {% generation %}{{ m.content }}<|im_end|>{% endgeneration %}      -> one span of characters per block

Templates are programs from a model folder. They run in jinja2's immutable sandbox without a file loader, with the
helpers that transformers 5.24 offers (`raise_exception`, `tojson`, `strftime_now`, loop controls), and are stopped when
they write or run beyond `RenderLimits`. What they hold in variables is not bounded, so name folders you trust to fit
into memory. The clock that they see stands still: today's date in a prompt would change token counts from day to day.
"""

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from typing import Any, TypeAlias

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from dataloaders.errors import DataError

Message: TypeAlias = dict[str, Any]
FIXED_DATE = "2024-07-26"
_MAX_POWER_BITS = 4096
_TIMED = "the clock of loops"  # no template can spell it
_GENERATION = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")


class TemplateRefusal(DataError):
    """The template raised, wrote too much or ran too long for these messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RenderLimits:
    """Ceilings on one rendering: characters written and seconds taken."""

    max_chars: int = 64 * 1024**2
    max_seconds: float = 10.0


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation as text, and the (start, end) characters of its `{% generation %}` blocks, in order."""

    text: str
    answers: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatTemplate:
    """A compiled template with its constants; immutable and picklable (the compiled form is cached per process).

    Attributes:
        source: the jinja text.
        variables: what the template sees beside the messages: special tokens by name, options such as
            `enable_thinking`.
        today: date (YYYY-MM-DD) that `strftime_now` tells.
    """

    source: str
    variables: Mapping[str, Any] = field(default_factory=dict, hash=False)
    today: str = FIXED_DATE
    limits: RenderLimits = field(default_factory=RenderLimits)
    place: str = ""

    def __post_init__(self) -> None:
        try:
            datetime.fromisoformat(self.today)
        except ValueError as error:
            raise DataError(f"today={self.today!r} is not a date", remedy="Write YYYY-MM-DD.") from error
        try:
            _compiled(self.source)
        except (
            Exception
        ) as error:  # of jinja, and of Python for what jinja made: loops in too many levels, huge numbers
            line = f"{self.place}:{error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else self.place
            raise DataError(f"the chat template does not compile: {error}", place=line) from error

    @property
    def marks_answers(self) -> bool:
        """Whether it has `{% generation %}` blocks."""
        return _GENERATION.search(self.source) is not None

    @property
    def opens_answers(self) -> bool:
        """Whether it knows `add_generation_prompt`: it then tells where an answer starts."""
        return "add_generation_prompt" in self.source

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = False) -> Rendered:
        """`messages` as one text.

        Raises:
            TemplateRefusal: the template raised an error, or went beyond the limits.
        """
        writing = _Writing(self.limits, datetime.fromisoformat(self.today))
        token = _current.set(writing)
        names = {"tools": None, "documents": None, **self.variables}
        try:
            blocks = _compiled(self.source).generate(
                messages=messages, add_generation_prompt=add_generation_prompt, **names
            )
            for block in blocks:
                writing.add(block)
        except Exception as error:  # a template is a program: it can raise anything
            raise TemplateRefusal(f"the chat template refuses the conversation: {error}", place=self.place) from error
        finally:
            _current.reset(token)
        text = "".join(writing.blocks)
        for (start, end), block in zip(writing.spans, writing.generated, strict=True):
            if text[start:end] != block:
                raise TemplateRefusal(
                    "a {% generation %} block does not stand where it was written (is it inside a macro or a filter?)",
                    place=self.place,
                    remedy="Move the block to the top level of the template.",
                )
        return Rendered(text, tuple(writing.spans))


class _Writing:
    """State of one rendering."""

    def __init__(self, limits: RenderLimits, now: datetime) -> None:
        self.limits, self.now = limits, now
        self.blocks: list[str] = []
        self.length = 0
        self.spans: list[tuple[int, int]] = []
        self.generated: list[str] = []
        self._deadline = time.monotonic() + limits.max_seconds

    def add(self, block: str) -> None:
        self.blocks.append(block)
        self.length += len(block)
        if self.length > self.limits.max_chars:
            raise SecurityError(f"more than {self.limits.max_chars} characters written")
        self.tick()

    def tick(self) -> None:
        if time.monotonic() > self._deadline:
            raise SecurityError(f"more than {self.limits.max_seconds} s of rendering")

    def generate(self, block: str) -> str:
        self.spans.append((self.length, self.length + len(block)))
        self.generated.append(block)
        return block


_current: ContextVar[_Writing] = ContextVar("chat template being rendered")


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}`: notes where its body stands in the text."""

    tags = {"generation"}  # noqa: RUF012  (the attribute's form is jinja2's)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_note"), [], [], body).set_lineno(line)

    def _note(self, caller: Callable[[], str]) -> str:
        return _current.get().generate(caller())


class _Namespace(Namespace):
    """`namespace(...)` whose attributes cannot reach Python internals."""

    def __init__(self, /, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name in dict(*args, **kwargs):
            _Namespace._check(name)

    def __setitem__(self, name: str, value: Any) -> None:
        _Namespace._check(name)
        super().__setitem__(name, value)

    @staticmethod
    def _check(name: object) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise SecurityError(f"a namespace cannot hold {name!r}")


class _Sandbox(ImmutableSandboxedEnvironment):
    """Calls and turns of loops look at the clock; products and powers at the size of what they would make."""

    intercepted_binops = frozenset({"*", "**"})

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        for loop in template.find_all(nodes.For):
            loop.iter = nodes.Filter(loop.iter, _TIMED, [], [], None, None, lineno=loop.lineno)
        return template

    def call(self, context: Context, called: Any, /, *args: Any, **kwargs: Any) -> Any:
        _current.get().tick()
        return super().call(context, called, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "**" and isinstance(left, int) and isinstance(right, int):
            if left.bit_length() * abs(right) > _MAX_POWER_BITS:
                raise SecurityError(f"a power of more than {_MAX_POWER_BITS} bits")
        elif operator == "*":
            times, repeated = (left, right) if isinstance(left, int) else (right, left)
            most = _current.get().limits.max_chars
            if isinstance(times, int) and isinstance(repeated, (str, list, tuple)) and times * len(repeated) > most:
                raise SecurityError(f"a product of more than {most} characters or elements")
            numbers = isinstance(left, int) and isinstance(right, int)
            if numbers and left.bit_length() + right.bit_length() > _MAX_POWER_BITS:
                raise SecurityError(f"a product of more than {_MAX_POWER_BITS} bits")
        return super().call_binop(context, operator, left, right)


@lru_cache(maxsize=32)
def _compiled(source: str) -> jinja2.Template:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters |= {"tojson": _tojson, _TIMED: _timed}
    del environment.filters["random"], environment.globals["lipsum"]  # a text must not depend on chance
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": _make_dict,
        "namespace": _Namespace,
    }
    return environment.from_string(source)


def _timed(values: Any) -> Any:
    """What a loop goes through, with a look at the clock at every turn."""
    return _Timed(values) if isinstance(values, Sized) else _ticking(values)


class _Timed:
    """A sized collection, so that `loop.length` costs nothing."""

    def __init__(self, values: Any) -> None:
        self._values = values

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[Any]:
        return _ticking(self._values)


def _ticking(values: Iterable[Any]) -> Iterator[Any]:
    writing = _current.get()
    for value in values:
        writing.tick()
        yield value


def _strftime_now(form: str) -> str:
    return _current.get().now.strftime(form)


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    """Stands for the class `dict`, whose attributes lead further."""
    return dict(*args, **kwargs)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As transformers has it: jinja2's own escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
