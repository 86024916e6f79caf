"""The benchmark of video decoders: its command prints a row a decoder and says what was left to PyAV."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from dataloaders.video_decoders import Health
from tools.benchmarks import decoders
from tools.benchmarks.decoders import main, markdown


def test_the_command_writes_a_row_for_every_decoder(
    tmp_path: Path,
    video_bytes: Callable[..., bytes],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # torch is not for this test to load.
    monkeypatch.setattr(decoders, "DECODERS", {"pyav": decoders.DECODERS["pyav"]})
    (tmp_path / "a.mp4").write_bytes(video_bytes(96, 64, 8))
    (tmp_path / "note.txt").write_text("no video")
    arguments = ["--media", str(tmp_path), "--output", str(tmp_path / "out"), "--frames", "3", "--repeats", "1"]
    assert main([*arguments, "--opens", "3"]) == 0
    table = (tmp_path / "out" / "decoders.md").read_text()
    assert table in capsys.readouterr().out
    assert [line.split(" | ")[1:4] for line in table.splitlines()[2:4]] == [["1", "1", "0"], ["1", "1", "0"]]
    found = json.loads((tmp_path / "out" / "decoders.json").read_text())
    assert [row["exact"] for row in found["rows"]] == [1, 1]


def test_the_notes_name_wrong_and_refused_files() -> None:
    rows = [Health(decoder="some", files=3, wrong=("b.mp4",), refused={"a.ts": "container unknown"})]
    table = markdown(rows, {"other": "not installed"})
    for line in (
        "- other does not work here: not installed",
        "- some, wrong: b.mp4",
        "- some, a.ts: container unknown",
    ):
        assert line in table.splitlines()


def test_a_folder_without_videos_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--media", str(tmp_path)])
    assert f"no videos below {tmp_path}" in capsys.readouterr().err
