"""PBM, PGM, PPM and PFM headers: a magic word, then width, height and (but for bitmaps) the largest value, as text.

P6 # comment
640 480
255
"""

import re

from dataloaders.probe.image_header import ImageHeader
from dataloaders.probe.reader import Window

# Pillow's own extensions (P0CMYK, PyP, ...) as far as they occur in files.
_MODES = {
    b"P1": "1",
    b"P2": "L",
    b"P3": "RGB",
    b"P4": "1",
    b"P5": "L",
    b"P6": "RGB",
    b"P0CMYK": "CMYK",
    b"Pf": "F",
    b"PyP": "P",
    b"PyRGBA": "RGBA",
    b"PyCMYK": "CMYK",
}
_GAP = re.compile(rb"(?:[ \t\n\v\f\r]|#[^\r\n]*[\r\n])*+")
_WORD = re.compile(rb"[^ \t\n\v\f\r#]{1,10}(?=[ \t\n\v\f\r#])")
_MAX_HEADER_BYTES = 64 * 1024
_MAGIC = re.compile(rb"(P[0-9A-Za-z]{1,5})[ \t\n\v\f\r]")


def read_pnm(window: Window) -> ImageHeader:
    """Header of a PNM file.

    Raises:
        MediaError: `truncated` or `corrupt`.
    """
    magic = _MAGIC.match(window.head)
    mode = _MODES.get(magic[1]) if magic else None
    if magic is None or mode is None:
        raise window.corrupt("a PNM without a magic word")
    words = _words(window, magic.end(), 2 if mode == "1" else 3)
    try:
        width_px, height_px = int(words[0]), int(words[1])
        largest = 0.0 if mode == "1" else float(words[2]) if mode == "F" else int(words[2])
    except ValueError:
        raise window.corrupt(f"a PNM whose header says {b' '.join(words)!r}") from None
    if mode == "L" and largest > 255:
        mode = "I"
    if mode not in ("1", "F") and not 0 < largest < 65_536:
        raise window.corrupt(f"a PNM whose largest value is {largest}")
    return ImageHeader("PPM", width_px, height_px, mode)


def _words(window: Window, start: int, count: int) -> list[bytes]:
    """The next `count` words, from the first bytes or, where comments are long, from the first 64 KiB."""
    for size in (256, _MAX_HEADER_BYTES):
        text, position = window.peek(0, size), start
        words: list[bytes] = []
        while len(words) < count:
            gap = _GAP.match(text, position)
            position = gap.end() if gap else position
            word = _WORD.match(text, position)
            if word is None:
                break
            words.append(word[0])
            position = word.end()
        else:
            return words
    if len(text) == window.size and len(text) - position <= 10:
        raise window.truncated("the PNM header")
    raise window.corrupt("a PNM whose header is no text")
