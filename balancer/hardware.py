"""Rates of known accelerators; an unknown one has NaN rates and says so, never a guess.

    hardware("h100-sxm")               -> Hardware(peak 9.89e14 FLOP/s, 3.35e12 B/s, 80 GiB, ...)
    hardware("NVIDIA H100 80GB HBM3")  -> the same: names that torch.cuda.get_device_name reports are understood
    hardware("future-1")               -> Hardware(NaN, ..., note="... is not known ...")

Peak is dense bf16 with fp32 accumulation, as the vendors' data sheets give it (where a sheet gives the figure with
sparsity, half of it). No kernel reaches peak, so a cost model also takes an `Efficiency`: an assumption that is
written down, to be replaced by a calibration.
"""

import math
import re
from dataclasses import dataclass
from difflib import get_close_matches

from balancer.errors import CostModelError
from balancer.number_checks import is_number

NAN = float("nan")
NOMINAL = "nominal"


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One accelerator.

    Attributes:
        name: as asked for.
        peak_flops_per_second: dense bf16 products.
        memory_bytes_per_second: of device memory.
        memory_gib: device memory.
        link_bytes_per_second: to neighbours in the node, one direction (NVLink, Infinity Fabric, or PCIe).
        note: what a reader must know; empty if nothing.

    Raises:
        CostModelError: a rate that is neither a positive number nor NaN (not known).
    """

    name: str
    peak_flops_per_second: float
    memory_bytes_per_second: float
    memory_gib: float
    link_bytes_per_second: float
    note: str = ""

    def __post_init__(self) -> None:
        for name in ("peak_flops_per_second", "memory_bytes_per_second", "memory_gib", "link_bytes_per_second"):
            value = getattr(self, name)
            unknown = isinstance(value, float) and math.isnan(value)
            if not unknown and not (is_number(value) and value > 0.0):
                raise CostModelError(
                    f"hardware {self.name}: {name}={str(value)[:40]}: a finite number above 0, or NaN where it is not "
                    "known"
                )

    @property
    def known(self) -> bool:
        """Whether the rates are numbers."""
        return math.isfinite(self.peak_flops_per_second)


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """Share of peak that a kernel is assumed to reach. Assumed, not measured: calibrate for absolute times.

    Attributes:
        linear: matrix products. 0.6 is what well-shaped bf16 products reach on A100 and H100.
        attention: flash attention; 0.5 lies between forward and backward of FlashAttention-2 on A100 (Dao 2023, up to
            73 % and 63 % at long sequences, less at short ones).
    """

    linear: float = 0.6
    attention: float = 0.5

    def __post_init__(self) -> None:
        for name, value in (("linear", self.linear), ("attention", self.attention)):
            if not is_number(value, high=1.0) or value == 0.0:
                raise CostModelError(f"efficiency {name}={value}: a share of peak above 0 and at most 1")


def _known(name: str, teraflops: float, terabytes: float, gib: float, link_gigabytes: float) -> Hardware:
    return Hardware(
        name=name,
        peak_flops_per_second=teraflops * 1e12,
        memory_bytes_per_second=terabytes * 1e12,
        memory_gib=gib,
        link_bytes_per_second=link_gigabytes * 1e9,
    )


# (bf16 TFLOP/s dense, memory TB/s, memory GiB, link GB/s in one direction), from the vendors' data sheets.
_TABLE: dict[str, Hardware] = {
    row.name: row
    for row in (
        _known("v100-sxm", 125, 0.900, 32, 150),  # NVIDIA V100 data sheet; fp16, it has no bf16; NVLink 300 GB/s both
        _known("v100-sxm-16gb", 125, 0.900, 16, 150),  # the same, 16 GB
        _known("v100-pcie", 112, 0.900, 32, 16),  # the same, PCIe 3 x16
        _known("v100-pcie-16gb", 112, 0.900, 16, 16),  # the same, 16 GB
        _known("t4", 65, 0.300, 16, 16),  # NVIDIA T4 data sheet; fp16, it has no bf16; PCIe 3 x16
        _known("a100-sxm-40gb", 312, 1.555, 40, 300),  # NVIDIA A100 data sheet; NVLink 600 GB/s both directions
        _known("a100-sxm", 312, 2.039, 80, 300),  # the same, 80 GB
        _known("a100-pcie", 312, 1.935, 80, 32),  # the same, PCIe 4 x16
        _known("a100-pcie-40gb", 312, 1.555, 40, 32),  # the same, 40 GB
        _known("a10g", 70, 0.600, 24, 32),  # NVIDIA A10G data sheet (AWS G5): 70 dense
        _known("l4", 121, 0.300, 24, 32),  # NVIDIA L4 data sheet: 242 with sparsity
        _known("l40s", 362, 0.864, 48, 32),  # NVIDIA L40S data sheet: 733 with sparsity
        _known("rtx-3090", 71, 0.936, 24, 32),  # NVIDIA GA102 white paper: 71 with fp32 accumulation
        _known("rtx-4090", 165, 1.008, 24, 32),  # NVIDIA Ada white paper: 165.2 with fp32 accumulation
        _known("rtx-5090", 209, 1.792, 32, 64),  # NVIDIA RTX Blackwell white paper: 209.5 with fp32 accumulation
        _known("h100-sxm", 989, 3.35, 80, 450),  # NVIDIA H100 data sheet: 1,979 with sparsity; NVLink 900 GB/s both
        _known("h100-pcie", 756, 2.0, 80, 64),  # the same: 1,513 with sparsity; PCIe 5 x16
        _known("h100-nvl", 835, 3.9, 94, 300),  # the same: 1,671 with sparsity; NVLink bridge 600 GB/s both
        _known("h800-sxm", 989, 3.35, 80, 200),  # as H100 SXM with NVLink 400 GB/s both
        _known("h20", 148, 4.0, 96, 450),  # NVIDIA H20 data sheet
        _known("h200", 989, 4.8, 141, 450),  # NVIDIA H200 data sheet
        _known("gh200", 989, 4.0, 96, 450),  # NVIDIA GH200 data sheet, HBM3
        # NVIDIA HGX B200 data sheet: 4.5 PFLOP/s with sparsity; NVLink 1.8 TB/s both
        _known("b200", 2250, 8.0, 180, 900),
        _known("gb200", 2500, 8.0, 186, 900),  # NVIDIA GB200 NVL72 data sheet, per GPU: 5 PFLOP/s with sparsity
        # AMD MI250X data sheet: 383 TFLOP/s, 3.277 TB/s, 128 GB in two dies; each die is a device, and a rank has one.
        _known("mi250x", 191.5, 1.638, 64, 50),
        _known("mi300x", 1307, 5.3, 192, 64),  # AMD MI300X data sheet; one Infinity Fabric link to each neighbour
        _known("mi325x", 1307, 6.0, 256, 64),  # AMD MI325X data sheet
        _known("mi355x", 2500, 8.0, 288, 76),  # AMD MI355X data sheet
    )
}
_ALIASES = {
    "a100": "a100-sxm",
    "v100": "v100-sxm",
    "h100": "h100-sxm",
    "h800": "h800-sxm",
    "h200-sxm": "h200",
    "b200-sxm": "b200",
    "3090": "rtx-3090",
    "4090": "rtx-4090",
    "5090": "rtx-5090",
}
# Words that tell no two accelerators apart: vendors, product lines, kinds of memory and of board.
_NOISE = re.compile(r"nvidia|amd|tesla|geforce|instinct|radeon|gpu|accelerator|graphics|hbm\d*e?|oam|vf")
_MEMORY = re.compile(r"(\d+)gi?b")
_HOST_MEMORY = {"gh200": 480}  # what the driver adds to the name is not the device's own


def hardware_names() -> tuple[str, ...]:
    """Names in the table, sorted."""
    return tuple(sorted(_TABLE))


def hardware(name: str) -> Hardware:
    """The accelerator called `name`: a name of the table, or what a driver reports ("Tesla V100-SXM2-32GB").

    Case, spaces, underscores, vendors and product lines do not matter; a size of memory chooses between variants, and
    one that no variant has is unknown. An unknown name is no error: planning needs ratios only. Its rates are NaN and
    its note says so.

    Raises:
        CostModelError: a name that is no text.
    """
    if not isinstance(name, str):
        raise CostModelError(f"hardware {str(name)[:80]}: a name as text ({NOMINAL}, h100-sxm ...), or a Hardware")
    found = _TABLE.get(name) or _variant(*_plain_name(name))
    if found is not None:
        return found
    if name.strip().lower() == NOMINAL:
        note = "nominal hardware: times are ratios, not nanoseconds"
    else:
        near = near_names(name)
        meant = f"did you mean {' or '.join(near)}? " if near else ""
        note = (
            f"hardware {name[:80]!r} is not known: its rates are NaN and times are ratios, not nanoseconds; {meant}"
            f"known are {', '.join(hardware_names())}; or give a Hardware of your own"
        )
    return Hardware(
        name=name,
        peak_flops_per_second=NAN,
        memory_bytes_per_second=NAN,
        memory_gib=NAN,
        link_bytes_per_second=NAN,
        note=note,
    )


def near_names(name: str) -> tuple[str, ...]:
    """Names of the table that may be meant, the likeliest first; at most three."""
    return tuple(get_close_matches(_plain_name(name[:80])[0], hardware_names(), n=3, cutoff=0.6))


def _plain_name(name: str) -> tuple[str, int | None]:
    """(name without noise, GB of memory if it says so): "NVIDIA A100-SXM4-40GB" -> ("a100-sxm", 40)."""
    text = re.sub(r"\b(rtx)(\d)", r"\1-\2", re.sub(r"[\s_/]+", "-", name.strip().lower()))
    words, size = [], None
    for word in text.split("-"):
        memory = _MEMORY.fullmatch(word)
        if memory and len(word) < 8:
            size = int(memory[1])
        elif word and not _NOISE.fullmatch(word):
            words.append(re.sub(r"sxm\d", "sxm", word))
    plain = "-".join(words)
    return _ALIASES.get(plain, plain), size


def _variant(plain: str, size: int | None) -> Hardware | None:
    """The row of that name and size of memory; without a size the row that has none in its name."""
    if size is None or size == _HOST_MEMORY.get(plain):
        return _TABLE.get(plain)
    alike = (_TABLE.get(plain), _TABLE.get(f"{plain}-{size}gb"))
    return next((row for row in alike if row is not None and row.memory_gib == size), None)
