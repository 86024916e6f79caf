"""The benchmark's arithmetic: pairs of one step become ratios, medians and a table."""

from typing import Any

import pytest

from tools.benchmarks.step_time import markdown, summarise
from tools.compared_steps import StepPair


def test_ratios_are_taken_within_a_step_so_steps_of_different_size_do_not_mix(make_record: Any) -> None:
    # A small step that gets twice as slow and two large ones that get twice as fast.
    spans = [(10.0, 20.0), (100.0, 50.0), (200.0, 100.0)]
    pairs = [
        StepPair(
            before=make_record(number, [(0, 0, "F", 0, 0.0, off), (1, 0, "F", 0, 0.0, off / 2)], step_ms=off),
            after=make_record(number, [(0, 0, "F", 0, 0.0, on), (1, 0, "F", 0, 0.0, on)], step_ms=on),
        )
        for number, (off, on) in enumerate(spans, start=1)
    ]
    row = summarise("DP=2", pairs)
    assert (row.num_steps, row.off_ms, row.on_ms) == (3, 100.0, 50.0)
    assert (row.ratio_median, row.ratio_min, row.ratio_max) == pytest.approx((0.5, 0.5, 2.0))
    assert row.off_imbalance == pytest.approx(4 / 3)
    assert row.on_imbalance == pytest.approx(1.0)
    assert row.off_bubble_ratio == pytest.approx(0.25)
    assert "| DP=2 | 3 | 100 | 50 | 0.50 (0.50 to 2.00) | 1.33 -> 1.00 | 0.25 -> 0.00 |" in markdown([row])
