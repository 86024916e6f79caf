"""Corpora and configs for the trainer's tests: twelve tiny samples, and runs of the `check` model."""

import json
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from balancer.ledger import read_lines
from balancer.ledger_lines import StepLine
from balancer.records import RecordWriter, StepRecord
from tools.verify_command import VerifyReport, verify_run
from trainer.config import CheckConfig, FitConfig

Member = tuple[str, bytes]
TRUNCATED_ID = 5
NUM_SAMPLES = 12


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Sums in one fixed order, and no fight over the cores."""
    try:
        import torch
    except ModuleNotFoundError:
        return
    torch.set_num_threads(1)
    # DCP logs every tensor it saves; a failing test would drown in it.
    logging.getLogger("c10d-NullHandler-dcp_logger").addFilter(lambda record: record.levelno > logging.DEBUG)


@pytest.fixture(scope="session")
def members(
    image_bytes: Callable[..., bytes], video_bytes: Callable[..., bytes], chat_json: Callable[..., bytes]
) -> list[list[Member]]:
    """Members of each sample: text only, one and two images, a video, and one (3) without an answer, so no label."""
    question = json.dumps({"messages": [{"role": "user", "content": "<image>No answer to this."}]}).encode()
    return [
        [("000.json", chat_json("1 plus 1?", "2."))],
        [
            ("001.json", chat_json("<image>What?", "A red one.", facts=["red"])),
            ("001.png", image_bytes(60, 60, seed=1)),
        ],
        [("002.json", chat_json("Say it. " * 6, "Yes, and once more, at length. " * 3))],
        [("003.json", question), ("003.png", image_bytes(90, 60, seed=3))],
        [
            ("004.json", chat_json("<image> or <image>?", "The second.")),
            ("004.0.png", image_bytes(60, 90, seed=4)),
            ("004.1.png", image_bytes(120, 60, seed=5)),
        ],
        [("005.json", chat_json("<image>Which?", "Blue.", facts=["Blue"])), ("005.png", image_bytes(120, 120, seed=6))],
        [("006.json", chat_json("<video>Where?", "Up.")), ("006.mp4", video_bytes(64, 64, 8))],
        [("007.json", chat_json("And?", "Nothing else to say here."))],
        [("008.json", chat_json("<image>?", "Green and grey.")), ("008.png", image_bytes(60, 60, seed=8))],
        [("009.json", chat_json("<image>Hm?", "Dark.", facts=["Dark"])), ("009.png", image_bytes(84, 56, seed=9))],
        [("010.json", chat_json("Short?", "No."))],
        [("011.json", chat_json("A longer question, is it not?", "It is."))],
    ]


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory, write_shard: Callable[..., Path], members: Any) -> Path:
    """A shard of twelve samples in which all is well."""
    return write_shard(tmp_path_factory.mktemp("corpus") / "good.tar", [item for sample in members for item in sample])


@pytest.fixture(scope="session")
def truncated_corpus(tmp_path_factory: pytest.TempPathFactory, write_shard: Callable[..., Path], members: Any) -> Path:
    """The same samples, but the picture of sample 5 ends in the middle: its header is fine, the scan sees nothing."""
    broken = [list(sample) for sample in members]
    name, data = broken[TRUNCATED_ID][1]
    broken[TRUNCATED_ID][1] = (name, data[: len(data) // 2])
    return write_shard(tmp_path_factory.mktemp("broken") / "bad.tar", [item for sample in broken for item in sample])


@pytest.fixture(scope="session")
def text_corpus(tmp_path_factory: pytest.TempPathFactory, write_shard: Callable[..., Path], members: Any) -> Path:
    """The samples without media."""
    texts = [item for sample in members if len(sample) == 1 for item in sample]
    return write_shard(tmp_path_factory.mktemp("texts") / "texts.tar", texts)


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache of indices for all tests."""
    return tmp_path_factory.mktemp("cache")


def small_options(corpus: Path, cache: Path) -> dict[str, Any]:
    """Options of a run of three steps with several micro-batches each: any two samples fit a pack, four rarely do."""
    return {
        "model": "check",
        "data": str(corpus),
        "cache_dir": cache,
        "global_batch_size": 4,
        "capacity_tokens": 230,
        "eval_share": 0.0,
        "num_workers": 0,
        "threads": 1,
        "compare_steps": 0,
        "lr": 1e-2,
    }


@pytest.fixture
def fit_config(tmp_path: Path, corpus: Path, cache: Path) -> Callable[..., FitConfig]:
    """`fit_config("name", **options)`: a small run whose folder is tmp_path / name."""

    def make(name: str = "run", **options: Any) -> FitConfig:
        return FitConfig(output=tmp_path / name, **{**small_options(corpus, cache), **options})

    return make


@pytest.fixture
def check_config(corpus: Path, cache: Path) -> Callable[..., CheckConfig]:
    """`check_config(**options)`: one step that holds the whole corpus."""

    def make(**options: Any) -> CheckConfig:
        fixed = {"data": str(corpus), "cache_dir": cache, "global_batch_size": NUM_SAMPLES}
        return CheckConfig(**{**fixed, **options})

    return make


@pytest.fixture(scope="session")
def losses() -> Callable[[Path], Sequence[float]]:
    """`losses(run)`: training losses by the run's steps.jsonl."""
    from balancer.records import read_records

    def read(run: Path) -> Sequence[float]:
        return [record.loss for record in read_records(run / "steps.jsonl")]

    return read


class Killed(BaseException):
    """Stands for kill -9: nothing is saved, nothing is tidied up."""


@pytest.fixture
def killed_after(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`killed_after(config, step, is_recorded=True)`: run until the record of `step` is written, or about to be."""
    from trainer.fit_command import run_fit

    write = RecordWriter.write

    def run(config: FitConfig, step: int, *, is_recorded: bool = True) -> None:
        def write_then_die(self: RecordWriter, record: StepRecord) -> None:
            if is_recorded or record.step != step:
                write(self, record)
            if record.step == step:
                raise Killed

        with monkeypatch.context() as patch:
            patch.setattr(RecordWriter, "write", write_then_die)
            with pytest.raises(Killed):
                run_fit(config)

    return run


@pytest.fixture(scope="session")
def consumed() -> Callable[[FitConfig], list[list[int]]]:
    """`consumed(config)`: ids of every step of its run, by the ledger."""

    def read(config: FitConfig) -> list[list[int]]:
        assert config.output is not None
        lines = read_lines(config.output / "ledger.jsonl")
        return [[i for rank in line.ids for i in rank] for line in lines if isinstance(line, StepLine)]

    return read


@pytest.fixture(scope="session")
def proven() -> Callable[[FitConfig], VerifyReport]:
    """`proven(config)`: the report on its run, whose ledger is sound, and each step selected and placed again."""

    def prove(config: FitConfig) -> VerifyReport:
        assert config.output is not None
        report = verify_run(config.output)
        assert report.holds, report.findings
        assert report.num_selected == report.num_placed == report.num_steps
        return report

    return prove
