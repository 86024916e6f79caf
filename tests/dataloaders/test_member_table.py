"""The table of members: mapped, shared by workers, refused when damaged, made again where shards changed."""

import os
import pickle
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dataloaders import member_cache, member_file
from dataloaders.errors import SourceError
from dataloaders.member_file import DTYPES, Column
from dataloaders.member_table import MemberTable, TableBuilder, selected
from dataloaders.storage import Storage
from dataloaders.tar_pass import pass_over
from dataloaders.tar_source import TarSource

WriteShard = Callable[..., Path]
TEXT = b'{"messages": [{"role": "user", "content": "<image>"}]}'


@pytest.fixture
def shards(tmp_path: Path, write_shard: WriteShard) -> Path:
    """Three shards of 3, 4 and 5 samples, one of each without a text, in `tmp_path/shards`."""
    folder = tmp_path / "shards"
    folder.mkdir()
    for number in range(3):
        members = [("README", b"x"), ("\udcff.odd", b"y")]
        for n in range(2 + number):
            members += [(f"{n}.json", TEXT), (f"{n}.{number}.png", bytes([n]) * (n + 1)), (f"{n}.cls", b"1")]
        write_shard(folder / f"s{number}.tar", members)
    return folder


class Passes:
    """Names of the shards whose headers were passed over."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []

        def counted(state: object, *arguments: object, **options: object) -> MemberTable:
            self.names.append(Path(state.url).name)  # type: ignore[attr-defined]
            return pass_over(state, *arguments, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(member_cache, "pass_over", counted)

    def take(self) -> list[str]:
        taken, self.names = self.names, []
        return taken


def _content(source: TarSource) -> list[object]:
    """All that a source says."""
    said: list[object] = [source.fingerprint, source.states, source.report, len(source)]
    for i in range(len(source)):
        said.append((source.table.key(i), source.table.others(i), source.place(i)))
        said += [
            (source.table.offset(r), source.table.size(r), source.table.suffix(r), source.table.kind(r))
            for r in source.table.rows(i)
        ]
    return said


def test_a_source_from_its_table_is_the_source_that_passed_over_the_headers(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh, passes = TarSource(str(shards / "*.tar")), Passes(monkeypatch)
    first = TarSource(str(shards / "*.tar"), members=tmp_path / "members")
    assert passes.take() == ["s0.tar", "s1.tar", "s2.tar"]
    again = TarSource(str(shards / "*.tar"), members=tmp_path / "members")
    assert passes.take() == []
    assert _content(fresh) == _content(first) == _content(again)
    assert [source.media_bytes(11, 0) for source in (fresh, first, again)] == [b"\3" * 4] * 3
    assert again.report.lines() == fresh.report.lines() != []
    assert (again.report.num_members, again.report.num_samples) == (9 * 3 + 3 * 2, 12)


def test_opening_a_current_table_reads_no_header(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    TarSource(str(shards / "*.tar"), members=tmp_path / "members")
    opened: list[str] = []
    monkeypatch.setattr(Storage, "open", lambda _, url, *rest: opened.append(url))
    assert len(TarSource(str(shards / "*.tar"), members=tmp_path / "members")) == 12
    assert opened == []


@pytest.mark.parametrize("change", ["added", "removed", "edited", "touched", "reordered"])
def test_only_shards_that_changed_are_passed_over_again(
    change: str, shards: Path, tmp_path: Path, write_shard: WriteShard, monkeypatch: pytest.MonkeyPatch
) -> None:
    urls = [str(shards / f"s{number}.tar") for number in range(3)]
    TarSource(urls, members=tmp_path / "members")
    passes, expected = Passes(monkeypatch), []
    if change == "added":
        urls.insert(1, str(write_shard(shards / "new.tar", [("9.txt", b"x")])))
        expected = ["new.tar"]
    elif change == "removed":
        del urls[0]
    elif change == "edited":
        write_shard(shards / "s1.tar", [("9.txt", b"x"), ("a.svg", b"x")])
        expected = ["s1.tar"]
    elif change == "touched":
        os.utime(shards / "s2.tar", ns=(1, 1))
        expected = ["s2.tar"]
    else:
        urls.reverse()
    source = TarSource(urls, members=tmp_path / "members")
    assert passes.take() == expected
    assert _content(source) == _content(TarSource(urls))
    passes.take()
    assert _content(TarSource(urls, members=tmp_path / "members")) == _content(source)
    assert passes.take() == []


def test_several_sources_share_a_folder(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = TarSource(str(shards / "s0.tar"), members=tmp_path / "members")
    TarSource(str(shards / "s[12].tar"), members=tmp_path / "members")
    passes = Passes(monkeypatch)
    assert len(TarSource(str(shards / "s0.tar"), members=tmp_path / "members")) == 3
    assert len(TarSource(str(shards / "s[12].tar"), members=tmp_path / "members")) == 9
    assert passes.take() == []
    assert pickle.loads(pickle.dumps(one)).record(1) == one.record(1)
    names = os.listdir(tmp_path / "members")
    assert len(names) == 2
    assert all(name.endswith(".members") for name in names)


def test_opening_a_current_table_looks_through_no_other_one(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = tmp_path / "members"
    for urls in ("s0.tar", "s1.tar", "*.tar"):
        TarSource(str(shards / urls), members=members)
    checked: list[Path] = []
    original = member_cache._opened

    def counted(path: Path) -> MemberTable | None:
        checked.append(path)
        return original(path)

    monkeypatch.setattr(member_cache, "_opened", counted)
    source = TarSource(str(shards / "*.tar"), members=members)
    assert checked == [source.table.path]


def test_a_source_with_a_folder_travels_as_a_path(shards: Path, tmp_path: Path) -> None:
    source = TarSource(str(shards / "*.tar"), members=tmp_path / "members")
    sent = pickle.dumps(source)
    assert len(sent) < 3000
    assert str(tmp_path / "members").encode() in sent
    copy = pickle.loads(sent)
    assert _content(copy) == _content(source)
    assert copy.record(11) == source.record(11)


def test_a_source_without_a_folder_travels_compactly(tmp_path: Path, write_shard: WriteShard) -> None:
    shard = write_shard(tmp_path / "a.tar", [(f"{n:06d}.txt", b"x") for n in range(3000)])
    source = TarSource(str(shard))
    sent = pickle.dumps(source)
    assert len(sent) < 3000 * 60
    assert _content(pickle.loads(sent)) == _content(source)


def test_a_table_that_was_replaced_under_a_run_is_an_error(shards: Path, tmp_path: Path) -> None:
    source = TarSource(str(shards / "s0.tar"), members=tmp_path / "members")
    sent = pickle.dumps(source)
    os.utime(shards / "s0.tar", ns=(1, 1))
    TarSource(str(shards / "s0.tar"), members=tmp_path / "members")
    with pytest.raises(SourceError, match=r"replaced while a run was using it at .*members. Start the run again"):
        pickle.loads(sent)
    assert source.table.key(2) == "1", "the mapped file is still the old one"


def test_a_folder_that_cannot_be_written_is_an_error_with_the_remedy(shards: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SourceError, match=r"cannot be kept here: .*Choose another folder for it \(members="):
        TarSource(str(shards / "*.tar"), members=tmp_path / "file")


def test_a_write_that_fails_leaves_nothing_behind(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(member_file.os, "fsync", full)
    with pytest.raises(SourceError, match="No space left"):
        TarSource(str(shards / "*.tar"), members=tmp_path / "members")
    assert os.listdir(tmp_path / "members") == []


# --- damage


@pytest.fixture
def table(shards: Path) -> MemberTable:
    """The table of the three shards, in memory."""
    return TarSource(str(shards / "*.tar")).table


def _columns(table: MemberTable) -> dict[str, Column]:
    return {name: column.copy() for name, column in table._columns.items()}


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (("offset", 0, -512), "a member lies outside its shard"),
        (("offset", 3, 10**15), "a member lies outside its shard"),
        (("size", 0, 10**15), "a member lies outside its shard"),
        (("size", 0, 2**63 - 1), "a member lies outside its shard"),
        (("size", -1, -1), "a member lies outside its shard"),
        (("shard_size", 1, 512), "a member lies outside its shard"),
        (("kind", 0, 7), "an unknown kind of member"),
        (("suffix", 0, 999), "suffix names a text that is not there"),
        (("suffix", 0, -1), "suffix names a text that is not there"),
        (("others", 0, 99), "others names a text that is not there"),
        (("member_end", 0, 10**9), "member_end runs backwards"),
        (("member_end", -1, 5), "member_end does not end where it should"),
        (("sample_end", 0, -1), "sample_end does not end where it should"),
        (("sample_end", 1, 10**9), "sample_end runs backwards"),
        (("key_end", 2, 10**9), "key_end runs backwards"),
        (("url_end", -1, 10**9), "url_end does not end where it should"),
    ],
)
def test_columns_that_lead_astray_are_refused(
    table: MemberTable, tmp_path: Path, damage: tuple[str, int, int], message: str
) -> None:
    columns, (name, at, value) = _columns(table), damage
    columns[name][at] = value
    member_file.write_columns(tmp_path / "t.members", columns, "digest")
    with pytest.raises(SourceError, match=rf"damaged one: {message} at .*t.members. Delete the file; it is made again"):
        MemberTable.open(tmp_path / "t.members")


@pytest.mark.parametrize("name", ["size", "kind", "others", "shard_size", "stamp_end"])
def test_columns_of_another_length_are_refused(table: MemberTable, tmp_path: Path, name: str) -> None:
    columns = _columns(table)
    columns[name] = columns[name][:-1] if name != "stamp_end" else np.append(columns[name], columns[name][-1])
    member_file.write_columns(tmp_path / "t.members", columns, "digest")
    with pytest.raises(SourceError, match="damaged one"):
        MemberTable.open(tmp_path / "t.members")


@pytest.mark.parametrize(
    "content", [b"", b"x", b"MLLMMEM1", b"MLLMMEM1" + b"\xff" * 8, b"MLLMMEM1\2" + bytes(7) + b"{}"]
)
def test_a_file_that_is_no_table_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "t.members").write_bytes(content)
    with pytest.raises(SourceError, match="not a table of members"):
        MemberTable.open(tmp_path / "t.members")


def test_another_format_version_is_refused(table: MemberTable, tmp_path: Path) -> None:
    table.write(tmp_path / "t.members")
    content = (tmp_path / "t.members").read_bytes()
    (tmp_path / "t.members").write_bytes(content.replace(b'"version": 1', b'"version": 9', 1))
    with pytest.raises(SourceError, match="format version 9, but this release reads 1"):
        MemberTable.open(tmp_path / "t.members")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=80, deadline=None)
@given(st.data())
def test_any_damage_is_refused_or_stays_inside_the_shards(
    table: MemberTable, tmp_path: Path, data: st.DataObject
) -> None:
    path = tmp_path / "t.members"
    table.write(path)
    content = bytearray(path.read_bytes())
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    else:
        for _ in range(data.draw(st.integers(1, 4))):
            content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content)
    try:
        found = MemberTable.open(path)
    except SourceError:
        return
    sizes = [state.size for state in found.files]
    for i in range(len(found)):
        found.key(i), found.others(i)
        for row in found.rows(i):
            assert 0 <= found.offset(row) <= found.offset(row) + found.size(row) <= sizes[found.shard_of(i)]
            found.suffix(row)


def test_a_damaged_table_in_the_folder_is_made_again(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = _content(TarSource(str(shards / "*.tar"), members=tmp_path / "members"))
    (path,) = (tmp_path / "members").iterdir()
    path.write_bytes(path.read_bytes()[:-1])
    passes = Passes(monkeypatch)
    assert _content(TarSource(str(shards / "*.tar"), members=tmp_path / "members")) == expected
    assert len(passes.take()) == 3
    TarSource(str(shards / "*.tar"), members=tmp_path / "members")
    assert passes.take() == []


def test_a_damaged_report_is_an_error_in_words(table: MemberTable, tmp_path: Path) -> None:
    columns = _columns(table)
    columns["report_bytes"][0] = ord("[")
    source = TarSource.of_table(MemberTable(columns), Storage())
    with pytest.raises(SourceError, match=r"the report on .*s0.tar is damaged"):
        _ = source.report


# --- parts and size


def test_shards_of_a_table_are_tables(table: MemberTable, shards: Path) -> None:
    part = selected(table, [2, 0])
    whole = TarSource([str(shards / f"s{k}.tar") for k in (2, 0)])
    assert _content(TarSource.of_table(part, Storage())) == _content(whole)
    assert table.find(next(iter(table.files))) == 0


def _large(num_samples: int) -> MemberTable:
    """A table of shards of 1000 samples with a text and two media each."""
    rng = np.random.default_rng(0)
    num_shards, members = num_samples // 1000, 3 * num_samples
    columns: dict[str, Column] = {name: np.zeros(0, dtype=dtype) for name, dtype in DTYPES.items()}
    columns["shard_size"] = np.full(num_shards, 2**40, dtype=np.int64)
    columns["sample_end"] = np.arange(1, num_shards + 1, dtype=np.int64) * 1000
    columns["others"] = np.zeros(num_samples, dtype=np.int16)
    columns["member_end"] = np.arange(1, num_samples + 1, dtype=np.int64) * 3
    columns["offset"] = rng.integers(0, 2**39, members)
    columns["size"] = rng.integers(0, 2**20, members)
    columns["kind"] = np.tile(np.array([-1, 0, 1], dtype=np.int8), num_samples)
    columns["suffix"] = np.tile(np.arange(3, dtype=np.int32), num_samples)
    texts: dict[str, Sequence[bytes]] = {
        "suffixes": [b"json", b"jpg", b"mp4"],
        "combinations": [b""],
        "key": [b"%012d" % n for n in range(num_samples)],
        **{
            name: [b"%s-%d" % (name.encode(), k) for k in range(num_shards)] for name in ("url", "stamp", "fingerprint")
        },
        "report": [b"{}"] * num_shards,
    }
    for name, values in texts.items():
        columns[f"{name}_bytes"] = np.frombuffer(b"".join(values), dtype=np.uint8)
        columns[f"{name}_end"] = np.cumsum([len(value) for value in values], dtype=np.int64)
    return MemberTable(columns)


def _resident_kib() -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1])


def test_a_million_samples_are_opened_without_objects_for_them(tmp_path: Path) -> None:
    table = _large(1_000_000).write(tmp_path / "t.members")
    sent, before = pickle.dumps(table), _resident_kib()
    copy = pickle.loads(sent)
    assert copy.key(999_999) == "000000999999"
    assert (copy.shard_of(123_456), copy.suffix(copy.rows(123_456)[1])) == (123, "jpg")
    assert _resident_kib() - before < 4096, "a worker's own memory, besides the pages that all share"
    assert (tmp_path / "t.members").stat().st_size < 110 * 1_000_000
    MemberTable.open(tmp_path / "t.members")
    for i in random.Random(0).choices(range(1_000_000), k=100):
        assert copy.key(i) == f"{i:012d}"


def test_the_builder_gives_an_empty_table_for_no_shard() -> None:
    assert len(TableBuilder().table()) == 0
