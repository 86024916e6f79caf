"""Rows of the formats that people have, the media they name, and fields that fit nothing."""

import base64
import io
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from dataloaders.counts import MediaKind
from dataloaders.errors import DataError, Reason, RecordError, SourceError
from dataloaders.probe import ProbeLimits, probe_image
from dataloaders.record import TextPart
from dataloaders.record_parser import RecordLimits
from dataloaders.row_media import InlineMedium, MediaReference, encode_image, row_medium
from dataloaders.rows import RowFields, RowParser, RowSample, check_fields

IMAGE, VIDEO = MediaKind.IMAGE, MediaKind.VIDEO
Make = Callable[..., bytes]


def _parse(
    row: dict[str, Any],
    fields: RowFields | None = None,
    *,
    limits: RecordLimits | None = None,
    media_limits: ProbeLimits | None = None,
) -> RowSample:
    parser = RowParser(
        fields=fields or RowFields(), limits=limits or RecordLimits(), media_limits=media_limits or ProbeLimits()
    )
    return parser.parse(row, lambda reference, place: len(reference), shard="a.jsonl", key="line 3")


def _media(row: dict[str, Any], fields: RowFields | None = None) -> list[tuple[MediaKind, str | bytes]]:
    """(kind, reference or bytes) in placeholder order."""
    sample = _parse(row, fields)
    return [
        (ref.kind, medium.data if isinstance(medium, InlineMedium) else medium.reference)
        for ref, medium in zip(sample.record.media, sample.media, strict=True)
    ]


def _text(row: dict[str, Any], fields: RowFields | None = None) -> list[tuple[str, list[str | int]]]:
    return [
        (turn.role, [part.text if isinstance(part, TextPart) else part.index for part in turn.parts])
        for turn in _parse(row, fields).record.turns
    ]


def _user(content: object, **others: object) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}], **others}


def test_llava() -> None:
    row = {
        "id": "000000033471",
        "image": "coco/train2017/000000033471.jpg",
        "conversations": [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "A bus."}],
    }
    assert _media(row) == [(IMAGE, "coco/train2017/000000033471.jpg")]
    assert _text(row) == [("user", [0, "\nWhat?"]), ("assistant", ["A bus."])]
    record = _parse(row).record
    assert (record.extra, record.place) == ({"id": "000000033471"}, "shard a.jsonl, key line 3")
    assert record.media[0].member == "coco/train2017/000000033471.jpg"


def test_llava_with_several_images_and_with_none() -> None:
    turns = [{"from": "human", "value": "<image><image>Which?"}]
    assert _media({"image": ["a.jpg", "b.jpg"], "conversations": turns}) == [(IMAGE, "a.jpg"), (IMAGE, "b.jpg")]
    for absent in (None, "", []):
        assert _media({"image": absent, "conversations": [{"from": "human", "value": "Hello"}]}) == []


def test_sharegpt_interleaves_images_and_videos_as_the_text_does() -> None:
    row = {
        "conversations": [{"from": "human", "value": "<video>A<image>B<image>"}, {"from": "gpt", "value": "C"}],
        "images": ["1.png", "2.png"],
        "videos": ["v.mp4"],
    }
    assert _media(row) == [(VIDEO, "v.mp4"), (IMAGE, "1.png"), (IMAGE, "2.png")]


def test_openai_parts_hold_their_media() -> None:
    uri = "data:image/png;base64," + base64.b64encode(b"pixels").decode()
    parts = [
        {"type": "text", "text": "Compare "},
        {"type": "image_url", "image_url": {"url": uri, "detail": "high"}},
        {"type": "image_url", "image_url": "b.png"},
        {"type": "video_url", "video_url": {"url": "c.mp4"}},
    ]
    assert _media(_user(parts)) == [(IMAGE, b"pixels"), (IMAGE, "b.png"), (VIDEO, "c.mp4")]
    assert _text(_user(parts)) == [("user", ["Compare ", 0, 1, 2])]


def test_qwen_and_transformers_parts_hold_their_media() -> None:
    parts = [{"type": "image", "image": "file:///d/a.png"}, {"type": "video", "video": "c.mp4"}]
    more = [{"type": "image", "url": "b.png"}, {"type": "image", "path": "d.png"}]
    assert [value for _, value in _media(_user([*parts, *more]))] == ["file:///d/a.png", "c.mp4", "b.png", "d.png"]


def test_trl_parts_without_media_take_those_of_the_lists_in_order() -> None:
    parts = [{"type": "image"}, {"type": "text", "text": "and"}, {"type": "image"}]
    assert _media(_user(parts, images=[b"1", {"bytes": b"2", "path": None}])) == [(IMAGE, b"1"), (IMAGE, b"2")]


def test_parts_with_an_index_take_that_medium_even_twice() -> None:
    parts = [{"type": "image", "index": 1, "text": None}, {"type": "image", "index": 0}, {"type": "image", "index": 1}]
    assert [value for _, value in _media(_user(parts, images=["a", "b"]))] == ["b", "a", "b"]
    with pytest.raises(RecordError, match=r"has the index 2 of 2 media"):
        _parse(_user([{"type": "image", "index": 2}], images=["a", "b"]))


def test_a_medium_that_is_named_many_times_is_decoded_once() -> None:
    uri = "data:;base64," + base64.b64encode(b"x" * 100_000).decode()
    sample = _parse(_user([{"type": "image", "index": 0}] * 1000, images=[uri]))
    assert len(sample.media) == 1000
    assert len({id(medium) for medium in sample.media}) == 1


def test_columns_of_a_table_that_are_null_are_absent() -> None:
    parts = [{"type": "text", "text": "A", "image": None}, {"type": "image", "text": None, "image": None}]
    row = {**_user(parts), "conversations": None, "text": None, "image": None, "images": ["a.png"]}
    assert _media(row) == [(IMAGE, "a.png")]


def test_own_media_of_parts_and_lists_may_mix() -> None:
    parts = [{"type": "image"}, {"type": "image", "image": "own.png"}, {"type": "image"}]
    assert [value for _, value in _media(_user(parts, images=["a", "b"]))] == ["a", "own.png", "b"]


@pytest.mark.parametrize("field", ["text", "caption"])
def test_captions(field: str) -> None:
    row = {"image": "a.jpg", field: " A cat. ", "url": "http://never.fetched/a.jpg"}
    assert _text(row) == [("user", [0]), ("assistant", ["A cat."])]
    assert _parse(row).record.extra == {"url": "http://never.fetched/a.jpg"}


def test_turns_are_read_in_the_words_they_speak_whatever_the_field_is_called() -> None:
    spoken = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    expected = [("user", ["Hi"]), ("assistant", ["Ho"])]
    assert _text({"conversations": spoken}) == expected
    assert _text({"dialogue": spoken}, RowFields(conversation="dialogue")) == expected
    assert _text({"messages": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]}) == expected


def test_a_conversation_may_be_json_in_a_column() -> None:
    turns = json.dumps([{"role": "user", "content": "<image>?"}])
    assert _media({"messages": turns, "image": b"x"}) == [(IMAGE, b"x")]
    with pytest.raises(RecordError, match="does not parse"):
        _parse({"messages": "[{"})
    with pytest.raises(RecordError, match="nested deeper"):
        _parse({"messages": "[" * 100 + "]" * 100})


def test_named_fields_replace_the_usual_ones() -> None:
    row = {
        "picture": ["a"],
        "clip": "b",
        "image": "not read",
        "dialogue": [{"role": "user", "content": "<video><image>"}],
    }
    fields = RowFields(conversation="dialogue", images="picture", videos=("clip",))
    assert _media(row, fields) == [(VIDEO, "b"), (IMAGE, "a")]
    assert _parse(row, fields).record.extra == {"image": "not read"}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"image": "a.png"}, "no conversation ('messages', 'conversations') and no caption ('text', 'caption')"),
        ({}, "the row has the fields (none)"),
        ({"text": 7}, "`text` is a int"),
        ({"text": "  "}, "the caption is empty"),
        ({"messages": []}, "`messages` is an empty list"),
        ({"messages": {"a": 1}}, "`messages` is a dict"),
        ({"messages": [None]}, "messages[0] is null"),
        ({"messages": [{"role": "user", "content": [3]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "pirate", "content": "x"}]}, "'pirate'"),
    ],
)
def test_rows_that_are_no_sample_say_why(row: dict[str, Any], words: str) -> None:
    with pytest.raises(RecordError) as raised:
        _parse(row)
    assert words in str(raised.value)
    assert "shard a.jsonl, key line 3" in str(raised.value)


@pytest.mark.parametrize(
    "row",
    [_user("<image>?"), _user("?", images=["a"]), _user("<image>", images=["a", "b"]), _user("<image>", videos=["a"])],
)
def test_media_and_placeholders_that_do_not_match_are_an_error(row: dict[str, Any]) -> None:
    with pytest.raises(RecordError) as raised:
        _parse(row)
    assert raised.value.reason is Reason.PLACEHOLDER_MISMATCH


def test_long_texts_are_refused() -> None:
    limits = RecordLimits(max_bytes=100)
    for row in (_user("x" * 101), {"text": "x" * 101}, _user([{"type": "text", "text": "x" * 60}] * 2)):
        with pytest.raises(RecordError, match="above max_bytes=100"):
            _parse(row, limits=limits)


# Values of media


def _medium(value: object, limits: ProbeLimits | None = None) -> InlineMedium | MediaReference:
    return row_medium(value, "images[0]", limits=limits or ProbeLimits(), place="row 1")


@pytest.mark.parametrize("value", [b"x", bytearray(b"x"), memoryview(b"x"), {"bytes": b"x", "path": "no/matter.png"}])
def test_bytes_are_kept_as_they_are(value: object) -> None:
    medium = _medium(value)
    assert isinstance(medium, InlineMedium)
    assert medium.data == b"x"


@pytest.mark.parametrize("value", ["a.png", {"bytes": None, "path": "a.png"}, {"path": "a.png"}, {"url": "a.png"}])
def test_paths_are_references(value: object) -> None:
    assert _medium(value) == MediaReference("images[0]", "a.png")


@pytest.mark.parametrize("value", [{"bytes": None, "path": None}, {"bytes": None, "path": ""}, {}, {"name": "x"}])
def test_a_medium_without_bytes_and_path_is_missing(value: object) -> None:
    with pytest.raises(RecordError) as raised:
        _medium(value)
    assert raised.value.reason is Reason.MISSING_MEDIA


@pytest.mark.parametrize("value", [3, None, 1.5, ["a.png"], np.zeros(3), {"bytes": [1, 2]}])
def test_values_that_are_no_medium_are_refused_by_type(value: object) -> None:
    with pytest.raises(RecordError, match="which is no medium"):
        _medium(value)


def test_many_bytes_are_refused_before_they_are_copied_or_decoded() -> None:
    limits = ProbeLimits(max_bytes=10)
    uri = "data:image/png;base64," + base64.b64encode(b"x" * 16).decode()
    for value in (b"x" * 11, {"bytes": b"x" * 11}, uri):
        with pytest.raises(RecordError) as raised:
            _medium(value, limits)
        assert raised.value.reason is Reason.TOO_LARGE
    fits = "data:;base64," + base64.b64encode(b"x" * 10).decode()
    assert _medium(fits, limits).data == b"x" * 10  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("uri", "words"),
    [
        ("data:image/png,abc", "without `;base64,`"),
        ("data:" + "x" * 1000 + ";base64,aaaa", "without `;base64,`"),
        ("data:image/png;base64,a", "no base64"),
        ("data:image/png;base64,aa!=", "no base64"),
        ("data:image/png;base64,é", "no base64"),
    ],
)
def test_broken_data_uris_are_refused(uri: str, words: str) -> None:
    with pytest.raises(RecordError, match=words):
        _medium(uri)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "I;16", "I", "F", "CMYK"])
def test_a_decoded_image_is_encoded_without_loss(mode: str) -> None:
    noise = np.random.Generator(np.random.Philox(1)).integers(0, 256, size=(7, 5, 3), dtype=np.uint8)
    image = Image.fromarray(noise).convert("L" if mode == "I;16" else mode)
    if mode == "I;16":
        image = Image.fromarray(noise[..., 0].astype(np.uint16) * 257)
    medium = _medium(image)
    assert isinstance(medium, InlineMedium)
    with Image.open(io.BytesIO(medium.data)) as again:
        assert (again.mode, again.size) == (image.mode, image.size)
        assert again.tobytes() == image.tobytes()


def test_the_orientation_of_a_decoded_image_is_kept() -> None:
    buffer, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (30, 20)).save(buffer, "JPEG", exif=exif)
    with Image.open(buffer) as image:
        data = encode_image(image, "image", limits=ProbeLimits(), place="")
    probed = probe_image(data)
    assert (probed.width_px, probed.height_px) == (20, 30)


def test_decoded_images_that_are_large_odd_or_cut_are_refused(image_bytes: Make) -> None:
    with pytest.raises(RecordError, match=r"20x10 px, above .*max_pixels=100"):
        _medium(Image.new("L", (20, 10)), ProbeLimits(max_pixels=100))
    with pytest.raises(RecordError, match="mode HSV"):
        _medium(Image.new("HSV", (2, 2)))
    cut = Image.open(io.BytesIO(image_bytes(64, 64)[:-200]))
    with pytest.raises(RecordError) as raised:
        _medium(cut)
    assert raised.value.reason is Reason.CORRUPT


NAMES = ["messages", "conversations", "images", "image", "video", "text", "bytes", "path"]
NAMES += ["role", "content", "from", "value", "type", "index"]


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.binary(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(NAMES),
                inner,
                max_size=4,
            )
        ),
        max_leaves=12,
    )
)
def test_any_row_gives_a_record_or_an_error_of_data(row: object) -> None:
    for candidate in (row, {"messages": row, "images": row}, _user(row, image=row)):
        if isinstance(candidate, dict):
            try:
                sample = _parse(candidate)
            except DataError:
                continue
            assert [ref.size_bytes for ref in sample.record.media] == [
                medium.size if isinstance(medium, InlineMedium) else len(medium.reference) for medium in sample.media
            ]


# BL-10: a field that is configured and never occurs


def test_a_named_field_that_no_record_has_is_an_error_that_lists_the_keys_seen() -> None:
    rows = [_user("<image>?", image="a.png") for _ in range(3)]
    with pytest.raises(SourceError) as raised:
        check_fields(rows, RowFields(images="images"), place="train.jsonl")
    assert str(raised.value).startswith(
        "no record has the field 'images'; in 3 records there are the keys 'messages' (3), 'image' (3) at train.jsonl"
    )
    check_fields(rows, RowFields(images="image"), place="")
    check_fields([{"text": "A"}], RowFields(images="images"), place="", seen={"images"})


def test_placeholders_without_any_media_are_an_error_that_lists_the_keys_seen() -> None:
    rows = [_user("<image>?", img="a.png"), _user("<image>?", img="b.png"), _user("Hello")]
    with pytest.raises(
        SourceError, match=r"2 of 3 records have placeholders .* the keys 'messages' \(3\), 'img' \(2\)"
    ):
        check_fields(rows, RowFields(), place="")
    check_fields([*rows, _user("<image>", image="c.png")], RowFields(), place="")
    check_fields([_user([{"type": "image", "image": "a"}])], RowFields(), place="")
    check_fields([_user("<image>?"), _user("Hello"), _user("Hello")], RowFields(), place="")
    check_fields([], RowFields(images="x"), place="")
