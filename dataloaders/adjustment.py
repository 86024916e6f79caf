"""How one sample differs from what its record and media say, so that it fits: planning and loading share this value.

    Adjustment(keep_tokens=4096)                                   text behind the last medium is cut
    Adjustment(limits=MediaLimits(image_pixels=200_704))           media get fewer pixels or frames

`shrunk_estimator` is the estimator with limits put on: the same rule, so that counts are exactly what decoding gives.
"""

from dataclasses import dataclass, replace
from typing import TypeVar, cast

from dataloaders.chat import IGNORED_LABEL, EncodedSample
from dataloaders.errors import DataError
from dataloaders.estimators.base import MediaLimits, ShrinkableEstimator, TokenEstimator

Estimator = TypeVar("Estimator", bound=TokenEstimator)


@dataclass(frozen=True, slots=True, kw_only=True)
class Adjustment:
    """What is done to one sample.

    Attributes:
        keep_tokens: positions that are kept, from the first on; None: all.
        limits: of its media; None: those of the estimator.
    """

    keep_tokens: int | None = None
    limits: MediaLimits | None = None


def shrinkable(estimator: TokenEstimator) -> ShrinkableEstimator:
    """`estimator` as one that can give less.

    Raises:
        DataError: no such limits are known for its processor.
    """
    if isinstance(estimator, ShrinkableEstimator):
        return estimator
    raise DataError(
        f"media cannot be shrunk under this token rule ({estimator.rule})",
        place=type(estimator).__name__,
        remedy="Use a model of the Qwen2-VL or Qwen2.5-VL family, or the oversize policy 'drop' or 'truncate_text'.",
    )


def adjusted_estimator(estimator: Estimator, adjustment: Adjustment | None) -> Estimator:
    """The estimator that decides sizes and frames of a sample with this adjustment."""
    if adjustment is None or adjustment.limits is None:
        return estimator
    return cast(Estimator, shrinkable(estimator).shrunk(adjustment.limits))


def cut_sample(encoded: EncodedSample, keep_tokens: int | None) -> EncodedSample:
    """The first `keep_tokens` positions; the last one learns nothing, as the token it would predict is gone.

    Raises:
        DataError: a medium would be cut: its number of placeholders is what its embedding has.
    """
    if keep_tokens is None or keep_tokens >= len(encoded.tokens):
        return encoded
    end = media_end(encoded)
    if keep_tokens < max(end, 1):
        raise DataError(
            f"a cut to {keep_tokens} tokens would go through a medium that ends at {end}",
            place="cut_sample",
            remedy="Leave the sample out, or shrink its media.",
        )
    labels = encoded.labels[:keep_tokens].copy()
    labels[-1] = IGNORED_LABEL
    texts = tuple(
        replace(span, count=min(span.count, keep_tokens - span.start))
        for span in encoded.texts
        if span.start < keep_tokens
    )
    return EncodedSample(tokens=encoded.tokens[:keep_tokens], labels=labels, spans=encoded.spans, texts=texts)


def media_end(encoded: EncodedSample) -> int:
    """Position behind the last placeholder; 0 without media."""
    return max((span.start + span.count for span in encoded.spans), default=0)
