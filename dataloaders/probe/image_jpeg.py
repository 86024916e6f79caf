"""JPEG and MPO headers.

    FFD8 | FFEx length .. (APPn: EXIF, XMP, MPF, ICC) | FFDB, FFC4 (tables) | FFCx length bits height width n .. | FFDA

Segments are skipped by their length, so a file with megabytes of APP segments costs one block per segment and is not
read whole. Everything up to the start of the scan (FFDA) counts, as in Pillow: a later frame header replaces an earlier
one, an EXIF block may follow the frame header, several EXIF segments are joined.
"""

import struct

from dataloaders.probe.image_exif import directory, exif_orientation, integers, open_tiff, value_bytes, xmp_orientation
from dataloaders.probe.image_header import ImageHeader
from dataloaders.probe.reader import Window

_MAX_SEGMENTS = 4096
_MAX_JOINED = 64
_MAX_STRAY_BYTES = 64 * 1024
_LOOK = 40  # bytes that tell what a segment is
_FRAME_HEADER = struct.Struct(">BHHB")  # bits, height, width, components
_MODES = {1: "L", 3: "RGB", 4: "CMYK"}
# What to do at a marker. FFC0..FFCF are frame headers, but for DHT (C4), JPG (C8) and DAC (CC); DHP (DE) has the same
# layout. RSTn, SOI, EOI and reserved ones have no payload and are skipped, as Pillow does; 01..BF end the header.
_SKIP, _FRAME, _METADATA, _BARE, _PADDING, _RESERVED, _SCAN = range(7)
_ACTIONS = bytes(
    _FRAME
    if marker in {*range(0xC0, 0xD0), 0xDE} - {0xC4, 0xC8, 0xCC}
    else _METADATA
    if marker in (0xE1, 0xE2)
    else _BARE
    if marker in {*range(0xD0, 0xDA), *range(0xF0, 0xFE), 0xC8, 0x00}
    else _PADDING
    if marker == 0xFF
    else _RESERVED
    if marker < 0xC0
    else _SCAN
    if marker == 0xDA
    else _SKIP
    for marker in range(256)
)
_XMP = b"http://ns.adobe.com/xap/1.0/\0"
_ULTRA_HDR = b' hdrgm:Version="'  # a gain map beside the image, which is no second picture
_NUM_IMAGES, _IMAGE_LIST = 0xB001, 0xB002


def read_jpeg(window: Window) -> ImageHeader:
    """Header of a JPEG or MPO file.

    Raises:
        MediaError: `truncated` before the scan, `corrupt`, or `unsupported_media` (12 bits, two components).
    """
    data, base, position, end = window.head, 0, 2, window.size
    width_px = height_px = bits = components = 0
    metadata = _Metadata(window)
    for _ in range(_MAX_SEGMENTS):
        at = position - base
        if at + _LOOK > len(data):
            data, base = window.block(position, _LOOK)
            at = position - base
            if at + 4 > len(data):
                raise window.truncated("the JPEG header")
        if data[at] != 0xFF:
            position = _next_marker(window, position)
            continue
        marker = data[at + 1]
        action = _ACTIONS[marker]
        if action >= _BARE:
            if action == _SCAN:
                break
            if action == _RESERVED:
                raise window.corrupt(f"a JPEG whose header has the reserved marker FF{marker:02X}")
            position += 1 if action == _PADDING else 2
            continue
        length = data[at + 2] << 8 | data[at + 3]
        payload = position + 4
        position += 2 + length if length > 2 else 4
        if position > end:
            raise window.truncated("the JPEG header")
        if action == _FRAME:
            bits, height_px, width_px, components = _FRAME_HEADER.unpack_from(data, at + 4)
            if length != 8 + 3 * components:
                raise window.corrupt(f"a JPEG frame header of {length} bytes for {components} components")
        elif action == _METADATA:
            metadata.take(marker, data[at + 4 : at + _LOOK], payload, length - 2)
    else:
        raise window.corrupt(f"a JPEG whose header has more than {_MAX_SEGMENTS} segments")
    if not components:
        raise window.corrupt("a JPEG without a frame header")
    if bits != 8 or components not in _MODES:
        raise window.unsupported(f"a JPEG of {components} components with {bits} bits")
    frames = metadata.num_images()
    name = "MPO" if frames > 1 else "JPEG"
    return ImageHeader(name, width_px, height_px, _MODES[components], metadata.orientation(), frames)


class _Metadata:
    """Where APP1 and APP2 segments lie that bear on orientation and the number of images."""

    __slots__ = ("app1", "exif", "mpf", "window", "xmp")

    def __init__(self, window: Window) -> None:
        self.window = window
        self.exif: list[tuple[int, int]] = []  # (offset of the TIFF structure, size)
        self.app1: list[tuple[int, int]] = []
        self.xmp: tuple[int, int] | None = None
        self.mpf: tuple[int, int] | None = None

    def take(self, marker: int, head: bytes, start: int, size: int) -> None:
        """Note a segment of which `head` is the beginning."""
        if marker == 0xE1:
            self.app1.append((start, size))
            if head.startswith(b"Exif\0\0"):
                self.exif.append((start + 6, size - 6))
            elif head.startswith(_XMP):
                self.xmp = start + len(_XMP), size - len(_XMP)
        elif head.startswith(b"MPF\0"):
            self.mpf = start + 4, size - 4

    def orientation(self) -> int:
        """From EXIF, whose segments are one block, else from XMP."""
        window, value = self.window, None
        if len(self.exif) == 1:
            value = exif_orientation(window, *self.exif[0])
        elif self.exif:
            joined = b"".join(window.peek(*block) for block in self.exif[:_MAX_JOINED])
            inner = Window(joined, limits=window.limits, place=window.place) if joined else None
            value = exif_orientation(inner, 0, len(joined)) if inner else None
        if value is None and self.xmp is not None:
            value = xmp_orientation(window.peek(*self.xmp))
        return value or 1

    def num_images(self) -> int:
        """Pictures of an MPO file; a gain map beside the picture (Ultra HDR) does not make one."""
        frames = 1 if self.mpf is None else _num_images(self.window, *self.mpf)
        if frames > 1 and any(_ULTRA_HDR in self.window.peek(*segment) for segment in self.app1):
            return 1
        return frames


def _next_marker(window: Window, position: int) -> int:
    """Position of the next FF byte: writers leave stray bytes between segments."""
    data, base = window.block(position, _MAX_STRAY_BYTES)
    found = data.find(b"\xff", position - base)
    if found >= 0:
        return found + base
    if base + len(data) >= window.size:
        raise window.truncated("the JPEG header")
    raise window.corrupt("a JPEG header with more than 64 KiB of stray bytes")


def _num_images(window: Window, start: int, size: int) -> int:
    """Images that the MPF index lists (CIPA DC-007, 5.2.3); 1 when it is broken, as the first image is sound."""
    tiff = open_tiff(window, start, size)
    if tiff is None:
        return 1
    entries = directory(window, tiff, tiff.first)[0]
    listed, number = entries.get(_IMAGE_LIST), integers(window, tiff, entries.get(_NUM_IMAGES))
    if listed is None or listed.type not in (1, 7) or not number or not 1 < number[0] <= listed.number // 16:
        return 1
    table = value_bytes(window, tiff, listed)[: 16 * number[0]]
    top = 3 if tiff.order == "<" else 0  # bits 24..26 of an image's attributes: its format, 0 is JPEG
    return number[0] if table and all(not table[i + top] & 7 for i in range(0, len(table), 16)) else 1
