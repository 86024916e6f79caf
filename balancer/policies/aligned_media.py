"""Every micro-batch has media on all ranks or on none, as an encoder that is sharded over ranks needs it.

    M = 2, capitals have media                    media cells per rank: K = 1
    rank 0  [A b][C d]      C leaves its cell     [A b C][d]
    rank 1  [e f][G h]  ->  cells are renumbered  [G h][e f]
             ^ a rank that never calls its encoder here lets the other one wait in it for ever

A pass after the policy. K, the number of micro-batches with media, is chosen near what the ranks have; a rank with more
cells with media empties those with the least, one with fewer takes a sample with media from others (`aligned_cells`).
Then the cells of every rank are renumbered so that kinds meet. Balancing policies are also tried anew in cells of two
kinds, longest samples first, and the arrangement that simulates fastest is kept; `sequential` is changed as little as
possible. Capacities stay hard; where M is free and no arrangement is found, other numbers are tried.

Price: a step cannot be aligned when fewer samples have media than there are ranks, or when every cell holds one sample
and the media do not divide by the ranks; that is refused, and dummy media are the remedy. Balance inside a kind costs:
a micro-batch of text may be as long as one with media, but nothing with media can fill it.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from balancer.counts import Int64Array
from balancer.errors import PlanError
from balancer.policies.aligned_cells import IN_POOL, AlignedCells, Mask
from balancer.policies.base import Placement, PlacementProblem, sum_over_cells, total_over_stages

_MOST_COUNTS = 8  # numbers of micro-batches with media that are tried
_MOST_COMPARED = 4  # arrangements that are compared by simulation
_MOST_ANEW = 4096  # samples up to which an arrangement is also made anew


@dataclass(frozen=True, slots=True, kw_only=True)
class _Table:
    """What the cells of a placement hold, with M micro-batches.

    Attributes:
        cell_of: int64 [n]; IN_POOL for samples beyond a smaller M.
        media: bool [n]; sample_time: int64 [n], forward and backward over all stages.
        num_media, media_time, time: int64 [R, M], samples with media, their time, and that of all samples.
    """

    cell_of: Int64Array
    num_microbatches: int
    media: Mask
    num_media: Int64Array
    media_time: Int64Array
    time: Int64Array
    sample_time: Int64Array


def with_aligned_media(problem: PlacementProblem, placement: Placement, *, balanced: bool) -> Placement:
    """The placement with media on all ranks or on none in every micro-batch, if `parallel` asks for that.

    Args:
        problem: its media samples are those with patches.
        placement: of a policy, within the capacities; nothing is routed.
        balanced: whether the policy balances: its samples may then be arranged anew.

    Raises:
        PlanError: fewer samples with media than ranks, or no arrangement found; the text has the remedy.
    """
    media = problem.counts.patches > 0
    if problem.parallel.media_presence != "aligned" or is_aligned(problem, placement):
        return placement
    if int(media.sum()) < problem.dp_size:
        raise PlanError(
            f"media_presence='aligned': {int(media.sum())} of the {len(media)} samples of the step have media, fewer "
            f"than the {problem.dp_size} ranks, so some rank is without where others have them; use "
            "media_presence='dummy' (a rank without media encodes a small dummy) or a larger batch size"
        )
    for num_microbatches in _numbers(problem, placement.num_microbatches):
        table = _table(problem, placement, media, num_microbatches)
        found: list[Placement] = []
        for count in _counts(problem, table):
            found += _arrangements(problem, table, count, balanced=balanced)
            if found and not balanced:
                return found[0]
            if len(found) >= _MOST_COMPARED:
                break
        if found:
            return min(found, key=lambda one: problem.makespan_ns(problem.cell_times(one)))
    raise _no_arrangement(problem, placement.num_microbatches, int(media.sum()))


def is_aligned(problem: PlacementProblem, placement: Placement) -> bool:
    """Whether media are on all ranks or on none in every micro-batch."""
    shape = (problem.dp_size, placement.num_microbatches)
    has_media = sum_over_cells(problem.cells_of(placement), problem.counts.patches, shape) > 0
    return bool((has_media == has_media[0]).all())


def _numbers(problem: PlacementProblem, first: int) -> Iterator[int]:
    """M as it is; where it is free also more, in growing strides, then fewer."""
    yield first
    if problem.num_microbatches is not None:
        return
    multiple = problem.num_microbatches_multiple
    most = 2 * first + multiple
    if problem.fills_cells:  # no more cells than samples
        most = min(most, problem.num_samples // problem.dp_size)
    stride = multiple
    while first + stride <= most:
        yield problem.check_size(first + stride)
        stride *= 2
    stride = multiple
    while first - stride >= problem.round_up(1):
        yield first - stride
        stride *= 2


def _table(problem: PlacementProblem, placement: Placement, media: Mask, num_microbatches: int) -> _Table:
    """Sums of all cells; what lies beyond a smaller M is in the pool."""
    inside = placement.microbatch < num_microbatches
    cell_of = placement.dp_rank.astype(np.int64) * num_microbatches + placement.microbatch
    time = total_over_stages(problem.forward_ns) + total_over_stages(problem.backward_ns)
    columns = np.stack([media.astype(np.int64), time * media, time], axis=1)[inside]
    sums = sum_over_cells(cell_of[inside], columns, (problem.dp_size, num_microbatches))
    num_media, media_time, cell_time = np.moveaxis(sums, 2, 0)
    return _Table(
        cell_of=np.where(inside, cell_of, IN_POOL),
        num_microbatches=num_microbatches,
        media=media,
        num_media=num_media,
        media_time=media_time,
        time=cell_time,
        sample_time=time,
    )


def _must_fill(problem: PlacementProblem, num_microbatches: int) -> bool:
    """Whether every cell has to hold a sample."""
    return problem.fills_cells and problem.num_samples >= problem.dp_size * num_microbatches


def _counts(problem: PlacementProblem, table: _Table) -> list[int]:
    """Numbers K of micro-batches with media that samples suffice for, those nearest to what ranks have first."""
    num_media = int(table.media.sum())
    least, most = 1, min(table.num_microbatches, num_media // problem.dp_size)
    if _must_fill(problem, table.num_microbatches):
        least = max(least, table.num_microbatches - (len(table.media) - num_media) // problem.dp_size)
    if least > most:
        return []
    held = np.sort((table.num_media > 0).sum(axis=1))
    # The median changes the fewest cells; of equally near ones more micro-batches with media are tried first.
    middle = min(max(int(held[len(held) // 2]), least), most)
    near = range(max(least, middle - _MOST_COUNTS), min(most, middle + _MOST_COUNTS) + 1)
    ordered = sorted(near, key=lambda count: (abs(count - middle), -count))[:_MOST_COUNTS]
    return ordered + [end for end in (least, most) if end not in ordered]


def _arrangements(problem: PlacementProblem, table: _Table, count: int, *, balanced: bool) -> list[Placement]:
    """Aligned placements with `count` micro-batches with media: repaired, made anew; anew by size where both fail."""
    # The `count` cells of every rank with the most media, [R, M]; cells without are taken lightest first.
    ranked = np.lexsort((table.time, -table.media_time, table.num_media == 0), axis=1)
    kinds = np.zeros(ranked.shape, dtype=np.bool_)
    np.put_along_axis(kinds, ranked[:, :count], True, axis=1)
    flat = kinds.reshape(-1)
    stays = (table.cell_of != IN_POOL) & (~table.media | flat[table.cell_of])
    by_time = np.argsort(-table.sample_time, kind="stable")
    starts = [(np.where(stays, table.cell_of, IN_POOL), by_time)]
    nowhere = np.full(len(stays), IN_POOL, dtype=np.int64)
    if balanced and len(stays) <= _MOST_ANEW:
        starts.append((nowhere, by_time))
    found = [_settled(problem, table, kinds, *start, balanced=balanced) for start in starts]
    if all(one is None for one in found):
        # Sizes in parts of the capacity, in integers.
        share = problem.sizes // np.maximum(np.array(problem.capacity, dtype=np.int64) >> 20, 1)
        by_size = np.argsort(-share.max(axis=1, initial=0), kind="stable")
        found = [_settled(problem, table, kinds, nowhere, by_size, balanced=balanced)]
    return [one for one in found if one is not None]


def _settled(
    problem: PlacementProblem, table: _Table, kinds: Mask, start: Int64Array, order: Int64Array, *, balanced: bool
) -> Placement | None:
    """The arrangement that `start` [n] leads to, renumbered; None where it finds no room."""
    cells = AlignedCells(
        start,
        media=table.media,
        is_media_cell=kinds.reshape(-1),
        sizes=problem.sizes,
        capacity=np.array(problem.capacity, dtype=np.int64),
        time_ns=table.sample_time,
        num_microbatches=table.num_microbatches,
        totals_count=problem.parallel.meet == "step",
    )
    if not cells.settle(order, fill=_must_fill(problem, table.num_microbatches)):
        return None
    replica, microbatch = np.divmod(cells.cell_of, table.num_microbatches)
    times = sum_over_cells(cells.cell_of, table.sample_time, (problem.dp_size, table.num_microbatches))
    # Where ranks meet in every micro-batch, slow ones should meet slow ones.
    turns = _turns(kinds, times if balanced and problem.parallel.meet != "step" else None)
    return Placement.from_cells(replica, turns[replica, microbatch], table.num_microbatches)


def _turns(kinds: Mask, times: Int64Array | None) -> Int64Array:
    """New number of every micro-batch, int64 [R, M], so that kinds [R, M] are the same on all ranks.

    Without `times` [R, M] micro-batches of a kind keep their order, else the longest ones come first.
    """
    num_with_media = int(kinds[0].sum())
    # The numbers that most ranks have media in already keep them, the first of equals.
    most = np.argsort(-kinds.sum(axis=0), kind="stable")
    places = np.concatenate([np.sort(most[:num_with_media]), np.sort(most[num_with_media:])])
    key = np.zeros(kinds.shape, dtype=np.int64) if times is None else -times
    in_order = np.lexsort((key, ~kinds), axis=1)  # media cells first, [R, M]
    turns = np.empty(kinds.shape, dtype=np.int64)
    np.put_along_axis(turns, in_order, np.broadcast_to(places, kinds.shape), axis=1)
    return turns


def _no_arrangement(problem: PlacementProblem, num_microbatches: int, num_media: int) -> PlanError:
    filled = ", each with a sample," if _must_fill(problem, num_microbatches) else ""
    limits = ", ".join(f"{limit} {name}" for name, limit in zip(problem.capacity_names, problem.capacity, strict=True))
    return PlanError(
        f"media_presence='aligned': no arrangement was found of {num_media} samples with media and "
        f"{problem.num_samples - num_media} without in {problem.dp_size} ranks x {num_microbatches} micro-batches of "
        f"{limits}{filled} that gives every micro-batch media on all ranks or on none; use media_presence='dummy', "
        "more samples per micro-batch, or a larger capacity"
    )
