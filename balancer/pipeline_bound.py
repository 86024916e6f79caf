"""What warm-up and drain of a pipeline cost at least, for any placement into M micro-batches that keeps the capacities.

In a step of 1F1B, say, the times of micro-batches j are x[j]; every path through the acts bounds the makespan:

    rank 0   F0 F1 F2 F3 B0 .. B1 .. B2 .. B3          forwards 0..m of the first chunk, then m on to the last chunk,
    last     .. F0 B0 F1 B1 F2 B2 F3 B3 ..             there F and B of m..m', then back with m', backwards m'..M-1

A placement may taper: a small first and last micro-batch shorten warm-up and drain, and the others grow, as far as
their capacity lets them. No single path accounts for that, so paths are *mixed*. With weights w[k] >= 0 that add up to
D, and prices p[j] >= 0 for what fills micro-batch j, over the replicas r

    D * makespan >= sum of w[k] * path[k](r)        and 0 >= sum over j of p[j] * (filled[r, j] - capacity), hence

    D * R * makespan >= sum over all samples i of min over j of (c[i, j] + p[j] * size[i]) - R * capacity * sum of p

where c[i, j] is the weighted share of sample i if it is in micro-batch j. That holds for *any* weights and prices and
any placement, in integers. Good ones are near a solution of the game of paths and prices against micro-batches
(balancer/pipeline_bound_game.py) for the mean sample of a few kinds; they are rounded to a grid, and the bound is
evaluated on every sample. Which paths there are, and why they hold even for empty micro-batches, is in
balancer/pipeline_bound_graph.py; a pool of them is kept per shape (balancer/pipeline_paths.py), and the longest ones
for the sizes at hand are added.

Items of a spread encoder may be encoded on any rank of their micro-batch's unit, so the encoder's share of c[i, j] is
the least over the unit, item by item, or that of the sample as a whole, whichever is less.

Where replicas meet, an act lasts as long as the longest of all replicas, hence no less than their mean, and the sum
over replicas above holds for what all of them run together.

Price: samples count as divisible, and weights are near the best, not at it: up to 1 % for 4 micro-batches, about 2 %
for 16. 0 where there is no pipeline.
"""

from dataclasses import dataclass

import numpy as np

from balancer.counts import Int64Array
from balancer.pipeline_bound_game import Game, Solved, solve_game
from balancer.pipeline_bound_graph import Float64Array
from balancer.pipeline_paths import path_graph, path_pool
from balancer.policies.base import PlacementProblem
from packing._jit import jit, jit_inner

_DENOMINATOR = 4096
_GRID = 2**12
"""Prices are whole multiples of 1 / _GRID of the step's length per full micro-batch."""
_NUM_KINDS = 4
_ITERATIONS = 16
_ROUNDS = 8
_MORE_ROUNDS = 8
"""Rounds of the game for few micro-batches; one more for every other micro-batch, but no more than this."""
# Sums below this are exact in float64.
_EXACT = 2**53
_LARGEST = 2**62
_BLOCK = 512
_MOST_MICROBATCHES = 512
_ENOUGH = 4096
"""Samples from which weights are made."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Mixture:
    """Weights and prices in whole numbers.

    Attributes:
        coefficients: how much D * makespan counts component c of micro-batch j, int64 [C, M].
        prices: of a unit of size in micro-batch j, per capacity, int64 [D, M].
        denominator: sum of the weights.
    """

    coefficients: Int64Array
    prices: Int64Array
    denominator: int


def pipeline_bound_ns(problem: PlacementProblem, num_microbatches: int) -> int:
    """No placement into `num_microbatches` per replica takes less, in nanoseconds; 0 for one pipeline rank.

    0 also for very many micro-batches, where warm-up and drain are small beside the work, and the graph is not.
    """
    if problem.num_pipeline_ranks == 1 or num_microbatches > _MOST_MICROBATCHES:
        return 0
    times = _times(problem)  # [3 S, n]
    limits = _binding_limits(problem, num_microbatches)
    sizes = problem.sizes[:, limits].T.astype(np.float64)  # [D, n]
    capacity = np.array([problem.capacity[limit] for limit in limits], dtype=np.int64)
    mixture = _mixture(problem, num_microbatches, times, sizes, capacity)
    if not _is_exact(mixture, times, sizes):
        return 0
    least = _least(problem, mixture, times, sizes, num_microbatches)
    paid = problem.dp_size * int((mixture.prices.sum(axis=1) * capacity).sum())
    return max(0, -(-(least - paid) // (problem.dp_size * mixture.denominator)))


def _times(problem: PlacementProblem) -> Float64Array:
    """Forward, backward on the way back, and the rest of the backward of all stages, whole numbers [3 S, n]; without
    the rest, [2 S, n], where nothing is split."""
    num_stages, splits = problem.num_stages, problem.splits_backward
    times = np.empty(((2 + splits) * num_stages, problem.num_samples))
    times[:num_stages] = problem.forward_ns.T
    times[num_stages : 2 * num_stages] = problem.backward_ns.T
    if splits:
        times[2 * num_stages :] = problem.weight_ns.T
        times[num_stages : 2 * num_stages] -= times[2 * num_stages :]
    return times


def _binding_limits(problem: PlacementProblem, num_microbatches: int) -> list[int]:
    """Capacities that one micro-batch of a mean replica could exceed."""
    if num_microbatches == 1:
        return []
    totals = problem.sizes.sum(axis=0).tolist()
    return [
        index
        for index, (total, limit) in enumerate(zip(totals, problem.capacity, strict=True))
        if total > problem.dp_size * limit
    ]


def _mixture(
    problem: PlacementProblem, num_microbatches: int, times: Float64Array, sizes: Float64Array, capacity: Int64Array
) -> _Mixture:
    """Weights and prices for these samples."""
    shape = problem.schedule, problem.stage_ranks, problem.parallel.has_encoder, num_microbatches
    graph, pool = path_graph(*shape), path_pool(*shape)
    game = _game(problem, num_microbatches, times, sizes, capacity)
    rounds = _ROUNDS + min(num_microbatches // 2, _MORE_ROUNDS)
    solved, pool = solve_game(game, pool, graph, num_rounds=rounds, num_iterations=_ITERATIONS)
    return _rounded(solved, pool, capacity)


def _game(
    problem: PlacementProblem, num_microbatches: int, times: Float64Array, sizes: Float64Array, capacity: Int64Array
) -> Game:
    """Mean times and sizes by kind; of large steps, those of evenly chosen samples, since any weights will do."""
    step = max(1, problem.num_samples // _ENOUGH)
    table = np.concatenate([times[:, ::step], sizes[:, ::step]])
    kinds = _kinds(times[:, ::step], problem.num_stages)
    both = _sum_by_kind(table, kinds) * (problem.num_samples / (table.shape[1] * problem.dp_size))
    both = both[both.any(axis=1)]
    unit = problem.schedule_for(num_microbatches).unit_size if problem.parallel.encoder_is_spread else 0
    mean = np.zeros((len(both), 3 * problem.num_stages))
    mean[:, : len(times)] = both[:, : len(times)]
    return Game(times=mean, loads=np.ascontiguousarray(both[:, len(times) :] / capacity), unit=unit)


def _rounded(solved: Solved, pool: Int64Array, capacity: Int64Array) -> _Mixture:
    weights = np.rint(solved.weights * _DENOMINATOR).astype(np.int64)
    if not weights.any():
        weights[int(solved.weights.argmax())] = 1
    length = max(int(solved.length), 1)
    # Shares of the step's length first, on a grid, then whole numbers: last bits of a host's sums cannot show.
    shares = np.rint(solved.prices / length * _GRID).astype(np.int64)
    per_size = [
        [int(share) * length * _DENOMINATOR // (_GRID * int(limit)) for share in row]
        for row, limit in zip(shares.tolist(), capacity.tolist(), strict=True)
    ]
    prices = np.array(per_size, dtype=np.int64).reshape(shares.shape)
    coefficients = np.tensordot(weights, pool, axes=1)
    return _Mixture(coefficients=coefficients, prices=prices, denominator=int(weights.sum()))


def _kinds(times: Float64Array, num_stages: int) -> Int64Array:
    """Kind of every sample by what share of it stage 0 is: none, less than all have, more, twice as much; [n]."""
    total = times.sum(axis=0)
    first = times[::num_stages].sum(axis=0)
    share = first * float(total.sum()) / (np.maximum(total, 1.0) * max(float(first.sum()), 1.0))
    kinds: Int64Array = (share > 0.0).astype(np.int64) + (share > 1.0) + (share > 2.0)
    return kinds


@jit
def _sum_by_kind(table: Float64Array, kinds: Int64Array) -> Float64Array:
    """Sums of rows [C, n] over the samples of each kind, [J, C]."""
    sums = np.zeros((_NUM_KINDS, len(table)))
    for row in range(len(table)):
        for sample in range(table.shape[1]):
            sums[kinds[sample], row] += table[row, sample]
    return sums


def _is_exact(mixture: _Mixture, times: Float64Array, sizes: Float64Array) -> bool:
    """Whether no sum of whole numbers gets so large that float64 (a sample) or int64 (all of them) would round it."""
    most = float(mixture.coefficients.max(initial=0)) * times.sum(axis=0)
    for price, size in zip(mixture.prices.max(axis=1), sizes, strict=True):
        most = most + float(price) * size
    return bool(most.max() < _EXACT / 2 and most.sum() < _LARGEST)


def _least(
    problem: PlacementProblem, mixture: _Mixture, times: Float64Array, sizes: Float64Array, num_microbatches: int
) -> int:
    """Sum over samples of the least over micro-batches of what they add."""
    num_stages = problem.num_stages
    coefficients = mixture.coefficients[: len(times)].astype(np.float64)
    if not problem.parallel.encoder_is_spread:
        table = np.concatenate([coefficients, mixture.prices.astype(np.float64)])
        rows = np.concatenate([times, sizes])
        return _sum_of_least(rows, table, np.zeros((1, 0)), np.zeros(num_microbatches, dtype=np.int64))
    unit = max(problem.schedule_for(num_microbatches).unit_size, 1)
    unit_of = np.arange(num_microbatches) // unit
    encoder = [0, num_stages]
    shared = np.stack(
        [
            _encoder_share(problem, coefficients[encoder, first : first + unit], times[encoder])
            for first in range(0, num_microbatches, unit)
        ]
    )  # [U, n]
    llm = [row for row in range(len(times)) if row % num_stages]
    rows = np.concatenate([times[llm], sizes])
    columns = np.concatenate([coefficients[llm], mixture.prices.astype(np.float64)])
    return _sum_of_least(rows, np.ascontiguousarray(columns), shared, unit_of)


def _encoder_share(problem: PlacementProblem, coefficients: Float64Array, times: Float64Array) -> Float64Array:
    """The least that the encoder of every sample adds if its items are in a unit: [2, unit] and [2, n] give [n]."""
    if not len(problem.item_forward_ns):
        offsets = np.zeros(problem.num_samples + 1, dtype=np.int64)
        offsets.flags.writeable = False  # as in counts: one signature, compiled once
        return _least_of_unit(coefficients, times, problem.item_forward_ns, problem.item_backward_ns, offsets, False)
    return _least_of_unit(
        coefficients, times, problem.item_forward_ns, problem.item_backward_ns, problem.counts.item_offsets, True
    )


@jit
def _least_of_unit(  # noqa: PLR0917  kernels take flat arguments
    places: Float64Array,
    times: Float64Array,
    item_forward: Int64Array,
    item_backward: Int64Array,
    offsets: Int64Array,
    has_items: bool,
) -> Float64Array:
    """Of every sample whole at one place [2, k], or each of its items at its own, whichever adds less."""
    num_samples, num_places = times.shape[1], places.shape[1]
    found = np.empty(num_samples)
    for sample in range(num_samples):
        whole = places[0, 0] * times[0, sample] + places[1, 0] * times[1, sample]
        for place in range(1, num_places):
            whole = min(whole, places[0, place] * times[0, sample] + places[1, place] * times[1, sample])
        parts = 0.0
        for item in range(offsets[sample], offsets[sample + 1]):
            forward, backward = float(item_forward[item]), float(item_backward[item])
            least = places[0, 0] * forward + places[1, 0] * backward
            for place in range(1, num_places):
                least = min(least, places[0, place] * forward + places[1, place] * backward)
            parts += least
        found[sample] = min(whole, parts) if has_items else whole
    return found


@jit
def _sum_of_least(rows: Float64Array, columns: Float64Array, shared: Float64Array, unit_of: Int64Array) -> int:
    """Sum over samples of the least over columns j of sum over c of columns[c, j] * rows[c, i] + shared[unit_of[j], i].

    Whole numbers in float64, which is exact below 2**53 and several times faster than int64.
    """
    num_samples = rows.shape[1]
    best, value = np.empty(_BLOCK), np.empty(_BLOCK)
    total = 0
    for start in range(0, num_samples, _BLOCK):
        size = min(_BLOCK, num_samples - start)
        for column in range(columns.shape[1]):
            value[:size] = 0.0
            if shared.shape[1] > 0:
                for sample in range(size):
                    value[sample] = shared[unit_of[column], start + sample]
            for row in range(0, len(rows), 4):
                if row + 4 <= len(rows):
                    _add_four(value, rows[row : row + 4], columns[row : row + 4, column], start, size)
                else:
                    for single in range(row, len(rows)):
                        _add_scaled(value, rows[single], columns[single, column], start, size)
            if column == 0:
                best[:size] = value[:size]
            else:
                for sample in range(size):
                    best[sample] = min(best[sample], value[sample])
        for sample in range(size):
            total += int(best[sample])
    return total


@jit_inner
def _add_four(value: Float64Array, rows: Float64Array, factors: Float64Array, start: int, size: int) -> None:
    a, b, c, d = factors[0], factors[1], factors[2], factors[3]
    first, second, third, fourth = rows[0], rows[1], rows[2], rows[3]
    for sample in range(size):
        at = start + sample
        value[sample] += (a * first[at] + b * second[at]) + (c * third[at] + d * fourth[at])


@jit_inner
def _add_scaled(value: Float64Array, row: Float64Array, factor: float, start: int, size: int) -> None:
    for sample in range(size):
        value[sample] += factor * row[start + sample]
