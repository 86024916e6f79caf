"""Kill and resume with other numbers of ranks: a perfect ledger, and the result of the run that was never stopped."""

from pathlib import Path

import pytest

pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.multirank, pytest.mark.slow]

from rich.console import Console  # noqa: E402

from tools.benchmarks.soak import print_report, soak  # noqa: E402


def test_kills_and_changing_numbers_of_ranks_lose_and_repeat_nothing(tmp_path: Path) -> None:
    """DR-02."""
    report = soak(tmp_path, cycles=2, worlds=(1, 2, 3), seed=3, num_samples=14)
    assert report.report.findings == ()
    assert report.report.num_starts >= 2
    assert len({cycle.ranks for cycle in report.cycles}) > 1
    assert report.holds
    console = Console(record=True, width=120)
    print_report(report, console)
    assert "ledger: perfect" in console.export_text()
