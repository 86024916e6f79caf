"""Indices beside the shards: what other tools write is read, and what the shard does not confirm is not believed."""

import json
import os
import re
import sqlite3
import struct
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dataloaders import energon_index, tar_index_files
from dataloaders.errors import SourceError
from dataloaders.storage import FileState, Storage
from dataloaders.storage.local import LocalFile
from dataloaders.tar_groups import TarReport
from dataloaders.tar_index_errors import NotBelieved
from dataloaders.tar_index_files import IndexFiles, sample_offsets, text_members
from dataloaders.tar_source import TarSource

WriteShard = Callable[..., Path]
TEXT = b'{"messages": [{"role": "user", "content": "<image>"}]}'
USTAR, PAX = tarfile.USTAR_FORMAT, tarfile.PAX_FORMAT


def _members(num_samples: int = 20) -> list[tuple[str, bytes]]:
    """A text and a picture of varying size per sample."""
    pairs = [[(f"d/{n:03d}.json", TEXT), (f"d/{n:03d}.0.jpg", bytes([n]) * (300 * n))] for n in range(num_samples)]
    return [member for pair in pairs for member in pair]


def _write_text_index(shard: Path) -> Path:
    """What wds2idx writes: samples by key, `ext offset size name` of every file."""
    samples: list[tuple[str, list[str]]] = []
    with tarfile.open(shard) as tar:
        for info in tar:
            folder, slash, base = info.name.rpartition("/")
            stem, dot, suffix = base.partition(".")
            if not info.isreg() or not stem or not dot:
                continue
            if not samples or samples[-1][0] != folder + slash + stem:
                samples.append((folder + slash + stem, []))
            samples[-1][1].append(f"{suffix} {info.offset_data} {info.size} {info.name}")
    path = shard.with_suffix(".idx")
    path.write_text("\n".join([f"v1.2 {len(samples)}", *(" ".join(parts) for _, parts in samples), ""]))
    return path


def _write_energon_index(root: Path, shards: list[Path], *, info: str = ".info.json") -> Path:
    """What `energon prepare` writes: sample offsets beside every shard, and a database of all parts."""
    meta = root / ".nv-meta"
    meta.mkdir()
    database = sqlite3.connect(meta / "index.sqlite")
    database.execute("CREATE TABLE samples (tar_file_id, sample_key, sample_index, byte_offset, byte_size)")
    database.execute("CREATE TABLE sample_parts (tar_file_id, sample_index, part_name, o INTEGER, s INTEGER)")
    database.execute("ALTER TABLE sample_parts RENAME COLUMN o TO content_byte_offset")
    database.execute("ALTER TABLE sample_parts RENAME COLUMN s TO content_byte_size")
    counts = {}
    for number, shard in enumerate(shards):
        offsets, keys = [], []
        with tarfile.open(shard) as tar:
            for part in (part for part in tar if part.isreg() and "." in part.name.rpartition("/")[2]):
                folder, slash, base = part.name.rpartition("/")
                stem, _, suffix = base.partition(".")
                if not keys or keys[-1] != folder + slash + stem:
                    keys.append(folder + slash + stem)
                    offsets.append(part.offset)
                    database.execute("INSERT INTO samples VALUES (?, ?, ?, 0, 0)", (number, keys[-1], len(keys) - 1))
                row = (number, len(keys) - 1, suffix, part.offset_data, part.size)
                database.execute("INSERT INTO sample_parts VALUES (?, ?, ?, ?, ?)", row)
            offsets.append(tar.offset)
        shard.with_suffix(".tar.idx").write_bytes(struct.pack(f"<{len(offsets)}Q", *offsets))
        counts[str(shard.relative_to(root))] = len(keys)
    database.commit()
    database.close()
    said = {"energon_version": "7.4.1", "shard_counts": counts}
    (meta / info).write_text(json.dumps(said) if info.endswith("json") else yaml.dump(said, sort_keys=False))
    return meta / "index.sqlite"


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, int]]:
    """(file, offset, size) of everything that is read from local files."""
    seen: list[tuple[str, int, int]] = []
    original = LocalFile.read

    def counted(self: LocalFile, offset: int, size: int) -> bytes:
        seen.append((Path(self.state.url).name, offset, size))
        return original(self, offset, size)

    monkeypatch.setattr(LocalFile, "read", counted)
    return seen


def _plain(shard: Path) -> TarSource:
    """The source as a header pass gives it."""
    hidden = [path for path in (shard.with_suffix(".idx"), shard.parent / ".nv-meta") if path.exists()]
    for path in hidden:
        path.rename(path.with_name("hidden"))
    source = TarSource(str(shard))
    for path in hidden:
        path.with_name("hidden").rename(path)
    return source


def _same(source: TarSource, expected: TarSource) -> None:
    assert source.fingerprint == expected.fingerprint
    assert [source.record(i) for i in range(len(source))] == [expected.record(i) for i in range(len(expected))]
    assert [source.media_bytes(i, 0) for i in range(len(source))] == [
        expected.media_bytes(i, 0) for i in range(len(expected))
    ]
    assert (source.report.num_members, source.report.ignored) == (expected.report.num_members, expected.report.ignored)


# --- good ones


def test_a_text_index_replaces_the_header_pass(
    tmp_path: Path, write_shard: WriteShard, reads: list[tuple[str, int, int]]
) -> None:
    shard = write_shard(tmp_path / "a.tar", _members(), format=USTAR)
    _write_text_index(shard)
    source = TarSource(str(shard))
    read = [(offset, size) for name, offset, size in reads if name == "a.tar"]
    assert len(read) <= tar_index_files.NUM_SPOTS + 1 < 40, "the end, and a few headers of the 40"
    assert {size for _, size in read} == {512}
    _same(source, _plain(shard))
    assert source.report.lines() == []


@pytest.mark.parametrize("info", [".info.json", ".info.yaml"])
def test_the_database_of_energon_replaces_the_header_pass(
    info: str, tmp_path: Path, write_shard: WriteShard, reads: list[tuple[str, int, int]]
) -> None:
    (tmp_path / "part").mkdir()
    shards = [write_shard(tmp_path / "part" / f"s{k}.tar", _members(10 + k), format=USTAR) for k in range(2)]
    _write_energon_index(tmp_path, shards, info=info)
    source = TarSource(str(shards[1]))
    assert len([name for name, _, _ in reads if name == "s1.tar"]) <= tar_index_files.NUM_SPOTS + 1
    assert len(source) == 11
    _same(source, _plain(shards[1]))
    assert source.report.lines() == []


def test_what_lies_between_members_is_read_and_reported_as_by_the_header_pass(
    tmp_path: Path, write_shard: WriteShard
) -> None:
    members = [("README", b"x"), (f"{'l' * 150}.json", TEXT), (f"{'l' * 150}.jpg", b"y"), ("__meta__/a.b", b"z")]
    members += [("k.json", TEXT), ("k.jpg", b"x"), (".hidden", b"h"), ("LICENSE", b"end")]
    shard = write_shard(tmp_path / "a.tar", members, format=PAX)
    _write_text_index(shard)
    source = TarSource(str(shard))
    assert source.report.ignored == {"no extension": 3, "shard metadata": 1}
    assert source.report.notes == []
    expected = _plain(shard)
    assert source.fingerprint == expected.fingerprint
    assert source.report.ignored == expected.report.ignored


def test_a_shard_that_no_index_speaks_of_is_passed_over(tmp_path: Path, write_shard: WriteShard) -> None:
    shards = [write_shard(tmp_path / f"s{k}.tar", _members(3), format=USTAR) for k in range(2)]
    _write_energon_index(tmp_path, shards[:1])
    source = TarSource(str(shards[1]))
    assert len(source) == 3
    assert source.report.lines() == []


def test_energon_offsets_divide_the_pass_into_stretches(tmp_path: Path, write_shard: WriteShard) -> None:
    shard = write_shard(tmp_path / "a.tar", [("README", b"x"), *_members(), ("end", b"x")], format=PAX)
    _write_energon_index(tmp_path, [shard])
    (state,) = Storage().states([str(shard)])
    indices = IndexFiles(Storage())
    expected = list(IndexFiles(Storage(), use=False).members(state, TarReport(), place="t"))
    assert indices._in_stretches(state, "t", 5) == expected
    offsets = sample_offsets(shard.with_suffix(".tar.idx").read_bytes(), state.size, "t")
    wrong = [offset + 512 * (k == 12) for k, offset in enumerate([*offsets, state.size])]
    shard.with_suffix(".tar.idx").write_bytes(struct.pack(f"<{len(wrong)}Q", *wrong))
    with pytest.raises(
        NotBelieved, match=r"a.tar.idx does not fit the shard \((no valid tar header|there is no header)"
    ):
        indices._in_stretches(state, "t", 5)


# --- bad ones: every source below is what the header pass gives, with a note where an index was looked at


@pytest.mark.parametrize(
    ("old", "new", "note"),
    [
        ("v1.2 20", "v1.1 20", "a.idx is no text index of version v1.2"),
        ("v1.2 20", "v1.2 21", "a.idx has 20 samples, but says 21"),
        ("v1.2 20", "v1.2 " + "9" * 5000, "a.idx is no text index of version v1.2"),
        (" d/003.json", " d/0 3.json", "has names with blanks or backslashes"),
        (" d/003.json", " d/\\3.json", "has names with blanks or backslashes"),
        ("json 512 ", "json -512 ", "has offsets or sizes that are no numbers"),
        ("json 512 ", "json " + "9" * 30 + " ", "has offsets or sizes that are no numbers"),
        ("json 512 54", "json 512 9999999999", "names bytes that overlap, or lie outside the shard"),
        ("json 512 54", "json 512 55", "names a member that is another one in the shard"),
        ("json 512 54", "jpg 512 54", "has names that do not end in their extension"),
        ("d/000.json", "d/00.json", "names a member that is another one in the shard"),
        ("d/019.0.jpg", "../019.0.jpg", "names a member that is another one in the shard"),
    ],
)
def test_a_text_index_that_does_not_fit_is_not_believed(
    old: str, new: str, note: str, tmp_path: Path, write_shard: WriteShard
) -> None:
    shard = write_shard(tmp_path / "a.tar", _members(), format=USTAR)
    index = _write_text_index(shard)
    text = index.read_text()
    assert old in text
    index.write_text(text.replace(old, new, 1))
    source = TarSource(str(shard))
    assert note in source.report.lines()[0]
    assert source.report.lines()[0].startswith(f"shard {shard}: a.idx")
    assert source.report.lines()[0].endswith("; its headers were read instead")
    _same(source, _plain(shard))


@pytest.mark.parametrize("lost", ["first", "middle", "last"])
def test_an_index_that_lacks_a_sample_loses_none(lost: str, tmp_path: Path, write_shard: WriteShard) -> None:
    shard = write_shard(tmp_path / "a.tar", _members(), format=USTAR)
    index = _write_text_index(shard)
    _, *lines = index.read_text().splitlines()
    del lines[{"first": 0, "middle": 9, "last": -1}[lost]]
    index.write_text("\n".join(["v1.2 19", *lines, ""]))
    source = TarSource(str(shard))
    assert len(source) == 20
    assert "a.idx lacks members of the shard" in source.report.lines()[0]


def test_an_index_older_than_its_shard_is_not_believed(tmp_path: Path, write_shard: WriteShard) -> None:
    shard = write_shard(tmp_path / "a.tar", _members(), format=USTAR)
    index = _write_text_index(shard)
    os.utime(index, ns=(1, 1))
    source = TarSource(str(shard))
    assert source.report.lines() == [f"shard {shard}: a.idx is older than the shard; its headers were read instead"]


def test_an_index_of_a_shard_that_grew_or_was_cut_is_not_believed(tmp_path: Path, write_shard: WriteShard) -> None:
    shard = write_shard(tmp_path / "a.tar", _members(), format=USTAR)
    index = _write_text_index(shard)
    write_shard(shard, _members(25), format=USTAR)
    os.utime(index)
    source = TarSource(str(shard))
    assert len(source) == 25
    assert "lacks members" in source.report.lines()[0]
    write_shard(shard, _members(15), format=USTAR)
    os.utime(index)
    source = TarSource(str(shard))
    assert len(source) == 15
    assert len(source.report.lines()) == 1


def test_an_index_above_the_bound_is_not_read(
    tmp_path: Path, write_shard: WriteShard, monkeypatch: pytest.MonkeyPatch, reads: list[tuple[str, int, int]]
) -> None:
    shard = write_shard(tmp_path / "a.tar", _members(), format=USTAR)
    _write_text_index(shard)
    monkeypatch.setattr(tar_index_files, "MAX_INDEX_BYTES", 100)
    assert "above 100" in TarSource(str(shard)).report.lines()[0]
    assert "a.idx" not in {name for name, _, _ in reads}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40, deadline=None)
@given(st.data())
def test_any_damage_to_a_text_index_changes_nothing_where_every_header_is_looked_at(
    tmp_path: Path, write_shard: WriteShard, data: st.DataObject
) -> None:
    shard = write_shard(tmp_path / "a.tar", _members(5), format=USTAR)
    content = bytearray(_write_text_index(shard).read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at : at + data.draw(st.integers(0, 2))] = data.draw(st.binary(max_size=2))
    shard.with_suffix(".idx").write_bytes(content)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tar_index_files, "NUM_SPOTS", 1000)
        _same(TarSource(str(shard)), _plain(shard))


@pytest.mark.parametrize("raw", [b"", b"x", bytes(8), struct.pack("<2Q", 512, 0), struct.pack("<2Q", 0, 10**9)])
@pytest.mark.parametrize("extra", [b"", struct.pack("<Q", 7)])
def test_offsets_where_no_header_can_be_are_refused(raw: bytes, extra: bytes) -> None:
    with pytest.raises(NotBelieved, match=r"^t\.idx has "):
        sample_offsets(raw + extra, 10240, "t.idx")


def test_text_of_any_bytes_is_members_or_refused() -> None:
    with pytest.raises(NotBelieved, match="or is damaged"):
        list(text_members(b"v1.2 1\n" + b"\xff" * 100, "t.idx"))
    (member,) = text_members(b"v1.2 1\njpg 512 3 \xff.jpg\n", "t.idx")
    assert member.name == "\udcff.jpg"


# --- databases


@pytest.fixture
def dataset(tmp_path: Path, write_shard: WriteShard) -> Path:
    """One shard in a folder that Energon has prepared; its path."""
    shard = write_shard(tmp_path / "s.tar", _members(), format=USTAR)
    _write_energon_index(tmp_path, [shard])
    return shard


@pytest.mark.parametrize(
    ("change", "note"),
    [
        ("UPDATE sample_parts SET content_byte_offset = content_byte_offset + 512", "no valid tar header|another one"),
        ("UPDATE sample_parts SET content_byte_offset = -5 WHERE sample_index = 3", "in front of the shard"),
        ("UPDATE sample_parts SET content_byte_size = 9223372036854775807", "outside the shard"),
        ("UPDATE sample_parts SET content_byte_size = 'a'", "no name with an offset and a size"),
        ("UPDATE sample_parts SET part_name = x'ff'", "no name with an offset and a size"),
        ("UPDATE sample_parts SET part_name = '../../x'", "another one in the shard"),
        ("UPDATE samples SET sample_index = 0", "a sample is no number with a key"),
        ("UPDATE samples SET sample_key = NULL", "a sample is no number with a key"),
        ("DELETE FROM samples WHERE sample_index = 4", "no name with an offset and a size"),
        ("DELETE FROM sample_parts WHERE sample_index = 4", "lacks members of the shard"),
        ("DELETE FROM sample_parts", "lacks members of the shard"),
        ("UPDATE sample_parts SET part_name = hex(zeroblob(40000))", "cannot be read"),
        ("DROP TABLE samples", "it has no tables of samples and their parts"),
    ],
)
def test_a_database_that_does_not_fit_is_not_believed(change: str, note: str, dataset: Path) -> None:
    path = dataset.parent / ".nv-meta" / "index.sqlite"
    with sqlite3.connect(path) as database:
        database.execute(change)
    database.close()
    source = TarSource(str(dataset))
    (line,) = source.report.lines()
    assert re.search(note, line), line
    _same(source, _plain(dataset))


def test_a_view_that_computes_for_ever_is_not_asked(dataset: Path) -> None:
    path = dataset.parent / ".nv-meta" / "index.sqlite"
    endless = "WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n) SELECT 0 tar_file_id, i sample_index"
    with sqlite3.connect(path) as database:
        database.execute("DROP TABLE sample_parts")
        database.execute(
            f"CREATE VIEW sample_parts AS {endless}, 'x' part_name, 0 content_byte_offset, 0 content_byte_size FROM n"
        )
    database.close()
    source = TarSource(str(dataset))
    assert len(source) == 20
    assert "it has no tables of samples and their parts" in source.report.lines()[0]


def test_a_database_that_takes_too_many_steps_is_given_up(dataset: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = dataset.parent / ".nv-meta" / "index.sqlite"
    with sqlite3.connect(path) as database:
        numbers = "WITH RECURSIVE n(i) AS (SELECT 0 UNION ALL SELECT i + 1 FROM n WHERE i < 100000)"
        database.execute(f"INSERT INTO sample_parts {numbers} SELECT 7, i, 'x', 0, 0 FROM n")
    database.close()
    assert TarSource(str(dataset)).report.lines() == []
    monkeypatch.setattr(energon_index, "_STEPS_PER_BLOCK", 1)
    monkeypatch.setattr(energon_index, "_LEAST_STEPS", 20_000)
    assert "interrupted" in TarSource(str(dataset)).report.lines()[0]


def test_no_file_is_made_beside_a_database_and_its_name_is_no_option(tmp_path: Path, write_shard: WriteShard) -> None:
    root = tmp_path / "a?mode=rwc#%41"
    root.mkdir()
    shard = write_shard(root / "s.tar", _members(), format=USTAR)
    _write_energon_index(root, [shard])
    before = sorted(os.walk(tmp_path))
    assert TarSource(str(shard)).report.lines() == []
    assert sorted(os.walk(tmp_path)) == before


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"shard_counts": 5}', "[" * 100_000, "\0"])
@pytest.mark.parametrize("name", [".info.json", ".info.yaml"])
def test_what_is_no_list_of_shards_is_not_believed(content: str, name: str, dataset: Path) -> None:
    (dataset.parent / ".nv-meta" / ".info.json").unlink()
    (dataset.parent / ".nv-meta" / name).write_text(content)
    source = TarSource(str(dataset))
    assert len(source) == 20
    assert "index.sqlite or its .info cannot be read" in source.report.lines()[0]


def test_yaml_makes_no_objects(dataset: Path, tmp_path: Path) -> None:
    (dataset.parent / ".nv-meta" / ".info.json").unlink()
    victim = tmp_path / "victim"
    (dataset.parent / ".nv-meta" / ".info.yaml").write_text(
        f"shard_counts: !!python/object/apply:os.mkdir ['{victim}']\n"
    )
    assert "it has no shard_counts" in TarSource(str(dataset)).report.lines()[0]
    assert not victim.exists()


def test_a_database_that_is_none_is_not_believed(dataset: Path) -> None:
    (dataset.parent / ".nv-meta" / "index.sqlite").write_bytes(b"SQLite format 3\0" + b"\xff" * 5000)
    assert "index.sqlite or its .info cannot be read" in TarSource(str(dataset)).report.lines()[0]


def test_notes_are_kept_with_the_table(dataset: Path, tmp_path: Path) -> None:
    os.utime(dataset.parent / ".nv-meta" / "index.sqlite", ns=(1, 1))
    for _ in range(2):
        source = TarSource(str(dataset), members=tmp_path / "members")
        assert source.report.lines() == [
            f"shard {dataset}: index.sqlite is older than the shard; its headers were read instead"
        ]


class _Denying(Storage):
    """A store that answers for indices as stores do where listing is not allowed."""

    def states(self, urls: Sequence[str], *, noun: str = "shard") -> list[FileState]:
        if any(url.endswith(".idx") for url in urls):
            raise SourceError("HTTP status 403", place=urls[0])
        return super().states(urls, noun=noun)


def test_an_index_that_a_server_does_not_answer_for_is_told_from_none(tmp_path: Path, write_shard: WriteShard) -> None:
    shard = write_shard(tmp_path / "a.tar", _members(), format=USTAR)
    assert TarSource(str(shard)).report.lines() == []
    denied = TarSource(str(shard), storage=_Denying())
    assert len(denied) == 20
    assert denied.report.lines() == [
        f"shard {shard}: whether a.idx is there cannot be told (HTTP status 403); its headers were read instead"
    ]
