"""Rates of accelerators: known ones are finite and consistent, unknown ones are NaN with a message."""

import math

import pytest

from balancer.errors import CostModelError
from balancer.hardware import Efficiency, Hardware, hardware, hardware_names


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


@pytest.mark.parametrize("name", hardware_names())
@pytest.mark.parametrize("vendor", ["", "NVIDIA ", "AMD Instinct ", "amd-", "Tesla "])
def test_names_of_the_table_resolve_to_themselves_in_any_dress(name: str, vendor: str) -> None:
    for spelling in (name, name.upper(), name.replace("-", " "), name.replace("-", "_")):
        assert hardware(vendor + spelling) is hardware(name)


@pytest.mark.parametrize(
    ("reported", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm"),
        ("NVIDIA A100-SXM4-40GB", "a100-sxm-40gb"),
        ("A100-SXM4-40GB", "a100-sxm-40gb"),
        ("NVIDIA A100-PCIE-40GB", "a100-pcie-40gb"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie"),
        ("a100-40gb", "a100-sxm-40gb"),
        ("Tesla V100-SXM2-32GB", "v100-sxm"),
        ("Tesla V100-SXM2-16GB", "v100-sxm-16gb"),
        ("Tesla V100-PCIE-16GB", "v100-pcie-16gb"),
        ("Tesla T4", "t4"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("rtx4090", "rtx-4090"),
        ("4090", "rtx-4090"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA A10G", "a10g"),
        ("AMD Instinct MI300X", "mi300x"),
        ("AMD Instinct MI300X VF", "mi300x"),
        ("amd-mi300x", "mi300x"),
    ],
)
def test_names_that_drivers_report_are_known(reported: str, name: str) -> None:
    assert hardware(reported) is hardware(name)


@pytest.mark.parametrize(
    "name",
    [
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA GeForce RTX 4090 D",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
        "NVIDIA A100-SXM-64GB",
        "NVIDIA H100 64GB",
        "",
        "nvidia",
        "80gb",
        "-",
    ],
)
def test_what_only_looks_like_a_known_accelerator_stays_unknown(name: str) -> None:
    assert not hardware(name).known


def test_an_unknown_name_is_told_what_it_may_mean() -> None:
    assert "did you mean h100-sxm" in hardware("NVIDIA H100-SXN").note
    assert "did you mean" not in hardware("quantum").note


@pytest.mark.parametrize("name", [None, 5, ["h100"], b"h100"])
def test_a_name_that_is_no_text_is_refused(name: object) -> None:
    with pytest.raises(CostModelError, match=r"hardware .*: a name as text"):
        hardware(name)  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [math.inf, -math.inf, 0, -1.0, 10**400, "fast", None, True], ids=lambda v: str(v)[:5])
@pytest.mark.parametrize("field", ["peak_flops_per_second", "memory_gib"])
def test_a_rate_is_a_finite_number_or_said_to_be_unknown(field: str, value: object) -> None:
    rates = {"memory_bytes_per_second": 1e12, "link_bytes_per_second": 1e10, "peak_flops_per_second": 1e12}
    with pytest.raises(CostModelError, match=f"hardware mine: {field}=.*: a finite number above 0, or NaN"):
        Hardware(name="mine", **{"memory_gib": 8.0, **rates, field: value})


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


@pytest.mark.parametrize("share", [0.0, -0.1, 1.1, float("nan"), "half", None, True])
def test_an_efficiency_is_a_share_of_peak(share: float) -> None:
    with pytest.raises(CostModelError, match="a share of peak above 0 and at most 1"):
        Efficiency(linear=share)
