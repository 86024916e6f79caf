"""The game behind the pipeline bound: paths and prices of capacity against sizes of micro-batches.

    rows      a weight for every path, a price for a full micro-batch; want the weighted length large
    columns   each kind of sample spreads over the micro-batches; wants it small

Both play by regret matching (Hart and Mas-Colell, 2000; later rounds count more): a choice gets weight by how much
better it would have been so far. The rows' averages are near the best weights, and that is all they have to be: the
bound is evaluated for them, in whole numbers, over all samples. A spread encoder makes columns two-fold: micro-batch,
then the rank of its unit that encodes. Sums run in a fixed order, nothing is random, so all hosts find the same.
"""

from dataclasses import dataclass

import numpy as np

from balancer.counts import Int64Array
from balancer.pipeline_bound_graph import Float64Array, PathGraph
from packing._jit import jit, jit_inner

_PRICE_SCALE = 0.25
"""What a micro-batch that is twice full costs a price row, over the length of the longest path of even sizes."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Game:
    """Samples by kind.

    Attributes:
        times: of all samples of a kind, of one mean replica, float64 [J, C]; component 0 and S are the encoder's.
        loads: what they fill of one micro-batch, per capacity, float64 [J, D]; sums to M where all are full.
        unit: micro-batches of a unit inside which encoder work may be exchanged; 0 where none is.
    """

    times: Float64Array
    loads: Float64Array
    unit: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Solved:
    """Averages of both players.

    Attributes:
        weights: of the paths, float64 [K], sum 1.
        prices: of a full micro-batch, in time, float64 [D, M].
        length: of the longest path for micro-batches of even sizes.
    """

    weights: Float64Array
    prices: Float64Array
    length: float


def solve_game(
    game: Game, pool: Int64Array, graph: PathGraph, *, num_rounds: int, num_iterations: int
) -> tuple[Solved, Int64Array]:
    """Near the best mixture of the paths int64 [K, C, M], and the paths: after each round but the last the longest one
    for the sizes so far joins."""
    play = _Play.start(game, pool)
    for _ in range(num_rounds - 1):
        play.run(num_iterations)
        play.add(graph.longest_path(play.sizes()))
    play.run(num_iterations)
    return play.solved(), play.pool


@dataclass(slots=True, kw_only=True, eq=False)
class _Play:
    """A game that goes on: regrets and averages, price rows first so that paths can join."""

    game: Game
    pool: Int64Array
    apart: Float64Array  # times with encoders that choose their own place, else zero, [J, C]
    scale: float
    payoff: Float64Array  # [J, M, K]
    encoder: Float64Array
    rows: Float64Array  # regret, weight, average [3, D * M + K]
    columns: Float64Array  # regret, share, average [3, J, M]
    entries: Float64Array  # the same for places inside a unit; the average is that of both choices
    num_done: int = 0

    @classmethod
    def start(cls, game: Game, pool: Int64Array) -> "_Play":
        """Even weights and even sizes."""
        num_kinds, num_components = game.times.shape
        num_microbatches = pool.shape[2]
        num_stages = num_components // 3
        apart = np.zeros_like(game.times)
        if game.unit > 1:
            apart[:, ::num_stages] = game.times[:, ::num_stages]
        columns = np.zeros((3, num_kinds, num_microbatches))
        columns[1] = 1.0 / num_microbatches
        entries = np.zeros_like(columns)
        first = np.arange(num_microbatches) // max(game.unit, 1) * max(game.unit, 1)
        entries[1] = 1.0 / (np.minimum(first + max(game.unit, 1), num_microbatches) - first)
        rows = np.zeros((3, game.loads.shape[1] * num_microbatches + len(pool)))
        rows[1, -len(pool) :] = 1.0 / len(pool)
        total = game.times.sum(axis=0)
        lengths = (pool.sum(axis=2) * total).sum(axis=1) / num_microbatches
        play = cls(
            game=game,
            pool=pool,
            apart=apart,
            scale=max(float(lengths.max()), 1e-300),
            payoff=np.empty((0, 0, 0)),
            encoder=np.empty((0, 0, 0)),
            rows=rows,
            columns=columns,
            entries=entries,
        )
        play.payoff, play.encoder = play.payoffs(pool)
        return play

    def payoffs(self, paths: Int64Array) -> tuple[Float64Array, Float64Array]:
        """Of paths [K, C, M], without and of what has its own place: [J, M, K] each."""
        num_paths, num_components, num_microbatches = paths.shape
        table = np.ascontiguousarray(paths.transpose(1, 2, 0), dtype=np.float64).reshape(num_components, -1)
        shape = len(self.game.times), num_microbatches, num_paths
        payoff = _product((self.game.times - self.apart) / self.scale, table).reshape(shape)
        return payoff, _product(self.apart / self.scale, table).reshape(shape)

    def add(self, path: Int64Array) -> None:
        """One more path."""
        self.pool = np.concatenate([self.pool, path[np.newaxis]])
        payoff, encoder = self.payoffs(path[np.newaxis])
        self.payoff = np.concatenate([self.payoff, payoff], axis=2)
        self.encoder = np.concatenate([self.encoder, encoder], axis=2)
        self.rows = np.concatenate([self.rows, np.zeros((3, 1))], axis=1)

    def run(self, num_iterations: int) -> None:
        """Some more rounds of both players."""
        _play(
            self.payoff,
            self.encoder,
            self.game.loads,
            max(self.game.unit, 1),
            self.num_done,
            num_iterations,
            self.rows,
            self.columns,
            self.entries,
        )
        self.num_done += num_iterations

    def sizes(self) -> Float64Array:
        """Times of the micro-batches on average, [C, M]."""
        rounds = self.num_done * (self.num_done + 1) / 2
        own = np.ascontiguousarray((self.game.times - self.apart).T / rounds)
        sizes: Float64Array = _product(own, self.columns[2])
        if self.game.unit > 1:
            sizes += _product(np.ascontiguousarray(self.apart.T / rounds), self.entries[2])
        return sizes

    def solved(self) -> Solved:
        """Weights and prices on average."""
        num_prices = self.rows.shape[1] - len(self.pool)
        average = self.rows[2]
        total = max(float(average[num_prices:].sum()), 1e-300)
        prices = average[:num_prices].reshape(-1, self.pool.shape[2]) * (_PRICE_SCALE * self.scale / total)
        return Solved(weights=average[num_prices:] / total, prices=prices, length=self.scale)


@jit
def _product(left: Float64Array, right: Float64Array) -> Float64Array:
    """left @ right, added up in a fixed order."""
    out = np.zeros((left.shape[0], right.shape[1]))
    for row in range(left.shape[0]):
        for inner in range(left.shape[1]):
            if left[row, inner] != 0.0:
                for column in range(right.shape[1]):
                    out[row, column] += left[row, inner] * right[inner, column]
    return out


@jit
def _play(  # noqa: PLR0917  kernels take flat arguments
    payoff: Float64Array,
    encoder: Float64Array,
    loads: Float64Array,
    unit: int,
    num_done: int,
    num_iterations: int,
    rows: Float64Array,
    columns: Float64Array,
    entries: Float64Array,
) -> None:
    """Rounds of both players; changes `rows`, `columns` and `entries`, see `_Play`."""
    num_kinds, num_microbatches, num_paths = payoff.shape
    num_prices = loads.shape[1] * num_microbatches
    weights = rows[1, num_prices:].copy()
    loss, share = np.empty(num_microbatches), np.empty(num_microbatches)
    gain = np.empty(num_prices + num_paths)
    lengths = gain[num_prices:]
    for iteration in range(num_done, num_done + num_iterations):
        lengths[:] = 0.0
        gain[:num_prices] = -1.0
        for kind in range(num_kinds):
            for m in range(num_microbatches):
                loss[m] = _weighted(weights, payoff[kind, m])
            for limit in range(loads.shape[1]):
                for m in range(num_microbatches):
                    loss[m] += rows[1, limit * num_microbatches + m] * (_PRICE_SCALE * loads[kind, limit])
            if unit > 1:
                for m in range(num_microbatches):
                    share[m] = _weighted(weights, encoder[kind, m])
                for start in range(0, num_microbatches, unit):
                    stop = min(start + unit, num_microbatches)
                    value = _choose(share[start:stop], entries[0, kind, start:stop], entries[1, kind, start:stop])
                    loss[start:stop] += value
            _choose(loss, columns[0, kind], columns[1, kind])
            for m in range(num_microbatches):
                size = columns[1, kind, m]
                columns[2, kind, m] += (iteration + 1) * size
                if size > 0.0:
                    _add_scaled(lengths, payoff[kind, m], size)
                    for limit in range(loads.shape[1]):
                        gain[limit * num_microbatches + m] += size * loads[kind, limit]
            if unit > 1:
                for start in range(0, num_microbatches, unit):
                    stop = min(start + unit, num_microbatches)
                    reach = 0.0
                    for m in range(start, stop):
                        reach += columns[1, kind, m]
                    for m in range(start, stop):
                        size = reach * entries[1, kind, m]
                        entries[2, kind, m] += (iteration + 1) * size
                        if size > 0.0:
                            _add_scaled(lengths, encoder[kind, m], size)
        # A price row gets what the paths get, and more where the micro-batch is over-full.
        total = 0.0
        for k in range(num_paths):
            total += weights[k]
        length = _weighted(weights, lengths) / total if total > 0.0 else lengths.max()
        value = 0.0
        for row in range(num_prices):
            gain[row] = length + _PRICE_SCALE * gain[row]
            value += rows[1, row] * gain[row]
        value += _weighted(weights, lengths)
        total = 0.0
        for row in range(num_prices + num_paths):
            rows[0, row] = max(rows[0, row] + gain[row] - value, 0.0)
            total += rows[0, row]
        for row in range(num_prices + num_paths):
            even = 1.0 / num_paths if row >= num_prices else 0.0
            rows[1, row] = rows[0, row] / total if total > 0.0 else even
            rows[2, row] += (iteration + 1) * rows[1, row]
        weights[:] = rows[1, num_prices:]


@jit_inner
def _choose(loss: Float64Array, regret: Float64Array, share: Float64Array) -> float:
    """What the shares lose; regrets and shares of the next round."""
    value, total = 0.0, 0.0
    for place in range(len(loss)):
        value += share[place] * loss[place]
    for place in range(len(loss)):
        regret[place] = max(regret[place] + value - loss[place], 0.0)
        total += regret[place]
    for place in range(len(loss)):
        share[place] = regret[place] / total if total > 0.0 else 1.0 / len(loss)
    return value


@jit_inner
def _weighted(weights: Float64Array, values: Float64Array) -> float:
    """Their product, in four sums that the machine can add side by side."""
    a, b, c, d = 0.0, 0.0, 0.0, 0.0
    whole = len(weights) // 4 * 4
    for k in range(0, whole, 4):
        a += weights[k] * values[k]
        b += weights[k + 1] * values[k + 1]
        c += weights[k + 2] * values[k + 2]
        d += weights[k + 3] * values[k + 3]
    for k in range(whole, len(weights)):
        a += weights[k] * values[k]
    return (a + b) + (c + d)


@jit_inner
def _add_scaled(target: Float64Array, values: Float64Array, factor: float) -> None:
    for k in range(len(target)):
        target[k] += factor * values[k]
