"""Image headers: display size, orientation, frames and mode, with no pixel decoded.

Pillow reads the header, because Pillow also decodes: the size that is planned is then the size that is decoded, format
by format (law 6). What it costs: WebP, AVIF and JPEG 2000 members are read whole, GIF and TIFF are walked for
their frame count. Formats are an explicit list; plugins that run other programs (EPS) or parse XML (SVG) are not on it.
"""

import threading
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import BinaryIO, Literal

import imagesize
from PIL import Image, UnidentifiedImageError

from dataloaders.errors import MediaError, Reason
from dataloaders.probe.limits import ProbeLimits
from dataloaders.probe.reader import MediaSource, open_source, place_of, storage_failed

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "DIB", "TIFF", "JPEG2000", "AVIF", "PPM", "HEIF")
_ORIENTATION_TAG = 0x0112
_SIDEWAYS = frozenset({5, 6, 7, 8})
# Pillow's TIFF reader turns the pixels itself and reports the turned size.
_TURNED_BY_READER = frozenset({"TIFF"})
_MAGIC: tuple[tuple[bytes, str], ...] = (
    (b"\xff\xd8\xff", "JPEG"),
    (b"\x89PNG\r\n\x1a\n", "PNG"),
    (b"GIF8", "GIF"),
    (b"BM", "BMP"),
    (b"II*\x00", "TIFF"),
    (b"MM\x00*", "TIFF"),
    (b"\x00\x00\x00\x0cjP  \r\n\x87\n", "JPEG2000"),
    (b"\xff\x4f\xff\x51", "JPEG2000"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageMeta:
    """What an image header says.

    Attributes:
        width_px, height_px: display size, after orientation when it is applied.
        format: Pillow's name (`JPEG`, `PNG`, `WEBP`, ...), from the content and never from the file's name.
        orientation: EXIF value 1..8 (1 where there is none or it is invalid), whether applied or not.
        frames: of an animation or a multi-page file; only the first is used.
        mode: Pillow's mode as stored (`RGB`, `P`, `I;16`, ...).
        confidence: always "header" for images.
    """

    width_px: int
    height_px: int
    format: str
    orientation: int
    frames: int
    mode: str
    confidence: Literal["header"] = "header"


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


def probe_image(
    src: MediaSource, *, apply_orientation: bool = True, limits: ProbeLimits | None = None, place: str = ""
) -> ImageMeta:
    """Read an image's header.

    Args:
        src: encoded bytes, a path, or a `ByteReader`.
        apply_orientation: report the size after EXIF (or AVIF irot/imir) orientation. It must equal the switch that
            decoding gets. TIFF is turned by its reader either way.
        limits: ceilings; the defaults of `ProbeLimits` when None.
        place: what errors name as the origin; a path names itself.

    Raises:
        MediaError: the image cannot be used; `reason` says why.
        OSError: the storage failed.
    """
    limits, place = limits or ProbeLimits(), place_of(src, place)
    with open_source(src, limits=limits, place=place) as (file, size), open_image(file, size, place=place) as image:
        width_px, height_px, mode = *image.size, image.mode
        limits.check_size(width_px, height_px, place=place)
        orientation = orientation_of(image)
        if apply_orientation and turns_sideways(image, orientation):
            width_px, height_px = height_px, width_px
        return ImageMeta(
            width_px=width_px,
            height_px=height_px,
            format=image.format or "",
            orientation=orientation,
            frames=_num_frames(image),
            mode=mode,
        )


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


def orientation_of(image: Image.Image) -> int:
    """EXIF orientation 1..8 from the header; 1 when absent, invalid or unreadable."""
    try:
        # The base method on purpose: PNG's own would load the pixels to look for a chunk behind them.
        value = Image.Image.getexif(image).get(_ORIENTATION_TAG, 1)
    except Exception:  # EXIF is a TIFF inside the file, with all the ways in which a TIFF can be broken
        return 1
    return value if isinstance(value, int) and 1 <= value <= 8 else 1


def turns_sideways(image: Image.Image, orientation: int) -> bool:
    """Whether applying `orientation` swaps width and height of the pixels as Pillow decodes them."""
    return orientation in _SIDEWAYS and not turned_by_reader(image)


def turned_by_reader(image: Image.Image) -> bool:
    """Whether Pillow turns the pixels of this format by itself."""
    return image.format in _TURNED_BY_READER


def _num_frames(image: Image.Image) -> int:
    try:
        return max(int(getattr(image, "n_frames", 1)), 1)
    except Exception:  # later frames may be damaged; the first one is what is used
        return 1


def _sniff(head: bytes) -> str:
    for magic, name in _MAGIC:
        if head.startswith(magic):
            return name
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "WEBP"
    if head[4:8] == b"ftyp":
        return "AVIF" if head[8:12] in (b"avif", b"avis") else "HEIF" if head[8:11] in (b"hei", b"hev", b"mif") else ""
    return ""


def _explain(error: Exception, file: BinaryIO, size: int, place: str) -> MediaError:
    """The `MediaError` for what Pillow raised."""
    if isinstance(error, Image.DecompressionBombError):
        return MediaError(Reason.TOO_LARGE, f"not decoded: {error}", place=place, remedy="Shrink the file.")
    if isinstance(error, UnidentifiedImageError):
        file.seek(0)
        name = _sniff(file.read(16))
        if name == "HEIF":
            return MediaError(
                Reason.UNKNOWN_FORMAT,
                f"a HEIC image{_heif_size(file)} and no HEIC decoder is installed",
                place=place,
                remedy="Convert it to JPEG or AVIF.",
            )
        if name:
            return MediaError(
                Reason.CORRUPT,
                f"starts like {name} but its header is damaged ({size} bytes)",
                place=place,
                remedy="Remove or replace the file.",
            )
        return MediaError(
            Reason.UNKNOWN_FORMAT,
            f"not an image in any of the formats {', '.join(FORMATS)} ({size} bytes)",
            place=place,
            remedy="Remove it, or convert it.",
        )
    cut = isinstance(error, EOFError) or "truncated" in str(error).lower()
    reason = Reason.TRUNCATED if cut else Reason.CORRUPT
    return MediaError(reason, f"{type(error).__name__}: {error}", place=place, remedy="Remove or replace the file.")


def _heif_size(file: BinaryIO) -> str:
    file.seek(0)
    width_px, height_px = imagesize.get(file)
    return f" of {width_px}x{height_px} px" if min(width_px, height_px) > 0 else ""
