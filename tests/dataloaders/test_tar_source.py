"""Tar shards: the same samples as webdataset reads, one header pass, and no trust in what a tar says."""

import io
import multiprocessing
import os
import pickle
import re
import tarfile
import tracemalloc
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dataloaders import tar_headers, tar_source
from dataloaders.counts import MediaKind
from dataloaders.errors import Reason, RecordError, SourceError
from dataloaders.printable import printable
from dataloaders.record_parser import RecordLimits
from dataloaders.shuffled import SubsetSource
from dataloaders.source import prefetch
from dataloaders.storage import Storage, StorageOptions
from dataloaders.storage import urls as urls_module
from dataloaders.storage.local import LocalFile
from dataloaders.tar_groups import split_name
from dataloaders.tar_headers import IgnoredMember, TarHeaders, TarMember
from dataloaders.tar_source import TarSource

WriteShard = Callable[..., Path]
TEXT = b'{"messages": [{"role": "user", "content": "Hi"}]}'
FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


def _chat(num_images: int) -> bytes:
    return TEXT.replace(b"Hi", b"<image>" * num_images)


def _headers(path: Path) -> list[TarMember | IgnoredMember]:
    return list(TarHeaders(LocalFile(str(path)), place="t").members())


def _seal(header: bytearray) -> bytes:
    """The header with a correct checksum."""
    header[148:156] = b" " * 8
    header[148:156] = b"%06o\0 " % sum(header)
    return bytes(header)


def _header(name: bytes = b"a.json", size: bytes = b"00000000001\0", kind: bytes = b"0") -> bytearray:
    header = bytearray(512)
    header[: len(name)], header[124 : 124 + len(size)], header[156:157] = name, size, kind
    header[257:265] = b"ustar\x0000"
    return header


# --- agreement with the readers people use


@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS)
def test_the_header_pass_equals_tarfile(tmp_path: Path, write_shard: WriteShard, format: int) -> None:
    long = f"{'d' * 90}/{'e' * 40}/0001.json"
    names = ["a.json", "b/c.0.jpg", long] + (["f" * 300 + ".txt", "ü/ß.txt"] if format != tarfile.USTAR_FORMAT else [])
    shard = write_shard(tmp_path / "a.tar", [(n, bytes([i]) * (511 + i)) for i, n in enumerate(names)], format=format)
    with tarfile.open(shard) as tar:
        expected = [TarMember(info.name, info.offset_data, info.size) for info in tar if info.isreg()]
    assert _headers(shard) == expected
    assert [member.name for member in expected] == names


def test_samples_and_bytes_equal_those_of_webdataset(small_shard: Path) -> None:
    wds = pytest.importorskip("webdataset.tariterators")
    source = TarSource(str(small_shard))
    with small_shard.open("rb") as stream:
        files = wds.tar_file_expander([{"url": "small.tar", "stream": stream}])
        samples = list(wds.group_by_keys(files))
    assert [source.record(i).key for i in range(len(source))] == [sample["__key__"] for sample in samples]
    for i, sample in enumerate(samples):
        media = source.record(i).media
        assert len(media) == sum(not field.startswith("__") and field != "json" for field in sample)
        for j, ref in enumerate(media):
            assert source.media_bytes(i, j) == sample[ref.member.partition(".")[2]]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40, deadline=None)
@given(
    st.lists(
        st.text(alphabet="ab./0", min_size=1, max_size=9).filter(lambda n: not n.endswith("/") and "//" not in n),
        unique=True,
        max_size=8,
    )
)
def test_keys_are_those_of_webdataset_for_any_names(names: list[str]) -> None:
    wds = pytest.importorskip("webdataset.tariterators")
    for name in names:
        key, suffix = wds.base_plus_ext(name)
        base = name.rpartition("/")[2]
        # webdataset takes `folder/.hidden` for a sample called `folder/`; hidden files are no samples here.
        expected = None if key is None or base.startswith(".") else (key, suffix)
        assert split_name(name) == expected


# --- grouping


def test_media_are_numbered_and_ordered_by_number(tmp_path: Path, write_shard: WriteShard) -> None:
    order = [10, 2, 0, 1]
    members = [("k.json", _chat(4))] + [(f"k.{n}.jpg", bytes([n])) for n in order]
    source = TarSource(str(write_shard(tmp_path / "a.tar", members)))
    assert [ref.member for ref in source.record(0).media] == ["k.0.jpg", "k.1.jpg", "k.2.jpg", "k.10.jpg"]
    assert [source.media_bytes(0, j) for j in range(4)] == [b"\0", b"\1", b"\2", b"\n"]


def test_named_media_keep_the_order_of_the_tar(tmp_path: Path, write_shard: WriteShard) -> None:
    members = [("k.right.JPG", b"r"), ("k.json", _chat(2)), ("k.left.png", b"l")]
    source = TarSource(str(write_shard(tmp_path / "a.tar", members)))
    assert [ref.member for ref in source.record(0).media] == ["k.right.JPG", "k.left.png"]


def test_media_of_both_kinds_are_addressed_in_placeholder_order(
    small_shard: Path, video_bytes: Callable[..., bytes]
) -> None:
    source = TarSource(str(small_shard))
    record = source.record(5)
    assert [(ref.kind, ref.member) for ref in record.media] == [
        (MediaKind.VIDEO, "005.1.mp4"),
        (MediaKind.IMAGE, "005.0.png"),
    ]
    assert source.media_bytes(5, 1).startswith(b"\x89PNG")
    assert source.media_bytes(5, 0) == video_bytes(64, 96, 10)
    assert [source.media_reader(5, j).size for j in range(2)] == [ref.size_bytes for ref in record.media]


def test_members_that_do_not_follow_each_other_are_an_error_that_says_how_to_rebuild(
    tmp_path: Path, write_shard: WriteShard
) -> None:
    members = [("1.jpg", b"a"), ("2.jpg", b"b"), ("1.json", _chat(1)), ("2.json", _chat(1))]
    shard = write_shard(tmp_path / "unsorted.tar", members)
    with pytest.raises(
        SourceError, match=r"key 1 do not follow each other: .json comes after.*unsorted.tar.*--sort=name"
    ):
        TarSource(str(shard))


def test_a_field_that_occurs_twice_is_an_error(tmp_path: Path, write_shard: WriteShard) -> None:
    shard = write_shard(tmp_path / "a.tar", [("1.jpg", b"a"), ("1.JPG", b"b")])
    with pytest.raises(SourceError, match=r"key 1 has two members \.JPG"):
        TarSource(str(shard))


def test_folders_are_part_of_the_key_and_never_merged(tmp_path: Path, write_shard: WriteShard) -> None:
    members = [("train.v1/1.json", _chat(1)), ("train.v1/1.jpg", b"a"), ("train.v2/1.json", TEXT), ("1.json", TEXT)]
    source = TarSource(str(write_shard(tmp_path / "a.tar", members)))
    assert [source.record(i).key for i in range(len(source))] == ["train.v1/1", "train.v2/1", "1"]


def test_dotted_base_names_are_reported(tmp_path: Path, write_shard: WriteShard) -> None:
    members = [("ok.json", TEXT), ("22.05.json", TEXT), ("22.05.png", b"a"), ("x.pth", b"b"), ("x.txt", b"Hi")]
    source = TarSource(str(write_shard(tmp_path / "a.tar", members)))
    assert dict(source.report.unexpected) == {".05.json": 1, ".pth": 1}
    assert (source.report.num_samples, source.report.num_incomplete, source.report.incomplete) == (3, 1, ["22"])
    assert "1 of 3 samples (33.3 %) have no .json or .txt: 22" in source.report.lines()
    with pytest.raises(RecordError, match=r"neither a .json nor a .txt member at shard .*a.tar, key 22"):
        source.record(1)


def test_a_good_shard_has_nothing_to_report(small_shard: Path) -> None:
    assert TarSource(str(small_shard)).report.lines() == []


# --- hostile and broken


def test_member_names_are_labels_and_touch_no_path(tmp_path: Path, write_shard: WriteShard) -> None:
    outside = tmp_path / "victim.json"
    names = [f"{outside}", "../victim.json", "../../etc/passwd.json", "a\n\x1b[2J/b.json"]
    (tmp_path / "in").mkdir()
    source = TarSource(str(write_shard(tmp_path / "in" / "a.tar", [(name, TEXT) for name in names])))
    assert [len(source.record(i).turns) for i in range(4)] == [1] * 4
    assert not outside.exists()
    assert source.record(3).key == "a\\n\\x1b[2J/b"
    assert source.place(3).isprintable()


def test_pickles_are_reported_and_never_loaded(
    tmp_path: Path, write_shard: WriteShard, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("something was unpickled")

    shard = write_shard(
        tmp_path / "a.tar",
        [("1.json", TEXT), *((f"1.{e}", pickle.dumps(print)) for e in ("pyd", "pickle", "pkl", "pth", "pt", "npy"))],
    )
    monkeypatch.setattr(pickle, "loads", refuse)
    monkeypatch.setattr(pickle, "load", refuse)
    source = TarSource(str(shard))
    assert source.record(0).media == ()
    assert source.report.unexpected.total() == 6


def test_links_folders_and_devices_are_counted_and_ignored(tmp_path: Path) -> None:
    shard = tmp_path / "a.tar"
    with tarfile.open(shard, "w") as tar:
        for name, kind in [("d", tarfile.DIRTYPE), ("1.jpg", tarfile.SYMTYPE), ("1.png", tarfile.LNKTYPE)]:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kind, "/etc/passwd"
            tar.addfile(info)
        for name, kind in [("1.gif", tarfile.FIFOTYPE), ("1.bmp", tarfile.CHRTYPE)]:
            info = tarfile.TarInfo(name)
            info.type = kind
            tar.addfile(info)
        info = tarfile.TarInfo("1.json")
        info.size = len(TEXT)
        tar.addfile(info, io.BytesIO(TEXT))
    source = TarSource(str(shard))
    assert dict(source.report.ignored) == {"folder": 1, "symbolic link": 1, "hard link": 1, "fifo": 1, "device": 1}
    assert source.record(0).media == ()


@pytest.mark.parametrize("kind", [b"1", b"2", b"5"])
def test_links_and_folders_have_no_data_whatever_their_size_field_says(tmp_path: Path, kind: bytes) -> None:
    shard = tmp_path / "a.tar"
    link = _seal(_header(b"l.txt", b"00000000004\0", kind))
    shard.write_bytes(link + _seal(_header(b"k.txt")) + b"a".ljust(512, b"\0") + bytes(1024))
    with tarfile.open(shard) as tar:
        assert [info.name for info in tar] == ["l.txt", "k.txt"]
    assert _headers(shard)[1] == TarMember("k.txt", 1024, 1)


def test_sparse_members_are_ignored_in_both_spellings_and_the_next_member_is_found(tmp_path: Path) -> None:
    old = _header(b"s.jpg", b"00000000004\0", b"S")
    old[257:265] = b"ustar  \0"
    old[482] = 1  # an extension block follows
    extension = bytearray(512)
    record = b"22 GNU.sparse.major=1\n"
    pax = _seal(_header(b"x", b"%011o\0" % len(record), b"x")) + record.ljust(512, b"\0")
    data = b"abcd".ljust(512, b"\0")
    last = _seal(_header(b"k.txt", b"00000000004\0")) + data
    shard = tmp_path / "a.tar"
    shard.write_bytes(
        _seal(old) + extension + data + pax + _seal(_header(b"t.jpg", b"00000000004\0")) + data + last + bytes(1024)
    )
    source = TarSource(str(shard))
    assert dict(source.report.ignored) == {"sparse file": 2}
    assert [source.record(i).key for i in range(len(source))] == ["k"]


def test_a_binary_size_is_understood(tmp_path: Path) -> None:
    header = _header(b"k.txt", b"\x80" + (4).to_bytes(11, "big"))
    shard = tmp_path / "a.tar"
    shard.write_bytes(_seal(header) + b"abcd".ljust(512, b"\0") + bytes(1024))
    assert _headers(shard) == [TarMember("k.txt", 512, 4)]


@pytest.mark.parametrize("cut", [1, 511, 512, 700, 1024, 1536, 2000])
def test_a_shard_cut_anywhere_is_an_error_that_names_place_and_remedy(
    tmp_path: Path, write_shard: WriteShard, cut: int
) -> None:
    # Members end at 1024 and 2048; a cut between two members leaves a tar that other readers take for whole.
    whole = write_shard(tmp_path / "a.tar", [("1.txt", b"a"), ("2.txt", b"b")], format=tarfile.USTAR_FORMAT)
    shard = tmp_path / "cut.tar"
    shard.write_bytes(whole.read_bytes()[:cut])
    with pytest.raises(SourceError, match=r"byte \d+.*cut.*Copy or build the shard again") as caught:
        TarSource(str(shard))
    assert "cut.tar" in str(caught.value)


def test_one_block_of_zeros_ends_an_archive(tmp_path: Path, write_shard: WriteShard) -> None:
    shard = write_shard(tmp_path / "a.tar", [("1.txt", b"a")], format=tarfile.USTAR_FORMAT)
    shard.write_bytes(shard.read_bytes()[:1536])
    assert len(TarSource(str(shard))) == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "the shard has 0 bytes"),
        (bytes(10240), "the shard holds no sample"),
        (b"\x1f\x8b\x08" + bytes(2000), "this is a gzip file, not a plain tar at shard .*byte 0. Decompress it"),
        (b"no tar" * 200, "no valid tar header: the checksum is wrong"),
        (_seal(_header(size=b"99999999999\0")) + bytes(2048), "the size field b'99999999999.*' is not a number"),
        (_seal(_header(size=b"\x80" + b"\xff" * 11)) + bytes(2048), "it was cut"),
        (_seal(_header(size=b"\xff" * 12)) + bytes(2048), "is not a number"),
        (_seal(_header(size=b"00777777777\0", kind=b"L")) + bytes(2048), "long name of 134217727 bytes exceeds 65536"),
        (_seal(_header(size=b"00777777777\0", kind=b"x")) + bytes(2048), "pax header of 134217727 bytes exceeds"),
        (_seal(_header(size=b"00000000010\0", kind=b"x")) + b"99 a=b\n".ljust(512, b"\0"), "pax header does not parse"),
        (
            _seal(_header(size=b"00000000010\0", kind=b"x")) + b"-8 a=b\n\0".ljust(512, b"\0"),
            "pax header does not parse",
        ),
        (_seal(_header(size=b"00000000013\0", kind=b"x")) + b"11 size=-5\n".ljust(512, b"\0"), "pax size b'-5'"),
    ],
)
def test_what_is_no_whole_tar_is_an_error(tmp_path: Path, content: bytes, message: str) -> None:
    shard = tmp_path / "bad.tar"
    shard.write_bytes(content)
    with pytest.raises(SourceError, match=message) as caught:
        TarSource(str(shard))
    assert "bad.tar" in str(caught.value)


def test_a_flipped_bit_in_a_header_is_found_by_its_checksum(tmp_path: Path, write_shard: WriteShard) -> None:
    shard = write_shard(tmp_path / "a.tar", [("1.txt", b"a"), ("2.txt", b"b")], format=tarfile.USTAR_FORMAT)
    content = bytearray(shard.read_bytes())
    content[1024] ^= 1
    shard.write_bytes(content)
    with pytest.raises(SourceError, match=r"the checksum is wrong at shard .*a.tar, byte 1024"):
        TarSource(str(shard))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(st.binary(max_size=64), st.integers(0, 511), st.sampled_from([b"0", b"L", b"x", b"g", b"S", b"K", b"?"]))
def test_any_header_ends_in_members_or_a_source_error(tmp_path: Path, junk: bytes, at: int, kind: bytes) -> None:
    header = _header(kind=kind)
    header[at : at + len(junk)] = junk
    shard = tmp_path / "fuzz.tar"
    shard.write_bytes(_seal(header[:512]) + junk.ljust(1024, b"\0") + bytes(1024))
    try:
        members = _headers(shard)
    except SourceError:
        return
    assert all(m.offset + m.size <= shard.stat().st_size for m in members if isinstance(m, TarMember))


def test_names_that_are_no_text_are_printable(tmp_path: Path) -> None:
    assert printable("ä b") == "ä b"
    shard = tmp_path / "a.tar"
    shard.write_bytes(_seal(_header(b"\xff\xfe.txt")) + b"a".ljust(512, b"\0") + bytes(1024))
    assert TarSource(str(shard)).record(0).key == "\\udcff\\udcfe"


def test_a_record_above_the_limit_is_not_read(tmp_path: Path, write_shard: WriteShard) -> None:
    shard = write_shard(tmp_path / "a.tar", [("1.json", TEXT.ljust(3000))])
    with pytest.raises(RecordError, match=r"member 1.json has 3000 bytes, above max_bytes=2999") as caught:
        TarSource(str(shard), limits=RecordLimits(max_bytes=2999)).record(0)
    assert caught.value.reason is Reason.BAD_RECORD


# --- shards by name


def test_braces_wildcards_home_and_lists_name_shards_in_order(
    tmp_path: Path, write_shard: WriteShard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    shards = [str(write_shard(tmp_path / f"s-{n}.tar", [(f"{n}.txt", b"x")])) for n in range(3)]
    spellings: list[str | Sequence[str]] = [
        "~/s-{0..2}.tar",
        f"{tmp_path}/s-?.tar",
        shards,
        f"file:{tmp_path}/s-{{0,1,2}}.tar",
    ]
    sources = [TarSource(spelling) for spelling in spellings]
    assert [list(source.shards) for source in sources] == [shards] * 4
    assert len({source.fingerprint for source in sources}) == 1
    assert [sources[0].record(i).key for i in range(3)] == ["0", "1", "2"]


def test_a_literal_name_with_braces_is_taken_as_it_is(tmp_path: Path, write_shard: WriteShard) -> None:
    shard = write_shard(tmp_path / "a{1..2}[x].tar", [("1.txt", b"x")])
    assert TarSource(str(shard)).shards == (str(shard),)


@pytest.mark.parametrize(
    ("urls", "message"),
    [
        ("nowhere-{0..1}.tar", "2 of 2 shards are missing or no files: nowhere-0.tar, nowhere-1.tar"),
        ("nowhere-*.tar", "no shard matches 'nowhere-[*].tar'"),
        (["a-*.tar", "b?.tar"], r"^no shard matches 'a-[*]\.tar', 'b[?]\.tar'\. Check"),
        ([], "no shard is named"),
        (".", r"1 of 1 shards are missing or no files: \..*For a folder write ./\*.tar"),
        ("pipe:rm -rf x", "'pipe:rm -rf x' is a command, not a file, and commands are not run"),
        ("ftp://host/a.tar", r"the scheme 'ftp' is not one of .*allow it: StorageOptions\(schemes="),
        ("s.tar.gz", "this is a compressed file, .* at shard .*s.tar.gz. Decompress it.*TarStream .*reads it as it"),
        ("s.tar.zst", r"not a plain tar at shard .*s.tar.zst. Decompress it.*Compressed again with gzip, bzip2 or xz"),
        ("s-{0..1.tar", "unbalanced braces"),
        ("{0..9}{0..99}.tar", "names more than 500 shards"),
    ],
)
def test_shards_that_cannot_be_opened_are_an_error(
    urls: str | list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(urls_module, "MAX_SHARDS", 500)
    with pytest.raises(SourceError, match=message):
        TarSource(urls)


@pytest.mark.parametrize("urls", ["nowhere-*.tar", "gone.tar", "pipe:x", "s-{0..1.tar"])
def test_no_name_of_a_class_is_the_place_of_an_error(urls: str) -> None:
    with pytest.raises(SourceError) as caught:
        TarSource(urls)
    assert "TarSource" not in str(caught.value)


def test_a_member_that_is_not_read_is_named_where_a_medium_is_missing(tmp_path: Path, write_shard: WriteShard) -> None:
    members = [("0.txt", b"x"), ("0.cls", b"1"), ("a.json", _chat(1)), ("a.0.svg", b"<svg/>"), ("a.cls", b"1")]
    members += [("b.json", _chat(1))]
    source = TarSource(str(write_shard(tmp_path / "s.tar", members)))
    with pytest.raises(RecordError, match=r"\(no media\); members that are not read as media: a.0.svg, a.cls at shard"):
        source.record(1)
    with pytest.raises(RecordError, match=r"\(no media\) at shard"):
        pickle.loads(pickle.dumps(source)).record(2)
    assert source.record(0).key == "0"


def test_a_shard_that_is_listed_twice_is_an_error(small_shard: Path) -> None:
    with pytest.raises(SourceError, match=r"listed twice: .*small.tar"):
        TarSource([str(small_shard), str(small_shard)])


# --- reading


@pytest.mark.parametrize("i", [-1, 6])
def test_ids_outside_the_source_are_refused(small_shard: Path, i: int) -> None:
    source = TarSource(str(small_shard))
    with pytest.raises(IndexError, match=f"sample {i} is not one of the 6 samples"):
        source.record(i)
    with pytest.raises(IndexError, match=f"medium {i} is not one of the 1 media of shard"):
        source.media_bytes(1, i)


def test_a_reader_never_leaves_its_member(small_shard: Path) -> None:
    source = TarSource(str(small_shard))
    reader, whole = source.media_reader(2, 1), source.media_bytes(2, 1)
    assert reader.size == len(whole)
    for offset, size in [(0, 10), (5, 10**9), (len(whole) - 1, 5), (len(whole), 4), (10**9, 4), (3, 0), (0, -1)]:
        assert reader.read(offset, size) == whole[offset : offset + max(size, 0)]


def test_the_source_travels_by_pickle_without_its_handles(small_shard: Path) -> None:
    source = TarSource(str(small_shard))
    first = source.media_bytes(1, 0)
    copy = pickle.loads(pickle.dumps(source))
    assert copy.fingerprint == source.fingerprint
    assert copy.media_bytes(1, 0) == first
    assert copy.record(5) == source.record(5)


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning")
def test_child_processes_read_the_same_bytes(small_shard: Path, method: str) -> None:
    source = TarSource(str(small_shard))
    expected = source.media_bytes(2, 2)
    with multiprocessing.get_context(method).Pool(2) as pool:
        assert pool.starmap(source.media_bytes, [(2, 2)] * 8) == [expected] * 8


def test_threads_read_while_the_cache_of_handles_turns_over(
    tmp_path: Path, write_shard: WriteShard, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in range(12):
        write_shard(tmp_path / f"s{n:02d}.tar", [("k.json", _chat(1)), ("k.jpg", bytes([n]) * 4000)])
    source = TarSource(str(tmp_path / "*.tar"), storage=Storage(StorageOptions(max_open_files=2)))
    before = len(os.listdir("/proc/self/fd"))
    with ThreadPoolExecutor(4) as pool:
        read = list(pool.map(lambda n: source.media_bytes(n, 0), list(range(12)) * 20))
    assert read == [bytes([n]) * 4000 for n in range(12)] * 20
    assert len(os.listdir("/proc/self/fd")) <= before + 2


def test_a_shard_that_changed_after_opening_is_an_error(tmp_path: Path, write_shard: WriteShard) -> None:
    shard = write_shard(tmp_path / "a.tar", [("1.json", TEXT)])
    source = TarSource(str(shard))
    write_shard(shard, [("1.json", TEXT), ("2.json", TEXT.ljust(20_000))])
    with pytest.raises(SourceError, match=r"has changed since it was opened: it had \d+ bytes and has \d+"):
        source.record(0)
    shard.unlink()
    with pytest.raises(FileNotFoundError):
        source.record(0)


def test_a_shard_that_shrinks_while_it_is_read_is_an_error(tmp_path: Path, write_shard: WriteShard) -> None:
    shard = write_shard(tmp_path / "a.tar", [("1.json", TEXT), ("2.json", TEXT)])
    source = TarSource(str(shard))
    source.record(0)
    os.truncate(shard, 700)
    with pytest.raises(SourceError, match=r"has changed since it was opened: it had \d+ bytes and has 700"):
        source.record(1)


def test_the_fingerprint_follows_names_sizes_and_members_but_not_the_folder(
    tmp_path: Path, write_shard: WriteShard
) -> None:
    def fingerprint(folder: str, name: str, members: list[tuple[str, bytes]]) -> str:
        (tmp_path / folder).mkdir()
        return TarSource(str(write_shard(tmp_path / folder / name, members))).fingerprint

    reference = fingerprint("a", "s.tar", [("1.txt", b"x"), ("2.txt", b"y")])
    assert fingerprint("b", "s.tar", [("1.txt", b"x"), ("2.txt", b"y")]) == reference
    others = [
        fingerprint("c", "t.tar", [("1.txt", b"x"), ("2.txt", b"y")]),
        fingerprint("d", "s.tar", [("1.txt", b"xx"), ("2.txt", b"y")]),
        fingerprint("e", "s.tar", [("2.txt", b"x"), ("1.txt", b"y")]),
        fingerprint("f", "s.tar", [("1.txt", b"x")]),
    ]
    assert len({reference, *others}) == 5


def test_opening_reads_headers_only(tmp_path: Path, write_shard: WriteShard, monkeypatch: pytest.MonkeyPatch) -> None:
    shard = write_shard(
        tmp_path / "a.tar", [(f"{n}.txt", b"x" * 100_000) for n in range(5)], format=tarfile.USTAR_FORMAT
    )
    reads: list[int] = []
    pread = os.pread

    def counting(fd: int, size: int, offset: int) -> bytes:
        reads.append(size)
        return pread(fd, size, offset)

    monkeypatch.setattr(os, "pread", counting)
    TarSource(str(shard))
    assert reads == [512] * 6  # five members and the end


def test_the_media_of_a_sample_are_found_once_however_many_there_are(
    tmp_path: Path, write_shard: WriteShard, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = TEXT.replace(b"Hi", b"<image><video>" * 40)
    media = [(f"a.{j}.{'mp4' if j < 40 else 'png'}", bytes([j])) for j in range(80)]
    source = TarSource(str(write_shard(tmp_path / "a.tar", [("a.json", text), *media])))
    parsed: list[str] = []
    real = tar_source.parse_record

    def counted(*args: object, **options: object) -> object:
        parsed.append(str(options["key"]))
        return real(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(tar_source, "parse_record", counted)
    found = [source.media_bytes(0, j)[0] for j in range(80)]
    assert found == [number for j in range(40) for number in (40 + j, j)]
    assert parsed == ["a"]  # once for all of them, not once for each


def test_a_field_that_is_there_twice_is_found_in_any_spelling(tmp_path: Path, write_shard: WriteShard) -> None:
    shard = write_shard(tmp_path / "a.tar", [("a.json", TEXT), ("a.PNG", b"1"), ("a.png", b"2")])
    with pytest.raises(SourceError, match=r"key a has two members \.png"):
        TarSource(str(shard))


def test_a_path_that_no_report_can_hold_is_refused(tmp_path: Path, write_shard: WriteShard) -> None:
    shard = write_shard(tmp_path / "\udcff.tar", [("a.json", TEXT)])
    with pytest.raises(SourceError, match=r"not UTF-8 text: .*udcff.tar.* Rename them"):
        TarSource(str(shard))


# --- tar bombs


def test_more_members_than_allowed_are_an_error_and_not_a_full_memory(
    tmp_path: Path, write_shard: WriteShard, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = write_shard(tmp_path / "a.tar", [(f"{n}.txt", b"") for n in range(101)])
    monkeypatch.setattr(tar_headers, "MAX_MEMBERS", 100)
    with pytest.raises(SourceError, match=r"more than 100 members.* at shard .*a.tar. Split the shard"):
        TarSource(str(shard))


def test_longer_names_than_allowed_are_an_error(
    tmp_path: Path, write_shard: WriteShard, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = write_shard(tmp_path / "a.tar", [(f"{'n' * 5000}{n}.txt", b"") for n in range(3)])
    monkeypatch.setattr(tar_headers, "MAX_ALL_NAMES_BYTES", 12_000)
    with pytest.raises(SourceError, match=r"or 12000 bytes of names at shard .*a.tar"):
        TarSource(str(shard))


def test_ten_thousand_headers_cost_little_memory_each(tmp_path: Path) -> None:
    header = _header(b"%08d.t%d.txt" % (0, 0), b"00000000000\0")
    with (tmp_path / "a.tar").open("wb") as file:
        for n in range(10_000):
            header[:21] = b"%08d.x%07d.x\0\0" % (n, n)
            file.write(_seal(header))
        file.write(bytes(1024))
    tracemalloc.start()
    source = TarSource(str(tmp_path / "a.tar"))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10_000 * 512, "less than the headers themselves"
    assert len(source.report.unexpected) == 1001, "of ten thousand suffixes a thousand are named"
    assert source.report.unexpected["others"] == 9000
    assert len(pickle.dumps(source)) < 10_000 * 80


def test_a_sparse_file_that_claims_to_be_large_is_no_more_than_it_is(tmp_path: Path) -> None:
    shard = tmp_path / "a.tar"
    with shard.open("wb") as file:
        file.write(_seal(_header(b"a.txt", b"\x80" + (2**40).to_bytes(11, "big"))))
        file.truncate(2**40 + 512)  # a hole; the end-of-archive block is missing
    with pytest.raises(SourceError, match=r"ends at byte 1099511628288 without its end-of-archive block"):
        TarSource(str(shard))
    with shard.open("r+b") as file:
        file.truncate(2**40 + 1024)
    source = TarSource(str(shard))
    with pytest.raises(RecordError, match="has 1099511627776 bytes, above max_bytes"):
        source.record(0)


def test_a_size_in_a_pax_header_beyond_the_file_is_an_error(tmp_path: Path) -> None:
    record = b"23 size=99999999999999\n"
    shard = tmp_path / "a.tar"
    pax = _seal(_header(b"x", b"%011o\0" % len(record), b"x")) + record.ljust(512, b"\0")
    shard.write_bytes(pax + _seal(_header(b"k.txt")) + bytes(1536))
    with pytest.raises(SourceError, match=r"member k.txt needs 99999999999999 bytes .* it was cut"):
        TarSource(str(shard))


# --- two shards of one name, and keys with dots and folders (DR-10), scattered or several media (DR-11)


def test_shards_of_one_name_in_different_folders_are_told_apart(tmp_path: Path, write_shard: WriteShard) -> None:
    shards = []
    for name in "ab":
        (tmp_path / name).mkdir()
        shards.append(str(write_shard(tmp_path / name / "s.tar", [("1.json", _chat(1))])))
    source = TarSource(shards)
    assert [source.place(i) for i in range(2)] == [f"shard {shard}, key 1" for shard in shards]
    for i, shard in enumerate(shards):
        with pytest.raises(RecordError, match=re.escape(shard)):
            source.record(i)


def test_a_shard_is_the_same_by_a_relative_and_by_an_absolute_name(
    tmp_path: Path, write_shard: WriteShard, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = write_shard(tmp_path / "a.tar", [("1.txt", b"x")])
    monkeypatch.chdir(tmp_path)
    source = TarSource("a.tar", members=tmp_path / "members")
    sent = pickle.dumps(source)
    monkeypatch.chdir("/")
    assert pickle.loads(sent).record(0).shard == str(shard)
    with pytest.raises(SourceError, match="listed twice"):
        TarSource([str(shard), f"file:{shard.parent}/./a.tar"])


def test_dr10_dots_in_folders_and_base_names_merge_and_lose_nothing(tmp_path: Path, write_shard: WriteShard) -> None:
    members = [("train.v1/0001.json", _chat(1)), ("train.v1/0001.jpg", b"a"), ("train.v1/22.05.png", b"b")]
    members += [("train.v2/0001.json", _chat(1)), ("train.v2/0001.jpg", b"c")]
    source = TarSource(str(write_shard(tmp_path / "a.tar", members)), members=tmp_path / "members")
    assert [source.table.key(i) for i in range(3)] == ["train.v1/0001", "train.v1/22", "train.v2/0001"]
    assert [source.media_bytes(i, 0) for i in (0, 2)] == [b"a", b"c"]
    assert "1 of 3 samples (33.3 %) have no .json or .txt: train.v1/22" in source.report.lines()


@pytest.mark.parametrize("kept", [False, True])
def test_dr11_a_sample_of_three_images_is_whole_and_scattered_members_are_refused(
    kept: bool, tmp_path: Path, write_shard: WriteShard
) -> None:
    folder = tmp_path / "members" if kept else None
    members = [("1.json", _chat(3)), *((f"1.{j}.jpg", bytes([j])) for j in range(3)), ("2.json", TEXT)]
    source = TarSource(str(write_shard(tmp_path / "a.tar", members)), members=folder)
    assert [source.media_bytes(0, j) for j in range(3)] == [b"\0", b"\1", b"\2"]
    assert len(source.record(0).media) == 3
    images_first = [("1.jpg", b"x"), ("2.jpg", b"x"), ("1.json", _chat(1)), ("2.json", _chat(1))]
    with pytest.raises(SourceError, match="do not follow each other"):
        TarSource(str(write_shard(tmp_path / "b.tar", images_first)), members=folder)


def test_a_prefetch_is_a_hint_that_any_source_takes(small_shard: Path) -> None:
    source = TarSource(str(small_shard))
    prefetch(source, [0, 5])
    prefetch(SubsetSource(source, [1]), [0], media=False)
    with pytest.raises(IndexError, match="sample 6 is not one of"):
        prefetch(source, [6])
