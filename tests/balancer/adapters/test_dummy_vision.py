"""The vision tower of a transformers model runs equally often in every forward, and nothing else changes."""

import copy
from collections.abc import Iterator, Mapping
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.torch

from torch import nn  # noqa: E402
from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration  # noqa: E402

from balancer.adapters.dummy_vision import DummyVision, run_dummy_vision  # noqa: E402
from balancer.errors import BalancerError  # noqa: E402

IMAGE, VIDEO, DIM = 90, 91, 32
KINDS = list(product((False, True), (False, True)))  # with an image, with a video

Batch = dict[str, Any]


@pytest.fixture(scope="module")
def qwen() -> nn.Module:
    """Qwen2.5-VL with one layer each, random weights."""
    torch.manual_seed(0)
    return Qwen2_5_VLForConditionalGeneration(
        Qwen2_5_VLConfig(
            text_config={
                "vocab_size": 96,
                "hidden_size": DIM,
                "intermediate_size": DIM,
                "num_hidden_layers": 1,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "rope_parameters": {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0},
                "bos_token_id": 0,
                "eos_token_id": 1,
                "pad_token_id": 2,
            },
            vision_config={
                "depth": 1,
                "hidden_size": DIM,
                "intermediate_size": DIM,
                "num_heads": 2,
                "out_hidden_size": DIM,
                "patch_size": 2,
                "temporal_patch_size": 2,
                "window_size": 8,
                "fullatt_block_indexes": [0],
            },
            image_token_id=IMAGE,
            video_token_id=VIDEO,
        )
    )


@pytest.fixture
def hooks(qwen: nn.Module) -> Iterator[DummyVision]:
    made = run_dummy_vision(qwen)
    yield made
    made.remove()
    qwen.zero_grad(set_to_none=True)


def batch(image: bool, video: bool) -> Batch:
    """Twelve tokens; an image of two visual tokens, a video of three."""
    ids = torch.arange(3, 15).reshape(1, -1)
    made: Batch = {"position_ids": torch.arange(12).repeat(3, 1, 1), "use_cache": False}
    if image:
        ids[0, 1:3] = IMAGE
        made |= {"pixel_values": torch.rand(8, 24), "image_grid_thw": torch.tensor([[1, 2, 4]])}
    if video:
        ids[0, 5:8] = VIDEO
        made |= {"pixel_values_videos": torch.rand(12, 24), "video_grid_thw": torch.tensor([[1, 2, 6]])}
    return {**made, "input_ids": ids}


def calls_of(tower: nn.Module) -> list[int]:
    """Patches of every call from now on."""
    seen: list[int] = []
    tower.register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
    return seen


@pytest.mark.parametrize(("image", "video"), KINDS)
def test_every_forward_calls_the_tower_twice(qwen: nn.Module, hooks: DummyVision, image: bool, video: bool) -> None:
    seen = calls_of(qwen.model.visual)
    qwen(**batch(image, video))
    assert sorted(seen) == sorted([8 if image else 4, 12 if video else 4])


@pytest.mark.parametrize(("image", "video"), KINDS)
def test_logits_and_gradients_are_what_they_are_without(qwen: nn.Module, image: bool, video: bool) -> None:
    inputs = batch(image, video)

    def run() -> tuple[Any, dict[str, Any]]:
        qwen.zero_grad(set_to_none=True)
        logits = qwen(**inputs).logits
        logits.square().mean().backward()
        return logits.detach(), {name: parameter.grad for name, parameter in qwen.named_parameters()}

    expected, wanted = run()
    hooks = run_dummy_vision(qwen)
    try:
        logits, found = run()
    finally:
        hooks.remove()
    assert torch.equal(logits, expected)
    for name, gradient in wanted.items():
        assert found[name] is not None, name
        if gradient is None:
            assert "visual" in name
            assert not found[name].any()
        else:
            torch.testing.assert_close(found[name], gradient, rtol=0, atol=1e-7)


def test_without_videos_a_forward_calls_the_tower_once(qwen: nn.Module) -> None:
    hooks = run_dummy_vision(qwen, videos=False)
    seen = calls_of(qwen.model.visual)
    qwen(**batch(False, False))
    qwen(**batch(True, False))
    hooks.remove()
    assert seen == [4, 8]


def test_removed_hooks_leave_the_model_as_it_was(qwen: nn.Module) -> None:
    run_dummy_vision(qwen).remove()
    seen = calls_of(qwen.model.visual)
    qwen(**batch(False, False))
    assert seen == []


def test_a_forward_that_fails_leaves_nothing_for_the_next(qwen: nn.Module, hooks: DummyVision) -> None:
    wrong = batch(True, False)
    wrong["pixel_values"] = wrong["pixel_values"][:, :5]
    with pytest.raises(RuntimeError):
        qwen(**wrong)
    seen = calls_of(qwen.model.visual)
    qwen.get_input_embeddings()(torch.tensor([1]))
    assert seen == []


def test_positional_arguments_are_understood(qwen: nn.Module, hooks: DummyVision) -> None:
    inputs = batch(False, False)
    seen = calls_of(qwen.model.visual)
    qwen.model(inputs["input_ids"], None, inputs["position_ids"], use_cache=False)
    assert seen == [4, 4]


def test_embeddings_given_by_the_caller_are_refused(qwen: nn.Module, hooks: DummyVision) -> None:
    embeds = torch.zeros(1, 4, DIM)
    with pytest.raises(
        BalancerError,
        match=r"Qwen2_5_VLModel is called without pixel_values and pixel_values_videos and without input_ids: .*"
        "pass input_ids, not inputs_embeds",
    ):
        qwen(inputs_embeds=embeds, position_ids=torch.arange(4).repeat(3, 1, 1))


def test_a_wrapped_model_is_found_and_a_copy_has_hooks_of_its_own(qwen: nn.Module) -> None:
    wrapped = nn.ModuleDict({"module": copy.deepcopy(qwen)})
    run_dummy_vision(wrapped)
    copied = copy.deepcopy(wrapped)
    first, second = (calls_of(one["module"].model.visual) for one in (wrapped, copied))
    copied["module"](**batch(False, False))
    assert (first, second) == ([], [4, 4])


class Tiles(nn.Module):
    """A model whose tower takes pictures [n, 3, 4, 4] and says so nowhere."""

    def __init__(self, vision_config: object = None) -> None:
        super().__init__()
        self.table, self.tower = nn.Embedding(8, 2), nn.Linear(48, 2)
        self.config = SimpleNamespace(vision_config=vision_config)

    def get_input_embeddings(self) -> nn.Module:
        return self.table

    def get_image_features(self, pixel_values: Any) -> Mapping[str, Any]:
        features = self.tower(pixel_values.flatten(1))
        return {"pooled": (features, None), "counts": [torch.tensor([1])]}

    def forward(self, input_ids: Any = None, pixel_values: Any = None) -> Any:
        embeds = self.table(input_ids)
        return embeds if pixel_values is None else embeds + self.get_image_features(pixel_values)["pooled"][0].sum()


def test_a_tower_of_another_kind_is_refused_until_its_dummy_is_given() -> None:
    model = Tiles(SimpleNamespace(patch_size=4, in_channels=3))
    with pytest.raises(BalancerError, match=r"the smallest image of Tiles cannot be derived: .*; give dummy=\{"):
        run_dummy_vision(model)
    run_dummy_vision(model, dummy={"pixel_values": torch.zeros(1, 3, 4, 4)})
    model(torch.tensor([1, 2])).sum().backward()
    assert model.tower.weight.grad is not None
    assert not model.tower.weight.grad.any()
    assert not model.tower.bias.grad.any()
    model(torch.tensor([1, 2]), torch.ones(1, 3, 4, 4)).sum().backward()
    assert model.tower.weight.grad.any()


def test_a_model_without_a_tower_is_refused() -> None:
    with pytest.raises(BalancerError, match="Linear has no get_image_features and no pixel_values in its forward"):
        run_dummy_vision(nn.Linear(2, 2))
