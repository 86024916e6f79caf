"""Models that keep the samples of a pack apart pass; others are refused, by their config or by the experiment."""

import subprocess
import sys
import warnings
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    transformers = pytest.importorskip("transformers")

from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS  # noqa: E402
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: E402

from balancer.adapters.hf_batch import HfCollate  # noqa: E402
from balancer.adapters.packable import PACKABLE_LAYERS, check_packable  # noqa: E402
from balancer.errors import PackingError  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]  # warnings of the other library


def causal(module, query, key, value, attention_mask=None, **kwargs):
    """Attention [1, heads, T, d] of every position to all in front of it, whatever the boundaries."""
    repeat = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1)
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, is_causal=kwargs.get("is_causal", True), scale=kwargs["scaling"]
    )
    return out.transpose(1, 2), None


def varlen(module, query, key, value, attention_mask=None, *, cu_seq_lens_q, max_length_q, **kwargs):
    """The same within each segment of `cu_seq_lens_q`: what a flash kernel of variable length computes."""
    lengths = cu_seq_lens_q.diff().tolist()
    assert max(lengths) == max_length_q
    assert attention_mask is None
    pieces = zip(*(torch.split(one, lengths, dim=2) for one in (query, key, value)), strict=True)
    return torch.cat([causal(module, *piece, **kwargs)[0] for piece in pieces], dim=1), None


@pytest.fixture
def back_ends():
    """Registers attention back ends without masks of their own: `blind` and `flash_varlen`."""
    ours = {"blind": causal, "flash_varlen": varlen}
    for name, function in ours.items():
        ALL_ATTENTION_FUNCTIONS.register(name, function)
    ALL_MASK_ATTENTION_FUNCTIONS.register("flash_varlen", lambda *args, **kwargs: None)
    yield
    for name in ours:
        del type(ALL_ATTENTION_FUNCTIONS)._global_mapping[name]
    del type(ALL_MASK_ATTENTION_FUNCTIONS)._global_mapping["flash_varlen"]


@contextmanager
def attention_of(name, *configs):
    """The back end of built modules, set where transformers does not look for a kernel of that name."""
    before = [config._attn_implementation_internal for config in configs]
    for config in configs:
        config._attn_implementation_internal = name
    yield
    for config, old in zip(configs, before, strict=True):
        config._attn_implementation_internal = old


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("probe", [True, False])
def test_models_with_masks_pass(text_model, attention, probe):
    check_packable(text_model(attention), probe=probe)


def test_a_model_of_three_axes_passes_and_stays_as_it_was(qwen_vl):
    """AM-01: the guard runs the experiment with four rows of positions and leaves modes and gradients alone."""
    qwen_vl.model.visual.train()
    before = [module.training for module in qwen_vl.modules()]
    state = torch.get_rng_state()
    check_packable(qwen_vl)
    assert [module.training for module in qwen_vl.modules()] == before
    assert any(before)
    assert not all(before)
    assert all(parameter.grad is None for parameter in qwen_vl.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    qwen_vl.eval()


def test_boundaries_reach_attention_of_variable_length(text_model, back_ends):
    """AM-01: where there is no mask, `cu_seq_lens_q` alone keep samples apart, bit by bit; AM-05: starts do not."""
    model = text_model()
    model.config._attn_implementation_internal = "flash_varlen"
    check_packable(model)
    second = {"input_ids": list(range(20, 28)), "labels": list(range(20, 28)), "position_ids": list(range(2, 10))}
    logits = []
    for first in ([1, 2, 3, 4, 5], [9, 8, 7, 6, 5]):
        positions = list(range(2, 7))
        batch = HfCollate(align_tokens=8)([{"input_ids": first, "labels": first, "position_ids": positions}, second])
        with torch.no_grad():
            logits.append(model(**batch).logits[0, 5:13])
    assert torch.equal(*logits)


def test_boundaries_of_the_text_do_not_get_into_the_vision_tower(qwen_vl, back_ends, all_kinds):
    """The tower has boundaries of its own under the same names."""
    collate = HfCollate.for_model(qwen_vl, align_tokens=16)
    batch = collate(all_kinds)
    with torch.no_grad():
        wanted = qwen_vl(**batch).logits
        with attention_of("flash_varlen", qwen_vl.config.text_config, qwen_vl.config.vision_config):
            found = qwen_vl(**batch).logits
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def test_a_back_end_that_ignores_boundaries_is_refused(text_model, back_ends):
    """AM-01: the experiment finds it, and without the experiment it is unknown."""
    with pytest.raises(
        PackingError, match=r"^qwen2 with attention back end 'blind' mixes the samples of a pack"
    ) as error:
        check_packable(text_model("blind"))
    assert "attn_implementation='sdpa' or 'flash_attention_2'" in str(error.value)
    with pytest.raises(PackingError, match=r"^attention back end 'blind' is not known to keep samples apart") as error:
        check_packable(text_model("blind"), probe=False)
    assert "probe=True" in str(error.value)


def test_one_sample_and_a_tail_are_no_pack(text_model, back_ends):
    """AM-07: a back end without boundaries gives the right logits for one sample, and a good one is never blamed."""
    model, tokens = text_model("blind"), [1, 2, 3, 4, 5]
    sample = {"input_ids": tokens, "labels": tokens}
    with torch.no_grad():
        filled = model(**HfCollate(align_tokens=8)([sample])).logits[0, :5]
        torch.testing.assert_close(filled, model(**HfCollate()([sample])).logits[0], atol=1e-5, rtol=1e-5)
    check_packable(text_model("sdpa"), collate=HfCollate(align_tokens=32))
    check_packable(text_model("eager"), collate=HfCollate(align_tokens=32))


def test_a_collate_that_hides_boundaries_is_named(qwen_vl, text_model):
    with pytest.raises(PackingError, match="A cache hides boundaries: leave no_cache=True in HfCollate"):
        check_packable(text_model(), collate=HfCollate(no_cache=False))
    with pytest.raises(PackingError, match=r"another number of axes: use HfCollate.for_model\(model\)"):
        check_packable(qwen_vl, collate=HfCollate())


SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": [2, 3],
}


def hybrid_model(name):
    torch.manual_seed(0)
    if name == "lfm2":
        config = transformers.Lfm2Config(**SMALL, layer_types=["conv", "full_attention"])
        return transformers.Lfm2ForCausalLM(config)
    if name == "mamba":
        config = transformers.MambaConfig(vocab_size=64, hidden_size=32, state_size=4, num_hidden_layers=1)
        return transformers.MambaForCausalLM(config)
    config = transformers.Qwen3NextConfig(
        **SMALL,
        head_dim=16,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=2,
        linear_num_value_heads=2,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        num_experts=2,
        num_experts_per_tok=1,
        moe_intermediate_size=16,
        shared_expert_intermediate_size=16,
    )
    return transformers.Qwen3NextForCausalLM(config)


@pytest.mark.parametrize(("name", "kind"), [("lfm2", "conv"), ("qwen3_next", "linear_attention"), ("mamba", "recurr")])
def test_layers_that_carry_state_over_boundaries_are_refused_by_kind(name, kind):
    """AM-05: linear attention, convolutions and recurrences ignore boundaries, and say nothing."""
    with pytest.raises(PackingError, match=rf"^{name} has layers of kind .*{kind}.*, which carry state") as error:
        check_packable(hybrid_model(name), probe=False)
    assert "batch_size=1" in str(error.value)


def test_the_experiment_finds_a_convolution_that_the_list_does_not_know(monkeypatch):
    """AM-05: what is not registered is found out."""
    monkeypatch.setitem(PACKABLE_LAYERS, "conv", True)
    model = hybrid_model("lfm2")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(10.0)
    with pytest.raises(PackingError, match=r"^lfm2 with attention back end 'sdpa' mixes the samples of a pack"):
        check_packable(model)


def test_every_kind_is_marked_and_unknown_ones_are_left_to_the_experiment(text_model):
    """AM-05: the registry."""
    assert {kind for kind, packable in PACKABLE_LAYERS.items() if not packable} >= {"linear_attention", "conv", "mamba"}
    model = text_model()
    model.config.layer_types = ["something_new", "full_attention"]
    with pytest.raises(PackingError, match="kind something_new is not known to keep samples apart"):
        check_packable(model, probe=False)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_mixture_of_experts_passes(attention):
    torch.manual_seed(0)
    config = transformers.MixtralConfig(**SMALL, num_local_experts=4, attn_implementation=attention)
    check_packable(transformers.MixtralForCausalLM(config))


def test_the_experiment_uses_ordinary_tokens_only_and_changes_all_of_the_first_sample():
    """Ids with a meaning, which a config may list several of, could switch a model to something else."""
    seen = []
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**{**SMALL, "vocab_size": 30}))
    model.register_forward_pre_hook(lambda _, args, batch: seen.append(batch["input_ids"][0]), with_kwargs=True)
    check_packable(model)
    (one, other), first = seen, 9
    assert not set(torch.cat(seen).tolist()) & {0, 1, 2, 3}
    assert bool((one[:first] != other[:first]).all())
    assert torch.equal(one[first:], other[first:])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_precisions_pass_and_fail_alike(text_model, back_ends, dtype):
    check_packable(text_model("sdpa").to(dtype))
    with pytest.raises(PackingError, match="mixes the samples"):
        check_packable(text_model("blind").to(dtype))


def test_a_wrapped_model_is_looked_into_and_called_from_outside(text_model):
    class Wrapper(torch.nn.Module):
        calls = 0

        def __init__(self, module):
            super().__init__()
            self.module = module

        def forward(self, **batch):
            Wrapper.calls += 1
            return self.module(**batch)

    check_packable(Wrapper(text_model()))
    assert Wrapper.calls == 2


def test_none_of_this_needs_transformers_to_be_imported():
    names = ", ".join(f"balancer.adapters.{name}" for name in ("hf_batch", "hf_segment", "megatron", "packable"))
    code = f"import sys, {names}; sys.exit('transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


class TestRefusals:
    """Models that no experiment can be made with."""

    def test_a_model_of_ones_own(self):
        with pytest.raises(
            PackingError, match=r"^Linear has no config and is no model of transformers.*output='batch'"
        ):
            check_packable(torch.nn.Linear(2, 2))

    def test_an_encoder_decoder(self):
        config = transformers.T5Config(vocab_size=32, d_model=8, d_ff=8, num_layers=1, num_heads=1, d_kv=8)
        with pytest.raises(PackingError, match=r"^t5 is an encoder-decoder: its cross-attention sees all samples"):
            check_packable(transformers.T5ForConditionalGeneration(config))

    def test_a_back_end_for_generation(self, text_model):
        model = text_model()
        model.config._attn_implementation_internal = "paged|sdpa"
        with pytest.raises(PackingError, match=r"'paged\|sdpa' is for generation.*attn_implementation='sdpa'"):
            check_packable(model)

    def test_a_model_without_weights(self, text_model):
        with pytest.raises(PackingError, match=r"has no weights yet \(meta device\).*probe=False"):
            check_packable(text_model().to("meta"))

    def test_a_model_without_a_head(self, text_model):
        with pytest.raises(PackingError, match=r"^Qwen2Model gives no logits to compare. Pass the model with its head"):
            check_packable(text_model().model)

    def test_a_forward_that_takes_no_boundaries(self):
        class Own(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.config = SimpleNamespace(model_type="own", vocab_size=32, _attn_implementation="sdpa")
                self.head = torch.nn.Linear(2, 2)

            def forward(self, input_ids, position_ids):
                return SimpleNamespace(logits=None)

        with pytest.raises(PackingError, match=r"^the forward of Own does not take cu_seq_lens_k, cu_seq_lens_q, max"):
            check_packable(Own())
