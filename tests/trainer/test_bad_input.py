"""What users get wrong, through the command line: a message with cause, place and remedy, an exit code, no stack trace.

Every case runs `main(argv)` in this process. Exit codes: 2 usage or configuration, 1 data that cannot be trained on.
"""

import io
import json
import re
import shutil
import struct
import tarfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from balancer.records import read_records  # noqa: E402
from tools.cli import main as analyze_main  # noqa: E402
from trainer.cli import main as train_main  # noqa: E402

ESCAPE = "\x1b[31mRED\x1b]0;title\x07"
Member = tuple[str, bytes]


@dataclass(frozen=True, slots=True)
class Answer:
    """What a command left behind."""

    code: int
    out: str
    err: str


Run = Callable[..., Answer]
Shard = Callable[..., str]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """`run(*argv, main=...)`: one command; nothing it prints may hold a control character of the data."""

    def call(*argv: object, main: Callable[[list[str]], int] = train_main) -> Answer:
        try:
            code = main([str(word) for word in argv])
        except SystemExit as leaving:  # usage errors leave before any command runs
            code = int(leaving.code or 0)
        captured = capsys.readouterr()
        for text in (captured.out, captured.err):
            assert "\x07" not in text
            assert "\x1b" not in text
            assert "Traceback" not in text
        return Answer(code, captured.out, captured.err)

    return call


@pytest.fixture
def options(tmp_path: Path, cache: Path) -> list[object]:
    """A run of three small steps."""
    fixed = ["--model", "check", "--compare-steps", 0, "--num-workers", 0, "--threads", 1, "--eval-share", 0]
    return [*fixed, "--capacity-tokens", 230, "--max-steps", 3, "--cache-dir", cache, "--output", tmp_path / "run"]


@pytest.fixture
def fit(run: Run, options: Sequence[object]) -> Run:
    """`fit(data, *more)`: train on `data`; options given here win."""
    return lambda data, *more: run("fit", "--data", data, *options, *more)


@pytest.fixture
def shard(tmp_path: Path, write_shard: Callable[..., Path], members: Sequence[Sequence[Member]]) -> Shard:
    """`shard(*members)`: the path of a shard that holds four good samples and these members."""
    good = [item for sample in members[:2] + members[7:9] for item in sample]

    def make(*more: Member, name: str = "shard.tar", good: Sequence[Member] = good) -> str:
        return str(write_shard(tmp_path / name, [*good, *more]))

    return make


def summary(tmp_path: Path) -> dict[str, Any]:
    return dict(json.loads((tmp_path / "run" / "summary.json").read_text()))


def png_header(width_px: int, height_px: int) -> bytes:
    """A PNG that claims this size and holds next to nothing."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    size = struct.pack(">IIBBBBB", width_px, height_px, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", size) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


# --- shards


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("{}/none.tar", r"shards are missing.*none\.tar.*Check the path"),
        ("{}/none-*.tar", r"no file matches .*none-\*\.tar"),
        ("{}/none-{{000..002}}.tar", r"3 of 3 shards are missing.*none-000\.tar, .*none-002\.tar"),
        ("{}/none-{{0..99999999999}}.tar", r"names more than 1000000 files"),
        ("{}/none-{{0..3.tar", r"unbalanced braces"),
        ("{}", r"the folder holds no file of data .*Sources are \*\.tar"),
        ("ftp://bucket/none.tar", r"the scheme 'ftp' is not one of file, http"),
        ("pipe:cat none.tar", r"commands are not run"),
    ],
)
def test_a_pattern_that_names_no_shard_is_explained(fit: Run, tmp_path: Path, data: str, message: str) -> None:
    answer = fit(data.format(tmp_path))
    assert answer.code == 1
    assert re.search(f"error: .*{message}", answer.err)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda raw: b"", r"has 0 bytes at shard .*damaged\.tar\. Download"),
        (lambda raw: raw[: len(raw) // 2], r"it was cut at shard .*damaged\.tar.*Copy or build"),
        (lambda raw: b"no tar at all " * 100, r"no valid tar header.*damaged\.tar, byte 0\. Copy or build"),
        (lambda raw: b"\x1f\x8b" + raw, r"this is a gzip file.*Decompress it"),
    ],
)
def test_a_damaged_shard_is_named(fit: Run, shard: Shard, damage: Any, message: str) -> None:
    path = Path(shard(name="damaged.tar"))
    path.write_bytes(damage(path.read_bytes()))
    answer = fit(path)
    assert answer.code == 1
    assert re.search(message, answer.err)


def test_a_shard_without_members_is_named(fit: Run, shard: Shard) -> None:
    answer = fit(shard(name="hollow.tar", good=[]))
    assert answer.code == 1
    assert re.search(r"holds no sample at shard .*hollow\.tar\. Remove it", answer.err)


# --- records and media found bad by the scan


def bad_samples(chat: Callable[..., bytes], image: Callable[..., bytes]) -> dict[str, tuple[list[Member], str]]:
    """Samples that no scan lets pass: members, and what the message says besides shard and key."""
    ask = chat("<image>?", "x")
    deep = b'{"messages":' + b"[" * 50_000 + b"]" * 50_000 + b"}"
    named = json.dumps({"images": ["a.png"], **json.loads(chat("?", "x"))}).encode()
    caption = json.dumps({"image": "a.png", "text": "A cat."}).encode()
    return {
        "no media": ([("bad.json", ask)], r"1 image placeholder\(s\).* 0 image member"),
        "too few media": ([("bad.json", chat("<image><image>", "x")), ("bad.png", image(60, 60))], r"2 image place"),
        "media named only": ([("bad.json", named)], r"names media in 'images'.*Put the files beside the \.json"),
        "other fields": ([("bad.json", caption), ("bad.png", image(60, 60))], r"fields 'image', 'text' but no conv"),
        "media alone": ([("bad.png", image(60, 60))], r"neither a \.json nor a \.txt"),
        "garbage": ([("bad.json", b'{"messages": [{{{')], r"JSON does not parse"),
        "not text": ([("bad.json", b"\xff\xfe\x00")], r"not UTF-8"),
        "deep": ([("bad.json", deep)], r"nested deeper than"),
        "no turns": ([("bad.json", b'{"messages": []}')], r"`messages` is an empty list"),
        "strip": ([("bad.json", ask), ("bad.png", image(8000, 20))], r"8000x20 px: one side is more than 200 times"),
        "bomb": ([("bad.json", ask), ("bad.png", png_header(20_000, 20_000))], r"20000x20000 px.*not decoded"),
        "no picture": ([("bad.json", ask), ("bad.png", b"\x89PNG\r\n\x1a\njunk")], r"Remove"),
        "empty picture": ([("bad.json", ask), ("bad.png", b"")], r"0 bytes"),
    }


CASES = [*bad_samples(lambda *_: b"{}", lambda *_: b"")]


@pytest.mark.parametrize("case", CASES)
def test_a_bad_sample_stops_the_launch_and_is_named_by_shard_and_key(
    fit: Run, shard: Shard, chat_json: Any, image_bytes: Any, case: str
) -> None:
    bad, message = bad_samples(chat_json, image_bytes)[case]
    answer = fit(shard(*bad))
    assert answer.code == 1
    assert "error: 1 of 5 samples cannot be used:\n" in answer.err
    assert "\nRepair them, or pass --bad-records skip" in answer.err
    (line,) = [line for line in answer.err.splitlines() if line.startswith("  ")]
    assert re.search(message, line)
    assert line.count("shard.tar, key bad") == 1
    assert ("--unfit clamp" in answer.err) is (case == "strip")


def test_media_that_the_processor_would_fail_on_are_trained_on_when_clamped_ce_02(
    fit: Run, shard: Shard, chat_json: Any, image_bytes: Any
) -> None:
    answer = fit(shard(*bad_samples(chat_json, image_bytes)["strip"][0]), "--unfit", "clamp", "--capacity-tokens", 260)
    assert answer.code == 0, answer.err
    assert "0 unusable): 5 to train" in answer.out


def test_bad_samples_of_every_kind_are_skipped_and_counted(
    fit: Run, shard: Shard, chat_json: Any, image_bytes: Any, tmp_path: Path
) -> None:
    """CE-02, ID-01 and ID-02: a strip, cut pictures and a bomb among the others."""
    every = bad_samples(chat_json, image_bytes)
    renamed = [
        (name.replace("bad", f"b{i:02d}"), data) for i, case in enumerate(CASES) for name, data in every[case][0]
    ]
    answer = fit(shard(*renamed), "--bad-records", "skip")
    assert answer.code == 0
    assert f"{len(CASES)} unusable): 4 to train" in answer.out
    assert re.search(rf"samples left out\W+{len(CASES)} \({len(CASES)} unusable\)", answer.out)
    assert len(summary(tmp_path)["left_out"]) == len(CASES)


def test_a_misspelt_extension_is_pointed_out_before_it_trains_text_alone(
    fit: Run, run: Run, shard: Shard, image_bytes: Any, options: Sequence[object]
) -> None:
    data = shard(("cat.txt", b"A cat."), ("cat.jgp", image_bytes(60, 60)))
    note = "note: fields that are neither text nor media: 1 x .jgp"
    assert note in fit(data).out
    planned = run("plan", "--data", data, *options[:2], "--cache-dir", options[options.index("--cache-dir") + 1])
    assert note in " ".join(planned.out.split())
    assert note in run("data", "--data", data, main=analyze_main).out


def test_samples_without_any_label_are_pointed_out(fit: Run, shard: Shard) -> None:
    question = json.dumps({"messages": [{"role": "user", "content": "Anyone?"}]}).encode()
    answer = fit(shard(("q.json", question)))
    assert "note: 1 of 5 samples have no label token" in answer.out


# --- capacity


def test_samples_above_the_capacity_are_all_listed_with_place_need_and_limit(
    fit: Run, shard: Shard, chat_json: Any
) -> None:
    """CE-05."""
    answer = fit(shard(*((f"long{i}.json", chat_json("h" * (500 + i), "x")) for i in range(30))))
    assert answer.code == 1
    assert "30 of 34 samples exceed the capacity" in answer.err
    listed = re.findall(r"  sample \d+ \(shard .*shard\.tar, key long\d+\): \d+ tokens > 230", answer.err)
    assert len(listed) == 30


def test_a_set_of_which_nothing_fits_is_an_error_with_the_count_and_not_an_empty_run(
    fit: Run, shard: Shard, chat_json: Any
) -> None:
    data = shard(("long.json", chat_json("h" * 500, "x")), good=[])
    answer = fit(data, "--oversize", "drop")
    assert answer.code == 1
    assert re.search(r"no sample is left of 1: 0 unusable, 1 above .*key long: oversize: 522 tokens > 230", answer.err)
    assert fit(shard(name="good.tar"), "--eval-data", data, "--oversize", "drop").code == 1


def test_a_fixed_number_of_micro_batches_that_does_not_fit_leaves_no_run_behind(
    fit: Run, shard: Shard, tmp_path: Path
) -> None:
    answer = fit(shard(), "--num-microbatches", 1, "--capacity-tokens", 60)
    assert answer.code == 1
    assert re.search(r"num_microbatches=1 does not hold .* with num_microbatches=\d", answer.err)
    assert not (tmp_path / "run").exists()


# --- media found bad by the decoder


def test_a_picture_that_is_cut_stops_the_run_or_is_replaced_and_counted(
    fit: Run, shard: Shard, chat_json: Any, image_bytes: Any, tmp_path: Path
) -> None:
    """ID-01."""
    whole = image_bytes(120, 120)
    data = shard(("cut.json", chat_json("<image>?", "x")), ("cut.png", whole[: len(whole) // 2]))
    answer = fit(data)
    assert answer.code == 1
    assert re.search(r"max_replaced=0.*shard\.tar, key cut.*truncated.*raise --max-replaced", answer.err)
    shutil.rmtree(tmp_path / "run")
    assert fit(data, "--max-replaced", 1).code == 0
    assert summary(tmp_path)["replaced"] == 1


def test_a_video_without_its_frames_is_made_to_fit_and_counted(
    fit: Run, shard: Shard, chat_json: Any, video_bytes: Any, tmp_path: Path
) -> None:
    """VD-01."""
    clip = bytearray(video_bytes(64, 64, 32))
    start = clip.index(b"mdat") + 4
    keep = start + (clip.index(b"moov") - start) * 3 // 4  # with more of it gone it would be a stand-in
    clip[keep : clip.index(b"moov") - 4] = bytes(clip.index(b"moov") - 4 - keep)
    answer = fit(shard(("hole.json", chat_json("<video>?", "x")), ("hole.mp4", bytes(clip))))
    assert answer.code == 0
    assert re.search(r"media made to fit the plan\W+\d", answer.out)
    conformed = [record.conformed for record in read_records(tmp_path / "run" / "steps.jsonl")]
    assert summary(tmp_path)["conformed"] == sum(conformed) > 0


def test_what_validation_leaves_out_is_counted_too(
    fit: Run, shard: Shard, chat_json: Any, image_bytes: Any, tmp_path: Path
) -> None:
    whole = image_bytes(120, 120)
    cut = [("cut.json", chat_json("<image>?", "x")), ("cut.png", whole[: len(whole) // 2])]
    aside = shard(*cut, ("long.json", chat_json("h" * 500, "x")), name="aside.tar")
    answer = fit(shard(), "--eval-data", aside, "--oversize", "drop")
    assert answer.code == 0
    assert re.search(r"of --eval-data\W+1 \(1 oversize\)", answer.out)
    assert [item["sample_id"] for item in summary(tmp_path)["eval_left_out"]] == [5]
    assert summary(tmp_path)["validation"]["replaced"] == 1


def test_data_that_changed_under_the_same_name_is_indexed_anew(
    fit: Run, shard: Shard, chat_json: Any, tmp_path: Path
) -> None:
    assert "data: 5 samples" in fit(shard(("more.json", chat_json("?", "x")))).out
    assert "data: 4 samples" in fit(shard(), "--output", tmp_path / "again").out


# --- hostile names and texts


def test_terminal_escapes_in_names_and_texts_never_reach_the_terminal(
    *, fit: Run, run: Run, write_shard: Any, chat_json: Any, image_bytes: Any, tmp_path: Path, cache: Path
) -> None:
    names = [f"{ESCAPE}/{ESCAPE}{i}{'k' * 200}" for i in range(4)]
    texts = chat_json(f"<image>{ESCAPE}", f"{ESCAPE}x", facts=[ESCAPE])
    good = [(f"{name}.{kind}", texts if kind == "json" else image_bytes(60, 60)) for name in names for kind in FIELDS]
    data = write_shard(tmp_path / "names.tar", good)
    assert fit(data, "--eval-share", 0.5).code == 0
    assert run("plan", "--data", data, "--model", "check", "--show-sample", 0, "--cache-dir", cache).code == 0
    assert run("data", "--data", data, main=analyze_main).code == 0
    # As errors: in records, media and capacities.
    bad = [(f"{ESCAPE}b.json", b"{" + ESCAPE.encode()), (f"{ESCAPE}c.json", texts)]
    answer = fit(write_shard(tmp_path / "bad.tar", [*good, *bad]))
    assert answer.code == 1
    assert "2 of 6 samples" in answer.err
    answer = fit(write_shard(tmp_path / "long.tar", [(f"{ESCAPE}.json", chat_json("h" * 500, "x"))]))
    assert "exceed the capacity" in answer.err
    cut = [(f"{ESCAPE}.json", texts), (f"{ESCAPE}.png", image_bytes(120, 120)[:400])]
    assert fit(write_shard(tmp_path / "cut.tar", cut), "--output", tmp_path / "cut").code == 1


FIELDS = ("json", "png")


@pytest.mark.parametrize("argv", [[f"--{ESCAPE}", "1"], ["--resume", ESCAPE], ["--config", ESCAPE], [ESCAPE]])
def test_escapes_in_arguments_are_not_echoed(run: Run, argv: list[str]) -> None:
    assert run(*argv).code == 2


# --- options and files of ours


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--epohcs", "2"], r"unknown option --epohcs of fit: did you mean --epochs\?"),
        (["--learning_rate", "2"], r"spelling of HF Trainer.*did you mean --lr\?"),
        (["--per_device_train_batch_size=2"], r"did you mean --global-batch-size\?.*per-device size x accumulation"),
        (["--micro-batch-size", "2"], r"Megatron-LM; did you mean --capacity-tokens\?"),
        (["--num-epochs", "2"], r"did you mean --epochs\?"),
        (["--epochs", "1", "--max-steps", "1"], r"epochs=1 and max_steps=1 are both given"),
        (["--threads", "100000"], r"threads=100000: a whole number of at most 1024"),
        (["--capacity-tokens", "9" * 30], r"a whole number of at most"),
        (["--seed", "9" * 30], r"a whole number of at most"),
        (["--lr", "nan"], r"lr=nan: a finite number above 0"),
        (["--model", "no/such"], r"neither a preset.*nor a folder with a config\.json"),
        (["--config", "no/such.yaml"], r"--config no/such\.yaml cannot be read.*Give a YAML file"),
        (["--resume", "no/such"], r"is no run folder.*--resume RUN"),
        (["--pp-size", "2", "--data", "{data}"], r"pp_size=2 does not divide the world of 1"),
        (["--output", "{data}", "--data", "{data}"], r"is a file\. Give another --output"),
        (["--output", "{data}/x", "--data", "{data}"], r"cannot be made.*Give another --output"),
        (["--cache-dir", "{data}", "--data", "{data}"], r"cannot be written to.*Give another --cache-dir"),
        (["--cache-dir", "{data}/x", "--data", "{data}"], r"cannot be written to.*Give another --cache-dir"),
    ],
)
def test_a_usage_error_ends_with_code_two_and_says_what_to_write(
    run: Run, shard: Shard, cache: Path, argv: list[str], message: str
) -> None:
    words = [word.format(data=shard()) for word in argv]
    model = [] if "--model" in words or "--config" in words or "--resume" in words else ["--model", "check"]
    where = [] if "--cache-dir" in words or not model else ["--cache-dir", cache]
    answer = run("fit", *model, *where, *words)
    assert answer.code == 2
    assert re.search(message, " ".join(answer.err.split()))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("num-epochs: 3", r"key 'num_epochs' is a spelling of HF Trainer.*did you mean epochs\?"),
        ("train:\n  epochs: 3", r"section train\.epochs: options are not nested"),
        ("max_steps: 1.5", r"max_steps=1\.5: .*valid integer"),
        ("lr: 1\nlr: 2", r"key 'lr' is given twice \(line 2\)"),
        ("- a", r"holds a list, not options"),
        ("a: [b\nc: d", r"is not YAML"),
        ("lr: !!python/object/apply:os.system ['true']", r"is not YAML"),
        ("a: " + "[" * 3000 + "]" * 3000, r"is nested too deeply"),
    ],
)
def test_a_config_file_that_is_wrong_is_named_with_the_key(run: Run, tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    answer = run("fit", "--config", file)
    assert answer.code == 2
    assert re.search(rf"c\.yaml.*{message}", answer.err)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory, corpus: Path, cache: Path) -> Path:
    """A model folder, and beside it (`run`) the run it comes from."""
    folder = tmp_path_factory.mktemp("exported")
    options = ["--model", "check", "--compare-steps", "0", "--num-workers", "0", "--threads", "1", "--eval-share", "0"]
    where = ["--data", str(corpus), "--cache-dir", str(cache), "--output", str(folder / "run"), "--max-steps", "1"]
    assert train_main(["fit", *options, *where]) == 0
    assert train_main(["export", "--run", str(folder / "run"), "--destination", str(folder / "model")]) == 0
    return folder / "model"


@pytest.mark.parametrize(
    ("name", "content", "code", "message"),
    [
        ("config.json", b"\xff", 2, r"config\.json: .*codec"),
        ("config.json", b"{}", 2, r"config\.json: model config cannot be read"),
        ("processor.json", b"[]", 2, r"processor\.json holds a list"),
        ("processor.json", b"{}", 2, r"processor\.json: no estimator for a configuration without model_type"),
        ("processor.json", b'{"config": {"model_type": []}}', 2, r"processor\.json: no estimator"),
        ("processor.json", b'{"config": 3}', 2, r"processor\.json: config is of type int"),
        (
            "processor.json",
            b'{"config": {"model_type": "qwen2_5_vl"}, "preprocessor_config": {"patch_size": "x"}}',
            2,
            r"do not have the expected types",
        ),
        ("model.safetensors", b"junk" * 9, 1, r"model\.safetensors is damaged.*Export the run again"),
        ("model.safetensors", b"", 1, r"model\.safetensors is damaged"),
    ],
)
def test_a_damaged_model_folder_is_named_by_file(
    *, fit: Run, shard: Shard, exported: Path, tmp_path: Path, name: str, content: bytes, code: int, message: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(exported, folder)
    (folder / name).write_bytes(content)
    answer = fit(shard(), "--model", folder)
    assert answer.code == code
    assert re.search(message, answer.err)


@pytest.mark.parametrize(
    ("name", "content", "code", "message"),
    [
        ("run.json", b"{", 2, r"run\.json cannot be read"),
        ("run.json", b'{"format_version": 99}', 2, r"format version 99; this version reads 2"),
        ("config.yaml", b"modle: x", 2, r"key 'modle': did you mean model\?"),
        ("steps.jsonl", b"garbage\n", 1, r"steps\.jsonl, line 1: not a step record.*Restore the file"),
        ("checkpoints/step_000001/__0_0.distcp", None, 1, r"a file is damaged. Delete the folder of this checkpoint"),
    ],
)
def test_a_damaged_run_is_not_resumed(
    *, run: Run, exported: Path, tmp_path: Path, name: str, content: bytes | None, code: int, message: str
) -> None:
    folder = tmp_path / "run"
    shutil.copytree(exported.parent / "run", folder)
    path = folder / name
    path.write_bytes(bytes(path.stat().st_size) if content is None else content)
    answer = run("fit", "--resume", folder, "--max-steps", 2)
    assert answer.code == code
    assert re.search(message, answer.err)


def test_a_learning_rate_that_explodes_stops_the_run_and_says_what_to_lower(
    fit: Run, shard: Shard, tmp_path: Path
) -> None:
    answer = fit(shard(), "--lr", "1e9", "--max-steps", 8)
    assert answer.code == 1
    found = re.search(r"step (\d+): the gradient norm is (nan|inf)\. Lower --lr.* its plan's file", answer.err)
    assert found
    assert (tmp_path / "run" / "plans" / f"step_{int(found[1]):06d}.json").is_file()


def test_a_plan_stops_where_the_training_would(run: Run, shard: Shard, tmp_path: Path, cache: Path) -> None:
    plan = ["plan", "--model", "check", "--cache-dir", cache, "--data", shard()]
    answer = run(*plan, "--eval-data", tmp_path / "none.tar")
    assert answer.code == 1
    assert "none.tar" in answer.err
    assert run(*plan, "--pp-size", 9).code == 2
    assert run(*plan, "--capacity-tokens", 1).code == 1
    assert run(*plan, "--show-sample", 99).code == 2


def test_the_system_has_the_last_word_without_a_stack_trace(
    fit: Run, shard: Shard, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device", "plans/step_000001.json")

    monkeypatch.setattr("trainer.run_folder.RunFolder.write_plan", full)
    answer = fit(shard())
    assert answer.code == 1
    assert "error: [Errno 28] No space left on device: 'plans/step_000001.json'" in answer.err


# --- balancer-analyze


def test_analysis_of_what_is_no_run_names_it(run: Run, shard: Shard, tmp_path: Path) -> None:
    for command in ("run", "timeline"):
        for folder in (tmp_path / "none", shard(), tmp_path):
            answer = run(command, folder, main=analyze_main)
            assert answer.code == 2
            assert re.search(r"error: .*(does not exist|holds no steps\.jsonl)", answer.err)
    assert run("rnu", main=analyze_main).code == 2


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda line: b"[" * 100_000, r"not a step record"),
        (lambda line: b"null", r"format None"),
        (lambda line: b"\xff", r"codec"),
        (lambda line: re.sub(rb'"step":1\b', b'"step":' + b"9" * 5000, line), r"not a step record"),
        (lambda line: re.sub(rb'"step":1\b', b'"step":"1"', line), r"step is '1', not a count"),
        (lambda line: re.sub(rb'"rank":0', b'"rank":99999999999', line, count=1), r"rank is 99999999999, above"),
        (lambda line: re.sub(rb'"rank":0', b'"rank":-1', line, count=1), r"rank is -1, not a count"),
        (lambda line: line.replace(b'"actions":[', b'"actions":["x",'), r"missing or unknown fields"),
        (lambda line: line.replace(b'"fill":', b'"full":'), r"missing or unknown fields"),
    ],
)
def test_a_damaged_record_is_named_by_line(run: Run, exported: Path, tmp_path: Path, edit: Any, message: str) -> None:
    (line,) = (exported.parent / "run" / "steps.jsonl").read_bytes().splitlines()
    damaged = edit(line)
    assert damaged != line
    for command, name in (("run", "steps.jsonl"), ("timeline", "compare.jsonl")):
        (tmp_path / name).write_bytes(damaged + b"\n")
        answer = run(command, tmp_path, main=analyze_main)
        assert answer.code == 1
        assert re.search(rf"{re.escape(name)}, line 1: .*{message}", answer.err)


def test_a_picture_that_cannot_be_written_is_named(run: Run, exported: Path, tmp_path: Path) -> None:
    line = (exported.parent / "run" / "steps.jsonl").read_bytes()
    (tmp_path / "compare.jsonl").write_bytes(line.replace(b'"policy":"joint"', b'"policy":"sequential"') + line)
    answer = run("timeline", tmp_path, "--output", tmp_path / "compare.jsonl" / "x.svg", main=analyze_main)
    assert answer.code == 1
    assert re.search(r"x\.svg cannot be written: .*Give another --output", answer.err)


def test_tars_that_hold_links_only_are_no_samples(fit: Run, tmp_path: Path) -> None:
    path = tmp_path / "links.tar"
    with tarfile.open(path, "w") as tar:
        link = tarfile.TarInfo("a.json")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link, io.BytesIO())
    answer = fit(path)
    assert answer.code == 1
    assert "holds no sample" in answer.err
