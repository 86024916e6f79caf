"""AdamW over canonically named parameters: which of them decay, their norm, and their state by name.

    decay       weights with two or more axes: projections and embeddings
    no decay    norms and biases (one axis)

Parameters are ordered by name, not by where a layout puts them, so that sums over them have one order. A parameter
that never received a gradient has no state: AdamW makes it on the first gradient, as it would have without a resume.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Protocol

import torch

from trainer.errors import CheckpointError

# State of one parameter after its first step: count of steps, and running means of gradient and squared gradient.
STATE_KEYS = ("step", "exp_avg", "exp_avg_sq")


class OptimizerOptions(Protocol):
    """The part of `FitConfig` that the optimizer reads."""

    @property
    def lr(self) -> float:
        """Peak learning rate."""
        ...

    @property
    def betas(self) -> tuple[float, float]:
        """Averaging factors."""
        ...

    @property
    def eps(self) -> float:
        """Denominator offset."""
        ...

    @property
    def weight_decay(self) -> float:
        """Decoupled weight decay."""
        ...


def decays(name: str, parameter: torch.Tensor) -> bool:
    """Whether weight decay applies: not to norms and biases, whose scale carries meaning."""
    return parameter.ndim >= 2 and not name.endswith(".bias")


def build_optimizer(parameters: Mapping[str, torch.nn.Parameter], config: OptimizerOptions) -> torch.optim.AdamW:
    """AdamW over the trainable parameters of this rank; groups without any are left out.

    Args:
        parameters: canonical name -> parameter.
    """
    trainable = [(name, parameters[name]) for name in sorted(parameters) if parameters[name].requires_grad]
    groups = [
        {
            "params": [(name, parameter) for name, parameter in trainable if decays(name, parameter) is decay],
            "weight_decay": config.weight_decay if decay else 0.0,
        }
        for decay in (True, False)
    ]
    # Learning rate and decay of a group come from the config at every start; only averages live in a checkpoint.
    return torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=config.lr, betas=config.betas, eps=config.eps
    )


def named_parameters(optimizer: torch.optim.Optimizer) -> dict[str, torch.nn.Parameter]:
    """Canonical name -> parameter, ordered by name."""
    pairs = (
        pair for group in optimizer.param_groups for pair in zip(group["param_names"], group["params"], strict=True)
    )
    return dict(sorted(pairs))


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """State as `NAME.step`, `NAME.exp_avg`, `NAME.exp_avg_sq`; nothing for parameters that were never stepped."""
    tensors: dict[str, torch.Tensor] = {}
    for name, parameter in named_parameters(optimizer).items():
        state = optimizer.state.get(parameter, {})
        tensors.update({f"{name}.{key}": state[key] for key in STATE_KEYS if key in state})
    return tensors


def empty_optimizer_tensors(optimizer: torch.optim.Optimizer, available: Iterable[str]) -> dict[str, torch.Tensor]:
    """Tensors to load into, for the parameters whose state is `available` (names like those of `optimizer_tensors`).

    Raises:
        CheckpointError: only a part of a parameter's state is available.
    """
    stored, tensors = set(available), {}
    for name, parameter in named_parameters(optimizer).items():
        found = [key for key in STATE_KEYS if f"{name}.{key}" in stored]
        if not found:
            continue
        if len(found) < len(STATE_KEYS):
            raise CheckpointError(f"optimizer state of {name} is incomplete: it holds {found}, not {list(STATE_KEYS)}")
        for key in STATE_KEYS:
            like = torch.zeros((), dtype=torch.float32) if key == "step" else torch.zeros_like(parameter).detach()
            tensors[f"{name}.{key}"] = like
    return tensors


def set_optimizer_tensors(optimizer: torch.optim.Optimizer, tensors: Mapping[str, torch.Tensor]) -> tuple[str, ...]:
    """Install loaded state; parameters without any start as if never stepped.

    Returns:
        Names of the parameters without state.
    """
    optimizer.state.clear()
    missing = []
    for name, parameter in named_parameters(optimizer).items():
        if f"{name}.step" in tensors:
            optimizer.state[parameter] = {key: tensors[f"{name}.{key}"] for key in STATE_KEYS}
        else:
            missing.append(name)
    return tuple(missing)


def squared_norm(parameters: Mapping[str, torch.nn.Parameter]) -> torch.Tensor:
    """Sum of squares of all gradients, float64 scalar on the parameters' device, summed in the order of names.

    Every stage adds its own; the square root of the sum over stages is the global norm.
    """
    total: torch.Tensor | None = None
    for name in sorted(parameters):
        gradient = parameters[name].grad
        if gradient is not None:
            square = gradient.detach().double().square().sum()
            total = square if total is None else total + square
    return torch.zeros((), dtype=torch.float64) if total is None else total


def clip_factor(norm: float, limit: float | None) -> float:
    """What to multiply gradients with so that their global norm is at most `limit`; 1.0 where nothing is to do.

    A norm that is not finite gives NaN: the caller decides, nothing is hidden by a scale of zero.
    """
    if not math.isfinite(norm):
        return math.nan
    if limit is None or norm <= limit:
        return 1.0
    return limit / norm
