"""Samples with media of every kind, and tiny transformers models with random weights, in float32."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from dataloaders.chat import IGNORED_LABEL, MediaSpan
from dataloaders.positions import mrope_positions
from dataloaders.sample import LoadedSample

IMAGE, VIDEO, START, END = 90, 91, 92, 93
PATCH_DIM = 3 * 2 * 14 * 14
Item = tuple[int, tuple[int, int, int], int]  # text tokens in front, grid, placeholder


def make_sample(items: Sequence[Item] = (), *, num_text: int = 6, seed: int = 0, **changes: Any) -> LoadedSample:
    """A sample whose media stand between runs of random text; half of its tail is learned."""
    rng = np.random.Generator(np.random.Philox(seed))
    tokens: list[int] = []
    spans = []
    for index, (num_before, (t, h, w), placeholder) in enumerate(items):
        tokens += [*rng.integers(0, 80, num_before).tolist(), START]
        spans.append(MediaSpan(start=len(tokens), count=t * h * w // 4, media_index=index))
        tokens += [placeholder] * spans[-1].count + [END]
    tokens += rng.integers(0, 80, num_text).tolist()
    grids = np.array([grid for _, grid, _ in items], dtype=np.int64).reshape(-1, 3)
    labels = np.full(len(tokens), IGNORED_LABEL, dtype=np.int32)
    learned = max(num_text // 2, 1)
    labels[-1 - learned : -1] = tokens[-learned:]
    values = {
        "sample_id": seed,
        "place": f"shard.tar, {seed:03d}",
        "tokens": np.array(tokens, dtype=np.int32),
        "labels": labels,
        "position_ids": mrope_positions(len(tokens), spans, grids, time_steps=[2.0] * len(items)),
        "visual_index": np.concatenate(
            [np.arange(span.start, span.start + span.count) for span in spans] or [np.zeros(0, dtype=np.int64)]
        ),
        "patches": rng.normal(size=(int(grids.prod(axis=1).sum()), PATCH_DIM)).astype(np.float32),
        "grids": grids,
    }
    return LoadedSample(**{**values, **changes})


@pytest.fixture(scope="session")
def sample_of() -> Callable[..., LoadedSample]:
    """`sample_of([(text tokens in front, grid, placeholder), ...], num_text=6, seed=0, **fields)`."""
    return make_sample


@pytest.fixture(scope="session")
def all_kinds() -> list[LoadedSample]:
    """Text only, an image, a video, and a video between two images."""
    return [
        make_sample(num_text=7, seed=1),
        make_sample([(3, (1, 4, 8), IMAGE)], seed=2),
        make_sample([(2, (3, 4, 4), VIDEO)], num_text=9, seed=3),
        make_sample([(1, (1, 4, 4), IMAGE), (2, (2, 6, 4), VIDEO), (0, (1, 2, 2), IMAGE)], seed=4),
    ]


@pytest.fixture(scope="session")
def qwen_vl() -> Any:
    """Qwen2.5-VL of two layers, sdpa, which the tests may give gradients but not other weights."""
    torch = pytest.importorskip("torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        qwen = pytest.importorskip("transformers.models.qwen2_5_vl.modeling_qwen2_5_vl")
        config = qwen.Qwen2_5_VLConfig(
            vision_config={
                "depth": 2,
                "hidden_size": 32,
                "num_heads": 2,
                "intermediate_size": 40,
                "out_hidden_size": 48,
                "fullatt_block_indexes": [1],
            },
            text_config={
                "vocab_size": 96,
                "hidden_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "intermediate_size": 56,
                "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [1, 2, 3]},
            },
            image_token_id=IMAGE,
            video_token_id=VIDEO,
            vision_start_token_id=START,
            vision_end_token_id=END,
            attn_implementation="sdpa",
        )
        torch.manual_seed(0)
        model = qwen.Qwen2_5_VLForConditionalGeneration(config).eval()
    return _spread(torch, model)


@pytest.fixture(scope="session")
def text_model() -> Callable[..., Any]:
    """`text_model(attn_implementation="sdpa", **config)`: a Qwen2 of two layers."""
    torch = pytest.importorskip("torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers = pytest.importorskip("transformers")

    def make(attn_implementation: str = "sdpa", **config: Any) -> Any:
        sizes = {
            "vocab_size": 96,
            "hidden_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "intermediate_size": 56,
        }
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            whole = transformers.Qwen2Config(**{**sizes, **config}, attn_implementation=attn_implementation)
            return _spread(torch, transformers.Qwen2ForCausalLM(whole).eval())

    return make


def _spread(torch: Any, model: Any) -> Any:
    """Weights ten times as large as at the start of a training: what one token does to another then shows."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(10.0)
    return model
