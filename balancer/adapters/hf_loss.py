"""The token loss of models that do not take `num_items_in_batch`, as most vision-language models of transformers.

    batch without labels --model--> logits [1, T, V]
    logits, labels       --the model's own loss_function--> sum of token losses / num_items_in_batch

Left to itself such a model gives the mean over the label tokens of its own micro-batch, and the Trainer the mean of
those means: tokens of micro-batches with few labels would weigh more, and one without any would make the loss NaN.

Price: logits of all tokens are made, also by a forward that could fuse the loss into its last layer.
"""

from collections.abc import Mapping
from typing import Any

import torch


class TokenLoss:
    """A `compute_loss_func` for one model.

    Args:
        model: of transformers, whose `loss_function` shifts labels.
    """

    def __init__(self, model: Any) -> None:
        self._loss_function = model.loss_function
        self._vocab_size = int(model.config.get_text_config().vocab_size)

    def __call__(
        self,
        outputs: Mapping[str, Any],
        labels: torch.Tensor,
        num_items_in_batch: torch.Tensor | int | None = None,
    ) -> torch.Tensor:
        """Sum over the label tokens / `num_items_in_batch`; None, as in an evaluation: their mean.

        Args:
            outputs: with `logits` [B, T, V]. labels: [B, T], not shifted.
        """
        loss: torch.Tensor = self._loss_function(
            logits=outputs["logits"],
            labels=labels,
            vocab_size=self._vocab_size,
            num_items_in_batch=num_items_in_batch,
        )
        return loss
