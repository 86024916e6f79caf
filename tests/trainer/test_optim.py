"""AdamW by name: decay where it belongs, one order everywhere, and state that may be partial."""

import math

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from trainer.config import FitConfig  # noqa: E402
from trainer.errors import CheckpointError  # noqa: E402
from trainer.optim import (  # noqa: E402
    build_optimizer,
    clip_factor,
    decays,
    empty_optimizer_tensors,
    named_parameters,
    optimizer_tensors,
    set_optimizer_tensors,
    squared_norm,
)


def parameters(seed: int = 0) -> "dict[str, torch.nn.Parameter]":
    generator = torch.Generator().manual_seed(seed)
    shapes = {"llm.layers.0.q.weight": (4, 3), "llm.layers.0.q.bias": (4,), "llm.norm.weight": (3,), "a.weight": (2, 3)}
    return {name: torch.nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in shapes.items()}


def set_gradients(named: "dict[str, torch.nn.Parameter]", seed: int, only: str = "") -> None:
    generator = torch.Generator().manual_seed(seed)
    for name in sorted(named):
        gradient = torch.randn(named[name].shape, generator=generator)
        named[name].grad = gradient if name.startswith(only) else None


def test_norms_and_biases_do_not_decay() -> None:
    named = parameters()
    assert {name for name, parameter in named.items() if decays(name, parameter)} == {
        "llm.layers.0.q.weight",
        "a.weight",
    }
    optimizer = build_optimizer(named, FitConfig(weight_decay=0.3, lr=0.5, betas=(0.1, 0.2), eps=1e-5))
    decay, plain = optimizer.param_groups
    assert (decay["weight_decay"], plain["weight_decay"]) == (0.3, 0.0)
    assert decay["param_names"] == ["a.weight", "llm.layers.0.q.weight"]
    assert plain["param_names"] == ["llm.layers.0.q.bias", "llm.norm.weight"]
    for group in optimizer.param_groups:
        assert (group["lr"], group["betas"], group["eps"]) == (0.5, (0.1, 0.2), 1e-5)


def test_a_step_shrinks_only_what_decays() -> None:
    named = parameters()
    before = {name: parameter.detach().clone() for name, parameter in named.items()}
    for parameter in named.values():
        parameter.grad = torch.zeros_like(parameter)
    build_optimizer(named, FitConfig(lr=0.1, weight_decay=0.5)).step()
    for name, parameter in named.items():
        factor = 0.95 if decays(name, parameter) else 1.0
        torch.testing.assert_close(parameter.detach(), before[name] * factor)


def test_a_rank_with_one_kind_of_parameter_and_frozen_ones_works() -> None:
    named = {"norm.weight": torch.nn.Parameter(torch.ones(3)), "frozen.weight": torch.nn.Parameter(torch.ones(2, 2))}
    named["frozen.weight"].requires_grad_(False)
    optimizer = build_optimizer(named, FitConfig())
    assert list(named_parameters(optimizer)) == ["norm.weight"]


def test_the_order_does_not_depend_on_the_order_of_construction() -> None:
    named = parameters()
    backwards = dict(reversed(list(named.items())))
    first, second = build_optimizer(named, FitConfig()), build_optimizer(backwards, FitConfig())
    assert [g["param_names"] for g in first.param_groups] == [g["param_names"] for g in second.param_groups]
    set_gradients(named, 1)
    assert squared_norm(named).item() == squared_norm(backwards).item()


def test_state_is_named_and_comes_back_bit_for_bit() -> None:
    named, other = parameters(), parameters()
    optimizer, restored = build_optimizer(named, FitConfig()), build_optimizer(other, FitConfig())
    for seed in range(3):
        set_gradients(named, seed)
        optimizer.step()
    state = optimizer_tensors(optimizer)
    assert len(state) == 3 * len(named)
    assert state["a.weight.step"].item() == 3.0
    slots = empty_optimizer_tensors(restored, state)
    assert {key: (slot.shape, slot.dtype) for key, slot in slots.items()} == {
        key: (tensor.shape, tensor.dtype) for key, tensor in state.items()
    }
    for key, slot in slots.items():
        slot.copy_(state[key])
    assert set_optimizer_tensors(restored, slots) == ()
    with torch.no_grad():
        for name, parameter in other.items():
            parameter.copy_(named[name])
    for one, its_optimizer in ((named, optimizer), (other, restored)):
        set_gradients(one, 9)
        its_optimizer.step()
    assert all(torch.equal(named[name], other[name]) for name in named)


def test_parameters_that_were_never_stepped_have_no_state() -> None:
    named, other = parameters(), parameters()
    optimizer = build_optimizer(named, FitConfig())
    set_gradients(named, 0, only="llm.")
    optimizer.step()
    state = optimizer_tensors(optimizer)
    assert not any(key.startswith("a.weight") for key in state)
    restored = build_optimizer(other, FitConfig())
    assert set_optimizer_tensors(restored, state) == ("a.weight",)
    set_gradients(other, 1)
    restored.step()  # makes the missing state
    assert optimizer_tensors(restored)["a.weight.step"].item() == 1.0
    assert optimizer_tensors(restored)["llm.norm.weight.step"].item() == 2.0


def test_a_part_of_a_parameters_state_is_an_error() -> None:
    optimizer = build_optimizer(parameters(), FitConfig())
    with pytest.raises(CheckpointError, match=r"optimizer state of a.weight is incomplete: it holds \['exp_avg'\]"):
        empty_optimizer_tensors(optimizer, ["a.weight.exp_avg"])


def test_the_norm_over_stages_is_the_norm_over_all() -> None:
    named = parameters()
    set_gradients(named, 4)
    whole = torch.cat([p.grad.flatten().double() for p in named.values() if p.grad is not None]).norm()
    stages = [{n: p for n, p in named.items() if n.startswith("a.") is first} for first in (True, False)]
    norm = math.sqrt(sum(squared_norm(stage).item() for stage in stages))
    assert norm == pytest.approx(whole.item(), rel=1e-14)


def test_the_norm_does_not_overflow_and_ignores_what_has_no_gradient() -> None:
    named = {"a": torch.nn.Parameter(torch.zeros(3)), "b": torch.nn.Parameter(torch.zeros(3))}
    named["a"].grad = torch.full((3,), 1e30)
    assert squared_norm(named).dtype == torch.float64
    assert squared_norm(named).item() == pytest.approx(3e60)
    assert squared_norm({}).item() == 0.0


@pytest.mark.parametrize(
    ("norm", "limit", "factor"), [(2.0, 1.0, 0.5), (1.0, 1.0, 1.0), (0.0, 1.0, 1.0), (9.0, None, 1.0)]
)
def test_clipping_scales_down_to_the_limit(norm: float, limit: float | None, factor: float) -> None:
    assert clip_factor(norm, limit) == factor


@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_is_not_hidden(norm: float) -> None:
    assert math.isnan(clip_factor(norm, 1.0))
