"""PNG and APNG headers.

    signature | length IHDR data crc | ... acTL, eXIf, iCCP, iTXt ... | length IDAT ... | ... eXIf ... | IEND

Chunks are walked up to the first pixel data; check sums within the first 64 KiB are verified, as Pillow refuses a file
for any of them. Colour profiles and texts are not inflated, with one exception: the two texts that can hold an
orientation (compressed XMP, and the EXIF that ImageMagick writes as "Raw profile type exif") are, to at most 64 KiB.
EXIF and XMP that stand behind the pixels are looked for in the last 16 KiB.
"""

import re
import zlib

from dataloaders.probe.image_exif import exif_orientation, xmp_orientation
from dataloaders.probe.image_header import ImageHeader
from dataloaders.probe.reader import Window

_CHECKED_BYTES = 64 * 1024
_MAX_CHUNKS = 10_000
_TAIL_BYTES = 16 * 1024
_INFLATED_BYTES = 64 * 1024
_FRAME_BYTES = 38  # a frame needs at least its control chunk
_XMP, _RAW_EXIF = b"XML:com.adobe.xmp", b"Raw profile type exif"
# (bit depth, colour type) -> mode (PNG 3rd edition, table 12; the modes are Pillow's).
_MODES = {
    **{(bits, 0): mode for bits, mode in ((1, "1"), (2, "L"), (4, "L"), (8, "L"), (16, "I;16"))},
    **{(bits, 2): "RGB" for bits in (8, 16)},
    **{(bits, 3): "P" for bits in (1, 2, 4, 8)},
    **{(8, 4): "LA", (16, 4): "RGBA"},
    **{(bits, 6): "RGBA" for bits in (8, 16)},
}
_IS_TYPE = re.compile(rb"[A-Za-z]{4}").fullmatch


def read_png(window: Window) -> ImageHeader:
    """Header of a PNG or APNG file.

    Raises:
        MediaError: `truncated`, `corrupt`, or `unsupported_media` (Apple's CgBI variant).
    """
    head = window.at(0, 33)
    if head[12:16] == b"CgBI":
        raise window.unsupported("a PNG in Apple's CgBI variant, which only iOS reads")
    if head[8:16] != b"\0\0\0\rIHDR":
        raise window.corrupt("a PNG that does not begin with IHDR")
    if zlib.crc32(head[12:29]) != int.from_bytes(head[29:33], "big"):
        raise window.corrupt("a PNG with a broken check sum in IHDR")
    mode = _MODES.get((head[24], head[25]))
    if mode is None or head[26] or head[27] or head[28] > 1:
        raise window.corrupt(
            f"a PNG with {head[24]} bits of colour type {head[25]}, methods {head[26]}, {head[27]}, {head[28]}"
        )
    facts = _Facts(window)
    position, shown = _walk(window, facts)
    if facts.exif is None and facts.xmp is None and facts.raw is None:
        _search_tail(window, facts, position)
    frames, exact = facts.num_frames(shown)
    return ImageHeader(
        "PNG",
        int.from_bytes(head[16:20], "big"),
        int.from_bytes(head[20:24], "big"),
        mode,
        facts.orientation(),
        frames,
        exact,
    )


class _Facts:
    """What the chunks say: each is kept where it lies until it is known to be needed."""

    __slots__ = ("animations", "claimed", "exif", "raw", "window", "xmp")

    def __init__(self, window: Window) -> None:
        self.window = window
        self.claimed = self.animations = 0
        self.exif: tuple[int, int] | None = None
        self.xmp: tuple[int, int] | None = None
        self.raw: tuple[int, int] | None = None

    def take(self, kind: bytes, start: int, length: int) -> None:
        if kind == b"eXIf":
            self.exif = start, length
        elif kind == b"acTL" and length >= 8:
            self.animations += 1
            self.claimed = int.from_bytes(self.window.at(start, 4), "big")
        elif kind == b"iTXt" and self.window.peek(start, 18) == _XMP + b"\0":
            self.xmp = start, length
        elif kind in (b"zTXt", b"tEXt") and self.window.peek(start, 22) == _RAW_EXIF + b"\0":
            self.raw = start, length

    def orientation(self) -> int:
        window, value = self.window, None
        if self.exif is not None:
            value = exif_orientation(window, *self.exif)
        elif self.raw is not None:
            text = _raw_text(window.peek(self.raw[0], min(self.raw[1], _INFLATED_BYTES)), window, self.raw[0])
            value = _raw_orientation(text, window)
        if value is None and self.xmp is not None:
            value = xmp_orientation(_international_text(window.peek(self.xmp[0], min(self.xmp[1], _INFLATED_BYTES))))
        return value or 1

    def num_frames(self, shown: bool) -> tuple[int, bool]:
        """Frames, and whether that is sure; `shown`: the default image is the first frame of the animation."""
        if self.animations != 1 or not 0 < self.claimed <= 0x80000000:
            return 1, True
        if self.claimed > max(self.window.size // _FRAME_BYTES, 1):
            return 1, False
        return self.claimed + (not shown), True


def _walk(window: Window, facts: _Facts) -> tuple[int, bool]:
    """Take the chunks before the pixels; (position of the first IDAT, whether a frame control came before it)."""
    position, shown = 33, False
    data, base = window.head, 0
    for _ in range(_MAX_CHUNKS):
        at = position - base
        if at + 8 > len(data):
            data, base = window.block(position, 8)
            at = position - base
        length, kind = int.from_bytes(data[at : at + 4], "big"), data[at + 4 : at + 8]
        if kind in (b"IDAT", b"fdAT"):
            return position, shown
        if len(kind) < 4:
            raise window.truncated("the PNG header")
        if kind == b"IEND":
            raise window.corrupt("a PNG without pixels")
        if not _IS_TYPE(kind):
            raise window.corrupt(f"a PNG with a chunk of type {kind!r}")
        end = position + 12 + length
        if end > window.size:
            raise window.truncated("the PNG header")
        if end <= _CHECKED_BYTES:
            chunk = window.at(position + 4, length + 8)
            if zlib.crc32(chunk[:-4]) != int.from_bytes(chunk[-4:], "big"):
                raise window.corrupt(f"a PNG with a broken check sum in {kind.decode()}")
        shown = shown or kind == b"fcTL"
        facts.take(kind, position + 8, length)
        position = end
    raise window.corrupt(f"a PNG with more than {_MAX_CHUNKS} chunks before its pixels")


def _search_tail(window: Window, facts: _Facts, pixels_at: int) -> None:
    """Take EXIF and XMP behind the pixels. A check sum tells a chunk from pixels that look like one."""
    start = max(pixels_at, window.size - _TAIL_BYTES)
    tail = window.peek(start, window.size - start)
    for name in (b"eXIf", b"iTXt" + _XMP + b"\0"):
        at = tail.rfind(name)
        if at < 4:
            continue
        length = int.from_bytes(tail[at - 4 : at], "big")
        chunk, check = tail[at : at + 4 + length], tail[at + 4 + length : at + 8 + length]
        if len(check) == 4 and zlib.crc32(chunk) == int.from_bytes(check, "big"):
            facts.take(name[:4], start + at + 4, length)


def _inflate(data: bytes) -> bytes:
    try:
        return zlib.decompressobj().decompress(data, _INFLATED_BYTES)
    except zlib.error:
        return b""


def _international_text(chunk: bytes) -> bytes:
    """The text of an iTXt chunk: keyword 0 compressed method language 0 keyword 0 text."""
    fields = chunk.split(b"\0", 1)[-1]
    text = fields[2:].split(b"\0", 2)[-1]
    return text if fields[:1] == b"\0" else _inflate(text)


def _raw_text(chunk: bytes, window: Window, start: int) -> bytes:
    """The text of a tEXt or zTXt chunk, told apart by the type that stands before `start`."""
    text = chunk[len(_RAW_EXIF) + 1 :]
    return _inflate(text[1:]) if window.peek(start - 4, 4) == b"zTXt" else text


def _raw_orientation(text: bytes, window: Window) -> int | None:
    """ImageMagick's layout: empty line, name, length, then hexadecimal lines."""
    try:
        exif = bytes.fromhex("".join(text.decode("ascii").split("\n")[3:]))
    except ValueError:  # a text that is cut, or not hexadecimal
        return 1
    inner = Window(exif, limits=window.limits, place=window.place) if exif else None
    return exif_orientation(inner, 0, len(exif)) if inner else None
