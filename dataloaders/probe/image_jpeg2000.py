"""JPEG 2000 headers: JP2 files and bare code streams.

0000000C jP.. | ftyp | jp2h: ihdr(height, width, components, bits) colr pclr ... | jp2c      ISO/IEC 15444-1, annex I
FF4F FF51 length capabilities Xsiz Ysiz XOsiz YOsiz ... components                           annex A.5.1
"""

import struct

from dataloaders.probe.image_header import ImageHeader
from dataloaders.probe.reader import Window

_MAX_BOXES = 1024
_MAX_HEADER_BYTES = 1 << 20
_MODES = {1: "L", 2: "LA", 3: "RGB", 4: "RGBA"}
_PALETTE_MODES = {"L": "P", "LA": "PA"}
_CMYK, _NO_PALETTE = 12, (0, 15, 17)  # enumerated colour spaces; bilevel and grey ones take no palette


def read_codestream(window: Window) -> ImageHeader:
    """Header of a bare code stream (.j2k, .j2c).

    Raises:
        MediaError: `truncated`, `corrupt`, or `unsupported_media` (more than four components).
    """
    siz = window.at(2, 43)
    length, right, bottom, left, top = struct.unpack_from(">2xH2x4I", siz)
    components, depth = int.from_bytes(siz[38:40], "big"), (siz[40] & 0x7F) + 1
    if length < 38 + 3 * components or right < left or bottom < top:
        raise window.corrupt("a JPEG 2000 code stream with a broken SIZ segment")
    return ImageHeader("JPEG2000", right - left, bottom - top, _mode(window, components, depth))


def read_jp2(window: Window) -> ImageHeader:
    """Header of a JP2, JPX or JPH file.

    Raises:
        MediaError: `truncated`, `corrupt`, or `unsupported_media`.
    """
    position = 0
    for _ in range(_MAX_BOXES):
        kind, start, end = _box(window.peek(position, 16), position, window.size)
        if not kind:
            raise window.truncated("the JPEG 2000 header")
        if kind == b"jp2h":
            if end - start > _MAX_HEADER_BYTES:
                raise window.corrupt(f"a JPEG 2000 header of {end - start} bytes")
            return _header(window, window.at(start, end - start))
        if end <= position:
            break
        position = end
    raise window.corrupt("a JPEG 2000 file without a jp2h box")


def _box(head: bytes, position: int, limit: int) -> tuple[bytes, int, int]:
    """(type, start of the payload, end) of the box at `position`; an empty type where there is none."""
    if len(head) < 8:
        return b"", position, position
    length, start = int.from_bytes(head[:4], "big"), position + 8
    if length == 1 and len(head) == 16:
        length, start = int.from_bytes(head[8:16], "big"), position + 16
    elif length == 0:
        length = limit - position
    return head[4:8], start, max(position + length, position)


def _header(window: Window, data: bytes) -> ImageHeader:
    position, size, mode, colour = 0, None, "", b"\xff"
    for _ in range(_MAX_BOXES):
        kind, start, end = _box(data[position : position + 16], position, len(data))
        if not kind or end < start or end > len(data):
            break
        if kind == b"ihdr" and end - start >= 11:
            height_px, width_px, components, depth = struct.unpack_from(">IIHB", data, start)
            # A depth of 255 says that components differ; Pillow takes it for 128 bits.
            size, mode = (width_px, height_px), _mode(window, components, (depth & 0x7F) + 1)
        elif kind == b"colr" and data[start : start + 1] == b"\1" and end - start >= 7:
            colour = data[start + 3 : start + 7]
            if int.from_bytes(colour, "big") == _CMYK and mode == "RGBA":
                mode = "CMYK"
        elif kind == b"pclr" and mode in _PALETTE_MODES and int.from_bytes(colour, "big") not in _NO_PALETTE:
            mode = _PALETTE_MODES[mode]
        position = end
    if size is None:
        raise window.corrupt("a JPEG 2000 file without an ihdr box")
    return ImageHeader("JPEG2000", *size, mode)


def _mode(window: Window, components: int, depth: int) -> str:
    if components not in _MODES:
        raise window.unsupported(f"a JPEG 2000 picture of {components} components")
    return "I;16" if components == 1 and depth > 8 else _MODES[components]
