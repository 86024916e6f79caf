"""The summary of a run says what its records say, and says so where they say nothing."""

import io
import json
import math
from pathlib import Path

import pytest
from rich.console import Console

from balancer.errors import RecordFormatError
from balancer.measured import measure, num_ranks
from balancer.records import Replaced
from tools.errors import AnalyzeError, UsageError
from tools.run_report import print_report, read_run, summarise


def _printed(report) -> str:
    console = Console(file=io.StringIO(), width=140, soft_wrap=True, highlight=False)
    print_report(report, console)
    return console.file.getvalue()


def test_the_bubble_is_idle_time_of_all_ranks_within_the_span(make_record) -> None:
    # Rank 0 works 30 of 40 ms, rank 1 works 10 of 40 ms: 40 of 80 are idle.
    record = make_record(1, [(0, 0, "F", 0, 0.0, 10.0), (0, 1, "B", 0, 20.0, 40.0), (1, 0, "F", 0, 0.0, 10.0)])
    measured = measure(record.actions, ranks=2, replicas=2)
    assert measured.span_ms == 40.0
    assert measured.bubble_ratio == pytest.approx(0.5)
    assert measured.rank_imbalance == pytest.approx(1.5)


def test_a_rank_without_acts_in_this_step_counts_as_idle(make_record) -> None:
    busy = make_record(1, [(0, 0, "F", 0, 0.0, 10.0)])
    both = make_record(2, [(0, 0, "F", 0, 0.0, 10.0), (1, 0, "F", 0, 0.0, 10.0)])
    assert num_ranks([busy, both]) == 2
    assert measure(busy.actions, ranks=2, replicas=2).bubble_ratio == pytest.approx(0.5)


def test_a_record_without_acts_has_no_measured_metrics(make_record) -> None:
    measured = measure(make_record(1).actions, ranks=1, replicas=1)
    assert math.isnan(measured.bubble_ratio)
    assert math.isnan(measured.span_ms)


def test_microbatch_imbalance_is_over_the_cells_of_all_replicas(make_record) -> None:
    record = make_record(1, [(0, 0, "F", 0, 0.0, 30.0), (0, 0, "F", 1, 30.0, 40.0), (1, 0, "F", 0, 0.0, 20.0)])
    assert measure(record.actions, ranks=2, replicas=2).microbatch_imbalance == pytest.approx(30.0 / 20.0)


def test_times_are_quantiles_over_the_steps(make_record) -> None:
    report = summarise([make_record(step, step_ms=float(step * 10)) for step in range(1, 12)])
    assert report.step_ms_p50 == pytest.approx(60.0)
    assert report.step_ms_p90 == pytest.approx(100.0)


def test_the_loss_goes_from_the_first_to_the_last_finite_one(make_record) -> None:
    report = summarise([make_record(1), make_record(2), make_record(3, loss=math.nan)])
    assert (report.first_loss, report.last_loss) == (4.0, 2.0)


def test_the_share_of_data_wait_is_of_all_step_time(make_record) -> None:
    report = summarise(
        [make_record(1, step_ms=100.0, data_wait_ms=20.0), make_record(2, step_ms=100.0, data_wait_ms=0.0)]
    )
    assert report.data_wait_share == pytest.approx(0.1)


def test_samples_left_out_are_summed_over_the_steps_and_named(make_record) -> None:
    replaced = Replaced(sample_id=7, place="shard a.tar, key k[7]", reason="truncated")
    records = [make_record(1, dropped_ids=(1, 2), replaced=(replaced,)), make_record(2, cut_ids=(3,), conformed=4)]
    report = summarise(records)
    assert (report.num_dropped, report.num_cut, report.num_replaced, report.num_conformed) == (2, 1, 1, 4)
    printed = _printed(report)
    assert "2 dropped, 1 cut, 1 replaced; 4 media made to fit" in printed
    assert "sample 7, shard a.tar, key k[7]: truncated" in printed


def test_many_replaced_samples_are_counted_and_ten_are_named(make_record) -> None:
    replaced = tuple(Replaced(sample_id=i, place=f"key {i}", reason="corrupt") for i in range(12))
    report = summarise([make_record(1, replaced=replaced)])
    assert report.num_replaced == 12
    printed = _printed(report)
    assert printed.count("replaced: sample") == 10
    assert "and 2 more replaced samples" in printed


def test_names_from_the_data_are_not_read_as_markup(make_record) -> None:
    replaced = Replaced(sample_id=0, place="key [red]x[/red]", reason="[/nope]")
    assert "key [red]x[/red]: [/nope]" in _printed(summarise([make_record(1, replaced=(replaced,))]))


def test_what_was_not_measured_is_said_and_is_null_in_json(make_record) -> None:
    unknown = {"measured_imbalance": math.nan, "fill": math.nan, "makespan_ms": math.nan}
    report = summarise([make_record(1, **unknown)])
    assert "not measured over replicas" in _printed(report)
    content = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert content["fill_p50"] is None
    assert content["bubble_ratio_p50"] is None
    assert content["bound_distance_p50"] is None


def test_the_distance_to_the_bound_is_predicted_makespan_over_bound(make_record) -> None:
    assert summarise([make_record(1)]).bound_distance_p50 == pytest.approx(1.25)


def test_a_bound_of_zero_does_not_divide(make_record) -> None:
    assert math.isnan(summarise([make_record(1, lower_bound_ms=0.0)]).bound_distance_p50)


def test_every_policy_of_the_run_is_listed_once(make_record) -> None:
    records = [make_record(1), make_record(2, policy="sequential"), make_record(3)]
    assert summarise(records).policies == ("lpt", "sequential")


def test_the_steps_of_a_run_folder_are_read(run_folder: Path) -> None:
    assert [record.step for record in read_run(run_folder)] == [1, 2, 3, 4]


def test_a_last_line_cut_short_by_a_crash_is_left_out(run_folder: Path) -> None:
    path = run_folder / "steps.jsonl"
    path.write_bytes(path.read_bytes()[:-20])
    assert [record.step for record in read_run(run_folder)] == [1, 2, 3]


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"run folder .*nowhere does not exist"):
        read_run(tmp_path / "nowhere")


def test_a_folder_that_is_no_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"holds no steps\.jsonl"):
        read_run(tmp_path)


def test_a_run_without_a_finished_step_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "steps.jsonl").touch()
    with pytest.raises(AnalyzeError, match="holds no finished step"):
        read_run(tmp_path)


def test_a_damaged_line_is_named_by_file_and_number(run_folder: Path) -> None:
    path = run_folder / "steps.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join([lines[0], "{]", *lines[2:]]) + "\n", encoding="utf-8")
    with pytest.raises(RecordFormatError, match=r"steps\.jsonl, line 2"):
        read_run(run_folder)
