"""The step log: what is written is read back, crashes cost one line, steps are the training's own."""

import json
import logging
import math
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.errors import RecordFormatError
from balancer.records import ActionRecord, RecordWriter, Replaced, StepRecord, read_records


def record(step: int = 1, **changed: object) -> StepRecord:
    plain = StepRecord(
        step=step,
        epoch=0,
        loss=2.5,
        lr=1e-3,
        grad_norm=0.7,
        label_tokens=10,
        llm_tokens=30,
        useful_tokens_per_s=100.0,
        executed_tokens_per_s=120.0,
        step_ms=250.0,
        data_wait_ms=1.5,
    )
    return replace(plain, **changed)


def full_record() -> StepRecord:
    return record(
        7,
        actions=(
            ActionRecord(rank=1, dp_rank=0, stage=1, op="B", microbatch=3, start_ms=1.0, end_ms=2.5),
            ActionRecord(rank=0, dp_rank=0, stage=0, op="F", microbatch=0, start_ms=0.0, end_ms=1.0),
        ),
        imbalance_before=1.4,
        imbalance_after=1.05,
        measured_imbalance=1.1,
        lower_bound_ms=200.0,
        makespan_ms=210.0,
        fill=0.9,
        samples_per_pack=3.5,
        num_microbatches=4,
        dropped_ids=(3, 4),
        cut_ids=(9,),
        replaced=(Replaced(sample_id=5, place='shard a.tar, key "x"\n', reason="truncated"),),
        conformed=2,
        peak_memory_bytes=2**33,
        policy="lpt",
        plan_digest="ab" * 32,
    )


def test_a_record_is_one_line_and_reads_back_equal() -> None:
    line = full_record().to_json()
    assert "\n" not in line
    assert StepRecord.from_json(line) == full_record()
    assert json.loads(line)["format_version"] == 1


def test_every_field_of_the_full_record_differs_from_its_default() -> None:
    """Otherwise the round trip above would prove less than it seems to."""
    defaults = record()
    same = {
        f.name for f in fields(StepRecord) if repr(getattr(defaults, f.name)) == repr(getattr(full_record(), f.name))
    }
    assert same <= {"epoch", "loss", "lr", "grad_norm", "label_tokens", "llm_tokens", "step_ms", "data_wait_ms"} | {
        "useful_tokens_per_s",
        "executed_tokens_per_s",
    }


@given(st.floats(), st.floats())
def test_any_float_survives_and_the_line_is_strict_json(loss: float, norm: float) -> None:
    line = record(loss=loss, grad_norm=norm).to_json()
    json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    loaded = StepRecord.from_json(line)
    assert loaded.loss == loss or (math.isnan(loss) and math.isnan(loaded.loss))
    assert loaded.grad_norm == norm or (math.isnan(norm) and math.isnan(loaded.grad_norm))


def test_integers_in_float_fields_come_back_as_floats() -> None:
    loaded = StepRecord.from_json(record(loss=3).to_json())
    assert isinstance(loaded.loss, float)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not a step record"),
        ("[]", "step record of format None; this version reads format 1"),
        ('{"format_version":2}', "step record of format 2; this version reads format 1"),
        ('{"format_version":1}', "missing or unknown fields"),
    ],
)
def test_what_is_no_record_is_refused(line: str, message: str) -> None:
    with pytest.raises(RecordFormatError, match=message):
        StepRecord.from_json(line)


def test_a_log_reads_back_in_order(tmp_path: Path) -> None:
    path = tmp_path / "run" / "steps.jsonl"
    with RecordWriter(path) as writer:
        for step in (1, 2, 3):
            writer.write(record(step))
    assert [entry.step for entry in read_records(path)] == [1, 2, 3]


def test_a_last_line_cut_short_is_left_out_and_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "steps.jsonl"
    whole = record(1).to_json() + "\n"
    for cut in (1, 40, len(whole) - 1):
        path.write_text(whole + record(2).to_json()[:cut])
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert [entry.step for entry in read_records(path)] == [1]
        assert "line 2 is cut short and left out" in caplog.text


def test_a_damaged_line_in_the_middle_is_an_error_with_its_number(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_text(f"{record(1).to_json()}\nnonsense\n{record(3).to_json()}\n")
    with pytest.raises(RecordFormatError, match=r"steps\.jsonl, line 2: not a step record"):
        read_records(path)


def test_after_a_resume_the_first_record_is_the_next_global_step(tmp_path: Path) -> None:
    """PT-08: resumed at 1000, the first record is 1001, on a fresh log and on an old one alike."""
    for name in ("fresh.jsonl", "old.jsonl"):
        path = tmp_path / name
        if name == "old.jsonl":
            path.write_text("".join(record(step).to_json() + "\n" for step in (999, 1000)))
        with RecordWriter(path, finished_steps=1000) as writer:
            with pytest.raises(
                RecordFormatError, match="record of step 1 after 1000 finished steps; expected step 1001"
            ):
                writer.write(record(1))
            writer.write(record(1001))
        assert [entry.step for entry in read_records(path)][-1] == 1001


def test_a_resume_drops_what_was_trained_beyond_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_text("".join(record(step).to_json() + "\n" for step in (1, 2, 3, 4)) + '{"format_ver')
    with RecordWriter(path, finished_steps=2) as writer:
        writer.write(record(3, loss=9.0))
    assert [(entry.step, entry.loss) for entry in read_records(path)] == [(1, 2.5), (2, 2.5), (3, 9.0)]


def test_steps_cannot_repeat_or_leave_a_gap(tmp_path: Path) -> None:
    with RecordWriter(tmp_path / "steps.jsonl") as writer:
        writer.write(record(1))
        for step in (1, 3):
            with pytest.raises(RecordFormatError, match=f"record of step {step} after 1 finished steps"):
                writer.write(record(step))


def test_each_record_is_on_disk_before_the_next_step(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    with RecordWriter(path) as writer:
        writer.write(record(1))
        assert len(read_records(path)) == 1
