"""Pillow, held on a short leash: the decoder of images, and the second opinion on AVIF that our parser cannot read.

Formats are an explicit list; plugins that run other programs (EPS) or parse XML (SVG) are not on it. Whatever Pillow
raises becomes a `MediaError` with a reason code.
"""

import io
import threading
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import BinaryIO

from PIL import Image, UnidentifiedImageError

from dataloaders.errors import MediaError, Reason
from dataloaders.probe.image_exif import ORIENTATION, valid_orientation
from dataloaders.probe.image_header import ImageHeader
from dataloaders.probe.image_sniff import foreign_name, parser_for
from dataloaders.probe.reader import Window, storage_failed

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "DIB", "TIFF", "JPEG2000", "AVIF", "PPM", "HEIF")
# The decoders of these turn the pixels themselves (HEIC decoders are plug-ins for Pillow, and do the same).
TURNED_BY_READER = frozenset({"TIFF", "HEIF"})


class _Quiet:
    """Silences Pillow's warnings: their content (bombs, broken metadata) is judged by our own limits and errors.

    `warnings.catch_warnings` swaps process-wide state, so overlapping threads share one swap, undone by the last.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._depth = 0
        self._swap: AbstractContextManager[object] | None = None

    def __enter__(self) -> None:
        with self._lock:
            self._depth += 1
            if self._depth == 1:
                self._swap = warnings.catch_warnings()
                self._swap.__enter__()
                warnings.filterwarnings("ignore", module=r"PIL\.")
                warnings.simplefilter("ignore", Image.DecompressionBombWarning)

    def __exit__(self, *exception: object) -> None:
        with self._lock:
            self._depth -= 1
            if self._depth == 0 and self._swap is not None:
                self._swap.__exit__(None, None, None)
                self._swap = None


_quiet = _Quiet()


@contextmanager
def open_image(file: BinaryIO, size: int, *, place: str) -> Iterator[Image.Image]:
    """Open an image lazily (header only); anything Pillow raises here or in the body becomes a `MediaError`."""
    Image.init()
    with _quiet:
        try:
            with Image.open(file, formats=[name for name in FORMATS if name in Image.OPEN]) as image:
                yield image
        except MediaError:
            raise
        except Exception as error:  # parsers of hostile bytes raise anything: struct, zlib, key, overflow, ...
            if storage_failed(error) or isinstance(error, MemoryError):
                raise
            raise _explain(error, file, size, place) from error


def can_decode(name: str) -> bool:
    """Whether Pillow, as it is installed, has a decoder for a format."""
    if name != "HEIF":
        return True
    Image.init()
    return name in Image.OPEN


def second_opinion(window: Window) -> ImageHeader:
    """The header as Pillow reads it from memory (from a file, some of its parsers fetch what a header claims).

    Raises:
        MediaError: Pillow cannot read it either.
    """
    with io.BytesIO(window.peek(0, window.size)) as file, open_image(file, window.size, place=window.place) as image:
        turned = image.format in TURNED_BY_READER
        orientation = 1 if turned else pillow_orientation(image)
        frames = int(getattr(image, "n_frames", 1))
        return ImageHeader(image.format or "", *image.size, image.mode, orientation, frames, turned=turned)


def pillow_orientation(image: Image.Image) -> int:
    """EXIF orientation 1..8 as Pillow reads it from the header; 1 when absent, invalid or unreadable."""
    try:
        # The base method on purpose: PNG's own would load the pixels to look for a chunk behind them.
        value = Image.Image.getexif(image).get(ORIENTATION, 1)
    except Exception:  # EXIF is a TIFF inside the file, with all the ways in which a TIFF can be broken
        return 1
    return valid_orientation(value) if isinstance(value, int) else 1


def _explain(error: Exception, file: BinaryIO, size: int, place: str) -> MediaError:
    """The `MediaError` for what Pillow raised."""
    if isinstance(error, Image.DecompressionBombError):
        return MediaError(Reason.TOO_LARGE, f"not decoded: {error}", place=place, remedy="Shrink the file.")
    if isinstance(error, UnidentifiedImageError):
        file.seek(0)
        head = file.read(64)
        if parser_for(head) is None:
            return not_an_image(head, size, place)
        if foreign_name(head) == "HEIC":
            return no_heic_decoder(place)
        return MediaError(
            Reason.CORRUPT,
            f"its header is damaged ({size} bytes)",
            place=place,
            remedy="Remove or replace the file.",
        )
    cut = isinstance(error, EOFError) or "truncated" in str(error).lower()
    reason = Reason.TRUNCATED if cut else Reason.CORRUPT
    return MediaError(reason, f"{type(error).__name__}: {error}", place=place, remedy="Remove or replace the file.")


def no_heic_decoder(place: str) -> MediaError:
    """The error for a HEIC image that would have to be decoded."""
    return MediaError(
        Reason.UNKNOWN_FORMAT,
        "a HEIC image and no HEIC decoder is installed",
        place=place,
        remedy="Convert it to JPEG or AVIF.",
    )


def not_an_image(head: bytes, size: int, place: str) -> MediaError:
    """The error for a file that is none of the formats; it names what the file is, where that is plain."""
    name = foreign_name(head)
    return MediaError(
        Reason.UNKNOWN_FORMAT,
        f"not an image in any of the formats {', '.join(FORMATS)}{f', but {name}' if name else ''} ({size} bytes)",
        place=place,
        remedy="Remove it, or convert it.",
    )
