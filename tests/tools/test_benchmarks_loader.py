"""The benchmark of loaders runs, every loader reads every sample, and memory is told per worker."""

import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.torch
pytest.importorskip("torch")
pytest.importorskip("skimage", reason="the photographs of the corpus")
pytest.importorskip("sklearn", reason="the photographs of the corpus")

from tools.benchmarks.loader import BYTES, IMAGES, OURS, SAME_WORK, main  # noqa: E402


def test_every_loader_reads_every_sample(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--output", str(tmp_path), "--samples", "12", "--rounds", "1", "--workers", "1"]) == 0
    passes = json.loads((tmp_path / "loader.json").read_text())["passes"]
    assert [entry["method"] for entry in passes] == [OURS, SAME_WORK, IMAGES, BYTES]
    assert {entry["num_samples"] for entry in passes} == {12}
    assert all(entry["whole_per_s"] > 0 for entry in passes)
    assert (tmp_path / "loader.md").read_text() == capsys.readouterr().out


def test_memory_is_told_for_every_worker_at_every_tenth(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--memory", "--samples", "400", "--workers", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()[2:]
    assert len([line for line in lines if line]) == 11
    assert {len(line.split()) for line in lines if line} <= {2, 3}
