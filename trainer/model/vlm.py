"""The whole model: config, the split into pipeline pieces, and weights that do not depend on the split.

    pp_size 1     rank 0: visual + llm (all layers)
    pp_size P     rank 0: visual     rank r: llm layers of part r - 1 of P - 1

Every parameter is drawn from its own generator, seeded by (seed, canonical name): any split gives the same bits.
Canonical names: `visual.*`, `llm.embed_tokens.weight`, `llm.layers.<global index>.*`, `llm.norm.weight`,
`llm.lm_head.weight`. A rank holds at most one LLM stage, so its `state_dict()` has canonical names as it is.
"""

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from balancer.layout import Layout
from trainer.errors import ConfigError
from trainer.model.llm import LLMConfig, LLMStage
from trainer.model.vit import VisionConfig, VisionTower

FORMAT_VERSION = 1
VISUAL, LLM = "visual", "llm"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A vision tower and a language model that fit together.

    Raises:
        ConfigError: the tower's out_dim is not the width of the LLM.
    """

    vision: VisionConfig
    llm: LLMConfig

    def __post_init__(self) -> None:
        if self.vision.out_dim != self.llm.dim:
            raise ConfigError(f"vision out_dim={self.vision.out_dim} must equal llm dim={self.llm.dim}")

    def to_json(self) -> str:
        """Text with sorted keys, for a run folder."""
        return json.dumps({"format_version": FORMAT_VERSION, **asdict(self)}, indent=2, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> "ModelConfig":
        """Read `to_json`'s text.

        Raises:
            ConfigError: not JSON, another format version, unknown or missing fields, or sizes that do not fit.
        """
        try:
            data = json.loads(text)
            version = data.pop("format_version")
            vision, llm = _fields(data.pop("vision")), _fields(data.pop("llm"))
            if version != FORMAT_VERSION or data:
                raise ConfigError(
                    f"model config: format_version {version}, extra keys {sorted(data)}; this version reads 1"
                )
            return cls(vision=VisionConfig(**vision), llm=LLMConfig(**llm))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"model config cannot be read ({error!r}); write it with ModelConfig.to_json") from error


def _fields(data: dict[str, Any]) -> dict[str, Any]:
    """JSON has lists where the configs have tuples."""
    return {name: tuple(value) if isinstance(value, list) else value for name, value in data.items()}


def llm_layers_per_stage(depth: int, num_stages: int) -> tuple[int, ...]:
    """Layers of each LLM stage: as even as possible, larger parts first since the last stage also has the head.

    Raises:
        ConfigError: fewer layers than stages.
    """
    if not 1 <= num_stages <= depth:
        raise ConfigError(f"{depth} LLM layers cannot fill {num_stages} stages; use pp_size <= {depth + 1}")
    share, extra = divmod(depth, num_stages)
    return tuple(share + (stage < extra) for stage in range(num_stages))


def build_pieces(
    config: ModelConfig,
    layout: Layout,
    pp_rank: int,
    *,
    seed: int = 0,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> nn.ModuleDict:
    """The modules of one pipeline rank, initialised.

    Args:
        config: the whole model.
        layout: gives the split; every DP replica holds the same.
        pp_rank: rank within the replica.
        seed: of the weights.
        device, dtype: of the parameters; values are drawn in float32 on the CPU, then converted.

    Returns:
        A ModuleDict with "visual" (pp_rank 0), "llm" (pp_rank > 0), or both (pp_size 1); its parameter names are
        canonical.

    Raises:
        ConfigError: a rank outside the layout, more stages than layers, tied embeddings over several LLM stages.
    """
    if not 0 <= pp_rank < layout.pp_size:
        raise ConfigError(f"pp_rank={pp_rank} is outside pp_size={layout.pp_size}")
    pieces = nn.ModuleDict()
    num_llm_stages = layout.num_stages - 1
    layers = llm_layers_per_stage(config.llm.depth, num_llm_stages)
    if config.llm.tie_embeddings and num_llm_stages > 1:
        raise ConfigError(
            "tie_embeddings needs the embedding and the head on one stage; use pp_size <= 2 or untie them"
        )
    with torch.device("meta"):  # no draw from the global generator
        for stage, rank in enumerate(layout.stage_ranks()):
            if rank != pp_rank:
                continue
            if stage == 0:
                pieces[VISUAL] = VisionTower(config.vision)
            else:
                first = sum(layers[: stage - 1])
                pieces[LLM] = LLMStage(
                    config.llm,
                    first_layer=first,
                    last_layer=first + layers[stage - 1] - 1,
                    has_embedding=stage == 1,
                    has_head=stage == num_llm_stages,
                )
    pieces.to_empty(device=device).to(dtype)
    init_parameters(pieces, config, seed=seed)
    return pieces


def init_parameters(pieces: nn.ModuleDict, config: ModelConfig, *, seed: int) -> None:
    """Fill every parameter in place from (seed, canonical name).

    Norm weights are 1 and biases 0. Matrices are normal with std fan_in ** -0.5; those that write into a residual
    stream are divided by sqrt(2 * depth) of their tower (GPT-2); the head starts small, so the first loss is close to
    log(vocab_size).
    """
    with torch.no_grad():
        for name, parameter in pieces.named_parameters():
            parameter.copy_(_initial_value(name, parameter.shape, config, seed))


def _initial_value(name: str, shape: torch.Size, config: ModelConfig, seed: int) -> Tensor:
    if name.endswith(".bias"):
        return torch.zeros(shape)
    if len(shape) == 1:
        return torch.ones(shape)
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    return torch.randn(shape, generator=generator) * _initial_std(name, shape, config)


def _initial_std(name: str, shape: torch.Size, config: ModelConfig) -> float:
    if name.endswith(("embed_tokens.weight", "lm_head.weight")):
        return 0.02
    depth = config.vision.depth if name.startswith(VISUAL) else config.llm.depth
    residual = name.endswith(("attn.proj.weight", "o_proj.weight", "down_proj.weight"))
    return float((shape[1] * (2 * depth if residual else 1)) ** -0.5)
