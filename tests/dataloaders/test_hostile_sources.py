"""What a hostile data author or a clumsy user may do to sources: it never hangs, fills memory, or reads silently wrong.

Each test stands for a kind of fault that was found by trying to break the sources.
"""

import gzip
import io
import json
import os
import pickle
import random
import sqlite3
import subprocess
import sys
import tarfile
import textwrap
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataloaders import rows, tar_stream
from dataloaders.byte_stream import ForwardReader, StreamLimits, open_stored
from dataloaders.errors import DataError, Reason, RecordError, SourceError
from dataloaders.jsonl_source import JsonlSource
from dataloaders.member_table import MemberTable
from dataloaders.mixture_spec import parse_mixture
from dataloaders.parquet_source import ParquetSource
from dataloaders.raw_sample import RawSample
from dataloaders.record import Record
from dataloaders.storage import FileState, Storage, StorageOptions
from dataloaders.storage.range_cache import RangeCache
from dataloaders.tar_source import TarSource
from dataloaders.tar_stream import TarStream

CHAT = json.dumps({"messages": [{"role": "user", "content": "hi"}]}).encode()
STAMPED = FileState(url="https://host/a", size=1000, stamp="1")


def write_tar(path: Path, members: list[tuple[str, bytes]]) -> Path:
    with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def in_child(code: str, *arguments: object, timeout_s: float = 60, memory_gib: int = 3) -> str:
    """What a script prints that runs with a bound on its time and memory."""
    head = f"import resource, sys; resource.setrlimit(resource.RLIMIT_AS, ({memory_gib} << 30, {memory_gib} << 30))\n"
    done = subprocess.run(
        [sys.executable, "-c", head + textwrap.dedent(code), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


OPEN_TAR = """
    from dataloaders.errors import SourceError
    from dataloaders.tar_source import TarSource
    from dataloaders.tar_stream import TarStream
    for read in (TarSource, lambda path: list(TarStream(path).read(0, 0))):
        try:
            print(read(sys.argv[1]))
        except SourceError as error:
            print(error.cause)
"""


def test_a_pax_header_whose_second_record_has_no_blank_is_an_error_and_no_endless_loop(tmp_path: Path) -> None:
    records = b"12 path=a.b\n" + b"X" * 40
    info = tarfile.TarInfo("pax")
    info.type, info.size = b"x", len(records)
    body = info.tobuf(tarfile.USTAR_FORMAT) + records.ljust(512, b"\0")
    (tmp_path / "a.tar").write_bytes(body + write_tar(tmp_path / "b.tar", [("1.json", CHAT)]).read_bytes())
    assert in_child(OPEN_TAR, tmp_path / "a.tar").splitlines() == ["a pax header does not parse"] * 2


class CountedDict(dict[int, bytes]):
    """Counts how many entries are gone through."""

    looked_at = 0

    def values(self) -> object:  # type: ignore[override]
        CountedDict.looked_at += len(self)
        return super().values()


def test_what_a_stream_does_for_a_sample_grows_with_its_members_and_not_with_their_square(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = ForwardReader(iter([bytes(512) * 3000]), place="")
    passing = tar_stream._PassingMembers(reader, StreamLimits(), place="", skip=0)
    passing._kept = CountedDict()
    monkeypatch.setattr(CountedDict, "looked_at", 0)
    for number in range(1000):
        passing._pass(tar_stream.TarMember(f"k.{number}.jpg", 512 * number, 1))
    assert len(passing._kept) == passing._kept_bytes == 1000
    assert CountedDict.looked_at == 0
    passing._key_start = 512 * 1000
    passing.drop()
    assert not passing._kept
    assert not passing._kept_bytes


def test_a_file_of_many_empty_gzip_streams_is_not_copied_for_each_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataloaders import byte_stream

    fed: list[int] = []
    feed = byte_stream._Gzip.decompress
    monkeypatch.setattr(
        byte_stream._Gzip, "decompress", lambda self, data, most: fed.append(len(data)) or feed(self, data, most)
    )
    path, empty = tmp_path / "a.tar.gz", gzip.compress(b"")
    path.write_bytes(empty * 5000)
    storage = Storage()
    reader = open_stored(storage, *storage.states([str(path)]), limits=StreamLimits(), place="")
    assert reader.read_up_to(0, 10) == b""
    assert len(fed) >= 5000
    assert max(fed) <= 16 * 1024 + len(empty)


def test_a_stream_names_no_password_and_knows_a_shard_again_under_another_signature(tmp_path: Path) -> None:
    import fsspec

    data = write_tar(tmp_path / "a.tar", [("1.json", CHAT)]).read_bytes()
    streams = []
    for signature in ("one", "two"):
        url = f"memory://user:secret@bucket/a.tar?sig={signature}"
        storage = Storage(StorageOptions(schemes=("memory",)))
        fsspec.filesystem("memory").pipe(storage._here()._transport(url)._path(url), data)  # type: ignore[attr-defined]
        streams.append(TarStream(url, storage=storage))
    ((_, sample),) = streams[0].read(0, 0)
    assert isinstance(sample, RawSample)
    assert "secret" not in sample.record.place
    assert "one" not in sample.record.place
    assert streams[0].fingerprint == streams[1].fingerprint


@pytest.mark.parametrize("seed", range(4))
def test_a_table_of_members_with_damaged_bytes_is_made_again(tmp_path: Path, seed: int) -> None:
    members = [
        (f"{n:02d}.{end}", CHAT if end == "json" else bytes([n]) * 99) for n in range(8) for end in ("json", "txt")
    ]
    shard, folder = str(write_tar(tmp_path / "a.tar", members)), tmp_path / "tables"
    table = TarSource(shard, members=folder).table
    truth = [(table.key(i), [(table.offset(row), table.size(row)) for row in table.rows(i)]) for i in range(len(table))]
    path, rng = next(folder.iterdir()), random.Random(seed)
    whole = path.read_bytes()
    for _ in range(60):
        damaged = bytearray(whole)
        at = rng.randrange(len(whole))
        damaged[at] ^= 1 << rng.randrange(8)
        path.write_bytes(damaged)
        found = TarSource(shard, members=folder).table
        assert [
            (found.key(i), [(found.offset(row), found.size(row)) for row in found.rows(i)]) for i in range(len(found))
        ] == truth, at


def test_a_table_of_members_is_believed_as_it_was_written(tmp_path: Path) -> None:
    shard = str(write_tar(tmp_path / "a.tar", [("1.json", CHAT)]))
    TarSource(shard, members=tmp_path / "tables")
    (path,) = (tmp_path / "tables").iterdir()
    assert len(MemberTable.open(path)) == 1


@pytest.mark.parametrize(
    "damage", [lambda text: text.replace("0008.json", "0007.json"), lambda text: text.replace("0007.json", "0x07.json")]
)
def test_a_text_index_with_a_damaged_name_costs_neither_samples_nor_the_run(
    tmp_path: Path, damage: Callable[[str], str]
) -> None:
    pairs = [[(f"{n:04d}.jpg", b"x"), (f"{n:04d}.json", CHAT)] for n in range(40)]
    shard = write_tar(tmp_path / "a.tar", [member for pair in pairs for member in pair])
    with tarfile.open(shard) as tar:
        infos = list(tar)
    lines = [
        " ".join(f"{i.name[5:]} {i.offset_data} {i.size} {i.name}" for i in infos[k : k + 2])
        for k in range(0, len(infos), 2)
    ]
    shard.with_suffix(".idx").write_text(damage("\n".join([f"v1.2 {len(lines)}", *lines, ""])))
    source = TarSource(str(shard))
    assert [source.table.key(i) for i in range(len(source))] == [f"{n:04d}" for n in range(40)]
    assert "its headers were read instead" in " ".join(source.report.lines())


def test_a_database_that_computes_long_keys_is_not_believed_before_memory_is_full(tmp_path: Path) -> None:
    shard = write_tar(tmp_path / "a.tar", [("1.json", CHAT), ("2.bin", bytes(40_000_000))])
    (tmp_path / ".nv-meta").mkdir()
    (tmp_path / ".nv-meta" / ".info.json").write_text(json.dumps({"shard_counts": {"a.tar": 1}}))
    with sqlite3.connect(tmp_path / ".nv-meta" / "index.sqlite") as database:
        database.execute(
            "CREATE TABLE samples (tar_file_id, sample_index, sample_key AS (hex(zeroblob(30000)) || sample_index))"
        )
        database.execute(
            "CREATE TABLE sample_parts (tar_file_id, sample_index, part_name, content_byte_offset, content_byte_size)"
        )
        database.executemany("INSERT INTO samples VALUES (0, ?)", [(n,) for n in range(70_000)])
    database.close()
    found = in_child(
        """
        from dataloaders.tar_source import TarSource
        source = TarSource(sys.argv[1])
        print(len(source), *source.report.lines())
        """,
        shard,
        memory_gib=2,
    )
    assert found.startswith("2 ")
    assert "longer than the shard" in found


def test_a_list_of_one_large_dictionary_value_is_refused_before_it_is_decoded(tmp_path: Path) -> None:
    values = pa.DictionaryArray.from_arrays(pa.array([0] * 20_000, pa.int32()), pa.array(["x" * 2**20]))
    images = pa.ListArray.from_arrays(pa.array([0, 20_000], pa.int32()), values)
    pq.write_table(pa.table({"text": ["a"], "images": images}), tmp_path / "a.parquet", compression="zstd")
    assert os.path.getsize(tmp_path / "a.parquet") < 4096
    source = ParquetSource(tmp_path / "a.parquet")
    with pytest.raises(SourceError, match=r"row group 0 decodes to 2.* bytes or more, above max_group_bytes"):
        source.record(0)


def test_a_list_of_many_nulls_counts_as_what_it_takes_in_memory(tmp_path: Path) -> None:
    images = pa.ListArray.from_arrays(pa.array([0, 2_000_000], pa.int32()), pa.nulls(2_000_000, pa.string()))
    pq.write_table(pa.table({"text": ["a"], "images": images}), tmp_path / "a.parquet")
    with pytest.raises(SourceError, match="above max_group_bytes=8388608"):
        ParquetSource(tmp_path / "a.parquet", max_group_bytes=8 * 1024**2)


def test_lists_of_many_different_values_beside_a_dictionary_are_read(tmp_path: Path) -> None:
    pictures = [os.urandom(2000) for _ in range(3000)]
    table = pa.table({"text": ["a"] * 1000, "images": [pictures[3 * i : 3 * i + 3] for i in range(1000)]})
    pq.write_table(table, tmp_path / "a.parquet")
    source = ParquetSource(tmp_path / "a.parquet", max_group_bytes=16 * 1024**2)  # 3000 x 1 MiB would be above it
    assert [source.media_bytes(7, j) for j in range(3)] == pictures[21:24]


def test_a_row_that_names_one_file_many_times_is_refused_before_each_is_looked_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rows, "MAX_MEDIA", 100)
    (tmp_path / "a.jpg").write_bytes(b"x")
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "hi", "images": ["a.jpg"] * 101}))
    source = JsonlSource(tmp_path / "a.jsonl")
    with pytest.raises(RecordError, match="more than 100 media"):
        source.record(0)


def test_a_pipe_that_took_the_place_of_a_file_is_an_error_and_nobody_waits(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.tar")
    code = """
        from dataloaders.errors import SourceError
        from dataloaders.storage import Storage
        try:
            Storage().open(sys.argv[1])
        except SourceError as error:
            print(error.cause)
    """
    assert in_child(code, tmp_path / "a.tar", timeout_s=30) == "this is no regular file\n"


def test_schemes_are_checked_behind_braces_too() -> None:
    storage = Storage(StorageOptions(schemes=("file",)))
    for hidden in ("{http,memory}://host/a.tar", "{pipe:ls,x}", "PIPE:ls"):
        with pytest.raises(SourceError, match=r"not a local file|commands are not run"):
            storage.list(hidden)


def test_names_found_by_wildcards_are_names_and_no_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("~", "file:"):
        (tmp_path / folder).mkdir()
        write_tar(tmp_path / folder / "a.tar", [(f"{folder}.json", CHAT)])
    write_tar(tmp_path / "pipe:echo.tar", [("1.json", CHAT)])
    source = TarSource(["*/a.tar", "*.tar"])
    assert [os.path.relpath(shard, tmp_path) for shard in source.shards] == ["file:/a.tar", "~/a.tar", "pipe:echo.tar"]


@pytest.mark.parametrize("name", ["a\x1b[2J.tar", "a\x9b31m.tar", "a\u202e.tar"])
def test_no_message_carries_control_characters_of_a_name(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"no tar" * 200)
    with pytest.raises(SourceError) as raised:
        TarSource(str(tmp_path / name))
    assert str(raised.value).isprintable()
    (tmp_path / name).unlink()
    source = TarSource(str(write_tar(tmp_path / name, [("1.json", CHAT)])))
    assert source.record(0).place.isprintable()


def test_an_error_shows_lines_and_no_control_characters() -> None:
    error = DataError("two\nlines \x1b[2J", place="\udcff", remedy="\x07")
    assert str(error) == "two\nlines \\x1b[2J at \\udcff. \\x07"
    assert error.cause == "two\nlines \x1b[2J"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


@pytest.mark.parametrize(
    "text",
    [
        "!!bool perhaps",
        "!!timestamp soon",
        '!!int ""',
        '!!float ""',
        "1:" * 400 + "1.0",
        "1:" * 40_000 + "1",
        "!!int 0b",
    ],
)
def test_a_text_that_does_not_fit_its_yaml_tag_is_an_error_of_the_mixture(text: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="mixture"):
        parse_mixture(f"unit: {text}\nparts: []\n", folder=tmp_path)


def test_a_message_about_a_mixture_is_bounded(tmp_path: Path) -> None:
    with pytest.raises(DataError) as raised:
        parse_mixture(f"unit: !!{'x' * 100_000} a\n", folder=tmp_path)
    assert len(str(raised.value)) < 1000


def test_a_record_of_a_cached_range_beyond_its_file_is_left_alone(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        cache = RangeCache(tmp_path / "cache", 10_000_000)
        cache.put(STAMPED, 0, b"x" * 10)
        cache.close()
        (path,) = (tmp_path / "cache").glob("*.ranges")
        import struct
        import zlib

        body = struct.pack("<QQI", 0, 2**62, 0)
        path.write_bytes(path.read_bytes() + body + struct.pack("<I", zlib.crc32(body)))
        asked: list[int] = []
        pread = os.pread
        patch.setattr(os, "pread", lambda fd, size, at: asked.append(size) or pread(fd, size, at))
        assert RangeCache(tmp_path / "cache", 10_000_000).get(STAMPED, 500, 10) is None
        assert max(asked) < 1000


def test_a_cache_folder_that_anybody_may_write_to_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "cache"
    folder.mkdir()
    folder.chmod(0o777)
    cache = RangeCache(folder, 10_000_000)
    cache.put(STAMPED, 0, b"x" * 10)
    assert cache.get(STAMPED, 0, 10) is None
    assert not list(folder.iterdir())
    assert "anybody may write there" in caplog.text


def test_a_field_named_by_none_does_not_come_back_as_the_text_null() -> None:
    record = Record(shard="s", key="k", turns=(), media=(), extra={"a": {None: 1}})
    with pytest.raises(DataError, match="named None, a NoneType"):
        RawSample(record).to_bytes()


@pytest.mark.parametrize("value", [10**5000, [1] * 100_000, None], ids=["number", "list", "null"])
def test_a_role_that_is_no_name_is_a_bad_record_with_a_short_message(value: object) -> None:
    parser = rows.RowParser(fields=rows.RowFields(), limits=rows.RecordLimits(), media_limits=rows.ProbeLimits())
    for row in (
        {"messages": [{"role": value, "content": "a"}]},
        {"messages": [{"role": "user", "content": [{"type": value}]}]},
    ):
        with pytest.raises(RecordError) as raised:
            parser.parse(row, lambda *_: 0, shard="s", key="k")
        assert raised.value.reason is Reason.BAD_RECORD
        assert len(str(raised.value)) < 400


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    datasets = pytest.importorskip("datasets")
    datasets.Dataset.from_list([{"text": f"row {n}"} for n in range(3)]).save_to_disk(tmp_path / "saved")
    return tmp_path / "saved"


def test_a_saved_data_set_with_a_given_fingerprint_opens_in_workers(saved: Path) -> None:
    from dataloaders.hf_source import HFDatasetSource

    source = pickle.loads(pickle.dumps(HFDatasetSource(saved, fingerprint="v1")))
    assert source.record(2).key == "row 2"


def test_a_saved_data_set_names_no_file_outside_of_its_folder(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    from dataloaders.hf_source import HFDatasetSource

    state = json.loads((saved / "state.json").read_text())
    state["_data_files"] = [{"filename": "../other.arrow"}]
    (saved / "state.json").write_text(json.dumps(state))
    monkeypatch.setattr(datasets, "load_from_disk", lambda *_: pytest.fail("it was opened"))
    with pytest.raises(SourceError, match="is not the name of a file"):
        HFDatasetSource(saved)
