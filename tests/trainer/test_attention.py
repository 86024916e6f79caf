"""Packed attention against a dense mask: values, gradients, isolation of segments, every way of computing it."""

import pytest

torch = pytest.importorskip("torch")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from trainer.errors import ConfigError  # noqa: E402
from trainer.model import attention  # noqa: E402
from trainer.model.attention import cpu_kernel_works, packed_attention  # noqa: E402

pytestmark = pytest.mark.torch


def bounds_of(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


def random_qkv(num_tokens: int, *, heads: int = 4, kv_heads: int = 2, size: int = 8, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = [(num_tokens, heads, size), (num_tokens, kv_heads, size), (num_tokens, kv_heads, size)]
    return [torch.randn(s, generator=generator, dtype=torch.float64).to(dtype).requires_grad_() for s in shapes]


def dense_reference(q, k, v, lengths: list[int], *, causal: bool, prefix=None):
    """O(T^2): one mask over the whole pack."""
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    mask = owner[:, None] == owner[None, :]
    if causal:
        mask = mask & torch.ones_like(mask).tril()
    if prefix is not None:
        mask = torch.cat([torch.ones(len(q), len(prefix[0]), dtype=torch.bool), mask], dim=1)
        k, v = torch.cat([prefix[0], k]), torch.cat([prefix[1], v])
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * q.shape[-1] ** -0.5
    weights = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, v)


def assert_matches_reference(lengths: list[int], *, causal: bool, **options) -> None:
    inputs = random_qkv(sum(lengths), **options)
    out = packed_attention(*inputs, bounds_of(lengths), causal=causal)
    expected = dense_reference(*inputs, lengths, causal=causal)
    upstream = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=out.dtype)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    got = torch.autograd.grad(out, inputs, upstream)
    for mine, reference in zip(got, torch.autograd.grad(expected, inputs, upstream), strict=True):
        torch.testing.assert_close(mine, reference, rtol=0, atol=1e-10)


def test_the_fused_cpu_kernel_is_used_with_this_torch():
    assert cpu_kernel_works()


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "lengths",
    [
        [7],
        [1],
        [1, 1, 1],
        [5, 3, 5, 3, 1],  # equal lengths that are not neighbours
        [4, 4, 4, 9],  # equal lengths side by side
        [3, 0, 4, 0],  # empty segments
        [64] * 6 + [32, 16, 64, 8],  # windows with a border
        [130, 2],  # longer than a tile of the kernel
    ],
)
def test_values_and_gradients_equal_a_dense_mask(lengths, causal):
    assert_matches_reference(lengths, causal=causal)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=9).filter(any),
    causal=st.booleans(),
    heads=st.sampled_from([(1, 1), (4, 4), (4, 1), (6, 2)]),
)
def test_any_pack_equals_a_dense_mask(lengths, causal, heads):
    assert_matches_reference(lengths, causal=causal, heads=heads[0], kv_heads=heads[1])


def test_the_fallback_gives_the_same_values_and_gradients(monkeypatch):
    monkeypatch.setattr(attention, "cpu_kernel_works", lambda: False)
    assert_matches_reference([5, 3, 5, 1, 0, 3], causal=True)
    assert_matches_reference([4, 4, 6], causal=False)


def test_a_missing_kernel_is_noticed_and_not_an_error(monkeypatch):
    monkeypatch.setattr(attention, "_FLASH", "_no_such_operator")
    cpu_kernel_works.cache_clear()
    try:
        assert not cpu_kernel_works()
        assert_matches_reference([2, 3], causal=True)
    finally:
        cpu_kernel_works.cache_clear()


@pytest.mark.parametrize("causal", [True, False])
def test_gradcheck_in_float64(causal):
    inputs = random_qkv(9, heads=2, kv_heads=1, size=4)
    bounds = bounds_of([3, 1, 3, 2])
    assert torch.autograd.gradcheck(lambda q, k, v: packed_attention(q, k, v, bounds, causal=causal), inputs)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-6), (torch.bfloat16, 3e-2)])
def test_lower_precision_stays_close_and_keeps_the_dtype(dtype, tolerance):
    lengths = [17, 4, 17]
    inputs = random_qkv(sum(lengths), dtype=dtype)
    out = packed_attention(*inputs, bounds_of(lengths), causal=True)
    out.square().sum().backward()
    wide = [x.detach().double().requires_grad_() for x in inputs]
    expected = dense_reference(*wide, lengths, causal=True)
    expected.square().sum().backward()
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
    for mine, reference in zip(inputs, wide, strict=True):
        assert mine.grad.dtype == dtype
        torch.testing.assert_close(mine.grad.double(), reference.grad, rtol=10 * tolerance, atol=10 * tolerance)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_changing_one_segment_leaves_the_others_bit_equal(dtype, causal):
    lengths = [6, 6, 3, 6]
    q, k, v = (x.detach() for x in random_qkv(sum(lengths), dtype=dtype))
    before = packed_attention(q, k, v, bounds_of(lengths), causal=causal)
    changed = [x.clone() for x in (q, k, v)]
    for x in changed:
        x[:6] = 1e4 * torch.randn_like(x[:6])
    after = packed_attention(*changed, bounds_of(lengths), causal=causal)
    assert not torch.equal(before[:6], after[:6])
    assert torch.equal(before[6:], after[6:])


def test_a_segment_gives_the_same_bits_alone_and_in_a_pack():
    q, k, v = (x.detach() for x in random_qkv(20, dtype=torch.float32))
    packed = packed_attention(q, k, v, bounds_of([5, 5, 10]), causal=True)
    alone = packed_attention(q[5:10], k[5:10], v[5:10], bounds_of([5]), causal=True)
    assert torch.equal(packed[5:10], alone)


def test_no_gradient_flows_to_another_segment():
    q, k, v = random_qkv(8)
    packed_attention(q, k, v, bounds_of([5, 3]), causal=False)[5:].sum().backward()
    for x in (q, k, v):
        assert torch.count_nonzero(x.grad[:5]) == 0
    assert torch.count_nonzero(v.grad[5:]) > 0


def test_a_causal_first_token_sees_only_itself():
    q, k, v = random_qkv(7, heads=2, kv_heads=2)
    out = packed_attention(q, k, v, bounds_of([4, 3]), causal=True)
    torch.testing.assert_close(out[[0, 4]], v[[0, 4]], rtol=0, atol=1e-14)


def test_two_runs_give_the_same_bits():
    lengths = [9, 4, 9, 2]
    results = []
    for _ in range(2):
        inputs = random_qkv(sum(lengths), dtype=torch.float32)
        out = packed_attention(*inputs, bounds_of(lengths), causal=True)
        out.square().sum().backward()
        results.append([out.detach(), *(x.grad for x in inputs)])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_strided_inputs_give_the_same_result():
    q, k, v = (x.detach() for x in random_qkv(10, heads=3, kv_heads=3))
    joined = torch.stack([q, k, v], dim=1)
    expected = packed_attention(q, k, v, bounds_of([4, 6]), causal=False)
    assert torch.equal(packed_attention(*joined.unbind(1), bounds_of([4, 6]), causal=False), expected)


def test_an_empty_pack_is_empty_and_its_graph_is_alive():
    q, k, v = random_qkv(0)
    out = packed_attention(q, k, v, torch.tensor([0], dtype=torch.int32), causal=True)
    out.sum().backward()
    assert out.shape == (0, 4, 8)
    assert k.grad.shape == (0, 2, 8)


def test_the_scale_can_be_chosen():
    q, k, v = (x.detach() for x in random_qkv(5, heads=2, kv_heads=2))
    out = packed_attention(q, k, v, bounds_of([5]), causal=False, scale=0.0)
    torch.testing.assert_close(out, v.mean(0, keepdim=True).expand_as(out), rtol=0, atol=1e-12)


@pytest.mark.parametrize("causal", [True, False])
def test_a_prefix_is_seen_by_every_token_of_every_segment(causal):
    lengths = [4, 0, 1, 3]
    inputs = random_qkv(8)
    _, *prefix = random_qkv(5, seed=1)
    out = packed_attention(*inputs, bounds_of(lengths), causal=causal, prefix_kv=tuple(prefix))
    expected = dense_reference(*inputs, lengths, causal=causal, prefix=prefix)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    everything = [*inputs, *prefix]
    got = torch.autograd.grad(out.square().sum(), everything)
    for mine, reference in zip(got, torch.autograd.grad(expected.square().sum(), everything), strict=True):
        torch.testing.assert_close(mine, reference, rtol=0, atol=1e-10)


def test_a_sequence_cut_into_prefix_and_rest_equals_the_whole():
    q, k, v = (x.detach() for x in random_qkv(9))
    whole = packed_attention(q, k, v, bounds_of([9]), causal=True)
    rest = packed_attention(q[4:], k[4:], v[4:], bounds_of([5]), causal=True, prefix_kv=(k[:4], v[:4]))
    torch.testing.assert_close(rest, whole[4:], rtol=0, atol=1e-12)


def test_an_empty_prefix_changes_nothing():
    q, k, v = (x.detach() for x in random_qkv(6))
    expected = packed_attention(q, k, v, bounds_of([2, 4]), causal=True)
    assert torch.equal(packed_attention(q, k, v, bounds_of([2, 4]), causal=True, prefix_kv=(k[:0], v[:0])), expected)


def test_a_prefix_of_another_shape_is_refused():
    q, k, v = (x.detach() for x in random_qkv(6))
    with pytest.raises(ConfigError, match=r"prefix_kv must be \[P, 2, 8\] twice"):
        packed_attention(q, k, v, bounds_of([6]), causal=True, prefix_kv=(q, q))


@pytest.mark.parametrize("bounds", [[0, 5], [1, 6], [0, 4, 3, 6], [], [0, 7]])
def test_bounds_that_do_not_cover_the_pack_are_refused(bounds):
    q, k, v = (x.detach() for x in random_qkv(6))
    with pytest.raises(ConfigError, match="must rise from 0 to the 6 tokens"):
        packed_attention(q, k, v, torch.tensor(bounds, dtype=torch.int32), causal=True)


def test_heads_that_cannot_be_shared_are_refused():
    q, k, v = (x.detach() for x in random_qkv(6, heads=4, kv_heads=3))
    with pytest.raises(ConfigError, match="4 query heads cannot share 3"):
        packed_attention(q, k, v, bounds_of([6]), causal=True)


def test_mixed_dtypes_and_odd_shapes_are_refused():
    q, k, v = (x.detach() for x in random_qkv(6))
    with pytest.raises(ConfigError, match="one dtype"):
        packed_attention(q, k.float(), v.float(), bounds_of([6]), causal=True)
    with pytest.raises(ConfigError, match=r"needs q \[T, H, D\]"):
        packed_attention(q, k[:5], v[:5], bounds_of([6]), causal=True)


def test_the_operator_passes_torchs_own_checks():
    inputs = random_qkv(6, heads=2, kv_heads=1, size=4)
    torch.library.opcheck(torch.ops.mllm_balancer.packed_attention.default, (*inputs, bounds_of([4, 2]), True, 0.5))


def test_groups_cover_every_token_once():
    lengths = [3, 0, 2, 3, 2, 7, 0]
    groups = attention._groups(tuple(bounds_of(lengths).tolist()))
    tokens = torch.arange(sum(lengths))[:, None, None]
    seen = torch.cat([group.take(tokens).flatten() for group in groups])
    assert sorted(seen.tolist()) == list(range(17))
    assert [(g.length, g.num_segments) for g in groups] == [(2, 2), (3, 2), (7, 1)]


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("causal", [True, False])
def test_cuda_agrees_with_the_cpu_in_float64(dtype, causal):
    lengths = [64, 64, 17, 1, 100]
    wide = random_qkv(sum(lengths), size=32)
    expected = packed_attention(*wide, bounds_of(lengths), causal=causal)
    expected.square().sum().backward()
    narrow = [x.detach().to("cuda", dtype).requires_grad_() for x in wide]
    out = packed_attention(*narrow, bounds_of(lengths), causal=causal)
    out.float().square().sum().backward()
    tolerance = 1e-3 if dtype == torch.float32 else 5e-2
    torch.testing.assert_close(out.cpu().double(), expected, rtol=tolerance, atol=tolerance)
    for mine, reference in zip(narrow, wide, strict=True):
        torch.testing.assert_close(mine.grad.cpu().double(), reference.grad, rtol=4 * tolerance, atol=4 * tolerance)
