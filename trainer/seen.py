"""Has the model seen its media? Loss on the fact words with the right media against media shuffled between samples.

Facts can only be read off the media. A model that ignores them has the same loss on both; one that looks is worse off
with somebody else's pictures. The shuffle moves media only between samples with the same kinds of media, every sample
gets another's, and both losses are taken over the same samples.
"""

from dataclasses import dataclass, replace

import numpy as np

from balancer.plan import Capacities
from balancer.select import eligible_ids
from dataloaders.scan import scan_source
from dataloaders.shuffled import ShuffledMediaSource, SubsetSource
from dataloaders.source import SampleSource
from trainer.config import FitConfig
from trainer.data import DataSide
from trainer.evaluate import Evaluation, evaluate
from trainer.loop import Trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class Seen:
    """Losses on fact tokens.

    Attributes:
        right, shuffled: mean -log p per fact token with the right and with shuffled media.
        fact_tokens: how many there are.
        num_samples: held-out samples in the comparison.
    """

    right: float
    shuffled: float
    fact_tokens: int
    num_samples: int

    @property
    def gain(self) -> float:
        """How far below the shuffled loss the right one is, as a share of the shuffled one."""
        return 1.0 - self.right / self.shuffled if self.shuffled else float("nan")


def measure_seen(trainer: Trainer, side: DataSide, held_out: np.ndarray) -> Seen | None:
    """Evaluate both; None when no held-out sample has facts and a partner to swap media with."""
    config = trainer.config
    with_facts = [int(i) for i in held_out if side.source.record(int(i)).extra.get("facts")]
    shuffled = ShuffledMediaSource(SubsetSource(side.source, with_facts), seed=config.seed)
    right = SubsetSource(side.source, [with_facts[i] for i in shuffled.ids])
    if not len(right):
        return None
    sides = [_scan(right, side, config), _scan(shuffled, side, config)]
    # A swapped medium may be too large for a pack: such a sample is left out of both.
    common = np.intersect1d(sides[0].ids, sides[1].ids)
    if not len(common):
        return None
    first, second = (_evaluate(trainer, replace(one, ids=common)) for one in sides)
    return Seen(
        right=first.fact_loss,
        shuffled=second.fact_loss,
        fact_tokens=first.fact_tokens,
        num_samples=len(common),
    )


def _scan(source: SampleSource, side: DataSide, config: FitConfig) -> DataSide:
    index = scan_source(source, side.estimator, train_on=config.train_on, apply_orientation=config.apply_orientation)
    capacities = Capacities(tokens=config.capacity_tokens, patches=config.patch_limit)
    return replace(side, source=source, index=index, ids=eligible_ids(index, capacities, "drop").ids)


def _evaluate(trainer: Trainer, side: DataSide) -> Evaluation:
    reader, plans = trainer.planned(side, side.ids, shuffle=False)
    return evaluate(trainer.runner, reader, plans)
