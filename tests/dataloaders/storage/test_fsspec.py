"""File systems of fsspec other than HTTP: with coroutines, with threads, and with the errors of their libraries."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import fsspec
import pytest
from fsspec.asyn import AsyncFileSystem
from fsspec.spec import AbstractBufferedFile

from dataloaders.errors import SourceError
from dataloaders.storage import FileState, Storage, StorageOptions
from dataloaders.storage.fsspec_transport import DaemonPool

Quick = Callable[..., StorageOptions]


@pytest.fixture
def memory(content: bytes) -> Iterator[Any]:
    """fsspec's file system in memory, with two files."""
    system = fsspec.filesystem("memory")
    for name in ("a.bin", "b.bin"):
        system.pipe(f"/shards/{name}", content)
    yield system
    system.rm("/shards", recursive=True)


class _Awkward(AsyncFileSystem):
    """A store in memory that fails as its class says."""

    protocol = "awkward"
    content = b""
    failures: list[Exception | str] = []  # noqa: RUF012
    calls = 0

    async def _info(self, path: str, **_: Any) -> dict[str, Any]:
        if not path.endswith(".bin"):
            raise FileNotFoundError(path)
        return {"name": path, "size": len(self.content), "type": "file", "ETag": "1"}

    async def _cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        type(self).calls += 1
        if self.failures:
            failure = self.failures.pop(0)
            if isinstance(failure, Exception):
                raise failure
            if failure == "stall":
                await asyncio.sleep(60)
            if failure == "short":
                return self.content[start : (end or 0) - 1]
        return self.content[start:end]


@pytest.fixture
def awkward(content: bytes, monkeypatch: pytest.MonkeyPatch) -> type[_Awkward]:
    fsspec.register_implementation("awkward", _Awkward, clobber=True)
    monkeypatch.setattr(_Awkward, "content", content)
    monkeypatch.setattr(_Awkward, "failures", [])
    monkeypatch.setattr(_Awkward, "calls", 0)
    return _Awkward


def test_files_in_memory_are_listed_opened_and_read(memory: Any, quick: Quick, content: bytes) -> None:
    with Storage(quick()) as storage:
        urls = storage.list("memory://shards/*.bin")
        assert urls == ["memory://shards/a.bin", "memory://shards/b.bin"]
        first, second = storage.states(urls)
        assert (first.size, second.size) == (300_000, 300_000)
        assert first.stamp
        assert storage.open(urls[0], first).read(10, 20) == content[10:30]
        wanted = [(url, offset, 500) for offset in range(0, 200_000, 5000) for url in urls]
        storage.prefetch(wanted[:20])
        assert storage.read_many(wanted) == [content[offset : offset + 500] for _, offset, _ in wanted]
        with pytest.raises(SourceError, match=r"1 of 1 files are missing or no files: memory://shards/x.bin"):
            storage.open("memory://shards/x.bin")
        with pytest.raises(SourceError, match="missing or no files"):
            storage.open("memory://shards")


def test_a_file_in_memory_that_has_changed_is_an_error(memory: Any, quick: Quick) -> None:
    with Storage(quick()) as storage:
        (state,) = storage.states(["memory://shards/a.bin"])
    memory.pipe("/shards/a.bin", b"new")
    with Storage(quick()) as storage, pytest.raises(SourceError, match="it had 300000 bytes and has 3"):
        storage.open(state.url, state)


def test_coroutines_are_repeated_overtaken_and_checked(awkward: type[_Awkward], quick: Quick, content: bytes) -> None:
    awkward.failures[:] = [ConnectionResetError("reset"), "short", "stall", TimeoutError(), "stall"]
    options = quick(
        schemes=("awkward",), hedge_after_s=0.02, hedge_factor=0.001, hedge_share=1.0, max_request_bytes=50_000
    )
    with Storage(options) as storage:
        assert storage.open("awkward://a.bin").read(0, 300_000) == content
        assert storage.counters.retries >= 2
        assert storage.counters.hedged >= 2


@pytest.mark.parametrize("error", [PermissionError("no"), FileNotFoundError("gone"), ValueError("bad key")])
def test_final_errors_of_a_library_are_told_once(awkward: type[_Awkward], quick: Quick, error: Exception) -> None:
    awkward.failures[:] = [error]
    with (
        Storage(quick(schemes=("awkward",))) as storage,
        pytest.raises(SourceError, match=rf"cannot be read: {type(error).__name__}: .* at awkward://a.bin"),
    ):
        storage.read_many([("awkward://a.bin", 0, 10)])
    assert awkward.calls == 1


def test_a_package_that_is_not_installed_is_named(quick: Quick, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any, **__: Any) -> None:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec, "filesystem", missing)
    with pytest.raises(SourceError, match=r"s3 addresses need a package that is not installed\. Install s3fs"):
        Storage(quick()).open("s3://bucket/a.tar")


def test_wrong_options_of_a_file_system_are_told(quick: Quick) -> None:
    with pytest.raises(SourceError, match=r"no access to memory addresses: TypeError.*protocol_options"):
        Storage(quick(protocol_options={"memory": {"fo": object(), "self": 1}})).open("memory://a")


def test_an_unexpected_state_of_an_open_file_is_kept_apart(awkward: type[_Awkward], quick: Quick) -> None:
    with Storage(quick(schemes=("awkward",))) as storage:
        with pytest.raises(SourceError, match="its stamp was 0 and is 1"):
            storage.open("awkward://a.bin", FileState(url="awkward://a.bin", size=300_000, stamp="0"))
        assert (
            storage.open("awkward://a.bin", FileState(url="awkward://a.bin", size=300_000, stamp="1")).size == 300_000
        )


class _Blocks(fsspec.AbstractFileSystem):  # type: ignore[misc]
    """A store without coroutines, whose files are fsspec's buffered ones."""

    protocol = "blocks"
    fetched: list[tuple[int, int]] = []  # noqa: RUF012

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        return {"name": path, "size": 10**9, "type": "file"}

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        class File(AbstractBufferedFile):  # type: ignore[misc]
            def _fetch_range(self, start: int, end: int) -> bytes:
                _Blocks.fetched.append((start, end))
                return bytes(end - start)

        return File(self, path, mode, **options)


def test_files_of_a_store_without_coroutines_fetch_what_is_asked_for(
    quick: Quick, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsspec.register_implementation("blocks", _Blocks, clobber=True)
    monkeypatch.setattr(_Blocks, "fetched", [])
    with Storage(quick(schemes=("blocks",))) as storage:
        assert storage.read_many([("blocks://a", 1000, 50), ("blocks://a", 10**8, 50)]) == [bytes(50)] * 2
    assert sorted(_Blocks.fetched) == [(1000, 1050), (10**8, 10**8 + 50)]


def test_threads_of_the_pool_are_bounded_daemons_that_end() -> None:
    before = threading.enumerate()
    pool, release = DaemonPool(3), threading.Event()
    futures = [pool.submit(lambda i=i: (release.wait(10), i)[1]) for i in range(10)]
    threads = [thread for thread in threading.enumerate() if thread.name == "storage" and thread not in before]
    assert len(threads) == 3
    assert all(thread.daemon for thread in threads)
    release.set()
    assert [future.result(10) for future in futures] == list(range(10))
    with pytest.raises(ZeroDivisionError):
        pool.submit(lambda: 1 / 0).result(10)
    pool.shutdown()
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()
