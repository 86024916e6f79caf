"""Loss weights of a step, known from the plan before any forward: loss = sum(w * ce) / sum(w).

    token_mean   every label token weighs 1                 (long samples count more)
    sample_mean  every sample weighs 1, its tokens 1/n      (each sample counts the same)
    sqrt         every sample weighs sqrt(n), tokens 1/sqrt(n)   (in between)

n is the number of label tokens of the sample. All three are independent of packing and layout.
"""

import math
from collections.abc import Iterable

LOSS_REDUCTIONS = ("token_mean", "sample_mean", "sqrt")


def sample_weight(num_label_tokens: int, loss_reduction: str) -> float:
    """Total weight of one sample with `num_label_tokens` labels; 0 without labels."""
    if num_label_tokens == 0:
        return 0.0
    if loss_reduction == "token_mean":
        return float(num_label_tokens)
    if loss_reduction == "sample_mean":
        return 1.0
    return math.sqrt(num_label_tokens)


def planned_weight_sum(label_tokens: Iterable[int], loss_reduction: str) -> float:
    """Weight of a whole step: the denominator of its loss, the same on every rank (exactly rounded sum)."""
    return math.fsum(sample_weight(count, loss_reduction) for count in label_tokens)
