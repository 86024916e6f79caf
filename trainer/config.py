"""Options of the four subcommands: frozen dataclasses whose field docstrings are the help texts (tyro reads them).

    DataOptions ── PlacementOptions ─┬─ CheckConfig
                                     └─ StepOptions ─┬─ FitConfig
                                                     └─ PlanConfig        ExportConfig

Subclasses, not nested configs, so that every option is one flat flag and one flat YAML key. Nothing here imports
torch, numba or `balancer`: `--help` and a typing error answer at once. Checks that need the data or the world (a
pp_size that divides it, a sample larger than a micro-batch) are made where those are known.
"""

import dataclasses
import math
import typing
from pathlib import Path
from typing import ClassVar, Literal

from trainer.errors import ConfigError

# Read by pydantic when a config comes from YAML: a key that is no field is an error, not a default.
_STRICT_KEYS = {"extra": "forbid"}

MAX_INTEGER = 2**53  # sums and products of options stay within 64 bits, and every JSON reader keeps them
MAX_THREADS = 1024  # with far more of them OpenMP ends the process without a word
DEFAULT_EPOCHS = 1.0
DEMO_EPOCHS = 5.0

# The names registered in balancer.policies and balancer.schedule and in balancer.weights; a test keeps them equal.
Policy = Literal["lpt", "sequential", "length_grouped"]
ScheduleName = Literal["1f1b", "gpipe"]
LossReduction = Literal["token_mean", "sample_mean", "sqrt"]
LRSchedule = Literal["cosine", "linear", "constant", "wsd"]
VideoDecoderName = Literal["auto", "pyav", "decord", "torchcodec"]
ShuffleName = Literal["full", "block", "none"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DataOptions:
    """Which samples, and how each is read. All of it must stay the same over a run and its resumes."""

    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT_KEYS

    model: str = "demo"
    """Model to build: a preset (demo: small enough for a CPU; check: tiny) or a folder with our config.json."""
    data: str | None = None
    """Tar shards ('shards-{000..015}.tar'), JSON lines, Parquet, or a folder that datasets' save_to_disk wrote; paths
    or URLs, with braces and wildcards. None: the demo corpus, built once."""
    mixture: Path | None = None
    """File that names several sources and how often each is drawn, see docs/mixtures.md; instead of --data."""
    media_root: str | None = None
    """Folder or URL that paths of media start from, where the data are no tars. None: the folder of the data."""
    train_on: Literal["assistant", "last", "all"] = "assistant"
    """Turns that carry labels: every assistant turn, the last assistant turn only, or all text."""
    apply_orientation: bool = True
    """Turn images by their EXIF orientation, in planning and in decoding alike."""
    bad_records: Literal["error", "skip"] = "error"
    """Unusable records or media found by the scan: stop and list them all, or leave them out and count them."""
    unfit: Literal["skip", "clamp", "error"] = "skip"
    """Sound media that the processor would fail on (a strip 300 times as long as high, a clip of one frame): treat
    their samples as bad records, train on the nearest size or number of frames that it takes, or stop and list them."""
    oversize: Literal["error", "drop"] = "error"
    """Samples larger than one micro-batch: stop and list them all, or leave them out and count them."""
    video_decoder: VideoDecoderName = "auto"
    """Library that decodes videos; auto takes the healthiest one that is installed."""
    cache_dir: Path | None = None
    """Folder for the demo corpus, cost indices and tables of members. None: the user's cache folder."""
    remote_cache: Path | None = None
    """Folder on a local disk that keeps what was read from URLs, for all ranks and later runs. None: nothing is kept.
    Credentials are those of the environment, or of fsspec's own configuration."""
    remote_cache_gib: float = 64.0
    """Largest size of remote_cache, in GiB."""
    seed: int = 0
    """Seed of the model's initial weights, the held-out share and the sample order (a non-negative integer)."""

    def __post_init__(self) -> None:
        _check_choices(self)
        _at_least(self, 0, "seed", high=2**64 - 1)
        _positive(self, "remote_cache_gib")
        if not self.model:
            raise ConfigError("model='' is empty. Give a preset (demo, check) or a folder that holds config.json.")
        if self.data is not None and not self.data.strip():
            raise ConfigError(
                "data='' is empty. Give shards such as 'shards-{000..015}.tar', or leave it out for the demo."
            )
        if self.mixture is not None and self.data is not None:
            raise ConfigError(
                f"data={self.data!r} and mixture={str(self.mixture)!r} are both given. Give one of them; a mixture "
                f"names its data itself."
            )
        if self.mixture is not None and self.media_root is not None and getattr(self, "eval_data", None) is None:
            raise ConfigError("media_root is not for a mixture: each of its parts may have a media_root of its own.")

    @property
    def has_data(self) -> bool:
        """Whether the user named data; otherwise there is a built-in set."""
        return self.data is not None or self.mixture is not None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlacementOptions(DataOptions):
    """How the samples of a step become micro-batches."""

    global_batch_size: int = 16
    """Samples of one optimizer step, over all ranks and micro-batches."""
    num_microbatches: int | None = None
    """Micro-batches per rank and step. None: the fewest that fit the capacities, decided per step."""
    min_num_microbatches: int = 1
    """With num_microbatches None: never fewer micro-batches per rank than this (pipelines need several to fill)."""
    capacity_tokens: int = 4096
    """Largest number of LLM tokens (text and visual) in one micro-batch; a hard limit."""
    capacity_patches: int | None = None
    """Largest number of 14-px vision patches in one micro-batch. None: four per LLM token of capacity_tokens."""
    policy: Policy = "lpt"
    """Placement: lpt balances predicted time; sequential keeps the order (balancer off); length_grouped sorts first."""
    schedule: ScheduleName = "1f1b"
    """Order of forward and backward in a pipeline."""
    pp_size: int = 1
    """Pipeline ranks of one replica. 1: all on one rank; P > 1: the encoder, then the LLM split over P - 1."""
    loss_reduction: LossReduction = "token_mean"
    """Loss weights over the global batch: every label token alike, every sample alike, or square root in between."""
    threads: int | None = None
    """CPU threads of one process for tensor operations. None: torch's own choice."""

    def __post_init__(self) -> None:
        DataOptions.__post_init__(self)
        _at_least(self, 1, "global_batch_size", "num_microbatches", "min_num_microbatches", "capacity_tokens")
        _at_least(self, 1, "capacity_patches", "pp_size")
        _at_least(self, 1, "threads", high=MAX_THREADS)
        if self.num_microbatches is not None and self.min_num_microbatches > self.num_microbatches:
            raise ConfigError(
                f"min_num_microbatches={self.min_num_microbatches} is above num_microbatches={self.num_microbatches}. "
                f"Give one of them: num_microbatches fixes the number, min_num_microbatches only bounds it from below."
            )

    @property
    def patch_limit(self) -> int:
        """Patches per micro-batch: as given, or what a micro-batch full of 2x2-merged visual tokens holds."""
        return 4 * self.capacity_tokens if self.capacity_patches is None else self.capacity_patches


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepOptions(PlacementOptions):
    """How long to train and what to hold out: together with the data they fix the number of steps."""

    eval_data: str | None = None
    """Shards for validation, written like --data. None: hold out eval_share of the samples instead."""
    eval_share: float = 0.1
    """Share of the samples held out for validation, drawn by seed (0 to below 1); not used with eval_data."""
    shuffle: ShuffleName = "full"
    """Order of an epoch: full permutes all samples; block permutes shards and mixes a window of them at a time, so that
    a step reads few of them (object stores); none keeps the order of the data."""
    shuffle_block_shards: int = 16
    """With shuffle block: shards (of Parquet: row groups) that are mixed with each other."""
    epochs: float | None = None
    """Passes over the training samples; fractions allowed. Neither epochs nor max_steps: 1 epoch (demo corpus: 5)."""
    max_steps: int | None = None
    """Optimizer steps of the whole run, over as many epochs as needed. Give epochs or max_steps, not both."""

    def __post_init__(self) -> None:
        PlacementOptions.__post_init__(self)
        _within(self, 0.0, 1.0, "eval_share", below_high=True)
        _at_least(self, 1, "max_steps", "shuffle_block_shards")
        if self.epochs is not None and self.max_steps is not None:
            raise ConfigError(
                f"epochs={self.epochs:g} and max_steps={self.max_steps} are both given. Give the one that shall decide."
            )
        if self.epochs is not None and not (self.epochs > 0 and math.isfinite(self.epochs)):
            raise ConfigError(f"epochs={self.epochs:g}: a number above 0 is needed, such as 1 or 0.5.")

    def num_steps(self, steps_per_epoch: int) -> int:
        """Steps of the run, known before step 1: max_steps, or the epochs rounded up to a whole step."""
        if self.max_steps is not None:
            return self.max_steps
        default = DEFAULT_EPOCHS if self.has_data else DEMO_EPOCHS
        return max(1, math.ceil((self.epochs or default) * steps_per_epoch - 1e-9))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FitConfig(StepOptions):
    """Train a model on tars, JSON lines, Parquet, a saved dataset or a mixture, one plan per optimizer step."""

    output: Path | None = None
    """Run folder, made anew. None: the next free runs/NAME-NNN."""
    resume: bool = False
    """Continue a run from its newest checkpoint: --resume RUN, or with --output RUN, or alone: the newest run."""
    lr: float = 2e-3
    """Peak learning rate; the default suits the small built-in models."""
    min_lr_ratio: float = 0.1
    """Learning rate of the last step as a share of the peak (0 to 1); not used by lr_schedule constant."""
    lr_schedule: LRSchedule = "cosine"
    """Course of the learning rate after the warm-up; wsd is constant, then linear decay over wsd_decay_share."""
    warmup_steps: int | None = None
    """Steps of linear warm-up. None: 5 % of the steps, rounded up."""
    wsd_decay_share: float = 0.2
    """Share of all steps that lr_schedule wsd spends decaying (above 0 to 1)."""
    weight_decay: float = 0.1
    """AdamW's decoupled weight decay; never on norms and biases."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's two averaging factors (0 to below 1)."""
    eps: float = 1e-8
    """AdamW's denominator offset."""
    clip_norm: float | None = 1.0
    """Largest norm of the gradient over all parameters; larger ones are scaled down. None: no clipping."""
    dtype: Literal["fp32", "bf16"] = "fp32"
    """Arithmetic of the model: bf16 means autocast on CUDA; weights and optimizer stay in fp32."""
    max_replaced: int = 0
    """Budget of samples whose media fail while decoding and train as zero-loss stand-ins; one more stops the run."""
    max_replaced_consecutive: int | None = None
    """Budget of steps in a row with a replaced sample: a disk or store that fails, not a bad file. None: no limit."""
    max_skipped_consecutive: int = 100
    """Budget of steps in a row without any label token, which change no weight; one more stops the run."""
    num_workers: int = 1
    """Decoding processes per rank; 0 decodes in the training process."""
    sample_timeout_s: float | None = 120.0
    """Longest time to read and decode one sample; then it is replaced, and so is the process that hangs. Needs
    num_workers of 1 or more. None: no limit."""
    eval_interval_steps: int | None = None
    """Steps between validations. None: only after the last step."""
    checkpoint_interval_steps: int | None = None
    """Steps between checkpoints. None: only after the last step."""
    keep_last: int = 2
    """Checkpoints kept in the run folder; older ones are deleted."""
    compare_steps: int = 3
    """Steps measured with the balancer off and on for the summary's before -> after; 0 leaves it out."""
    log_interval: int = 1
    """Steps between printed lines; steps.jsonl records every step."""

    def __post_init__(self) -> None:
        StepOptions.__post_init__(self)
        _at_least(self, 0, "warmup_steps", "max_replaced", "max_replaced_consecutive", "max_skipped_consecutive")
        _at_least(self, 0, "num_workers", "compare_steps")
        _at_least(self, 1, "eval_interval_steps", "checkpoint_interval_steps", "keep_last", "log_interval")
        _positive(self, "lr", "eps", "clip_norm", "sample_timeout_s")
        _within(self, 0.0, math.inf, "weight_decay", below_high=True)
        _within(self, 0.0, 1.0, "min_lr_ratio")
        if not 0.0 < self.wsd_decay_share <= 1.0:
            raise ConfigError(f"wsd_decay_share={self.wsd_decay_share:g}: a share above 0 and at most 1 is needed.")
        for beta in self.betas:
            if not 0.0 <= beta < 1.0:
                raise ConfigError(f"betas={self.betas}: {beta:g} is outside 0 to below 1.")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CheckConfig(PlacementOptions):
    """Prove that a balanced step gives the loss and gradients of a plain loop, on this model and data."""

    model: str = "check"
    """Model to build: a preset (check: tiny; demo) or a folder with our config.json."""
    global_batch_size: int = 8
    """Samples of the one step that is compared."""
    self_test: bool = False
    """Plant six known bugs, one after the other; each must make the check fail."""
    json_output: Path | None = None
    """Write what was found to this JSON file instead of printing it (under torchrun, by rank 0)."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlanConfig(StepOptions):
    """Print what training would do, without training: distributions, oversize samples, balance, number of steps."""

    dp_size: int = 1
    """Replicas to plan for; the command itself always runs in one process."""
    show_sample: int | None = None
    """Print this sample (its number in the index, from 0) with its labels instead of the statistics."""
    plan_steps: int | None = None
    """Steps to plan for the statistics. None: all steps of the run, at most one epoch."""

    def __post_init__(self) -> None:
        StepOptions.__post_init__(self)
        _at_least(self, 1, "dp_size", "plan_steps")
        _at_least(self, 0, "show_sample")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExportConfig:
    """Write the model of a run as one folder: config.json and safetensors."""

    __pydantic_config__: ClassVar[dict[str, str]] = _STRICT_KEYS

    run: Path
    """Run folder whose newest complete checkpoint is exported."""
    destination: Path
    """Folder to write; must not exist or be empty."""


Config = FitConfig | CheckConfig | PlanConfig | ExportConfig

# The options a resumed run may change: they move neither the samples of a step nor the meaning of a stored weight.
# Any other change is refused, because a step number would then stand for other samples than before.
# A mixture is named anew to change its weights; that its data are the same is checked by the ledger.
CHANGEABLE_ON_RESUME = frozenset(
    [
        "mixture",
        "output",
        "resume",
        "cache_dir",
        "remote_cache",
        "remote_cache_gib",
        "threads",
        "num_workers",
        "keep_last",
        "checkpoint_interval_steps",
        "eval_interval_steps",
        "log_interval",
        "compare_steps",
        "pp_size",
        "policy",
        "schedule",
        "num_microbatches",
        "min_num_microbatches",
        "max_replaced",
        "max_replaced_consecutive",
        "max_skipped_consecutive",
        "sample_timeout_s",
        "video_decoder",
        "epochs",
        "max_steps",
        "lr",
        "min_lr_ratio",
        "lr_schedule",
        "warmup_steps",
        "wsd_decay_share",
        "weight_decay",
        "betas",
        "eps",
        "clip_norm",
        "dtype",
    ]
)


def refuse_changed_trajectory(before: FitConfig, now: FitConfig) -> None:
    """Raise ConfigError when a resume asks for other samples, another order or another model than the run had."""
    changed = [
        f"{field.name} was {getattr(before, field.name)!r} and is now {getattr(now, field.name)!r}"
        for field in dataclasses.fields(now)
        if field.name not in CHANGEABLE_ON_RESUME and getattr(before, field.name) != getattr(now, field.name)
    ]
    if changed:
        raise ConfigError(
            f"a resumed run keeps its samples and model, but {'; '.join(changed)}. Leave these options out, or start a "
            f"new run with another --output."
        )


def _check_choices(config: object) -> None:
    hints = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):  # type: ignore[arg-type]
        hint, value = hints[field.name], getattr(config, field.name)
        if typing.get_origin(hint) is Literal and value not in typing.get_args(hint):
            allowed = ", ".join(typing.get_args(hint))
            raise ConfigError(f"{field.name}={value!r} is not one of: {allowed}.")


def _at_least(config: object, low: int, *names: str, high: int = MAX_INTEGER) -> None:
    for name in names:
        value = getattr(config, name)
        if value is not None and value < low:
            raise ConfigError(f"{name}={value}: a whole number of at least {low} is needed.")
        if value is not None and value > high:
            raise ConfigError(f"{name}={value}: a whole number of at most {high} is needed.")


def _positive(config: object, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise ConfigError(f"{name}={value:g}: a finite number above 0 is needed.")


def _within(config: object, low: float, high: float, *names: str, below_high: bool = False) -> None:
    for name in names:
        value = getattr(config, name)
        if not (low <= value < high if below_high else low <= value <= high):
            until = "below" if below_high else "to"
            raise ConfigError(f"{name}={value:g}: a number from {low:g} {until} {high:g} is needed.")
