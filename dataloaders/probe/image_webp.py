"""WebP headers (RFC 9649): lossy, lossless, extended.

    RIFF size WEBP | VP8  size  frame tag, 9D 01 2A, 14-bit width, 14-bit height        lossy: never transparent
                   | VP8L size  2F, 14 + 14 + 1 (alpha) + 3 (version) bits              lossless
                   | VP8X size  flags, 24-bit canvas | ICCP | ANIM | ALPH | VP8x | ANMF ... | EXIF | XMP

EXIF stands at the end of an extended file: the chunks before it are skipped by their size. A still picture fills its
canvas and the file is as long as its RIFF size, or libwebp refuses it, and so does the probe. Frames of an animation
that reach beyond the canvas are not counted.
"""

from dataloaders.probe.image_exif import exif_orientation, xmp_orientation
from dataloaders.probe.image_header import ImageHeader
from dataloaders.probe.reader import Window

_MAX_CHUNKS = 50_000
_ICC, _ALPHA, _EXIF, _XMP, _ANIMATION = 0x20, 0x10, 0x08, 0x04, 0x02


def read_webp(window: Window) -> ImageHeader:
    """Header of a WebP file.

    Raises:
        MediaError: `truncated` or `corrupt`.
    """
    head = window.at(0, 20)
    end = 8 + int.from_bytes(head[4:8], "little")
    if end > window.size:
        raise window.truncated("the WebP file")
    kind, size = head[12:16], int.from_bytes(head[16:20], "little")
    if 20 + size > end:
        raise window.corrupt("a WebP whose first chunk is longer than the file says it is")
    if kind == b"VP8 ":
        width_px, height_px = _lossy(window, 20, size)
        return ImageHeader("WEBP", width_px, height_px, "RGB")
    if kind == b"VP8L":
        width_px, height_px, alpha = _lossless(window, 20, size)
        return ImageHeader("WEBP", width_px, height_px, "RGBA" if alpha else "RGB")
    if kind == b"VP8X" and size >= 10:
        return _extended(window, size, end)
    raise window.corrupt(f"a WebP whose first chunk is {kind!r}")


def _lossy(window: Window, at: int, size: int) -> tuple[int, int]:
    """(width, height) of a VP8 key frame (RFC 6386, 9.1)."""
    data = window.at(at, 10)
    tag = int.from_bytes(data[:3], "little")
    if data[3:6] != b"\x9d\x01\x2a" or tag & 1 or (tag >> 1) & 7 > 3 or not (tag >> 4) & 1 or tag >> 5 >= size:
        raise window.corrupt("a WebP whose VP8 data does not begin with a key frame")
    return int.from_bytes(data[6:8], "little") & 0x3FFF, int.from_bytes(data[8:10], "little") & 0x3FFF


def _lossless(window: Window, at: int, size: int) -> tuple[int, int, bool]:
    """(width, height, alpha is used) of VP8L data (RFC 9649, 3.4)."""
    data = window.at(at, 5)
    bits = int.from_bytes(data[1:5], "little")
    if data[0] != 0x2F or bits >> 29 or size < 5:
        raise window.corrupt("a WebP whose VP8L data has a wrong signature")
    return (bits & 0x3FFF) + 1, ((bits >> 14) & 0x3FFF) + 1, bool(bits >> 28 & 1)


def _extended(window: Window, first_size: int, end: int) -> ImageHeader:
    flags = window.at(20, 10)
    canvas = int.from_bytes(flags[4:7], "little") + 1, int.from_bytes(flags[7:10], "little") + 1
    animated, alpha = bool(flags[0] & _ANIMATION), bool(flags[0] & _ALPHA)
    still: tuple[int, int] | None = None
    exif: tuple[int, int] | None = None
    xmp: tuple[int, int] | None = None
    frames, position, exact = 0, 20 + first_size + (first_size & 1), True
    for _ in range(_MAX_CHUNKS):
        if position + 8 > end:
            break
        chunk = window.at(position, 8)
        kind, size = chunk[:4], int.from_bytes(chunk[4:], "little")
        at, position = position + 8, position + 8 + size + (size & 1)
        if at + size > end:  # what comes before is sound, or is missed below
            exact = False
            break
        if kind == b"ANMF" and animated:
            inside = _lies_inside(window, at, canvas)
            frames, exact = frames + inside, exact and inside
        elif kind == b"ALPH" and still is None:
            alpha = True
        elif kind == b"VP8 " and not animated and still is None:
            still = _lossy(window, at, size)
        elif kind == b"VP8L" and not animated and still is None:
            *sides, alpha = _lossless(window, at, size)
            still = sides[0], sides[1]
        elif kind == b"EXIF" and flags[0] & _EXIF and exif is None:
            exif = at, size
        elif kind == b"XMP " and flags[0] & _XMP and xmp is None:
            xmp = at, size
    else:
        exact = False
    if not animated and still != canvas:
        raise window.corrupt(f"a WebP whose canvas of {canvas[0]}x{canvas[1]} px holds a picture of {still} px")
    if animated and not frames:
        raise window.corrupt("an animated WebP without frames")
    orientation = exif_orientation(window, *exif) if exif else None
    if orientation is None and xmp is not None:
        orientation = xmp_orientation(window.peek(xmp[0], min(xmp[1], 1 << 20)))
    return ImageHeader("WEBP", *canvas, "RGBA" if alpha else "RGB", orientation or 1, max(frames, 1), exact)


def _lies_inside(window: Window, at: int, canvas: tuple[int, int]) -> bool:
    data = window.at(at, 12)
    left, top, width, height = (int.from_bytes(data[i : i + 3], "little") for i in (0, 3, 6, 9))
    return 2 * left + width + 1 <= canvas[0] and 2 * top + height + 1 <= canvas[1]
