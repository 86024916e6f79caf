"""What a mixture has drawn: per part samples, tokens, shares and epochs, beside what its weights asked for.

    balancer-train ...  ->  part       asked (llm_tokens)   llm_tokens   samples   visual_tokens   epochs
                            captions              50.00 %      50.01 %    90.9 %          62.1 %     3.20
                            pages                 50.00 %      49.99 %     9.1 %          37.9 %     0.41

Counts are exact, not estimated: whole epochs of a part hold all its tokens, and the samples of the begun ones are added
up. Price: at most two epochs of each part are looked at, whatever the number of steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from balancer.counts import IndexLike
from balancer.mixture import MixturePart, MixtureSelector

MAX_EPOCHS = 4.0
"""Repetitions of text data that cost nothing measurable (Muennighoff et al., Scaling data-constrained language models,
2023); parts that are read more often are named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartShare:
    """What was drawn of one part in some steps.

    Attributes:
        asked: share that the weights ask for, in their unit: the mean over the steps.
        samples, llm_tokens, visual_tokens: drawn, repetitions included.
        sample_share, llm_token_share, visual_token_share: of all parts; 0 where all have none.
        epochs: how often the part was read from step 0 to the end of these steps.
        size: samples that can be drawn.
    """

    name: str
    asked: float
    samples: int
    llm_tokens: int
    visual_tokens: int
    sample_share: float
    llm_token_share: float
    visual_token_share: float
    epochs: float
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureReport:
    """Shares of all parts over the steps [start, stop).

    Attributes:
        unit: what the weights of the last of these steps are shares of.
        keeps_order: parts that are too small beside the batch for another order in each epoch.
    """

    start: int
    stop: int
    unit: str
    parts: tuple[PartShare, ...]
    keeps_order: tuple[str, ...]

    def achieved(self, name: str) -> float:
        """Share of a part in the unit of the weights."""
        part = next(part for part in self.parts if part.name == name)
        return {
            "samples": part.sample_share,
            "llm_tokens": part.llm_token_share,
            "visual_tokens": part.visual_token_share,
        }[self.unit]

    def lines(self) -> list[str]:
        """One sentence per part, for a summary."""
        return [
            f"{part.name}: {self.achieved(part.name):.2%} of {self.unit.replace('_', ' ')} (asked {part.asked:.2%}), "
            f"{part.samples} samples ({part.sample_share:.2%}), {part.llm_tokens} LLM tokens "
            f"({part.llm_token_share:.2%}), {part.visual_tokens} visual tokens ({part.visual_token_share:.2%}), "
            f"read {part.epochs:.2f} times"
            for part in self.parts
        ]

    def notes(self, max_epochs: float = MAX_EPOCHS) -> list[str]:
        """What somebody should know: parts that repeat often, are never read, or keep their order."""
        often = [
            f"part {part.name!r} ({part.size} samples) is read {part.epochs:.1f} times in {self.stop} steps, more than "
            f"{max_epochs:g}: it may be learned by heart. Lower its weight, or limit it with max_epochs"
            for part in self.parts
            if part.epochs > max_epochs
        ]
        never = [
            f"part {part.name!r} ({part.size} samples) is not read in the first {self.stop} steps"
            for part in self.parts
            if part.size and not part.epochs
        ]
        fixed = [
            f"part {name!r} is so small beside the batch that it keeps one order in all its epochs"
            for name in self.keeps_order
        ]
        return [*often, *never, *fixed]


def mixture_report(selector: MixtureSelector, index: IndexLike, start: int, stop: int) -> MixtureReport:
    """What the steps [start, stop) hold of each part; the steps need not have run.

    Args:
        index: costs of all samples.
    """
    before, after = selector.draws_before(start), selector.draws_before(stop)
    samples = {name: after[name] - before[name] for name in after}
    tokens = {part.name: _tokens(selector, index, part, before[part.name], after[part.name]) for part in selector.parts}
    totals = [sum(pair[column] for pair in tokens.values()) for column in range(2)]
    asked = selector.asked(start, stop)
    return MixtureReport(
        start=start,
        stop=stop,
        unit=selector.unit_at(max(stop - 1, 0)),
        parts=tuple(
            PartShare(
                name=part.name,
                asked=asked[part.name],
                samples=samples[part.name],
                llm_tokens=tokens[part.name][0],
                visual_tokens=tokens[part.name][1],
                sample_share=_share(samples[part.name], sum(samples.values())),
                llm_token_share=_share(tokens[part.name][0], totals[0]),
                visual_token_share=_share(tokens[part.name][1], totals[1]),
                epochs=after[part.name] / max(len(part.ids), 1),
                size=len(part.ids),
            )
            for part in selector.parts
        ),
        keeps_order=selector.keeps_order,
    )


def _tokens(selector: MixtureSelector, index: IndexLike, part: MixturePart, first: int, stop: int) -> tuple[int, int]:
    """(LLM tokens, visual tokens) of the draws [first, stop) of a part."""
    n = max(len(part.ids), 1)
    # [first, stop) = up to the next whole epoch, whole epochs, and what is left; or less than one epoch in all.
    head_stop, tail_start = -(-first // n) * n, stop // n * n
    if head_stop > tail_start:
        pieces, whole = [(first, stop)], 0
    else:
        pieces, whole = [(first, head_stop), (tail_start, stop)], (tail_start - head_stop) // n
    sums = [whole * part.llm_tokens, whole * part.visual_tokens]
    for low, high in pieces:
        if high > low:
            ids = selector.draws(part.name, low, high - low)
            sums[0] += _sum(index, "llm_tokens", ids)
            sums[1] += _sum(index, "visual_tokens", ids)
    return sums[0], sums[1]


def _sum(index: IndexLike, column: str, ids: Sequence[int] | np.ndarray) -> int:
    return int(np.asarray(index.samples[column][ids], dtype=np.int64).sum())


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
