"""GIF headers and frame counts.

    GIF8xa | screen: width height flags .. | colours | { 21 label data blocks | 2C x y w h flags data blocks } | 3B

The size is that of the logical screen, enlarged where the first frame reaches beyond it, as Pillow does. Nothing in the
file says how many frames there are, so they are counted by stepping over their data blocks (255 bytes at a time), which
reads the file up to `ProbeLimits.max_header_bytes`; `frames_exact` is False where counting ended early.
"""

from dataloaders.errors import MediaError
from dataloaders.probe.image_header import ImageHeader
from dataloaders.probe.reader import Window

_MAX_STEPS = 2_000_000  # data blocks: less than a second of work, and 500 MB of an ordinary file
_BLOCK_BYTES = 64 * 1024
_EXTENSION, _FRAME, _TRAILER = 0x21, 0x2C, 0x3B


def read_gif(window: Window) -> ImageHeader:
    """Header of a GIF file.

    Raises:
        MediaError: `truncated` before the first frame, or `corrupt` without one.
    """
    screen = window.at(0, 13)
    width_px, height_px = int.from_bytes(screen[6:8], "little"), int.from_bytes(screen[8:10], "little")
    position, colours = 13, b""
    if screen[10] & 0x80:
        colours = window.at(position, 6 << (screen[10] & 7))
        position += len(colours)
    walk = _Walk(window, position)
    if not walk.next_frame():
        raise window.corrupt("a GIF without a frame")
    frame = window.at(walk.position, 9)
    left, top, width, height = (int.from_bytes(frame[i : i + 2], "little") for i in (0, 2, 4, 6))
    if frame[8] & 0x80:
        colours = window.at(walk.position + 9, 6 << (frame[8] & 7))
    frames, exact = _count(walk, window.limits.max_frames)
    return ImageHeader(
        "GIF",
        max(width_px, left + width),
        max(height_px, top + height),
        "P" if _has_colours(colours) else "L",
        frames=frames,
        frames_exact=exact,
    )


def _has_colours(colours: bytes) -> bool:
    """Whether a palette is more than the grey ramp 0, 1, 2, ... (Pillow calls an image with that ramp grey)."""
    ramp = bytes(range(len(colours) // 3))
    return not colours[0::3] == colours[1::3] == colours[2::3] == ramp


def _count(walk: "_Walk", max_frames: int) -> tuple[int, bool]:
    """(frames from the current one on, whether the end was reached)."""
    frames = 1
    try:
        while walk.skip_frame() and walk.next_frame():
            frames += 1
            if frames >= max_frames:
                return frames, False
    except MediaError:  # the file is cut, or longer than the budget: the first frame is sound
        return frames, False
    return frames, walk.steps < _MAX_STEPS


class _Walk:
    """A position in the block structure."""

    __slots__ = ("position", "steps", "window")

    def __init__(self, window: Window, position: int) -> None:
        self.window, self.position, self.steps = window, position, 0

    def next_frame(self) -> bool:
        """Move behind the next frame's introducer; False at the trailer. Stray bytes between blocks are skipped."""
        while self.steps < _MAX_STEPS:
            self.steps += 1
            data, base = self.window.block(self.position, 2)
            at = self.position - base
            if at >= len(data):
                raise self.window.truncated("the GIF")
            self.position += 1
            if data[at] == _FRAME:
                return True
            if data[at] == _TRAILER:
                return False
            if data[at] == _EXTENSION:
                self.position += 1
                self._skip_blocks()
        return False

    def skip_frame(self) -> bool:
        """Move from behind a frame's introducer to behind its data."""
        flags = self.window.at(self.position, 10)[8]
        self.position += 10 + (6 << (flags & 7) if flags & 0x80 else 0)
        self._skip_blocks()
        return self.steps < _MAX_STEPS

    def _skip_blocks(self) -> None:
        window, position, steps = self.window, self.position, self.steps
        data, base = window.block(position, 1)
        at = position - base
        while steps < _MAX_STEPS:
            if at >= len(data):
                position = base + at
                if position >= window.size:
                    raise window.truncated("the GIF")
                data, base = window.block(position, _BLOCK_BYTES)
                at = position - base
            steps += 1
            length = data[at]
            at += length + 1
            if not length:
                break
        self.position, self.steps = base + at, steps
