"""Chat templates: found where transformers finds them, rendered as it renders them, and kept in their box."""

import json
from pathlib import Path
from typing import Any

import pytest

from dataloaders.chat_template import FIXED_DATE, ChatTemplate, RenderLimits, TemplateRefusal
from dataloaders.errors import DataError
from dataloaders.template_files import MAX_TEMPLATE_BYTES, find_template

TALK: list[dict[str, Any]] = [{"role": "user", "content": "Hi <b>&"}, {"role": "assistant", "content": "A cat."}]


def _render(source: str, messages: list[dict[str, Any]] | None = None, **options: Any) -> str:
    return ChatTemplate(source=source, **options).render(TALK if messages is None else messages).text


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.content }}{% break %}{% endfor %}",
        "{{ messages | tojson }}{{ messages[0] | tojson(indent=2) }}",
        "  {% if true %}\n  {{ messages[0].content }}\n  {% endif %}\n",
        "{% set ns = namespace(a=1) %}{% for m in messages %}{% set ns.a = ns.a + 1 %}{% endfor %}{{ ns.a }}",
        "{{ dict(a=1, b='x').items() | list }}",
        "{{ messages[0]['content'].split(' ')[-1] | trim }}{{ messages[::-1] | length }}",
        "{% macro f(x) %}[{{ x }}]{% endmacro %}{{ f(messages[1].content) }}{{ bos_token }}{{ missing is defined }}",
        "{{ tools is none }}{{ documents is none }}{{ add_generation_prompt }}",
        "a{% generation %}b{% endgeneration %}"
        "{% for m in messages %}{% generation %}{{ m.role }}{% endgeneration %}{% endfor %}",
    ],
)
def test_templates_render_as_in_transformers(source: str) -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    expected, spans = utils.render_jinja_template(
        [TALK], chat_template=source, return_assistant_tokens_mask="generation" in source, bos_token="<s>"
    )
    rendered = ChatTemplate(source=source, variables={"bos_token": "<s>"}).render(TALK)
    assert rendered.text == expected[0]
    assert [list(rendered.answers)] == (spans or [[]])


def test_generation_blocks_are_found_with_their_places() -> None:
    template = ChatTemplate(
        source="{% for m in messages %}<{%- generation -%} {{ m.content }} {%- endgeneration %}>{% endfor %}"
    )
    rendered = template.render(TALK)
    assert template.marks_answers
    assert [rendered.text[start:end] for start, end in rendered.answers] == ["Hi <b>&", "A cat."]
    assert not ChatTemplate(source="generation {{ messages }}").marks_answers


def test_a_block_that_is_not_written_where_it_stands_is_refused() -> None:
    hidden = "{% set x %}aaa{% generation %}b{% endgeneration %}{% endset %}{{ x }}"
    with pytest.raises(TemplateRefusal, match=r"does not stand where it was written"):
        _render(hidden)


def test_the_clock_stands_still() -> None:
    source = "{{ strftime_now('%Y-%m-%d') }}"
    assert _render(source) == FIXED_DATE
    assert _render(source, today="2031-12-24") == "2031-12-24"
    with pytest.raises(DataError, match=r"today='tomorrow' is not a date"):
        _render(source, today="tomorrow")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}{{ ''.__class__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{% set ns = namespace(__class__=1) %}",
        "{% set ns = namespace() %}{% set ns._x = 1 %}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}",
        "{{ raise_exception('no') }}",
        "{{ 1 / 0 }}",
        "{{ 'a' * 10**9 }}",
        "{{ [0] * 10**9 }}",
        "{{ 10 ** 10000000 }}",
        "{{ messages[7].content }}",
        "{% for i in range(10**9) %}x{% endfor %}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    ],
)
def test_what_a_template_may_not_do_is_a_refusal(source: str) -> None:
    with pytest.raises(TemplateRefusal, match="the chat template refuses the conversation"):
        _render(source, place="f.jinja")


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "s of rendering"),
        ("{% for i in range(99999) %}{{ 'x' * 1000 }}{% endfor %}", "more than 100000 characters written"),
    ],
)
def test_endless_and_huge_renderings_are_stopped(source: str, why: str) -> None:
    limits = RenderLimits(max_chars=100_000, max_seconds=0.2)
    with pytest.raises(TemplateRefusal, match=why):
        _render(source, limits=limits)


@pytest.mark.parametrize("source", ["{{ ''.__class__ }}", "{{ messages.__class__ }}"])
def test_internals_are_nothing_to_a_template(source: str) -> None:
    assert _render(source) == ""


@pytest.mark.parametrize("source", ["{% if %}", "{% generation %}", "{{ x | random }}", "{% endfor %}"])
def test_a_template_that_does_not_compile_is_refused_with_its_place(source: str) -> None:
    with pytest.raises(DataError, match=r"the chat template does not compile: .* at f.jinja"):
        ChatTemplate(source=source, place="f.jinja")


# Files


def _write(folder: Path, **files: object) -> Path:
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder


def test_templates_are_found_in_the_order_of_transformers(tmp_path: Path) -> None:
    _write(tmp_path, tokenizer_config={"chat_template": "d"})
    assert find_template(tmp_path)[0] == "d"
    (tmp_path / "chat_template.jinja").write_text("c")
    assert find_template(tmp_path)[0] == "c"
    _write(tmp_path, chat_template={"chat_template": "b"})
    assert find_template(tmp_path)[0] == "b"
    _write(tmp_path, processor_config={"chat_template": "a"})
    assert find_template(tmp_path) == ("a", f"{tmp_path / 'processor_config.json'}, chat_template")


def test_named_templates_are_chosen_by_name(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "x"}, {"name": "tool_use", "template": "y"}]
    _write(tmp_path, tokenizer_config={"chat_template": named})
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("z")
    assert [find_template(tmp_path, name)[0] for name in ("default", "tool_use", "rag")] == ["x", "y", "z"]
    with pytest.raises(DataError, match=r"no chat template 'x'; there are default, rag, tool_use .*template_name"):
        find_template(tmp_path, "x")


def test_a_folder_without_a_template_says_where_it_belongs(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no chat template 'default' at .* chat_template.jinja"):
        find_template(tmp_path)


def test_damaged_and_huge_templates_are_refused(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match="not UTF-8"):
        find_template(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"x" * (MAX_TEMPLATE_BYTES + 1))
    with pytest.raises(DataError, match=f"above the {MAX_TEMPLATE_BYTES} that are read"):
        find_template(tmp_path)
    _write(tmp_path, chat_template={"chat_template": "x" * (MAX_TEMPLATE_BYTES + 1)})
    with pytest.raises(DataError, match="a chat template of more than"):
        find_template(tmp_path)
    (tmp_path / "chat_template.json").write_text("{")
    with pytest.raises(DataError, match="not JSON"):
        find_template(tmp_path)


@pytest.mark.parametrize(
    "source",
    [
        "{% set r = range(99999) %}{% for a in r %}{% for b in r %}{% endfor %}{% endfor %}",
        "{% set r = range(99999) | list %}{% for a in r %}{% if (r | sort)[0] %}{% endif %}{% endfor %}",
    ],
)
def test_a_loop_that_writes_nothing_and_calls_nothing_ends_in_time(source: str) -> None:
    with pytest.raises(TemplateRefusal, match=r"more than 0.2 s of rendering"):
        _render(source, limits=RenderLimits(max_seconds=0.2))


def test_a_product_of_huge_numbers_is_refused_before_it_is_made() -> None:
    source = "{% set n = namespace(x=3) %}{% for i in range(40) %}{% set n.x = n.x * n.x %}{% endfor %}"
    with pytest.raises(TemplateRefusal, match="a product of more than 4096 bits"):
        _render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{{ loop.length }}{{ loop.last }}{{ loop.nextitem }}{% else %}none{% endfor %}",
        "{% for m in [] %}{% else %}none{% endfor %}{% for m in missing %}{% else %}none{% endfor %}",
        "{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{{ loop.revindex }}{% endfor %}",
        "{% for r in messages | map(attribute='role') if r != 'user' %}{{ r }}{{ loop.length }}{% endfor %}",
        "{% for x in [1, [2, [3]]] recursive %}{{ loop.depth }}{{ loop(x) if x is iterable }}{% endfor %}",
    ],
)
def test_a_watched_loop_is_the_loop_of_transformers(source: str) -> None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    assert _render(source) == utils.render_jinja_template([TALK], chat_template=source)[0][0]


@pytest.mark.parametrize(
    "source",
    [
        "".join(f"{{% for a{i} in messages %}}" for i in range(25)) + "{% endfor %}" * 25,
        "{% if true %}" * 150 + "{% endif %}" * 150,
        "{{ " + "1" * 5000 + " }}",
        "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    ],
    ids=["loops", "branches", "number", "parentheses"],
)
def test_what_python_cannot_compile_is_refused_as_a_template(source: str) -> None:
    with pytest.raises(DataError, match="the chat template does not compile"):
        ChatTemplate(source=source)
