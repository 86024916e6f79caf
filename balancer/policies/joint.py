"""`joint`: assignment, order and encoder ranks together, by simulating candidates on the given schedule.

    samples, times [n, S]
      -> shares [M]      how large micro-batches should be in running order: small ones first and last in a pipeline
      -> candidates      cells of all samples, even by rank time or by stage (`joint_grid`); where only totals of
                         replicas count, to the last nanoseconds (`joint_even`)
      -> simulation      media items of a spread encoder routed where that is faster (`item_routing`)
      -> local search    the slowest replica alone, or the slowest cell of each micro-batch where replicas meet there
      -> the fastest     of a handful of samples: of all placements (`joint_exact`)

    times 9 9 9 1 1 1, one pipeline rank, 2 replicas, M = 2   ->   [9][9] and [9][1 1 1], makespan 18

No single proxy wins on all data and schedules (largest total, LPT order, level fill: each loses somewhere), so a few
are tried and simulated time decides. The search is adaptive: it ends at the first candidate near its goal, the time of
divisible samples, so that where the stage split binds (an encoder stage twice as long as the others, say) little is
tried. M is given, or the least that the samples fit into.

Everything is in integers and limited by counts, never by time: the plan is the same on every host. Price: heuristics;
the plan's bounds say how much they may have left. With more than `_FEW_SAMPLES` samples there is time for few
candidates, and the local search does the rest.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import Literal

import numpy as np

from balancer.compiled_schedule import compiled
from balancer.counts import Int64Array
from balancer.policies.base import Int32Array, Placement, PlacementProblem, total_over_stages
from balancer.policies.joint_core import Places, Program, Samples, shorten
from balancer.policies.joint_even import even_out
from balancer.policies.joint_exact import best_of_all, is_tiny
from balancer.policies.joint_grid import Columns, by_rank, by_rank_exactly, by_slot, stages_differ, work_columns
from balancer.policies.joint_orders import in_best_order
from balancer.policies.joint_profile import PARTS, slot_shares
from balancer.policies.joint_small import descended, is_small, simple_starts
from balancer.policies.joint_targets import by_targets, slot_targets
from balancer.policies.joint_tops import lower_tops
from balancer.policies.joint_trial import Trial, Trials
from balancer.schedule import Schedule
from balancer.simulation_core import FORWARD
from packing import bin_lower_bound, pack

Way = Literal["slot", "rank", "exactly", "level"]

_TARGET_PARTS = 8192  # a candidate within one part in so many of the goal ends the search
_FEW_SAMPLES = 384  # up to so many all candidates are tried
_FEW_FOR_PARTITION, _FEW_REPLICAS = 2048, 64  # up to so many replicas are evened out by `packing.partition`
_MANY_SAMPLES = 32768
_TURN_WORK = 100  # acts whose simulation takes as long as the rest of a turn of the local search
_LEAST_WORK, _WORK_PER_SAMPLE, _WORK_PER_SAMPLE_OF_MANY = 9_000, 4, 18
_PATIENCE = 400
_LEAST_EVEN_WORK, _EVEN_WORK_PER_SAMPLE, _EXACT_BITS = 100_000, 60, 32
_LEAST_TOPS_WORK, _TOPS_WORK_PER_SAMPLE = 80_000, 45


def place(problem: PlacementProblem) -> Placement:
    """The fastest of the candidates by simulated makespan.

    Raises:
        PlanError: a fixed number of micro-batches that is too small.
    """
    if problem.num_microbatches is not None:
        found = _search(problem, problem.num_microbatches)
        if found is None:
            raise problem.does_not_fit("joint", _enough(problem))
        return found.placement(problem.num_microbatches)
    bound = bin_lower_bound(problem.sizes, capacity=problem.capacity)
    num_microbatches = problem.round_up(-(-bound // problem.dp_size))
    while (found := _search(problem, num_microbatches)) is None:  # packed bins fit sooner or later
        num_microbatches += problem.num_microbatches_multiple
    return found.placement(num_microbatches)


def _enough(problem: PlacementProblem) -> int:
    num_bins = pack(problem.sizes, capacity=problem.capacity).num_bins
    return problem.round_up(-(-num_bins // problem.dp_size))


def _search(problem: PlacementProblem, num_microbatches: int) -> Trial | None:
    """The best candidate with M micro-batches, or None where no room was found."""
    work = np.stack([problem.forward_ns.sum(axis=0), problem.backward_ns.sum(axis=0)]) // problem.dp_size
    shares = _shares(problem, num_microbatches, work)
    goal = _goal(problem, work)
    trials = Trials(problem, num_microbatches)
    in_step = problem.parallel.meet == "step"
    simulated = problem.num_pipeline_ranks > 1 and (num_microbatches > 1 or problem.splits_backward)
    found: list[Trial] = []
    for cell_of in _starts(problem, num_microbatches, shares):
        trial = trials.evaluate(cell_of)
        if simulated and trial.makespan_ns > goal and not trial.times.routed and problem.parallel.meet != "unit":
            trial = min(trial, trials.evaluate(in_best_order(problem, trial.times, trial.cell_of)), key=_makespan)
        found.append(trial)
        if trial.makespan_ns <= goal:
            return trial
    num_cells = problem.dp_size * num_microbatches
    few = problem.num_samples <= max(num_cells, _FEW_SAMPLES if found else _FEW_FOR_PARTITION)
    found += map(trials.evaluate, simple_starts(problem, num_microbatches) if few else ())
    if not found:
        return None
    best = min(found, key=_makespan)
    if simulated and in_step:
        best = _shortened(problem, trials, best, num_microbatches, goal)
    if best.makespan_ns > goal and is_tiny(problem, num_microbatches):
        optimum = best_of_all(problem, trials, num_microbatches)
        return best if optimum is None else min(best, trials.evaluate(optimum), key=_makespan)
    if best.makespan_ns > goal and is_small(problem, num_cells):
        best = min((descended(problem, trials, start, num_cells) for start in [best, *found]), key=_makespan)
    return best


def _starts(problem: PlacementProblem, num_microbatches: int, shares: Int64Array) -> Iterator[Int32Array]:
    """Candidates that found room; after the first, its replicas with other mixtures where that may be faster."""
    first = True
    for kind, way in _candidates(problem, num_microbatches):
        cell_of = _cells(problem, kind, way, shares)
        if cell_of is None:
            continue
        yield cell_of
        targets = slot_targets(problem, shares, routed=_routes(problem)) if first else None
        mixed = None if targets is None else by_targets(problem, cell_of, targets)
        first = False
        if mixed is not None:
            meets = problem.parallel.meet == "microbatch"
            yield _with_lower_tops(problem, mixed, num_microbatches) if meets else mixed


def _makespan(trial: Trial) -> int:
    return trial.makespan_ns


def _cells(problem: PlacementProblem, kind: Columns, way: Way, shares: Int64Array) -> Int32Array | None:
    """One candidate, or None where it found no room."""
    columns = work_columns(problem, kind)
    if way == "slot":
        cell_of = by_slot(problem, columns, shares, refined=kind == "rank" and problem.num_pipeline_ranks == 1)
    elif way == "exactly":
        cell_of = by_rank_exactly(problem, columns, len(shares))
        cell_of = by_rank(problem, columns, shares) if cell_of is None else cell_of
    else:
        cell_of = by_rank(problem, columns, np.full_like(shares, 1) if way == "level" else shares)
    if cell_of is None:
        return None
    if way == "level":
        cell_of = _evened(problem, columns[:, 0], cell_of, problem.dp_size * len(shares), 1)
    if problem.parallel.meet == "microbatch":
        return _with_lower_tops(problem, cell_of, len(shares))
    if way == "level":
        return cell_of
    if columns.shape[1] == 1 and _totals_decide(problem, len(shares)):
        return _evened(problem, columns[:, 0], cell_of, problem.dp_size, len(shares))
    return cell_of


def _candidates(problem: PlacementProblem, num_microbatches: int) -> Iterator[tuple[Columns, Way]]:
    """(columns, slot by slot or replica by replica), the most promising ones first; few where time is short.

    One micro-batch takes the sum of its stages, and so do all of them on one pipeline rank.
    """
    few = problem.num_samples <= _FEW_SAMPLES
    exactly = problem.num_samples <= _FEW_FOR_PARTITION and problem.dp_size <= _FEW_REPLICAS
    if problem.parallel.meet == "microbatch":
        one_rank = problem.num_pipeline_ranks == 1
        by_stage = one_rank and stages_differ(problem)
        yield "stage" if by_stage else "rank", "slot"
        if few:
            yield "rank" if by_stage else "stage", "slot"
            yield "sum", "exactly"
            yield "sum", "rank"
        if problem.splits_backward and num_microbatches > 1:  # little to warm up
            yield "sum", "level"
    elif _totals_decide(problem, num_microbatches):
        yield "sum", "rank"
        if exactly:
            yield "sum", "exactly"
        if problem.splits_backward:
            yield "rank", "rank"
    else:
        yield "rank", "rank"
        if problem.num_stages > problem.num_pipeline_ranks + 1:  # several chunks a rank: little to warm up
            yield "sum", "level"
        if few or problem.parallel.meet == "unit":
            yield "sum", "exactly" if exactly else "rank"
            yield "stage", "rank"
            yield "stage", "slot"


def _totals_decide(problem: PlacementProblem, num_microbatches: int) -> bool:
    """Whether a step takes what the replica with the most work takes (nearly so where weight gradients are split)."""
    if problem.parallel.meet == "microbatch":
        return False
    return num_microbatches == 1 or problem.num_pipeline_ranks == 1 or _one_rank_works(problem)


def _one_rank_works(problem: PlacementProblem) -> bool:
    """Whether all time is spent on one pipeline rank: text beside an encoder stage, say."""
    times = (problem.forward_ns, problem.backward_ns)
    ranks = {rank for stage, rank in enumerate(problem.stage_ranks) if any(time[:, stage].any() for time in times)}
    return len(ranks) <= 1 and -1 not in ranks


def _evened(
    problem: PlacementProblem, work: Int64Array, cell_of: Int32Array, num_units: int, cells_per_unit: int
) -> Int32Array:
    """The candidate with even totals of replicas, or of cells."""
    enough = max(-(-int(work.sum()) // num_units), int(work.max()))
    return even_out(
        work,
        problem.sizes,
        np.array(problem.capacity, dtype=np.int64),
        cell_of,
        num_units,
        cells_per_unit,
        enough + (enough >> _EXACT_BITS),
        _LEAST_EVEN_WORK + _EVEN_WORK_PER_SAMPLE * problem.num_samples,
    )


def _shares(problem: PlacementProblem, num_microbatches: int, work_ns: Int64Array) -> Int64Array:
    """Shares of the micro-batches, no larger than the tightest capacity leaves room for."""
    most = PARTS * num_microbatches
    for size, limit in zip(problem.sizes.sum(axis=0).tolist(), problem.capacity, strict=True):
        if size:
            most = min(most, PARTS * limit * problem.dp_size * num_microbatches // size)
    return slot_shares(problem.schedule_for(num_microbatches), work_ns, most, routed=_routes(problem))


def _goal(problem: PlacementProblem, work_ns: Int64Array) -> int:
    """No placement takes less: the mean work of the busiest pipeline rank, and the longest sample."""
    first = 1 if problem.parallel.encoder_is_spread else 0  # items of a spread encoder are encoded side by side
    chain = problem.forward_ns + problem.backward_ns
    if problem.splits_backward:
        chain = chain - problem.weight_ns  # which need not wait for one another
    longest = int(total_over_stages(chain[:, first:]).max())
    work, ranks = work_ns.sum(axis=0).tolist(), problem.num_pipeline_ranks
    busiest = [sum(work) if ranks == 1 else 0] * ranks
    for time, rank in zip(work, problem.stage_ranks, strict=True):
        for place in range(ranks) if rank < 0 else (rank,):
            busiest[place] += (time // ranks if rank < 0 else time) if ranks > 1 else 0
    goal = max(longest, *busiest)
    return goal + goal // _TARGET_PARTS


def _routes(problem: PlacementProblem) -> bool:
    return problem.parallel.encoder_is_spread and len(problem.item_forward_ns) > 0


def _with_lower_tops(problem: PlacementProblem, cell_of: Int32Array, num_microbatches: int) -> Int32Array:
    columns = work_columns(problem, "rank")
    values = np.concatenate([columns, problem.sizes], axis=1)
    return lower_tops(
        values,
        np.array(problem.capacity, dtype=np.int64),
        cell_of,
        problem.dp_size,
        num_microbatches,
        max(_LEAST_TOPS_WORK, _TOPS_WORK_PER_SAMPLE * problem.num_samples),
    )


def _shortened(problem: PlacementProblem, trials: Trials, start: Trial, num_microbatches: int, enough: int) -> Trial:
    """The candidate after local search; never slower than it was."""
    program, samples, places, capacity, fixed, unit_size = shortening_inputs(problem, trials, start, num_microbatches)
    per_sample = _WORK_PER_SAMPLE if problem.num_samples < _MANY_SAMPLES else _WORK_PER_SAMPLE_OF_MANY
    turns = max(_LEAST_WORK, per_sample * problem.num_samples) // (_TURN_WORK + len(program[0]))
    shorten(program, samples, places, capacity, fixed, unit_size, enough, _PATIENCE, turns)
    found = trials.evaluate(places[0])
    return found if found.makespan_ns < start.makespan_ns else start


def shortening_inputs(
    problem: PlacementProblem, trials: Trials, start: Trial, num_microbatches: int
) -> tuple[Program, Samples, Places, Int64Array, Int64Array, int]:
    """What `shorten` takes first: program, samples, places (to be changed), capacity, fixed times, unit size."""
    schedule, routed = problem.schedule_for(num_microbatches), start.times.routed
    fixed = np.zeros((len(trials.constants), 0, num_microbatches), dtype=np.int64)
    if routed:
        kinds = [start.times.forward_ns, start.times.backward_ns, start.times.weight_ns][: len(trials.constants)]
        fixed = np.stack([np.where(start.times.present[:, :, 0], kind[:, :, 0], -1) for kind in kinds])
    return (
        _program(schedule, routed),
        (trials.values, trials.constants, int(routed), int(problem.parallel.has_encoder)),
        (start.cell_of.copy(), start.items.copy(), start.offsets[::num_microbatches].copy()),
        np.array(problem.capacity, dtype=np.int64),
        fixed,
        schedule.unit_size if routed else num_microbatches,
    )


@lru_cache(maxsize=64)
def _program(schedule: Schedule, routed: bool) -> Program:
    """All acts in an order that can run; the arrival slot is the micro-batch, plus M for what is no forward."""
    order = compiled(schedule, routed=routed).order
    op, microbatch = schedule.op[order], schedule.microbatch[order]
    slot = np.where(op == FORWARD, microbatch, microbatch + schedule.num_microbatches)
    return (
        op,
        (microbatch * schedule.num_stages + schedule.stage[order]).astype(np.int32),
        schedule.act_rank[order],
        slot.astype(np.int32),
        schedule.num_ranks,
        schedule.num_microbatches,
        schedule.num_stages,
        schedule.unit_size if routed else 0,
    )
