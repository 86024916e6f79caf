"""Multimodal rotary positions (M-RoPE) of Qwen2.5-VL: three indices (time, height, width) for every token of a sample.

Text advances all three axes together. A medium whose placeholders start at position index p gets
`(p + floor(i * time_step), p + row, p + column)` for slice i, and text goes on at the largest index so far plus one:

    tokens     a  [ 2x2 image ]  b            grid (1, 4, 4) in patches, merge 2
    time       0   1  1  1  1    3
    height     0   1  1  2  2    3
    width      0   1  2  1  2    3

Source: Qwen2.5-VL technical report (arXiv 2502.13923) and its released model code, with which the weights were trained.
Note: transformers 5.x goes on at `p + max(rows, columns)` instead. The two differ only behind a video whose time axis
is longer than both sides of its merged grid; there the released code, followed here, never gives an index twice.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dataloaders.chat import MediaSpan
from dataloaders.errors import DataError


def mrope_positions(
    length: int,
    spans: Sequence[MediaSpan],
    grids: ArrayLike,
    *,
    merge: int = 2,
    time_steps: Sequence[float] = (),
) -> NDArray[np.int64]:
    """Positions of one sample, from 0: int64 [3, length].

    Args:
        length: tokens of the sample.
        spans: placeholders, ascending; `media_index` selects the rows of `grids` and `time_steps`.
        grids: [num_items, 3], (t, h, w) in patches.
        merge: patches per side that become one visual token.
        time_steps: per item, time indices from one temporal slice to the next: the config's tokens per second times the
            seconds of a slice for video; unused for an image, which has a single slice.

    Raises:
        DataError: a span whose length is not t * (h / merge) * (w / merge), that overlaps, or lies outside the sample.
    """
    cells = np.asarray(grids, dtype=np.int64).reshape(-1, 3)
    positions = np.empty((3, length), dtype=np.int64)
    cursor, following = 0, 0  # next token to fill, its position index
    for span in spans:
        if span.start < cursor or span.start + span.count > length:
            raise DataError(f"{span} overlaps another one or leaves the {length} tokens", place="mrope_positions")
        num_text = span.start - cursor
        positions[:, cursor : span.start] = np.arange(following, following + num_text)
        following += num_text
        block = _media_block(cells[span.media_index], merge, time_steps[span.media_index])
        if block.shape[1] != span.count:
            grid = tuple(cells[span.media_index].tolist())
            raise DataError(
                f"{span} does not hold the {block.shape[1]} visual tokens of grid {grid} with merge {merge}",
                place="mrope_positions",
                remedy="Counts and grids must come from one cost index.",
            )
        cursor = span.start + span.count
        positions[:, span.start : cursor] = block + following
        following += int(block.max()) + 1
    positions[:, cursor:] = np.arange(following, following + length - cursor)
    return positions


def _media_block(grid: NDArray[np.int64], merge: int, time_step: float) -> NDArray[np.int64]:
    """Indices of one medium relative to its first position: int64 [3, t * h/merge * w/merge]."""
    num_slices, rows, columns = int(grid[0]), int(grid[1]) // merge, int(grid[2]) // merge
    times = np.floor(np.arange(num_slices) * float(time_step)).astype(np.int64)
    # axes: (3 indices, t, h, w) -> (3, t * h * w)
    return np.stack(np.meshgrid(times, np.arange(rows), np.arange(columns), indexing="ij")).reshape(3, -1)
