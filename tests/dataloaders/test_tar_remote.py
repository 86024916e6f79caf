"""Shards at addresses: the same samples as from disk, few requests, only what is asked for, and headers read once."""

import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("aiohttp")

from dataloaders import member_cache
from dataloaders.errors import SourceError
from dataloaders.estimators import Qwen25VLEstimator
from dataloaders.index import CostIndex
from dataloaders.index_build import Part, build_shards
from dataloaders.index_merge import merge_parts
from dataloaders.index_slices import build_slices
from dataloaders.member_table import MemberTable
from dataloaders.scan import build_index, scan_source
from dataloaders.source import prefetch
from dataloaders.storage import Storage, StorageOptions
from dataloaders.tar_index_files import IndexFiles
from dataloaders.tar_source import TarSource
from tools.benchmarks.range_server import RangeServer

ESTIMATOR = Qwen25VLEstimator()
Make = Callable[..., bytes]
NUM_SHARDS, PER_SHARD = 4, 6


@pytest.fixture(scope="module")
def folder(
    tmp_path_factory: pytest.TempPathFactory, write_shard: Callable[..., Path], chat_json: Make, image_bytes: Make
) -> Path:
    """Four shards of six samples with a picture of about 20 kB each."""
    folder = tmp_path_factory.mktemp("served")
    for number in range(NUM_SHARDS):
        members: list[tuple[str, bytes]] = []
        for n in range(PER_SHARD):
            picture = image_bytes(120 + 4 * n, 80 + number, seed=n)
            members += [(f"{n}.json", chat_json("<image>?", "Yes." * n)), (f"{n}.png", picture)]
        write_shard(folder / f"s{number}.tar", members)
    return folder


@pytest.fixture
def server(folder: Path) -> Iterator[RangeServer]:
    """A running server of the shards."""
    with RangeServer(folder) as running:
        yield running


@pytest.fixture
def storage() -> Iterator[Storage]:
    """A storage with short waits."""
    with Storage(StorageOptions(backoff_s=0.01, timeout_s=5.0)) as opened:
        yield opened


def _urls(server: RangeServer) -> str:
    return server.url() + "s{0..3}.tar"


def _sent(server: RangeServer) -> int:
    """Bytes of answers since the last time."""
    with server.lock:
        sent, server.counts.bytes_sent = server.counts.bytes_sent, 0
    return sent


def test_samples_at_addresses_are_those_on_disk(server: RangeServer, storage: Storage, folder: Path) -> None:
    local, remote = TarSource(f"{folder}/s{{0..3}}.tar"), TarSource(_urls(server), storage=storage)
    assert remote.fingerprint == local.fingerprint
    assert len(remote) == NUM_SHARDS * PER_SHARD
    for i in (0, 7, 23):
        assert remote.record(i).turns == local.record(i).turns
        assert remote.media_bytes(i, 0) == local.media_bytes(i, 0)
        assert remote.media_reader(i, 0).read(5, 10) == local.media_bytes(i, 0)[5:15]
    assert remote.place(7) == f"shard {server.url('s1.tar')}, key 1"
    assert [state.stamp != "" for state in remote.states] == [True] * 4


def test_a_current_table_is_opened_without_a_byte_of_the_shards(
    server: RangeServer, storage: Storage, tmp_path: Path
) -> None:
    first = TarSource(_urls(server), storage=storage, members=tmp_path)
    assert _sent(server) > 0
    again = TarSource(_urls(server), storage=storage, members=tmp_path)
    assert _sent(server) <= NUM_SHARDS, "one byte of each, to learn its state"
    assert pickle.loads(pickle.dumps(again)).fingerprint == first.fingerprint
    assert _sent(server) == 0


def test_only_a_shard_that_changed_at_its_address_is_passed_over_again(
    folder: Path, storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with RangeServer(shutil.copytree(folder, tmp_path / "copy")) as server:
        TarSource(_urls(server), storage=storage, members=tmp_path / "members")
        os.utime(tmp_path / "copy" / "s2.tar", (1, 1))
        passed: list[str] = []
        original = member_cache.pass_over

        def counted(state: object, *rest: object, **options: object) -> MemberTable:
            passed.append(state.url)  # type: ignore[attr-defined]
            return original(state, *rest, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(member_cache, "pass_over", counted)
        TarSource(_urls(server), storage=storage, members=tmp_path / "members")
        assert passed == [server.url("s2.tar")]


def test_a_shard_that_changes_under_a_run_is_an_error_and_never_other_bytes(
    folder: Path, storage: Storage, tmp_path: Path
) -> None:
    with RangeServer(shutil.copytree(folder, tmp_path / "copy")) as server:
        source = TarSource(_urls(server), storage=storage)
        os.utime(tmp_path / "copy" / "s0.tar", (1, 1))
        with pytest.raises(SourceError, match=r"changed .*s0\.tar"):
            pickle.loads(pickle.dumps(source)).media_bytes(0, 0)


def _weight(source: TarSource, ids: object) -> int:
    """Bytes of the texts and media of samples."""
    table = source.table
    return sum(table.size(row) for i in ids for row in table.rows(i))  # type: ignore[attr-defined]


def test_du13_ranks_together_read_every_sample_once(server: RangeServer, storage: Storage, tmp_path: Path) -> None:
    source = TarSource(_urls(server), storage=storage, members=tmp_path)
    sent, order = pickle.dumps(source), np.random.default_rng(0).permutation(len(source))
    _sent(server)
    found: dict[int, bytes] = {}
    for rank in range(3):  # shards that do not divide by the ranks
        mine = pickle.loads(sent)
        with mine.storage:
            ids = order[rank::3].tolist()
            prefetch(mine, ids)
            for i in ids:
                assert mine.record(i).media[0].size_bytes > 0
                found[i] = mine.media_bytes(i, 0)
    assert sorted(found) == list(range(len(source)))
    assert _sent(server) <= 1.1 * _weight(source, range(len(source)))


def test_du04_one_shard_serves_more_ranks_than_there_are_shards(
    server: RangeServer, storage: Storage, tmp_path: Path
) -> None:
    source = TarSource(server.url("s0.tar"), storage=storage, members=tmp_path)
    shares = [range(rank, len(source), 3) for rank in range(3)]
    assert [len(share) for share in shares] == [2, 2, 2], "ranks share samples, not shards"
    sent = pickle.dumps(source)
    _sent(server)
    for share in shares:
        mine = pickle.loads(sent)
        with mine.storage:
            prefetch(mine, share)
            assert [len(mine.media_bytes(i, 0)) for i in share] == [mine.record(i).media[0].size_bytes for i in share]
        assert _sent(server) <= 1.1 * _weight(source, share)


def test_dr08_a_resume_opens_no_medium_that_was_seen(server: RangeServer, storage: Storage, tmp_path: Path) -> None:
    source = TarSource(_urls(server), storage=storage, members=tmp_path)
    order, done = np.random.default_rng(1).permutation(len(source)).tolist(), 12
    resumed = TarSource(_urls(server), storage=Storage(storage.options), members=tmp_path)
    server.counts.ranges.clear()
    with resumed.storage:
        for i in order[done:]:
            resumed.media_bytes(i, 0)
    table = source.table
    media = {i: (table.offset(table.rows(i)[1]), table.size(table.rows(i)[1])) for i in order}
    expected = {(table.shard_of(i), media[i][0], sum(media[i])) for i in order[done:]}
    read = {(int(path[-5]), start, end) for path, start, end in server.counts.ranges}
    assert {(k, start) for k, start, _ in read} == {(k, start) for k, start, _ in expected}


def test_texts_alone_are_fetched_ahead_where_media_are_not_wanted(server: RangeServer, storage: Storage) -> None:
    source = TarSource(_urls(server), storage=storage)
    _sent(server)
    source.prefetch(range(6), media=False)
    texts = sum(source.table.size(source.table.rows(i)[0]) for i in range(6))
    for i in range(6):
        source.record(i)
    assert texts <= _sent(server) <= 1.1 * texts


def test_headers_are_read_in_stretches_where_energon_says_where_samples_start(
    folder: Path, storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(folder / "s0.tar", tmp_path / "s0.tar")
    plain = TarSource(str(tmp_path / "s0.tar"))
    starts = [plain.table.offset(plain.table.rows(i)[0]) - 512 for i in range(len(plain))]
    end = plain.states[0].size
    (tmp_path / "s0.tar.idx").write_bytes(np.array([*starts, end], dtype="<u8").tobytes())
    used: list[int] = []
    original = IndexFiles._in_stretches

    def noted(self: IndexFiles, *rest: object) -> object:
        found = original(self, *rest)  # type: ignore[arg-type]
        used.append(len(list(found or ())))
        return found

    monkeypatch.setattr(IndexFiles, "_in_stretches", noted)
    with RangeServer(tmp_path) as server:
        source = TarSource(server.url("s0.tar"), storage=storage)
    assert source.fingerprint == plain.fingerprint
    assert used == [12]
    assert source.report.lines() == []


# --- indices of costs


def _same(one: CostIndex, other: CostIndex) -> None:
    assert one.fingerprint == other.fingerprint
    assert one.key == other.key


def test_an_index_of_addresses_is_that_of_the_files(
    server: RangeServer, storage: Storage, folder: Path, tmp_path: Path
) -> None:
    local = build_shards(f"{folder}/s*.tar", ESTIMATOR, tmp_path / "local")
    remote = build_shards(_urls(server), ESTIMATOR, tmp_path / "remote", storage=storage)
    _same(local, remote)
    assert [shard.path for shard in remote.shards] == [server.url(f"s{k}.tar") for k in range(4)]
    _sent(server)
    build_shards(_urls(server), ESTIMATOR, tmp_path / "remote", storage=storage)
    assert _sent(server) <= NUM_SHARDS
    parts = [tmp_path / f"part{k}" for k in range(2)]
    for k, part in enumerate(parts):
        build_shards(_urls(server), ESTIMATOR, part, storage=storage, part=Part(number=k, count=2))
    _same(merge_parts(parts[::-1], tmp_path / "whole"), local)


def test_an_index_of_a_source_passes_over_no_header_again(
    server: RangeServer, storage: Storage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = TarSource(_urls(server), storage=storage)

    def refuse(*_: object, **__: object) -> MemberTable:
        raise AssertionError("headers were passed over again")

    monkeypatch.setattr(member_cache, "pass_over", refuse)
    index = build_index(source, ESTIMATOR, tmp_path / "index")
    assert len(index) == 24
    assert index.bad == []


@pytest.mark.parametrize("how", ["scan_source", "build_shards", "build_slices"])
def test_every_scan_fetches_texts_and_the_heads_of_media_ahead(
    how: str, server: RangeServer, storage: Storage, folder: Path, tmp_path: Path
) -> None:
    local = scan_source(TarSource(f"{folder}/s*.tar"), ESTIMATOR)
    source = TarSource(_urls(server), storage=storage)
    assert storage.counters.prefetch_hits == 0
    if how == "scan_source":
        index = scan_source(source, ESTIMATOR)
    elif how == "build_shards":
        index = build_shards(_urls(server), ESTIMATOR, tmp_path / "index", storage=storage, table=source.table)
    else:
        index = build_slices(source, ESTIMATOR, tmp_path / "index", slice_samples=7)
    assert all(np.array_equal(index.samples[name], column) for name, column in local.samples.items())
    assert storage.counters.prefetch_hits >= 2 * len(source), "a text and the head of a picture each"


@pytest.mark.parametrize("kept", [True, False])
def test_workers_take_the_members_from_the_table(kept: bool, folder: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(folder, tmp_path / "copy")
    script = tmp_path / "build.py"
    script.write_text(
        f"""
import os
from pathlib import Path
from dataloaders import TarSource, build_index, estimator_from_config
if __name__ == "__main__":
    kept = Path({str(tmp_path / "members")!r}) if {kept} else None
    source = TarSource({str(copy / "s*.tar")!r}, members=kept)
    before = os.listdir({str(tmp_path)!r})
    build_index(source, estimator_from_config({{"model_type": "qwen2_5_vl"}}), {str(tmp_path / "index")!r}, workers=2)
"""
    )
    subprocess.run([sys.executable, str(script)], check=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"})
    _same(CostIndex.open(tmp_path / "index"), build_shards(f"{folder}/s*.tar", ESTIMATOR, tmp_path / "other"))
    assert not (tmp_path / "index.building").exists()


@pytest.mark.parametrize("url", ["{}s0.tar.gz", "{}s0.TGZ?signature=1", "pipe:curl -s {}s0.tar"])
def test_what_cannot_be_read_at_random_is_refused(url: str, server: RangeServer, storage: Storage) -> None:
    with pytest.raises(SourceError, match=r"compressed file.*TarStream .*reads it as it is|commands are not run"):
        TarSource(url.format(server.url()), storage=storage)
    assert server.counts.requests == 0


def test_signatures_in_addresses_reach_no_message_and_no_fingerprint(server: RangeServer, storage: Storage) -> None:
    plain = TarSource(server.url("s0.tar"), storage=storage)
    signed = TarSource(server.url("s0.tar") + "?sig=SECRET", storage=storage)
    assert signed.fingerprint == plain.fingerprint
    assert "SECRET" not in signed.place(0) + signed.record(0).shard
    with pytest.raises(SourceError) as caught:
        TarSource(server.url("none.tar") + "?sig=SECRET", storage=storage)
    assert "SECRET" not in str(caught.value)
