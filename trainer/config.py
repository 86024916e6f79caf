"""Options of the five subcommands: frozen dataclasses whose field docstrings are the help texts (tyro reads them).

    DataOptions ── PlacementOptions ─┬─ CheckConfig
                                     └─ StepOptions ─┬─ FitConfig
                                                     └─ PlanConfig      ExportConfig; trainer.profile_config

Subclasses, not nested configs, so that every option is one flat flag and one flat YAML key. Nothing here imports
torch, numba or `balancer`: `--help` and a typing error answer at once. Checks that need the data or the world (a
pp_size that divides it, a sample larger than a micro-batch) are made where those are known.
"""

import dataclasses
import math
from pathlib import Path
from typing import ClassVar, Literal

from trainer.errors import ConfigError
from trainer.option_checks import (
    GIB,
    MAX_INTEGER,
    MAX_THREADS,
    STRICT_KEYS,
    at_least,
    check_choices,
    patch_limit,
    positive,
    within,
)
from trainer.profile_config import ProfileConfig

DEFAULT_EPOCHS = 1.0
DEMO_EPOCHS = 5.0

# The names registered in balancer.policies and balancer.schedule and in balancer.weights; a test keeps them equal.
Policy = Literal["joint", "lpt", "sequential", "length_grouped"]
ScheduleName = Literal["1f1b", "gpipe"]  # those that training executes
AnyScheduleName = Literal["1f1b", "gpipe", "interleaved1f1b", "nested", "phased", "zb-h1"]
EncoderPlace = Literal["own", "shared", "spread"]
LossReduction = Literal["token_mean", "sample_mean", "sqrt"]
LRSchedule = Literal["cosine", "linear", "constant", "wsd"]
VideoDecoderName = Literal["auto", "pyav", "decord", "torchcodec"]
ShuffleName = Literal["full", "block", "none"]
TailName = Literal["pad", "drop", "repeat"]
OversizeName = Literal["error", "drop", "shrink", "truncate_text"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DataOptions:
    """Which samples, and how each is read. All of it must stay the same over a run and its resumes."""

    __pydantic_config__: ClassVar[dict[str, str]] = STRICT_KEYS

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
    oversize: OversizeName = "error"
    """Samples larger than one micro-batch: stop and list them all; leave them out and count them; shrink their images
    (fewer pixels) and videos (fewer frames) until they fit; or cut their text behind the last medium."""
    oversize_rest: Literal["error", "drop"] = "error"
    """Samples that shrink or truncate_text cannot make fit: stop and list them all, or leave them out and count them.
    """
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
        check_choices(self)
        at_least(self, 0, "seed", high=2**64 - 1)
        positive(self, "remote_cache_gib")
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
    capacity_memory_gib: float | None = None
    """Largest modelled activations, in GiB, that one micro-batch may leave on any one stage of the pipeline; a hard
    limit beside those of tokens and patches. None: no limit."""
    policy: Policy = "joint"
    """Placement: joint balances predicted time by simulating candidates; lpt does so by sums, faster; sequential keeps
    the order (balancer off); length_grouped sorts first."""
    schedule: AnyScheduleName = "1f1b"
    """Order of forward and backward in a pipeline."""
    pp_size: int = 1
    """Pipeline ranks of one replica. 1: all on one rank; P > 1: the encoder, then the LLM split over P - 1."""
    loss_reduction: LossReduction = "token_mean"
    """Loss weights over the global batch: every label token alike, every sample alike, or square root in between."""
    threads: int | None = None
    """CPU threads of one process for tensor operations. None: torch's own choice."""

    def __post_init__(self) -> None:
        DataOptions.__post_init__(self)
        at_least(self, 1, "global_batch_size", "num_microbatches", "min_num_microbatches", "capacity_tokens")
        at_least(self, 1, "capacity_patches", "pp_size")
        _check_memory(self.capacity_memory_gib)
        at_least(self, 1, "threads", high=MAX_THREADS)
        if self.num_microbatches is not None and self.min_num_microbatches > self.num_microbatches:
            raise ConfigError(
                f"min_num_microbatches={self.min_num_microbatches} is above num_microbatches={self.num_microbatches}. "
                f"Give one of them: num_microbatches fixes the number, min_num_microbatches only bounds it from below."
            )

    @property
    def patch_limit(self) -> int:
        """Patches per micro-batch."""
        return patch_limit(self.capacity_tokens, self.capacity_patches)

    @property
    def activation_bytes(self) -> int | None:
        """`capacity_memory_gib` in bytes."""
        return None if self.capacity_memory_gib is None else int(self.capacity_memory_gib * GIB)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepOptions(PlacementOptions):
    """How long to train and what to hold out: together with the data they fix the number of steps."""

    eval_data: str | None = None
    """Shards for validation, written like --data. None: hold out eval_share of the samples instead."""
    eval_share: float = 0.1
    """Share of the samples held out for validation, drawn by seed (0 to below 1); not used with eval_data."""
    step_tokens: int | None = None
    """LLM tokens of one optimizer step, over all ranks, instead of global_batch_size: every epoch has the same number
    of steps, and each gets the same share of its tokens, give or take a sample."""
    tail: TailName = "pad"
    """Last step of an epoch where the samples do not fill it: leave it short (pad), leave its samples out of this epoch
    (drop), or fill it with the first samples of the epoch (repeat). Counts are shown at launch and in the summary."""
    lookahead_steps: int = 1
    """Neighbouring steps that exchange samples so that each costs the same. Changes which samples meet in a step; 1
    leaves every step as it was drawn."""
    shuffle: ShuffleName = "full"
    """Order of an epoch: full permutes all samples; block permutes shards and mixes a window of them at a time, so that
    a step reads few of them (object stores); none keeps the order of the data."""
    shuffle_block_shards: int = 16
    """With shuffle block: shards (of Parquet: row groups) that are mixed with each other."""
    epochs: float | None = None
    """Passes over the training samples; fractions allowed. Neither epochs nor max_steps: 1 epoch (demo corpus: 5)."""
    max_steps: int | None = None
    """Optimizer steps of the whole run, over as many epochs as needed. Give epochs or max_steps, not both."""
    cost_model: Path | None = None
    """Cost model to plan with: a file that profile wrote. None: FLOPs in closed form, whose ratios alone count."""

    def __post_init__(self) -> None:
        PlacementOptions.__post_init__(self)
        within(self, 0.0, 1.0, "eval_share", below_high=True)
        at_least(self, 1, "max_steps", "shuffle_block_shards", "step_tokens", "lookahead_steps")
        self._check_selection()
        if self.epochs is not None and self.max_steps is not None:
            raise ConfigError(
                f"epochs={self.epochs:g} and max_steps={self.max_steps} are both given. Give the one that shall decide."
            )
        if self.epochs is not None and not (self.epochs > 0 and math.isfinite(self.epochs)):
            raise ConfigError(f"epochs={self.epochs:g}: a number above 0 is needed, such as 1 or 0.5.")

    def _check_selection(self) -> None:
        if self.step_tokens is not None and self.tail != "pad":
            raise ConfigError(
                f"step_tokens={self.step_tokens} and tail={self.tail!r} do not go together: with a token budget every "
                f"step of an epoch gets the same share, so there is no short last step. Leave tail out."
            )
        given = {"step_tokens": None, "tail": "pad", "lookahead_steps": 1}
        changed = [
            f"{name}={getattr(self, name)!r}" for name, default in given.items() if getattr(self, name) != default
        ]
        if self.mixture is not None and changed:
            raise ConfigError(
                f"{', '.join(changed)}: not with a mixture, which draws a fixed number of samples for every step by "
                f"its weights. Leave it out, and set global_batch_size."
            )

    def num_steps(self, steps_per_epoch: int) -> int:
        """Steps of the run, known before step 1: max_steps, or the epochs rounded up to a whole step."""
        if self.max_steps is not None:
            return self.max_steps
        default = DEFAULT_EPOCHS if self.has_data else DEMO_EPOCHS
        return max(1, math.ceil((self.epochs or default) * steps_per_epoch - 1e-9))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FitConfig(StepOptions):
    """Train a model on tars, JSON lines, Parquet, a saved dataset or a mixture, one plan per optimizer step."""

    schedule: ScheduleName = "1f1b"
    """Order of forward and backward in a pipeline. Others can be planned: balancer-train plan."""
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
        at_least(self, 0, "warmup_steps", "max_replaced", "max_replaced_consecutive", "max_skipped_consecutive")
        at_least(self, 0, "num_workers", "compare_steps")
        at_least(self, 1, "eval_interval_steps", "checkpoint_interval_steps", "keep_last", "log_interval")
        positive(self, "lr", "eps", "clip_norm", "sample_timeout_s")
        within(self, 0.0, math.inf, "weight_decay", below_high=True)
        within(self, 0.0, 1.0, "min_lr_ratio")
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
    schedule: ScheduleName = "1f1b"
    """Order of forward and backward in a pipeline."""
    self_test: bool = False
    """Plant six known bugs, one after the other; each must make the check fail."""
    json_output: Path | None = None
    """Write what was found to this JSON file instead of printing it (under torchrun, by rank 0)."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlanConfig(StepOptions):
    """Print what training would do, without training: distributions, oversize samples, balance, number of steps."""

    dp_size: int = 1
    """Replicas to plan for; the command itself always runs in one process."""
    encoder: EncoderPlace = "own"
    """Pipeline ranks of the encoder: the first one alone, as in training (own); the first one beside LLM layers
    (shared); or all of them, each with whole micro-batches (spread: schedules phased and nested)."""
    num_chunks: int = 1
    """Pieces of the LLM on each pipeline rank; above 1 for schedule interleaved1f1b."""
    show_sample: int | None = None
    """Print this sample (its number in the index, from 0) with its labels instead of the statistics."""
    plan_steps: int | None = None
    """Steps to plan for the statistics. None: all steps of the run, at most one epoch."""

    def __post_init__(self) -> None:
        StepOptions.__post_init__(self)
        at_least(self, 1, "dp_size", "plan_steps", "num_chunks")
        at_least(self, 0, "show_sample")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExportConfig:
    """Write the model of a run as one folder: config.json and safetensors."""

    __pydantic_config__: ClassVar[dict[str, str]] = STRICT_KEYS

    run: Path
    """Run folder whose newest complete checkpoint is exported."""
    destination: Path
    """Folder to write; must not exist or be empty."""


Config = FitConfig | CheckConfig | PlanConfig | ExportConfig | ProfileConfig


def _check_memory(limit_gib: float | None) -> None:
    if limit_gib is not None and not 1 <= limit_gib * GIB <= MAX_INTEGER:
        raise ConfigError(
            f"capacity_memory_gib={limit_gib:g}: a number of GiB above 0 is needed, at most {MAX_INTEGER // GIB}."
        )
