"""Built-in model sizes: `demo` trains on a laptop in minutes, `check` is as small as every mechanism allows.

`demo`, 1.25 M parameters, float32: a step of 23,300 patches (images of 18 x 18) and 10,000 LLM tokens in 8
micro-batches took 2.3 core-seconds forward and backward (encoder 1.1, LLM 1.2), so about 1.2 s on two cores. Images of
28 x 28 patches cost the encoder about half as much again, and larger micro-batches pay for fresh memory.
"""

from trainer.errors import ConfigError
from trainer.model.llm import LLMConfig
from trainer.model.vit import VisionConfig
from trainer.model.vlm import ModelConfig

# Byte-level vocabulary with seven special ids and one spare (dataloaders.tokenizer).
_VOCAB_SIZE = 264

PRESETS: dict[str, ModelConfig] = {
    "demo": ModelConfig(
        vision=VisionConfig(dim=64, depth=4, num_heads=2, mlp_dim=192, out_dim=128, full_attention_layers=(1, 3)),
        llm=LLMConfig(
            vocab_size=_VOCAB_SIZE,
            dim=128,
            depth=4,
            num_heads=4,
            num_kv_heads=2,
            mlp_dim=384,
            mrope_section=(4, 6, 6),
            rope_theta=10_000.0,
        ),
    ),
    "check": ModelConfig(
        vision=VisionConfig(dim=16, depth=2, num_heads=2, mlp_dim=24, out_dim=24, full_attention_layers=(1,)),
        llm=LLMConfig(
            vocab_size=_VOCAB_SIZE,
            dim=24,
            depth=4,
            num_heads=2,
            num_kv_heads=1,
            mlp_dim=32,
            mrope_section=(2, 2, 2),
            rope_theta=10_000.0,
        ),
    ),
}


def preset(name: str) -> ModelConfig:
    """The built-in config called `name`.

    Raises:
        ConfigError: no such preset.
    """
    if name not in PRESETS:
        raise ConfigError(f"model preset {name!r} does not exist; choose one of {', '.join(sorted(PRESETS))}")
    return PRESETS[name]
