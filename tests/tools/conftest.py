"""Step records as a run would have written them, small enough to check by hand."""

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from balancer.ledger import _written, read_lines
from balancer.ledger_lines import Line
from balancer.records import ActionRecord, RecordWriter, StepRecord
from tools.verify_command import VerifyReport, verify_run

# (rank, stage, op, micro-batch, start ms, end ms)
Act = tuple[int, int, str, int, float, float]
MakeRecord = Callable[..., StepRecord]
Edit = Callable[[list[Line]], list[Line]]


def _record(step: int = 1, acts: Sequence[Act] = (), **changes: object) -> StepRecord:
    actions = tuple(
        ActionRecord(rank=rank, dp_rank=rank, stage=stage, op=op, microbatch=microbatch, start_ms=start, end_ms=end)
        for rank, stage, op, microbatch, start, end in acts
    )
    values: dict[str, object] = {
        "step": step,
        "epoch": 0,
        "loss": 4.0 / step,
        "lr": 1e-3,
        "grad_norm": 1.0,
        "label_tokens": 10,
        "llm_tokens": 100,
        "useful_tokens_per_s": 900.0,
        "executed_tokens_per_s": 1000.0,
        "step_ms": max((action.end_ms for action in actions), default=50.0),
        "data_wait_ms": 5.0,
        "actions": actions,
        "imbalance_before": 1.5,
        "imbalance_after": 1.1,
        "measured_imbalance": 1.2,
        "lower_bound_ms": 80.0,
        "makespan_ms": 100.0,
        "fill": 0.9,
        "samples_per_pack": 2.5,
        "num_microbatches": 1,
        "policy": "lpt",
    }
    return StepRecord(**{**values, **changes})  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache folder of this test alone."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder / "mllm-balancer"


@pytest.fixture
def make_record() -> MakeRecord:
    """make_record(step, acts, field=value): a record with plausible values elsewhere."""
    return _record


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    """A run of four steps on two ranks, busy 30 and 10 ms of 40; compare.jsonl holds step 3 twice, off and on."""
    folder = tmp_path / "run"
    acts: list[Act] = [(0, 0, "F", 0, 0.0, 10.0), (0, 1, "B", 0, 20.0, 40.0), (1, 0, "F", 0, 0.0, 10.0)]
    with RecordWriter(folder / "steps.jsonl") as writer:
        for step in range(1, 5):
            writer.write(_record(step, acts))
    off = [_record(3, [(0, 0, "F", 0, 0.0, 80.0), (1, 0, "F", 0, 0.0, 20.0)], policy="sequential")] * 2
    on = [_record(3, [(0, 0, "F", 0, 0.0, 50.0), (1, 0, "F", 0, 0.0, 50.0)])] * 2
    lines = [record.to_json() for record in (*off, *on)]
    (folder / "compare.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def edited() -> Callable[[Path, Edit], VerifyReport]:
    """`edited(run, edit)`: the report after an edit of the ledger by somebody who writes all checks anew."""

    def report(folder: Path, edit: Edit) -> VerifyReport:
        path = folder / "ledger.jsonl"
        check, texts = "", []
        for line in edit(list(read_lines(path))):
            text, check = _written(line, check)
            texts.append(text)
        path.write_bytes(b"".join(texts))
        return verify_run(folder)

    return report
