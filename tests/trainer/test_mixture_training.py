"""Training on mixtures: drawn as weighed, resumed exactly, weights changed on a resume, data and parts not."""

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from balancer.ledger import read_lines  # noqa: E402
from balancer.ledger_lines import RunLine, StartLine  # noqa: E402
from balancer.mixture import MixtureSelector  # noqa: E402
from tools.verify_command import VerifyReport  # noqa: E402
from trainer.check_command import build_subject  # noqa: E402
from trainer.checkpoint import latest_complete, read_meta  # noqa: E402
from trainer.config import CheckConfig, FitConfig, PlanConfig  # noqa: E402
from trainer.data import training_side  # noqa: E402
from trainer.errors import ConfigError  # noqa: E402
from trainer.fit_command import run_fit  # noqa: E402
from trainer.mixture import PROGRESS_KEY, mixture_selector  # noqa: E402
from trainer.model_source import load_model_source  # noqa: E402
from trainer.plan_command import run_plan  # noqa: E402

MakeConfig = Callable[..., FitConfig]
KilledAfter = Callable[..., None]
Consumed = Callable[[FitConfig], list[list[int]]]
Proven = Callable[[FitConfig], VerifyReport]
WriteMixture = Callable[..., Path]
IN_TAR = 12  # samples of the first part; the second one has 8


@pytest.fixture
def pages(tmp_path: Path) -> Path:
    """JSON lines with eight samples of text."""
    file = tmp_path / "pages.jsonl"
    turns = [
        [{"role": "user", "content": "Go on."}, {"role": "assistant", "content": "So. " * i}] for i in range(2, 10)
    ]
    file.write_text("".join(json.dumps({"messages": turn}) + "\n" for turn in turns), encoding="utf-8")
    return file


@pytest.fixture
def mixture(tmp_path: Path, corpus: Path, pages: Path) -> WriteMixture:
    """`mixture("name", weights, unit=..., **options of pages)`: a file with `captions` (a tar) and `pages`."""

    def write(name: str, first: float = 1, second: float = 1, *, unit: str = "samples", **options: Any) -> Path:
        parts = [
            {"name": "captions", "data": str(corpus), "weight": first},
            {"name": "pages", "data": pages.name, "weight": second, **options},
        ]
        file = tmp_path / f"{name}.json"
        file.write_text(json.dumps({"unit": unit, "parts": parts}), encoding="utf-8")
        return file

    return write


@pytest.fixture
def mixed(fit_config: MakeConfig, mixture: WriteMixture) -> MakeConfig:
    """`mixed("run", mixture=file, **options)`: a small run on a mixture."""

    def make(name: str = "run", **options: Any) -> FitConfig:
        return fit_config(name, **{"data": None, "mixture": mixture("even"), "max_steps": 8, **options})

    return make


@pytest.mark.parametrize("shuffle", ["full", "block", "none"])
def test_every_part_is_read_by_its_weight_and_the_ledger_proves_it(
    mixed: MakeConfig, shuffle: str, capsys: pytest.CaptureFixture[str], proven: Proven
) -> None:
    config = mixed(shuffle=shuffle, eval_share=0.1, max_steps=20)
    assert run_fit(config) == 0
    printed = capsys.readouterr().out
    report = proven(config)
    assert [part.name for part in report.parts] == ["captions", "pages"]
    read = [part.num_complete * part.num_ids + part.unfinished for part in report.parts]
    assert sum(read) == 80
    assert abs(read[0] - read[1]) <= 2
    assert "mixture by samples: captions 50.00% (" in printed
    assert re.search(r"note: part 'pages' \(\d samples\) is read \d\.\d times in 20 steps, more than 4", printed)
    assert re.search(r"part captions .* \d\d\.\d\d% of samples \(asked 50\.00%\)", printed)
    assert config.output is not None
    summary = json.loads((config.output / "summary.json").read_text())["mixture"]
    assert [part["samples"] for part in summary["parts"]] == read
    assert (summary["start"], summary["stop"], summary["unit"]) == (0, 20, "samples")


def test_a_run_that_is_killed_and_resumed_draws_what_one_run_draws(
    mixed: MakeConfig, killed_after: KilledAfter, consumed: Consumed, proven: Proven
) -> None:
    whole, parts = mixed("whole", max_steps=9), mixed("parts", max_steps=9, checkpoint_interval_steps=3)
    assert run_fit(whole) == 0
    killed_after(parts, 5)
    killed_after(dataclasses.replace(parts, resume=True, num_workers=1), 8)
    assert run_fit(dataclasses.replace(parts, resume=True)) == 0
    assert consumed(parts) == consumed(whole)
    report = proven(parts)
    assert (report.num_starts, report.num_discarded, report.weight_changes) == (3, 4, ())


def test_weights_change_on_a_resume_and_the_past_stays(
    mixed: MakeConfig, mixture: WriteMixture, killed_after: KilledAfter, consumed: Consumed, proven: Proven
) -> None:
    """DR-02, DR-04: no part loses or repeats a sample over the change; weights lost with a process are forgotten."""
    whole, parts = mixed("whole", max_steps=12), mixed("parts", max_steps=12, checkpoint_interval_steps=2)
    assert run_fit(whole) == 0
    killed_after(parts, 5)
    forgotten = dataclasses.replace(parts, resume=True, mixture=mixture("forgotten", 1, 0), checkpoint_interval_steps=9)
    killed_after(forgotten, 7)
    assert run_fit(dataclasses.replace(parts, resume=True, mixture=mixture("later", 3, 1))) == 0
    assert consumed(parts)[:4] == consumed(whole)[:4]
    report = proven(parts)
    assert report.weight_changes == (4,)
    assert (report.num_starts, report.num_discarded) == (3, 1 + 3)
    later = [i < IN_TAR for step in consumed(parts)[4:] for i in step]
    assert sum(later) == 24
    assert len(later) == 32
    assert parts.output is not None
    newest = latest_complete(parts.output / "checkpoints")
    assert newest is not None
    saved = read_meta(newest)["progress"][PROGRESS_KEY]
    assert [state["since"] for state in saved["weights"]] == [0, 4]
    starts = [line for line in read_lines(parts.output / "ledger.jsonl") if isinstance(line, StartLine)]
    assert [len(start.weights) for start in starts] == [1, 2, 2]


def test_a_mixture_ends_when_its_parts_were_read_max_epochs_times(
    mixed: MakeConfig, mixture: WriteMixture, proven: Proven
) -> None:
    config = mixed(mixture=mixture("short", 0, 1, max_epochs=2), max_steps=100, global_batch_size=2)
    assert run_fit(config) == 0
    report = proven(config)
    assert [(part.num_complete, part.unfinished) for part in report.parts] == [(0, 0), (2, 0)]
    assert report.num_steps == 8
    epochs = mixed("epochs", mixture=mixture("half", 1, 1), max_steps=None, epochs=1.5)
    assert run_fit(epochs) == 0
    assert proven(epochs).num_steps == 8  # 20 samples are 5 steps


def with_another_part(file: Path) -> None:
    content = json.loads(file.read_text())
    content["parts"].append({**content["parts"][1], "name": "more"})
    file.write_text(json.dumps(content))


def with_another_name(file: Path) -> None:
    file.write_text(file.read_text().replace('"pages"', '"leaves"'))


def with_parts_exchanged(file: Path) -> None:
    content = json.loads(file.read_text())
    file.write_text(json.dumps({**content, "parts": content["parts"][::-1]}))


def with_other_data(file: Path) -> None:
    pages = file.with_name("pages.jsonl")
    pages.write_text("".join(pages.read_text().splitlines(keepends=True)[:7]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (with_another_part, "the parts were captions, pages and are now captions, pages, more: a resume keeps them"),
        (with_another_name, "the parts were captions, pages and are now captions, leaves"),
        (with_parts_exchanged, "the parts were captions, pages and are now pages, captions"),
        (with_other_data, r"part 'pages' has changed: .*num_samples was 8 and is now 7"),
    ],
)
def test_a_resume_keeps_parts_and_their_data(
    mixed: MakeConfig, change: Callable[[Path], None], message: str, consumed: Consumed
) -> None:
    config = mixed(max_steps=2)
    assert run_fit(config) == 0
    assert config.mixture is not None
    change(config.mixture)
    with pytest.raises(ConfigError, match=message):
        run_fit(dataclasses.replace(config, resume=True, max_steps=4))
    assert len(consumed(config)) == 2


def test_a_checkpoint_of_other_samples_is_refused_without_its_ledgers_help(mixed: MakeConfig) -> None:
    config = mixed()
    side = training_side(config, load_model_source(config.model).processor)
    selector = mixture_selector(side, side.ids, config)
    assert isinstance(selector, MixtureSelector)
    progress = {PROGRESS_KEY: {"weights": selector.weights.to_state(), "digest": selector.digest}}
    again = mixture_selector(side, side.ids, config, progress=progress, at_step=5)
    assert again is not None
    assert again.digest == selector.digest
    with pytest.raises(ConfigError, match="the samples of the mixture are not those of the checkpoint"):
        mixture_selector(side, side.ids[1:], config, progress=progress, at_step=5)
    with pytest.raises(ConfigError, match="the checkpoint is of a run without a mixture"):
        mixture_selector(side, side.ids, config, progress={}, at_step=5)


def test_a_run_is_not_turned_into_a_mixture(fit_config: MakeConfig, mixed: MakeConfig) -> None:
    assert run_fit(fit_config(max_steps=1)) == 0
    with pytest.raises(ConfigError, match="selector was step and is now mixture"):
        run_fit(dataclasses.replace(mixed(), resume=True))


@pytest.mark.parametrize("damage", ["gone", "short"])
def test_a_run_is_not_resumed_without_its_whole_ledger(mixed: MakeConfig, damage: str) -> None:
    config = mixed(max_steps=3)
    assert run_fit(config) == 0
    assert config.output is not None
    ledger = config.output / "ledger.jsonl"
    if damage == "gone":
        ledger.unlink()
    else:
        ledger.write_bytes(b"".join(ledger.read_bytes().splitlines(keepends=True)[:-1]))
    message = {"gone": "has a checkpoint, but no ledger", "short": "ends at step 2, but the checkpoint holds 3 steps"}
    with pytest.raises(ConfigError, match=message[damage]):
        run_fit(dataclasses.replace(config, resume=True, max_steps=5))


def test_a_mixture_is_an_alternative_to_data(mixed: MakeConfig, corpus: Path) -> None:
    with pytest.raises(ConfigError, match=r"data=.* and mixture=.* are both given"):
        mixed(data=str(corpus))
    with pytest.raises(ConfigError, match="each of its parts may have a media_root"):
        mixed(media_root="images")
    assert mixed(media_root="images", eval_data=str(corpus)).media_root == "images"


def test_a_plan_says_what_each_part_will_have(
    mixed: MakeConfig, mixture: WriteMixture, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {field.name for field in dataclasses.fields(PlanConfig)}
    config = mixed(mixture=mixture("tokens", unit="llm_tokens"), max_steps=30)
    values = {k: v for k, v in dataclasses.asdict(config).items() if k in options}
    assert run_plan(PlanConfig(**values)) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "mixture over 30 steps: captions:" in printed
    assert "of llm tokens (asked 50.00%)" in printed


def test_the_check_takes_its_step_from_the_mixture(mixed: MakeConfig) -> None:
    config = mixed()
    subject = build_subject(
        CheckConfig(mixture=config.mixture, cache_dir=config.cache_dir, global_batch_size=4, seed=config.seed)
    )
    ids = subject.plans.sample_ids(0)
    assert (ids < IN_TAR).sum() == 2
    assert len(ids) == 4


def test_what_cannot_be_read_is_listed_with_its_file_and_line(mixed: MakeConfig, pages: Path) -> None:
    lines = pages.read_text().splitlines(keepends=True)
    pages.write_text("".join([*lines[:2], "not json\n", *lines[2:]]))
    config = mixed(max_steps=1, bad_records="skip")
    assert run_fit(config) == 0
    assert config.output is not None
    (bad,) = [json.loads(text) for text in (config.output / "bad_samples.jsonl").read_text().splitlines()]
    assert (bad["kind"], bad["sample_id"]) == ("scan", IN_TAR + 2)
    assert bad["shard"] == str(pages)
    run = next(line for line in read_lines(config.output / "ledger.jsonl") if isinstance(line, RunLine))
    assert [part.num_ids for part in run.parts] == [IN_TAR, 8]


def test_held_out_samples_are_never_drawn(mixed: MakeConfig, consumed: Consumed) -> None:
    config = mixed(eval_share=0.3, max_steps=15)
    assert run_fit(config) == 0
    drawn = {i for step in consumed(config) for i in step}
    assert len(drawn) == 14
