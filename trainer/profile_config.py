"""Options of `balancer-train profile`, which takes no data; those of the others are in `trainer.config`."""

import dataclasses
from pathlib import Path
from typing import ClassVar, Literal

from trainer.errors import ConfigError
from trainer.option_checks import MAX_THREADS, STRICT_KEYS, at_least, check_choices, patch_limit

Clock = Literal["wall", "cpu"]

# Whole micro-batches of this size are made in memory and run one by one: what is larger is a mistyped number.
MAX_PP_SIZE = 1024
MAX_TOKENS = 2**20
MAX_PATCHES = 2**22
MAX_MICROBATCHES = 10_000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProfileConfig:
    """Measure a model on this machine and write a cost model for --cost-model: no data needed."""

    __pydantic_config__: ClassVar[dict[str, str]] = STRICT_KEYS

    model: str = "demo"
    """Model to measure: a preset (demo, check) or a folder with our config.json."""
    output: Path = Path("cost.json")
    """File to write: coefficients, their evidence, and the ranges inside which they hold."""
    pp_size: int = 1
    """Split whose stages are measured, as in fit. One process runs all of them in turn; under torchrun each rank its
    own."""
    capacity_tokens: int = 4096
    """Largest number of LLM tokens in a measured micro-batch: what training will use."""
    capacity_patches: int | None = None
    """Largest number of vision patches. None: four per LLM token of capacity_tokens."""
    profile_microbatches: int = 40
    """Micro-batches that are measured and fitted."""
    verify_microbatches: int = 16
    """Further micro-batches, of other shapes, that only check the fit; 0 leaves the check out."""
    repeats: int = 3
    """Times that each is measured; the median counts."""
    clock: Clock = "wall"
    """Time of acts on a CPU: wall, or the CPU time of the thread, for a machine that does other things as well (only
    with threads 1). A CUDA device is always timed by its own events."""
    threads: int | None = 1
    """CPU threads of one process for tensor operations: what training will use. None: torch's own choice."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Arithmetic of the model, as in fit."""
    seed: int = 0
    """Seed of weights and of the shapes that are measured."""

    def __post_init__(self) -> None:
        check_choices(self)
        at_least(self, 0, "seed", high=2**63 - 1)
        at_least(self, 1, "pp_size", high=MAX_PP_SIZE)
        at_least(self, 1, "capacity_tokens", high=MAX_TOKENS)
        at_least(self, 1, "capacity_patches", high=MAX_PATCHES)
        at_least(self, 1, "repeats", high=MAX_MICROBATCHES)
        at_least(self, 12, "profile_microbatches", high=MAX_MICROBATCHES)
        at_least(self, 0, "verify_microbatches", high=MAX_MICROBATCHES)
        at_least(self, 1, "threads", high=MAX_THREADS)
        if self.clock == "cpu" and self.threads != 1:
            raise ConfigError(
                f"clock='cpu' with threads={self.threads}: the CPU time of one thread says nothing about several. Give "
                f"--threads 1, or --clock wall."
            )

    @property
    def patch_limit(self) -> int:
        """Patches per micro-batch."""
        return patch_limit(self.capacity_tokens, self.capacity_patches)
