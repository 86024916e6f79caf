"""The model as the executor sees it: stage -> piece, the edges between them, parameters by canonical name.

stage 0  vision tower   patches [P, d], grids      -> visual [V, dim]
stage 1  LLM part       tokens [T], visual         -> hidden [T, dim]        (first)
stage s  LLM part       hidden                     -> hidden                 (middle)
last     LLM part       ...                        -> loss_sum, a scalar; token_nll [T] without gradients
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager

import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from balancer.batch import MicroBatch
from balancer.layout import Layout
from balancer.plan import StepPlan
from trainer.errors import CheckpointError
from trainer.executor import LOSS, Edge, Piece
from trainer.loss import head_cross_entropy_sum, token_nll
from trainer.model import build_pieces
from trainer.model.vlm import LLM, VISUAL
from trainer.model_source import ModelSource

TOKEN_NLL = "token_nll"
VISUAL_EDGE, HIDDEN_EDGE = "visual", "hidden"
VISUAL_PREFIX = f"{VISUAL}."


class ModelPieces:
    """This rank's part of a model.

    Args:
        source: which model.
        modules: "visual" and / or "llm", as `build_pieces` makes them.
        layout, pp_rank: the split and this rank's place in it.
        autocast: run pieces in bf16 under CUDA autocast.
    """

    def __init__(
        self, source: ModelSource, modules: nn.ModuleDict, *, layout: Layout, pp_rank: int, autocast: bool = False
    ) -> None:
        self.source, self.modules, self._layout, self._pp_rank = source, modules, layout, pp_rank
        self._autocast = autocast
        parameter = next(modules.parameters())
        self.dtype, self.device = parameter.dtype, parameter.device

    @classmethod
    def build(
        cls,
        source: ModelSource,
        *,
        layout: Layout,
        pp_rank: int,
        seed: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        autocast: bool = False,
    ) -> "ModelPieces":
        """Pieces with initial weights from the seed or, where the model folder has them, from its weights."""
        modules = build_pieces(source.config, layout, pp_rank, seed=seed, device=device, dtype=dtype)
        if source.weights is not None:
            load_weights(modules, source)
        return cls(source, modules, layout=layout, pp_rank=pp_rank, autocast=autocast)

    def parameters(self) -> Iterator[nn.Parameter]:
        """Parameters in the order of `named_parameters`."""
        return (parameter for _, parameter in self.named_parameters())

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(canonical name, parameter)."""
        return self.modules.named_parameters()

    def zero_grad(self) -> None:
        """Forget all gradients."""
        self.modules.zero_grad(set_to_none=True)

    def by_stage(self) -> dict[int, Piece]:
        """Stage -> piece, for the stages of this rank."""
        stages: dict[int, Piece] = {}
        for stage, rank in enumerate(self._layout.stage_ranks()):
            if rank == self._pp_rank:
                stages[stage] = self._encode if stage == 0 else self._decode
        return stages

    def edges(self, plan: StepPlan, dp_rank: int) -> list[Edge]:
        """Edges of a step on one replica, with the sizes its plan gives them."""
        return self.edges_of(plan.visual_tokens[dp_rank].tolist(), plan.llm_tokens[dp_rank].tolist())

    def edges_of(self, visual_rows: Sequence[int], token_rows: Sequence[int]) -> list[Edge]:
        """Edges for micro-batches with these visual and LLM tokens, [M] each."""
        width, dtype = self.source.config.llm.dim, torch.bfloat16 if self._autocast else self.dtype

        def edge(name: str, source: int, rows: Sequence[int]) -> Edge:
            return Edge(name=name, source=source, target=source + 1, rows=rows, width=width, dtype=dtype)

        hidden = [edge(HIDDEN_EDGE, stage, token_rows) for stage in range(1, self._layout.num_stages - 1)]
        return [edge(VISUAL_EDGE, 0, visual_rows), *hidden]

    def _encode(self, batch: MicroBatch, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        with self._precision():
            return {VISUAL_EDGE: self.modules[VISUAL](batch.patches, batch.grids)}

    def _decode(self, batch: MicroBatch, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        llm = self.modules[LLM]
        with self._precision():
            hidden = llm(
                batch.tokens if llm.has_embedding else inputs[HIDDEN_EDGE],
                position_ids=batch.position_ids,
                cu_seqlens=batch.cu_seqlens,
                visual=inputs.get(VISUAL_EDGE),
                visual_index=batch.visual_index,
                max_seqlen=batch.max_seqlen,
            )
            if not llm.has_head:
                return {HIDDEN_EDGE: hidden}
            outputs = {LOSS: head_cross_entropy_sum(hidden, llm.head_weight, batch.labels, batch.loss_weights)}
            if not torch.is_grad_enabled():
                outputs[TOKEN_NLL] = token_nll(hidden, llm.head_weight, batch.labels)
        return outputs

    def _precision(self) -> AbstractContextManager[object]:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self._autocast)


def load_weights(modules: nn.ModuleDict, source: ModelSource) -> None:
    """Fill `modules` from a safetensors file by canonical name; every parameter must be in it.

    Raises:
        CheckpointError: a damaged file, or parameters that it lacks or holds in another shape.
    """
    with _opened(source) as stored, torch.no_grad():
        names = set(stored.keys())
        for name, parameter in modules.named_parameters():
            shape = tuple(stored.get_slice(name).get_shape()) if name in names else None
            if shape != tuple(parameter.shape):
                raise CheckpointError(
                    f"{source.weights}: {name} is {shape or 'missing'}, the model needs {tuple(parameter.shape)}. The "
                    f"weights and the config of this folder do not belong together."
                )
            parameter.copy_(stored.get_tensor(name))


def _opened(source: ModelSource) -> safe_open:
    try:
        return safe_open(source.weights, framework="pt")
    except SafetensorError as error:
        raise CheckpointError(f"{source.weights} is damaged: {error}. Export the run again.") from None
