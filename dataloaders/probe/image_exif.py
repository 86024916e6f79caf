"""TIFF directories and what they say of orientation: EXIF blocks, MPO indices and TIFF files share one structure.

    II*\\0 | offset of IFD0          header: byte order, version 42 (43: BigTIFF, 64-bit offsets)
    IFD:  count | entries of (tag, type, count, value or its offset) | offset of the next IFD

A directory is read as one block of entries; values that lie elsewhere are fetched only when asked for. As Pillow does,
reading a directory stops at the first value that lies outside the block, and the first entry of a tag wins.
Orientation is tag 0x0112; where EXIF has no such tag, `tiff:Orientation` of an XMP packet counts.
"""

import re
import struct
from typing import NamedTuple

from dataloaders.probe.reader import Window

ORIENTATION = 0x0112
_MAX_ENTRIES = 4096  # the largest directories of real files hold a few hundred
_MAX_VALUE_BYTES = 1 << 20
_PREFIX = b"Exif\0\0"
_XMP_ORIENTATION = re.compile(rb'tiff:Orientation(?:="|>)([0-9])')
# Bytes per value of the TIFF field types (0: no such type), and the struct letters of those that are whole numbers
# (TIFF 6.0, section 2).
_TYPE_BYTES = (0, 1, 1, 2, 4, 8, 1, 1, 2, 4, 8, 4, 8, 4, 0, 0, 8)
_INTEGERS = {3: "H", 4: "I", 6: "b", 8: "h", 9: "i", 13: "I", 16: "Q"}
# (byte order, BigTIFF) by the first four bytes; some writers swap the two bytes of version 42.
_VERSIONS = {
    b"II*\0": ("<", False),
    b"MM\0*": (">", False),
    b"II\0*": ("<", False),
    b"MM*\0": (">", False),
    b"II+\0": ("<", True),
    b"MM\0+": (">", True),
}
_FORMS = [(order, big) for order in "<>" for big in (False, True)]
_ENTRIES = {(order, big): struct.Struct(order + ("HHQQ" if big else "HHII")) for order, big in _FORMS}
_OFFSETS = {(order, big): struct.Struct(order + ("Q" if big else "I")) for order, big in _FORMS}
_COUNTS = {(order, big): struct.Struct(order + ("Q" if big else "H")) for order, big in _FORMS}


class Tiff(NamedTuple):
    """A TIFF structure inside a medium: where it starts, how far it goes, how it is written, where IFD0 is."""

    start: int
    size: int
    order: str
    big: bool
    first: int


class Entry(NamedTuple):
    """One directory entry; `value` is the value itself where that fits, else its offset in the structure."""

    type: int
    number: int
    value: int


def open_tiff(window: Window, start: int, size: int, head: bytes = b"") -> Tiff | None:
    """The TIFF structure in [start, start + size) of the medium; None when it is none. `head`: its first 16 bytes."""
    head = head or window.peek(start, min(16, size))
    order, big = _VERSIONS.get(head[:4], ("", False))
    if not order or len(head) < (16 if big else 8):
        return None
    return Tiff(start, size, order, big, _OFFSETS[order, big].unpack_from(head, 8 if big else 4)[0])


def directory(window: Window, tiff: Tiff, offset: int, *, only: int | None = None) -> tuple[dict[int, Entry], int]:
    """The directory at `offset` of the structure: its entries, and the offset of the next (0: none, or out of reach).

    `only` ends the reading at that tag and returns no other.
    """
    start, limit, order, big, _ = tiff
    entries, offsets, counts = _ENTRIES[order, big], _OFFSETS[order, big], _COUNTS[order, big]
    width, offset_bytes, room = counts.size, offsets.size, limit - offset - counts.size
    at = start + offset
    data, base = window.block(at, width)
    if room < 0 or at - base + width > len(data):
        return {}, 0
    count = counts.unpack_from(data, at - base)[0]
    readable = min(count, room // entries.size, _MAX_ENTRIES)
    at += width
    if at - base + readable * entries.size + offset_bytes > len(data):
        data, base = window.block(at, readable * entries.size + offset_bytes)
    at -= base
    end = at + min(readable, max(len(data) - at, 0) // entries.size) * entries.size
    found: dict[int, Entry] = {}
    outside = 0  # bytes of values that lie outside the entries
    for tag, kind, values, value in entries.iter_unpack(data[at:end]):
        size = values * _TYPE_BYTES[kind] if kind < len(_TYPE_BYTES) else 0
        if not size or tag in found:
            continue
        if size > offset_bytes:
            outside += size
            if outside > limit:
                continue
            if value + size > limit:
                return found, 0
        if only is None:
            found[tag] = Entry(kind, values, value)
        elif tag == only:
            return {tag: Entry(kind, values, value)}, 0
    if readable < count or len(data) < end + offset_bytes:
        return found, 0
    return found, offsets.unpack_from(data, end)[0]


def value_bytes(window: Window, tiff: Tiff, entry: Entry, limit: int = _MAX_VALUE_BYTES) -> bytes:
    """The value of an entry as it is written; empty when it is longer than `limit`."""
    size = entry.number * _TYPE_BYTES[entry.type]
    inline = _OFFSETS[tiff.order, tiff.big].pack(entry.value)
    if size <= len(inline):
        return inline[:size]
    return window.peek(tiff.start + entry.value, size) if size <= limit else b""


def integers(window: Window, tiff: Tiff, entry: Entry | None) -> tuple[int, ...]:
    """The whole numbers of an entry; empty when it is absent, of another type or absurdly long."""
    letter = _INTEGERS.get(entry.type) if entry is not None else None
    if entry is None or letter is None:
        return ()
    data = value_bytes(window, tiff, entry)
    size = entry.number * _TYPE_BYTES[entry.type]
    return struct.unpack(f"{tiff.order}{entry.number}{letter}", data) if len(data) == size else ()


def valid_orientation(value: int) -> int:
    """`value`, or 1 (upright) where it is none of the eight that exist."""
    return value if 1 <= value <= 8 else 1


def exif_orientation(window: Window, start: int, size: int) -> int | None:
    """Orientation 1..8 of an EXIF block; None when the block does not speak of it, 1 when it makes no sense.

    The block may begin with `Exif\\0\\0`, once or (some writers) twice.
    """
    head = window.peek(start, min(max(size, 0), 28))
    while head.startswith(_PREFIX):
        head, start, size = head[6:], start + 6, size - 6
    if size <= 0:
        return None
    tiff = open_tiff(window, start, size, head)
    if tiff is None:
        return 1
    entry = directory(window, tiff, tiff.first, only=ORIENTATION)[0].get(ORIENTATION)
    if entry is None:
        return None
    if entry.type == 3 and entry.number == 1:  # what every sound file has, without the detour
        return valid_orientation(entry.value & 0xFFFF if tiff.order == "<" else entry.value >> (48 if tiff.big else 16))
    values = integers(window, tiff, entry)
    return valid_orientation(values[0]) if values else 1


def xmp_orientation(packet: bytes) -> int | None:
    """Orientation 1..8 of an XMP packet; None when it does not speak of it."""
    match = _XMP_ORIENTATION.search(packet)
    return valid_orientation(int(match[1])) if match else None
