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
        llm_tokens: positions of the LLM sequence that the item's placeholder becomes: visual tokens, and what the
            processor writes between and around them (row ends, separators, timestamps). Delimiters that the chat
            template itself writes around the placeholder are not in it.
        visual_tokens: those of them that receive a visual embedding. In a model that attends to images across
            (Mllama), the keys and values of that attention, which are no positions of the sequence.
        patches: vision-tower tokens before merging that come from the item's own pixels.
        padded_patches: what the tower runs at most, where the processor pads: to a fixed number of tiles, or to the
            largest batch mate that the configuration permits. None: it does not pad.
        tiles: crops the item is cut into, thumbnail included (1 for native-resolution families).
        frames: frames handed to the vision tower, padding included (1 for an image).
        grid: (t, h, w) in patches; t counts temporal positions after temporal merging, or tiles. (0, 0, 0) where
            tiles differ in size.
        height_px, width_px: size the pixels are resized to (of one tile, or of the canvas that is cut into tiles).
        full: segments of full attention (per temporal position or tile).
        window: segments of window attention.
    """

    llm_tokens: int
    visual_tokens: int
    patches: int
    padded_patches: int | None = None
    tiles: int = 1
    frames: int = 1
    grid: tuple[int, int, int] = (0, 0, 0)
    height_px: int
    width_px: int
    full: SegmentStats
    window: SegmentStats = SegmentStats()

    @property
    def encoded_patches(self) -> int:
        """Vision-tower tokens to reckon with: `padded_patches` where the processor pads, else `patches`."""
        return self.patches if self.padded_patches is None else self.padded_patches
