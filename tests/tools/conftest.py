"""Step records as a run would have written them, and indices to plan, small enough to check by hand."""

import gc
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from balancer.ledger import _written, read_lines
from balancer.ledger_lines import Line
from balancer.records import ActionRecord, RecordWriter, StepRecord
from dataloaders.index import ITEM_COLUMNS, SAMPLE_COLUMNS, BadSample, CostIndex, IndexKey, write_index
from tools.cli import main
from tools.verify_command import VerifyReport, verify_run

# (rank, stage, op, micro-batch, start ms, end ms)
Act = tuple[int, int, str, int, float, float]
MakeRecord = Callable[..., StepRecord]
Edit = Callable[[list[Line]], list[Line]]
Folder = Callable[..., str]

CONFIG = {
    "model_type": "qwen2_5_vl",
    "hidden_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 128,
    "vocab_size": 256,
    "tie_word_embeddings": False,
    "vision_config": {
        "depth": 4,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": 64,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "fullatt_block_indexes": [3],
    },
}


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


@pytest.fixture(autouse=True, scope="module")
def _frozen_heap() -> Iterator[None]:
    """Benchmarks collect garbage before they measure; thousands of tests leave a heap to walk through."""
    gc.freeze()
    yield
    gc.unfreeze()


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


def _index(
    tokens: Sequence[int], patches: Sequence[int] = (), *, names: Sequence[str] = (), bad: int = 0, media: str = ""
) -> CostIndex:
    """Samples of `tokens`, one image each where there are `patches`, counted by the rule `media`; the last `bad` ones
    are unusable."""
    num = len(tokens)
    images = np.array(patches if len(patches) else [0] * num, dtype=np.int64)
    samples: dict[str, Any] = {name: np.zeros(num, dtype=dtype) for name, dtype in SAMPLE_COLUMNS.items()}
    samples["llm_tokens"][:] = tokens
    samples["label_tokens"][:] = np.array(tokens) // 2
    samples["visual_tokens"][:] = images // 4
    samples["patches"][:] = images
    samples["num_items"][:] = images > 0
    some = images[images > 0]
    items: dict[str, Any] = {name: np.zeros(len(some), dtype=dtype) for name, dtype in ITEM_COLUMNS.items()}
    items["patches"][:] = some
    items["visual_tokens"][:] = items["llm_tokens"][:] = some // 4
    items["full_total_sq"][:] = some**2
    unusable = [
        BadSample(sample_id=i, place=f"shard a.tar, key {i}", reason="corrupt", message="no")
        for i in range(num - bad, num)
    ]
    samples["confidence"][num - bad :] = 3
    return CostIndex(
        key=IndexKey(
            rules=1, source="s", estimator="e", tokenizer="t", train_on="all", apply_orientation=True, limits=""
        ),
        samples=samples,
        items=items,
        names=pa.table(
            {
                "shard": pa.array(["a.tar"] * num, pa.string()),
                "key": pa.array(list(names) or [f"k{i}" for i in range(num)], pa.string()),
            }
        ),
        bad=unusable,
        rules={"media": media, "text": ""},
        reasons=["", "corrupt"],
    )


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """folder(tokens, patches, names=(), bad=0, media=""): an index on disk."""

    def make(*args: Any, **options: Any) -> str:
        write_index(tmp_path / "index", _index(*args, **options))
        return str(tmp_path / "index")

    return make


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A tiny model with an encoder, as the path of its folder."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    return str(tmp_path / "model")


@pytest.fixture
def mixed(folder: Folder) -> str:
    """64 samples of unequal length, every third with an image."""
    number = np.arange(64)
    return folder(60 + number * 37 % 400, np.where(number % 3 == 0, 80 + number * 52 % 1200, 0) // 4 * 4)


@pytest.fixture
def planned(capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """planned(*argv): the report of `balancer-analyze plan` as JSON holds it."""

    def plan(*argv: str) -> dict[str, Any]:
        assert main(["plan", *argv, "--json"]) == 0
        content: dict[str, Any] = json.loads(capsys.readouterr().out)
        return content

    return plan
