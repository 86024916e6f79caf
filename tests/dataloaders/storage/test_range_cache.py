"""The local cache: right bytes or none, whatever was killed, cut, removed or full."""

import errno
import logging
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dataloaders.storage.base import FileState
from dataloaders.storage.range_cache import RangeCache

CONTENT = random.Random(1).randbytes(100_000)
STATE = FileState(url="https://h/../../etc/a.tar", size=len(CONTENT), stamp='"1"')


def _put(cache: RangeCache, offset: int, size: int, state: FileState = STATE) -> None:
    cache.put(state, offset, CONTENT[offset : offset + size])


def _files(folder: Path, ending: str) -> list[Path]:
    return sorted(folder.glob(f"*{ending}"))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 2000), st.integers(1, 500)), max_size=30), st.booleans())
def test_what_is_found_is_what_was_stored(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[bool, int, int]], reopen: bool
) -> None:
    cache, stored = RangeCache(tmp_path_factory.mktemp("c"), 10**8), list[tuple[int, int]]()
    for is_put, offset, size in steps:
        if is_put:
            _put(cache, offset, size)
            stored.append((offset, size))
        if reopen:
            cache.close()
        found = cache.get(STATE, offset, size)
        if any(start <= offset and offset + size <= start + length for start, length in stored):
            assert found == CONTENT[offset : offset + size]
        else:
            assert found is None
    cache.close()


def test_names_on_disk_are_hashes_and_private(tmp_path: Path) -> None:
    cache = RangeCache(tmp_path / "deep" / "cache", 10**7)
    _put(cache, 0, 100)
    names = [path.name for path in (tmp_path / "deep" / "cache").iterdir()]
    assert all(len(name.partition(".")[0]) == 40 or name == "lock" for name in names)
    assert (tmp_path / "deep" / "cache").stat().st_mode & 0o077 == 0
    cache.close()


def test_another_stamp_is_another_file_and_no_stamp_is_never_stored(tmp_path: Path) -> None:
    cache = RangeCache(tmp_path, 10**7)
    _put(cache, 0, 100)
    newer = FileState(url=STATE.url, size=STATE.size, stamp='"2"')
    unknown = FileState(url=STATE.url, size=STATE.size, stamp="")
    _put(cache, 0, 100, unknown)
    assert cache.get(newer, 0, 100) is None
    assert cache.get(unknown, 0, 100) is None
    assert cache.holds(STATE, 10, 50)
    assert not cache.holds(newer, 10, 50)
    cache.close()


def test_flipped_bytes_and_torn_records_are_never_returned(tmp_path: Path) -> None:
    cache = RangeCache(tmp_path, 10**7)
    _put(cache, 0, 1000)
    _put(cache, 5000, 1000)
    cache.close()
    (data,), (ranges,) = _files(tmp_path, ".data"), _files(tmp_path, ".ranges")
    with data.open("r+b") as file:
        file.seek(500)
        file.write(bytes([CONTENT[500] ^ 1]))
    with ranges.open("ab") as file:
        file.write(b"torn")
    cache = RangeCache(tmp_path, 10**7)
    assert cache.get(STATE, 0, 1000) is None
    assert cache.get(STATE, 5000, 1000) == CONTENT[5000:6000]
    _put(cache, 0, 1000)
    _put(cache, 8000, 10)
    cache.close()
    cache = RangeCache(tmp_path, 10**7)
    assert cache.get(STATE, 0, 1000) == CONTENT[:1000]
    assert cache.get(STATE, 8000, 10) == CONTENT[8000:8010]
    cache.close()


@pytest.mark.parametrize("cut", [0, 1, 23, 24, 30, 47])
def test_a_cut_list_of_ranges_loses_only_what_it_lost(tmp_path: Path, cut: int) -> None:
    cache = RangeCache(tmp_path, 10**7)
    _put(cache, 0, 1000)
    _put(cache, 5000, 1000)
    cache.close()
    os.truncate(_files(tmp_path, ".ranges")[0], cut)
    cache = RangeCache(tmp_path, 10**7)
    for number, offset in enumerate((0, 5000)):
        expected = CONTENT[offset : offset + 1000] if cut >= 24 * (number + 1) else None
        assert cache.get(STATE, offset, 1000) == expected
    cache.close()


def test_disk_use_stays_within_the_bound_and_the_oldest_file_goes_first(tmp_path: Path) -> None:
    limit = 2_000_000
    cache = RangeCache(tmp_path, limit)
    states = [FileState(url=f"https://h/{n}", size=len(CONTENT), stamp="s") for n in range(60)]
    for n, state in enumerate(states):
        _put(cache, 0, 100_000, state)
        for path in (*_files(tmp_path, ".data"), *_files(tmp_path, ".ranges")):
            if path.stat().st_mtime > 1e9:
                os.utime(path, (n, n))  # one second apart, however fast this runs
    used = sum(path.stat().st_blocks * 512 for path in tmp_path.iterdir())
    assert limit * 0.5 <= used <= limit * 1.2
    assert cache.get(states[-1], 0, 1000) == CONTENT[:1000]
    assert cache.get(states[0], 0, 1000) is None
    cache.close()


def test_a_copy_that_another_process_removed_is_made_anew(tmp_path: Path) -> None:
    cache = RangeCache(tmp_path, 10**7)
    _put(cache, 0, 1000)
    for path in tmp_path.iterdir():
        path.unlink()
    assert cache.get(STATE, 0, 1000) is None
    _put(cache, 0, 1000)
    assert cache.get(STATE, 0, 1000) == CONTENT[:1000]
    assert RangeCache(tmp_path, 10**7).get(STATE, 0, 1000) == CONTENT[:1000]
    cache.close()


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_disk_that_fails_turns_the_cache_off_with_one_message(
    tmp_path: Path, code: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cache = RangeCache(tmp_path, 10**7)
    _put(cache, 0, 100)

    def fail(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "pwrite", fail)
    with caplog.at_level(logging.WARNING, "dataloaders.storage"):
        for offset in range(1000, 1010):
            _put(cache, offset, 100)
    assert [record.getMessage() for record in caplog.records] == [
        f"the range cache at {tmp_path} is not used any more: {os.strerror(code)}"
    ]
    assert cache.get(STATE, 0, 100) is None
    cache.close()


def test_a_folder_that_cannot_be_made_turns_the_cache_off(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    cache = RangeCache(tmp_path / "file" / "cache", 10**7)
    _put(cache, 0, 100)
    assert cache.get(STATE, 0, 100) is None
    assert len(caplog.records) == 1


def _write_until_killed(folder: Path, seed: int) -> None:
    cache, draw = RangeCache(folder, 10**7), random.Random(seed)
    while True:
        offset, size = draw.randrange(90_000), draw.randrange(1, 10_000)
        _put(cache, offset, size)
        if cache.get(STATE, offset, size) != CONTENT[offset : offset + size]:
            (folder / "wrong").touch()


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning")
def test_processes_that_are_killed_while_they_write_leave_right_bytes(tmp_path: Path) -> None:
    context, draw = multiprocessing.get_context("fork"), random.Random(0)
    for number in range(15):
        writers = [context.Process(target=_write_until_killed, args=(tmp_path, 10 * number + k)) for k in range(2)]
        for writer in writers:
            writer.start()
        time.sleep(draw.uniform(0.02, 0.08))
        for writer in writers:
            writer.kill()
            writer.join()
            assert writer.exitcode == -signal.SIGKILL
            writer.close()
    assert not (tmp_path / "wrong").exists()
    cache, draw = RangeCache(tmp_path, 10**7), random.Random(0)
    found = 0
    for _ in range(3000):
        offset, size = draw.randrange(99_000), draw.randrange(1, 1000)
        data = cache.get(STATE, offset, size)
        assert data in (None, CONTENT[offset : offset + size])
        found += data is not None
    assert found > 0
    cache.close()


def test_what_another_stores_later_is_found(tmp_path: Path) -> None:
    cache = RangeCache(tmp_path, 10**7)
    assert cache.get(STATE, 700, 50) is None
    other = RangeCache(tmp_path, 10**7)
    _put(other, 600, 500)
    assert cache.get(STATE, 700, 50) == CONTENT[700:750]
    cache.close()
    other.close()


def test_a_link_in_the_folder_is_not_followed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = RangeCache(tmp_path / "c", 10**7)
    _put(cache, 0, 100)
    cache.close()
    (data,) = _files(tmp_path / "c", ".data")
    data.unlink()
    data.symlink_to(tmp_path / "victim")
    cache = RangeCache(tmp_path / "c", 10**7)
    _put(cache, 0, 100)
    assert not (tmp_path / "victim").exists()
    assert len(caplog.records) == 1
    cache.close()
