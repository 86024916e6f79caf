"""JSON lines whose media, or whose texts too, lie at URLs: fetched ahead side by side, and the same as on disk."""

import json
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest

from dataloaders.errors import RecordError, SourceError
from dataloaders.jsonl_source import JsonlSource
from dataloaders.probe.limits import ProbeLimits
from dataloaders.source import prefetch
from dataloaders.storage import Storage, StorageOptions
from tools.benchmarks.range_server import Behaviour, RangeServer

pytest.importorskip("aiohttp")

NUM = 12


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """12 records of two pictures each, in a file beside them."""
    home = tmp_path / "served"
    (home / "img").mkdir(parents=True)
    rows = []
    for i in range(NUM):
        names = [f"img/{i}-{j}.jpg" for j in range(2)]
        for name in names:
            (home / name).write_bytes(name.encode() * (50 + i))
        rows.append({"messages": [{"role": "user", "content": "<image> and <image>?"}], "images": names})
    (home / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return home


@pytest.fixture
def server(folder: Path) -> Iterator[RangeServer]:
    with RangeServer(folder, Behaviour(latency_s=0.02)) as running:
        yield running


@pytest.fixture
def storage() -> Iterator[Storage]:
    with Storage(StorageOptions(backoff_s=0.01, hedge_share=0.0)) as opened:
        yield opened


def opened(where: str, folder: Path, server: RangeServer, storage: Storage) -> JsonlSource:
    if where == "texts on disk, media at a root":
        return JsonlSource(folder / "a.jsonl", media_root=server.url().rstrip("/"), storage=storage)
    if where == "texts on disk, media at URLs":
        rows = (folder / "a.jsonl").read_text().replace('"img/', f'"{server.url()}img/')
        (folder / "b.jsonl").write_text(rows)
        return JsonlSource(folder / "b.jsonl", media_schemes=("http",), storage=storage)
    return JsonlSource(server.url("a.jsonl"), storage=storage)


PLACES = ["texts on disk, media at a root", "texts on disk, media at URLs", "all at URLs"]


@pytest.mark.parametrize("where", PLACES)
def test_media_at_urls_are_fetched_ahead_side_by_side_each_once(
    where: str, folder: Path, server: RangeServer, storage: Storage
) -> None:
    source = opened(where, folder, server, storage)
    on_disk = JsonlSource(folder / "a.jsonl")
    before = storage.counters
    prefetch(source, range(4, NUM))
    for i in range(4, NUM):
        assert len(source.record(i).media) == 2
        for j in range(2):
            assert source.media_bytes(i, j) == on_disk.media_bytes(i, j)
    counters, num_media = storage.counters, 2 * (NUM - 4)
    assert counters.prefetch_hits - before.prefetch_hits >= num_media
    assert counters.max_in_flight >= 8
    # A size and the bytes of every medium, and the texts by one request for neighbours: nothing is asked for twice, but
    # for the size that the reader needs while it is just being asked for.
    assert counters.requests - before.requests <= 2 * num_media + (where == "all at URLs") + 2


def test_without_media_nothing_but_texts_is_fetched(folder: Path, server: RangeServer, storage: Storage) -> None:
    source = opened("texts on disk, media at a root", folder, server, storage)
    prefetch(source, range(NUM), media=False)
    assert storage.counters.requests == 0
    local = JsonlSource(folder / "a.jsonl", storage=storage)
    prefetch(local, range(NUM))
    assert local.media_bytes(3, 1) == (folder / "img/3-1.jpg").read_bytes()
    assert storage.counters.requests == 0


def test_a_hint_of_what_is_gone_refused_or_broken_is_silent_and_the_read_says_it(
    folder: Path, server: RangeServer, storage: Storage
) -> None:
    (folder / "img/0-0.jpg").unlink()
    lines = (folder / "a.jsonl").read_text().splitlines()
    lines[1] = lines[1].replace("img/1-1.jpg", "../secret.jpg")
    lines[2] = "not JSON"
    (folder / "a.jsonl").write_text("\n".join(lines))
    source = opened("all at URLs", folder, server, storage)
    prefetch(source, range(4))
    for i, message in enumerate(["there is no file at", r"holds `\.\.`", "JSON"]):
        with pytest.raises(RecordError, match=message):
            source.record(i)
    assert source.media_bytes(3, 0) == (folder / "img/3-0.jpg").read_bytes()


def test_media_above_the_bound_are_not_fetched_ahead(folder: Path, server: RangeServer, storage: Storage) -> None:
    largest = (folder / "img/5-0.jpg").stat().st_size
    source = JsonlSource(
        folder / "a.jsonl",
        media_root=server.url().rstrip("/"),
        storage=storage,
        media_limits=ProbeLimits(max_bytes=largest),
    )
    prefetch(source, range(NUM))
    for i in range(6):
        assert source.media_bytes(i, 0) == (folder / f"img/{i}-0.jpg").read_bytes()
        assert source.media_bytes(i, 1)
    served = sum(path.stat().st_size for path in folder.glob("img/*") if path.stat().st_size <= largest)
    assert storage.counters.bytes_read == served


def test_texts_that_change_at_their_address_are_no_hint(folder: Path, server: RangeServer, storage: Storage) -> None:
    source = opened("all at URLs", folder, server, storage)
    text = (folder / "a.jsonl").read_text()
    (folder / "a.jsonl").write_text(text.replace("and", "or "))
    fresh: JsonlSource = pickle.loads(pickle.dumps(source))  # as a worker has it
    with pytest.raises(SourceError, match="changed"):
        prefetch(fresh, range(4))
    with pytest.raises(SourceError, match="changed"):
        fresh.record(0)


def test_kept_texts_are_bounded_and_stay_at_home(
    folder: Path, server: RangeServer, storage: Storage, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = len((folder / "a.jsonl").read_text().splitlines()[0])
    monkeypatch.setattr("dataloaders.jsonl_source.KEPT_BYTES", 3 * size + 5)
    source = opened("all at URLs", folder, server, storage)
    prefetch(source, range(9))
    assert list(source._kept._texts) == [6, 7, 8]
    assert not pickle.loads(pickle.dumps(source))._kept._texts
    assert [source.record(i).key for i in range(NUM)] == [f"line {i + 1}" for i in range(NUM)]
    assert not source._kept._texts
