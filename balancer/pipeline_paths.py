"""Paths through a pipeline that are worth mixing: the longest ones against sizes that are best against those before.

    schedule, stages, M  --a few cost models-->  sizes of micro-batches <-> longest path  -->  counts int64 [K, C, M]

Every path of balancer/pipeline_bound_graph.py bounds the makespan; there are very many. Which ones matter depends on
costs only a little, so they are collected once for a handful of them: encoders light and heavy, backwards once and
twice the forward, micro-batches full or free. balancer/pipeline_bound.py adds what its own costs ask for.

Price: 50 ms to a second, once per shape of pipeline and process.
"""

from functools import lru_cache
from itertools import product

import numpy as np

from balancer.counts import Int64Array
from balancer.pipeline_bound_game import Game, solve_game
from balancer.pipeline_bound_graph import Float64Array, PathGraph, constraint_graph
from balancer.schedule import build_schedule

_ENCODER_TO_STAGE = (0.0, 0.4, 1.5)
_BACKWARD_TO_FORWARD = (2.0, 1.0)
_LOADS = (0.9, 0.0)
_ROUNDS = 40
_ITERATIONS = 60
_USED = 0.03
"""Weight from which on a path of a solved game is kept."""


@lru_cache(maxsize=32)
def path_graph(schedule: str, stage_ranks: tuple[int, ...], has_encoder: bool, num_microbatches: int) -> PathGraph:
    """The graph of all paths, kept per shape of pipeline."""
    built = build_schedule(schedule, stage_ranks=stage_ranks, num_microbatches=num_microbatches)
    return constraint_graph(built, stage_ranks, has_encoder)


@lru_cache(maxsize=32)
def path_pool(schedule: str, stage_ranks: tuple[int, ...], has_encoder: bool, num_microbatches: int) -> Int64Array:
    """Paths to be mixed: how often path k counts component c of micro-batch j, int64 [K, C, M]; read-only.

    Components are forward, backward on the way back and rest of the backward of every stage, C = 3 S.
    """
    graph = path_graph(schedule, stage_ranks, has_encoder, num_microbatches)
    unit = _unit_size(schedule, stage_ranks, num_microbatches)
    kept: dict[bytes, Int64Array] = {}
    encoders = _ENCODER_TO_STAGE if has_encoder else _ENCODER_TO_STAGE[:1]
    for encoder, back, load in product(encoders, _BACKWARD_TO_FORWARD, _LOADS):
        game = _example(stage_ranks, has_encoder, unit, (encoder, back, load))
        even = np.repeat(game.times.sum(axis=0)[:, np.newaxis], num_microbatches, axis=1)
        solved, pool = solve_game(
            game,
            graph.longest_path(even)[np.newaxis],
            graph,
            num_rounds=_ROUNDS if num_microbatches > 1 else 1,
            num_iterations=_ITERATIONS,
        )
        kept.update(
            (path.tobytes(), path) for path, weight in zip(pool, solved.weights, strict=True) if weight >= _USED
        )
    stacked = np.stack(list(kept.values()))
    stacked.flags.writeable = False
    return stacked


def _unit_size(schedule: str, stage_ranks: tuple[int, ...], num_microbatches: int) -> int:
    return build_schedule(schedule, stage_ranks=stage_ranks, num_microbatches=num_microbatches).unit_size


def _example(stage_ranks: tuple[int, ...], has_encoder: bool, unit: int, costs: tuple[float, float, float]) -> Game:
    """Samples with and without media in halves, stages of equal times."""
    encoder, back, load = costs
    num_stages = len(stage_ranks)
    stages = np.ones(num_stages)
    if has_encoder:
        stages[0] = 0.0
    times: Float64Array = np.concatenate([stages, back * stages, np.zeros(num_stages)])
    kinds = np.stack([times, times]) / 2
    if has_encoder and encoder > 0.0:
        kinds[1, 0], kinds[1, num_stages] = encoder, back * encoder
    return Game(times=kinds, loads=np.full((2, 1), load / 2), unit=unit)
