"""The plain reference that `check` compares against: one unpacked sample per forward, a simple loop, nothing else.

    loss = sum over samples of sum(w * ce) / (sum of w over all samples)

No plan, no packing, no schedule, no process group. What the balanced run must equal up to summation order.
"""

from collections.abc import Mapping, Sequence

import torch

from balancer.plan_loader import SampleReader
from trainer.comm import Comm
from trainer.executor import LOSS
from trainer.pieces import ModelPieces


def reference_step(
    pieces: ModelPieces, reader: SampleReader, sample_ids: Sequence[int], comm: Comm
) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of the mean loss over `sample_ids`.

    Args:
        pieces: all stages of the model, on one device.
        reader: reads one sample at a time.

    Returns:
        The loss and the gradient of every parameter by canonical name.
    """
    pieces.zero_grad()
    loss_sum, weight_sum = torch.zeros((), dtype=torch.float64), 0.0
    for sample_id in sample_ids:
        batch = reader.read([int(sample_id)]).to(comm.device, pieces.dtype)
        values: Mapping[str, torch.Tensor] = {}
        for stage, piece in sorted(pieces.by_stage().items()):
            if stage == 0 and not batch.visual_index.numel():
                continue
            values = piece(batch, values)
        values[LOSS].backward()
        loss_sum += values[LOSS].detach().double().cpu()
        weight_sum += batch.weight_sum
    gradients = {}
    for name, parameter in pieces.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        gradients[name] = gradient / weight_sum
    pieces.zero_grad()
    return float(loss_sum / weight_sum), gradients
