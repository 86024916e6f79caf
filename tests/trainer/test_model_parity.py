"""The model equals transformers' Qwen2.5-VL with the same weights: an image, two images, a video, all in one pack.

Conscious differences: the patch embedding is a matrix where theirs is a convolution; in bf16 our LLM keeps rotary
angles in float32 where theirs rounds them.
"""

import warnings

import pytest

torch = pytest.importorskip("torch")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    qwen = pytest.importorskip("transformers.models.qwen2_5_vl.modeling_qwen2_5_vl")

from balancer.layout import Layout  # noqa: E402
from trainer.loss import head_cross_entropy_sum  # noqa: E402
from trainer.model import LLMConfig, ModelConfig, VisionConfig, build_pieces  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]  # warnings of the other library

IMAGE, VIDEO, START, END = 90, 91, 92, 93
CONFIG = ModelConfig(
    vision=VisionConfig(dim=32, depth=3, num_heads=2, mlp_dim=40, out_dim=48, full_attention_layers=(1,)),
    llm=LLMConfig(
        vocab_size=96,
        dim=48,
        depth=2,
        num_heads=4,
        num_kv_heads=2,
        mlp_dim=56,
        mrope_section=(1, 2, 3),
        rope_theta=10_000.0,
    ),
)
# (tokens before each item, grid, placeholder); windows of 4 x 4 blocks with borders, and a video of 3 slices
SAMPLES = {
    "one image": [(4, (1, 10, 12), IMAGE)],
    "two images": [(2, (1, 4, 6), IMAGE), (3, (1, 12, 10), IMAGE)],
    "video": [(5, (3, 6, 10), VIDEO)],
    "text": [],
}


@pytest.fixture(scope="module")
def theirs():
    vision, llm = CONFIG.vision, CONFIG.llm
    config = qwen.Qwen2_5_VLConfig(
        vision_config={
            "depth": vision.depth,
            "hidden_size": vision.dim,
            "num_heads": vision.num_heads,
            "intermediate_size": vision.mlp_dim,
            "out_hidden_size": vision.out_dim,
            "fullatt_block_indexes": list(vision.full_attention_layers),
            "tokens_per_second": 2,
        },
        text_config={
            "vocab_size": llm.vocab_size,
            "hidden_size": llm.dim,
            "num_hidden_layers": llm.depth,
            "num_attention_heads": llm.num_heads,
            "num_key_value_heads": llm.num_kv_heads,
            "intermediate_size": llm.mlp_dim,
            "rms_norm_eps": llm.norm_eps,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": llm.rope_theta,
                "mrope_section": list(llm.mrope_section),
            },
        },
        image_token_id=IMAGE,
        video_token_id=VIDEO,
        vision_start_token_id=START,
        vision_end_token_id=END,
        attn_implementation="eager",
    )
    torch.manual_seed(0)
    model = qwen.Qwen2_5_VLForConditionalGeneration(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "ln_q" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0, 0.15)
    return model


def our_name(name: str) -> str:
    return (
        name.replace("model.visual.", "visual.")
        .replace("model.language_model.", "llm.")
        .replace("lm_head.", "llm.lm_head.")
    )


@pytest.fixture(scope="module")
def ours(theirs):
    pieces = build_pieces(CONFIG, Layout(), 0)
    weights = {our_name(name): value for name, value in theirs.state_dict().items()}
    weights["visual.patch_embed.proj.weight"] = weights["visual.patch_embed.proj.weight"].flatten(1)
    pieces.load_state_dict(weights, strict=True)
    return pieces


def sample(items, seed: int):
    """(tokens, patches, grids, visual_index); text around every item."""
    generator = torch.Generator().manual_seed(seed)

    def text(count):
        return torch.randint(0, 80, (count,), generator=generator).tolist()

    tokens = []
    for before, (t, h, w), placeholder in items:
        tokens += [*text(before), START, *[placeholder] * (t * h * w // 4), END]
    tokens = torch.tensor([*tokens, *text(6)])
    grids = torch.tensor([grid for _, grid, _ in items], dtype=torch.int64).reshape(-1, 3)
    patches = torch.randn(int(grids.prod(1).sum()), 1176, generator=generator)
    return tokens, patches, grids, ((tokens == IMAGE) | (tokens == VIDEO)).nonzero().squeeze(1)


def run_theirs(model, name: str, seed: int):
    """(logits [T, V], position_ids [3, T]) of one sample."""
    tokens, patches, grids, _ = sample(SAMPLES[name], seed)
    kind = "video" if name == "video" else "image"
    media = {}
    if len(grids):
        pixels = "pixel_values_videos" if kind == "video" else "pixel_values"
        media = {pixels: patches, f"{kind}_grid_thw": grids}
    types = torch.zeros_like(tokens)
    types[tokens == IMAGE], types[tokens == VIDEO] = 1, 2
    extra = {"second_per_grid_ts": torch.tensor([1.0])} if kind == "video" else {}
    positions, _ = model.model.get_rope_index(
        tokens[None],
        mm_token_type_ids=types[None],
        attention_mask=torch.ones_like(tokens)[None],
        **{f"{kind}_grid_thw": grids for _ in range(bool(len(grids)))},
        **extra,
    )
    logits = model(input_ids=tokens[None], position_ids=positions, use_cache=False, **media).logits[0]
    return logits, positions[:, 0]


def run_ours(pieces, names, positions):
    """Logits of all samples in one pack."""
    drawn = [sample(SAMPLES[name], seed) for seed, name in enumerate(names)]
    lengths = torch.tensor([len(tokens) for tokens, *_ in drawn])
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    patches = torch.cat([d[1] for d in drawn])
    visual = pieces["visual"](patches, torch.cat([d[2] for d in drawn])) if len(patches) else None
    hidden = pieces["llm"](
        torch.cat([d[0] for d in drawn]),
        position_ids=torch.cat(positions, dim=1),
        cu_seqlens=starts.int(),
        visual=visual,
        visual_index=torch.cat([d[3] + start for d, start in zip(drawn, starts[:-1], strict=True)]),
    )
    return hidden, starts


@pytest.mark.parametrize("name", list(SAMPLES))
def test_logits_of_one_sample_equal_transformers(theirs, ours, name):
    with torch.no_grad():
        expected, positions = run_theirs(theirs, name, 0)
        hidden, _ = run_ours(ours, [name], [positions])
        got = ours["llm"].logits(hidden)
    assert expected.std() > 0.1  # the comparison is not between zeros
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=2e-5)


def test_visual_embeddings_equal_transformers(theirs, ours):
    _, patches, grids, _ = sample(SAMPLES["two images"], 1)
    with torch.no_grad():
        expected = theirs.model.visual(patches, grid_thw=grids).pooler_output
        torch.testing.assert_close(ours["visual"](patches, grids), expected, rtol=1e-4, atol=1e-5)


def test_a_pack_of_all_samples_equals_transformers_one_by_one_in_logits_and_gradients(theirs, ours):
    names = list(SAMPLES)
    theirs.zero_grad()
    ours.zero_grad()
    single = [run_theirs(theirs, name, seed) for seed, name in enumerate(names)]
    hidden, starts = run_ours(ours, names, [positions for _, positions in single])
    labels = torch.cat([sample(SAMPLES[name], seed)[0] for seed, name in enumerate(names)]).roll(-1)
    expected = torch.cat([logits for logits, _ in single])
    torch.testing.assert_close(ours["llm"].logits(hidden), expected, rtol=1e-4, atol=2e-5)
    torch.nn.functional.cross_entropy(expected, labels, reduction="sum").backward()
    head_cross_entropy_sum(hidden, ours["llm"].head_weight, labels, torch.ones(int(starts[-1]))).backward()
    mine = dict(ours.named_parameters())
    for name, parameter in theirs.named_parameters():
        gradient = mine[our_name(name)].grad.view_as(parameter)
        scale = parameter.grad.abs().max().item()
        torch.testing.assert_close(
            gradient, parameter.grad, rtol=0, atol=1e-4 * scale + 1e-6, msg=lambda m, n=name: f"{n}: {m}"
        )
