"""Validation by the rule of training: sum(w * ce) / sum(w) over all held-out samples, the same in every layout.

Held-out samples are planned like a training epoch without shuffling, so any number of ranks runs the same number of
steps and a short tail only leaves cells empty. Forward only, through the same executor.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from balancer.batch import MicroBatch
from balancer.plan_loader import PlanLoader, SampleReader
from balancer.plan_sequence import PlanSequence
from balancer.records import Replaced
from dataloaders.chat import encode_record, fact_mask
from trainer.pieces import TOKEN_NLL
from trainer.step import StepRunner


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Loss over a set of samples.

    Attributes:
        loss: sum(w * ce) / sum(w).
        label_tokens: trained positions.
        fact_loss: mean over the positions of fact words (NaN without any).
        fact_tokens: number of those positions.
        replaced: samples left out of the loss because their media did not decode.
    """

    loss: float
    label_tokens: int
    fact_loss: float
    fact_tokens: int
    replaced: int = 0


def evaluate(
    runner: StepRunner,
    reader: SampleReader,
    plans: PlanSequence,
    *,
    num_workers: int = 0,
    on_replaced: Callable[[tuple[Replaced, ...]], None] | None = None,
) -> Evaluation:
    """Evaluate every sample of `plans` once.

    Args:
        plans: one epoch over the held-out ids, `shuffle=False`.
        on_replaced: called after each step with the samples that any rank had to replace.
    """
    comm = runner.comm
    loader = PlanLoader(
        reader, plans, dp_rank=comm.dp_rank, steps=range(plans.steps_per_epoch), num_workers=num_workers
    )
    runner.pieces.modules.eval()
    sums = torch.zeros(6, dtype=torch.float64, device=comm.device)
    for batches in loader:
        outcome, microbatches, gone = runner.evaluate(batches)
        if on_replaced is not None:
            on_replaced(gone)
        sums[0] += outcome.loss_sum
        # Only ranks that decode pixels know, so every sample is counted once.
        sums[5] += sum(len(batch.replaced) for batch in microbatches if batch is not None)
        for number, outputs in outcome.outputs.items():
            batch = microbatches[number]
            if batch is not None and TOKEN_NLL in outputs:
                sums[1:5] += _tallies(batch, outputs, reader)
    runner.pieces.modules.train()
    loss_sum, weight, labels, fact_sum, facts, replaced = comm.sum_over_world(sums).tolist()
    return Evaluation(
        loss=loss_sum / weight if weight else float("nan"),
        label_tokens=int(labels),
        fact_loss=fact_sum / facts if facts else float("nan"),
        fact_tokens=int(facts),
        replaced=int(replaced),
    )


def _tallies(batch: MicroBatch, outputs: Mapping[str, torch.Tensor], reader: SampleReader) -> torch.Tensor:
    """[weight, label tokens, fact nll sum, fact tokens] of one micro-batch, on the rank with the last stage."""
    facts = _fact_positions(batch, reader).to(batch.labels.device) & (batch.labels != -100)
    nll = outputs[TOKEN_NLL].double()
    return torch.stack(
        [
            batch.loss_weights.sum(),
            torch.tensor(float(batch.num_label_tokens), dtype=torch.float64, device=nll.device),
            (nll * facts).sum(),
            facts.sum().double(),
        ]
    )


def _fact_positions(batch: MicroBatch, reader: SampleReader) -> torch.Tensor:
    """bool [T]: positions whose label lies in a fact word of its record."""
    mask = torch.zeros(batch.tokens.numel(), dtype=torch.bool)
    bounds = batch.cu_seqlens.tolist()
    for slot, sample_id in enumerate(batch.sample_ids.tolist()):
        record = reader.source.record(sample_id)
        if not record.extra.get("facts"):
            continue
        encoded = encode_record(record, reader.index.item_tokens(sample_id), train_on=reader.train_on)
        mask[bounds[slot] : bounds[slot + 1]] = torch.from_numpy(fact_mask(record, encoded))
    return mask
