"""The benchmark of remote loading runs, reads every sample once on both sides, and counts what it says it counts."""

import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.torch
pytest.importorskip("torch")
pytest.importorskip("aiohttp", reason="remote storage")

from dataloaders.tar_source import TarSource  # noqa: E402
from tools.benchmarks.remote import main  # noqa: E402
from tools.benchmarks.remote_corpus import write_remote_corpus  # noqa: E402
from tools.benchmarks.remote_tables import Preparation, RemotePass, markdown  # noqa: E402
from tools.benchmarks.server_process import ServerLoad  # noqa: E402

TINY = {"--shards": 3, "--samples-per-shard": 10, "--block-shards": 2, "--side-px": 84, "--latency-s": 0.002}
ONCE = {"--shuffles": "block", "--workers": 1, "--rounds": 1, "--tries": 1, "--error-share": 0.05, "--stall-share": 0}


def test_the_benchmark_reads_every_sample_from_disk_from_a_server_and_by_two_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--output", str(tmp_path), *(str(word) for pair in (TINY | ONCE).items() for word in pair)]) == 0
    content = json.loads((tmp_path / "remote.json").read_text())
    assert [(entry["place"], entry["num_ranks"]) for entry in content["passes"]] == [
        ("local", 1),
        ("remote", 1),
        ("remote", 2),
    ]
    local, remote, ranks = content["passes"]
    assert local["timing"]["num_samples"] == remote["timing"]["num_samples"] == 30
    assert local["server"] is None
    assert local["workers"]["requests"] == 0
    for entry in (remote, ranks):
        assert 1.0 <= entry["server"]["bytes_sent"] / entry["wanted_bytes"] <= 1.1
        assert entry["workers"]["requests"] == entry["server"]["requests"] > 0
        assert entry["workers"]["retries"] == entry["server"]["errors"]
    assert (tmp_path / "remote.md").read_text() == capsys.readouterr().out


def test_the_corpus_is_a_function_of_its_seed_and_every_sample_has_picture_and_answer(tmp_path: Path) -> None:
    contents = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        (tmp_path / name).mkdir()
        shards = write_remote_corpus(
            tmp_path / name, num_shards=2, samples_per_shard=3, seed=seed, num_pictures=2, sizes_px=((64, 48),)
        )
        contents.append([shard.read_bytes() for shard in shards])
    assert contents[0] == contents[1] != contents[2]
    source = TarSource(str(tmp_path / "a" / "*.tar"))
    assert [len(source.record(i).media) for i in range(len(source))] == [1] * 6


def test_the_difference_of_two_loads_keeps_the_most_in_flight() -> None:
    before = ServerLoad(requests=5, bytes_sent=50, errors=1, stalls=0, max_in_flight=9, cpu_s=1.0)
    after = ServerLoad(requests=7, bytes_sent=90, errors=1, stalls=2, max_in_flight=4, cpu_s=1.5)
    assert after.since(before) == ServerLoad(requests=2, bytes_sent=40, errors=0, stalls=2, max_in_flight=4, cpu_s=0.5)


def test_ratios_are_taken_within_a_round() -> None:
    from tools.benchmarks.counting_reader import Totals
    from tools.benchmarks.loader import Pass

    load = ServerLoad(requests=10, bytes_sent=1050, errors=1, stalls=0, max_in_flight=3, cpu_s=0.1)

    def one(place: str, per_s: float) -> RemotePass:
        timing = Pass(method=place, num_samples=8, whole_per_s=per_s, steady_per_s=per_s, first_s=0.1)
        return RemotePass(
            shuffle="block",
            place=place,
            num_ranks=1,
            timing=timing,
            wanted_bytes=1000,
            workers=Totals(),
            server=load if place == "remote" else None,
            elsewhere=0.0,
        )

    preparation = Preparation(header_s=1.0, scan_s=1.0, header_load=load, scan_load=load, corpus_bytes=2100)
    # Rounds of 100 and 50 samples/s: a busy machine halves both sides of the second.
    text = markdown([one("local", 100), one("remote", 80), one("remote", 45), one("local", 50)], preparation, "tiny")
    assert "| block | 75 (50 to 100) | 62 (45 to 80) | 0.85 (0.80 to 0.90) |" in text
    assert "| block, 1 | 10 (10 to 10) | 1.050 (1.050 to 1.050) |" in text
    assert "| scan | 1.0 | 10 | 1,050 | 50.0% |" in text
