"""Image headers: display size, orientation, frames and mode, with no pixel decoded.

    first 4 KiB --sniff--> parser of the format --> ImageHeader --ceilings, orientation switch--> ImageMeta
                              | more by offset, only where the header lies behind them
                              | AVIF that our parser does not understand
                              v
                           Pillow's opinion, else MediaError

Why own parsers: over a reference collection `imagesize` has 10 of 107 sound images wrong at half of Pillow's time, and
Pillow reads WebP and AVIF whole and inflates texts; these take a quarter of Pillow's time. They must agree with what
Pillow decodes (law 6), so each follows Pillow's rules where a format leaves room, and decoding asks `orientation_of`,
the same parsers, how to turn an image. In AVIF and HEIC alone libraries know more than our parser; in the other formats
Pillow's header code accepts nothing more (fuzzed), steps byte by byte and believes sizes, so it is not asked.
"""

import os
import struct
from dataclasses import dataclass
from typing import BinaryIO, Literal

from PIL import Image

from dataloaders.errors import MediaError, Reason
from dataloaders.probe.image_header import ImageHeader
from dataloaders.probe.image_pillow import (
    FORMATS,
    TURNED_BY_READER,
    can_decode,
    not_an_image,
    open_image,
    pillow_orientation,
    second_opinion,
)
from dataloaders.probe.image_sniff import parser_for
from dataloaders.probe.limits import ProbeLimits
from dataloaders.probe.reader import MediaSource, Window, place_of

__all__ = ["FORMATS", "ImageMeta", "open_image", "orientation_of", "probe_image", "turned_by_reader", "turns_sideways"]

_SIDEWAYS = frozenset({5, 6, 7, 8})
_SECOND_OPINION_BYTES = 16 << 20
_DEFAULT_LIMITS = ProbeLimits()


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageMeta:
    """What an image header says.

    Attributes:
        width_px, height_px: display size, after orientation when it is applied.
        format: Pillow's name (`JPEG`, `PNG`, `WEBP`, ...), from the content and never from the file's name.
        orientation: EXIF value 1..8 (1 where there is none or it is invalid), whether applied or not.
        frames: of an animation or a multi-page file; only the first is used.
        mode: Pillow's mode as stored (`RGB`, `P`, `I;16`, ...).
        frames_exact: False: there may be more than `frames`, as counting ended early (a damaged or very long file).
        decodable: False where the size is known but nothing installed decodes the pixels (HEIC without a plug-in for
            Pillow, big-endian BigTIFF).
        confidence: always "header" for images.
    """

    width_px: int
    height_px: int
    format: str
    orientation: int
    frames: int
    mode: str
    frames_exact: bool = True
    decodable: bool = True
    confidence: Literal["header"] = "header"


def probe_image(
    src: MediaSource, *, apply_orientation: bool = True, limits: ProbeLimits | None = None, place: str = ""
) -> ImageMeta:
    """Read an image's header.

    Args:
        src: encoded bytes, a path, or a `ByteReader`.
        apply_orientation: report the size after EXIF or XMP (AVIF and HEIC: irot and imir) orientation. It must equal
            the switch that decoding gets. TIFF is turned by its reader either way.
        limits: ceilings; the defaults of `ProbeLimits` when None.
        place: what errors name as the origin; a path names itself.

    Raises:
        MediaError: the image cannot be used; `reason` says why.
        OSError: the storage failed.
    """
    limits, place = limits or _DEFAULT_LIMITS, place_of(src, place)
    with Window(src, limits=limits, place=place) as window:
        header = _checked_header(window)
    width_px, height_px = header.width_px, header.height_px
    if header.orientation in _SIDEWAYS and (apply_orientation or header.turned):
        width_px, height_px = height_px, width_px
    return ImageMeta(
        width_px=width_px,
        height_px=height_px,
        format=header.format,
        orientation=header.orientation,
        frames=header.frames,
        mode=header.mode,
        frames_exact=header.frames_exact,
        decodable=header.decodable and (header.format != "HEIF" or can_decode("HEIF")),
    )


def orientation_of(image: Image.Image) -> int:
    """EXIF orientation 1..8 of an opened, not yet loaded image, by the rules of `probe_image`."""
    file = getattr(image, "fp", None)
    if file is None:
        return pillow_orientation(image)
    position = file.tell()
    try:
        with Window(_FileRanges(file), limits=_DEFAULT_LIMITS, place="") as window:
            return read_header(window).orientation
    except MediaError:  # Pillow opened what our parser refuses: its opinion counted in probing, too
        return pillow_orientation(image)
    finally:
        file.seek(position)


def turns_sideways(image: Image.Image, orientation: int) -> bool:
    """Whether applying `orientation` swaps width and height of the pixels as Pillow decodes them."""
    return orientation in _SIDEWAYS and not turned_by_reader(image)


def turned_by_reader(image: Image.Image) -> bool:
    """Whether the decoder of this format turns the pixels by itself."""
    return image.format in TURNED_BY_READER


def read_header(window: Window) -> ImageHeader:
    """The header by our own parser.

    Raises:
        MediaError: no format that is known, or its parser refuses it.
    """
    parser = parser_for(window.head)
    if parser is None:
        raise not_an_image(window.head[:512], window.size, window.place)
    try:
        return parser(window)
    except (IndexError, struct.error):  # a field beyond the end of what is there
        raise window.truncated() from None


def _checked_header(window: Window) -> ImageHeader:
    try:
        header = read_header(window)
    except MediaError as error:
        if error.reason is not Reason.CORRUPT or window.head[4:8] != b"ftyp" or window.size > _SECOND_OPINION_BYTES:
            raise
        header = _second_opinion(window, error)
    width_px, height_px = header.width_px, header.height_px
    if width_px < 1 or height_px < 1:
        raise window.corrupt(f"a {header.format} whose header claims {width_px}x{height_px} px")
    window.limits.check_size(width_px, height_px, place=window.place)
    return header


def _second_opinion(window: Window, error: MediaError) -> ImageHeader:
    try:
        return second_opinion(window)
    except MemoryError:
        raise error from None
    except MediaError as other:
        # Our parser says more precisely what is wrong, unless Pillow saw that the file is a bomb.
        raise (other if other.reason is Reason.TOO_LARGE else error) from None


class _FileRanges:
    """A seekable file as a `ByteReader`."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.size = file.seek(0, os.SEEK_END)

    def read(self, offset: int, size: int) -> bytes:
        """Bytes [offset, offset + size) of the file."""
        self._file.seek(offset)
        return self._file.read(size)
