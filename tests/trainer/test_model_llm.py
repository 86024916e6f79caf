"""The language model: isolation of samples, visual rows, splits into stages, refusals."""

import pytest

torch = pytest.importorskip("torch")

from trainer.errors import ConfigError  # noqa: E402
from trainer.model.llm import LLMConfig, LLMStage  # noqa: E402

pytestmark = pytest.mark.torch

SIZES = {
    "vocab_size": 20,
    "dim": 24,
    "depth": 3,
    "num_heads": 2,
    "num_kv_heads": 1,
    "mlp_dim": 16,
    "mrope_section": (2, 2, 2),
}


def stage(first: int = 0, last: int = 2, *, embedding: bool = True, head: bool = True, **change) -> LLMStage:
    torch.manual_seed(first)
    config = LLMConfig(**(SIZES | change))
    return LLMStage(config, first_layer=first, last_layer=last, has_embedding=embedding, has_head=head).double()


def pack(*lengths: int, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "inputs": torch.randint(0, 20, (sum(lengths),), generator=generator),
        "position_ids": torch.cat([torch.arange(n) for n in lengths]).expand(3, -1),
        "cu_seqlens": torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32),
    }


def test_logits_of_a_sample_do_not_change_when_its_neighbour_in_the_pack_does():
    model, batch = stage().float(), pack(7, 9)
    before = model.logits(model(**batch))
    batch["inputs"] = torch.cat([(batch["inputs"][:7] + 1) % 20, batch["inputs"][7:]])
    after = model.logits(model(**batch))
    assert not torch.equal(before[:7], after[:7])
    assert torch.equal(before[7:], after[7:])


def test_logits_of_a_sample_do_not_change_when_the_image_of_its_neighbour_does():
    model, batch = stage().float(), pack(7, 9)
    batch["visual_index"] = torch.tensor([1, 2, 9])
    visual = torch.randn(3, 24)
    before = model(**batch, visual=visual)
    after = model(**batch, visual=visual + torch.tensor([[5.0], [5.0], [0.0]]))
    assert not torch.equal(before[:7], after[:7])
    assert torch.equal(before[7:], after[7:])


def test_a_sample_in_a_pack_equals_the_sample_alone():
    model, batch = stage(), pack(4, 6, 1)
    packed = model(**batch)
    for start, stop in ((0, 4), (4, 10), (10, 11)):
        alone = pack(stop - start)
        alone["inputs"] = batch["inputs"][start:stop]
        torch.testing.assert_close(packed[start:stop], model(**alone), rtol=0, atol=1e-12)


def test_a_later_token_never_changes_an_earlier_row():
    model, batch = stage(), pack(8)
    before = model(**batch)
    batch["inputs"] = torch.cat([batch["inputs"][:5], (batch["inputs"][5:] + 3) % 20])
    assert torch.equal(model(**batch)[:5], before[:5])


def test_visual_rows_replace_token_rows_and_placeholders_get_no_gradient():
    model, batch = stage(), pack(6)
    batch["inputs"] = torch.tensor([1, 19, 19, 2, 3, 4])
    visual = torch.randn(2, 24, dtype=torch.float64, requires_grad=True)
    index = torch.tensor([1, 2])
    out = model(**batch, visual=visual, visual_index=index)
    out.square().sum().backward()
    assert torch.count_nonzero(visual.grad)
    assert torch.count_nonzero(model.embed_tokens.weight.grad[19]) == 0
    assert torch.count_nonzero(model.embed_tokens.weight.grad[1])
    batch["inputs"] = torch.tensor([1, 7, 8, 2, 3, 4])
    assert torch.equal(model(**batch, visual=visual, visual_index=index), out)


def test_visual_rows_that_equal_the_tokens_change_nothing():
    model, batch = stage(), pack(6)
    index = torch.tensor([4, 0])
    visual = model.embed_tokens.weight.detach()[batch["inputs"][index]]
    assert torch.equal(model(**batch, visual=visual, visual_index=index), model(**batch))


def test_stages_in_a_row_equal_the_whole_model_bit_for_bit():
    whole, batch = stage(), pack(5, 3)
    parts = [
        stage(0, 0, head=False),
        stage(1, 2, embedding=False),
    ]
    names = set()
    for part in parts:
        part.load_state_dict({name: whole.state_dict()[name] for name in part.state_dict()})
        names |= set(part.state_dict())
    assert names == set(whole.state_dict())
    hidden = parts[0](**batch)
    batch["inputs"] = hidden
    assert torch.equal(parts[1](**batch), whole(stage_inputs := pack(5, 3)["inputs"], **_without_inputs(batch)))
    assert stage_inputs.dtype == torch.int64


def _without_inputs(batch):
    return {name: value for name, value in batch.items() if name != "inputs"}


def test_positions_on_each_axis_matter():
    model, batch = stage(), pack(5)
    before = model(**batch)
    for axis in range(3):
        moved = batch["position_ids"].clone()
        moved[axis, 2:] += 3
        assert not torch.allclose(model(**(batch | {"position_ids": moved}))[2:], before[2:])


def test_moving_all_positions_together_changes_nothing():
    model, batch = stage(), pack(5)
    moved = batch | {"position_ids": batch["position_ids"] + 100}
    torch.testing.assert_close(model(**moved), model(**batch), rtol=0, atol=1e-10)


def test_gradients_reach_every_parameter():
    model = stage()
    model.logits(model(**pack(6, 4))).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert torch.count_nonzero(parameter.grad), name


def test_tied_embeddings_share_one_matrix():
    model = stage(tie_embeddings=True)
    assert model.head_weight is model.embed_tokens.weight
    assert not any("lm_head" in name for name in model.state_dict())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"first": 2, "last": 3}, r"layers 2\.\.3 are not within 0\.\.2"),
        ({"tie_embeddings": True, "head": False}, "untie them"),
        ({"num_kv_heads": 3}, "multiple of num_kv_heads=3"),
        ({"mrope_section": (2, 2, 3)}, "add up to head_dim / 2 = 6"),
        ({"num_heads": 5}, "multiple of 2 [*] num_heads=10"),
        ({"depth": 0}, "llm depth=0"),
    ],
)
def test_a_stage_that_cannot_exist_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        stage(**options)


def test_a_stage_without_a_head_has_no_head_weight():
    with pytest.raises(ConfigError, match="has no head"):
        _ = stage(0, 1, head=False).head_weight


def test_visual_rows_that_do_not_fit_are_refused():
    model, batch = stage(), pack(6)
    for visual, index in ((torch.zeros(2, 24), torch.tensor([1])), (torch.zeros(1, 24), None)):
        with pytest.raises(ConfigError, match="one row per place"):
            model(**batch, visual=visual, visual_index=index)
    later = stage(1, 2, embedding=False)
    batch["inputs"] = torch.zeros(6, 24, dtype=torch.float64)
    with pytest.raises(ConfigError, match="without an embedding"):
        later(**batch, visual=torch.zeros(1, 24), visual_index=torch.tensor([1]))
