"""What must be known of an MP4 file before FFmpeg is let near it: what its tables claim, and which way its tracks turn.

FFmpeg trusts some numbers of samples: it allocates, and writes, tables of the claimed length before it looks whether
the file has that many bytes. One box of 20 bytes can so cost gigabytes:

    stsz  all samples of one size, 2^31 of them        24 bytes each
    trun  the same in a fragment                       36 bytes each
    elst  n edits that each show all m samples         24 n m bytes
    sgpd, keys, iinf                                   8 to 100 bytes each
    cmov  a compressed index                           1,000 times its length

So the index boxes are walked first, in the order and with the tolerance of FFmpeg (a box that is longer than its
parent is cut to it), without recursion and over a bounded number of boxes, and claims above a ceiling are refused. The
rotation of frames is not told by FFmpeg's Python binding before one is decoded, so it is read on the way.
"""

import math
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import BinaryIO

from dataloaders.errors import MediaError, Reason
from dataloaders.probe.limits import ProbeLimits
from dataloaders.probe.mp4_boxes import MAX_BOXES, UnusualBox, file_boxes
from dataloaders.probe.mp4_index import IDENTITY

MAX_INDEX_BYTES = 256 * 1024**2
_PER_FRAME = 8  # samples of other tracks (sound, subtitles) per video frame that the ceiling allows
_ALWAYS = 1 << 20  # rows that do no harm, however low the ceiling
_SOUND_BLOCK = 1024  # uncompressed sound, where one sample is one value, is indexed in blocks of so many
_HOLDERS = frozenset(
    {b"moov", b"trak", b"mdia", b"minf", b"stbl", b"edts", b"dinf", b"udta", b"tref", b"mvex", b"moof", b"traf"}
    | {b"meta", b"wave", b"ilst"}
)
_TABLES = frozenset({b"trun", b"keys", b"iinf", b"sgpd", b"trex"})
_SPACE = frozenset({b"free", b"hoov"})
_U32 = struct.Struct(">I")


@dataclass(slots=True, kw_only=True)
class Mp4Claims:
    """What the index boxes of a file say.

    Attributes:
        rotations: degrees, counterclockwise positive, of each track id.
        fragmented: samples are listed in fragments, behind the index.
        has_index: there is an index, and the file does not end inside it.
    """

    rotations: dict[int, int] = field(default_factory=dict)
    fragmented: bool = False
    has_index: bool = False


def check_claims(file: BinaryIO, size: int, *, limits: ProbeLimits, place: str) -> Mp4Claims:
    """Walk the index boxes of an MP4 file of `size` bytes.

    Raises:
        MediaError: `too_large`: a table, or the index itself, claims more than the ceilings allow.
        OSError: the storage failed.
    """
    walk, read = _Walk(ceiling=max(_PER_FRAME * limits.max_frames, _ALWAYS), place=place), 0
    for named, start, claimed_end in _bounded(file_boxes(file, size), walk):
        kind, end = named, min(claimed_end, size)
        if named in _SPACE:
            file.seek(start)
            kind = _in_disguise(named, file.read(8), 0)
        if kind in _HOLDERS or kind in _TABLES or kind == b"cmov":
            read = end - start if kind == b"moof" else read + end - start
            if read > MAX_INDEX_BYTES:
                raise walk.refusal(f"an index of more than {MAX_INDEX_BYTES} bytes")
            walk.claims.has_index |= kind == b"moov" and claimed_end <= size
            file.seek(start)
            walk.top_level(kind, file.read(end - start))
    walk.end_track()
    return walk.claims


def rotation_of(matrix: bytes, movie: bytes = IDENTITY) -> int:
    """Degrees, counterclockwise positive in -180..180, of a track's 3x3 matrix under the movie's matrix.

    -atan2(b, a) after scaling (ISO/IEC 14496-12, 8.3.2), cut to whole degrees as FFmpeg's binding does for decoded
    frames; 0 for a matrix that shows nothing.
    """
    track, outer = (struct.unpack(">9i", rows) for rows in (matrix, movie))
    shifts = (16, 16, 30)
    a, b, c, d = (
        sum((track[3 * row + k] * outer[3 * k + column]) >> shifts[k] for k in range(3))
        for row, column in ((0, 0), (0, 1), (1, 0), (1, 1))
    )
    scale_x, scale_y = math.hypot(a, c), math.hypot(b, d)
    if not scale_x or not scale_y:
        return 0
    turn = -math.degrees(math.atan2(b / scale_y, a / scale_x))
    return round(turn) if math.isclose(turn, round(turn), abs_tol=1e-9) else int(turn)


@dataclass(slots=True, kw_only=True)
class _Track:
    """Claims of one track that multiply each other."""

    samples: int = 0
    edits: int = 0
    chunks: int = 0
    per_chunk: int = 0
    sound: bool = False
    steps_of_one: bool = False

    def entries(self) -> int:
        """Rows of the table that FFmpeg builds."""
        blocks = self.chunks * (self.per_chunk // _SOUND_BLOCK + 1)
        return (blocks if self.sound and self.steps_of_one else self.samples) * max(self.edits, 1)


@dataclass(slots=True, kw_only=True)
class _Walk:
    ceiling: int
    place: str
    claims: Mp4Claims = field(default_factory=Mp4Claims)
    movie: bytes = IDENTITY
    track: _Track = field(default_factory=_Track)
    unpacked: int = 0

    def top_level(self, kind: bytes, data: bytes) -> None:
        """Look at one top-level box and all that FFmpeg would look at inside it, in its order."""
        todo: list[tuple[bytes, bytes, int, int]] = [(kind, data, 0, len(data))]
        seen = 0
        while todo:
            kind, data, start, end = todo.pop()
            kind = _in_disguise(kind, data, start)
            if kind == b"cmov":
                inner = self._unpack(data[start:end])
                todo.append((b"moov", inner, 0, len(inner)))
            elif kind in _HOLDERS:
                inside = list(_inside(data, start, end))
                if kind == b"meta":  # with and without version and flags, as MP4 and QuickTime have it
                    inside += _inside(data, start + 4, end)
                seen += len(inside)
                if seen > MAX_BOXES:
                    raise self.refusal(f"more than {MAX_BOXES} boxes")
                todo.extend((inner, data, at, until) for inner, at, until in reversed(inside))
                if kind == b"trak":
                    self.end_track()
                self.claims.fragmented |= kind == b"moof"
            else:
                self._note(kind, data, start, end)

    def end_track(self) -> None:
        """Check the claims of the track that was walked."""
        if self.track.entries() > self.ceiling:
            raise self.refusal(f"{self.track.samples} samples shown in {self.track.edits} parts")
        self.track = _Track()

    def refusal(self, claim: str) -> MediaError:
        return MediaError(
            Reason.TOO_LARGE,
            f"the header claims {claim}; it was not read",
            place=self.place,
            remedy="Remux the file, or raise ProbeLimits.max_frames if it is meant.",
        )

    def _note(self, kind: bytes, data: bytes, start: int, end: int) -> None:
        """Take a table's claim, or a matrix."""
        track = self.track
        if kind in (b"stsz", b"stz2"):
            track.samples = max(track.samples, _number(data, start + 8))
        elif kind == b"elst":
            track.edits = max(track.edits, min(_number(data, start + 4), (end - start) // 12 + 1))
        elif kind in (b"stco", b"co64"):
            track.chunks = max(track.chunks, min(_number(data, start + 4), (len(data) - start) // 4))
        elif kind == b"stsc":
            rows = data[start + 8 : start + 8 + 12 * min(_number(data, start + 4), (len(data) - start) // 12)]
            track.per_chunk = max([row[1] for row in struct.iter_unpack(">III", rows[: len(rows) // 12 * 12])] or [0])
        elif kind == b"stts":
            track.steps_of_one = _number(data, start + 4) == _number(data, start + 12) == 1
        elif kind == b"hdlr":
            # QuickTime has a second one, of where the data are: it does not tell sound from video.
            handler = data[start + 8 : start + 12]
            track.sound = handler == b"soun" or (track.sound and handler != b"vide")
        elif kind == b"mvhd":
            at = start + (48 if data[start : start + 1] == b"\1" else 36)
            self.movie = data[at : at + 36] if at + 36 <= end else IDENTITY
        elif kind == b"tkhd":
            self._turn(data, start, end)
        elif kind in _TABLES:
            self.claims.fragmented |= kind == b"trex"
            claimed = _claimed(kind, data, start)
            if claimed > self.ceiling:
                raise self.refusal(f"a table `{kind.decode('ascii')}` of {claimed} entries")

    def _turn(self, data: bytes, start: int, end: int) -> None:
        # version, flags 4 | times 2 x 4 or 8 | track id 4 | reserved 4 | duration 4 or 8 | 16 bytes | matrix 9 x int32
        id_at, matrix_at = (20, 52) if data[start : start + 1] == b"\1" else (12, 40)
        if start + matrix_at + 36 <= end:
            matrix = data[start + matrix_at : start + matrix_at + 36]
            self.claims.rotations[_number(data, start + id_at)] = rotation_of(matrix, self.movie)

    def _unpack(self, packed: bytes) -> bytes:
        """The index inside a compressed one: box `dcom`, then box `cmvd`: length 4, zlib stream."""
        self.unpacked += 1
        at = packed.find(b"cmvd")
        unpacker = zlib.decompressobj()
        try:
            inner = unpacker.decompress(packed[at + 8 :], MAX_INDEX_BYTES // 4) if at >= 0 else b""
        except zlib.error:
            inner = b""
        if unpacker.unconsumed_tail or self.unpacked > 1:
            raise self.refusal("a compressed index that unpacks to too much")
        return inner


def _bounded(found: Iterator[tuple[bytes, int, int]], walk: _Walk) -> Iterator[tuple[bytes, int, int]]:
    try:
        yield from found
    except UnusualBox:
        raise walk.refusal(f"more than {MAX_BOXES} boxes") from None


def _in_disguise(kind: bytes, data: bytes, start: int) -> bytes:
    """The type of a box as FFmpeg takes it: free space that starts like an index is one."""
    return b"moov" if kind in _SPACE and data[start + 4 : start + 8] in (b"mvhd", b"cmov") else kind


def _inside(data: bytes, start: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    """(type, payload start, payload end) as FFmpeg reads them: too long a box is cut, too short a one ends the walk."""
    for _ in range(MAX_BOXES + 1):
        if start + 8 > end:
            return
        length, kind = struct.unpack_from(">I4s", data, start)
        payload = start + 8
        if length == 1 and start + 16 <= end:
            (length,), payload = struct.unpack_from(">Q", data, payload), payload + 8
        elif length == 0:
            length = end - start
        if length < payload - start:
            return
        yield kind, payload, min(start + length, end)
        start += length


def _claimed(kind: bytes, data: bytes, start: int) -> int:
    """Entries that a table claims to have, for tables whose length FFmpeg believes; 0 for others."""
    if kind in (b"trun", b"keys") or (kind == b"iinf" and data[start : start + 1] != b"\0"):
        return _number(data, start + 4)
    if kind == b"sgpd" and start < len(data):
        return _number(data, start + 8 + 4 * min(data[start], 2))
    return 0


def _number(data: bytes, at: int) -> int:
    number: int = _U32.unpack_from(data, at)[0] if 0 <= at <= len(data) - 4 else 0
    return number
