"""`balancer-analyze tokens` prints what each medium costs, or why it cannot be used and what would work."""

import json
import tarfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
from PIL import Image
from rich.console import Console

from dataloaders.estimators import estimator_from_config
from tools.cli import main
from tools.errors import UsageError
from tools.tokens_report import parse_size, print_report, probe_file, report_on

QWEN = {
    "config.json": {"model_type": "qwen2_5_vl"},
    "preprocessor_config.json": {"min_pixels": 3136, "max_pixels": 12845056},
}


@pytest.fixture
def model_folder(tmp_path: Path) -> Callable[..., Path]:
    """`model_folder(files)`: a folder with these JSON files; None: a Qwen2.5-VL."""

    def make(files: dict[str, object] | None = None) -> Path:
        folder = tmp_path / "model"
        folder.mkdir()
        for name, content in (QWEN if files is None else files).items():
            (folder / name).write_text(json.dumps(content), encoding="utf-8")
        return folder

    return make


@pytest.mark.parametrize("spelled", ["640x480", "640X480", "640×480", "640*480", " 640 x 480 "])
def test_an_image_size_is_read_in_every_spelling(spelled: str) -> None:
    size = parse_size(spelled)
    assert size is not None
    assert (size.kind, size.width_px, size.height_px, size.num_frames) == ("image", 640, 480, 0)


@pytest.mark.parametrize(
    ("spelled", "fps"),
    [
        ("1280x720x300@29.97", 29.97),
        ("1280X720x300@25", 25.0),
        ("1280×720×300@30000/1001", 30000 / 1001),
        ("1280x720x300@30fps", 30.0),
    ],
)
def test_a_video_size_has_frames_and_their_rate(spelled: str, fps: float) -> None:
    size = parse_size(spelled)
    assert size is not None
    assert (size.kind, size.num_frames) == ("video", 300)
    assert size.fps == pytest.approx(fps, rel=1e-12)
    assert size.duration_s == pytest.approx(300 / fps, rel=1e-12)


@pytest.mark.parametrize("spelled", ["1280x720x300", "1280x720x300@0", "1280x720x300@1/0", "1280x720x300@1.2.3"])
def test_frames_without_a_usable_rate_say_how_to_write_it(spelled: str) -> None:
    with pytest.raises(UsageError, match=r"frames need a rate. Write WxHxFRAMES@FPS"):
        parse_size(spelled)


@pytest.mark.parametrize("spelled", ["640x", "640x480x", "640x480@30", "640x480xten@30", "-640x480 640x480"])
def test_what_looks_like_a_size_and_is_none_is_a_usage_error_or_no_size(spelled: str) -> None:
    if spelled[0].isdigit():
        with pytest.raises(UsageError, match="not a size"):
            parse_size(spelled)
    else:
        assert parse_size(spelled) is None


def test_counts_and_steps_are_those_of_the_estimator(model_folder: Callable[..., Path]) -> None:
    folder = model_folder()
    report = report_on(["640x480", "640x360x150@30"], model=folder)
    estimator = estimator_from_config(folder)
    image, video = report.rows
    assert image.counts == estimator.image(640, 480)
    assert image.steps == estimator.explain_image(640, 480)
    assert video.counts == estimator.video(640, 360, 150, 30.0, 5.0)
    assert video.steps == estimator.explain_video(640, 360, 150, 30.0, 5.0)
    assert (report.rule, report.fingerprint) == (estimator.rule, estimator.fingerprint)
    assert report.files == ("config.json", "preprocessor_config.json")
    assert report.num_failed == 0


def test_a_file_costs_what_its_size_costs(
    model_folder: Callable[..., Path],
    image_bytes: Callable[..., bytes],
    video_bytes: Callable[..., bytes],
    tmp_path: Path,
) -> None:
    picture, clip = tmp_path / "photo of 2x2", tmp_path / "clip.bin"  # the content says what it is, not the name
    picture.write_bytes(image_bytes(320, 200))
    clip.write_bytes(video_bytes(64, 48, 16))
    report = report_on([str(picture), "320x200", str(clip), "64x48x16@8"], model=model_folder())
    by_file, by_size, by_clip, by_frames = report.rows
    assert by_file.counts == by_size.counts is not None
    assert by_clip.counts == by_frames.counts is not None
    assert by_file.media is not None
    assert by_file.media.source == "PNG header"
    assert by_clip.media is not None
    assert by_clip.media.kind == "video"


def test_a_file_named_like_a_size_is_read_as_a_file(
    model_folder: Callable[..., Path],
    image_bytes: Callable[..., bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "640x480").write_bytes(image_bytes(28, 56))
    monkeypatch.chdir(tmp_path)
    media = report_on(["640x480"], model=model_folder()).rows[0].media
    assert media is not None
    assert (media.width_px, media.height_px) == (28, 56)


def test_orientation_follows_the_switch(tmp_path: Path) -> None:
    path = tmp_path / "turned.jpg"
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new("RGB", (40, 20)).save(path, exif=exif)
    assert probe_file(path).width_px == 20
    assert probe_file(path, apply_orientation=False).width_px == 40


def test_what_the_processor_fails_on_comes_with_the_nearest_that_works(model_folder: Callable[..., Path]) -> None:
    folder = model_folder({"config.json": {"model_type": "phi4mm"}})
    row = report_on(["2x448"], model=folder).rows[0]
    assert (row.counts, row.reason, row.nearest) == (None, "extreme_aspect", "10x448")
    nearest = report_on([row.nearest], model=folder).rows[0].counts
    assert nearest is not None
    assert nearest.llm_tokens == row.nearest_tokens > 0


def test_a_clip_of_too_few_frames_names_the_number_that_works(model_folder: Callable[..., Path]) -> None:
    folder = model_folder({"config.json": {"model_type": "minicpmv4_6"}})
    row = report_on(["64x48x0@30"], model=folder).rows[0]
    assert (row.reason, row.nearest) == ("too_few_frames", "64x48x1@30")


def test_a_family_without_videos_says_so_and_names_no_nearest(model_folder: Callable[..., Path]) -> None:
    row = report_on(["64x48x9@30"], model=model_folder({"config.json": {"model_type": "phi4mm"}})).rows[0]
    assert (row.reason, row.nearest) == ("unsupported_media", "")


def test_the_number_of_images_reaches_the_estimator(model_folder: Callable[..., Path]) -> None:
    folder = model_folder({"config.json": {"model_type": "deepseek_vl_v2"}})
    tokens = {count: report_on(["1920x1080"], model=folder, num_images=count).rows[0].counts for count in (1, 2, 3)}
    assert [counts and counts.llm_tokens for counts in tokens.values()] == [1807, 1807, 421]


def test_damaged_files_are_rows_with_a_reason(model_folder: Callable[..., Path], tmp_path: Path) -> None:
    empty, noise = tmp_path / "empty.jpg", tmp_path / "noise.mp4"
    empty.write_bytes(b"")
    noise.write_bytes(bytes(range(256)) * 8)
    report = report_on([str(empty), str(noise), "640x480"], model=model_folder())
    assert [row.reason for row in report.rows] == ["empty_file", "unknown_format", ""]
    assert report.num_failed == 2


def test_a_tar_is_refused_and_never_taken_for_a_film(
    model_folder: Callable[..., Path],
    write_shard: Callable[..., Path],
    image_bytes: Callable[..., bytes],
    tmp_path: Path,
) -> None:
    picture = image_bytes(320, 200, format="JPEG")
    paths = [
        write_shard(tmp_path / f"{kind}.jpg", [("0.jpg", picture), ("1.jpg", picture)], format=kind)
        for kind in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT)
    ]
    for row in report_on(list(map(str, paths)), model=model_folder()).rows:
        assert (row.counts, row.reason) == (None, "unknown_format")
        assert "a tar at" in row.message
        assert "Use balancer-analyze index or data" in row.message


@pytest.mark.parametrize(
    ("content", "name"),
    [(b"<!DOCTYPE html><html></html>", "an HTML page"), (b"<svg xmlns='x'></svg>", "SVG"), (b"%PDF-1.7\n", "a PDF")],
)
def test_a_file_that_is_plainly_something_else_is_named(
    content: bytes, name: str, model_folder: Callable[..., Path], tmp_path: Path
) -> None:
    path = tmp_path / "g_text.jpg"
    path.write_bytes(content)
    row = report_on([str(path)], model=model_folder()).rows[0]
    assert row.reason == "unknown_format"
    assert "not an image in any of the formats" in row.message
    assert f"but {name}" in row.message


def test_media_that_are_keys_of_cross_attention_are_not_called_part_of_the_tokens(
    model_folder: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = model_folder({"config.json": {"model_type": "mllama"}})
    assert main(["tokens", "1000x1000", "--model", str(folder)]) == 0
    counts = report_on(["1000x1000"], model=folder).rows[0].counts
    assert counts is not None
    told = f"LLM tokens 1, and {counts.visual_tokens:,} visual ones beside them, as keys of cross-attention"
    assert told in capsys.readouterr().out


def test_nothing_usable_is_a_usage_error_that_names_all(model_folder: Callable[..., Path], tmp_path: Path) -> None:
    folder = model_folder()
    with pytest.raises(UsageError, match=r"'gone\.jpg': neither a file nor a size(.|\n)*: a folder; name the files"):
        report_on(["gone.jpg", str(tmp_path)], model=folder)
    assert report_on(["gone.jpg", "28x28"], model=folder).num_failed == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "no medium is named"),
        (["640x480"], "--model is missing"),
        (["640x480", "--model", "gone"], "--model gone: no such folder"),
        (["640x480", "--model", ".", "--num-images", "0"], "--num-images 0"),
        (["gone.jpg", "--model", "MODEL"], "neither a file nor a size"),
    ],
)
def test_usage_errors_end_with_2_and_an_example(
    arguments: list[str],
    message: str,
    model_folder: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = model_folder()
    monkeypatch.chdir(folder.parent)
    assert main(["tokens", *[str(folder) if word == "MODEL" else word for word in arguments]]) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert printed.out == ""


def test_an_unknown_model_says_how_to_register_it(
    model_folder: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = model_folder({"config.json": {"model_type": "brand_new"}})
    assert main(["tokens", "640x480", "--model", str(folder)]) == 1
    printed = capsys.readouterr().err
    assert "no estimator for 'brand_new'" in printed
    assert "register_estimator(kind, factory)" in printed


def test_the_command_prints_numbers_steps_and_sources(
    model_folder: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = model_folder()
    assert main(["tokens", "640x480", "640x360x150@30", "--model", str(folder)]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    for part in ("Qwen2.5-VL", "config.json, preprocessor_config.json", "LLM tokens 391", "grid 1x34x46"):
        assert part in printed.out
    assert "640x360x150@30: video 640x360x150@30, 5.00 s" in printed.out
    for line in estimator_from_config(folder).explain_image(640, 480):
        assert line in printed.out


def test_the_command_prints_json_and_nothing_else(
    model_folder: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = model_folder()
    assert main(["tokens", "640x480", "0x480", "--model", str(folder), "--json"]) == 1
    printed = capsys.readouterr()
    content = json.loads(printed.out)
    good, bad = content["rows"]
    assert good["counts"] == json.loads(json.dumps(asdict(estimator_from_config(folder).image(640, 480))))
    assert (bad["counts"], bad["reason"]) == (None, "too_small")
    assert content["files"] == ["config.json", "preprocessor_config.json"]
    assert "1 of 2 media cannot be used" in printed.err


def test_the_resizing_library_is_chosen_by_an_option(
    model_folder: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, tokens = model_folder(), []
    for library in ("transformers", "qwen_vl_utils"):
        assert main(["tokens", "2600x13", "--model", str(folder), "--preprocessing", library, "--json"]) == 0
        tokens.append(json.loads(capsys.readouterr().out)["rows"][0]["counts"]["llm_tokens"])
    assert tokens == [
        estimator_from_config(folder, preprocessing=library).image(2600, 13).llm_tokens
        for library in ("transformers", "qwen_vl_utils")
    ]
    assert tokens[0] != tokens[1]


def test_names_of_files_are_shown_as_data(model_folder: Callable[..., Path], tmp_path: Path) -> None:
    path = tmp_path / "[bold]a\x1b[31m.jpg"
    path.write_bytes(b"")
    console = Console(record=True, width=300)
    print_report(report_on([str(path), "28x28"], model=model_folder()), console)
    text = console.export_text()
    assert "[bold]a" in text
    assert "\x1b" not in text
