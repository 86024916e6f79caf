"""What one media item costs, as plain numbers: the currency between estimators, the index and the planner."""

from dataclasses import dataclass
from enum import IntEnum


class MediaKind(IntEnum):
    """Kind of a media item as stored in the index."""

    IMAGE = 0
    VIDEO = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentStats:
    """Attention segments of one kind: attention time is a function of `total` (linear part) and `total_sq`.

    Attributes:
        count: number of segments.
        total: sum of segment lengths l, in patches.
        total_sq: sum of l squared.
        longest: the largest l.
    """

    count: int = 0
    total: int = 0
    total_sq: int = 0
    longest: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ItemCounts:
    """Counts of one media item, derived from its header and the exact processor config.

    Attributes:
        llm_tokens: positions in the LLM sequence that receive a visual embedding (delimiters excluded).
        patches: vision-tower tokens before merging, as really encoded.
        tiles: crops the item is cut into (1 for native-resolution families).
        frames: frames handed to the vision tower, padding included (1 for an image).
        grid: (t, h, w) in patches; t is counted after temporal merging.
        height_px, width_px: size the pixels are resized to.
        full: segments of full attention (per temporal slice).
        window: segments of window attention.
    """

    llm_tokens: int
    patches: int
    tiles: int
    frames: int
    grid: tuple[int, int, int]
    height_px: int
    width_px: int
    full: SegmentStats
    window: SegmentStats
