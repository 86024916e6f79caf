"""The report on a data set is computed from headers alone and hides neither tails nor unusable samples."""

import io
import json
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from dataloaders.errors import IndexFormatError
from dataloaders.estimators import estimator_from_config
from dataloaders.index import CostIndex, write_index
from dataloaders.index_build import build_shards
from dataloaders.scan import scan_source
from dataloaders.scan_rows import ScanOptions
from dataloaders.tar_source import TarSource
from tools.cli import main
from tools.data_report import DataReport, _distribution, print_report, report_on
from tools.errors import UsageError
from tools.model_folder import load_estimator


def _printed(report: DataReport) -> str:
    console = Console(file=io.StringIO(), width=140, soft_wrap=True, highlight=False)
    print_report(report, console)
    return console.file.getvalue()


@pytest.fixture
def damaged_shard(tmp_path: Path, write_shard, chat_json, image_bytes) -> Path:
    """One good sample, one whose picture is no picture, one without its picture."""
    members = [
        ("good.json", chat_json("<image>What?", "A wall.")),
        ("good.png", image_bytes(64, 48)),
        ("lies.json", chat_json("<image>What?", "Nothing.")),
        ("lies.png", b"not a picture"),
        ("alone.json", chat_json("<image>What?", "Nothing.")),
    ]
    return write_shard(tmp_path / "damaged.tar", members)


def test_samples_are_counted_by_what_they_hold(small_shard: Path) -> None:
    report = report_on(str(small_shard))
    assert (report.num_samples, report.num_usable) == (6, 6)
    kinds = report.modalities
    assert (kinds.text_only, kinds.image_only, kinds.video_only, kinds.mixed) == (1, 3, 1, 1)
    assert (kinds.images, kinds.videos) == (6, 2)


def test_distributions_equal_those_of_the_index(small_shard: Path) -> None:
    index = scan_source(TarSource(str(small_shard)), estimator_from_config({"model_type": "qwen2_5_vl"}))
    report = report_on(str(small_shard))
    for name, distribution in report.distributions.items():
        values = np.asarray(index.samples[name])
        assert distribution.total == values.sum()
        assert distribution.quantiles["min"] == values.min()
        assert distribution.quantiles["max"] == values.max()


def test_the_processor_of_a_model_folder_decides_the_tokens(small_shard: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2_5_vl"}), encoding="utf-8")
    limits = {"min_pixels": 784, "max_pixels": 784}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(limits), encoding="utf-8")
    small = report_on(str(small_shard), processor=tmp_path).distributions["visual_tokens"]
    assert small.total < report_on(str(small_shard)).distributions["visual_tokens"].total


def test_train_on_all_labels_more_tokens(small_shard: Path) -> None:
    assistant = report_on(str(small_shard)).distributions["label_tokens"].total
    assert report_on(str(small_shard), train_on="all").distributions["label_tokens"].total > assistant


def test_no_pixel_is_decoded(small_shard: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a picture was decoded")

    monkeypatch.setattr(Image.Image, "load", refuse)
    assert report_on(str(small_shard)).num_usable == 6


def test_progress_counts_every_sample(small_shard: Path) -> None:
    seen: list[tuple[int, int]] = []
    report_on(str(small_shard), progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (6, 6)


def test_the_largest_samples_are_named_in_order(small_shard: Path) -> None:
    largest = report_on(str(small_shard)).largest
    lengths = [item.llm_tokens for item in largest]
    assert lengths == sorted(lengths, reverse=True)
    assert len(largest) == 5
    assert "small.tar" in largest[0].place


def test_unusable_samples_are_listed_with_place_and_reason(damaged_shard: Path) -> None:
    report = report_on(str(damaged_shard))
    assert (report.num_samples, report.num_usable) == (3, 1)
    assert report.reasons == {"unknown_format": 1, "placeholder_mismatch": 1}
    printed = _printed(report)
    assert "Unusable samples" in printed
    assert "unknown_format: " in printed
    assert "key lies, member lies.png" in printed
    assert "placeholder_mismatch: " in printed
    assert "key alone" in printed


def test_unusable_samples_do_not_enter_the_distributions(damaged_shard: Path) -> None:
    report = report_on(str(damaged_shard))
    assert report.distributions["num_items"].total == 1
    assert [item.place.endswith("key good") for item in report.largest] == [True]


def test_a_data_set_without_a_usable_sample_is_reported_not_crashed(tmp_path: Path, write_shard, chat_json) -> None:
    shard = write_shard(tmp_path / "bad.tar", [("0.json", chat_json("<image>", "x"))])
    report = report_on(str(shard))
    assert (report.num_usable, report.distributions, report.largest) == (0, {}, ())
    assert "1 samples, 0 usable" in _printed(report)


def test_names_from_the_data_are_not_read_as_markup(tmp_path: Path, write_shard, chat_json) -> None:
    members = [("[red]a[/nope].json", chat_json("<image>", "x")), ("[bold]b.json", chat_json("1?", "2"))]
    printed = _printed(report_on(str(write_shard(tmp_path / "x.tar", members))))
    assert "[red]a[/nope]" in printed
    assert "[bold]b" in printed


def test_the_tail_is_what_the_largest_hundredth_holds() -> None:
    values = np.full(200, 10)
    values[:2] = 1000
    distribution = _distribution(values)
    assert distribution.tail_share == pytest.approx(2000 / (2000 + 1980))
    assert distribution.quantiles == {"min": 10, "p50": 10, "p90": 10, "p99": 10, "max": 1000}


def test_the_tail_of_few_samples_is_the_largest_one_and_of_zeros_nothing() -> None:
    assert _distribution(np.array([1, 3])).tail_share == pytest.approx(0.75)
    assert _distribution(np.array([0, 0])).tail_share == 0.0


def test_quantiles_are_values_that_occur() -> None:
    assert _distribution(np.array([1, 100])).quantiles["p50"] == 1


def test_the_command_prints_tables_for_people(small_shard: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "--data", str(small_shard)]) == 0
    printed = capsys.readouterr().out
    assert "6 samples, 6 usable" in printed
    assert "LLM tokens" in printed


def test_the_command_prints_json_and_nothing_else(damaged_shard: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", "--data", str(damaged_shard), "--json"]) == 0
    content = json.loads(capsys.readouterr().out)
    assert content["num_usable"] == 1
    assert content["modalities"]["image_only"] == 1
    assert [bad["reason"] for bad in content["unusable"]] == ["unknown_format", "placeholder_mismatch"]
    assert content["distributions"]["patches"]["total"] > 0


@pytest.fixture
def folder(small_shard: Path, damaged_shard: Path, tmp_path: Path) -> Path:
    """The index of both shards, text by bytes, under the published Qwen2.5-VL settings."""
    urls = [str(small_shard), str(damaged_shard)]
    build_shards(urls, estimator_from_config({"model_type": "qwen2_5_vl"}), tmp_path / "index")
    return tmp_path / "index"


def test_an_index_is_not_reported_beside_anything_else(folder: Path, small_shard: Path) -> None:
    with pytest.raises(UsageError, match="is an index; name one index alone"):
        report_on([str(small_shard), str(folder)])


def test_without_a_model_the_published_settings_count() -> None:
    assert load_estimator(None).image(1920, 1080).llm_tokens == 2691


def test_the_report_on_an_index_is_the_one_on_its_shards(folder: Path, small_shard: Path, damaged_shard: Path) -> None:
    assert report_on(str(folder)) == report_on([str(small_shard), str(damaged_shard)])


def test_an_index_is_reported_without_its_shards(folder: Path, damaged_shard: Path) -> None:
    before = report_on(str(folder))
    damaged_shard.unlink()
    assert report_on(str(folder)) == before


def test_the_notes_of_the_header_pass_are_in_the_index_too(tmp_path: Path, write_shard) -> None:
    urls = [str(write_shard(tmp_path / f"{name}.tar", [("0.txt", b"x"), ("README", b"y")])) for name in "ab"]
    build_shards(urls, estimator_from_config({"model_type": "qwen2_5_vl"}), tmp_path / "index")
    assert report_on(str(tmp_path / "index")).notes == ("ignored members: 2 x no extension",) == report_on(urls).notes


def test_an_index_of_another_model_or_labelling_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2_5_vl"}), encoding="utf-8")
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"max_pixels": 99 * 784}), encoding="utf-8")
    with pytest.raises(IndexFormatError, match=r"its media are counted by .*Leave these options out, or build"):
        report_on(str(folder), processor=tmp_path)
    with pytest.raises(IndexFormatError, match="its labels are on 'assistant', not on 'all'"):
        report_on(str(folder), train_on="all")
    assert report_on(str(folder), train_on="assistant").num_usable == 7


def test_options_of_a_scan_are_compared_with_an_index(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(IndexFormatError, match=r"text is counted by 'ByteEncoder \(byte-1\)', not by 'RoughEncoder"):
        report_on(str(folder), text="rough")
    with pytest.raises(IndexFormatError, match="its images are turned as their EXIF orientation says"):
        report_on(str(folder), apply_orientation=False)
    with pytest.raises(UsageError, match=r"--preprocessing transformers: an index has its own. .* give --model too"):
        report_on(str(folder), preprocessing="transformers")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2_5_vl"}), encoding="utf-8")
    with pytest.raises(IndexFormatError, match="its media are counted by"):
        report_on(str(folder), processor=tmp_path, preprocessing="qwen_vl_utils")
    assert report_on(str(folder), processor=tmp_path, text="bytes").num_usable == 7


def test_an_index_of_images_as_they_are_stored_says_so(small_shard: Path, tmp_path: Path) -> None:
    options = ScanOptions(apply_orientation=False)
    build_shards(str(small_shard), load_estimator(None), tmp_path / "index", options)
    notes = ("images are measured as they are stored, not as their EXIF orientation turns them",)
    assert report_on(str(tmp_path / "index")).notes == notes
    assert report_on(str(small_shard), apply_orientation=False).notes == notes


def test_what_is_neither_an_index_nor_shards_is_a_usage_error(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (folder / "meta.json").unlink()
    assert main(["data", "index"]) == 2
    printed = capsys.readouterr().err
    assert "error: index is neither an index (no meta.json) nor data: the folder holds no file of data" in printed
    assert main(["data", "nope"]) == 2
    assert "nope is neither an index (no such folder) nor data" in capsys.readouterr().err


def test_the_heading_says_how_many_shards_are_listed(tmp_path: Path, write_shard, chat_json) -> None:
    urls = [str(write_shard(tmp_path / f"{n}.tar", [("0.json", chat_json("1?", "2"))])) for n in range(6)]
    assert "Shards with the most LLM tokens (5 of 6)" in _printed(report_on(urls))


def test_what_dominates_is_said_by_modality_and_by_shard(folder: Path, small_shard: Path) -> None:
    report, index = report_on(str(folder)), CostIndex.open(folder)
    for column, shares in report.modality_shares.items():
        assert sum(shares.values()) == pytest.approx(1.0), column
    video = index.items["patches"][index.items["kind"] == 1].sum() / index.items["patches"].sum()
    assert report.modality_shares["patches"]["video"] == pytest.approx(video)
    assert report.modality_shares["llm_tokens"]["text"] == pytest.approx(
        index.samples["text_tokens"].sum() / index.samples["llm_tokens"].sum()
    )
    assert (report.shards[0].shard, report.shards[0].samples) == (str(small_shard), 6)
    assert sum(cost.token_share for cost in report.shards) == pytest.approx(1.0)
    assert report.num_shards == 2


def test_rules_and_histograms_are_printed(folder: Path) -> None:
    printed = _printed(report_on(str(folder)))
    assert "media: Qwen2.5-VL" in printed
    assert "text: ByteEncoder (byte-1)" in printed
    assert "share of the sum" in printed
    assert "What makes the cost" in printed
    assert "Shards with the most LLM tokens" in printed


def test_estimated_text_is_marked(small_shard: Path) -> None:
    report = report_on(str(small_shard), text="rough")
    assert report.num_estimated == 6
    assert "6 samples have estimated counts" in _printed(report)


def test_a_damaged_index_is_a_failure_with_the_remedy(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "items.arrow").write_bytes(b"junk")
    assert main(["data", str(folder)]) == 1
    assert "Delete the folder; it is built again" in capsys.readouterr().err


def test_shards_are_named_once_either_way(small_shard: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["data", str(small_shard), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_samples"] == 6
    assert main(["data"]) == 2
    assert main(["data", str(small_shard), "--data", str(small_shard)]) == 2
    assert "name the folder of an index, or data" in capsys.readouterr().err


def test_no_control_character_reaches_the_terminal_or_the_drawing(
    tmp_path: Path, write_shard, chat_json, capsys: pytest.CaptureFixture[str]
) -> None:
    shard = write_shard(tmp_path / "\x1b[31m&.tar", [("a\x1b[2J.json", chat_json("Hi", "Yes.")), ("b.json", b"{}")])
    index = write_index(tmp_path / "\x1b]0;x", _index_of(shard))
    for source in (shard, index.folder):
        drawn = tmp_path / "\x1b[1m.svg"
        assert main(["data", str(source), "--plot", str(drawn)]) == 0
        captured = capsys.readouterr()
        assert "\x1b" not in captured.out + captured.err
        ElementTree.fromstring(drawn.read_text(encoding="utf-8"))


def _index_of(shard: Path) -> CostIndex:
    """The index of a shard with rules in words that hold a terminal escape."""
    index = scan_source(TarSource(str(shard)), load_estimator(None))
    index.rules["media"] = "\x1b[31mred"
    return index
