"""Boxes of MP4, QuickTime and 3GP files (ISO/IEC 14496-12, 4.2): a flat walk, one level at a time, never recursive.

    box:   length 4 | type 4 | [length 8, where the first is 1] | payload          a length of 0 reaches to the end
    file:  ftyp | moov | mdat     or     ftyp | mdat (64-bit length) | moov        read by ranges, mdat is jumped over

A box that claims to be smaller than its own header, or bigger than what holds it, ends a walk through a file (there it
means that the file was cut) and raises `UnusualBox` inside an index that was read whole.
"""

import struct
from collections.abc import Iterator
from typing import BinaryIO, Final, TypeAlias

MAX_BOXES: Final = 100_000
"""Boxes of one level that are looked at: files have dozens, long fragmented recordings tens of thousands."""

FIRST_BOXES: Final = frozenset({b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip", b"pnot", b"styp"})
Span: TypeAlias = tuple[int, int]
"""(start, end) in bytes."""

_HEAD = struct.Struct(">I4s")
_WIDE = struct.Struct(">Q")


class UnusualBox(Exception):
    """An index that the fast reader leaves to FFmpeg; never leaves this package."""


_MAY_REPEAT = frozenset({b"free", b"skip", b"uuid", b"udta", b"sgpd", b"sbgp", b"subs", b"saiz", b"saio"})
_MAX_REPEATS = 100


def is_mp4(head: bytes) -> bool:
    """Whether the first bytes of a file look like MP4, QuickTime or 3GP."""
    return head[4:8] in FIRST_BOXES


def file_boxes(file: BinaryIO, size: int) -> Iterator[tuple[bytes, int, int]]:
    """(type, payload start, box end) of the boxes of a file; the end is the claimed one, not cut to the file.

    Raises:
        UnusualBox: there are more than `MAX_BOXES`.
    """
    start = 0
    for _ in range(MAX_BOXES):
        if start + 8 > size:
            return
        file.seek(start)
        head = file.read(16)
        if len(head) < 8:
            return
        length, kind = _HEAD.unpack_from(head)
        payload = start + 8
        if length == 1:
            if len(head) < 16:
                return
            (length,), payload = _WIDE.unpack_from(head, 8), start + 16
        elif length == 0:
            length = size - start
        if length < payload - start:
            return
        yield kind, payload, start + length
        start += length
    raise UnusualBox(b"many")


def boxes(data: bytes, start: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    """(type, payload start, payload end) of the boxes in data[start:end].

    Raises:
        UnusualBox: a length that does not fit.
    """
    for _ in range(MAX_BOXES):
        if start + 8 > end:
            return
        length, kind = _HEAD.unpack_from(data, start)
        payload = start + 8
        if length == 1 and payload + 8 <= end:
            (length,), payload = _WIDE.unpack_from(data, payload), payload + 8
        if length < payload - start or start + length > end:
            raise UnusualBox(kind)
        yield kind, payload, start + length
        start += length


def children(data: bytes, start: int, end: int) -> dict[bytes, Span]:
    """The boxes in data[start:end] by type, as (payload start, payload end).

    Raises:
        UnusualBox: a length that does not fit, or a type that occurs twice (which of them counts is FFmpeg's affair).
    """
    found: dict[bytes, Span] = {}
    unpack, room, repeats = _HEAD.unpack_from, end - start, 0
    while room >= 8:
        length, kind = unpack(data, start)
        payload = start + 8
        if length == 1 and room >= 16:
            (length,), payload = _WIDE.unpack_from(data, payload), payload + 8
        if not payload - start <= length <= room:
            raise UnusualBox(kind)
        if kind in found:
            repeats += 1
            if kind not in _MAY_REPEAT or repeats > _MAX_REPEATS:
                raise UnusualBox(kind)
        found[kind] = payload, start + length
        start += length
        room -= length
    return found
