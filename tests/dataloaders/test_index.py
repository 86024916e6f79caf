"""The cost index as files: mapped without a copy, refused when stale, foreign or damaged, replaced as a whole."""

import gc
import json
import os
import pickle
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dataloaders import index as index_module
from dataloaders.errors import IndexFormatError
from dataloaders.estimators import Qwen25VLEstimator
from dataloaders.index import ITEM_COLUMNS, SAMPLE_COLUMNS, BadSample, CostIndex, IndexKey, write_index
from dataloaders.index_format import TABLES, PartOf
from dataloaders.scan import scan_source
from dataloaders.tar_source import TarSource

KEY = IndexKey(
    rules=1,
    source="s",
    estimator="e",
    tokenizer="t",
    train_on="assistant",
    apply_orientation=True,
    limits="max_bytes=1",
)


def _index(num_items: tuple[int, ...] = (0, 2, 1), **changes: object) -> CostIndex:
    count = sum(num_items)
    samples = {name: np.arange(len(num_items), dtype=dtype) for name, dtype in SAMPLE_COLUMNS.items()}
    samples["num_items"] = np.array(num_items, dtype=np.int32)
    items = {name: np.arange(count, dtype=dtype) for name, dtype in ITEM_COLUMNS.items()}
    keys = pa.array([f"k{i}" for i in range(len(num_items))], pa.string())
    arguments: dict[str, object] = {
        "key": KEY,
        "samples": samples,
        "items": items,
        "names": pa.table({"shard": pa.array(["a.tar"] * len(num_items), pa.string()), "key": keys}),
        "bad": [BadSample(sample_id=2, place="shard a.tar, key k2", reason="corrupt", message="no")],
        "reasons": ["", "corrupt"],
    }
    return CostIndex(**{**arguments, **changes})  # type: ignore[arg-type]


def _equal(one: CostIndex, other: CostIndex) -> bool:
    tables = ((one.samples, other.samples, SAMPLE_COLUMNS), (one.items, other.items, ITEM_COLUMNS))
    assert one.names.to_pydict() == other.names.to_pydict()
    return (one.key, one.bad, one.reasons, one.fingerprint) == (
        other.key,
        other.bad,
        other.reasons,
        other.fingerprint,
    ) and all(
        np.array_equal(left[name], right[name]) and left[name].dtype == right[name].dtype == np.dtype(dtype)
        for left, right, columns in tables
        for name, dtype in columns.items()
    )


def test_what_is_written_is_read(tmp_path: Path) -> None:
    index = _index()
    opened = write_index(tmp_path / "deep" / "index", index)
    assert _equal(index, opened)
    assert [opened.keys(i) for i in range(3)] == ["k0", "k1", "k2"]
    assert opened.shard(1) == "a.tar"
    assert opened.folder == tmp_path / "deep" / "index"
    assert os.listdir(tmp_path / "deep") == ["index"]


def test_offsets_are_the_running_sum_of_items() -> None:
    index = _index((0, 2, 1))
    assert index.item_offsets.tolist() == [0, 0, 2, 3]
    assert index.item_offsets.dtype == np.int64
    assert [list(index.item_rows(i)) for i in range(3)] == [[], [0, 1], [2]]


@pytest.mark.parametrize("num_items", [(), (0,), (0, 0)])
def test_an_index_without_media_or_samples_is_legal(tmp_path: Path, num_items: tuple[int, ...]) -> None:
    index = _index(num_items, bad=[])
    opened = write_index(tmp_path / "index", index)
    assert _equal(index, opened)
    assert len(opened) == len(num_items)
    assert len(opened.item_offsets) == len(num_items) + 1


def test_columns_are_views_of_the_mapped_file_and_read_only(tmp_path: Path) -> None:
    opened = write_index(tmp_path / "index", _index())
    for column in [*opened.samples.values(), *opened.items.values()]:
        assert column.base is not None
        assert not column.flags.owndata
        with pytest.raises(ValueError, match="read-only"):
            column[0] = 7
    mapped = (tmp_path / "index" / "samples.arrow").resolve()
    assert str(mapped) in Path("/proc/self/maps").read_text()


def _columns_of(path: Path) -> dict[str, list[object]]:
    with pa.OSFile(str(path)) as file:
        return pa.ipc.open_file(file).read_all().to_pydict()


def test_the_tables_are_plain_arrow_files(tmp_path: Path) -> None:
    index = write_index(tmp_path / "index", _index())
    meta = json.loads((tmp_path / "index" / "meta.json").read_text())
    assert (meta["format_version"], meta["num_samples"], meta["num_items"]) == (3, 3, 3)
    for name, columns in (("samples", index.samples), ("items", index.items)):
        stored = _columns_of(tmp_path / "index" / f"{name}.arrow")
        assert stored.keys().isdisjoint(meta[name]["implied"])
        assert stored.keys() | meta[name]["implied"].keys() | {"text_tokens", "fps", "duration_s", "source_frames"} >= (
            columns.keys()
        )
        assert all(values == columns[column].tolist() for column, values in stored.items())


def test_what_is_the_same_throughout_or_twice_is_stored_once(tmp_path: Path) -> None:
    items = {name: np.zeros(3, dtype=dtype) for name, dtype in ITEM_COLUMNS.items()}
    items["patches"] = np.array([4, 8, 4], dtype=np.int32)
    items["full_total"] = items["patches"].copy()
    items["full_total_sq"] = items["patches"].astype(np.int64)  # equal numbers of another width are another column
    index = _index(items=items)
    opened = write_index(tmp_path / "index", index)
    assert _equal(index, opened)
    assert list(_columns_of(tmp_path / "index" / "items.arrow")) == ["patches", "full_total_sq"]
    assert opened.items["full_total"].tolist() == [4, 8, 4]


def test_what_only_videos_have_is_stored_for_videos_alone(tmp_path: Path) -> None:
    items = {name: np.ones(3, dtype=dtype) for name, dtype in ITEM_COLUMNS.items()}
    items["fps"], items["duration_s"] = np.array([0.0, 29.97, 0.0]), np.array([0.0, 1 / 3, 0.0])
    items["source_frames"] = np.array([1, 10, 1], dtype=np.int32)
    index = _index(items=items)
    opened = write_index(tmp_path / "index", index)
    assert _equal(index, opened)
    assert _columns_of(tmp_path / "index" / "videos.arrow") == {
        "row": [1],
        "source_frames": [10],
        "fps": [29.97],
        "duration_s": [1 / 3],
    }
    assert [opened.source_of(row) for row in range(3)] == [(1, 0.0, 0.0), (10, 29.97, 1 / 3), (1, 0.0, 0.0)]
    assert [index.source_of(row) for row in range(3)] == [opened.source_of(row) for row in range(3)]


def test_a_number_that_does_not_fit_its_column_is_refused_and_never_wraps() -> None:
    wide = {**_index().samples, "patches": np.array([1, 2, 2**31], dtype=np.int64)}
    with pytest.raises(ValueError, match="a column of int64 where int32 is expected"):
        _ = _index(samples=wide).samples["patches"]


def test_opening_reads_no_list_of_samples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_index(tmp_path / "index", _index())

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("rows were read")

    monkeypatch.setattr(index_module, "BadSample", refuse)
    opened = CostIndex.open(tmp_path / "index")
    assert len(opened) == 3
    with pytest.raises(AssertionError, match="rows were read"):
        _ = opened.bad


def test_rows_of_an_index_are_an_index() -> None:
    index = _index((0, 2, 1))
    part = index.rows(1, 3)
    assert part.item_offsets.tolist() == [0, 2, 3]
    assert part.items["patches"].tolist() == index.items["patches"].tolist()
    assert [(bad.sample_id, bad.place) for bad in part.bad] == [(1, index.bad[0].place)]
    assert [part.keys(i) for i in range(2)] == ["k1", "k2"]
    assert index.rows(0, 2).bad == []
    assert len(index.rows(1, 1)) == 0


def test_the_mapping_survives_the_replacement_of_the_folder(tmp_path: Path) -> None:
    opened = write_index(tmp_path / "index", _index())
    before = opened.items["patches"].tolist()
    write_index(tmp_path / "index", _index((5,), bad=[]))
    assert opened.items["patches"].tolist() == before
    assert len(CostIndex.open(tmp_path / "index")) == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("source", "other"),
        ("estimator", "other"),
        ("tokenizer", "other"),
        ("train_on", "all"),
        ("apply_orientation", False),
        ("limits", "other"),
        ("unfit", "clamp"),
    ],
)
def test_an_index_made_from_something_else_is_refused(tmp_path: Path, field: str, value: object) -> None:
    write_index(tmp_path / "index", _index())
    expect = replace(KEY, **{field: value})  # type: ignore[arg-type]
    with pytest.raises(IndexFormatError, match=rf"made from something else: {field} is .*, expected {value}.*again"):
        CostIndex.open(tmp_path / "index", expect=expect)
    assert len(CostIndex.open(tmp_path / "index")) == 3


def test_another_format_version_is_refused(tmp_path: Path) -> None:
    write_index(tmp_path / "index", _index())
    path = tmp_path / "index" / "meta.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format_version": 1}))
    with pytest.raises(IndexFormatError, match=r"format version 1, but this release reads 3 at .*Delete the folder"):
        CostIndex.open(tmp_path / "index")


@pytest.mark.parametrize("name", ["samples.arrow", "items.arrow", "videos.arrow", "names.arrow", "bad.arrow"])
@pytest.mark.parametrize("how", ["cut", "emptied", "scrambled", "gone"])
def test_damaged_tables_are_refused(tmp_path: Path, name: str, how: str) -> None:
    write_index(tmp_path / "index", _index())
    path = tmp_path / "index" / name
    content = path.read_bytes()
    damaged = {"cut": content[: len(content) // 2], "emptied": b"", "scrambled": b"\0" * len(content)}
    path.unlink() if how == "gone" else path.write_bytes(damaged[how])
    with pytest.raises(IndexFormatError, match=r"at .*index. Delete the folder; it is built again"):
        CostIndex.open(tmp_path / "index")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=150, deadline=None)
@given(st.sampled_from(["meta.json", *TABLES]), st.integers(0, 10**6), st.binary(min_size=1, max_size=9))
def test_damage_anywhere_is_refused_or_harmless(tmp_path: Path, name: str, at: int, junk: bytes) -> None:
    write_index(tmp_path / "index", _index())
    path = tmp_path / "index" / name
    content = bytearray(path.read_bytes())
    at %= len(content)
    path.write_bytes(content[:at] + junk[: len(content) - at] + content[at + len(junk) :])
    try:
        opened = CostIndex.open(tmp_path / "index")
        rows = [opened.keys(0), opened.shard(2), opened.source_of(1), opened.bad, opened.shards]
        rows += [column.tolist() for table in (opened.samples, opened.items) for column in table.values()]
        assert opened.item_offsets[-1] == 3
    except IndexFormatError:
        return
    assert len(rows) > 10


def test_a_table_of_another_index_is_refused_even_if_it_fits(tmp_path: Path) -> None:
    write_index(tmp_path / "one", _index((0, 2, 1)))
    write_index(tmp_path / "two", _index((1, 1, 1, 0), bad=[]))
    shutil.copy(tmp_path / "two" / "samples.arrow", tmp_path / "one" / "samples.arrow")
    with pytest.raises(
        IndexFormatError, match=r"^damaged: samples.arrow has \d+ bytes, but meta.json says \d+ at .*one"
    ):
        CostIndex.open(tmp_path / "one")
    (tmp_path / "one" / "bad.arrow").unlink()
    with pytest.raises(IndexFormatError, match=r"says \d+; bad.arrow is missing at"):
        CostIndex.open(tmp_path / "one")


def test_what_is_no_index_is_named_as_what_it_is(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for name, message in (("", "no meta.json in it"), ("file", "a file, not a folder"), ("gone", "no such folder")):
        with pytest.raises(IndexFormatError, match=rf"not a cost index: {message} at "):
            CostIndex.open(tmp_path / name)


def test_the_home_folder_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    written = write_index("~/ix", _index())
    assert written.folder == tmp_path / "ix"
    assert len(CostIndex.open("~/ix")) == 3
    assert os.listdir(tmp_path) == ["ix"]


def test_a_place_that_cannot_be_written_is_an_error_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(IndexFormatError, match=r"nothing can be written here: .* at .*file/ix. Choose another folder"):
        write_index(tmp_path / "file" / "ix", _index())


def test_an_index_is_short_to_look_at(tmp_path: Path) -> None:
    assert repr(_index()) == "CostIndex(3 samples, 3 media, in memory)"
    part = PartOf(number=1, count=2, num_shards=4, shards="x")
    opened = write_index(tmp_path / "ix", _index(part=part))
    assert repr(opened) == f"CostIndex(3 samples, 3 media, part 1/2, {tmp_path / 'ix'})"


def test_a_column_that_is_none_is_an_error_that_names_the_columns() -> None:
    with pytest.raises(KeyError, match=r"no column 'llm_token'; there are text_tokens, label_tokens, llm_tokens, "):
        _index().samples["llm_token"]
    assert _index().items.get("nothing") is None


def test_another_rule_is_told_in_words_beside_its_fingerprint(tmp_path: Path) -> None:
    write_index(tmp_path / "ix", _index(rules={"media": "Qwen9-VL", "text": "bytes"}))
    with pytest.raises(IndexFormatError, match=r"estimator is e, expected f \(media counted by 'Qwen9-VL'\) at "):
        CostIndex.open(tmp_path / "ix", expect=replace(KEY, estimator="f"))


@pytest.mark.parametrize("content", [None, "", "{}", "[]", "{not json", '{"format_version": 3}'])
def test_a_folder_that_is_no_index_is_refused(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "meta.json").write_text(content)
    with pytest.raises(IndexFormatError, match=r"not a cost index|damaged"):
        CostIndex.open(tmp_path)


def test_items_that_do_not_add_up_are_refused() -> None:
    items = {name: np.zeros(2, dtype=dtype) for name, dtype in ITEM_COLUMNS.items()}
    with pytest.raises(IndexFormatError, match="the samples name 3 items, but there are 2"):
        _index(items=items)


def test_a_folder_with_something_else_is_never_overwritten(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    (tmp_path / "file").write_text("x")
    for name in ("mine", "file"):
        with pytest.raises(IndexFormatError, match="holds something else and is not overwritten"):
            write_index(tmp_path / name, _index())
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"


def test_a_failed_write_leaves_the_old_index_and_no_rest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = write_index(tmp_path / "index", _index())

    def fail(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pa.ipc, "new_file", fail)
    with pytest.raises(OSError, match="No space left"):
        write_index(tmp_path / "index", _index((7,), bad=[]))
    assert _equal(old, CostIndex.open(tmp_path / "index"))
    assert os.listdir(tmp_path) == ["index"]


def test_the_fingerprint_follows_the_content(tmp_path: Path) -> None:
    reference = _index().fingerprint
    assert _index().fingerprint == reference == write_index(tmp_path / "i", _index()).fingerprint
    changed = {name: column.copy() for name, column in _index().samples.items()}
    changed["label_tokens"][1] += 1
    others = [
        _index(samples=changed),
        _index(key=replace(KEY, source="other")),
        _index(bad=[]),
        _index((1, 1, 1)),
    ]
    assert len({reference, *(other.fingerprint for other in others)}) == 5


def test_a_mapped_index_travels_as_its_folder_and_is_checked(tmp_path: Path) -> None:
    opened = write_index(tmp_path / "index", _index())
    message = pickle.dumps(opened)
    assert len(message) < 1000
    assert _equal(pickle.loads(message), opened)
    write_index(tmp_path / "index", _index((4,), bad=[]))
    with pytest.raises(IndexFormatError, match="the index was replaced while a run was using it"):
        pickle.loads(message)
    shutil.rmtree(tmp_path / "index")
    with pytest.raises(IndexFormatError, match="not a cost index"):
        pickle.loads(message)


def test_an_index_in_memory_travels_by_value() -> None:
    index = _index()
    assert _equal(pickle.loads(pickle.dumps(index)), index)


def test_a_scanned_index_survives_the_way_through_files(tmp_path: Path, small_shard: Path) -> None:
    index = scan_source(TarSource(str(small_shard)), Qwen25VLEstimator())
    assert _equal(index, write_index(tmp_path / "index", index))


@pytest.mark.parametrize("others", [[], ["__0_0.distcp"], ["samples.arrow", "thesis.txt"]])
def test_a_meta_json_of_somebody_else_protects_its_folder(tmp_path: Path, others: list[str]) -> None:
    (tmp_path / "mine").mkdir()
    for name in ("meta.json", *others):
        (tmp_path / "mine" / name).write_text('{"step": 100}')
    with pytest.raises(IndexFormatError, match="holds something else and is not overwritten"):
        write_index(tmp_path / "mine", _index())
    assert sorted(os.listdir(tmp_path / "mine")) == sorted(["meta.json", *others])


@pytest.mark.parametrize("there", [True, False])
def test_an_index_behind_a_link_is_written_behind_it(tmp_path: Path, there: bool) -> None:
    if there:
        (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk")
    for _ in range(2):
        write_index(tmp_path / "link", _index())
    assert (tmp_path / "link").is_symlink()
    assert _equal(CostIndex.open(tmp_path / "disk"), _index())


@pytest.mark.parametrize("name", ["a\0b", "\udcff"])
def test_a_folder_that_cannot_be_named_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(IndexFormatError, match="the path is not UTF-8 text"):
        write_index(f"{tmp_path}/{name}", _index())


def test_a_mounted_folder_is_refused_before_anything_is_written() -> None:
    with pytest.raises(IndexFormatError, match=r"a file system is mounted here at /. Name a folder inside it"):
        write_index("/", _index())


def _edited(folder: Path, path: tuple[str, ...], value: object) -> Path:
    write_index(folder, _index((1,), bad=[]))
    meta = json.loads((folder / "meta.json").read_text())
    node = meta
    for name in path[:-1]:
        node = node[name]
    node[path[-1]] = value
    (folder / "meta.json").write_text(json.dumps(meta))
    return folder


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("key", "rules"), "1"),
        (("key", "train_on"), {}),
        (("rules",), {"media": {"a": 1}}),
        (("rules",), []),
        (("reasons",), [1]),
        (("part",), {"number": None, "count": 2, "num_shards": 1, "shards": "x"}),
        (("part",), {"number": 2, "count": 2, "num_shards": 1, "shards": "x"}),
        (("samples", "rows"), 10**12),
        (("items", "rows"), 10**12),
    ],
)
def test_values_of_other_types_and_claimed_sizes_are_damage(
    tmp_path: Path, path: tuple[str, ...], value: object
) -> None:
    with pytest.raises(IndexFormatError, match=r"(damaged|name 1 items).*Delete the folder"):
        CostIndex.open(_edited(tmp_path / "index", path, value))


def test_a_process_that_opens_thousands_of_indices_does_not_run_out_of_maps(tmp_path: Path) -> None:
    write_index(tmp_path / "index", _index())
    opened = [CostIndex.open(tmp_path / "index", map_small=False) for _ in range(20)]
    gc.collect()  # the index that was written is mapped, and part of a cycle
    assert f"{tmp_path}/index" not in Path("/proc/self/maps").read_text()
    assert all(_equal(index, _index()) for index in opened)
