"""The run folder: complete or absent, never written over, and continued where the checkpoint stands."""

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path

import pytest

from balancer.records import RecordWriter, StepRecord, read_records
from trainer.config import FitConfig
from trainer.errors import ConfigError
from trainer.run_folder import RunFolder, newest_run, next_free, read_config, write_atomically


@dataclass(frozen=True)
class FakePlan:
    step: int

    def to_json(self) -> str:
        return json.dumps({"step": self.step})


def record(step: int) -> StepRecord:
    return StepRecord(
        step=step,
        epoch=0,
        loss=1.0,
        lr=0.1,
        grad_norm=1.0,
        label_tokens=1,
        llm_tokens=1,
        useful_tokens_per_s=1.0,
        executed_tokens_per_s=1.0,
        step_ms=1.0,
        data_wait_ms=0.0,
    )


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_a_new_folder_is_complete(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "a" / "run", FitConfig(seed=3))
    assert names(folder.path) == ["checkpoints", "config.yaml", "plans", "run.json", "samples", "steps.jsonl"]
    assert names(tmp_path / "a") == ["run"], "no draft is left"
    assert json.loads((folder.path / "run.json").read_text())["format_version"] == 2
    assert read_config(folder.path) == FitConfig(seed=3)
    assert folder.path.stat().st_mode & 0o777 == 0o777 & ~current_umask()


def current_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def test_an_existing_empty_folder_is_used(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    assert RunFolder.create(tmp_path / "run", FitConfig()).steps_path.exists()


def test_a_run_is_never_overwritten(tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "run", FitConfig(seed=1))
    with pytest.raises(ConfigError, match=r"holds a run already. Continue it with --resume .*run, or give another"):
        RunFolder.create(tmp_path / "run", FitConfig(seed=2))
    assert read_config(tmp_path / "run").seed == 1


def test_foreign_files_are_never_touched(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match="is not empty and holds no run"):
        RunFolder.create(tmp_path, FitConfig())
    with pytest.raises(ConfigError, match="is a file"):
        RunFolder.create(tmp_path / "thesis.txt", FitConfig())
    with pytest.raises(ConfigError, match="cannot be made"):
        RunFolder.create(tmp_path / "thesis.txt" / "run", FitConfig())
    assert names(tmp_path) == ["thesis.txt"]
    assert (tmp_path / "thesis.txt").read_text() == "mine"


def test_a_folder_taken_in_the_meantime_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs that start together with one --output: the second finds the folder only when it renames its draft."""
    rename = Path.rename

    def late(self: Path, target: Path) -> Path:
        Path(target).mkdir()
        (Path(target) / "run.json").write_text("{}")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", late)
    with pytest.raises(ConfigError, match="holds a run already"):
        RunFolder.create(tmp_path / "run", FitConfig())
    assert names(tmp_path) == ["run"], "the draft is removed"


def test_plans_are_numbered_by_finished_steps(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", FitConfig())
    assert folder.write_plan(FakePlan(0)).name == "step_000001.json"
    assert json.loads(folder.write_plan(FakePlan(1_234_566)).read_text()) == {"step": 1_234_566}
    assert names(folder.path / "plans") == ["step_000001.json", "step_1234567.json"]


def test_a_resume_removes_what_lies_beyond_the_checkpoint(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", FitConfig())
    with RecordWriter(folder.steps_path) as writer:
        for step in range(5):
            writer.write(record(step + 1))
            folder.write_plan(FakePlan(step))
    folder.write_summary({"loss": 1.0})
    with folder.steps_path.open("a") as file:
        file.write('{"step": 6, "lo')  # the kill came in the middle of a line
    again = RunFolder.resume(folder.path, FitConfig(resume=True, log_interval=7), step=3)
    with RecordWriter(again.steps_path, finished_steps=3) as writer:
        writer.write(record(4))
    assert [entry.step for entry in read_records(again.steps_path)] == [1, 2, 3, 4]
    assert names(again.path / "plans") == ["step_000001.json", "step_000002.json", "step_000003.json"]
    assert not (again.path / "summary.json").exists()
    assert read_config(again.path) == FitConfig(log_interval=7), "the wish to resume is no property of the run"


def test_plans_are_removed_from_the_last_one_on_so_that_a_kill_leaves_no_gap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder.create(tmp_path / "run", FitConfig())
    for step in range(6):
        folder.write_plan(FakePlan(step))
    unlink, removed = Path.unlink, []

    def unlink_then_die(self: Path, missing_ok: bool = False) -> None:
        unlink(self, missing_ok=missing_ok)
        removed.append(self.name)
        if len(removed) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", unlink_then_die)
        with pytest.raises(KeyboardInterrupt):
            RunFolder.resume(folder.path, FitConfig(), step=2)
    assert removed == ["step_000006.json", "step_000005.json"]
    RunFolder.resume(folder.path, FitConfig(), step=2)
    assert names(folder.path / "plans") == ["step_000001.json", "step_000002.json"]


def test_a_resume_without_any_checkpoint_starts_over(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", FitConfig())
    folder.write_plan(FakePlan(0))
    RunFolder.resume(folder.path, FitConfig(), step=0)
    assert names(folder.path / "plans") == []


def test_only_a_run_can_be_resumed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no run folder"):
        RunFolder.resume(tmp_path, FitConfig(), step=0)
    with pytest.raises(ConfigError, match="is no run folder"):
        read_config(tmp_path / "nowhere")


@pytest.mark.parametrize("text", ['{"format_version": 99}', "{}", "[]", "not json"])
def test_a_run_of_another_format_is_refused(text: str, tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", FitConfig())
    (folder.path / "run.json").write_text(text)
    with pytest.raises(ConfigError, match=r"format version|cannot be read"):
        RunFolder.resume(folder.path, FitConfig(), step=0)


def test_a_damaged_config_names_its_file(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", FitConfig())
    (folder.path / "config.yaml").write_text("sed: 1\n")
    with pytest.raises(ConfigError, match=r"config.yaml: key 'sed': did you mean seed"):
        read_config(folder.path)
    (folder.path / "config.yaml").unlink()
    with pytest.raises(ConfigError, match=r"no readable config.yaml"):
        read_config(folder.path)


def test_samples_stay_inside_their_folder(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", FitConfig())
    path = folder.write_sample("../../evil.png", b"x")
    assert path == folder.path / "samples" / "evil.png"
    assert path.read_bytes() == b"x"


def test_the_summary_carries_a_format_version(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", FitConfig())
    assert json.loads(folder.write_summary({"loss": 0.5}).read_text()) == {"format_version": 2, "loss": 0.5}


def test_the_next_free_name_follows_all_that_exist(tmp_path: Path) -> None:
    assert next_free(tmp_path / "runs", "demo") == tmp_path / "runs" / "demo-001"
    for name in ("demo-001", "demo-007", "demo-x", "other-009", "demo-0100"):
        (tmp_path / name).mkdir()
    assert next_free(tmp_path, "demo") == tmp_path / "demo-101"


def test_the_newest_run_is_the_one_that_wrote_last(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no run under"):
        newest_run(tmp_path)
    for age, name in enumerate(("b", "c", "a")):
        folder = RunFolder.create(tmp_path / name, dataclasses.replace(FitConfig(), seed=age))
        os.utime(folder.steps_path, ns=(1000 - age, 1000 - age))
    (tmp_path / "no-run").mkdir()
    assert newest_run(tmp_path) == tmp_path / "b"


def test_a_failed_write_keeps_the_old_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    write_atomically(path, "old")

    def full(descriptor: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
