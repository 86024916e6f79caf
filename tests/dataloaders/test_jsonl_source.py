"""JSON lines and arrays: spans of records, broken ones among good ones, and paths of media that mean harm."""

import base64
import hashlib
import json
import os
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from dataloaders import json_spans as spans_module
from dataloaders.errors import MediaError, Reason, RecordError, SourceError
from dataloaders.estimators import Qwen25VLEstimator
from dataloaders.json_spans import JsonSpans, json_spans
from dataloaders.jsonl_source import JsonlSource
from dataloaders.media_files import MediaFiles
from dataloaders.probe import ProbeLimits
from dataloaders.record import TextPart
from dataloaders.record_parser import RecordLimits
from dataloaders.rows import RowFields
from dataloaders.sample import load_sample
from dataloaders.scan import build_index, scan_source
from dataloaders.storage import FileState, Storage, StorageOptions
from tools.benchmarks.range_server import RangeServer

ESTIMATOR = Qwen25VLEstimator()
Make = Callable[..., bytes]


class _Memory:
    """A stored file in memory."""

    def __init__(self, data: bytes) -> None:
        self.data, self.size = data, len(data)
        self.state = FileState(url="memory.json", size=len(data), stamp="")

    def read(self, offset: int, size: int) -> bytes:
        assert 0 <= offset <= offset + size <= self.size
        return self.data[offset : offset + size]


def _spans(data: bytes, *, chunk_bytes: int = 1 << 20, only_lines: bool = False) -> JsonSpans:
    before = spans_module.CHUNK_BYTES
    spans_module.CHUNK_BYTES = chunk_bytes
    try:
        return json_spans(_Memory(data), only_lines=only_lines)
    finally:
        spans_module.CHUNK_BYTES = before


def _cut(data: bytes, spans: JsonSpans) -> list[bytes]:
    return [data[start : start + size] for start, size in zip(spans.start.tolist(), spans.size.tolist(), strict=True)]


TRICKY = st.text(alphabet='ab"\\[]{},:\n é\u2028')
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TRICKY,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TRICKY, inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(VALUES, max_size=5),
    st.integers(1, 9),
    st.booleans(),
    st.sampled_from([None, 0, 2]),
    st.sampled_from(["", "\ufeff"]),
)
def test_elements_of_an_array_are_found_at_any_chunk_size(
    values: list[object], chunk_bytes: int, ascii_only: bool, indent: int | None, bom: str
) -> None:
    data = (bom + json.dumps(values, ensure_ascii=ascii_only, indent=indent)).encode() + b" \n"
    spans = _spans(data, chunk_bytes=chunk_bytes)
    assert [json.loads(part) for part in _cut(data, spans)] == values
    assert spans.number.tolist() == list(range(1, len(values) + 1))
    assert (spans.noun, spans.digest) == ("element", hashlib.sha256(data).hexdigest())


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from([b"", b" ", b"\t\r", b"{}", b' {"a": 1}', b"x"]), max_size=8),
    st.integers(1, 9),
    st.sampled_from([b"\n", b"\r\n"]),
    st.booleans(),
    st.booleans(),
)
def test_lines_that_are_not_blank_are_found_at_any_chunk_size(
    lines: list[bytes], chunk_bytes: int, end: bytes, last: bool, bom: bool
) -> None:
    data = (b"\xef\xbb\xbf" if bom else b"") + end.join(lines) + (end if last else b"")
    spans = _spans(data, chunk_bytes=chunk_bytes, only_lines=True)
    full = [(number, line.strip()) for number, line in enumerate(lines, 1) if line.strip()]
    assert list(zip(spans.number.tolist(), map(bytes.strip, _cut(data, spans)), strict=True)) == full


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"[1, 2", "cut off in or after element 2"),
        (b'[{"a": "b', "cut off in or after element 1"),
        (b"[", "cut off"),
        (b"[1] [2]", "something behind the end of the JSON array, at byte 4"),
        (b"[1,,2]", "element 2 of the JSON array is empty"),
        (b"[1,]", "element 2 of the JSON array is empty"),
        (b"[,1]", "element 1 of the JSON array is empty"),
        (b"[1}", "a stray } at byte 2"),
        (b'{\n  "data": [\n', "one JSON object over several lines"),
        (b"\xff\xfe[\x00", "UTF-16"),
        (b"\x1f\x8b\x08\x00", "compressed"),
    ],
)
def test_files_that_are_no_array_and_no_lines_are_refused(data: bytes, words: str) -> None:
    with pytest.raises(SourceError, match=words):
        _spans(data)


def test_deep_nesting_and_long_strings_need_neither_stack_nor_time() -> None:
    deep = b"[" * 100_000 + b"]" * 100_000
    assert _spans(b"[" + deep + b", 1]").size.tolist() == [200_000, 1]
    escapes = b'"' + b'\\"' * 500_000 + b'"'
    assert _spans(b"[" + escapes + b"]", chunk_bytes=4096).size.tolist() == [len(escapes)]


# The source


def _chat(text: str = "Hello", **others: object) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "Yes."}], **others}


def _write(path: Path, rows: Sequence[Mapping[str, Any] | bytes]) -> Path:
    path.write_bytes(b"\n".join(row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows))
    return path


def _first_text(source: JsonlSource, i: int) -> str:
    part = source.record(i).turns[0].parts[0]
    assert isinstance(part, TextPart)
    return part.text


def _open_one(folder: Path, row: Mapping[str, Any], **options: Any) -> JsonlSource:
    return JsonlSource(_write(folder / "a.jsonl", [row]), **options)


BROKEN = [
    b"{",
    b"\xff\xfe",
    b'{"messages": [{"role": "user", "content": "\xe9"}]}',
    b"[1, 2]",
    b"3",
    b'"text"',
    b"[" * 500 + b"]" * 500,
    b'{"messages": ' + b'[{"a":' * 40 + b"1" + b"}]" * 40 + b"}",
    b'{"n": ' + b"9" * 5000 + b"}",
    b'{"messages": [{"role": "user", "content": "' + b"x" * 3000 + b'"}]}',
]


def test_broken_lines_are_errors_with_their_number_and_spoil_no_other(tmp_path: Path) -> None:
    lines: list[Mapping[str, Any] | bytes] = []
    for k, broken in enumerate(BROKEN):
        lines += [_chat(f"good {k}"), b"", broken]
    source = JsonlSource(_write(tmp_path / "a.jsonl", lines), limits=RecordLimits(max_bytes=2000))
    assert len(source) == 2 * len(BROKEN)
    for k in range(len(BROKEN)):
        assert _first_text(source, 2 * k) == f"good {k}"
        with pytest.raises(RecordError) as raised:
            source.record(2 * k + 1)
        assert raised.value.place == f"shard {tmp_path}/a.jsonl, key line {3 * k + 3}"
    index = scan_source(source, ESTIMATOR)
    assert [bad.sample_id for bad in index.bad] == list(range(1, 2 * len(BROKEN), 2))


@pytest.mark.parametrize("broken", BROKEN[:1] + BROKEN[3:5])
def test_a_first_line_that_is_broken_spoils_no_other(tmp_path: Path, broken: bytes) -> None:
    source = JsonlSource(_write(tmp_path / "a.jsonl", [broken, _chat("good")]))
    assert _first_text(source, 1) == "good"
    with pytest.raises(RecordError, match="line 1"):
        source.record(0)


def test_odd_json_is_read_as_python_reads_it(tmp_path: Path) -> None:
    lines: list[Mapping[str, Any] | bytes] = [
        b'{"messages": [{"role": "user", "content": "a"}], "n": NaN, "m": -Infinity, "k": 1e999}',
        b'{"messages": [], "messages": [{"role": "user", "content": "last"}]}',
        b'{"messages": [{"role": "user", "content": "\\ud800 alone"}], "\\udfff": 1}',
        b'{"messages": [{"role": "user", "content": "c"}], "n": ' + b"9" * 4000 + b"}",
        _chat("\\u0000 and \u2028 and \x85"),
    ]
    source = JsonlSource(_write(tmp_path / "a.jsonl", lines))
    assert [_first_text(source, i)[:1] for i in range(5)] == ["a", "l", "\ud800", "c", "\\"]
    index = scan_source(source, ESTIMATOR)
    assert {bad.sample_id for bad in index.bad} <= {2}


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.ndjson"])
def test_bom_carriage_returns_and_a_last_line_without_end(tmp_path: Path, name: str) -> None:
    first, second = (json.dumps(_chat(text)).encode() for text in ("one", "two"))
    (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + first + b"\r\n\r\n \t\r\n" + second)
    source = JsonlSource(tmp_path / name)
    assert [_first_text(source, i) for i in range(len(source))] == ["one", "two"]
    assert source.place(1) == f"shard {tmp_path}/{name}, key line 4"


def test_elements_of_an_array_that_are_broken_spoil_no_other(tmp_path: Path) -> None:
    elements = [json.dumps(_chat("one")), '{"a": nonsense}', "7", json.dumps(_chat("two"), indent=3), '{"a": [}']
    (tmp_path / "a.json").write_text("[" + ",\n".join(elements[:4]) + "]")
    source = JsonlSource(tmp_path / "a.json")
    assert (_first_text(source, 0), _first_text(source, 3)) == ("one", "two")
    for i in (1, 2):
        with pytest.raises(RecordError, match=f"key element {i + 1}"):
            source.record(i)


def test_several_files_follow_one_another(tmp_path: Path) -> None:
    _write(tmp_path / "b.jsonl", [_chat("3")])
    (tmp_path / "a.json").write_text(json.dumps([_chat("1"), _chat("2")]))
    source = JsonlSource([tmp_path / "a.json", tmp_path / "b.jsonl"])
    assert [_first_text(source, i) for i in range(3)] == ["1", "2", "3"]
    assert [source.place(i).rpartition("/")[2] for i in range(3)] == [
        "a.json, key element 1",
        "a.json, key element 2",
        "b.jsonl, key line 1",
    ]
    np.testing.assert_array_equal(source.groups, np.array([0, 0, 1], dtype=np.int64))
    assert source.groups.dtype == np.int64
    turned = JsonlSource([tmp_path / "b.jsonl", tmp_path / "a.json"])
    assert turned.fingerprint != source.fingerprint


def test_media_start_from_the_folder_of_the_file_that_names_them(tmp_path: Path) -> None:
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "i.png").write_bytes(name.encode())
        _write(tmp_path / name / "a.jsonl", [_chat("<image>", image="i.png")])
    source = JsonlSource(str(tmp_path / "{x,y}" / "a.jsonl"))
    assert [source.media_bytes(i, 0) for i in range(2)] == [b"x", b"y"]
    elsewhere = JsonlSource(str(tmp_path / "x" / "a.jsonl"), media_root=tmp_path / "y")
    assert elsewhere.media_bytes(0, 0) == b"y"


def test_the_fingerprint_is_of_content(tmp_path: Path) -> None:
    first = _open_one(tmp_path, _chat("abc")).fingerprint
    assert _open_one(tmp_path, _chat("abc")).fingerprint == first
    assert _open_one(tmp_path, _chat("abd")).fingerprint != first
    fields = RowFields(conversation="messages")
    assert _open_one(tmp_path, _chat("abc"), fields=fields).fingerprint != first


def test_a_file_that_changes_after_opening_is_an_error(tmp_path: Path) -> None:
    source = _open_one(tmp_path, _chat("abc"))
    _write(tmp_path / "a.jsonl", [_chat("another")])
    with pytest.raises(SourceError, match="has changed"):
        source.record(0)


@pytest.mark.parametrize("content", [b"", b"\n\n  \n", b"[]", b"\xef\xbb\xbf"])
def test_a_file_without_records_is_an_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(SourceError, match="holds no record"):
        JsonlSource(tmp_path / "a.json")


def test_files_that_are_missing_are_all_named(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"2 of 2 files are missing.*0\.jsonl.*1\.jsonl"):
        JsonlSource(str(tmp_path / "{0..1}.jsonl"))


def test_a_named_field_that_never_occurs_is_an_error_at_once(tmp_path: Path) -> None:
    rows = [_chat("<image>", image="a.png")] * 3
    with pytest.raises(SourceError, match=r"no record has the field 'images'.*'messages' \(3\), 'image' \(3\)"):
        JsonlSource(_write(tmp_path / "a.jsonl", rows), fields=RowFields(images="images"))


def test_a_named_field_may_be_rare(tmp_path: Path) -> None:
    rows = [_chat(str(i)) for i in range(500)]
    rows[77] = _chat("<video>", clip="a.mp4")
    source = JsonlSource(_write(tmp_path / "a.jsonl", rows), fields=RowFields(videos="clip"))
    assert len(source) == 500


# Media


def test_paths_inside_the_root(tmp_path: Path) -> None:
    (tmp_path / "i" / "ü b").mkdir(parents=True)
    path = tmp_path / "i" / "ü b" / "1.png"
    path.write_bytes(b"abc")
    names = ["i/ü b/1.png", "./i//ü b/1.png", str(path), f"file://{path}", f"file:{path}"]
    for name in names:
        source = _open_one(tmp_path, _chat("<image>", image=name))
        assert source.record(0).media[0].size_bytes == 3
        assert source.media_bytes(0, 0) == b"abc"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("../secret", r"holds `\.\.`"),
        ("i/../../secret", r"holds `\.\.`"),
        ("i\\..\\..\\secret", r"holds `\.\.`"),
        ("file://../secret", r"holds `\.\.`"),
        ("/etc/passwd", "outside of media_root"),
        ("file:///etc/passwd", "outside of media_root"),
        ("a\0b", "NUL byte"),
        ("http://127.0.0.1:1/x.png", "fetching http: is not allowed"),
        ("HTTPS://host/x.png", "fetching https: is not allowed"),
        ("s3://bucket/x.png", "fetching s3: is not allowed"),
        ("folder", "is a folder"),
        ("pipe", "a device, pipe or socket"),
        ("link-out", "It is a link: allow those with follow_links=True"),
        ("folder-out/secret", "It is a link"),
    ],
)
def test_references_that_mean_harm_are_bad_records(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    root = tmp_path / "root"
    root.mkdir()
    os.mkfifo(root / "pipe")
    (root / "folder").mkdir()
    (root / "link-out").symlink_to(tmp_path / "secret")
    (root / "folder-out").symlink_to(tmp_path)
    source = _open_one(root, _chat("<image>", image=name))
    for call in (source.record, lambda i: source.media_bytes(i, 0), lambda i: source.media_reader(i, 0)):
        with pytest.raises(RecordError, match=words) as raised:
            call(0)
        assert raised.value.reason is Reason.BAD_RECORD
    assert [bad.reason for bad in scan_source(source, ESTIMATOR).bad] == ["bad_record"]


def test_links_are_followed_when_that_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "far" / "1.png").write_bytes(b"far")
    root = tmp_path / "root"
    root.mkdir()
    (root / "near.png").write_bytes(b"near")
    (root / "inside.png").symlink_to(root / "near.png")
    (root / "images").symlink_to(tmp_path / "far")
    rows = [_chat("<image>", image=name) for name in ("inside.png", "images/1.png", str(tmp_path / "far" / "1.png"))]
    path = _write(root / "a.jsonl", rows)
    assert JsonlSource(path).media_bytes(0, 0) == b"near"
    follows = JsonlSource(path, follow_links=True)
    assert [follows.media_bytes(i, 0) for i in range(2)] == [b"near", b"far"]
    with pytest.raises(RecordError, match="Give the folder of all media"):
        follows.record(2)
    (root / "zero").symlink_to("/dev/zero")
    endless = JsonlSource(_write(root / "c.jsonl", [_chat("<image>", image="zero")]), follow_links=True)
    with pytest.raises(RecordError, match="a device, pipe or socket"):
        endless.media_bytes(0, 0)
    (root / "loop").symlink_to(root / "loop")
    source = JsonlSource(_write(root / "b.jsonl", [_chat("<image>", image="loop")]))
    with pytest.raises(RecordError):
        source.record(0)


def test_the_root_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "1.png").write_bytes(b"x")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    source = _open_one(tmp_path, _chat("<image>", image="1.png"), media_root=tmp_path / "link")
    assert source.media_bytes(0, 0) == b"x"


@pytest.mark.parametrize("name", ["gone.png", "a.jsonl/x.png", "x" * 300, "\ud800.png"])
def test_a_file_that_is_not_there_is_a_missing_medium(tmp_path: Path, name: str) -> None:
    source = _open_one(tmp_path, _chat("<image>", image=name))
    with pytest.raises(RecordError) as raised:
        source.record(0)
    assert raised.value.reason is Reason.MISSING_MEDIA
    assert "line 1" in str(raised.value)
    assert [bad.reason for bad in scan_source(source, ESTIMATOR).bad] == ["missing_media"]


def test_a_root_that_is_gone_is_failing_storage_and_not_bad_samples(tmp_path: Path) -> None:
    root = tmp_path / "media"
    root.mkdir()
    (root / "1.png").write_bytes(b"x")
    source = _open_one(tmp_path, _chat("<image>", image="1.png"), media_root=root)
    root.rename(tmp_path / "unmounted")
    with pytest.raises(FileNotFoundError):
        source.record(0)
    with pytest.raises(SourceError, match="is no folder"):
        _open_one(tmp_path, _chat("Hello"), media_root=root)


def test_a_medium_that_vanishes_between_scan_and_load_is_missing(tmp_path: Path) -> None:
    (tmp_path / "1.png").write_bytes(b"x")
    source = _open_one(tmp_path, _chat("<image>", image="1.png"))
    source.record(0)
    (tmp_path / "1.png").unlink()
    with pytest.raises(RecordError) as raised:
        source.media_bytes(0, 0)
    assert raised.value.reason is Reason.MISSING_MEDIA


def test_a_medium_above_the_ceiling_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "1.png").open("wb") as file:
        file.truncate(1 << 40)  # sparse
    source = _open_one(tmp_path, _chat("<image>", image="1.png"))
    assert source.record(0).media[0].size_bytes == 1 << 40
    with pytest.raises(MediaError) as raised:
        source.media_bytes(0, 0)
    assert raised.value.reason is Reason.TOO_LARGE
    assert [bad.reason for bad in scan_source(source, ESTIMATOR).bad] == ["too_large"]


def test_media_in_data_uris_are_scanned_without_a_file(tmp_path: Path, image_bytes: Make) -> None:
    picture = image_bytes(56, 56)
    uri = "data:image/png;base64," + base64.b64encode(picture).decode()
    source = _open_one(tmp_path, _chat("<image>", images=[uri]))
    assert source.media_bytes(0, 0) == picture
    assert scan_source(source, ESTIMATOR).items["width_px"].tolist() == [56]
    small = _open_one(tmp_path, _chat("<image>", images=[uri]), media_limits=ProbeLimits(max_bytes=50))
    assert [bad.reason for bad in scan_source(small, ESTIMATOR).bad] == ["too_large"]


def test_schemes_are_a_tuple(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r'Write \("https",\)'):
        _open_one(tmp_path, _chat(), media_schemes="https")


def test_only_one_sample_is_kept_and_none_travels(tmp_path: Path) -> None:
    uri = "data:;base64," + base64.b64encode(b"x" * 100_000).decode()
    source = JsonlSource(_write(tmp_path / "a.jsonl", [_chat("<image>", image=uri)] * 2))
    source.media_bytes(0, 0)
    assert len(pickle.dumps(source)) < 5000


def test_real_files_are_scanned_through_a_list_of_them(shared_dir: Path, tmp_path: Path) -> None:
    media = shared_dir / "media"
    names = sorted(str(path.relative_to(media)) for path in (media / "images").iterdir())[:40]
    source = JsonlSource(
        _write(tmp_path / "a.jsonl", [_chat("<image>", image=name) for name in names]), media_root=media
    )
    index = scan_source(source, ESTIMATOR)
    assert len(index) == len(names)
    assert not any(bad.reason in ("missing_media", "bad_record") for bad in index.bad)


# Remote files


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RangeServer]:
    pytest.importorskip("aiohttp")
    with RangeServer(tmp_path / "served") as running:
        yield running


@pytest.fixture
def storage() -> Iterator[Storage]:
    with Storage(StorageOptions(max_tries=2, backoff_s=0.01)) as opened:
        yield opened


def _serve(server: RangeServer, path: str, data: bytes) -> str:
    """Put a file on the server; its address."""
    (server.folder / path).parent.mkdir(parents=True, exist_ok=True)
    (server.folder / path).write_bytes(data)
    return server.url(path)


def test_files_and_media_at_a_url(server: RangeServer, storage: Storage, image_bytes: Make) -> None:
    picture = image_bytes(56, 28)
    rows = [_chat("<image>", image="img/1.png"), _chat("<image>", image="img/gone.png"), _chat("Hello")]
    address = _serve(server, "d/a.jsonl", b"\n".join(json.dumps(row).encode() for row in rows))
    _serve(server, "d/img/1.png", picture)
    source = JsonlSource(address, storage=storage)
    source.prefetch([0, 2])
    assert _first_text(source, 2) == "Hello"
    assert source.record(0).media[0].size_bytes == len(picture)
    assert source.media_bytes(0, 0) == picture
    assert source.place(1) == f"shard {address}, key line 2"
    assert [bad.reason for bad in scan_source(source, ESTIMATOR).bad] == ["missing_media"]


def test_a_local_file_may_have_its_media_at_a_url(server: RangeServer, storage: Storage, tmp_path: Path) -> None:
    _serve(server, "img/1.png", b"abc")
    rows = [_chat("<image>", image=name) for name in ("1.png", "../1.png", "/img/1.png")]
    path = _write(tmp_path / "a.jsonl", rows)
    source = JsonlSource(path, media_root=server.url("img/"), storage=storage)
    assert source.media_bytes(0, 0) == b"abc"
    for i in (1, 2):
        with pytest.raises(RecordError) as raised:
            source.record(i)
        assert raised.value.reason is Reason.BAD_RECORD


def test_urls_in_records_are_fetched_only_where_that_is_configured(
    server: RangeServer, storage: Storage, tmp_path: Path
) -> None:
    row = _chat("<image>", image=_serve(server, "x.png", b"abc"))
    with pytest.raises(RecordError, match="not allowed"):
        _open_one(tmp_path, row, storage=storage).record(0)
    assert server.counts.requests == 0
    allowed = _open_one(tmp_path, row, storage=storage, media_schemes=("HTTP",))
    assert allowed.media_bytes(0, 0) == b"abc"


def test_a_server_that_fails_is_failing_storage_and_not_bad_samples(
    server: RangeServer, storage: Storage, tmp_path: Path
) -> None:
    row = _chat("<image>", image=_serve(server, "x.png", b"abc"))
    server.behaviour.error_share = 1.0
    source = _open_one(tmp_path, row, storage=storage, media_schemes=("http",))
    with pytest.raises(SourceError):
        scan_source(source, ESTIMATOR)


@pytest.mark.parametrize("name", ["%2e%2e/secret.png", "a/%252E%252e/b.png", "..%2fsecret.png", "a?b.png", "a#b", "/a"])
def test_a_reference_does_not_leave_a_folder_at_an_address_by_escapes(name: str) -> None:
    files = MediaFiles()
    with pytest.raises(RecordError, match="is no path inside"):
        files.size_of("http://127.0.0.1:9/images", name, "line 1")


def _pictures(folder: Path, *sizes: tuple[int, int]) -> Path:
    folder.mkdir(exist_ok=True)
    for number, size in enumerate(sizes):
        Image.effect_noise(size, 50).convert("RGB").save(folder / f"{number}.png")
    return folder


def _two_pictures(tmp_path: Path, root: Path) -> JsonlSource:
    rows = [_chat("<image>", image=f"{number}.png") for number in range(2)]
    return JsonlSource(_write(tmp_path / "a.jsonl", rows), media_root=root)


def test_a_medium_that_was_missing_is_scanned_again_when_it_is_there(tmp_path: Path) -> None:
    root = _pictures(tmp_path / "media", (64, 64))
    source, estimator = _two_pictures(tmp_path, root), Qwen25VLEstimator()
    assert [bad.reason for bad in build_index(source, estimator, tmp_path / "index").bad] == [Reason.MISSING_MEDIA]
    _pictures(root, (64, 64), (96, 96))
    assert not build_index(source, estimator, tmp_path / "index").bad


def test_an_index_is_not_taken_for_another_folder_of_media(tmp_path: Path) -> None:
    estimator = Qwen25VLEstimator()
    small, large = _pictures(tmp_path / "s", (64, 64), (64, 64)), _pictures(tmp_path / "l", (640, 480), (64, 64))
    before = build_index(_two_pictures(tmp_path, small), estimator, tmp_path / "index")
    after = build_index(_two_pictures(tmp_path, large), estimator, tmp_path / "index")
    assert after.samples["patches"].sum() > 2 * before.samples["patches"].sum()
    wrong = build_index(_two_pictures(tmp_path, tmp_path), estimator, tmp_path / "index")
    assert [bad.reason for bad in wrong.bad] == [Reason.MISSING_MEDIA] * 2


def test_a_medium_that_vanished_or_was_cut_since_the_scan_makes_a_stand_in(tmp_path: Path) -> None:
    root = _pictures(tmp_path / "media", (64, 64), (96, 96))
    source, estimator = _two_pictures(tmp_path, root), Qwen25VLEstimator()
    index = build_index(source, estimator, tmp_path / "index")
    (root / "0.png").unlink()
    os.truncate(root / "1.png", 100)
    for i, reason in ((0, "missing_media: "), (1, "truncated: ")):
        loaded = load_sample(source, index, i, estimator)
        assert loaded.replaced is not None
        assert loaded.replaced.startswith(reason)
        assert (loaded.labels == -100).all()
        assert len(loaded.tokens) == index.samples["llm_tokens"][i]
        assert len(loaded.patches) == index.samples["patches"][i]
        assert not loaded.patches.any()
