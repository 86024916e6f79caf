"""Records: the formats people have, placeholders that must match, and JSON that means harm."""

import contextlib
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataloaders.counts import MediaKind
from dataloaders.errors import Reason, RecordError
from dataloaders.record import MediaPart, MediaRef, Record, TextPart
from dataloaders.record_parser import RecordLimits, parse_record

IMAGE, VIDEO = MediaKind.IMAGE, MediaKind.VIDEO


def _media(*kinds: MediaKind) -> list[MediaRef]:
    return [MediaRef(kind=kind, member=f"k.{j}.{kind.name.lower()}", size_bytes=10) for j, kind in enumerate(kinds)]


def _parse(value: object, *kinds: MediaKind, text: bytes | None = None, limits: RecordLimits | None = None) -> Record:
    raw = value if isinstance(value, bytes) or value is None else json.dumps(value).encode()
    return parse_record(raw, text, _media(*kinds), shard="a.tar", key="k", limits=limits)


def _flat(record: Record) -> list[tuple[str, list[str | int]]]:
    return [
        (turn.role, [part.text if isinstance(part, TextPart) else part.index for part in turn.parts])
        for turn in record.turns
    ]


def _messages(content: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": content}]}


def test_string_content_is_split_at_its_placeholders() -> None:
    record = _parse(_messages("<image>A<image>\n<video>B"), IMAGE, IMAGE, VIDEO)
    assert _flat(record) == [("user", [0, "A", 1, "\n", 2, "B"])]


def test_list_content_gives_the_same_record_as_string_content() -> None:
    parts = [{"type": "image"}, {"type": "text", "text": "A"}, {"type": "video"}, {"type": "text", "text": "B"}]
    assert _parse(_messages(parts), IMAGE, VIDEO) == _parse(_messages("<image>A<video>B"), IMAGE, VIDEO)


def test_openai_part_names_are_understood() -> None:
    parts = [{"type": "image_url", "image_url": {"url": "http://never.fetched/x.png"}}, {"type": "video_url"}]
    assert _flat(_parse(_messages(parts), IMAGE, VIDEO)) == [("user", [0, 1])]


def test_text_parts_are_literal() -> None:
    record = _parse(_messages([{"type": "text", "text": "<image> is a tag, <|im_end|> too"}]))
    assert _flat(record) == [("user", ["<image> is a tag, <|im_end|> too"])]


def test_conversations_of_human_and_gpt() -> None:
    turns = [
        {"from": "system", "value": "Brief."},
        {"from": "human", "value": "<image>\nWhat?"},
        {"from": "gpt", "value": "A cat."},
    ]
    record = _parse({"id": 7, "image": "x.jpg", "conversations": turns}, IMAGE)
    assert _flat(record) == [("system", ["Brief."]), ("user", [0, "\nWhat?"]), ("assistant", ["A cat."])]
    assert record.extra == {"id": 7, "image": "x.jpg"}


def test_a_caption_becomes_a_question_of_all_media_and_an_answer() -> None:
    record = _parse(None, IMAGE, VIDEO, text="  Une forêt.\n".encode())
    assert _flat(record) == [("user", [0, 1]), ("assistant", ["Une forêt."])]


def test_a_caption_beside_json_without_a_conversation_keeps_the_json_as_extra() -> None:
    record = _parse({"url": "u", "width": 3}, IMAGE, text=b"A cat")
    assert _flat(record) == [("user", [0]), ("assistant", ["A cat"])]
    assert record.extra == {"url": "u", "width": 3}


def test_a_conversation_wins_over_a_caption() -> None:
    assert _flat(_parse(_messages("Hi"), text=b"caption")) == [("user", ["Hi"])]


def test_media_are_put_into_the_order_of_their_placeholders() -> None:
    record = _parse(_messages("<video><image><video>"), IMAGE, VIDEO, VIDEO)
    assert [ref.member for ref in record.media] == ["k.1.video", "k.0.image", "k.2.video"]
    assert _flat(record) == [("user", [0, 1, 2])]


@given(st.lists(st.sampled_from([IMAGE, VIDEO, None]), max_size=8))
def test_every_medium_is_used_once_and_in_its_own_order(pieces: list[MediaKind | None]) -> None:
    text = "".join("x" if kind is None else f"<{kind.name.lower()}>" for kind in pieces)
    kinds = sorted(kind for kind in pieces if kind is not None)
    record = _parse(_messages(text), *kinds)
    used = [part.index for turn in record.turns for part in turn.parts if isinstance(part, MediaPart)]
    assert used == list(range(len(kinds)))
    assert [ref.kind for ref in record.media] == [kind for kind in pieces if kind is not None]
    for kind in MediaKind:
        members = [ref.member for ref in record.media if ref.kind is kind]
        assert members == [ref.member for ref in _media(*kinds) if ref.kind is kind]


@pytest.mark.parametrize(
    ("text", "kinds", "message"),
    [
        ("<image>", [], "1 image placeholder(s) in the text, but 0 image member(s) (no media) at shard a.tar, key k"),
        ("Hi", [IMAGE], "0 image placeholder(s) in the text, but 1 image member(s) ('k.0.image')"),
        ("<image><image>", [IMAGE], "2 image placeholder(s) in the text, but 1 image member(s)"),
        ("<image>", [IMAGE, VIDEO], "0 video placeholder(s) in the text, but 1 video member(s)"),
        ("<video>", [IMAGE], "1 image member(s)"),
    ],
)
def test_placeholders_that_do_not_match_are_an_error_with_the_counts(
    text: str, kinds: list[MediaKind], message: str
) -> None:
    with pytest.raises(RecordError, match=re.escape(message)) as caught:
        _parse(_messages(text), *kinds)
    assert caught.value.reason is Reason.PLACEHOLDER_MISMATCH


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (b"", "the JSON does not parse"),
        (b'{"messages": ', "the JSON does not parse"),
        (b"\xff\xfe", "the JSON is not UTF-8"),
        (b"[" * 100_000, "nested deeper than max_depth=64"),
        (b'{"a": ' * 100 + b"1" + b"}" * 100, "nested deeper than max_depth=64"),
        (b'{"a": 1' + b"0" * 5000 + b"}", "the JSON does not parse"),
        ([1], "the JSON is a list, not an object"),
        ("text", "the JSON is a str, not an object"),
        ({"caption": "x", "url": "y"}, "the JSON has the fields 'caption', 'url' but no conversation"),
        ({}, "the JSON has the fields (none) but no conversation"),
        ({"messages": []}, "`messages` is an empty list"),
        ({"messages": {"role": "user"}}, "`messages` is a dict"),
        ({"messages": ["hi"]}, "messages[0] is a str"),
        ({"messages": [{"role": "user"}]}, "A turn is an object with `role` and `content`"),
        ({"conversations": [{"role": "user", "content": "x"}]}, "A turn is an object with `from` and `value`"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role is 'robot'"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "messages[0].role is"),
        (_messages(None), "messages[0].content is null"),
        (_messages(5), "messages[0].content is a int"),
        (_messages([{"type": "audio"}]), "messages[0].content[0] is a dict of type 'audio'"),
        (_messages([{"type": "text", "text": None}]), "messages[0].content[0]"),
        (_messages(["loose"]), "messages[0].content[0] is a str"),
        (_messages([{"type": {"a": 1}}]), "messages[0].content[0]"),
        (None, "there is neither a .json nor a .txt member"),
    ],
)
def test_a_broken_record_says_what_is_wrong_and_where(value: object, message: str) -> None:
    with pytest.raises(RecordError, match=re.escape(message)) as caught:
        _parse(value)
    assert caught.value.reason is Reason.BAD_RECORD
    assert caught.value.place == "shard a.tar, key k"


def test_an_empty_caption_is_an_error() -> None:
    with pytest.raises(RecordError, match="the caption is empty"):
        _parse(None, IMAGE, text=b" \n")


def test_json_larger_than_the_limit_is_refused_before_it_is_parsed() -> None:
    with pytest.raises(RecordError, match=r"the JSON has 30 bytes, above max_bytes=20"):
        _parse(b"[" * 30, limits=RecordLimits(max_bytes=20))


def test_json_at_the_depth_limit_is_accepted_and_one_deeper_is_not() -> None:
    limits = RecordLimits(max_depth=5)
    record = {"messages": [{"role": "user", "content": "x"}], "many": [[] for _ in range(20)], "deep": [[[[]]]]}
    assert _parse(record, limits=limits).extra["deep"] == [[[[]]]]
    with pytest.raises(RecordError, match="max_depth=5"):
        _parse({**record, "deep": [[[[[]]]]]}, limits=limits)


def test_a_byte_order_mark_is_tolerated() -> None:
    assert _flat(_parse(b"\xef\xbb\xbf" + json.dumps(_messages("Hi")).encode())) == [("user", ["Hi"])]


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["messages", "conversations", "role", "content", "from", "value", "type", "text"]),
                inner,
                max_size=3,
            )
        ),
        max_leaves=12,
    )
)
def test_any_json_is_a_record_or_a_record_error(value: object) -> None:
    with contextlib.suppress(RecordError):
        assert _parse(json.dumps(value).encode()).turns
