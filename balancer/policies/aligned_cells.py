"""Cells of two kinds, and samples that move between them until the kinds hold: the work of `aligned_media`.

    media cells    at least one sample with media each, any text beside it
    text cells     text only

    start   a b | c      A: media, b c: text           put in order   1. a media cell without media takes one
            cells:  text [A b]   media [c]                            2. a text cell without samples takes text
            pool:   A                                                 3. the pool goes where there is room, least time
    end     text [b]     media [c A]                                     first; text makes way for media

Price: greedy, and one pass; a media cell too full for what must go there gives its text away, largest first.
"""

import numpy as np
from numpy.typing import NDArray

from balancer.counts import Int64Array

IN_POOL = -1
"""Cell of a sample that has none yet."""

Mask = NDArray[np.bool_]


class AlignedCells:
    """Samples in the cells of R ranks, under hard capacities.

    Args:
        cell_of: int64 [n], dp_rank * M + micro-batch; IN_POOL without one. Text cells hold no media.
        media: bool [n], samples with media.
        is_media_cell: bool [C], the kind of every cell; C = R * M.
        sizes, capacity: int64 [n, d] and [d].
        time_ns: int64 [n].
        num_microbatches: M, cells of a rank.
        totals_count: whether ranks with the least total time come first, before cells with the least time.
    """

    def __init__(
        self,
        cell_of: Int64Array,
        *,
        media: Mask,
        is_media_cell: Mask,
        sizes: Int64Array,
        capacity: Int64Array,
        time_ns: Int64Array,
        num_microbatches: int,
        totals_count: bool,
    ) -> None:
        num_cells = len(is_media_cell)
        self.cell_of = np.full(len(cell_of), IN_POOL, dtype=np.int64)
        self._media, self._is_media_cell = media, is_media_cell
        self._sizes, self._capacity, self._time = sizes, capacity, time_ns
        self._num_microbatches, self._totals_count = num_microbatches, totals_count
        self._rank = np.arange(num_cells) // num_microbatches
        self._load = np.zeros((num_cells, sizes.shape[1]), dtype=np.int64)
        self._media_load = np.zeros_like(self._load)
        self._held, self._num_media, self._cell_time = (np.zeros(num_cells, dtype=np.int64) for _ in range(3))
        self._rank_time = np.zeros(num_cells // num_microbatches, dtype=np.int64)
        placed = np.flatnonzero(cell_of != IN_POOL)
        self._add(placed, cell_of[placed], 1)

    def settle(self, order: Int64Array, *, fill: bool) -> bool:
        """Give every sample a cell of its kind.

        Args:
            order: rows in the order in which those in the pool are placed, media and text each.
            fill: every cell has to hold a sample. False: a rank fills its empty cells from its own.

        Returns:
            Whether that was possible; `cell_of` is complete then.
        """
        for cell in np.flatnonzero(self._is_media_cell & (self._num_media == 0)).tolist():
            if not self._feed_media(cell):
                return False
        for cell in np.flatnonzero(~self._is_media_cell & (self._held == 0)).tolist():
            if not self._feed_text(cell, anywhere=fill) and fill:
                return False
        if fill and not bool(self._held.all()):
            return False
        pooled = order[self.cell_of[order] == IN_POOL]
        if not all(self._place_media(row) for row in pooled[self._media[pooled]].tolist()):
            return False
        pooled = order[self.cell_of[order] == IN_POOL]  # with the text that made way
        return all(self._place(row, self._any_cell()) for row in pooled.tolist())

    def _add(self, rows: Int64Array, cells: Int64Array, sign: int) -> None:
        """Put `rows` into `cells` (sign 1) or take them out (-1); int64 [k] both."""
        self.cell_of[rows] = cells if sign > 0 else IN_POOL
        np.add.at(self._load, cells, sign * self._sizes[rows])
        np.add.at(self._held, cells, sign)
        np.add.at(self._cell_time, cells, sign * self._time[rows])
        np.add.at(self._rank_time, self._rank[cells], sign * self._time[rows])
        with_media = self._media[rows]
        np.add.at(self._num_media, cells[with_media], sign)
        np.add.at(self._media_load, cells[with_media], sign * self._sizes[rows[with_media]])

    def _move(self, row: int, cell: int) -> None:
        if self.cell_of[row] != IN_POOL:
            self._take(row)
        self._add(np.array([row]), np.array([cell]), 1)

    def _take(self, row: int) -> None:
        self._add(np.array([row]), self.cell_of[[row]], -1)

    def _any_cell(self) -> Mask:
        return np.ones(len(self._held), dtype=np.bool_)

    def _feed_media(self, cell: int) -> bool:
        """A sample with media for a media cell that has none: from the pool, or from a cell that keeps another."""
        rows = np.flatnonzero(self._media & (self.cell_of == IN_POOL))
        if not len(rows):
            shared = self._num_media[self.cell_of] > 1  # nothing is in the pool, so every sample has a cell
            rows = np.flatnonzero(self._media & shared)
        if not len(rows):
            return False
        # An empty cell takes the heaviest; to a full one the lightest that fits brings the least disorder.
        if not self._held[cell]:
            self._move(int(rows[self._time[rows].argmax()]), cell)
            return True
        fits = (self._load[cell] + self._sizes[rows] <= self._capacity).all(axis=1)
        rows = rows[fits] if fits.any() else rows
        self._squeeze_in(int(rows[self._time[rows].argmin()]), cell)
        return True

    def _feed_text(self, cell: int, *, anywhere: bool) -> bool:
        """A text sample for an empty text cell: from the pool, else one that halves the time of its cell best."""
        rows = np.flatnonzero(~self._media & (self.cell_of == IN_POOL))
        if len(rows):
            self._move(int(rows[self._time[rows].argmax()]), cell)
            return True
        rows = np.flatnonzero(~self._media)
        rows = rows[self._held[self.cell_of[rows]] > 1]
        own = self._rank[self.cell_of[rows]] == self._rank[cell]
        rows = rows if anywhere and not own.any() else rows[own]
        if not len(rows):
            return False
        rest = self._cell_time[self.cell_of[rows]] - self._time[rows]
        self._move(int(rows[np.minimum(self._time[rows], rest).argmax()]), cell)
        return True

    def _place(self, row: int, allowed: Mask) -> bool:
        """Put a sample where there is room and the least time."""
        room = np.flatnonzero(allowed & (self._load + self._sizes[row] <= self._capacity).all(axis=1))
        if not len(room):
            return False
        times = self._cell_time[room]
        if self._totals_count:
            totals = self._rank_time[self._rank[room]]
            least = totals == totals.min()
            room, times = room[least], times[least]
        self._move(row, int(room[times.argmin()]))
        return True

    def _place_media(self, row: int) -> bool:
        """Put a sample with media into a media cell; where none has room, text makes way."""
        if self._place(row, self._is_media_cell):
            return True
        possible = (self._media_load + self._sizes[row] <= self._capacity).all(axis=1) & self._is_media_cell
        cells = np.flatnonzero(possible)
        if not len(cells):
            return False
        self._squeeze_in(row, int(cells[self._cell_time[cells].argmin()]))
        return True

    def _squeeze_in(self, row: int, cell: int) -> None:
        """Put a sample into a cell whose text, without which it fits, goes back to the pool until it does."""
        text = np.flatnonzero(~self._media & (self.cell_of == cell))
        over = self._load[cell] + self._sizes[row] - self._capacity
        tightest = int(over.argmax())
        for leaving in text[np.argsort(-self._sizes[text, tightest], kind="stable")].tolist():
            if bool((self._load[cell] + self._sizes[row] <= self._capacity).all()):
                break
            self._take(leaving)
        self._move(row, cell)
