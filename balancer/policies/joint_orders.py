"""The order of micro-batches inside each replica: a fixed set of orders is simulated, each replica keeps its fastest.

    all orders of up to four micro-batches; of more: as they are, sorted by a few keys, and the largest in every place

Cells keep their samples, so capacities hold whatever the order. Price: C orders are C simulations of every replica in
one call (22 of 16 micro-batches on 64 replicas: about 1 ms); the local search that follows finds the rest.
"""

from functools import lru_cache
from itertools import permutations

import numpy as np

from balancer.counts import Int64Array
from balancer.makespans import joined_durations, makespans_of_orders_ns
from balancer.policies.base import CellTimes, Int32Array, PlacementProblem

MOST_PERMUTED = 4  # up to so many micro-batches every order is simulated, 4! = 24
_MOST_PLACES = 16  # places that the largest micro-batch is tried in


def in_best_order(problem: PlacementProblem, times: CellTimes, cell_of: Int32Array) -> Int32Array:
    """Cells int32 [n] with micro-batches in the order that simulates fastest: each replica its own, or one for all
    where replicas meet in every micro-batch.

    times: of the cells, not routed.
    """
    num_replicas, num_microbatches = times.forward_ns.shape[:2]
    schedule = problem.schedule_for(num_microbatches)
    joined = times
    if problem.parallel.meet == "microbatch":
        forward, backward, present, weight = joined_durations(
            schedule,
            times.forward_ns[np.newaxis],
            times.backward_ns[np.newaxis],
            times.present[np.newaxis],
            "microbatch",
            weight_ns=times.weight_ns[np.newaxis],
        )
        joined = CellTimes(
            forward_ns=forward[0],
            backward_ns=backward[0],
            present=times.present[:1] if present is None else present[0],
            weight_ns=backward[0] // 2 if weight is None else weight[0],
        )
    orders = _orders(joined)  # [C, R or 1, M]
    makespans = makespans_of_orders_ns(
        schedule, joined.forward_ns, joined.backward_ns, joined.present, orders, weight_ns=joined.weight_ns
    )
    chosen = orders[makespans.argmin(axis=0), np.arange(orders.shape[1])]  # [R or 1, M]
    turn = np.argsort(chosen, axis=1)  # inverse permutation: micro-batch -> its turn
    moved = (turn + np.arange(num_replicas)[:, np.newaxis] * num_microbatches).reshape(-1).astype(np.int32)
    result: Int32Array = moved[cell_of]
    return result


def _orders(times: CellTimes) -> Int64Array:
    """Orders to try, int64 [C, R, M]: entry [c, r, i] is the micro-batch of replica r that runs i-th."""
    num_replicas, num_microbatches = times.forward_ns.shape[:2]
    if num_microbatches <= MOST_PERMUTED:
        every = _permutations(num_microbatches)
        return np.ascontiguousarray(np.broadcast_to(every[:, np.newaxis], (len(every), num_replicas, num_microbatches)))
    per_stage = times.forward_ns + times.backward_ns
    total, first = per_stage.sum(axis=2), per_stage[:, :, 0]
    keys = np.stack([np.zeros_like(total), -total, total, -first, first, 2 * first - total])
    by_key: Int64Array = np.argsort(keys, axis=2, kind="stable")
    return np.concatenate([by_key, _largest_moved(total)])


@lru_cache(maxsize=8)
def _permutations(num_microbatches: int) -> Int64Array:
    return np.array(list(permutations(range(num_microbatches))), dtype=np.int64)


def _largest_moved(total: Int64Array) -> Int64Array:
    """The order as it is with the largest micro-batch of each replica in another place, int64 [C, R, M]."""
    num_microbatches = total.shape[1]
    largest = total.argmax(axis=1)[:, np.newaxis]  # [R, 1]
    position = np.arange(num_microbatches)
    rest = position[:-1] + (position[:-1] >= largest)  # [R, M - 1], all but the largest
    step = -(-num_microbatches // _MOST_PLACES)
    places = range(0, num_microbatches, step)
    return np.stack([np.concatenate([rest[:, :place], largest, rest[:, place:]], axis=1) for place in places])
