"""Closed-form FLOPs: matrix shapes counted by hand, and what training choices switch on and off."""

from dataclasses import replace

import numpy as np
import pytest

from balancer.errors import CostModelError
from balancer.flops import FREEZABLE, TrainOptions, Work, attention_work, module_works
from balancer.model_shape import (
    AttentionShape,
    DecoderShape,
    LayerShape,
    LinearShape,
    MLPShape,
    ModelShape,
    TowerShape,
)

DIM, HIDDEN, VOCAB = 8, 12, 32
VISION_DIM, VISION_HIDDEN = 6, 10


def text_layer(**changed: object) -> LayerShape:
    attention = AttentionShape(**{"dim": DIM, "num_heads": 4, "num_kv_heads": 2, "head_dim": 3, **changed})
    return LayerShape(attention=attention, mlp=MLPShape(dim=DIM, hidden=HIDDEN))


def vision_layer(span: str) -> LayerShape:
    attention = AttentionShape(dim=VISION_DIM, num_heads=2, num_kv_heads=2, head_dim=3, span=span)
    return LayerShape(attention=attention, mlp=MLPShape(dim=VISION_DIM, hidden=VISION_HIDDEN, gated=False))


def vision_model() -> ModelShape:
    merged = VISION_DIM * 4
    projector = (
        LinearShape(name="linear_1", in_dim=merged, out_dim=merged, rows="visual", reads_stream=True),
        LinearShape(name="linear_2", in_dim=merged, out_dim=DIM, rows="visual"),
    )
    encoder = TowerShape(layers=(vision_layer("window"), vision_layer("full")), patch_dim=14, projector=projector)
    llm = DecoderShape(layers=(text_layer(), text_layer()), vocab_size=VOCAB)
    return ModelShape(name="small", llm=llm, encoder=encoder)


@pytest.fixture
def counts(counts_of):
    """One sample of 40 tokens, 20 of them labelled, and 64 patches."""
    return counts_of([40], patches=[64])


def total(works, counts, part: str, role: str | None = None) -> int:
    return sum(int(getattr(work, part).of(counts)[0]) for work in works if role in {None, work.role})


def test_a_forward_is_two_flops_per_matrix_entry_and_row(counts) -> None:
    works = module_works(vision_model())
    patches, tokens, labels, visual = 64, 40, 20, 16
    layer = 2 * patches * (4 * VISION_DIM**2 + 2 * VISION_DIM * VISION_HIDDEN)
    pairs = 4 * VISION_DIM * (patches * patches + patches * 64)
    encoder = 2 * layer + pairs
    projector = 2 * visual * (24 * 24 + 24 * DIM)
    text = 2 * tokens * (2 * DIM * 12 + 2 * DIM * 6 + 3 * DIM * HIDDEN) + 4 * 12 * tokens**2 // 2
    assert total(works, counts, "forward", "patch_embed") == 2 * patches * 14 * VISION_DIM
    assert total(works, counts, "forward", "encoder") == encoder
    assert total(works, counts, "forward", "projector") == projector
    assert total(works, counts, "forward", "llm") == 2 * text
    assert total(works, counts, "forward", "head") == 2 * labels * DIM * VOCAB


def test_products_cost_the_same_again_per_gradient_and_patches_are_data(counts) -> None:
    works = module_works(vision_model(), TrainOptions(attention="math"))
    embed = total(works, counts, "forward", "patch_embed")
    assert total(works, counts, "backward") == 2 * total(works, counts, "forward") - embed
    assert total(works, counts, "weight_grad", "patch_embed") == embed
    assert total(works, counts, "input_grad", "patch_embed") == 0


def test_flash_attention_makes_its_scores_again(counts) -> None:
    flash, math = (
        total(module_works(vision_model(), TrainOptions(attention=kernel)), counts, "backward")
        for kernel in ("flash", "math")
    )
    layers = vision_model().llm.layers + vision_model().encoder.layers
    pairs = sum(int(attention_work(layer.attention).of(counts)[0]) for layer in layers)
    assert flash - math == pairs // 2


def test_a_frozen_prefix_has_no_backward_and_what_follows_keeps_its_own(counts) -> None:
    free, frozen = (module_works(vision_model(), TrainOptions(frozen=names)) for names in ((), ("encoder",)))
    assert total(frozen, counts, "backward", "encoder") == total(frozen, counts, "backward", "patch_embed") == 0
    for role in ("projector", "llm", "head"):
        assert total(frozen, counts, "backward", role) == total(free, counts, "backward", role) > 0


def test_a_frozen_llm_still_passes_gradients_to_the_projector(counts) -> None:
    works = module_works(vision_model(), TrainOptions(frozen=("encoder", "llm"), attention="math"))
    assert total(works, counts, "weight_grad", "llm") == total(works, counts, "weight_grad", "head") == 0
    assert total(works, counts, "input_grad", "head") == total(works, counts, "forward", "head")
    # Scores and weighted values have two inputs each, products of a frozen matrix one.
    assert total(works, counts, "input_grad", "llm") == total(works, counts, "forward", "llm") + total_pairs(counts)


def total_pairs(counts) -> int:
    return sum(int(attention_work(layer.attention).of(counts)[0]) for layer in vision_model().llm.layers)


def test_a_model_that_trains_nothing_has_no_backward(counts) -> None:
    works = module_works(vision_model(), TrainOptions(frozen=("encoder", "projector", "llm"), recompute=("all",)))
    assert total(works, counts, "backward") == 0
    assert total(works, counts, "forward") > 0


def test_recomputation_adds_the_forward_to_the_backward_and_to_nothing_else(counts) -> None:
    plain = module_works(vision_model())
    again = module_works(vision_model(), TrainOptions(recompute=("llm",)))
    extra = total(again, counts, "backward") - total(plain, counts, "backward")
    assert extra == total(plain, counts, "forward", "llm")
    assert total(again, counts, "weight_grad") == total(plain, counts, "weight_grad")


def test_recomputing_a_frozen_prefix_costs_nothing(counts) -> None:
    works = module_works(vision_model(), TrainOptions(frozen=("encoder",), recompute=("all",)))
    assert total(works, counts, "backward", "encoder") == 0


def test_adapters_replace_the_weight_gradients_of_the_llm(counts) -> None:
    rank, tokens = 2, 40
    options = TrainOptions(lora_rank=rank, frozen=("encoder", "projector"), attention="math")
    plain, adapted = module_works(vision_model()), module_works(vision_model(), options)
    widths = [(DIM, 12), (DIM, 6), (DIM, 6), (12, DIM), (DIM, HIDDEN), (DIM, HIDDEN), (HIDDEN, DIM)]
    extra = 2 * 2 * tokens * rank * sum(sum(pair) for pair in widths)
    assert total(adapted, counts, "forward", "llm") - total(plain, counts, "forward", "llm") == extra
    assert total(adapted, counts, "weight_grad", "llm") == extra
    assert total(adapted, counts, "weight_grad", "head") == 0
    # Nothing before the first layer has a gradient: its q, k and v make none for their input.
    missing = 2 * tokens * DIM * (12 + 6 + 6) + 3 * 2 * tokens * DIM * rank
    full = total(plain, counts, "forward", "llm") + extra + total_pairs(counts)
    assert total(adapted, counts, "input_grad", "llm") == full - missing


def test_shared_key_value_heads_shrink_projections_and_not_attention(counts) -> None:
    few, many = text_layer(num_kv_heads=1), text_layer(num_kv_heads=4)
    assert attention_work(few.attention) == attention_work(many.attention)
    assert sum(linear.out_dim for linear in few.attention.linears("tokens")) == DIM + 12 + 2 * 3
    assert sum(linear.out_dim for linear in many.attention.linears("tokens")) == DIM + 12 + 2 * 12


def test_a_token_runs_through_its_active_experts_the_router_and_the_shared_part(counts) -> None:
    mlp = MLPShape(dim=DIM, hidden=5, num_experts=16, active_experts=3, shared_hidden=7, shared_gate=True)
    flops = sum(2 * linear.in_dim * linear.out_dim * linear.copies for linear in mlp.linears("tokens"))
    assert flops == 2 * (3 * 3 * DIM * 5 + 16 * DIM + 3 * DIM * 7 + DIM)
    assert mlp.num_parameters == 16 * 3 * DIM * 5 + 16 * DIM + 3 * DIM * 7 + DIM


def test_latent_attention_compresses_keys_and_values(counts) -> None:
    attention = AttentionShape(
        dim=DIM, num_heads=4, num_kv_heads=4, head_dim=6, value_dim=5, q_rank=3, kv_rank=2, rope_dim=2
    )
    shapes = [(linear.in_dim, linear.out_dim) for linear in attention.linears("tokens")]
    assert shapes == [(DIM, 3), (3, 24), (DIM, 2 + 2), (2, 4 * (6 - 2 + 5)), (20, DIM)]
    assert int(attention_work(attention).of(counts)[0]) == 2 * (24 + 20) * 40**2 // 2


@pytest.mark.parametrize("tokens", [1, 10, 16, 17, 40])
def test_a_sliding_window_costs_the_pairs_inside_it(counts_of, tokens: int) -> None:
    """Token i sees min(i + 1, 16) others; half of the diagonal is left out, as in l^2 / 2."""
    work = attention_work(text_layer(window=16).attention)
    pairs = sum(min(position + 1, 16) for position in range(tokens)) - min(tokens, 16) / 2
    assert int(work.of(counts_of([tokens]))[0]) == 4 * 12 * pairs


def test_counting_all_pairs_ignores_masks_and_windows(counts) -> None:
    works = attention_work(text_layer(window=16).attention, "all")
    assert int(works.of(counts)[0]) == 2 * (12 + 12) * 40**2


def test_the_head_runs_on_labels_or_on_all_positions(counts) -> None:
    labels, everything = (
        total(module_works(vision_model(), TrainOptions(head_on=where)), counts, "forward", "head")
        for where in ("labels", "all")
    )
    assert everything == 2 * labels


def test_layers_whose_output_nobody_reads_run_forward_only(counts) -> None:
    shape = vision_model()
    idle = replace(shape, encoder=replace(shape.encoder, idle_layers=1))
    works = module_works(idle)
    last = next(work for work in works if work.name == "encoder.1")
    assert last.forward.flops
    assert not last.backward.flops


def test_tied_embeddings_are_frozen_by_either_name() -> None:
    for name in ("embedding", "head"):
        options = TrainOptions(frozen=(name,))
        assert not options.trains("head", tied=True)
        assert not options.trains("embedding", tied=True)
        assert options.trains("head") == (name != "head")


def test_work_adds_up_by_unit(counts) -> None:
    work = attention_work(text_layer().attention)
    assert (work + work).of(counts).tolist() == (2 * work.of(counts)).tolist()
    assert Work().of(counts).tolist() == [0]
    assert work.of(counts).dtype == np.int64


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"frozen": ("tower",)}, "frozen=.*modules are patch_embed, encoder"),
        ({"frozen": "llm"}, r"frozen='llm' is one text.*frozen=\('llm',\)"),
        ({"recompute": "all"}, r"recompute='all' is one text.*recompute=\('all',\)"),
        ({"recompute": ("embedding",)}, "recompute=.*modules are encoder"),
        ({"lora_rank": -1}, "lora_rank=-1"),
    ],
)
def test_options_that_name_nothing_are_refused(options: dict[str, object], text: str) -> None:
    with pytest.raises(CostModelError, match=text):
        TrainOptions(**options)


@pytest.mark.parametrize("name", FREEZABLE)
def test_every_module_that_can_be_frozen_loses_its_weight_gradients(counts, name: str) -> None:
    works = module_works(vision_model(), TrainOptions(frozen=(name,)))
    assert total(works, counts, "weight_grad", name) == 0
