"""Histograms of costs: exact at the borders of the bins, and drawn without anything from outside."""

import itertools
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.cli import main
from tools.cost_histogram import histogram
from tools.cost_plot import render_costs
from tools.data_report import report_on

SVG = "{http://www.w3.org/2000/svg}"


@given(st.lists(st.integers(0, 2**40), max_size=40))
def test_every_sample_is_in_the_one_bin_that_says_so(values: list[int]) -> None:
    bins = histogram(np.array(values, dtype=np.int64))
    assert sum(row.samples for row in bins) == len(values)
    assert sum(row.total for row in bins) == sum(values)
    for row in bins:
        inside = [value for value in values if row.low <= value <= row.high]
        assert (row.samples, row.total) == (len(inside), sum(inside))
    assert all(low.high + 1 == high.low for low, high in itertools.pairwise(row for row in bins if row.high))


def test_between_zeros_and_the_first_number_no_empty_bin_is_shown() -> None:
    assert [(row.low, row.samples) for row in histogram(np.array([0, 0, 17, 70]))] == [
        (0, 2),
        (16, 1),
        (32, 0),
        (64, 1),
    ]


def test_shares_are_of_the_samples_and_of_the_sum() -> None:
    bins = histogram(np.array([1, 1, 1, 1021]))
    assert (bins[0].sample_share, bins[-1].sample_share) == (0.75, 0.25)
    assert bins[-1].total_share == pytest.approx(1021 / 1024)
    assert histogram(np.array([0, 0]))[0].total_share == 0.0
    assert histogram(np.array([], dtype=np.int32)) == ()


def test_the_drawing_shows_every_bin_and_the_shares(small_shard: Path) -> None:
    report = report_on(str(small_shard))
    root = ElementTree.fromstring(render_costs(report, "small & <odd>"))
    bars = [node for node in root.iter(f"{SVG}rect") if node.get("class") == "bar"]
    assert len(bars) == 2 * sum(len(bins) for bins in report.histograms.values())
    shares = [node for node in root.iter(f"{SVG}rect") if node.get("class") == "share"]
    assert len(shares) == sum(value > 0 for kinds in report.modality_shares.values() for value in kinds.values())
    texts = " ".join(node.text or "" for node in root.iter() if node.text)
    assert "What small & <odd> costs: 6 usable samples" in texts
    assert "Qwen2.5-VL" in texts
    assert all(float(bar.get("height") or 0) >= 0 for bar in bars)


def test_a_data_set_without_a_usable_sample_can_be_drawn(tmp_path: Path, write_shard, chat_json) -> None:
    report = report_on(str(write_shard(tmp_path / "bad.tar", [("0.json", chat_json("<image>", "x"))])))
    assert ElementTree.fromstring(render_costs(report, "nothing")).tag == f"{SVG}svg"


def test_the_command_draws_where_it_is_told(
    small_shard: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "new" / "cost.svg"
    assert main(["data", str(small_shard), "--plot", str(output)]) == 0
    assert f"drawn in {output}" in capsys.readouterr().out
    assert "http://" not in output.read_text(encoding="utf-8").replace("http://www.w3.org/2000/svg", "")
    assert main(["data", str(small_shard), "--plot", str(tmp_path)]) == 1
    assert "cannot be written" in capsys.readouterr().err
