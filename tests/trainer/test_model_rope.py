"""Rotary positions and the RMS norm: formulas, sections, gradients, precision."""

import math

import pytest

torch = pytest.importorskip("torch")

from trainer.model.rope import RMSNorm, mrope_angles, rotate, vision_angles  # noqa: E402

pytestmark = pytest.mark.torch

WIDE = torch.zeros(0, dtype=torch.float64)


def test_vision_angles_put_rows_first_and_columns_second():
    positions = torch.tensor([[3, 5]])
    cos, sin = vision_angles(positions, 8, theta=100.0, like=WIDE)
    # head of 8: two frequencies per axis, 1 and 100 ** (-2/4)
    expected = torch.tensor([[3.0, 0.3, 5.0, 0.5]], dtype=torch.float64)
    torch.testing.assert_close(cos, expected.cos())
    torch.testing.assert_close(sin, expected.sin())


def test_mrope_sections_take_their_frequencies_from_their_axis():
    position_ids = torch.tensor([[2], [30], [500]])
    cos, _ = mrope_angles(position_ids, 8, theta=10_000.0, sections=(1, 1, 2), like=WIDE)
    # frequencies 10000 ** (-2i/8) = 1, 0.1, 0.01, 0.001
    torch.testing.assert_close(cos, torch.tensor([[2.0, 3.0, 5.0, 0.5]], dtype=torch.float64).cos())


def test_text_positions_make_mrope_the_plain_rotary_embedding():
    position_ids = torch.arange(6).expand(3, -1)
    split, _ = mrope_angles(position_ids, 12, theta=1e4, sections=(1, 2, 3), like=WIDE)
    plain, _ = mrope_angles(position_ids, 12, theta=1e4, sections=(6, 0, 0), like=WIDE)
    assert torch.equal(split, plain)


def test_scores_depend_on_the_distance_only():
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(1, 1, 8, generator=generator, dtype=torch.float64) for _ in range(2))

    def score(at_q: int, at_k: int) -> float:
        turned = [
            rotate(x, mrope_angles(torch.full((3, 1), at), 8, theta=1e4, sections=(4, 0, 0), like=WIDE))
            for x, at in ((q, at_q), (k, at_k))
        ]
        return float((turned[0] * turned[1]).sum())

    assert math.isclose(score(7, 3), score(1007, 1003), abs_tol=1e-11)
    assert not math.isclose(score(7, 3), score(7, 4), abs_tol=1e-3)


def test_rotation_keeps_lengths_and_position_zero_keeps_everything():
    x = torch.randn(2, 3, 8, dtype=torch.float64)
    turned = rotate(x, mrope_angles(torch.tensor([[0, 9]] * 3), 8, theta=1e4, sections=(2, 1, 1), like=x))
    assert torch.equal(turned[0], x[0])
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))


def test_gradient_of_the_rotation():
    x = torch.randn(3, 2, 8, dtype=torch.float64, requires_grad=True)
    angles = mrope_angles(torch.arange(3).expand(3, -1), 8, theta=1e4, sections=(2, 1, 1), like=WIDE)
    assert torch.autograd.gradcheck(lambda y: rotate(y, angles), x)


def test_bfloat16_heads_use_float32_angles():
    like = torch.zeros(0, dtype=torch.bfloat16)
    position_ids = torch.tensor([[1000, 1001]] * 3)  # bfloat16 cannot tell these apart
    cos, sin = mrope_angles(position_ids, 8, theta=1e4, sections=(2, 1, 1), like=like)
    assert cos.dtype == torch.float32
    assert not torch.equal(cos[0], cos[1])
    assert rotate(torch.ones(2, 1, 8, dtype=torch.bfloat16), (cos, sin)).dtype == torch.bfloat16


def reference_norm(x, weight, eps):
    return weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


def test_the_norm_equals_its_formula_in_value_and_gradient():
    norm = RMSNorm(6, eps=1e-2).double()
    with torch.no_grad():
        norm.weight.uniform_(0.5, 2)
    x = torch.randn(4, 3, 6, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn_like(x)
    got = torch.autograd.grad(norm(x), (x, norm.weight), upstream)
    expected = reference_norm(x, norm.weight, 1e-2)
    torch.testing.assert_close(norm(x), expected, rtol=0, atol=1e-14)
    for mine, reference in zip(got, torch.autograd.grad(expected, (x, norm.weight), upstream), strict=True):
        torch.testing.assert_close(mine, reference, rtol=0, atol=1e-13)
    assert torch.autograd.gradcheck(norm, x)


def test_the_norm_of_zero_rows_is_zero_with_finite_gradients():
    norm = RMSNorm(4, eps=1e-6)
    x = torch.zeros(2, 4, requires_grad=True)
    norm(x).sum().backward()
    assert torch.isfinite(x.grad).all()
    assert torch.count_nonzero(norm(x)) == 0


def test_the_norm_of_bfloat16_takes_statistics_in_float32():
    x = torch.randn(5, 64).mul(300).bfloat16().requires_grad_()
    norm = RMSNorm(64, eps=1e-6).bfloat16()
    out = norm(x)
    out.float().sum().backward()
    expected = reference_norm(x.detach().float(), torch.ones(64), 1e-6)
    assert out.dtype == x.grad.dtype == norm.weight.grad.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), expected, rtol=8e-3, atol=1e-3)
