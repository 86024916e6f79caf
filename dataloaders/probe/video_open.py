"""FFmpeg, opened so that a file can do no harm: allowed containers, no addresses, ceilings and a deadline.

    file -> [MP4: claims of its index checked] -> FFmpeg, reading through a file that knows the deadline -> best stream

A playlist (HLS, DASH, concat), an image sequence or a reference movie makes FFmpeg open other files and addresses, so
only self-contained containers are on the list and no protocol is allowed. FFmpeg picks the video stream as decord,
torchcodec and its own tools do (av_find_best_stream), which is not always the first.
"""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, BinaryIO, TypeAlias, cast

import av
import av.error
import av.stream

from dataloaders.errors import MediaError, Reason
from dataloaders.probe.limits import ProbeLimits
from dataloaders.probe.mp4_boxes import is_mp4
from dataloaders.probe.mp4_guard import Mp4Claims, check_claims
from dataloaders.probe.reader import storage_failed

CONTAINERS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,flv,mpegts,mpeg,mpegvideo,gif,asf,ogg,h264,hevc,ivf,mjpeg"
_OPEN_OPTIONS = {
    "format_whitelist": CONTAINERS,
    "protocol_whitelist": "none",
    # What FFmpeg may read and play through to learn the streams of a container that does not list them.
    "probesize": "5000000",
    "analyzeduration": "5000000",
}
# Frames above it, and above the ceiling, are not even allocated when FFmpeg decodes one to learn its format.
_HARMLESS_PIXELS = 8192 * 4608
_EBML = b"\x1aE\xdf\xa3"
_POSE_ROLL = (b"\x76\x75\x84", b"\x76\x75\x88")  # element ProjectionPoseRoll with a float of 4 or 8 bytes
_MKV_HEAD_BYTES = 64 * 1024  # the tracks come before the first cluster
_REMEDY = "Remove or replace the file."

# PyAV's classes are compiled; their members are checked by the tests, not by mypy.
Container: TypeAlias = Any
Stream: TypeAlias = Any
Frame: TypeAlias = Any
Packet: TypeAlias = Any


class OutOfTime(Exception):
    """The deadline passed while a file was read."""


class TimedFile:
    """A file as our parsers and FFmpeg read it: every read is a chance to stop.

    Args:
        deadline_s: instant of `time.monotonic()` behind which `read` raises `OutOfTime`.
    """

    def __init__(self, file: BinaryIO, deadline_s: float = math.inf) -> None:
        self._file, self.deadline_s = file, deadline_s
        self.seek, self.tell = file.seek, file.tell

    def read(self, size: int = -1) -> bytes:
        if time.monotonic() > self.deadline_s:
            raise OutOfTime
        return self._file.read(size)


@contextmanager
def open_video(
    file: BinaryIO | TimedFile, size: int, *, place: str, limits: ProbeLimits | None = None
) -> Iterator[tuple[Container, Stream]]:
    """Open (container, best video stream) as `open_with_claims` does."""
    with open_with_claims(file, size, place=place, limits=limits) as (container, stream, _):
        yield container, stream


@contextmanager
def open_with_claims(
    file: BinaryIO | TimedFile, size: int, *, place: str, limits: ProbeLimits | None = None
) -> Iterator[tuple[Container, Stream, Mp4Claims | None]]:
    """Open (container, best video stream, claims of its index where it is an MP4 file).

    Whatever FFmpeg raises here or in the body becomes a `MediaError`.

    Args:
        file, size: the encoded bytes and their number.
        place: what errors name as the origin.
        limits: ceilings for what the header may claim; the defaults when None.

    Raises:
        MediaError: `unknown_format`, `truncated`, `corrupt`, `too_large`, `timeout` or `no_video_stream`.
        OSError: the storage failed.
    """
    limits = limits or ProbeLimits()
    timed = cast(BinaryIO, file if isinstance(file, TimedFile) else TimedFile(file))
    timed.seek(0)
    head = timed.read(16)
    # Of any file: FFmpeg knows MP4 by more than its start.
    claims = check_claims(timed, size, limits=limits, place=place)
    timed.seek(0)
    options = _OPEN_OPTIONS | {"max_pixels": str(max(limits.max_frame_pixels, _HARMLESS_PIXELS))}
    try:
        with av.open(timed, mode="r", options=options, metadata_errors="replace") as container:
            stream = container.streams.best("video")
            if stream is None or stream.disposition & av.stream.Disposition.attached_pic:
                raise MediaError(
                    Reason.NO_VIDEO_STREAM, "the file has no video stream", place=place, remedy="Remove it."
                )
            if stream.codec_context is None:
                raise MediaError(Reason.UNKNOWN_FORMAT, "no decoder for its codec", place=place, remedy="Re-encode it.")
            stream.codec_context.thread_count = 1  # more threads per clip do not help where many workers decode
            yield container, stream, claims if "mp4" in container.format.name else None
    except MediaError:
        raise
    except OutOfTime:
        raise timeout(limits, place) from None
    except (av.error.FFmpegError, OSError, ValueError, EOFError, OverflowError, LookupError) as error:
        # LookupError: PyAV does not expect a damaged file to grow streams while it is read.
        if storage_failed(error):
            raise
        raise _explain(error, head, size, claims, place) from error


def matroska_may_turn(file: BinaryIO) -> bool:
    """Whether a file is matroska and seems to have a rotation, which only decoded frames tell."""
    file.seek(0)
    head = file.read(_MKV_HEAD_BYTES) if file.read(4) == _EBML else b""
    return any(mark in head for mark in _POSE_ROLL)


def decoded_rotation(container: Container, stream: Stream) -> int:
    """Rotation of the first frame in degrees, counterclockwise positive; the stream is then no longer at its start."""
    return next((frame.rotation for frame in container.decode(stream)), 0)


def coded_size(stream: Stream, *, limits: ProbeLimits, place: str) -> tuple[int, int]:
    """(width, height) in px before rotation, checked against the ceilings."""
    width_px, height_px = stream.codec_context.width, stream.codec_context.height
    if not width_px or not height_px:
        raise MediaError(
            Reason.CORRUPT,
            f"the header has no frame size, and no packet tells one up to max_frame_pixels={limits.max_frame_pixels}",
            place=place,
            remedy="Remove it.",
        )
    limits.check_size(width_px, height_px, place=place, frame=True)
    return width_px, height_px


def timeout(limits: ProbeLimits, place: str) -> MediaError:
    """The error of a file that takes too long."""
    return MediaError(
        Reason.TIMEOUT,
        f"reading and counting packets took longer than max_probe_s={limits.max_probe_s}",
        place=place,
        remedy="Remux the file so that its header has a frame count, or raise ProbeLimits.max_probe_s.",
    )


def _known_container(head: bytes) -> bool:
    if is_mp4(head) or (head[:4] == b"RIFF" and head[8:12] == b"AVI "):
        return True
    return head.startswith((_EBML, b"FLV", b"OggS", b"GIF8", b"0&\xb2u", b"G", b"\0\0\1", b"\0\0\0\1"))


def _explain(error: Exception, head: bytes, size: int, claims: Mp4Claims, place: str) -> MediaError:
    """The `MediaError` for what FFmpeg raised."""
    opened_nothing = isinstance(error, (av.error.ArgumentError, av.error.InvalidDataError))
    if opened_nothing and not _known_container(head):
        return MediaError(
            Reason.UNKNOWN_FORMAT, f"not in one of the containers {CONTAINERS}", place=place, remedy=_REMEDY
        )
    if isinstance(error, av.error.DecoderNotFoundError):
        return MediaError(Reason.UNKNOWN_FORMAT, "no decoder for its codec", place=place, remedy="Re-encode it.")
    if is_mp4(head) and not claims.has_index and isinstance(error, av.error.InvalidDataError):
        return MediaError(
            Reason.TRUNCATED,
            f"an MP4 or QuickTime file without an index ({size} bytes): it was cut off",
            place=place,
            remedy=_REMEDY,
        )
    if isinstance(error, av.error.EOFError):
        return MediaError(Reason.TRUNCATED, f"the file ends early ({size} bytes)", place=place, remedy=_REMEDY)
    return MediaError(Reason.CORRUPT, f"{type(error).__name__}: {error}", place=place, remedy=_REMEDY)
