"""The closed-form cost of this package's own model: FLOPs against torch's counter, bytes against what autograd keeps.

Attention is exchanged for plain products per segment, which the counter sees: what it finds for documents, windows and
temporal slices must be the sums of squares of the counts. Bytes are those of unique storages that autograd saves,
without parameters, plus each stage's output (`torch.autograd.graph.saved_tensors_hooks`).
"""

import json
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest

from balancer.cost_model import CostModel
from balancer.counts import StepCounts
from balancer.flops import TrainOptions, module_works
from balancer.layout import Layout, ParallelSpec
from balancer.model_config import model_shape, shape_from_config
from balancer.model_shape import ModelShape

pytestmark = pytest.mark.torch
torch = pytest.importorskip("torch")

from torch.utils.flop_counter import FlopCounterMode  # noqa: E402

from trainer.loss import head_cross_entropy_sum  # noqa: E402
from trainer.model import ModelConfig, build_pieces, llm, preset, vit  # noqa: E402
from trainer.model_source import cost_model_for  # noqa: E402

BYTES_TOLERANCE = 0.02
GRIDS = ((1, 18, 20), (2, 8, 12))
DOCUMENTS = (150, 70, 200)
DEMO, CHECK = preset("demo"), preset("check")
OTHER = ModelConfig(
    vision=vit.VisionConfig(dim=96, depth=5, num_heads=3, mlp_dim=250, out_dim=192, full_attention_layers=(2,)),
    llm=llm.LLMConfig(
        vocab_size=1000, dim=192, depth=5, num_heads=6, num_kv_heads=2, mlp_dim=520, mrope_section=(4, 6, 6)
    ),
)
CONFIGS = {"demo": DEMO, "check": CHECK, "other": OTHER}


def shape_of(config: ModelConfig) -> ModelShape:
    return shape_from_config(json.loads(config.to_json()), name="own")


def squares(bounds: "torch.Tensor") -> int:
    return sum((stop - start) ** 2 for start, stop in pairwise(bounds.tolist()))


def documents() -> "torch.Tensor":
    return torch.tensor([0, *np.cumsum(DOCUMENTS)], dtype=torch.int32)


def labels() -> "torch.Tensor":
    found = torch.full((sum(DOCUMENTS),), -100)
    found[::3] = 7
    return found


def counts(config: ModelConfig) -> StepCounts:
    """One sample per document; all media belong to the first."""
    order = vit.vision_order(GRIDS, merge=2, window_cells=config.vision.window_cells)
    labelled = [int((part >= 0).sum()) for part in labels().split(DOCUMENTS)]
    patches = sum(t * h * w for t, h, w in GRIDS)

    def first(value: int) -> list[int]:
        return [value, 0, 0]

    return StepCounts(
        sample_ids=np.arange(3),
        llm_tokens=np.array(DOCUMENTS),
        label_tokens=np.array(labelled),
        visual_tokens=np.array(first(patches // 4)),
        patches=np.array(first(patches)),
        num_items=np.array(first(len(GRIDS))),
        full_total_sq=np.array(first(squares(order.full))),
        window_total_sq=np.array(first(squares(order.window))),
    )


def run(config: ModelConfig, layout: Layout, frozen: tuple[str, ...] = ()) -> Iterator[tuple["Kept", "torch.Tensor"]]:
    """(what autograd kept, output or loss) of every pipeline rank, forward only."""
    num_patches, num_tokens = sum(t * h * w for t, h, w in GRIDS), sum(DOCUMENTS)
    torch.manual_seed(0)
    hidden = torch.empty(0)
    for pp_rank in range(layout.pp_size):
        pieces = build_pieces(config, layout, pp_rank)
        for name, piece in pieces.items():
            piece.requires_grad_({"visual": "encoder"}.get(name, name) not in frozen)
        with Kept(pieces) as kept:
            if "visual" in pieces:
                hidden = pieces["visual"](torch.randn(num_patches, config.vision.patch_values), torch.tensor(GRIDS))
            if "llm" in pieces:
                stage = pieces["llm"]
                received = hidden.detach().requires_grad_()
                options = {"visual": received, "visual_index": torch.arange(num_patches // 4)}
                hidden = stage(
                    torch.randint(0, 100, (num_tokens,)) if stage.has_embedding else received,
                    position_ids=torch.arange(num_tokens).expand(3, num_tokens),
                    cu_seqlens=documents(),
                    **(options if stage.has_embedding else {}),
                )
            kept.add(hidden)
            result = hidden
            if "llm" in pieces and stage.has_head:
                result = head_cross_entropy_sum(hidden, stage.head_weight, labels(), torch.ones(num_tokens))
        yield kept, result


class Kept(torch.autograd.graph.saved_tensors_hooks):
    """Unique storages that autograd saves, parameters left out."""

    def __init__(self, pieces: "torch.nn.ModuleDict") -> None:
        super().__init__(self.add, lambda tensor: tensor)
        self._parameters = {parameter.untyped_storage().data_ptr() for parameter in pieces.parameters()}
        self._storages: dict[int, torch.UntypedStorage] = {}

    def add(self, tensor: "torch.Tensor") -> "torch.Tensor":
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._parameters:
            self._storages[storage.data_ptr()] = storage
        return tensor

    def __enter__(self) -> "Kept":
        super().__enter__()
        return self

    @property
    def num_bytes(self) -> int:
        return sum(storage.nbytes() for storage in self._storages.values())


def plain_attention(q, k, v, cu_seqlens, **_options):
    """Attention as products per segment, without a mask: what is counted does not depend on it."""
    parts = []
    for start, stop in pairwise(cu_seqlens.tolist()):
        # [L, H, D] -> [H, L, D]
        queries, keys, values = (part[start:stop].transpose(0, 1) for part in (q, k, v))
        keys, values = (part.repeat_interleave(q.shape[1] // k.shape[1], dim=0) for part in (keys, values))
        parts.append(((queries @ keys.transpose(1, 2)).softmax(-1) @ values).transpose(0, 1))
    return torch.cat(parts)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("pp_size", [2, 4])
def test_flops_of_every_rank_are_what_torch_counts(monkeypatch, name: str, pp_size: int) -> None:
    config, layout = CONFIGS[name], Layout(pp_size=pp_size)
    monkeypatch.setattr(vit, "packed_attention", plain_attention)
    monkeypatch.setattr(llm, "packed_attention", plain_attention)
    options = TrainOptions(causal_pairs="all", attention="math", recompute=("head",))
    works = module_works(shape_of(config), options)
    ours = [
        sum(int(getattr(work, part).of(counts(config)).sum()) for work in works) for part in ("forward", "backward")
    ]
    found = [0, 0]
    ranks = run(config, layout)
    for _ in range(pp_size):
        with FlopCounterMode(display=False) as forward:
            _, result = next(ranks)
        with FlopCounterMode(display=False) as backward:
            result.backward(torch.ones_like(result))
        found[0] += forward.get_total_flops()
        found[1] += backward.get_total_flops()
    assert found == ours


@pytest.mark.parametrize("name", CONFIGS)
def test_modelled_bytes_are_what_autograd_keeps(name: str) -> None:
    config, layout = CONFIGS[name], Layout(pp_size=4)
    modelled = cost_model_for(config, layout).activation_bytes(counts(config)).sum(axis=0)
    kept = np.array([kept.num_bytes for kept, _ in run(config, layout)])
    np.testing.assert_allclose(modelled, kept, rtol=BYTES_TOLERANCE)


def test_a_frozen_llm_keeps_fewer_bytes_and_a_frozen_encoder_none() -> None:
    layout, frozen = Layout(pp_size=3), ("encoder", "llm")
    model = CostModel.from_config(
        shape_of(OTHER), ParallelSpec.of(layout), frozen=("llm",), recompute=("head",), dtype_bytes=4
    )
    modelled = model.activation_bytes(counts(OTHER)).sum(axis=0)
    kept = [kept.num_bytes for kept, _ in run(OTHER, layout, frozen)]
    assert kept[0] < 0.02 * modelled[0]
    np.testing.assert_allclose(modelled[1:], kept[1:], rtol=0.05)


def test_the_trainers_cost_model_has_a_stage_per_rank_and_memory() -> None:
    for pp_size in (1, 2, 4):
        model = cost_model_for(DEMO, Layout(pp_size=pp_size))
        assert model.num_stages == max(pp_size, 2) == len(model.memory)
        assert not model.absolute
    whole, split = (cost_model_for(DEMO, Layout(pp_size=pp_size)).forward_ns(counts(DEMO)) for pp_size in (2, 4))
    np.testing.assert_allclose(whole[:, 1], split[:, 1:].sum(axis=1), atol=8)
    np.testing.assert_array_equal(whole[:, 0], split[:, 0])


def test_an_exported_folder_gives_the_shape_of_its_model(tmp_path) -> None:
    (tmp_path / "config.json").write_text(DEMO.to_json(), encoding="utf-8")
    shape = model_shape(tmp_path)
    matrices = sum(
        parameter.numel() for _, parameter in build_pieces(DEMO, Layout(), 0).named_parameters() if parameter.dim() > 1
    )
    assert shape.num_parameters == matrices
    assert shape.llm.tied == DEMO.llm.tie_embeddings
