"""`balancer-analyze index` and `merge`: built, updated, in parts, refused; and what they say."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataloaders import member_cache
from dataloaders.build_progress import BuildProgress
from dataloaders.estimators import estimator_from_config
from dataloaders.index import CostIndex
from dataloaders.open_source import open_source
from dataloaders.rough_encoder import RoughEncoder
from dataloaders.scan import scan_source
from dataloaders.tar_source import TarSource
from tools import index_command
from tools.benchmarks.range_server import RangeServer
from tools.cli import main
from tools.model_folder import load_rules

Make = Callable[..., bytes]
QWEN = {"config": {"model_type": "qwen2_5_vl"}, "preprocessor_config": {"min_pixels": 784, "max_pixels": 64 * 784}}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model folder in Hugging Face format without a tokenizer."""
    folder = tmp_path / "model"
    folder.mkdir()
    for name, content in QWEN.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


@pytest.fixture
def shards(tmp_path: Path, write_shard: Callable[..., Path], chat_json: Make, image_bytes: Make) -> str:
    """Four shards of two samples: a picture, and a strip that the processor refuses."""
    for number in range(4):
        members = [("0.json", chat_json("<image>?", "Yes.")), ("0.png", image_bytes(60 + 40 * number, 80))]
        members += [("1.json", chat_json("<image>?", "No.")), ("1.png", image_bytes(2100, 4))]
        write_shard(tmp_path / f"s{number}.tar", members)
    return str(tmp_path / "s{0..3}.tar")


def _built(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, object]:
    assert main([*argv, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_an_index_is_built_and_described(
    shards: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["index", shards, "--model", str(model), "--output", str(tmp_path / "index")]) == 0
    said = capsys.readouterr().out
    assert "8 samples in 4 shards, 4 of them scanned now; 4 media" in said
    assert "media: Qwen2.5-VL" in said
    assert "text: RoughEncoder (rough-1 bytes_per_token=4.0), estimated, labels on assistant" in said
    assert "4 samples are unusable (extreme_aspect: 4)" in said
    index = CostIndex.open(tmp_path / "index")
    expected = scan_source(TarSource(shards), estimator_from_config(model), encoder=RoughEncoder())
    assert index.fingerprint == expected.fingerprint


def test_a_second_run_reads_nothing_and_a_new_shard_is_added(
    shards: str,
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    write_shard: Callable[..., Path],
) -> None:
    argv = ["index", str(tmp_path / "s*.tar"), "--model", str(model), "--output", str(tmp_path / "index")]
    assert _built(capsys, *argv)["shards_scanned"] == 4
    assert _built(capsys, *argv)["shards_scanned"] == 0
    write_shard(tmp_path / "s9.tar", [("0.txt", b"a caption")])
    said = _built(capsys, *argv)
    assert (said["shards_scanned"], said["shards"], said["samples"]) == (1, 5, 9)


def test_several_shards_and_processes_are_named_on_the_line(
    shards: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    names = [str(tmp_path / f"s{number}.tar") for number in range(4)]
    common = ("--model", str(model), "--text", "bytes")
    one = _built(capsys, "index", *names, *common, "--workers", "2", "--output", str(tmp_path / "one"))
    two = _built(capsys, "index", shards, *common, "--workers", "1", "--output", str(tmp_path / "two"))
    assert one["fingerprint"] == two["fingerprint"]


def test_parts_are_merged_to_the_index_of_one_machine(
    shards: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ("index", shards, "--model", str(model), "--output")
    whole = _built(capsys, *common, str(tmp_path / "whole"))
    for part in ("1/3", "2/3", "0/3"):
        said = _built(capsys, *common, str(tmp_path / part[0]), "--part", part)
        assert said["part"] == part
    merged = _built(capsys, "merge", *(str(tmp_path / name) for name in "201"), "--output", str(tmp_path / "merged"))
    said_of_the_build = {"folder": 0, "shards_scanned": 0, "note": 0}
    assert {**merged, **said_of_the_build} == {**whole, **said_of_the_build}
    assert main(["merge", str(tmp_path / "1"), str(tmp_path / "2"), "--output", str(tmp_path / "x")]) == 1
    assert "part 0/3 is missing" in capsys.readouterr().err


def test_the_policy_for_unfit_media_is_an_option(
    shards: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for policy, counts in (("skip", (4, 0)), ("clamp", (0, 4))):
        output = str(tmp_path / policy)
        said = _built(capsys, "index", shards, "--model", str(model), "--output", output, "--unfit", policy)
        assert (said["unusable"], said["clamped"]) == counts


def test_under_error_all_are_listed_and_nothing_is_written(
    shards: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["index", shards, "--model", str(model), "--output", str(tmp_path / "i"), "--unfit", "error"]
    assert main(argv) == 1
    printed = capsys.readouterr().err
    assert "would fail on the media of 4 of 8 samples" in printed
    assert all(f"s{number}.tar, key 1, member 1.png" in printed for number in range(4))
    assert not (tmp_path / "i").exists()


def test_an_index_of_another_model_is_refused_with_the_remedy(
    shards: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["index", shards, "--model", str(model), "--output", str(tmp_path / "i")]
    before = _built(capsys, *argv)
    (model / "preprocessor_config.json").write_text(json.dumps({"max_pixels": 99 * 784}), encoding="utf-8")
    assert main(argv) == 1
    assert "estimator is" in (printed := capsys.readouterr().err)
    assert "--replace" in printed
    assert _built(capsys, *argv, "--replace")["fingerprint"] != before["fingerprint"]


@pytest.mark.parametrize(
    "argv",
    [
        ["--part", "4/3"],
        ["--part", "3/3"],
        ["--part", "one"],
        ["--workers", "0"],
        ["--unfit", "ignore"],
    ],
)
def test_options_that_mean_nothing_are_usage_errors(
    argv: list[str], shards: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["index", shards, "--model", str(model), "--output", str(tmp_path / "i"), *argv]) == 2
    printed = capsys.readouterr()
    assert printed.out + printed.err != ""


def test_without_shards_or_model_it_is_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["index", "--model", "m", "--output", "o"]) == 2
    assert main(["index", "x.tar", "--output", "o"]) == 2
    assert "--model" in "".join(capsys.readouterr())


def test_a_build_that_is_interrupted_ends_with_130(
    shards: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    argv = ["index", shards, "--model", str(model), "--output", str(tmp_path / "i")]
    real = index_command.build_shards
    monkeypatch.setattr(index_command, "build_shards", interrupted)
    assert main(argv) == 130
    assert capsys.readouterr().err == "interrupted: the same command goes on where this one was\n"

    def stopped(*args: object, progress: Callable[[BuildProgress], None], **options: object) -> None:
        def stop(state: BuildProgress) -> None:
            progress(state)
            if state.shards == 3:
                raise KeyboardInterrupt

        real(*args, progress=stop, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(index_command, "build_shards", stopped)
    assert main(argv) == 130
    told = "interrupted: 3 of 4 shards are done; the same command goes on where this one was\n"
    assert capsys.readouterr().err == told
    monkeypatch.setattr(index_command, "build_shards", real)
    assert main(argv) == 0


def test_shards_leave_an_index_only_when_asked(
    shards: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    end = ("--model", str(model), "--output", str(tmp_path / "i"))
    _built(capsys, "index", shards, *end)
    assert main(["index", str(tmp_path / "s1.tar"), *end]) == 1
    printed = capsys.readouterr().err
    assert "3 of the 4 shards in this index are not among those that are named: " in printed
    assert "s0.tar" in printed
    assert "--replace" in printed
    assert len(CostIndex.open(tmp_path / "i")) == 8
    assert _built(capsys, "index", str(tmp_path / "s1.tar"), *end, "--replace")["samples"] == 2


@pytest.mark.parametrize("spelled", [["--output", "~/ix"], ["--output=~/ix"]])
def test_the_home_folder_is_expanded_everywhere(
    spelled: list[str],
    shards: str,
    model: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    home = Path(shards).parent
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(model)
    said = _built(capsys, "index", "~/s{0..3}.tar", "--model", "~/model", *spelled)
    assert said["folder"] == str(home / "ix")
    assert _built(capsys, "data", "~/ix", "--model=~/model", "--plot=~/x.svg")["num_samples"] == 8
    assert (home / "x.svg").is_file()
    _built(capsys, "index", "~/s0.tar", "--model", "~/model", "--part", "0/1", "--output", "~/part")
    assert _built(capsys, "merge", "~/part", "--output", "~/whole")["folder"] == str(home / "whole")
    assert main(["tokens", "64x64", "--model", "~/model"]) == 0
    assert main(["run", "~/gone"]) == 2
    assert str(home / "gone") in capsys.readouterr().err
    assert not any("~" in name for name in os.listdir(model))


def test_one_reason_for_half_of_the_samples_is_a_warning(
    shards: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["index", shards, "--model", str(model), "--output", str(tmp_path / "i")]
    assert main(argv) == 0
    printed = capsys.readouterr().out
    assert "warning: 4 of 8 samples are unusable for one reason, extreme_aspect. The first: " in printed
    assert "s0.tar, key 1, member 1.png" in printed
    assert str(_built(capsys, *argv)["warning"]).startswith("4 of 8 samples")
    assert _built(capsys, *argv, "--unfit", "clamp", "--replace")["warning"] == ""


def test_text_that_is_estimated_unasked_says_why(
    shards: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["index", shards, "--model", str(model), "--output", str(tmp_path / "i")]
    assert _built(capsys, *argv)["note"] == f"text is estimated: no tokenizer.json in {model}"
    (model / "tokenizer.json").write_text("{}", encoding="utf-8")
    assert main(argv) == 0
    printed = capsys.readouterr().out
    assert f"note: text is estimated although tokenizer.json is there: no chat template 'default' at {model}" in printed
    assert "chat_template.jinja" in printed
    assert main(["data", shards, "--model", str(model)]) == 0
    assert "note: text is estimated although tokenizer.json is there" in capsys.readouterr().out
    assert _built(capsys, *argv, "--text", "rough")["note"] == ""


@pytest.mark.parametrize(
    "case",
    [
        ("models/nope", "--model models/nope: no such folder. "),
        ("model/config.json", "a file, not a folder. Name its folder: model"),
        ("Qwen/Qwen2.5-VL-7B-Instruct", "hub are not resolved: download the configuration files"),
    ],
)
def test_a_model_that_is_no_folder_is_a_usage_error(
    case: tuple[str, str],
    shards: str,
    model: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name, message = case
    monkeypatch.chdir(model.parent)
    for argv in (["index", shards, "--output", "i"], ["data", shards], ["tokens", "64x64"]):
        assert main([*argv, "--model", name]) == 2
        assert message in capsys.readouterr().err
    assert not (model.parent / "i").exists()


def test_an_output_that_cannot_be_written_is_a_failure_with_the_remedy(
    shards: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = ["index", shards, "--model", str(model), "--output"]
    assert main([*argv, str(model / "config.json" / "i")]) == 1
    printed = capsys.readouterr().err
    assert "nothing can be written here" in printed
    assert "Choose another folder" in printed

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(index_command, "build_shards", full)
    assert main([*argv, str(tmp_path / "i")]) == 1
    assert "cannot be written: [Errno 28] No space left on device. Free some space" in capsys.readouterr().err


def test_progress_is_a_line_now_and_then_where_nobody_watches(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(index_command.time, "monotonic", lambda: now[0])
    with index_command.build_progress() as show:
        for seconds in (0, 5, 11, 12, 22):
            now[0] = 100.0 + seconds
            show(BuildProgress(num_shards=9, num_bytes=100, shards=seconds // 3, bytes=seconds, samples=1000 * seconds))
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.splitlines() == [
        "3 of 9 shards, 11,000 samples, 11% of the bytes",
        "7 of 9 shards, 22,000 samples, 22% of the bytes",
    ]


def test_an_exported_model_folder_gives_its_own_rule_and_bytes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}", encoding="utf-8")
    (tmp_path / "processor.json").write_text(json.dumps(QWEN), encoding="utf-8")
    rules = load_rules(tmp_path)
    assert rules.estimator.fingerprint == estimator_from_config(QWEN).fingerprint
    assert rules.encoder.fingerprint == "byte-1"


def test_the_text_rule_can_be_chosen_and_a_template_needs_a_folder(
    model: Path, shards: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert load_rules(model, text="bytes", train_on="all").encoder.train_on == "all"
    argv = ["index", shards, "--model", str(model), "--output", str(tmp_path / "i"), "--text", "template"]
    assert main(argv) == 1
    assert "tokenizer.json" in capsys.readouterr().err
    assert os.listdir(model) != []


@pytest.fixture
def lines(tmp_path: Path, image_bytes: Make) -> str:
    """Two JSONL files of three samples each, pictures in another folder; one line is no JSON."""
    (tmp_path / "pictures").mkdir()
    for number in range(2):
        rows = []
        for n in range(3):
            (tmp_path / "pictures" / f"{number}{n}.png").write_bytes(image_bytes(60 + 40 * n, 80, seed=n))
            turns = [{"role": "user", "content": "<image>?"}, {"role": "assistant", "content": "Yes."}]
            rows.append(json.dumps({"messages": turns, "image": f"{number}{n}.png"}))
        rows[1] = rows[1] if number else "{"
        (tmp_path / f"l{number}.jsonl").write_text("\n".join(rows), encoding="utf-8")
    return str(tmp_path / "l*.jsonl")


def test_lines_are_indexed_and_bad_ones_listed(
    lines: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    end = ("--media-root", str(tmp_path / "pictures"), "--model", str(model), "--output", str(tmp_path / "i"))
    assert main(["index", lines, *end]) == 0
    said = capsys.readouterr().out
    assert "i: 6 samples, scanned now; 5 media" in said
    assert "1 samples are unusable (bad_record: 1)" in said
    source = open_source(lines, media_root=tmp_path / "pictures")
    expected = scan_source(source, estimator_from_config(model), encoder=RoughEncoder())
    assert CostIndex.open(tmp_path / "i").fingerprint == expected.fingerprint
    assert main(["index", lines, *end]) == 0
    assert "i: 6 samples, unchanged; 5 media" in capsys.readouterr().out
    again = _built(capsys, "index", *(str(tmp_path / f"l{number}.jsonl") for number in range(2)), *end)
    assert (again["shards"], again["shards_scanned"], again["slices_scanned"]) == (0, None, None)
    assert main(["data", str(tmp_path / "i")]) == 0
    assert "l0.jsonl, key line 2" in capsys.readouterr().out
    assert main(["index", lines.replace("*", "1"), *end]) == 1
    assert "1 of the 2 files in this index are not among those that are named" in capsys.readouterr().err
    assert _built(capsys, "index", lines.replace("*", "1"), *end, "--replace")["slices_scanned"] == 1


def test_data_of_every_kind_are_reported_without_an_index(
    lines: str, shards: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = _built(capsys, "data", lines, "--media-root", str(tmp_path / "pictures"))
    assert (said["num_samples"], said["num_usable"]) == (6, 5)
    rows = [{"text": f"a caption of {n}"} for n in range(4)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    assert _built(capsys, "data", str(tmp_path / "rows.parquet"))["num_usable"] == 4
    assert _built(capsys, "data", shards)["num_samples"] == 8
    assert main(["data", str(tmp_path / "gone.jsonl")]) == 1
    assert "gone.jsonl" in capsys.readouterr().err
    assert main(["data", str(tmp_path / "pictures")]) == 2
    assert "nor data: the folder holds no file of data" in capsys.readouterr().err


def test_a_saved_data_set_and_a_parquet_file_have_the_same_index(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], image_bytes: Make
) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    rows = [{"text": f"caption {n}", "image": {"bytes": image_bytes(40, 40, seed=n), "path": None}} for n in range(3)]
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    found = []
    for name in ("saved", "rows.parquet"):
        said = _built(
            capsys, "index", str(tmp_path / name), "--model", str(model), "--output", str(tmp_path / "i"), "--replace"
        )
        found.append((said["samples"], said["unusable"], said["media"]))
    assert found == [(3, 0, 3)] * 2


def test_an_option_for_another_kind_of_data_is_a_usage_error(
    lines: str, shards: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    end = ["--model", str(model), "--output", str(tmp_path / "i")]
    assert main(["index", lines, *end, "--part", "0/2"]) == 2
    assert "--part 0/2: parts are for tar shards" in capsys.readouterr().err
    assert main(["index", shards, *end, "--media-root", "x"]) == 2
    assert "--media-root is not for tars" in capsys.readouterr().err
    assert not (tmp_path / "i").exists()


def test_data_sets_given_to_tokens_are_sent_to_the_command_for_them(
    lines: str, shards: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("l0.jsonl", "s0.tar"):
        assert main(["tokens", str(tmp_path / name), "--model", str(model)]) == 1
        assert "Use balancer-analyze index or data for data sets" in capsys.readouterr().out


def test_a_media_root_for_an_index_is_a_usage_error(
    shards: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _built(capsys, "index", shards, "--model", str(model), "--output", str(tmp_path / "i"))
    assert main(["data", str(tmp_path / "i"), "--media-root", "x"]) == 2
    assert "an index reads no media" in capsys.readouterr().err


def test_members_are_kept_where_training_looks_for_them(
    shards: str, model: Path, tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    argv = ["index", shards, "--model", str(model), "--output"]
    assert main([*argv, str(tmp_path / "i")]) == 0
    assert main([*argv, str(tmp_path / "j"), "--cache-dir", str(tmp_path / "mine")]) == 0
    monkeypatch.setattr(member_cache, "pass_over", pytest.fail)
    for cache in (own_cache, tmp_path / "mine"):
        assert len(TarSource(shards, members=cache / "members")) == 8
    assert main(["data", shards]) == 0


def test_a_cache_that_cannot_be_written_is_an_error_only_where_it_was_named(
    shards: str,
    model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "file").write_text("x")
    argv = ["index", shards, "--model", str(model), "--output", str(tmp_path / "i")]
    assert main([*argv, "--cache-dir", str(tmp_path / "file" / "cache")]) == 2
    assert "cannot be written to" in capsys.readouterr().err
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert main(argv) == 0
    assert main(["data", shards]) == 0


def test_an_index_cannot_lie_at_a_url(
    lines: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for data in (lines, lines.replace("l*.jsonl", "s0.tar")):
        Path(tmp_path / "s0.tar").touch()
        assert main(["index", data, "--model", str(model), "--output", "s3://bucket/i"]) == 1
        assert "cannot lie at a URL" in capsys.readouterr().err
    assert not (tmp_path / "s3:").exists()


def test_a_build_of_slices_that_is_interrupted_says_how_far_it_is(
    lines: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = index_command.build_slices

    def stopped(*args: object, progress: Callable[[BuildProgress], None], **options: object) -> None:
        def stop(state: BuildProgress) -> None:
            progress(state)
            if state.shards == 2:
                raise KeyboardInterrupt

        real(*args, progress=stop, slice_samples=2, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(index_command, "build_slices", stopped)
    assert main(["index", lines, "--model", str(model), "--output", str(tmp_path / "i")]) == 130
    assert "interrupted: 2 of 2 slices are done; the same command" in capsys.readouterr().err


def test_data_at_a_url_are_indexed_by_several_processes_and_ranges_kept_where_asked(
    lines: str, shards: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("aiohttp")
    with RangeServer(tmp_path) as server:
        common = ("--model", str(model), "--workers", "2", "--cache-dir", str(tmp_path / "kept"), "--output")
        urls = [server.url(f"l{number}.jsonl") for number in range(2)]
        said = _built(capsys, "index", *urls, "--media-root", server.url("pictures"), *common, str(tmp_path / "i"))
        assert (said["samples"], said["unusable"], said["media"]) == (6, 1, 5)
        urls = [server.url(f"s{number}.tar") for number in range(4)]
        assert _built(capsys, "index", *urls, *common, str(tmp_path / "j"))["shards_scanned"] == 4
    local = scan_source(TarSource(shards), estimator_from_config(model), encoder=RoughEncoder())
    assert CostIndex.open(tmp_path / "j").fingerprint == local.fingerprint
    assert sorted(os.listdir(tmp_path / "kept")) == ["members", "ranges"]
