"""`verify`: a plan against the counts it was made from, without knowing how it was made.

    samples     each exactly once or dropped with a reason, in cells that exist, in slots 0, 1, ...
    items       with a spread encoder each exactly once, on a rank of its replica, in the unit of its micro-batch
    sums        tokens, patches, labels of every cell follow from its samples
    capacities  no cell, and no encoder act, above any of them
    claims      times, makespans, work, ratios follow from its cells; bounds are not above what they bound

This is laws 1 and 2 as code: tests run it over every policy, and `balancer-analyze` over stored plans.
"""

import numpy as np

from balancer.cost_model import CostModel
from balancer.counts import Int64Array, StepCounts
from balancer.errors import PlanError
from balancer.exact_sums import check_counts
from balancer.item_limits import item_limits
from balancer.plan import Capacities, StepPlan
from balancer.plan_claims import schedule_of, sums_of, verify_claims

_SUMS = ("llm_tokens", "patches", "visual_tokens", "label_tokens")


def verify(plan: StepPlan, counts: StepCounts, capacities: Capacities, cost_model: CostModel | None = None) -> None:
    """Check conservation, hard capacities and claims of a plan; times and modelled bytes only with the cost model.

    Args:
        plan: also one read from a file; nothing of it is taken for granted but types and shapes.
        counts, capacities, cost_model: what it was made from.

    Raises:
        PlanError: a sample or item lost, doubled or foreign; sums that do not follow from the samples; a capacity
            exceeded by a cell or an encoder act; claims that do not follow; bounds above what they bound.
    """
    check_counts(counts)
    _verify_samples(plan, counts)
    _verify_places(plan)
    cell = plan.dp_rank.astype(np.int64) * plan.num_microbatches + plan.microbatch
    shape = (plan.dp_size, plan.num_microbatches)
    for name in _SUMS:
        if not np.array_equal(sums_of(cell, getattr(counts, name), shape), getattr(plan, name)):
            raise PlanError(f"plan of step {plan.step}: {name} per cell do not add up from its samples")
    limits, sizes = capacities.table(counts, cost_model)
    for (name, limit), column in zip(limits, sizes.T, strict=True):
        _verify_capacity(plan, sums_of(cell, column, shape), name, limit)
    acts = _verify_items(plan, counts)
    if plan.routed:
        _verify_acts(plan, counts, capacities, cost_model, acts)
    verify_claims(plan, counts, capacities, cost_model, acts)


def _verify_samples(plan: StepPlan, counts: StepCounts) -> None:
    missing = np.setdiff1d(counts.sample_ids, plan.sample_ids).tolist()
    foreign = np.setdiff1d(plan.sample_ids, counts.sample_ids).tolist()
    if missing or foreign or len(plan.sample_ids) != len(counts):
        raise PlanError(
            f"plan of step {plan.step} holds {len(plan.sample_ids)} samples for {len(counts)} selected: "
            f"missing {missing}, foreign {foreign}"
        )
    if not np.array_equal(plan.sample_ids, counts.sample_ids):
        raise PlanError(f"plan of step {plan.step} lists its samples in another order than they were selected")
    dropped, times = np.unique([sample for sample, _ in plan.dropped], return_counts=True)
    if (times > 1).any():
        raise PlanError(f"plan of step {plan.step}: samples {dropped[times > 1].tolist()} are dropped more than once")
    both = np.intersect1d(plan.sample_ids, [sample for sample, _ in plan.dropped]).tolist()
    if both:
        raise PlanError(f"plan of step {plan.step}: samples {both} are planned and dropped")


def _verify_places(plan: StepPlan) -> None:
    inside = (plan.dp_rank >= 0) & (plan.dp_rank < plan.dp_size)
    inside &= (plan.microbatch >= 0) & (plan.microbatch < plan.num_microbatches)
    if not inside.all():
        raise PlanError(f"plan of step {plan.step}: samples {plan.sample_ids[~inside].tolist()} are in no cell")
    cell = plan.dp_rank.astype(np.int64) * plan.num_microbatches + plan.microbatch
    order = np.lexsort((plan.slot, cell))
    in_order = cell[order]
    wrong = plan.slot[order] != np.arange(len(order)) - np.searchsorted(in_order, in_order, side="left")
    held = np.bincount(cell, minlength=plan.dp_size * plan.num_microbatches)
    miscounted = np.flatnonzero(held != plan.num_samples.reshape(-1))
    if wrong.any() or len(miscounted):
        bad = int(in_order[wrong.argmax()]) if wrong.any() else int(miscounted[0])
        rank, microbatch = divmod(bad, plan.num_microbatches)
        slots = plan.slot[plan.positions(rank, microbatch)].tolist()
        raise PlanError(
            f"plan of step {plan.step}: slots {slots} of rank {rank}, micro-batch {microbatch} "
            f"are not 0 to {int(plan.num_samples[rank, microbatch]) - 1}"
        )
    last = plan.cp_first_rank.astype(np.int64) + plan.cp_degree
    in_group = (plan.cp_degree >= 1) & (plan.cp_first_rank >= 0) & (last <= plan.dp_size)
    in_group &= (plan.cp_first_rank <= plan.dp_rank) & (plan.dp_rank < last)
    if not in_group.all():
        row = int(in_group.argmin())
        raise PlanError(
            f"plan of step {plan.step}: sample {int(plan.sample_ids[row])} on rank {int(plan.dp_rank[row])} is split "
            f"over {int(plan.cp_degree[row])} ranks from {int(plan.cp_first_rank[row])} of {plan.dp_size}"
        )


def _verify_capacity(plan: StepPlan, loads: Int64Array, name: str, limit: int) -> None:
    if int(loads.max(initial=0)) > limit:
        rank, microbatch = (int(index) for index in np.unravel_index(int(loads.argmax()), loads.shape))
        raise PlanError(
            f"plan of step {plan.step}: rank {rank}, micro-batch {microbatch} holds {int(loads.max())} {name}, "
            f"the capacity is {limit}"
        )


def _verify_items(plan: StepPlan, counts: StepCounts) -> Int64Array:
    """Encoder act of every media item, dp_rank * M + entry, int64 [k]; [0] where the encoder is not spread."""
    spread = plan.has_encoder and int(plan.stage_ranks[0]) < 0
    rows = counts.item_rows() if spread else np.zeros(0, dtype=np.int64)
    if not np.array_equal(plan.item_row, rows):
        raise PlanError(
            f"plan of step {plan.step} places {len(plan.item_row)} media items in the encoder, its samples hold "
            f"{len(rows)} that need a place"
        )
    if not plan.routed:
        same = np.array_equal(plan.encoder_patches, plan.patches)
        if not same:
            raise PlanError(f"plan of step {plan.step} routes no item, yet encoder_patches differ from patches")
    if plan.routed and not spread:
        raise PlanError(f"plan of step {plan.step} routes items of an encoder that is not spread")
    if not spread:
        return rows
    schedule = schedule_of(plan)
    own = plan.microbatch[rows]
    entry = plan.unit * np.int64(schedule.unit_size) + plan.encoder_rank if plan.routed else own
    wrong = (plan.unit != own // schedule.unit_size) | (plan.encoder_rank < 0)
    wrong |= (plan.encoder_rank >= plan.num_pipeline_ranks) | (entry >= plan.num_microbatches)
    if not plan.routed:
        wrong |= plan.encoder_rank != own % plan.num_pipeline_ranks
    if wrong.any():
        item = int(wrong.argmax())
        raise PlanError(
            f"plan of step {plan.step}: item {item} of sample {int(plan.sample_ids[rows[item]])} in micro-batch "
            f"{int(own[item])} is encoded on rank {int(plan.encoder_rank[item])} in unit {int(plan.unit[item])}: "
            f"no such encoder act among {plan.num_pipeline_ranks} ranks and units of {schedule.unit_size} micro-batches"
        )
    shape = (plan.dp_size, plan.num_microbatches)
    cell = plan.dp_rank[rows].astype(np.int64) * plan.num_microbatches + entry
    if not np.array_equal(sums_of(cell, counts.item_patches, shape), plan.encoder_patches):
        raise PlanError(f"plan of step {plan.step}: encoder_patches per act do not add up from its items")
    return cell


def _verify_acts(
    plan: StepPlan, counts: StepCounts, capacities: Capacities, cost_model: CostModel | None, acts: Int64Array
) -> None:
    """Where items are routed, every encoder act keeps the limits by what it encodes, as a cell does by its samples."""
    limits, sizes = item_limits(counts, capacities, cost_model)
    shape = (plan.dp_size, plan.num_microbatches)
    for (name, limit), column in zip(limits, sizes.T, strict=True):
        where = name if name.endswith("encoder") else f"{name} in the encoder"
        _verify_capacity(plan, sums_of(acts, column, shape), where, limit)
