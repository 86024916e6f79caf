"""Parquet: row groups read lazily within bounds, and columns in the forms that people write."""

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from balancer.shuffle import EpochOrder
from dataloaders.errors import Reason, RecordError, SourceError
from dataloaders.parquet_source import ParquetSource
from dataloaders.rows import RowFields
from dataloaders.source import groups as read_together

Make = Callable[..., bytes]


def _write(path: Path, columns: dict[str, Any], **options: Any) -> Path:
    pq.write_table(pa.table(columns), path, **options)
    return path


def _captions(num: int, *, image_size: int = 8) -> dict[str, Any]:
    return {"image": [bytes([i % 256]) * image_size for i in range(num)], "text": [f"number {i}" for i in range(num)]}


def test_every_row_of_every_group_is_found_in_any_order(tmp_path: Path) -> None:
    _write(tmp_path / "0.parquet", _captions(10), row_group_size=4)
    _write(tmp_path / "1.parquet", _captions(7), row_group_size=3)
    source = ParquetSource(str(tmp_path / "{0..1}.parquet"))
    assert len(source) == 17
    for i in np.random.Generator(np.random.Philox(1)).permutation(17).tolist():
        assert source.record(i).turns[1].parts[0].text == f"number {i if i < 10 else i - 10}"  # type: ignore[union-attr]
        assert source.media_bytes(i, 0) == bytes([i if i < 10 else i - 10]) * 8
    assert source.place(0) == f"shard {tmp_path}/0.parquet, key row 0"
    assert source.place(10) == f"shard {tmp_path}/1.parquet, key row 0"
    assert source.place(16) == f"shard {tmp_path}/1.parquet, key row 6"


def test_groups_are_row_groups_counted_over_all_files(tmp_path: Path) -> None:
    _write(tmp_path / "0.parquet", _captions(5), row_group_size=2)
    _write(tmp_path / "1.parquet", _captions(2))
    groups = ParquetSource(str(tmp_path / "*.parquet")).groups
    assert (groups.dtype, groups.tolist()) == (np.dtype(np.int64), [0, 0, 1, 1, 2, 3, 3])


def _media_columns(form: str) -> tuple[pa.Array, list[list[bytes]]]:
    media = [[b"a"], [b"b"], [b"c"]]
    medium = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    structs = [{"bytes": one, "path": "no/matter"} for (one,) in media]
    if form == "binary":
        return pa.array([one for (one,) in media], pa.binary()), media
    if form == "large_binary":
        return pa.array([one for (one,) in media], pa.large_binary()), media
    if form == "struct":
        return pa.array(structs, medium), media
    if form == "list of binary":
        return pa.array([*media[:2], [b"c", b"d"]], pa.list_(pa.binary())), [*media[:2], [b"c", b"d"]]
    return pa.array([[one] for one in structs], pa.list_(medium)), media


@pytest.mark.parametrize("form", ["binary", "large_binary", "struct", "list of binary", "list of struct"])
def test_media_columns(tmp_path: Path, form: str) -> None:
    column, media = _media_columns(form)
    messages = [[{"role": "user", "content": "<image>" * len(of_row)}] for of_row in media]
    source = ParquetSource(_write(tmp_path / "a.parquet", {"images": column, "messages": messages}))
    for i, of_row in enumerate(media):
        assert [source.media_bytes(i, j) for j in range(len(of_row))] == of_row


def test_messages_may_be_nested_parts_or_json(tmp_path: Path) -> None:
    parts = [{"type": "image", "text": None}, {"type": "text", "text": "What?"}]
    turns = [{"role": "user", "content": parts}]
    nested = ParquetSource(_write(tmp_path / "a.parquet", {"image": [b"x"], "messages": [turns]}))
    as_json = ParquetSource(_write(tmp_path / "b.parquet", {"image": [b"x"], "messages": [json.dumps(turns)]}))
    assert nested.record(0).turns == as_json.record(0).turns
    assert nested.media_bytes(0, 0) == b"x"


def test_paths_in_columns_are_references_inside_the_root(tmp_path: Path) -> None:
    (tmp_path / "1.png").write_bytes(b"file")
    column = pa.array([{"bytes": None, "path": name} for name in ("1.png", "gone.png", "../1.png")])
    source = ParquetSource(_write(tmp_path / "a.parquet", {"image": column, "text": ["a", "b", "c"]}))
    assert source.media_bytes(0, 0) == b"file"
    reasons = []
    for i in (1, 2):
        with pytest.raises(RecordError) as raised:
            source.record(i)
        reasons.append(raised.value.reason)
    assert reasons == [Reason.MISSING_MEDIA, Reason.BAD_RECORD]


def test_only_columns_that_are_needed_are_read(tmp_path: Path) -> None:
    columns = {**_captions(2), "facts": [["a"], ["b"]], "embedding": [[0.0] * 1000] * 2}
    path = _write(tmp_path / "a.parquet", columns)
    assert sorted(ParquetSource(path).row(0)) == ["image", "text"]
    source = ParquetSource(path, columns=["facts"])
    assert source.record(1).extra == {"facts": ["b"]}
    assert source.fingerprint != ParquetSource(path).fingerprint


def test_a_few_groups_are_kept_within_the_bound(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.parquet", _captions(40, image_size=10_000), row_group_size=4)
    source = ParquetSource(path, cache_bytes=100_000)
    for i in range(40):
        source.record(i)
    assert len(source._kept) == 2
    assert sum(group.num_bytes for group in source._kept.values()) <= 100_000
    before = list(source._kept.values())
    source.record(35)
    assert {id(group) for group in source._kept.values()} == {id(group) for group in before}
    small = ParquetSource(path, cache_bytes=1)
    assert small.record(39).turns == source.record(39).turns
    assert len(small._kept) == 1
    assert len(pickle.dumps(source)) < 10_000


def test_a_row_group_that_is_too_large_is_refused_when_the_source_is_opened(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.parquet", _captions(100, image_size=1000), row_group_size=50)
    with pytest.raises(SourceError, match=r"row group 0 decodes to 5\d+ bytes or more.*row_group_size=256"):
        ParquetSource(path, max_group_bytes=20_000)
    assert len(ParquetSource(path, max_group_bytes=100_000)) == 100


def test_a_group_that_becomes_more_than_its_footer_says_is_stopped(tmp_path: Path) -> None:
    # One value in a dictionary page stands for ten thousand: the footer counts it once.
    columns = {"text": ["x" * 10_000] * 10_000}
    path = _write(tmp_path / "a.parquet", columns, row_group_size=10_000)
    assert path.stat().st_size < 100_000
    with pytest.raises(SourceError, match=r"row group 0 decodes to .* above max_group_bytes=1000000"):
        ParquetSource(path, max_group_bytes=1_000_000).record(0)


def test_no_batch_of_rows_can_become_much_more_than_the_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = _write(tmp_path / "a.parquet", {"text": ["x" * 10_000] * 3000}, row_group_size=3000)
    asked: list[int] = []
    iter_batches = pq.ParquetFile.iter_batches

    def watched(file: Any, rows: int, **options: Any) -> Any:
        asked.append(rows)
        return iter_batches(file, rows, **options)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", watched)
    with pytest.raises(SourceError, match="above max_group_bytes"):
        ParquetSource(path, max_group_bytes=1_000_000)
    assert asked == [pytest.approx(99, abs=2)]  # of values of up to 10 kB, the size of the dictionary


def test_columns_that_are_named_and_absent_are_an_error_that_lists_those_there(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.parquet", _captions(2))
    with pytest.raises(SourceError, match=r"there is no column 'images'; there are 'image', 'text'"):
        ParquetSource(path, fields=RowFields(images="images"))
    with pytest.raises(SourceError, match=r"there is no column 'facts'"):
        ParquetSource(path, columns=["facts"])
    with pytest.raises(SourceError, match=r"no column holds conversations or captions; there are 'a'"):
        ParquetSource(_write(tmp_path / "b.parquet", {"a": [1]}))
    bare = {"img": [b"x"], "messages": [[{"role": "user", "content": "<image>"}]]}
    with pytest.raises(SourceError, match="1 of 1 records have placeholders for media, but none has media"):
        ParquetSource(_write(tmp_path / "d.parquet", bare))
    twice = pa.table([pa.array(["a"]), pa.array(["b"])], names=["text", "text"])
    pq.write_table(twice, tmp_path / "c.parquet")
    with pytest.raises(SourceError, match="the column 'text' is there twice"):
        ParquetSource(tmp_path / "c.parquet")


@pytest.mark.parametrize("content", [b"", b"PAR1", b"x" * 100, b"PAR1" + b"x" * 50 + b"\xff\xff\xff\x7fPAR1"])
def test_files_that_are_no_parquet_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.parquet").write_bytes(content)
    with pytest.raises(SourceError, match="no Parquet, or is cut off"):
        ParquetSource(tmp_path / "a.parquet")


def test_damaged_files_are_source_errors_and_never_crash(tmp_path: Path) -> None:
    whole = _write(tmp_path / "whole.parquet", _captions(20, image_size=200), row_group_size=5).read_bytes()
    rng = np.random.Generator(np.random.Philox(3))
    found = 0
    for number in range(60):
        data = bytearray(whole)
        for at in rng.integers(4, len(data) - 4, size=8).tolist():
            data[at] ^= 1 << int(rng.integers(8))
        path = tmp_path / f"{number}.parquet"
        path.write_bytes(data)
        try:
            source = ParquetSource(path)
            for i in range(len(source)):
                source.row(i)
        except SourceError as error:
            found += str(path) in str(error)
    assert found > 10


def test_a_file_that_changes_after_opening_is_an_error(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.parquet", _captions(8), row_group_size=4)
    source = pickle.loads(pickle.dumps(ParquetSource(path)))
    _write(path, _captions(9), row_group_size=4)
    with pytest.raises(SourceError, match="has changed"):
        source.record(7)


def test_files_without_rows_are_an_error(tmp_path: Path) -> None:
    path = _write(tmp_path / "a.parquet", {"text": pa.array([], pa.string())})
    with pytest.raises(SourceError, match="hold no row"):
        ParquetSource(path)


def test_block_shuffle_of_one_file_decodes_each_row_group_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without `groups` the file is one shard: its blocks are a full shuffle, which decodes a group per sample."""
    _write(tmp_path / "a.parquet", _captions(96), row_group_size=8)
    decoded: list[int] = []
    decode = ParquetSource._decode
    monkeypatch.setattr(ParquetSource, "_decode", lambda self, group: (decoded.append(group), decode(self, group))[1])

    def decodes(groups: np.ndarray | None) -> int:
        source = ParquetSource(str(tmp_path / "a.parquet"))
        plain = np.zeros(96, dtype=np.int64)
        order = EpochOrder(
            np.arange(96), seed=3, shuffle="block", groups=plain if groups is None else groups, block_shards=2
        )
        num_bytes = source._group(0).num_bytes
        source = ParquetSource(str(tmp_path / "a.parquet"), cache_bytes=5 * num_bytes // 2)  # the groups of a block
        decoded.clear()
        ids = order.take(0, np.arange(96)).tolist()
        assert sorted(ids) == list(range(96))
        assert ids != list(range(96))
        for i in ids:
            source.row(i)
        return len(decoded)

    source = ParquetSource(str(tmp_path / "a.parquet"))
    whole_file = SimpleNamespace(shard_numbers=np.zeros(96, dtype=np.int32))
    assert decodes(read_together(source, whole_file)) == 12
    assert decodes(None) > 60
