"""What is remembered of remote files is bounded, and forgetting a file never hides that it has changed."""

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataloaders.errors import DataError, MissingFileError, SourceError
from dataloaders.storage import FileState, Storage, StorageOptions, known_states
from dataloaders.storage.known_states import KnownStates
from tools.benchmarks.range_server import RangeServer

Serve = Callable[..., RangeServer]
Quick = Callable[..., StorageOptions]


def _state(url: str, size: int = 1) -> FileState:
    return FileState(url=url, size=size, stamp="")


@given(st.lists(st.tuples(st.sampled_from("pkg"), st.integers(0, 7), st.integers(1, 3)), max_size=60))
def test_the_files_used_last_are_known_and_every_other_is_let_go_of(steps: list[tuple[str, int, int]]) -> None:
    gone: list[str] = []
    known, model = KnownStates(gone.append, max_files=4), dict[str, FileState]()
    for action, number, size in steps:
        url, before = str(number), model.pop(str(number), None)
        if action == "g":
            assert known.get(url) == before
            model |= {url: before} if before else {}
        elif action == "p":
            assert known.put(_state(url, size)) == before
            model[url] = _state(url, size)
        else:
            model[url] = before or _state(url, size)
            assert known.keep(_state(url, size)) == model[url]
        if len(model) > 4:
            oldest = next(iter(model))
            del model[oldest]
            assert gone.pop() == oldest
        assert not gone
        assert len(known) == len(model)


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Storages know at most 3 files."""
    monkeypatch.setattr(known_states, "MAX_FILES", 3)


@pytest.fixture
def urls(serve: Serve, folder: Path) -> list[str]:
    """Eight files at a server."""
    pytest.importorskip("aiohttp")
    server = serve()
    for i in range(8):
        (folder / f"{i}.bin").write_bytes(bytes([i]) * 100)
    return [server.url(f"{i}.bin") for i in range(8)]


@pytest.mark.usefixtures("few")
def test_any_number_of_files_is_read_with_few_known(urls: list[str], quick: Quick) -> None:
    with Storage(quick()) as storage:
        for _ in range(2):
            for i, url in enumerate(urls):
                assert storage.open(url).read(0, 5) == bytes([i]) * 5
        assert storage.read_many([(url, 7, 2) for url in urls]) == [bytes([i]) * 2 for i in range(8)]
        remote = storage._here()
        assert len(remote.known) == 3
        assert remote._asking == {}


@pytest.mark.usefixtures("few")
def test_a_file_that_fell_out_is_asked_for_again_and_one_in_use_is_not(urls: list[str], quick: Quick) -> None:
    with Storage(quick()) as storage:
        for url in urls[1:]:
            storage.open(urls[0]).read(0, 5)
            storage.open(url)
        assert storage.counters.requests == 8 + 7  # each looked up once; seven reads
        storage.open(urls[1])
        assert storage.counters.requests == 16


@pytest.mark.usefixtures("few")
@pytest.mark.parametrize("ahead", [False, True], ids=["read", "fetched ahead"])
def test_a_reader_whose_file_was_forgotten_sees_that_it_has_changed(
    urls: list[str], quick: Quick, folder: Path, ahead: bool
) -> None:
    with Storage(quick()) as storage:
        (state,) = storage.states(urls[:1])
        file = storage.open(urls[0], state)
        storage.states(urls[1:])
        (folder / "0.bin").write_bytes(b"x" * 101)
        if ahead:
            storage.prefetch([(urls[0], 0, 50)])
        with pytest.raises(SourceError, match="has changed since it was opened: it had 100 bytes and has 101"):
            file.read(0, 5)
        with pytest.raises(SourceError, match="has changed since it was opened: it had 100 bytes and has 101"):
            storage.open(urls[0], state).read(0, 5)


@pytest.mark.usefixtures("few")
def test_what_was_fetched_ahead_of_a_forgotten_file_is_forgotten_too(
    urls: list[str], quick: Quick, folder: Path
) -> None:
    with Storage(quick()) as storage:
        storage.states(urls[:1])
        storage.prefetch([(urls[0], 0, 50)])
        storage.states(urls[1:])
        (folder / "0.bin").write_bytes(b"x" * 100)
        storage.states(urls[:1])
        assert storage.read_many([(urls[0], 0, 5)]) == [b"x" * 5]


@pytest.mark.usefixtures("few")
def test_without_answers_that_tell_the_state_a_forgotten_file_is_looked_up_when_it_is_opened(quick: Quick) -> None:
    import fsspec

    memory = fsspec.filesystem("memory")
    names = [f"memory://known/{i}" for i in range(5)]
    try:
        for name in names:
            memory.pipe(name, b"0123456789")
        with Storage(quick()) as storage:
            (state,) = storage.states(names[:1])
            storage.states(names[1:])
            memory.pipe(names[0], b"abcdefghi")
            with pytest.raises(SourceError, match="it had 10 bytes and has 9"):
                storage.open(names[0], state)
    finally:
        memory.rm("/known", recursive=True)


def test_a_missing_file_is_an_error_of_its_own_kind(urls: list[str], quick: Quick, tmp_path: Path) -> None:
    with Storage(quick()) as storage:
        for missing in (urls[0].replace("0.bin", "x.bin"), str(tmp_path / "x.bin")):
            with pytest.raises(
                MissingFileError, match=r"1 of 1 files are missing or no files: .*x\.bin\. Check"
            ) as caught:
                storage.states([missing], noun="file")
            copy = pickle.loads(pickle.dumps(caught.value))
            assert (type(copy), str(copy)) == (MissingFileError, str(caught.value))
    assert issubclass(MissingFileError, SourceError)
    assert issubclass(MissingFileError, DataError)
