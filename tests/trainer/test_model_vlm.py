"""The whole model: weights independent of the split, config files, presets, generation."""

import json
import math
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")

from balancer.layout import Layout  # noqa: E402
from trainer.errors import ConfigError  # noqa: E402
from trainer.loss import head_cross_entropy_sum  # noqa: E402
from trainer.model import PRESETS, ModelConfig, build_pieces, generate, llm_layers_per_stage, preset  # noqa: E402

pytestmark = pytest.mark.torch

CHECK = PRESETS["check"]


def state_of(pp_size: int, config: ModelConfig = CHECK, **options) -> dict[str, torch.Tensor]:
    layout, merged = Layout(pp_size=pp_size), {}
    for rank in range(pp_size):
        part = build_pieces(config, layout, rank, **options).state_dict()
        assert not set(part) & set(merged)
        merged |= part
    return merged


@pytest.mark.parametrize("pp_size", [2, 3, 4, 5])
def test_every_pipeline_split_has_bit_identical_weights(pp_size):
    whole, split = state_of(1), state_of(pp_size)
    assert set(whole) == set(split)
    assert all(torch.equal(whole[name], split[name]) for name in whole)


def test_pieces_are_where_the_layout_says():
    assert set(build_pieces(CHECK, Layout(), 0)) == {"visual", "llm"}
    assert set(build_pieces(CHECK, Layout(pp_size=3), 0)) == {"visual"}
    first, last = (build_pieces(CHECK, Layout(pp_size=3), rank)["llm"] for rank in (1, 2))
    assert (first.has_embedding, first.has_head, [*first.layers]) == (True, False, ["0", "1"])
    assert (last.has_embedding, last.has_head, [*last.layers]) == (False, True, ["2", "3"])


def test_names_are_canonical():
    names = set(state_of(3))
    assert {
        "visual.patch_embed.proj.weight",
        "visual.blocks.1.attn.qkv.bias",
        "visual.merger.mlp.2.weight",
        "llm.embed_tokens.weight",
        "llm.layers.3.self_attn.k_proj.bias",
        "llm.norm.weight",
        "llm.lm_head.weight",
    } <= names
    assert all(name.startswith(("visual.", "llm.")) for name in names)


def test_weights_depend_on_the_seed_and_the_name_but_not_on_global_random_state():
    torch.manual_seed(1)
    one = state_of(1)
    state = torch.random.get_rng_state()
    two = state_of(1)
    assert torch.equal(torch.random.get_rng_state(), state)
    other = state_of(1, seed=1)
    matrices = [name for name in one if one[name].dim() > 1]
    assert all(torch.equal(one[name], two[name]) for name in one)
    assert not any(torch.equal(one[name], other[name]) for name in matrices)
    assert not torch.equal(one["llm.layers.0.mlp.up_proj.weight"], one["llm.layers.1.mlp.up_proj.weight"])


def test_weights_of_another_dtype_are_the_rounded_ones():
    wide, narrow = state_of(1), state_of(1, dtype=torch.bfloat16)
    assert all(torch.equal(wide[name].bfloat16(), narrow[name]) for name in wide)


def test_the_first_loss_is_close_to_that_of_a_uniform_guess():
    pieces = build_pieces(PRESETS["demo"], Layout(), 0)
    tokens = torch.randint(0, 256, (64,), generator=torch.Generator().manual_seed(0))
    hidden = pieces["llm"](
        tokens, position_ids=torch.arange(64).expand(3, -1), cu_seqlens=torch.tensor([0, 64], dtype=torch.int32)
    )
    total = head_cross_entropy_sum(hidden, pieces["llm"].head_weight, tokens.roll(-1), torch.ones(64))
    assert abs(total.item() / 64 - math.log(264)) < 0.2


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_configs_survive_json(name):
    assert ModelConfig.from_json(preset(name).to_json()) == preset(name)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda d: d.update(format_version=2), "format_version 2"),
        (lambda d: d.update(extra=1), r"extra keys \['extra'\]"),
        (lambda d: d.pop("llm"), "cannot be read"),
        (lambda d: d["llm"].update(colour=3), "cannot be read"),
        (lambda d: d["llm"].update(num_kv_heads=5), "num_kv_heads=5"),
        (lambda d: d["vision"].update(out_dim=7), "must equal llm dim=24"),
    ],
)
def test_a_config_file_that_does_not_fit_is_refused(edit, message):
    data = json.loads(CHECK.to_json())
    edit(data)
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_json(json.dumps(data))


def test_a_config_file_that_is_not_json_is_refused():
    with pytest.raises(ConfigError, match=r"write it with ModelConfig\.to_json"):
        ModelConfig.from_json("{")


def test_layers_are_split_evenly_with_larger_parts_first():
    assert llm_layers_per_stage(4, 1) == (4,)
    assert llm_layers_per_stage(7, 3) == (3, 2, 2)
    with pytest.raises(ConfigError, match="4 LLM layers cannot fill 5 stages; use pp_size <= 5"):
        llm_layers_per_stage(4, 5)


def test_what_no_split_can_hold_is_refused():
    with pytest.raises(ConfigError, match="pp_rank=2 is outside pp_size=2"):
        build_pieces(CHECK, Layout(pp_size=2), 2)
    tied = replace(CHECK, llm=replace(CHECK.llm, tie_embeddings=True))
    assert "llm.lm_head.weight" not in state_of(2, tied)
    with pytest.raises(ConfigError, match="use pp_size <= 2"):
        build_pieces(tied, Layout(pp_size=3), 0)
    with pytest.raises(ConfigError, match="choose one of check, demo"):
        preset("huge")


def prompt(num_text: int = 5) -> dict[str, torch.Tensor]:
    """Two text tokens, an image of 2 x 2 blocks, more text."""
    tokens = torch.tensor([5, 6, 261, 261, 261, 261, *range(10, 10 + num_text)])
    image = torch.tensor([[2, 2, 2, 2], [2, 2, 3, 3], [2, 3, 2, 3]])
    text = torch.arange(4, 4 + num_text).expand(3, -1)
    generator = torch.Generator().manual_seed(3)
    return {
        "tokens": tokens,
        "position_ids": torch.cat([torch.tensor([[0, 1]] * 3), image, text], dim=1),
        "visual_index": torch.tensor([2, 3, 4, 5]),
        "patches": torch.randn(16, 1176, generator=generator),
        "grids": torch.tensor([[1, 4, 4]]),
    }


def teacher_forced_argmax(pieces, sample, answer):
    """The likeliest token after each prefix, from one pass over prompt + answer."""
    tokens = torch.cat([sample["tokens"], torch.tensor(answer, dtype=torch.int64)])
    start = int(sample["position_ids"].max()) + 1
    rest = torch.arange(start, start + len(answer)).expand(3, -1)
    hidden = pieces["llm"](
        tokens,
        position_ids=torch.cat([sample["position_ids"], rest], dim=1),
        cu_seqlens=torch.tensor([0, len(tokens)], dtype=torch.int32),
        visual=pieces["visual"](sample["patches"], sample["grids"]),
        visual_index=sample["visual_index"],
    )
    return pieces["llm"].logits(hidden).argmax(-1).tolist()[len(sample["tokens"]) - 1 :]


@pytest.fixture
def pieces():
    """A model whose head is loud enough that answers are not one token repeated by a tie."""
    built = build_pieces(CHECK, Layout(), 0, dtype=torch.float64)
    with torch.no_grad():
        built["llm"].lm_head.weight.mul_(50)
    return built


def test_greedy_answers_equal_one_teacher_forced_pass(pieces):
    answer = generate(pieces, **prompt(), max_new_tokens=8, stop_id=258)
    assert len(answer) == 8
    assert len(set(answer)) > 1
    assert teacher_forced_argmax(pieces, prompt(), answer)[:8] == answer


def test_generation_stops_at_the_stop_token_and_leaves_it_out(pieces):
    free = generate(pieces, **prompt(), max_new_tokens=8, stop_id=258)
    stop_id = free[3]
    assert generate(pieces, **prompt(), max_new_tokens=8, stop_id=stop_id) == free[: free.index(stop_id)]
    assert generate(pieces, **prompt(), max_new_tokens=0, stop_id=258) == []


def test_the_image_matters_to_the_answer(pieces):
    sample = prompt()
    other = sample | {"patches": sample["patches"] * -3}
    assert generate(pieces, **sample, max_new_tokens=8, stop_id=258) != generate(
        pieces, **other, max_new_tokens=8, stop_id=258
    )


def test_generation_without_media_and_from_parts_of_a_model(pieces):
    text = {"tokens": torch.tensor([1, 2, 3]), "position_ids": torch.arange(3).expand(3, -1)}
    assert len(generate(pieces, **text, max_new_tokens=2, stop_id=258)) == 2
    for rank in range(3):
        with pytest.raises(ConfigError, match="load the checkpoint with pp_size=1"):
            generate(build_pieces(CHECK, Layout(pp_size=3), rank), **text, max_new_tokens=1, stop_id=258)
    with pytest.raises(ConfigError, match="no vision tower"):
        generate(build_pieces(CHECK, Layout(pp_size=2), 1), **prompt(), max_new_tokens=1, stop_id=258)
    with pytest.raises(ConfigError, match="at least one token"):
        generate(
            pieces, tokens=text["tokens"][:0], position_ids=text["position_ids"][:, :0], max_new_tokens=1, stop_id=0
        )
