"""Display rotation of MP4 and QuickTime tracks, read from the track headers alone.

    file: ftyp | mdat ... | moov: mvhd | trak: tkhd(track id, 3x3 matrix) ... | trak ...

PyAV tells the rotation of decoded frames only, so the header is read here: a flat walk over box headers that follows
`moov` and `trak` and nothing deeper (no recursion), over a bounded number of boxes. The rotation is
-atan2(b, a) of the track matrix (ISO/IEC 14496-12, 8.3.2), as FFmpeg computes it. The movie's own matrix (`mvhd`),
which writers leave at identity, and mirrored matrices are not looked at.
"""

import math
import struct
from collections.abc import Iterator
from typing import BinaryIO

_MAX_BOXES = 100_000


def track_rotations(file: BinaryIO, size: int) -> dict[int, int]:
    """Rotation in degrees (counterclockwise positive, in -180..180) of each track id; empty for other formats."""
    file.seek(4)
    if file.read(4) not in (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip"):
        return {}
    rotations: dict[int, int] = {}
    for kind, start, end in _boxes(file, 0, size):
        if kind == b"moov":
            for inner, inner_start, inner_end in _boxes(file, start, end):
                if inner == b"trak":
                    rotations.update(_track(file, inner_start, inner_end))
            break
    return rotations


def _boxes(file: BinaryIO, start: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    """(type, payload start, payload end) of the boxes in [start, end); stops at the first impossible size."""
    for _ in range(_MAX_BOXES):
        if start + 8 > end:
            return
        file.seek(start)
        head = file.read(16)
        if len(head) < 8:
            return
        length, kind, payload = int.from_bytes(head[:4], "big"), head[4:8], start + 8
        if length == 1 and len(head) == 16:
            length, payload = int.from_bytes(head[8:], "big"), start + 16
        elif length == 0:
            length = end - start
        if start + length < payload:
            return
        yield kind, payload, min(start + length, end)
        start += length


def _track(file: BinaryIO, start: int, end: int) -> dict[int, int]:
    for kind, payload, payload_end in _boxes(file, start, end):
        if kind == b"tkhd":
            file.seek(payload)
            return _track_header(file.read(min(payload_end - payload, 128)))
    return {}


def _track_header(data: bytes) -> dict[int, int]:
    # version and flags 4 | times 8 or 16 | track id 4 | reserved 4 | duration 4 or 8 | 16 bytes | matrix 9 x int32
    wide = data[:1] == b"\x01"
    id_at, matrix_at = (20, 52) if wide else (12, 40)
    if len(data) < matrix_at + 36:
        return {}
    (track_id,) = struct.unpack_from(">I", data, id_at)
    a, b, _, c, d = struct.unpack_from(">5i", data, matrix_at)
    scale_x, scale_y = math.hypot(a, c), math.hypot(b, d)
    if not scale_x or not scale_y:
        return {}
    return {track_id: round(-math.degrees(math.atan2(b / scale_y, a / scale_x)))}
