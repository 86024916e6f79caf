"""Media as rows name them: a path, bytes, a data: URI, a decoded image -> bytes in hand, or a reference to a file.

    "a/1.jpg", "s3://b/1.jpg", {"bytes": None, "path": "a/1.jpg"}, {"url": "a/1.jpg"}  -> MediaReference
    b"...", {"bytes": b"...", "path": ...}, "data:image/png;base64,..."                -> InlineMedium
    a PIL image                                                                        -> InlineMedium, encoded here

Nothing is opened here, and what a data: URI or a path beside bytes claims to be is not believed: bytes are sniffed
later.

Price: a base64 string takes 4/3 of its medium in memory besides the medium. A PIL image was decoded by whoever gave it
and is encoded again, without loss, once per load (PNG of the fastest kind: about 100 ms per megapixel, and more bytes
than a JPEG); a data set that can be told not to decode should be.
"""

import base64
import binascii
import io
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from PIL import Image

from dataloaders.errors import Reason, RecordError
from dataloaders.probe.limits import ProbeLimits

_ORIENTATION = 0x0112
_PNG_MODES = frozenset({"1", "L", "LA", "P", "RGB", "RGBA", "I;16"})
_TIFF_MODES = frozenset({"CMYK", "F", "I", "LAB", "YCbCr"})
_MAX_URI_HEADER = 256


@dataclass(frozen=True, slots=True, eq=False)
class InlineMedium:
    """A medium whose encoded bytes the row itself holds. `name` is for messages."""

    name: str
    data: bytes

    @property
    def size(self) -> int:
        """Encoded size in bytes."""
        return len(self.data)

    def read(self, offset: int, size: int) -> bytes:
        """Bytes [offset, offset + size), fewer at the end (a `ByteReader`)."""
        start = max(offset, 0)
        return self.data[start : start + max(size, 0)]


@dataclass(frozen=True, slots=True)
class MediaReference:
    """A medium that lies elsewhere: the path or URL as the row writes it."""

    name: str
    reference: str


RowMedium: TypeAlias = InlineMedium | MediaReference


def is_absent(value: object) -> bool:
    """Whether a media field is there but names nothing: null, "" or an empty list."""
    return value is None or (isinstance(value, (str, list, tuple)) and not value)


def row_medium(value: object, name: str, *, limits: ProbeLimits, place: str) -> RowMedium:
    """The medium that a value of a row means.

    Args:
        name: field and number, as messages spell it (`images[0]`).
        limits: ceilings on bytes and, for decoded images, on pixels; compared before anything is decoded or copied.

    Raises:
        RecordError: `missing_media` for a value that holds neither bytes nor path, `too_large`, `corrupt`, or
            `bad_record` for a type that is no medium.
    """
    if isinstance(value, Mapping):
        value = _from_mapping(value, name, place)
    if isinstance(value, str):
        if value[:5].lower() == "data:":
            return InlineMedium(name, _from_data_uri(value, name, limits, place))
        return MediaReference(name, value)
    if isinstance(value, (bytes, bytearray, memoryview)):
        _check_bytes(memoryview(value).nbytes, name, limits, place)
        return InlineMedium(name, bytes(value))
    if isinstance(value, Image.Image):
        return InlineMedium(name, encode_image(value, name, limits=limits, place=place))
    raise RecordError(
        Reason.BAD_RECORD,
        f"{name} is of type {type(value).__name__}, which is no medium",
        place=place,
        remedy="Give encoded bytes, a path, a data: URI, {bytes, path} or a PIL image; convert others in `to_row`, and "
        "let Hugging Face data sets decode nothing.",
    )


def encode_image(image: Image.Image, name: str, *, limits: ProbeLimits, place: str) -> bytes:
    """The pixels of a decoded image, its palette, transparency and orientation, as a PNG (a TIFF for other modes).

    Raises:
        RecordError: `too_large`, `corrupt` where its file does not decode, or `unsupported_media` for modes that
            neither holds.
    """
    width_px, height_px = image.size
    if max(image.size) > limits.max_side_px or width_px * height_px > limits.max_pixels:
        raise RecordError(
            Reason.TOO_LARGE,
            f"{name} has {width_px}x{height_px} px, above max_side_px={limits.max_side_px} or "
            f"max_pixels={limits.max_pixels}",
            place=place,
            remedy="Shrink it, or raise ProbeLimits.max_pixels if it is meant.",
        )
    if image.mode not in _PNG_MODES | _TIFF_MODES:
        raise RecordError(
            Reason.UNSUPPORTED_MEDIA,
            f"{name} is an image of mode {image.mode}, which no lossless format here holds",
            place=place,
            remedy="Convert it to RGB in `to_row`, or give the bytes of its file.",
        )
    buffer = io.BytesIO()
    try:
        kept = Image.Exif()
        if (orientation := image.getexif().get(_ORIENTATION)) is not None:
            kept[_ORIENTATION] = orientation
        if image.mode in _PNG_MODES:
            image.save(buffer, "PNG", compress_level=1, exif=kept)
        else:
            image.save(buffer, "TIFF", exif=kept)
    except (OSError, SyntaxError, ValueError) as error:  # a file that was opened, but is decoded only now
        raise RecordError(
            Reason.CORRUPT, f"{name} does not decode: {error}", place=place, remedy="Remove or replace it."
        ) from error
    return buffer.getvalue()


def _from_mapping(value: Mapping[str, object], name: str, place: str) -> object:
    """The bytes or the reference in {"bytes", "path"} or {"url"}."""
    for field in ("bytes", "path", "url"):
        if value.get(field) is not None and (field != "path" or value[field]):
            return value[field]
    raise RecordError(
        Reason.MISSING_MEDIA,
        f"{name} has the keys {', '.join(sorted(map(repr, list(value)[:10])))} and neither bytes nor path nor url",
        place=place,
        remedy="Fill one of them.",
    )


def _from_data_uri(uri: str, name: str, limits: ProbeLimits, place: str) -> bytes:
    comma = uri.find(",", 0, _MAX_URI_HEADER)
    if comma < 0 or not uri[:comma].lower().endswith(";base64"):
        raise RecordError(
            Reason.BAD_RECORD,
            f"{name} is a data: URI without `;base64,` ({uri[:40]!r})",
            place=place,
            remedy="Write data:image/png;base64,... .",
        )
    _check_bytes((len(uri) - comma - 1) // 4 * 3 - 2, name, limits, place)
    try:
        return base64.b64decode(memoryview(uri[comma + 1 :].encode("ascii")), validate=True)
    except (binascii.Error, UnicodeEncodeError) as error:
        raise RecordError(
            Reason.CORRUPT, f"{name} is a data: URI that is no base64: {error}", place=place, remedy="Encode it again."
        ) from None


def _check_bytes(size: int, name: str, limits: ProbeLimits, place: str) -> None:
    if size > limits.max_bytes:
        raise RecordError(
            Reason.TOO_LARGE,
            f"{name} has {size} encoded bytes, above max_bytes={limits.max_bytes}",
            place=place,
            remedy="Raise ProbeLimits.max_bytes if it is meant.",
        )
