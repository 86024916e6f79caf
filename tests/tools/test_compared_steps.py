"""Steps measured off and on are paired by step, and the pair that is shown is neither the best nor the worst."""

from pathlib import Path

import pytest

from tools.compared_steps import StepPair, choose_pair, read_pairs
from tools.errors import AnalyzeError, UsageError

BUSY = [(0, 0, "F", 0, 0.0, 10.0)]


@pytest.fixture
def write_compare(tmp_path: Path):
    def write(*records) -> Path:
        text = "".join(record.to_json() + "\n" for record in records)
        (tmp_path / "compare.jsonl").write_text(text, encoding="utf-8")
        return tmp_path

    return write


def _pair(make_record, step: int, gain: float) -> StepPair:
    before = make_record(step, BUSY, policy="sequential", step_ms=100.0 * gain)
    return StepPair(before=before, after=make_record(step, BUSY, step_ms=100.0))


def test_records_of_one_step_are_paired_by_policy_whatever_their_order(make_record, write_compare) -> None:
    on = [make_record(step, BUSY, step_ms=100.0) for step in (2, 1)]
    off = [make_record(step, BUSY, step_ms=100.0 + step, policy="sequential") for step in (1, 2)]
    pairs = read_pairs(write_compare(*on, *off))
    assert [(pair.step, pair.before.step_ms, pair.after.policy) for pair in pairs] == [
        (1, 101.0, "lpt"),
        (2, 102.0, "lpt"),
    ]


def test_repeated_measurements_of_a_step_are_paired_in_their_order(make_record, write_compare) -> None:
    times = {"sequential": (120.0, 140.0), "lpt": (100.0, 110.0)}
    records = [make_record(5, BUSY, policy=policy, step_ms=ms) for policy, both in times.items() for ms in both]
    pairs = read_pairs(write_compare(*records))
    assert [(pair.before.step_ms, pair.after.step_ms) for pair in pairs] == [(120.0, 100.0), (140.0, 110.0)]


def test_a_measurement_without_its_partner_is_left_out(make_record, write_compare) -> None:
    off = [make_record(step, BUSY, policy="sequential") for step in (1, 2)]
    assert [pair.step for pair in read_pairs(write_compare(*off, make_record(2, BUSY)))] == [2]


def test_a_measurement_without_acts_cannot_be_drawn_and_is_left_out(make_record, write_compare) -> None:
    folder = write_compare(make_record(1, policy="sequential"), make_record(1, BUSY))
    with pytest.raises(AnalyzeError, match="no step measured with the balancer both off and on"):
        read_pairs(folder)


def test_a_file_with_one_policy_says_which_steps_it_holds(make_record, write_compare) -> None:
    with pytest.raises(AnalyzeError, match=r"steps off \[3\], on none.*--compare-steps"):
        read_pairs(write_compare(make_record(3, BUSY, policy="sequential")))


def test_a_missing_file_says_how_to_make_it(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"compare\.jsonl does not exist.*balancer-train fit.*--compare-steps"):
        read_pairs(tmp_path)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"run folder .*gone does not exist"):
        read_pairs(tmp_path / "gone")


def test_the_median_gain_is_chosen(make_record) -> None:
    pairs = [_pair(make_record, step, gain) for step, gain in ((1, 3.0), (2, 1.0), (3, 2.0))]
    assert choose_pair(pairs).step == 3


def test_of_an_even_number_the_lower_median_is_chosen(make_record) -> None:
    pairs = [_pair(make_record, step, gain) for step, gain in ((1, 1.5), (2, 1.0), (3, 2.0), (4, 1.2))]
    assert choose_pair(pairs).gain == pytest.approx(1.2)


def test_a_chosen_step_is_taken_and_a_missing_one_lists_those_there(make_record) -> None:
    pairs = [_pair(make_record, step, gain) for step, gain in ((1, 3.0), (2, 1.0))]
    assert choose_pair(pairs, 1).gain == pytest.approx(3.0)
    with pytest.raises(UsageError, match=r"step 9 was not compared. Compared steps: 1, 2\."):
        choose_pair(pairs, 9)
