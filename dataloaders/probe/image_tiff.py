"""TIFF and BigTIFF headers, either byte order, strips or tiles.

    header -> IFD0 (the page that is used) -> IFD1 -> ... -> 0          pages are counted along the chain

Sizes may be SHORT or LONG. Pillow turns a TIFF while reading it, whatever the orientation switch says, so the size here
is the turned one. Which combinations of photometric interpretation, bits and samples can be decoded is Pillow's table;
what is not in it is refused here too.
"""

from typing import Literal, TypeAlias

from PIL import TiffImagePlugin

from dataloaders.errors import MediaError
from dataloaders.probe.image_exif import (
    ORIENTATION,
    Entry,
    Tiff,
    directory,
    integers,
    open_tiff,
    valid_orientation,
    value_bytes,
    xmp_orientation,
)
from dataloaders.probe.image_header import ImageHeader
from dataloaders.probe.reader import Window

_WIDTH, _HEIGHT, _BITS, _COMPRESSION, _PHOTOMETRIC = 256, 257, 258, 259, 262
_FILL_ORDER, _STRIPS, _SAMPLES, _PLANAR, _PALETTE, _TILES = 266, 273, 277, 284, 320, 324
_EXTRA, _SAMPLE_FORMAT, _JPEG_XR = 338, 339, 0xBC01
_OLD_JPEG, _RGB, _YCBCR, _SEPARATE = 6, 2, 6, 2
_MAX_SAMPLES = 16
# (byte order, photometric kind, sample formats, fill order, bits, extra samples) -> mode
_Key: TypeAlias = tuple[bytes, int, tuple[int, ...], int, tuple[int, ...], tuple[int, ...]]
_MODES: dict[_Key, str] = {key: modes[0] for key, modes in TiffImagePlugin.OPEN_INFO.items()}
_MAX_PAGES = 100_000
_XMP = 700


def read_tiff(window: Window) -> ImageHeader:
    """Header of a TIFF file.

    Raises:
        MediaError: `truncated`, `corrupt`, or `unsupported_media`.
    """
    tiff = open_tiff(window, 0, window.size)
    if tiff is None:
        raise window.truncated("the TIFF header")
    if tiff.first + 2 > window.size:
        raise window.truncated("the TIFF")
    entries, following = directory(window, tiff, tiff.first)
    width, height = integers(window, tiff, entries.get(_WIDTH)), integers(window, tiff, entries.get(_HEIGHT))
    if not width or not height:
        raise _missing(window, tiff, entries, "how large it is")
    frames, exact = _num_pages(window, tiff, following)
    return ImageHeader(
        "TIFF",
        width[0],
        height[0],
        _mode(window, tiff, entries),
        _orientation(window, tiff, entries),
        frames,
        exact,
        turned=True,
        decodable=not (tiff.big and tiff.order == ">"),  # Pillow takes a big-endian BigTIFF for a plain TIFF
    )


def _missing(window: Window, tiff: Tiff, entries: dict[int, Entry], what: str) -> MediaError:
    """The error for a first directory that lacks something: it reaches beyond the end, or was never complete."""
    count = int.from_bytes(window.at(tiff.first, 8 if tiff.big else 2), "little" if tiff.order == "<" else "big")
    if len(entries) < count:
        return window.truncated("the first directory of the TIFF")
    return window.corrupt(f"a TIFF that does not say {what}")


def _mode(window: Window, tiff: Tiff, entries: dict[int, Entry]) -> str:
    """Pillow's mode of the first page."""

    def values(tag: int, default: tuple[int, ...]) -> tuple[int, ...]:
        return integers(window, tiff, entries.get(tag)) or default

    compression = values(_COMPRESSION, (1,))[0]
    name = TiffImagePlugin.COMPRESSION_INFO.get(compression)
    if name is None or _JPEG_XR in entries:
        raise window.unsupported(f"a TIFF with compression {compression}")
    kinds = values(_PHOTOMETRIC, (0,))
    photometric = _YCBCR if compression == _OLD_JPEG else kinds[0] if len(kinds) == 1 else 0
    samples_default = 3 if compression == _OLD_JPEG and photometric in (_RGB, _YCBCR) else 1
    samples, bits, extra = values(_SAMPLES, (samples_default,))[0], values(_BITS, (1,)), values(_EXTRA, ())
    formats, fill_order = values(_SAMPLE_FORMAT, (1,)), values(_FILL_ORDER, (1,))[0]
    if len(set(formats)) == 1:
        formats = formats[:1]
    if values(_PLANAR, (1,))[0] == _SEPARATE and extra and max(extra) == 0:
        bits, samples, extra = bits[: -len(extra)], samples - len(extra), ()
    if not 0 < samples <= _MAX_SAMPLES:
        raise window.unsupported(f"a TIFF of {samples} samples per pixel")
    bits = bits * samples if len(bits) == 1 else bits[:samples]
    key = (b"II" if tiff.order == "<" else b"MM", photometric, formats, fill_order, bits, extra)
    mode = _MODES.get(key, "")
    if not mode or len(bits) != samples:
        raise window.unsupported(f"a TIFF of photometric kind {photometric} with {bits} bits and extra samples {extra}")
    if name == "raw" and _STRIPS not in entries and _TILES not in entries:
        raise _missing(window, tiff, entries, "where its pixels are")
    if mode in ("P", "PA") and _PALETTE not in entries:
        raise _missing(window, tiff, entries, "what its palette is")
    return "RGB" if photometric == _YCBCR and (name != "raw" or TiffImagePlugin.READ_LIBTIFF) else mode


def _orientation(window: Window, tiff: Tiff, entries: dict[int, Entry]) -> int:
    if ORIENTATION in entries:
        values = integers(window, tiff, entries[ORIENTATION])
        return valid_orientation(values[0]) if values else 1
    packet = entries.get(_XMP)
    return 1 if packet is None else xmp_orientation(value_bytes(window, tiff, packet)) or 1


def _num_pages(window: Window, tiff: Tiff, following: int) -> tuple[int, bool]:
    """(pages along the chain of directories, whether its end was reached)."""
    width, entry_bytes, offset_bytes = (8, 20, 8) if tiff.big else (2, 12, 4)
    order: Literal["little", "big"] = "little" if tiff.order == "<" else "big"
    seen = {tiff.first}
    try:
        while following and following not in seen:
            if following + width > tiff.size or len(seen) >= _MAX_PAGES:
                return len(seen), False
            count = int.from_bytes(window.at(following, width), order)
            end = following + width + entry_bytes * count
            if not count or end + offset_bytes > tiff.size:
                return len(seen), False
            seen.add(following)
            following = int.from_bytes(window.at(end, offset_bytes), order)
    except MediaError:  # pages are scattered over more than the budget: the first one is sound
        return len(seen), False
    return len(seen), True
