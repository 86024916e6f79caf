"""Limits of an encoder act whose media items were routed to it, and what every item takes of them.

    item_limits(counts [n], k items, capacities, cost model)  ->  ((name, limit), ...) [e], sizes int64 [k, e]

A micro-batch keeps its capacities by the samples in it. Where the encoder is spread, an act encodes items of several
micro-batches of its unit, so that its own patches, items and modelled bytes of stage 0 have to be held against the
same limits. Tokens have none here: they belong to the LLM.
"""

import numpy as np

from balancer.cost_model import CostModel
from balancer.cost_terms import item_columns, stage_bytes
from balancer.counts import Int64Array, StepCounts
from balancer.plan import Capacities


def item_limits(
    counts: StepCounts, capacities: Capacities, cost_model: CostModel | None
) -> tuple[tuple[tuple[str, int], ...], Int64Array]:
    """Limits of an encoder act as (name, limit) [e], and sizes of all media items in their units, int64 [k, e].

    Bytes need a cost model with memory terms; without one they are left out. Bytes per sample are no item's.

    Raises:
        CostModelError: bytes beyond int64.
    """
    num_items = len(counts.item_patches)
    limits: list[tuple[str, int]] = []
    sizes: list[Int64Array] = []
    if capacities.patches is not None:
        limits.append(("patches", capacities.patches))
        sizes.append(counts.item_patches)
    if capacities.items is not None:
        limits.append(("items", capacities.items))
        sizes.append(np.ones(num_items, dtype=np.int64))
    if capacities.activation_bytes is not None and cost_model is not None and cost_model.memory:
        memory = cost_model.memory[0]
        row_ids = np.repeat(counts.sample_ids, np.diff(counts.item_offsets))
        limits.append(("activation_bytes of the encoder", capacities.activation_bytes - memory.constant_bytes))
        sizes.append(stage_bytes([memory], item_columns(counts), row_ids)[:, 0])
    table = np.stack(sizes, axis=1) if sizes else np.zeros((num_items, 0), dtype=np.int64)
    return tuple(limits), table
