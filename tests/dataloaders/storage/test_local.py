"""Local files: exact ranges, bounded handles, and files that change or vanish."""

import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dataloaders.errors import SourceError
from dataloaders.storage import FileState, Storage, StorageCounters, StorageOptions, StoredFile


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "a.bin"
    path.write_bytes(bytes(range(200)))
    return path


def test_ranges_are_exact_and_bounded_by_the_file(file: Path) -> None:
    opened = Storage().open(str(file))
    assert isinstance(opened, StoredFile)
    assert (opened.size, opened.state.size, opened.state.url) == (200, 200, str(file))
    assert opened.read(10, 5) == bytes(range(10, 15))
    assert opened.read(200, 0) == b""
    for offset, size in [(199, 2), (-1, 2), (0, -1), (0, 10**15), (10**30, 1)]:
        with pytest.raises(SourceError, match=rf"bytes {offset} to .* not in a file of 200 bytes at .*a.bin"):
            opened.read(offset, size)


def test_read_many_keeps_the_order_and_repeats(file: Path) -> None:
    wanted = [(str(file), 100, 2), (str(file), 0, 3), (f"file:{file}", 100, 2), (str(file), 5, 0)]
    storage = Storage()
    storage.prefetch(wanted)  # nothing to do, nothing to fail
    assert storage.read_many(wanted) == [b"de", b"\0\1\2", b"de", b""]
    assert storage.counters == StorageCounters()


def test_states_name_every_missing_file(file: Path) -> None:
    (state,) = Storage().states([str(file)])
    assert state == FileState(url=str(file), size=200, stamp=str(file.stat().st_mtime_ns))
    with pytest.raises(SourceError, match=r"2 of 3 shards are missing or no files: /nowhere/x, /nowhere/y"):
        Storage().states(["/nowhere/x", str(file), "/nowhere/y"])


@pytest.mark.parametrize("held_open", [False, True])
def test_a_file_that_has_changed_is_an_error(file: Path, held_open: bool) -> None:
    storage = Storage()
    (expect,) = storage.states([str(file)])
    if held_open:
        storage.open(str(file), expect)
    os.utime(file, ns=(1, 1))
    with pytest.raises(SourceError, match=r"has changed since it was opened: its stamp was \d+ and is 1 at .*a.bin"):
        storage.open(str(file), expect)
    file.write_bytes(b"abc")
    with pytest.raises(SourceError, match=r"has changed since it was opened: it had 200 bytes and has 3"):
        storage.open(str(file), expect)


def test_a_file_that_is_cut_while_it_is_open_is_an_error(file: Path) -> None:
    opened = Storage().open(str(file))
    os.truncate(file, 50)
    with pytest.raises(SourceError, match=r"it ends 10 bytes early"):
        opened.read(40, 20)


def test_handles_are_bounded_and_readers_keep_theirs(tmp_path: Path) -> None:
    urls = []
    for n in range(12):
        (tmp_path / f"{n}").write_bytes(bytes([n]) * 4000)
        urls.append(str(tmp_path / f"{n}"))
    storage = Storage(StorageOptions(max_open_files=2))
    first = storage.open(urls[0])
    before = len(os.listdir("/proc/self/fd"))
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda i: storage.read_many([(urls[i % 12], 0, 4000)])[0], range(600)))
    assert answers == [bytes([i % 12]) * 4000 for i in range(600)]
    assert len(os.listdir("/proc/self/fd")) <= before + 2
    assert first.read(0, 1) == b"\0"


def test_a_storage_travels_by_pickle_as_its_options(file: Path) -> None:
    storage = Storage(StorageOptions(max_open_files=3, protocol_options={"s3": {"anon": True}}))
    storage.open(str(file))
    copy = pickle.loads(pickle.dumps(storage))
    assert copy.options == storage.options
    assert copy.read_many([(str(file), 1, 1)]) == [b"\1"]


@pytest.mark.parametrize(
    "wrong", [{"max_in_flight": 0}, {"timeout_s": 0}, {"max_waste": -0.1}, {"max_tries": 0}, {"hedge_factor": -1.0}]
)
def test_options_that_make_no_sense_are_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(wrong))}=.* must be"):
        StorageOptions(**wrong)  # type: ignore[arg-type]
