"""How a run reads its data: blocks of what is read together, proven by the ledger; a local cache of remote files."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from balancer.ledger import read_lines  # noqa: E402
from balancer.ledger_lines import RunLine, StepLine  # noqa: E402
from dataloaders.demo import DEMO_PROCESSOR  # noqa: E402
from dataloaders.sample import load_sample  # noqa: E402
from tools.benchmarks.range_server import RangeServer  # noqa: E402
from tools.verify_command import verify_run  # noqa: E402
from trainer.config import FitConfig, PlanConfig  # noqa: E402
from trainer.data import prepare, read_groups  # noqa: E402
from trainer.errors import ConfigError  # noqa: E402
from trainer.fit_command import run_fit  # noqa: E402
from trainer.plan_command import run_plan  # noqa: E402

MakeConfig = Callable[..., FitConfig]
GROUPS = np.arange(12) // 2


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file of twelve captions in six row groups."""
    path = tmp_path_factory.mktemp("table") / "a.parquet"
    captions = pa.table({"text": [f"Number {i}, and so on." for i in range(12)]})
    pq.write_table(captions, path, row_group_size=2)
    return path


def consumed(config: FitConfig) -> list[list[int]]:
    """Samples of every step."""
    assert config.output is not None
    lines = read_lines(config.output / "ledger.jsonl")
    return [sorted(i for rank in line.ids for i in rank) for line in lines if isinstance(line, StepLine)]


def test_block_shuffle_of_one_parquet_file_trains_row_group_by_row_group_and_is_proven(
    fit_config: MakeConfig, table: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = fit_config(
        data=str(table), shuffle="block", shuffle_block_shards=2, epochs=2.0, checkpoint_interval_steps=2
    )
    assert run_fit(config) == 0
    steps = consumed(config)
    assert [len(set(GROUPS[step].tolist())) for step in steps] == [2] * 6  # four samples: the two groups of a block
    first = next(read_lines(tmp_path / "run" / "ledger.jsonl"))
    assert isinstance(first, RunLine)
    assert first.group_runs == tuple((k, 2) for k in range(6))
    report = verify_run(tmp_path / "run")
    assert (report.findings, report.num_selected, report.ids_from) == ((), 6, "index")
    assert run_fit(replace(config, resume=True, max_steps=8, epochs=None)) == 0
    assert verify_run(tmp_path / "run").num_selected == 8
    plan = {name: getattr(config, name) for name in ("model", "data", "cache_dir", "shuffle", "shuffle_block_shards")}
    assert run_plan(PlanConfig(**plan, global_batch_size=4)) == 0
    assert "3 steps of 4 samples" in capsys.readouterr().out


def test_groups_are_asked_for_in_block_shuffle_alone(table: Path, tmp_path: Path) -> None:
    options = PlanConfig(cache_dir=tmp_path, shuffle="block")
    side = prepare(options, str(table), DEMO_PROCESSOR)
    found = read_groups(side, options)
    assert found is not None
    assert found.tolist() == GROUPS.tolist()
    assert read_groups(side, replace(options, shuffle="full")) is None


def test_what_was_read_from_urls_is_read_from_the_remote_cache(corpus: Path, tmp_path: Path) -> None:
    with RangeServer(corpus.parent) as server:
        for start in range(2):
            options = PlanConfig(cache_dir=tmp_path / "cache", remote_cache=tmp_path / "remote", remote_cache_gib=0.5)
            side = prepare(options, server.url(corpus.name), DEMO_PROCESSOR)
            storage = side.source.storage  # type: ignore[attr-defined]
            assert storage.options.cache_bytes == 2**29
            before = storage.counters
            load_sample(side.source, side.index, 4, side.estimator)
            assert (storage.counters.requests > before.requests) == (start == 0)
            storage.close()
    options = PlanConfig(cache_dir=tmp_path / "cache", remote_cache=corpus)
    with pytest.raises(ConfigError, match=r"cannot be written to: .*Give another --remote-cache"):
        prepare(options, str(corpus), DEMO_PROCESSOR)


def test_a_resume_may_have_another_remote_cache(fit_config: MakeConfig, tmp_path: Path) -> None:
    config = fit_config(max_steps=2, checkpoint_interval_steps=1)
    assert run_fit(config) == 0
    later = replace(config, resume=True, max_steps=3, remote_cache=tmp_path / "remote", remote_cache_gib=1.0)
    assert run_fit(later) == 0
