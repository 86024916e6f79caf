"""The fast reader of MP4, QuickTime and 3GP: one video track's numbers from its sample tables, in tens of microseconds.

    moov
     +- mvhd                            movie time scale, matrix
     +- trak                            exactly one with handler `vide`
         +- tkhd                        rotation, track size
         +- edts / elst                 which part is shown
         +- mdia / mdhd                 time scale, duration
             +- minf / stbl             stsd: codec, size | stts, ctts: times | stsz or stz2: sizes | stsc, stco: places

It answers only where it is sure to say what FFmpeg would say, and otherwise `None`, so that FFmpeg is asked: several
video tracks (the choice needs FFmpeg's probing), fragments, hidden or repeated parts, mirrored pictures, chapters,
samples behind the end of the file, codecs whose parameter sets are not read (see `mp4_codecs`), a container that
contradicts the codec about the size, and whatever looks odd.
"""

import struct
from fractions import Fraction
from typing import BinaryIO, Final, NamedTuple

from dataloaders.probe.mp4_boxes import Span, UnusualBox, boxes, children, file_boxes
from dataloaders.probe.mp4_codecs import SQUARE, coded_size
from dataloaders.probe.mp4_tables import all_shown, num_samples, shown_part, time_steps

MAX_INDEX_BYTES: Final = 64 * 1024**2
IDENTITY: Final = struct.pack(">9i", 1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30)
_IN_THIS_FILE = struct.pack(">I4s3I4sI", 28, b"dref", 0, 1, 12, b"url ", 1)

_U32 = struct.Struct(">I")
_U32_PAIR = struct.Struct(">II")
_CODECS = {
    b"avc1": ("h264", b"avcC"),
    b"hvc1": ("hevc", b"hvcC"),
    b"hev1": ("hevc", b"hvcC"),
    b"av01": ("av1", b"av1C"),
    b"mp4v": ("mpeg4", b"esds"),
}
# Handlers of tracks that are never taken for video. Anything else may be: FFmpeg then looks at the codec.
_NO_VIDEO = frozenset({b"soun", b"text", b"sbtl", b"subt", b"subp", b"clcp", b"tmcd", b"meta", b"hint"})
# (a, b, c, d) of the matrix in units of 1 / 65,536 -> degrees, counterclockwise positive.
_TURNS = {(1, 0, 0, 1): 0, (0, 1, -1, 0): -90, (0, -1, 1, 0): 90, (-1, 0, 0, -1): -180}
_ROTATIONS = {tuple(value << 16 for value in key): degrees for key, degrees in _TURNS.items()}
_FASTEST_HZ = 10_000  # a rate above it is a damaged time scale


class Mp4Video(NamedTuple):
    """The video track of an ordinary MP4 file; sizes before rotation."""

    width_px: int
    height_px: int
    num_frames: int
    fps: float
    duration_s: float
    rotation: int
    codec: str
    sar: Fraction


def read_index(file: BinaryIO, size: int) -> Mp4Video | None:
    """The video track of an ordinary file of `size` bytes; None: ask FFmpeg.

    Raises:
        OSError: the storage failed.
    """
    try:
        moov = _moov(file, size)
        return None if moov is None else _video(moov, size)
    except (UnusualBox, struct.error, KeyError, ValueError, IndexError, OverflowError):
        return None


def _moov(file: BinaryIO, size: int) -> bytes | None:
    for kind, start, end in file_boxes(file, size):
        if kind == b"moov":
            if end > size or end - start > MAX_INDEX_BYTES:
                return None
            file.seek(start)
            return file.read(end - start)
        if kind == b"moof":
            return None
    return None


def _video(moov: bytes, size: int) -> Mp4Video | None:
    """Find the one video track; the movie header comes first, as FFmpeg wants it."""
    movie: Span | None = None
    video: dict[bytes, Span] | None = None
    for kind, start, end in boxes(moov, 0, len(moov)):
        if kind == b"mvhd":
            if movie or video:
                return None
            movie = start, end
        elif kind == b"trak":
            track = children(moov, start, end)
            if b"tref" in track and moov.find(b"chap", *track[b"tref"]) >= 0:
                return None
            at = _first(moov, track[b"mdia"], b"hdlr") + 8
            handler = moov[at : at + 4]
            if handler == b"vide":
                if video or not movie:
                    return None
                video = track
            elif handler not in _NO_VIDEO:
                return None
        elif kind in (b"mvex", b"cmov", b"moof", b"trun"):
            return None
    return _track(moov, movie, video, size=size) if video and movie else None


def _first(moov: bytes, span: Span, wanted: bytes) -> int:
    """Where the payload of the first box of a type starts."""
    for kind, start, _ in boxes(moov, *span):
        if kind == wanted:
            return start
    raise UnusualBox(wanted)


def _track(moov: bytes, movie: Span, track: dict[bytes, Span], *, size: int) -> Mp4Video | None:
    media = children(moov, *track[b"mdia"])
    info = children(moov, *media[b"minf"])
    if b"dinf" in info and not _self_contained(moov, info[b"dinf"]):
        return None
    tables = children(moov, *info[b"stbl"])
    num_frames = num_samples(moov, tables, size=size)
    steps = time_steps(moov, tables[b"stts"], num_frames)
    total = sum([count * step for count, step in steps])
    movie_scale, _ = _scale(moov, movie[0])
    scale, media_duration = _scale(moov, media[b"mdhd"][0])
    if not num_frames or not total or not scale or not _identity(moov, movie[0]):
        return None
    if scale * num_frames > _FASTEST_HZ * total:
        return None
    duration = min(total, media_duration) or total
    if b"edts" in track:
        edit = shown_part(moov, track[b"edts"], scale=scale, movie_scale=movie_scale)
        if edit is not None:
            if not all_shown(moov, tables, steps, edit):
                return None
            duration = min(duration, edit[2])
    rotation, track_size = _header(moov, track[b"tkhd"])
    codec, width_px, height_px, sar = _description(moov, tables[b"stsd"], track_size)
    return Mp4Video(
        width_px=width_px,
        height_px=height_px,
        num_frames=num_frames,
        fps=scale * num_frames / total,
        duration_s=duration / scale,
        rotation=rotation,
        codec=codec,
        sar=sar,
    )


def _identity(moov: bytes, at: int) -> bool:
    """Whether the movie's own matrix leaves pictures alone."""
    at += 48 if moov[at] == 1 else 36
    return moov[at : at + 36] == IDENTITY


def _scale(moov: bytes, at: int) -> tuple[int, int]:
    """(time scale in Hz, duration) of `mvhd` or `mdhd`: version and flags 4 | times 2 x 4 or 8 | scale 4 | duration."""
    if moov[at] == 1:
        scale, duration = struct.unpack_from(">IQ", moov, at + 20)
        return scale, duration
    scale, duration = _U32_PAIR.unpack_from(moov, at + 12)
    return scale, duration


def _header(moov: bytes, span: Span) -> tuple[int, tuple[int, int]]:
    """(rotation in degrees, (width, height) of the track in px) of `tkhd`."""
    at = span[0] + (52 if moov[span[0]] == 1 else 40)
    if at + 44 > span[1]:
        raise UnusualBox(b"tkhd")
    a, b, _, c, d, _, _, _, _, width, height = struct.unpack_from(">9i2I", moov, at)
    return _ROTATIONS[a, b, c, d], (width >> 16, height >> 16)


def _self_contained(moov: bytes, dinf: Span) -> bool:
    """Whether the samples are in this very file: flag 1 of the data references."""
    if moov[dinf[0] : dinf[1]] == _IN_THIS_FILE:
        return True
    references = children(moov, *dinf).get(b"dref")
    if references is None:
        return True
    return all(moov[at + 3] & 1 for _, at, _ in boxes(moov, references[0] + 8, references[1]))


def _description(moov: bytes, span: Span, track_size: tuple[int, int]) -> tuple[str, int, int, Fraction]:
    """(codec, width, height, sample aspect ratio) of the one sample description."""
    start = span[0] + 8
    if _U32.unpack_from(moov, span[0] + 4) != (1,):
        raise UnusualBox(b"stsd")
    length, fourcc = struct.unpack_from(">I4s", moov, start)
    codec, config_box = _CODECS[fourcc]
    if start + length > span[1]:
        raise UnusualBox(b"stsd")
    # size 4, type 4, reserved 6, reference 2 | 16 bytes | width 2, height 2 | 50 bytes | boxes
    width_px, height_px = struct.unpack_from(">2H", moov, start + 32)
    inner = children(moov, start + 86, start + length)
    at, end = inner[config_box]
    coded = coded_size(fourcc, moov[at:end])
    if coded is None or (coded.width_px, coded.height_px) != (width_px, height_px):
        raise UnusualBox(config_box)
    return codec, width_px, height_px, _aspect(moov, inner, (width_px, height_px), track_size, coded.sar)


def _aspect(
    moov: bytes, inner: dict[bytes, Span], size: tuple[int, int], track_size: tuple[int, int], coded: Fraction | None
) -> Fraction:
    """Sample aspect ratio: of the container (`pasp`, or the track's size), else of the codec."""
    if b"pasp" in inner:
        across, down = _U32_PAIR.unpack_from(moov, inner[b"pasp"][0])
        if across and down:
            return SQUARE if across == down else Fraction(across, down)
    if all(track_size) and track_size != size:
        return Fraction(size[1] * track_size[0], size[0] * track_size[1])
    return coded or SQUARE
