"""The lines of a run's ledger: what the run is, each of its starts, each step as executed. See `balancer.ledger`."""

from collections.abc import Set
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeVar

LEDGER_FORMAT_VERSION = 2
READABLE_VERSIONS = (1, LEDGER_FORMAT_VERSION)  # a run line of version 1 lacks fields whose defaults say what held then
STEP_SELECTOR, MIXTURE_SELECTOR = "step", "mixture"
_OF_PARTS = ("index", "base_index", "source", "num_samples", "num_ids", "ids_digest")  # of a run line


@dataclass(frozen=True, slots=True, kw_only=True)
class PartLine:
    """A part of a mixture.

    Attributes:
        name: which keys the order of its samples.
        index, source: fingerprints. index_folder, data: where they lay; hints.
        num_samples: rows of its index; parts follow each other in the ids. num_ids: those that are trained on.
        ids_digest: of the latter.
        llm_tokens, visual_tokens: their sums, for weights in tokens.
    """

    HINTS: ClassVar[frozenset[str]] = frozenset({"index_folder", "data"})

    name: str
    index: str
    source: str
    index_folder: str
    data: str
    num_samples: int
    num_ids: int
    ids_digest: str
    llm_tokens: int
    visual_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunLine:
    """What a run is: it holds for all of its starts.

    Attributes:
        index, source: fingerprints of the cost index and of the samples.
        base_index: of the index as scanned, where `index` is that with samples made to fit ("": nothing was adjusted);
            what was adjusted lies in the run folder, see `balancer.run_evidence`.
        index_folder: where the index as scanned lay ("" for one in memory); a hint, no part of the run.
        data: the data as the user named it.
        num_samples: rows of the index. num_ids: those that are trained on.
        ids_digest: `ids_digest` of the latter.
        seed, global_batch_size, shuffle, block_shards: of the selection.
        step_tokens: token budget of a step; 0: steps are of `global_batch_size` samples. tail: the end of an epoch.
        lookahead_steps: steps that exchange samples; 1: none do. lookahead_cost: fingerprint of the cost that they
            even, which lies in the run folder.
        group_runs: what block shuffle deals in, where these are not the shards of the index; see
            `balancer.ledger_groups`. groups_digest: of these, else "".
        eval_share, capacity_tokens, capacity_patches, capacity_bytes: how the ids follow from the index; bytes are
            those that the cost model in the run folder gives (0: no limit).
        selector: "step" for `StepSelector`, "mixture" for `MixtureSelector`; any other name cannot be computed again
            from this line.
        parts: of a mixture.
    """

    KIND: ClassVar[str] = "run"
    HINTS: ClassVar[frozenset[str]] = frozenset({"index_folder", "data"})

    index: str
    source: str
    index_folder: str
    data: str
    num_samples: int
    num_ids: int
    ids_digest: str
    seed: int
    global_batch_size: int
    shuffle: str
    block_shards: int
    groups_digest: str = ""
    group_runs: tuple[tuple[int, int], ...] = ()
    eval_share: float = 0.0
    capacity_tokens: int = 0
    capacity_patches: int = 0
    capacity_bytes: int = 0
    base_index: str = ""
    step_tokens: int = 0
    tail: str = "pad"
    lookahead_steps: int = 1
    lookahead_cost: str = ""
    selector: str = STEP_SELECTOR
    parts: tuple[PartLine, ...] = ()
    format_version: int = LEDGER_FORMAT_VERSION

    def differences(self, other: "RunLine") -> list[str]:
        """What makes `other` another run, one phrase each."""
        parts = _part_differences(self.parts, other.parts) if self.parts and other.parts else []
        # What follows from the parts would only repeat that they differ.
        left_out = {*self.HINTS, "parts", "group_runs", "format_version", *(_OF_PARTS if parts else ())}
        return [*parts, *_differences(self, other, left_out)]


@dataclass(frozen=True, slots=True, kw_only=True)
class StartLine:
    """A start of the run.

    Attributes:
        number: from 0, in the order of the starts.
        step: finished steps it continues from.
        world_size, dp_size: ranks of the job, and replicas among them.
        discarded: executed steps beyond `step` whose weights were lost with the process, cut off here.
        weights: of a mixture, as `MixtureWeights.to_state` gives them.
    """

    KIND: ClassVar[str] = "start"

    number: int
    step: int
    world_size: int
    dp_size: int
    discarded: int
    weights: tuple[dict[str, Any], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLine:
    """A step as executed.

    Attributes:
        step: finished steps, this one included.
        epoch, cursor: where its samples begin.
        start: number of the start that executed it.
        ids: per DP rank, the ids that it loaded, in the order they were run.
        replaced: ids trained as zero-loss stand-ins.
    """

    KIND: ClassVar[str] = "step"

    step: int
    epoch: int
    cursor: int
    start: int
    ids: tuple[tuple[int, ...], ...]
    replaced: tuple[int, ...] = ()


Line = RunLine | StartLine | StepLine


def _part_differences(before: tuple[PartLine, ...], now: tuple[PartLine, ...]) -> list[str]:
    was, became = [part.name for part in before], [part.name for part in now]
    if was != became:
        named = f"the parts were {', '.join(was)} and are now {', '.join(became)}"
        return [f"{named}: a resume keeps them (weight 0 leaves one out; a new one takes a new run)"]
    return [
        f"part {old.name!r} has changed: {'; '.join(found)} (data {old.data} then, {new.data} now)"
        for old, new in zip(before, now, strict=True)
        if (found := _differences(old, new, old.HINTS))
    ]


_Fields = TypeVar("_Fields", RunLine, PartLine)


def _differences(before: _Fields, now: _Fields, but: Set[str]) -> list[str]:
    names = [field.name for field in fields(before) if field.name not in but]
    return [
        f"{name} was {getattr(before, name)} and is now {getattr(now, name)}"
        for name in names
        if getattr(before, name) != getattr(now, name)
    ]
