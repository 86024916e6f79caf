"""Rates of accelerators: known ones are finite and consistent, unknown ones are NaN with a message."""

import math

import pytest

from balancer.errors import CostModelError
from balancer.hardware import Efficiency, hardware, hardware_names


@pytest.mark.parametrize("name", hardware_names())
def test_every_known_accelerator_has_plausible_rates(name: str) -> None:
    chip = hardware(name)
    assert chip.known
    assert chip.name == name
    assert chip.note == ""
    assert 5e13 < chip.peak_flops_per_second < 5e15
    assert 2e11 < chip.memory_bytes_per_second < 1e13
    assert 16 <= chip.memory_gib <= 300
    # Products, not copies, are what a chip is built for: 75 to 600 FLOPs per byte of its memory bandwidth in bf16.
    assert 30 < chip.peak_flops_per_second / chip.memory_bytes_per_second < 600
    assert 1e10 < chip.link_bytes_per_second < 1e12


def test_public_figures_are_dense_and_not_those_with_sparsity() -> None:
    peaks = {name: hardware(name).peak_flops_per_second for name in ("a100", "h100", "l40s", "mi300x", "b200")}
    assert peaks == {"a100": 312e12, "h100": 989e12, "l40s": 362e12, "mi300x": 1307e12, "b200": 2250e12}


@pytest.mark.parametrize("spelling", ["H100-SXM", "h100_sxm", "NVIDIA H100 SXM", "h100", "H100"])
def test_spelling_does_not_matter(spelling: str) -> None:
    assert hardware(spelling) == hardware("h100-sxm")


def test_unknown_hardware_has_no_rates_and_says_so() -> None:
    chip = hardware("future-1")
    assert not chip.known
    rates = (chip.peak_flops_per_second, chip.memory_bytes_per_second, chip.memory_gib, chip.link_bytes_per_second)
    assert all(math.isnan(rate) for rate in rates)
    assert "'future-1' is not known" in chip.note
    assert "h100-sxm" in chip.note


def test_nominal_hardware_is_ratios_only() -> None:
    assert not hardware("nominal").known
    assert "ratios, not nanoseconds" in hardware("nominal").note


@pytest.mark.parametrize("share", [0.0, -0.1, 1.1, float("nan")])
def test_an_efficiency_is_a_share_of_peak(share: float) -> None:
    with pytest.raises(CostModelError, match="a share of peak above 0 and at most 1"):
        Efficiency(linear=share)
