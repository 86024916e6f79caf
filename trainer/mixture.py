"""Mixtures in training: from the options and a checkpoint to the selector of a run, and what a run says of its parts.

    new run       mixture.yaml --> MixtureSelector
    resume at s   weights of the checkpoint, as they held before s, and those of mixture.yaml from s on
                  --> MixtureSelector (the same data: its digest with the old weights alone is that of the checkpoint)

A checkpoint keeps the weights with their past and that digest: a few hundred bytes, whatever the step.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from balancer.ledger import ids_digest
from balancer.ledger_lines import PartLine
from balancer.mixture import MixturePart, MixtureSelector, mixture_parts
from balancer.mixture_report import MixtureReport, mixture_report
from balancer.mixture_weights import MixtureWeights, weights_of
from balancer.plan_sequence import PlanSequence
from balancer.shuffle import DEFAULT_BLOCK_SHARDS, Shuffle
from dataloaders.adjusted_index import AdjustedIndex
from dataloaders.index_concat import IndexConcat
from dataloaders.mixture_source import MixtureSource
from trainer.config import PlacementOptions, StepOptions
from trainer.data import DataSide, read_groups
from trainer.errors import ConfigError

PROGRESS_KEY = "mixture"


def mixture_selector(
    side: DataSide,
    train_ids: np.ndarray,
    options: PlacementOptions,
    *,
    progress: Mapping[str, Any] | None = None,
    at_step: int = 0,
) -> MixtureSelector | None:
    """What selects the samples of every step of a mixture; None where there is none.

    Args:
        progress: of the checkpoint that a resume continues; None: a new run.
        at_step: finished steps; from here on the weights of the file hold.

    Raises:
        ConfigError: the checkpoint is of other data, or of no mixture.
        PlanError: weights that cannot be drawn by, or that would change what was drawn.
    """
    if side.mixture is None:
        return None
    shuffle, block_shards = _shuffle(options)
    make = partial(
        MixtureSelector,
        _parts(side, train_ids, shuffle, read_groups(side, options)),
        seed=options.seed,
        global_batch_size=options.global_batch_size,
        shuffle=shuffle,
        block_shards=block_shards,
    )
    new = weights_of(side.mixture)
    if progress is None:
        return make(new)
    saved = progress.get(PROGRESS_KEY)
    if not isinstance(saved, Mapping):
        raise ConfigError("the checkpoint is of a run without a mixture. Start a new run with another --output.")
    weights = MixtureWeights.from_state(saved["weights"])
    selector = make(weights)
    if selector.digest != saved["digest"]:
        raise ConfigError(
            "the samples of the mixture are not those of the checkpoint, so a step number would stand for other ones. "
            "Restore the data, or start a new run with another --output."
        )
    changed = weights.changed(at_step, new)
    return selector if changed is weights else make(changed)


def to_progress(plans: PlanSequence) -> dict[str, Any]:
    """What a checkpoint keeps of a mixture; nothing where there is none."""
    selector = plans.selector
    if not isinstance(selector, MixtureSelector):
        return {}
    return {PROGRESS_KEY: {"weights": selector.weights.to_state(), "digest": selector.digest}}


def part_lines(side: DataSide, train_ids: np.ndarray) -> tuple[PartLine, ...]:
    """The parts of a mixture for the ledger; none where there is no mixture."""
    source, index, mixture = side.source, side.index, side.mixture
    index = index.base if isinstance(index, AdjustedIndex) else index  # the ledger names the parts as they were scanned
    if mixture is None or not isinstance(source, MixtureSource) or not isinstance(index, IndexConcat):
        return ()
    data = {part.name: " ".join(part.data) for part in mixture.parts}
    return tuple(
        PartLine(
            name=part.name,
            index=index.parts[part.name].fingerprint,
            source=source.parts[part.name].fingerprint,
            index_folder=str(index.parts[part.name].folder or ""),
            data=data[part.name],
            num_samples=len(source.parts[part.name]),
            num_ids=len(part.ids),
            ids_digest=ids_digest(part.ids),
            llm_tokens=part.llm_tokens,
            visual_tokens=part.visual_tokens,
        )
        for part in _parts(side, train_ids, "none")
    )


def report_of(plans: PlanSequence, num_steps: int) -> MixtureReport | None:
    """What the first `num_steps` steps of a mixture hold of each part, run or not; None where there is none."""
    if not isinstance(plans.selector, MixtureSelector):
        return None
    return mixture_report(plans.selector, plans.index, 0, num_steps)


def last_step(plans: PlanSequence, num_steps: int) -> int:
    """`num_steps`, or fewer where a mixture ends before them by its `max_epochs`."""
    end = plans.selector.num_steps if isinstance(plans.selector, MixtureSelector) else None
    return num_steps if end is None else min(num_steps, end)


def _parts(
    side: DataSide, train_ids: np.ndarray, shuffle: Shuffle, groups: np.ndarray | None = None
) -> tuple[MixturePart, ...]:
    source = side.source
    if not isinstance(source, MixtureSource):
        raise TypeError(f"a mixture needs a MixtureSource, not a {type(source).__name__}")
    return mixture_parts(side.index, train_ids, source.ranges, shuffle=shuffle, groups=groups)


def _shuffle(options: PlacementOptions) -> tuple[Shuffle, int]:
    if isinstance(options, StepOptions):
        return options.shuffle, options.shuffle_block_shards
    return "full", DEFAULT_BLOCK_SHARDS
