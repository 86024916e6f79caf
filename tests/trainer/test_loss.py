"""Weighted cross-entropy sums: against torch, by chunks, without labels, and additive over micro-batches."""

import pytest

torch = pytest.importorskip("torch")

from torch.nn.functional import cross_entropy  # noqa: E402

from trainer.errors import TrainerError  # noqa: E402
from trainer.loss import head_cross_entropy_sum, token_nll, weighted_cross_entropy  # noqa: E402

pytestmark = pytest.mark.torch


def example(num_tokens: int = 13, dim: int = 6, vocab: int = 9, dtype=torch.float64, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_tokens, dim, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    head = torch.randn(vocab, dim, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    labels = torch.randint(0, vocab, (num_tokens,), generator=generator)
    labels[torch.rand(num_tokens, generator=generator) < 0.4] = -100
    weights = torch.rand(num_tokens, generator=generator, dtype=torch.float64)
    return hidden, head, labels, weights


def reference_sum(hidden, head, labels, weights):
    ce = cross_entropy(hidden @ head.T, labels, reduction="none", ignore_index=-100)
    return (ce * weights).sum()


@pytest.mark.parametrize("chunk", [1, 2, 5, 1024])
def test_head_and_loss_together_equal_torch_in_value_and_gradient(chunk):
    hidden, head, labels, weights = example()
    total = head_cross_entropy_sum(hidden, head, labels, weights, chunk=chunk)
    expected = reference_sum(hidden, head, labels, weights)
    torch.testing.assert_close(total, expected, rtol=0, atol=1e-12)
    got = torch.autograd.grad(3.5 * total, (hidden, head))
    for mine, reference in zip(got, torch.autograd.grad(3.5 * expected, (hidden, head)), strict=True):
        torch.testing.assert_close(mine, reference, rtol=0, atol=1e-12)


def test_the_loss_of_given_logits_equals_the_loss_through_the_head():
    hidden, head, labels, weights = example()
    from_logits = weighted_cross_entropy(hidden @ head.T, labels, weights)
    torch.testing.assert_close(from_logits, head_cross_entropy_sum(hidden, head, labels, weights), rtol=0, atol=1e-12)


def test_gradcheck_of_the_head_loss():
    hidden, head, labels, weights = example(num_tokens=5, dim=3, vocab=4)
    assert torch.autograd.gradcheck(lambda h, w: head_cross_entropy_sum(h, w, labels, weights, chunk=2), (hidden, head))


@pytest.mark.parametrize("from_logits", [True, False])
def test_without_any_label_the_sum_is_exactly_zero_and_gradients_are_finite(from_logits):
    hidden, head, labels, weights = example()
    labels.fill_(-100)
    weights.fill_(float("nan"))  # weights of unlabelled rows are never read
    if from_logits:
        total = weighted_cross_entropy(hidden @ head.T, labels, weights)
    else:
        total = head_cross_entropy_sum(hidden, head, labels, weights)
    total.backward()
    assert total.item() == 0.0
    assert torch.count_nonzero(hidden.grad) == 0
    assert torch.count_nonzero(head.grad) == 0


def test_a_micro_batch_without_labels_does_not_change_the_gradient_of_another():
    hidden, head, labels, weights = example()
    head_cross_entropy_sum(hidden, head, labels, weights).backward()
    alone = head.grad.clone()
    empty = torch.randn_like(hidden)
    head_cross_entropy_sum(empty, head, torch.full_like(labels, -100), weights).backward()
    assert torch.equal(head.grad, alone)


def test_unlabelled_rows_get_no_gradient_even_when_they_are_not_finite():
    hidden, head, labels, weights = example()
    ignored = labels == -100
    with torch.no_grad():
        hidden[ignored] = float("inf")
    total = head_cross_entropy_sum(hidden, head, labels, weights)
    total.backward()
    assert torch.isfinite(total)
    assert torch.count_nonzero(hidden.grad[ignored]) == 0
    assert torch.isfinite(head.grad).all()


def test_sums_of_two_halves_add_up_to_the_whole():
    hidden, head, labels, weights = example()
    whole = head_cross_entropy_sum(hidden, head, labels, weights)
    halves = [head_cross_entropy_sum(hidden[p], head, labels[p], weights[p]) for p in (slice(0, 6), slice(6, None))]
    torch.testing.assert_close(halves[0] + halves[1], whole, rtol=0, atol=1e-12)


def test_weights_scale_each_token():
    hidden, head, labels, weights = example()
    nll = token_nll(hidden, head, labels)
    total = head_cross_entropy_sum(hidden, head, labels, weights)
    torch.testing.assert_close((nll * weights).sum(), total, rtol=0, atol=1e-12)
    zero = head_cross_entropy_sum(hidden, head, labels, torch.zeros_like(weights))
    assert zero.item() == 0.0


def test_the_loss_per_token_equals_torch_and_is_zero_where_ignored():
    hidden, head, labels, _ = example()
    nll = token_nll(hidden, head, labels, chunk=3)
    expected = cross_entropy(hidden @ head.T, labels, reduction="none", ignore_index=-100)
    torch.testing.assert_close(nll, expected.detach(), rtol=0, atol=1e-12)
    assert torch.count_nonzero(nll[labels == -100]) == 0
    assert not nll.requires_grad


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_lower_precision_sums_in_float64_and_keeps_gradient_dtypes(dtype, tolerance):
    hidden, head, labels, weights = example(dtype=dtype)
    total = head_cross_entropy_sum(hidden, head, labels, weights)
    total.backward()
    wide = [x.detach().double().requires_grad_() for x in (hidden, head)]
    expected = reference_sum(*wide, labels, weights)
    expected.backward()
    assert total.dtype == torch.float64
    torch.testing.assert_close(total, expected, rtol=tolerance, atol=tolerance)
    for mine, reference in zip((hidden, head), wide, strict=True):
        assert mine.grad.dtype == dtype
        torch.testing.assert_close(mine.grad.double(), reference.grad, rtol=tolerance, atol=tolerance)


def test_large_logits_do_not_overflow():
    hidden, head, labels, weights = example()
    total = head_cross_entropy_sum(hidden * 1e4, head, labels, weights)
    assert torch.isfinite(total)


def test_lengths_that_differ_and_empty_chunks_are_refused():
    hidden, head, labels, weights = example()
    with pytest.raises(TrainerError, match="13 rows, 12 labels and 13 weights"):
        head_cross_entropy_sum(hidden, head, labels[:-1], weights)
    with pytest.raises(TrainerError, match="12 weights"):
        weighted_cross_entropy(hidden @ head.T, labels, weights[:-1])
    with pytest.raises(TrainerError, match="chunk=0"):
        head_cross_entropy_sum(hidden, head, labels, weights, chunk=0)


def test_a_label_outside_the_vocabulary_is_an_error_not_a_number():
    hidden, head, labels, weights = example()
    labels[0] = 9
    with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
        head_cross_entropy_sum(hidden, head, labels, weights)
