"""What warm-up and drain of a pipeline cost at least, for any placement into M micro-batches.

In a step of 1F1B, say, the times of micro-batches j are x[j]; every path through the acts bounds the makespan:

    rank 0   F0 F1 F2 F3 B0 .. B1 .. B2 .. B3          forwards 0..m of the first chunk, then m on to the last chunk,
    last     .. F0 B0 F1 B1 F2 B2 F3 B3 ..             there F and B of m..m', then back with m', backwards m'..M-1

A placement may taper: a small first and last micro-batch shorten warm-up and drain, and the others grow. No single
path accounts for that, so paths are *mixed*. With weights w[k] >= 0 that add up to D, over the replicas r

    D * makespan >= sum of w[k] * path[k](r) = sum over samples i of c[i, j(i)]     c[i, j]: weighted share of sample i
    D * R * makespan >= sum over all samples of min over j of c[i, j]                        in micro-batch j

which holds for *any* weights and any placement, in integers. Good weights are the row player's of the matrix game
(path against micro-batch), found by regret matching on the mean sample of a few kinds; the bound is evaluated on
every sample.

Which paths there are, and why they hold even for empty micro-batches, is in balancer/pipeline_paths.py.

Price: samples count as divisible, and weights are near the best, not at it: exact for one micro-batch, some percent
loose elsewhere. 0 where there is no pipeline.
"""

import numpy as np

from balancer.counts import Int64Array
from balancer.pipeline_paths import path_pool, solve_game
from balancer.policies.base import PlacementProblem, total_over_stages

_DENOMINATOR = 1024
_ITERATIONS = 200
_LARGEST = 2**62


def pipeline_bound_ns(problem: PlacementProblem, num_microbatches: int) -> int:
    """No placement into `num_microbatches` per replica takes less, in nanoseconds; 0 for one pipeline rank."""
    if problem.num_pipeline_ranks == 1:
        return 0
    forward, back, whole = _parts(problem)
    coefficients = path_pool(problem.schedule, problem.stage_ranks, problem.parallel.has_encoder, num_microbatches)
    times = np.concatenate([forward, back, whole])  # [C, n]
    weights = _weights(problem, coefficients, times)
    mixed = np.tensordot(weights, coefficients, axes=1)  # [C, M]
    if int(times.sum(axis=0).max()) * int(mixed.max()) * problem.num_samples >= _LARGEST:
        return 0
    least = _least(times, mixed)
    return -(-int(least.sum()) // (problem.dp_size * int(weights.sum())))


def _parts(problem: PlacementProblem) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Forward, backward on the way back, and the rest of the backward, each int64 [S, n]; spread stages are 0."""
    chained = np.array([rank >= 0 for rank in problem.stage_ranks])[:, np.newaxis]
    rest = np.ascontiguousarray((problem.weight_ns * problem.splits_backward).T) * chained
    forward = np.ascontiguousarray(problem.forward_ns.T) * chained
    return forward, problem.backward_ns.T * chained - rest, rest


def _weights(problem: PlacementProblem, coefficients: Int64Array, times: Int64Array) -> Int64Array:
    """Weights of the paths, int64 [K], not negative, about _DENOMINATOR in all: any are right, good ones are tight."""
    kinds = _kinds(problem)
    means = np.stack([times[:, kinds == kind].sum(axis=1) for kind in range(4)])  # [J, C]
    means = means[means.any(axis=1)]
    if not len(means):
        return np.ones(len(coefficients), dtype=np.int64)
    # [J, 1, 1, C] @ [K, C, M] -> [J, K, 1, M]
    payoff = (means[:, np.newaxis, np.newaxis] @ coefficients)[:, :, 0].astype(np.float64)
    payoff /= max(float(payoff.max()), 1.0)
    mixed, _ = solve_game(np.ascontiguousarray(payoff), _ITERATIONS)
    weights = np.rint(mixed * _DENOMINATOR).astype(np.int64)
    if not weights.any():
        weights[int(mixed.argmax())] = 1
    return weights


def _kinds(problem: PlacementProblem) -> Int64Array:
    """Kind of every sample by what share of it stage 0 is: none, less than all have, more, twice as much; [n]."""
    total = (total_over_stages(problem.forward_ns) + total_over_stages(problem.backward_ns)).astype(np.float64)
    first = (problem.forward_ns[:, 0] + problem.backward_ns[:, 0]).astype(np.float64)
    share = first * float(total.sum()) / (np.maximum(total, 1.0) * max(float(first.sum()), 1.0))
    return (share > 0.0).astype(np.int64) + (share > 1.0) + (share > 2.0)


def _least(times: Int64Array, mixed: Int64Array) -> Int64Array:
    """Over micro-batches j the least of sum over c of mixed[c, j] * times[c], int64 [n]."""
    best: Int64Array | None = None
    for column in np.unique(mixed, axis=1).T:
        value = np.zeros(times.shape[1], dtype=np.int64)
        for factor in np.unique(column[column > 0]):
            value += int(factor) * times[column == factor].sum(axis=0)
        best = value if best is None else np.minimum(best, value)
    return np.zeros(times.shape[1], dtype=np.int64) if best is None else best
