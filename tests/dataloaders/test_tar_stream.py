"""Tars as streams: the samples of `TarSource`, whatever carries them, and bounds on what a hostile one may cost."""

import gzip
import io
import json
import os
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataloaders.byte_stream import MIB, ForwardReader, StreamLimits
from dataloaders.errors import DataError, Reason, SourceError
from dataloaders.raw_sample import BadRecord, RawSample
from dataloaders.tar_source import TarSource
from dataloaders.tar_stream import TarStream

Members = list[tuple[str, bytes]]
EXTENSIONS = {"tar": "w", "tar.gz": "w:gz", "tar.bz2": "w:bz2", "tar.xz": "w:xz"}


def write(path: Path, members: Members, mode: str = "w") -> str:
    with tarfile.open(path, mode) as tar:  # type: ignore[call-overload]
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return str(path)


def chat(text: str) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": text}]}).encode()


def all_of(stream: TarStream, cursor: int = 0) -> list[RawSample | BadRecord]:
    return [item for lane in range(stream.lanes) for _, item in stream.read(lane, cursor)]


@pytest.fixture(scope="module")
def members(small_shard: Path) -> Members:
    with tarfile.open(small_shard) as tar:
        return [(info.name, tar.extractfile(info).read()) for info in tar]  # type: ignore[union-attr]


@pytest.mark.parametrize("extension", EXTENSIONS)
def test_a_stream_has_the_samples_of_the_source(members: Members, tmp_path: Path, extension: str) -> None:
    plain = TarSource(write(tmp_path / "a.tar", members))
    found = all_of(TarStream(write(tmp_path / f"b.{extension}", members, EXTENSIONS[extension])))
    assert len(found) == len(plain) == 6
    for i, sample in enumerate(found):
        assert isinstance(sample, RawSample)
        record = plain.record(i)
        assert (sample.record.key, sample.record.turns) == (record.key, record.turns)
        assert sample.record.media == record.media
        assert sample.media == tuple(plain.media_bytes(i, j) for j in range(len(record.media)))


def test_the_name_of_a_compressed_shard_does_not_matter(members: Members, tmp_path: Path) -> None:
    path = write(tmp_path / "named-otherwise.tar", members, "w:gz")
    assert len(all_of(TarStream(path))) == 6


def test_compressed_streams_one_after_another_are_one(members: Members, tmp_path: Path) -> None:
    raw = Path(write(tmp_path / "a.tar", members)).read_bytes()
    half = len(raw) // 2
    path = tmp_path / "a.tar.gz"
    path.write_bytes(gzip.compress(raw[:half]) + gzip.compress(raw[half:]))
    assert len(all_of(TarStream(str(path)))) == 6


def test_going_on_in_a_plain_shard_reads_headers_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tar", [(f"{k}.txt", b"x" * (3 * MIB)) for k in range(8)])
    read: list[int] = []
    stream = TarStream(path)
    opened = stream._storage.open

    class Watched:
        def __init__(self) -> None:
            self.file = opened(path)
            self.size = self.file.size

        def read(self, offset: int, size: int) -> bytes:
            read.append(size)
            return self.file.read(offset, size)

    stream._storage.open = lambda url, expect=None: Watched()  # type: ignore[method-assign, assignment, return-value]
    assert [position for position, _ in stream.read(0, 7)] == [7]
    assert sum(read) <= os.path.getsize(path)


def test_a_pipe_is_refused_unless_asked_for_and_runs_when_it_is(members: Members, tmp_path: Path) -> None:
    path = write(tmp_path / "a.tar.gz", members, "w:gz")
    with pytest.raises(SourceError, match="commands are not run unless that is asked for"):
        TarStream(f"pipe:cat {path}")
    assert len(all_of(TarStream(f"pipe:cat {path}", allow_pipe=True))) == 6
    assert len(all_of(TarStream(f"pipe:gzip -dc {path}", allow_pipe=True), cursor=4)) == 2


def test_a_command_that_fails_behind_a_whole_archive_is_an_error(members: Members, tmp_path: Path) -> None:
    path = write(tmp_path / "a.tar", members)
    with pytest.raises(SourceError, match="the command ended with status 3"):
        all_of(TarStream(f"pipe:cat {path}; exit 3", allow_pipe=True))


def test_a_command_that_hangs_is_an_error_and_not_a_wait(members: Members, tmp_path: Path) -> None:
    path = write(tmp_path / "a.tar", members)
    stream = TarStream(f"pipe:head -c 2000 {path}; sleep 1000", allow_pipe=True, bounds=StreamLimits(silence_s=0.2))
    with pytest.raises(SourceError, match=r"the command has printed nothing for 0\.2 s"):
        all_of(stream)


def test_files_and_commands_keep_their_order(members: Members, tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{name}.tar", members) for name in "abc"]
    urls = [paths[2], f"pipe:cat {paths[1]}", paths[0]]
    assert list(TarStream(urls, allow_pipe=True).shards) == urls
    with pytest.raises(SourceError, match="listed twice"):
        TarStream([urls[1], urls[1]], allow_pipe=True)


def ended(pid: int) -> bool:
    """Whether a process is gone, or waits to be collected by whoever adopted it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


def test_closing_a_stream_ends_the_command_and_what_it_started(members: Members, tmp_path: Path) -> None:
    path, pid = write(tmp_path / "a.tar", members), tmp_path / "pid"
    command = f"pipe:(sleep 1000 & echo $! > {pid}; cat {path}; wait)"
    read = TarStream(command, allow_pipe=True).read(0, 0)
    next(read)
    child = int(pid.read_text())
    read.close()  # type: ignore[attr-defined]
    for _ in range(600):  # the signal is sent; a busy machine may take its time to deliver it
        if ended(child):
            break
        time.sleep(0.05)
    assert ended(child)


@pytest.fixture(scope="module")
def bomb(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A .tar.gz of 1 MB that holds one member of 1 GiB of zeros."""
    path = tmp_path_factory.mktemp("bomb") / "bomb.tar.gz"
    info = tarfile.TarInfo("0.jpg")
    info.size = 1024 * MIB
    zeros = gzip.compress(bytes(64 * MIB), compresslevel=1)
    path.write_bytes(gzip.compress(info.tobuf()) + zeros * 16 + gzip.compress(bytes(10_240)))
    assert path.stat().st_size < 6 * MIB
    return str(path)


def test_a_bomb_ends_at_a_multiple_of_its_size(bomb: str) -> None:
    limits = StreamLimits(max_expansion=20)
    with pytest.raises(SourceError, match=r"bytes decompress to more than \d+: more than 20 times as much"):
        all_of(TarStream(bomb, bounds=limits))


def test_a_bomb_costs_no_memory_where_its_expansion_is_allowed(bomb: str) -> None:
    script = (
        "import resource, sys\n"
        "from dataloaders.byte_stream import StreamLimits\n"
        "from dataloaders.tar_stream import TarStream\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "stream = TarStream(sys.argv[1], bounds=StreamLimits(max_expansion=10_000))\n"
        "(pair,) = stream.read(0, 0)\n"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, bomb], capture_output=True, text=True, check=True, timeout=120)
    assert int(done.stdout) < 64 * 1024  # KiB


def test_a_shard_is_bounded_in_all(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tar", [(f"{k}.txt", b"x" * MIB) for k in range(8)])
    with pytest.raises(SourceError, match="more than max_shard_bytes=4194304"):
        all_of(TarStream(path, bounds=StreamLimits(max_shard_bytes=4 * MIB)))


def test_a_member_or_a_sample_that_is_too_large_is_bad_and_the_next_one_is_not(tmp_path: Path) -> None:
    large: Members = [("0.json", chat("<image>")), ("0.jpg", b"x" * 3000)]
    many: Members = [("1.json", chat("<image>" * 4)), *((f"1.{j}.jpg", b"x" * 900) for j in range(4))]
    path = write(tmp_path / "a.tar", [*large, *many, ("2.json", chat("fine"))])
    found = all_of(TarStream(path, bounds=StreamLimits(max_member_bytes=2000, max_sample_bytes=3000)))
    assert [isinstance(item, BadRecord) for item in found] == [True, True, False]
    reasons = {str(item.error.reason) for item in found if isinstance(item, BadRecord)}
    assert reasons == {"too_large"}
    assert len(all_of(TarStream(path))) == 3


def test_names_that_alternate_do_not_get_round_the_bound(tmp_path: Path) -> None:
    # Folders of metadata between the members of one key start no sample, and their files are kept until it is complete.
    members: Members = [("0.json", chat("<image>" * 40))]
    for j in range(40):
        members += [(f"__{j}__/{j}.jpg", b"x" * 900), (f"0.{j}.jpg", b"x" * 900)]
    path = write(tmp_path / "a.tar", members)
    (whole,) = all_of(TarStream(path))
    assert isinstance(whole, RawSample)
    (bounded,) = all_of(TarStream(path, bounds=StreamLimits(max_sample_bytes=3000)))
    assert isinstance(bounded, BadRecord)
    assert bounded.error.reason is Reason.TOO_LARGE


@pytest.mark.parametrize("extension", EXTENSIONS)
def test_a_cut_shard_is_an_error_and_what_came_before_is_read(tmp_path: Path, extension: str) -> None:
    whole = Path(write(tmp_path / f"a.{extension}", [(f"{k}.txt", os.urandom(2000)) for k in range(20)]))
    if mode := EXTENSIONS[extension].partition(":")[2]:
        write(whole, [(f"{k}.txt", os.urandom(2000)) for k in range(20)], f"w:{mode}")
    cut = tmp_path / f"cut.{extension}"
    cut.write_bytes(whole.read_bytes()[:-12_000])
    read = TarStream(str(cut)).read(0, 0)
    with pytest.raises(SourceError, match="cut"):
        list(read)


def test_a_damaged_compressed_shard_is_an_error(tmp_path: Path) -> None:
    path = Path(write(tmp_path / "a.tar.gz", [(f"{k}.txt", os.urandom(2000)) for k in range(20)], "w:gz"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 255
    path.write_bytes(data)
    with pytest.raises(SourceError):
        all_of(TarStream(str(path)))


def test_shards_that_hold_nothing_or_another_format_are_errors(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="holds no sample"):
        all_of(TarStream(write(tmp_path / "empty.tar", [])))
    zstd = tmp_path / "a.tar.zst"
    zstd.write_bytes(b"\x28\xb5\x2f\xfd" + bytes(100))
    with pytest.raises(SourceError, match="zstd"):
        all_of(TarStream(str(zstd)))
    with pytest.raises(SourceError, match="missing"):
        TarStream(str(tmp_path / "gone.tar"))
    with pytest.raises(DataError, match="lanes=0"):
        TarStream(str(tmp_path / "empty.tar"), lanes=0)


def test_a_shard_that_changes_after_it_was_listed_is_an_error(members: Members, tmp_path: Path) -> None:
    path = write(tmp_path / "a.tar", members)
    stream = TarStream(path)
    write(tmp_path / "a.tar", members[:-2])
    with pytest.raises(SourceError, match="changed"):
        all_of(stream)


def test_the_fingerprint_knows_lanes_names_and_sizes_but_no_folder(members: Members, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    paths = [write(tmp_path / name, members) for name in ("a.tar", "b.tar", "other/a.tar")]
    assert TarStream(paths[0]).fingerprint == TarStream(paths[2]).fingerprint
    prints = {
        TarStream(paths[:2]).fingerprint,
        TarStream(paths[:2], lanes=1).fingerprint,
        TarStream(paths[1]).fingerprint,
    }
    assert len(prints) == 3


@given(st.lists(st.binary(max_size=50), max_size=8), st.data())
def test_a_forward_reader_gives_the_bytes_at_rising_offsets(chunks: list[bytes], data: st.DataObject) -> None:
    whole, at = b"".join(chunks), 0

    def pieces() -> Iterator[bytes]:
        yield from chunks

    reader = ForwardReader(pieces(), place="here")
    while data.draw(st.booleans()):
        offset = at + data.draw(st.integers(0, 20))
        size = data.draw(st.integers(0, 60))
        if offset + size > len(whole):
            with pytest.raises(SourceError, match="cut"):
                reader.read(offset, size + 1)
            return
        assert reader.read(offset, size) == whole[offset : offset + size]
        at = offset + size
    if at:
        with pytest.raises(SourceError, match="passed already"):
            reader.read(at - 1, 1)


def test_what_is_said_of_a_compressed_shard_is_what_a_stream_does(members: Members, tmp_path: Path) -> None:
    plain = Path(write(tmp_path / "plain.tar", members))
    for suffix, data in {
        "gz": gzip.compress(plain.read_bytes()),
        "zst": b"\x28\xb5\x2f\xfd" + bytes(2000),
        "lz4": b"\x04\x22\x4d\x18" + bytes(2000),
    }.items():
        for name in (f"a.tar.{suffix}", f"{suffix}.tar"):  # told by the name, and by the first bytes
            shard = tmp_path / name
            shard.write_bytes(data)
            with pytest.raises(SourceError) as refused:
                TarSource(str(shard))
            assert ("TarStream (no index" in str(refused.value)) == (suffix == "gz")
            if suffix == "gz":
                assert len(all_of(TarStream(str(shard)))) == 6
            else:
                with pytest.raises(SourceError):
                    all_of(TarStream(str(shard)))
