"""Ceilings that are compared with what a header claims before anything of that size is allocated."""

from dataclasses import dataclass, fields

from dataloaders.errors import MediaError, Reason


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeLimits:
    """Largest media that are accepted; beyond them a medium is `too_large` (law 7: data is data).

    Attributes:
        max_side_px: of an image or a frame. Real files claim billions of rows; 65,535 is what JPEG can hold.
        max_pixels: width x height of an image. The default is where Pillow itself refuses; to go beyond it,
            raise `PIL.Image.MAX_IMAGE_PIXELS` as well.
        max_frame_pixels: width x height of a video frame. The default admits 8K.
        max_frames: frames of a video (the default is about 18 hours at 30 frames per second).
        max_bytes: encoded size of one medium.
        max_header_bytes: bytes that the header of one image may make the probe fetch (a frame count may lie far inside
            the file).
        max_probe_s: time one video may take to have its packets counted.
        max_bad_frames: damage of a video that decoding puts up with; above it the video is `corrupt` and a stand-in
            takes its place. Below 1: a share, of the packets read and of the frames planned; from 1 on: a number of
            either. Repeats of the last frame count where packets were bad, not where a header promised too much.
    """

    max_side_px: int = 65_535
    max_pixels: int = 178_956_970
    max_frame_pixels: int = 8192 * 4608
    max_frames: int = 2_000_000
    max_bytes: int = 4 * 1024**3
    max_header_bytes: int = 64 * 1024**2
    max_probe_s: float = 60.0
    max_bad_frames: float = 0.5

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not (value >= 0 if field.name == "max_bad_frames" else value > 0):
                raise ValueError(f"ProbeLimits.{field.name}={value!r}: a ceiling is positive")

    def check_bytes(self, size: int, *, place: str) -> None:
        """Raise `MediaError` for an empty medium or one above `max_bytes`."""
        if size <= 0:
            raise MediaError(Reason.EMPTY_FILE, "the file has 0 bytes", place=place, remedy="Remove or replace it.")
        if size > self.max_bytes:
            raise MediaError(
                Reason.TOO_LARGE,
                f"{size} encoded bytes exceed max_bytes={self.max_bytes}",
                place=place,
                remedy="Raise ProbeLimits.max_bytes if the file is meant.",
            )

    def check_size(self, width_px: int, height_px: int, *, place: str, frame: bool = False) -> None:
        """Raise `MediaError` for a side below 1 px or sizes above the ceilings; `frame` selects the video ceiling."""
        name, max_pixels = ("max_frame_pixels", self.max_frame_pixels) if frame else ("max_pixels", self.max_pixels)
        if width_px < 1 or height_px < 1:
            raise MediaError(
                Reason.TOO_SMALL, f"the header claims {width_px}x{height_px} px", place=place, remedy="Remove it."
            )
        side = self.max_side_px
        if width_px > side or height_px > side or width_px * height_px > max_pixels:
            raise MediaError(
                Reason.TOO_LARGE,
                f"the header claims {width_px}x{height_px} px, above max_side_px={self.max_side_px} or "
                f"{name}={max_pixels}; it was not decoded",
                place=place,
                remedy=f"Shrink the file, or raise ProbeLimits.{name} if it is meant.",
            )

    def check_bad_frames(self, *, bad: int, read: int, repeated: int, wanted: int, place: str) -> None:
        """Raise `MediaError` for a video with more damage than `max_bad_frames`.

        Args:
            bad, read: packets that did not decode, of how many.
            repeated, wanted: planned frames that a neighbour stands for, of how many.
        """
        if not bad:
            return
        ceiling = self.max_bad_frames
        as_share = ceiling < 1
        packets, frames = (bad / max(read, 1), repeated / max(wanted, 1)) if as_share else (bad, repeated)
        if max(packets, frames) > ceiling:
            raise MediaError(
                Reason.CORRUPT,
                f"{bad} of {read} packets do not decode and {repeated} of {wanted} frames are missing, "
                f"above max_bad_frames={ceiling:g}",
                place=place,
                remedy="Remove or replace the file, or raise ProbeLimits.max_bad_frames.",
            )
