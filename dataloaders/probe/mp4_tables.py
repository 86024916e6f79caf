"""Sample tables of an MP4 track (ISO/IEC 14496-12, 8.6 and 8.7): how many samples there are, and whether all are shown.

    stsc  runs of (first chunk, samples per chunk, description)      stco, co64  where each chunk starts
    stsz, stz2  bytes of each sample                                 stts, ctts  (samples, step or offset) in media time
    elst  (duration in movie time, first media time shown)

Numbers are read as tuples where they are few, as most clips are short, and as arrays where they are many. What does not
fit, or contradicts another table, raises `UnusualBox`: FFmpeg is asked then.
"""

import struct
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from dataloaders.probe.mp4_boxes import Span, UnusualBox, children

Row: TypeAlias = tuple[int, ...] | NDArray[Any]

_U32 = struct.Struct(">I")
_U32_PAIR = struct.Struct(">II")
_EDIT, _WIDE_EDIT = struct.Struct(">IiI"), struct.Struct(">QqI")
_RUN = struct.Struct(">III")
_FEW = 1024  # numbers above which an array beats a tuple
_TOO_LATE = 1 << 31  # time steps above it are negative corrections in disguise
_FAR = 1 << 28  # composition offsets above it are void


def _numbers(moov: bytes, at: int, count: int, code: str) -> Row:
    """`count` big-endian numbers of the struct type `code`: as a tuple, or as an array where that is faster.

    Raises:
        struct.error, ValueError: they do not fit.
    """
    if count <= _FEW:
        return struct.unpack_from(f">{count}{code}", moov, at)
    return np.frombuffer(moov, dtype=f">{code}", count=count, offset=at)


def _sum(numbers: Row) -> int:
    return int(numbers.sum(dtype=np.int64)) if isinstance(numbers, np.ndarray) else sum(numbers)


def _max(numbers: Row) -> int:
    return int(numbers.max()) if isinstance(numbers, np.ndarray) else max(numbers)


def _min(numbers: Row) -> int:
    return int(numbers.min()) if isinstance(numbers, np.ndarray) else min(numbers)


def _count(moov: bytes, span: Span, row_bytes: int, head_bytes: int = 8) -> int:
    """Rows of a table: version and flags 4 | ... | number of rows 4 | rows.

    Raises:
        UnusualBox: the rows do not fit into the box.
    """
    (count,) = _U32.unpack_from(moov, span[0] + head_bytes - 4)
    if count * row_bytes > span[1] - span[0] - head_bytes:
        raise UnusualBox(b"rows")
    return int(count)


def num_samples(moov: bytes, tables: dict[bytes, Span], *, size: int) -> int:
    """Number of samples, all of them in the file and agreeing with the chunks; 0 otherwise."""
    wide = b"co64" in tables
    span = tables[b"co64" if wide else b"stco"]
    num_chunks = _count(moov, span, 8 if wide else 4)
    runs = tables[b"stsc"]
    num_runs = _count(moov, runs, 12)
    if not num_chunks or not num_runs or (wide and b"stco" in tables):
        return 0
    places = _numbers(moov, span[0] + 8, num_chunks, "Q" if wide else "I")
    count, per_chunk = _in_chunks(moov, runs[0] + 8, num_runs, num_chunks)
    total, last = _sample_bytes(moov, tables, count, per_chunk)
    furthest = int(places[-1])
    whole = _max(places) == furthest and furthest + last <= size and total <= size
    return count if whole else 0


def _sample_bytes(moov: bytes, tables: dict[bytes, Span], count: int, per_chunk: int) -> tuple[int, int]:
    """Bytes of (all samples, those of the last chunk).

    Raises:
        UnusualBox: there are not `count` of them, or one has no bytes.
    """
    kind = b"stz2" if b"stz2" in tables else b"stsz"
    start, end = tables[kind]
    constant, stored = _U32_PAIR.unpack_from(moov, start + 4)
    if not 0 < count == stored or (b"stz2" in tables and b"stsz" in tables):
        raise UnusualBox(kind)
    if kind == b"stz2":
        bits = constant & 255
        if bits not in (8, 16):  # half bytes are left to FFmpeg
            raise UnusualBox(kind)
        _count(moov, (start, end), bits // 8, 12)
        sizes = _numbers(moov, start + 12, count, "B" if bits == 8 else "H")
    elif constant:
        return constant * count, constant * per_chunk
    else:
        _count(moov, (start, end), 4, 12)
        sizes = _numbers(moov, start + 12, count, "I")
    if 0 in sizes:
        raise UnusualBox(kind)
    return _sum(sizes), _sum(sizes[-per_chunk:])


def _in_chunks(moov: bytes, at: int, num_runs: int, num_chunks: int) -> tuple[int, int]:
    """Samples in (all chunks, the last chunk); runs are (first chunk from 1, samples per chunk, description from 1).

    Raises:
        UnusualBox: chunks out of order or empty, or several sample descriptions.
    """
    total, end = 0, num_chunks + 1
    runs = list(_RUN.iter_unpack(moov[at : at + 12 * num_runs]))
    for first, per_chunk, description in reversed(runs):
        if not 0 < first < end or not per_chunk or description != 1:
            raise UnusualBox(b"stsc")
        total += (end - first) * per_chunk
        end = first
    if end != 1:
        raise UnusualBox(b"stsc")
    return total, runs[-1][1]


def time_steps(moov: bytes, span: Span, num_frames: int) -> list[tuple[int, int]]:
    """Rows of (number of samples, time step) of `stts`.

    Raises:
        UnusualBox: they are for another number of samples, or step backwards.
    """
    num_rows = _count(moov, span, 8)
    rows = list(_U32_PAIR.iter_unpack(moov[span[0] + 8 : span[0] + 8 + 8 * num_rows]))
    if sum([count for count, _ in rows]) != num_frames or max([step for _, step in rows]) >= _TOO_LATE:
        raise UnusualBox(b"stts")
    return rows


def shown_part(moov: bytes, edts: Span, *, scale: int, movie_scale: int) -> tuple[int, int, int] | None:
    """(first time shown, first time not shown, duration with leading emptiness) in media time; None: no edit list.

    Raises:
        UnusualBox: more than one part of the medium is shown, or none.
    """
    lists = children(moov, *edts)
    if b"elst" not in lists:
        return None
    start, end = lists[b"elst"]
    wide, (count,) = moov[start] == 1, _U32.unpack_from(moov, start + 4)
    row = _WIDE_EDIT if wide else _EDIT
    if not count:
        return None
    if count > 2 or not movie_scale or start + 8 + count * row.size != end:
        raise UnusualBox(b"elst")
    length, first, _ = row.unpack_from(moov, end - row.size)
    before = 0
    if count == 2:
        empty, time, _ = row.unpack_from(moov, start + 8)
        before = _rescale(empty, scale, movie_scale)
        if time != -1:
            raise UnusualBox(b"elst")
    if first < 0:
        raise UnusualBox(b"elst")
    shown = _rescale(length, scale, movie_scale)
    return first, first + shown, before + shown


def _rescale(ticks: int, scale: int, movie_scale: int) -> int:
    return (ticks * scale + movie_scale // 2) // movie_scale


def all_shown(moov: bytes, tables: dict[bytes, Span], steps: list[tuple[int, int]], edit: tuple[int, int, int]) -> bool:
    """Whether every sample's composition time lies in the edit [first, behind)."""
    first, behind, _ = edit
    num_frames = sum([count for count, _ in steps])
    if b"ctts" not in tables:
        end = sum([count * step for count, step in steps])
        return first <= 0 and end - steps[-1][1] < behind
    span = tables[b"ctts"]
    num_rows = _count(moov, span, 8)
    rows = _numbers(moov, span[0] + 8, 2 * num_rows, "i")
    counts, offsets = rows[::2], rows[1::2]
    if _min(counts) <= 0 or _sum(counts) != num_frames or _max(offsets) > _FAR or _min(offsets) < -_FAR:
        raise UnusualBox(b"ctts")
    if len(steps) == 1:
        return _ends_shown(counts, offsets, step=steps[0][1], first=first, behind=behind)
    deltas = np.repeat([step for _, step in steps], [count for count, _ in steps])
    times = np.cumsum(deltas) - deltas + np.repeat(np.asarray(offsets, dtype=np.int64), counts)
    return bool(times.min() >= first and times.max() < behind)


def _ends_shown(counts: Row, offsets: Row, *, step: int, first: int, behind: int) -> bool:
    """The same at a constant rate: only samples near both ends can lie outside."""
    least, most, at = _min(offsets), _max(offsets), 0
    for count, offset in zip(counts, offsets, strict=True):
        if at * step + least >= first:
            break
        if at * step + offset < first:
            return False
        at += count
    at = _sum(counts) - 1
    for count, offset in zip(reversed(counts), reversed(offsets), strict=True):
        if at * step + most < behind:
            break
        if at * step + offset >= behind:
            return False
        at -= count
    return True
