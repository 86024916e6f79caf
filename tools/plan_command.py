"""Options of `balancer-analyze plan`: what each policy would do on the user's data, before a machine is rented.

    balancer-analyze plan index --model qwen2.5-vl-7b --dp 8 --pp 4
    balancer-analyze plan index --model FOLDER --dp 8 --pp 4 --encoder spread --capacity-tokens 16384 --meet microbatch
    balancer-analyze plan index --cost-model cost.json --dp 8 --pp 4 --json --output plan.json

Names are those of balancer-train where both have an option. This module holds the options alone, and imports no
planner: `--help` and the other commands of the program answer before a kernel is loaded.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from dataloaders.estimators import Preprocessing
from tools.errors import UsageError
from tools.model_folder import TextRule, TrainOn

Switch = tyro.conf.FlagCreatePairsOff[bool]
EncoderName = Literal["own", "shared", "spread", "none"]
MeetName = Literal["step", "microbatch", "unit"]
OversizeName = Literal["error", "drop", "shrink", "truncate_text"]
TailName = Literal["pad", "drop", "repeat"]
ShuffleName = Literal["full", "block", "none"]

SAMPLES_PER_REPLICA = 16
PATCHES_PER_TOKEN = 4  # of a 2 x 2 merge, as balancer-train assumes
_MAX_INTEGER = 2**53
_MAX_SEED = 2**64 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCommand:
    """Plan steps of a data set under every policy: predicted times, bounds, bubbles, and where balancing does not help.

    Nothing is trained or decoded, and torch is not needed.
    """

    sources: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="INDEX_OR_DATA")]
    """Folder of an index; or data as for 'index' (tar shards, .jsonl, .json, .parquet, a saved data set), which are
    scanned first."""
    model: str | None = None
    """Model whose costs are planned with: a preset (such as qwen2.5-vl-7b), a Hugging Face folder or its config.json,
    or a folder of balancer-train export."""
    cost_model: Path | None = None
    """Measured cost model (of balancer-train profile) in place of --model."""
    hardware: str = "nominal"
    """Accelerator whose rates give absolute times and whose memory must hold the model, such as h100; nominal: times
    are ratios."""
    frozen: tuple[str, ...] = ()
    """Modules without weight gradients: encoder (with its patch_embed), projector, llm (with its embedding and head),
    generator; or patch_embed, embedding, head alone."""
    recompute: tuple[str, ...] = ()
    """Modules whose forward runs again in the backward: encoder, projector, llm, head, generator; all for every one."""
    lora_rank: int = 0
    """Rank of adapters on the LLM, whose own weights are then frozen; 0: none."""
    layers_per_stage: tuple[int, ...] = ()
    """LLM layers of each stage in order. None: as even as possible."""
    dp_size: Annotated[int, tyro.conf.arg(aliases=["--dp"])] = 1
    """Data-parallel replicas."""
    pp_size: Annotated[int, tyro.conf.arg(aliases=["--pp"])] = 1
    """Pipeline ranks of one replica."""
    encoder: EncoderName | None = None
    """Where the encoder runs: alone on rank 0 (own), on rank 0 beside the first LLM stage (shared), on every rank
    (spread), or nowhere (none). None: own, or none where the model has no encoder."""
    num_chunks: Annotated[int, tyro.conf.arg(aliases=["--chunks"])] = 1
    """LLM stages of each pipeline rank (interleaved schedules)."""
    schedule: str | None = None
    """1f1b, gpipe, zb-h1, interleaved1f1b, phased or nested. None: nested for a spread encoder, interleaved1f1b for
    several chunks, otherwise 1f1b."""
    meet: MeetName = "step"
    """Where replicas wait for one another: at the end of a step, in every micro-batch (ZeRO-3, tensor or expert
    parallelism over replicas), or in every encoder unit."""
    global_batch_size: int | None = None
    """Samples of one optimizer step over all ranks. None: 16 per replica."""
    step_tokens: int | None = None
    """LLM tokens of one optimizer step, in place of global_batch_size."""
    tail: TailName = "pad"
    """Last step of an epoch where the samples do not fill it, as in balancer-train."""
    lookahead_steps: Annotated[int, tyro.conf.arg(aliases=["--lookahead"])] = 1
    """Neighbouring steps that exchange samples so that each costs the same; 1: none."""
    shuffle: ShuffleName = "full"
    """Order of an epoch, as in balancer-train."""
    num_microbatches: int | None = None
    """Micro-batches per replica and step. None: the fewest that fit the capacities."""
    min_num_microbatches: int = 1
    """With num_microbatches None: never fewer than this."""
    num_microbatches_multiple: int = 1
    """Granularity of the number of micro-batches."""
    capacity_tokens: int = 4096
    """Largest number of LLM tokens in one micro-batch; a hard limit, as the following ones."""
    capacity_patches: int | None = None
    """Largest number of vision patches in one micro-batch. None: four per LLM token of capacity_tokens."""
    capacity_items: int | None = None
    """Largest number of media in one micro-batch."""
    memory_gib: float | None = None
    """Largest modelled activations, in GiB, that one micro-batch may leave on any one stage."""
    oversize: OversizeName = "drop"
    """Samples larger than one micro-batch: leave them out and count them; stop and list them; shrink their media; or
    cut their text (of data alone, an index holds no text). What cannot be made to fit is left out and counted."""
    plan_steps: Annotated[int, tyro.conf.arg(aliases=["--steps"])] = 32
    """Steps to plan, evenly over the first epoch; with look-ahead whole blocks of them."""
    what_if_steps: int = 4
    """Steps for the comparison with other places of the encoder and other schedules; 0 leaves it out."""
    policies: tuple[str, ...] = ()
    """Policies to compare. None: all."""
    seed: int = 0
    """Seed of the sample order."""
    processor: Path | None = None
    """Model folder whose processor files count data. None: that of --model where it is a folder, otherwise the
    published Qwen2.5-VL settings, for presets of that family. An index has its own."""
    text: TextRule = "auto"
    """How the text of data is counted: tokenizer and template of the folder, bytes, or roughly."""
    train_on: TrainOn = "assistant"
    """Turns of data whose tokens carry labels."""
    preprocessing: Preprocessing | None = None
    """Library that resizes media of data first. None: what users of the model family do by default."""
    media_root: str | None = None
    """Folder or URL that paths of media in data start from."""
    cache_dir: Path | None = None
    """Folder that keeps ranges of remote files and the tables of members of tars."""
    output: Path | None = None
    """File for the report; None: print it."""
    json: Switch = False
    """One JSON object in place of the tables."""

    def __post_init__(self) -> None:
        if not self.sources:
            raise UsageError("name the folder of an index, or data: balancer-analyze plan INDEX --model MODEL ...")
        if (self.model is None) == (self.cost_model is None):
            raise UsageError(
                "give --model MODEL (a preset, a folder or its config.json) or --cost-model FILE, and not both: they "
                "say what a sample costs. balancer-analyze plan --help lists all options."
            )
        self._at_least(1, "dp_size", "pp_size", "num_chunks", "global_batch_size", "step_tokens", "lookahead_steps")
        self._at_least(1, "num_microbatches", "min_num_microbatches", "num_microbatches_multiple", "plan_steps")
        self._at_least(1, "capacity_tokens", "capacity_patches", "capacity_items")
        self._at_least(0, "what_if_steps", "lora_rank")
        self._at_least(0, "seed", high=_MAX_SEED)
        if self.memory_gib is not None and not (0 < self.memory_gib * 2**30 < _MAX_INTEGER):
            raise UsageError(f"--memory-gib {self.memory_gib:g}: a number of GiB above 0.")
        if self.step_tokens is not None and (self.global_batch_size is not None or self.tail != "pad"):
            raise UsageError("--step-tokens cuts an epoch into equal steps: leave --global-batch-size and --tail out.")
        self._check_measured()

    def _check_measured(self) -> None:
        """A measured cost model is what it is."""
        if self.cost_model is None:
            return
        given = {
            "--hardware": self.hardware != "nominal",
            "--frozen": bool(self.frozen),
            "--recompute": bool(self.recompute),
            "--lora-rank": self.lora_rank != 0,
            "--layers-per-stage": bool(self.layers_per_stage),
        }
        wrong = [name for name, is_given in given.items() if is_given]
        if wrong:
            raise UsageError(f"{', '.join(wrong)}: not with --cost-model, whose times are of one model as it ran.")

    def _at_least(self, low: int, *names: str, high: int = _MAX_INTEGER) -> None:
        for name in names:
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                option = name.replace("_", "-")
                raise UsageError(f"--{option} {value}: a whole number from {low} to {high} is needed.")

    @property
    def step_samples(self) -> int:
        """Samples of a step, where steps are cut by their number."""
        return self.global_batch_size or SAMPLES_PER_REPLICA * self.dp_size

    @property
    def patch_limit(self) -> int:
        """Patches per micro-batch: as given, or what a micro-batch full of 2x2-merged visual tokens holds."""
        return self.capacity_patches or PATCHES_PER_TOKEN * self.capacity_tokens

    @property
    def activation_bytes(self) -> int | None:
        """`memory_gib` in bytes."""
        return None if self.memory_gib is None or not math.isfinite(self.memory_gib) else int(self.memory_gib * 2**30)
