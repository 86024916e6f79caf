"""BMP headers, with (BM) and without (DIB) the file header.

    BM size .. offset(14) | header size | 12: u16 width height planes bits            OS/2 1, BITMAPCOREHEADER
                                        | 40, 52, 56, 64, 108, 124: i32 width height  Windows 3 to 5, OS/2 2

A negative height says that rows run downwards. Layouts that Pillow does not decode (embedded JPEG and PNG, unusual bit
masks) are refused as it refuses them. Orientation does not exist here.
"""

import struct

from dataloaders.probe.image_header import ImageHeader
from dataloaders.probe.reader import Window

HEADER_SIZES = (12, 40, 52, 56, 64, 108, 124)
_RAW, _RLE8, _RLE4, _BITFIELDS = range(4)
_MASKS_32 = {
    (0xFF0000, 0xFF00, 0xFF, 0): "RGB",
    (0xFF000000, 0xFF0000, 0xFF00, 0): "RGB",
    (0xFF000000, 0xFF00, 0xFF, 0): "RGB",
    (0xFF000000, 0xFF0000, 0xFF00, 0xFF): "RGBA",
    (0xFF, 0xFF00, 0xFF0000, 0xFF000000): "RGBA",
    (0xFF0000, 0xFF00, 0xFF, 0xFF000000): "RGBA",
    (0xFF000000, 0xFF00, 0xFF, 0xFF0000): "RGBA",
    (0, 0, 0, 0): "RGBA",
}
_MASKS = {24: ((0xFF0000, 0xFF00, 0xFF),), 16: ((0xF800, 0x7E0, 0x1F), (0x7C00, 0x3E0, 0x1F))}


def read_bmp(window: Window) -> ImageHeader:
    """Header of a BMP file.

    Raises:
        MediaError: `truncated`, or `unsupported_media`.
    """
    return _read(window, 14, "BMP")


def read_dib(window: Window) -> ImageHeader:
    """Header of a BMP without its file header."""
    return _read(window, 0, "DIB")


def _read(window: Window, start: int, name: str) -> ImageHeader:
    header_size = int.from_bytes(window.at(start, 4), "little")
    if header_size not in HEADER_SIZES:
        raise window.unsupported(f"a BMP with a header of {header_size} bytes")
    header = window.at(start, header_size)
    compression, colours, palette_step = _RAW, 0, 3
    if header_size == 12:
        width_px, height_px, _, bits = struct.unpack_from("<4H", header, 4)
    else:
        width_px, height_px, _, bits, compression = struct.unpack_from("<2I2HI", header, 4)
        colours, palette_step = int.from_bytes(header[32:36], "little"), 4
        if header[11] == 0xFF:
            height_px = 2**32 - height_px
    mode = "RGB"
    if bits in (1, 4, 8):
        mode = _palette_mode(window, start + header_size, colours or 1 << bits, palette_step)
    elif bits not in (16, 24, 32):
        raise window.unsupported(f"a BMP of {bits} bits per pixel")
    if compression == _BITFIELDS:
        mode = _masked_mode(window, start, header, bits, mode)
    elif compression not in (_RAW, _RLE8, _RLE4):
        raise window.unsupported(f"a BMP with compression {compression}")
    return ImageHeader(name, width_px, height_px, mode)


def _palette_mode(window: Window, start: int, colours: int, step: int) -> str:
    """`1` or `L` where the palette is a grey ramp, which is what Pillow makes of it, else `P`."""
    if colours > 65_536:
        raise window.unsupported(f"a BMP with a palette of {colours} colours")
    palette = window.peek(start, step * colours)
    values = (0, 255) if colours == 2 else range(colours)
    grey = all(palette[i * step : i * step + 3] == bytes((value & 0xFF,)) * 3 for i, value in enumerate(values))
    return "P" if not grey else "1" if colours <= 2 else "L"


def _masked_mode(window: Window, start: int, header: bytes, bits: int, mode: str) -> str:
    size = len(header)
    masks = struct.unpack("<3I", header[40:52] if size >= 52 else window.at(start + size, 12))
    alpha = int.from_bytes(header[52:56], "little") if size >= 56 else 0
    if bits == 32 and (*masks, alpha) in _MASKS_32:
        return _MASKS_32[(*masks, alpha)]
    if masks in _MASKS.get(bits, ()):
        return mode
    raise window.unsupported(f"a BMP of {bits} bits with the masks {', '.join(f'{mask:08X}' for mask in masks)}")
