"""Video headers: display size, frame count, rate and duration, with no pixel decoded.

    open (allowed containers only) -> best video stream -> frame count

The frame count comes from the container's header where it has one (corrected for frames that an edit list hides and
for samples that lie beyond the end of a cut file), else from counting packets; `confidence` says which:

    header     the container says so
    counted    packets were walked: reads the whole file, about 1 ms per MB
    estimated  duration x rate, when the caller declined counting

A rotation of +-90 degrees swaps the sides, as decoding does. Sample aspect ratio is ignored, as decord, torchcodec and
qwen-vl-utils do. The rotation is known for MP4 and QuickTime (see `mp4.py`).
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO, Literal, TypeAlias

import av
import av.error
import av.stream

from dataloaders.errors import MediaError, Reason
from dataloaders.probe.limits import ProbeLimits
from dataloaders.probe.mp4 import track_rotations
from dataloaders.probe.reader import MediaSource, open_source, place_of, storage_failed

# A playlist (HLS, concat, DASH) makes FFmpeg open the files and addresses it lists: only self-contained containers.
CONTAINERS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi,flv,mpegts,mpeg,mpegvideo,gif,asf,ogg,h264,hevc,ivf,mjpeg"
_OPEN_OPTIONS = {"format_whitelist": CONTAINERS, "protocol_whitelist": "none"}
_FIRST_BOXES = (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip")

# PyAV's classes are compiled; their members are checked by the tests, not by mypy.
Container: TypeAlias = Any
Stream: TypeAlias = Any
Frame: TypeAlias = Any
Confidence: TypeAlias = Literal["header", "counted", "estimated"]


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoMeta:
    """What a video's header says.

    Attributes:
        width_px, height_px: display size, after rotation.
        num_frames: frames that can be shown.
        fps: average frames per second.
        duration_s: of the video stream (num_frames / fps where the file does not say).
        rotation: degrees, counterclockwise positive.
        codec: FFmpeg's name (`h264`, `vp9`, ...).
        confidence: how `num_frames` is known.
    """

    width_px: int
    height_px: int
    num_frames: int
    fps: float
    duration_s: float
    rotation: int
    codec: str
    confidence: Confidence


def probe_video(
    src: MediaSource, *, limits: ProbeLimits | None = None, count_packets: bool = True, place: str = ""
) -> VideoMeta:
    """Read a video's header.

    Args:
        src: encoded bytes, a path, or a `ByteReader`.
        limits: ceilings; the defaults of `ProbeLimits` when None.
        count_packets: where the header has no frame count, count packets. False: estimate from duration and rate
            when both are known.
        place: what errors name as the origin; a path names itself.

    Raises:
        MediaError: the video cannot be used; `reason` says why.
        OSError: the storage failed.
    """
    limits, place = limits or ProbeLimits(), place_of(src, place)
    with open_source(src, limits=limits, place=place) as (file, size):
        rotations = track_rotations(file, size)
        with open_video(file, size, place=place) as (container, stream):
            width_px, height_px = coded_size(stream, limits=limits, place=place)
            rate = float(stream.average_rate or stream.guessed_rate or 0.0)
            duration_s = _duration_s(container, stream)
            num_frames, confidence = _count(
                container,
                stream,
                size=size,
                count_packets=count_packets,
                rate=rate,
                duration_s=duration_s,
                limits=limits,
                place=place,
            )
            codec, rotation = stream.codec_context.codec.canonical_name, rotations.get(stream.id, 0)
    if num_frames < 1:
        raise MediaError(Reason.TOO_FEW_FRAMES, "no complete frame in the file", place=place, remedy="Remove it.")
    if rate <= 0 and duration_s > 0:
        rate = num_frames / duration_s
    if rate <= 0:
        raise MediaError(Reason.CORRUPT, "neither a frame rate nor a duration", place=place, remedy="Remux the file.")
    if is_sideways(rotation):
        width_px, height_px = height_px, width_px
    return VideoMeta(
        width_px=width_px,
        height_px=height_px,
        num_frames=num_frames,
        fps=rate,
        duration_s=duration_s or num_frames / rate,
        rotation=rotation,
        codec=codec,
        confidence=confidence,
    )


def is_sideways(rotation: int) -> bool:
    """Whether a rotation in degrees swaps width and height."""
    return round(rotation / 90) % 2 == 1


@contextmanager
def open_video(file: BinaryIO, size: int, *, place: str) -> Iterator[tuple[Container, Stream]]:
    """Open (container, best video stream); whatever FFmpeg raises here or in the body becomes a `MediaError`.

    Raises:
        MediaError: `unknown_format`, `truncated`, `corrupt` or `no_video_stream`.
    """
    file.seek(0)
    try:
        with av.open(file, mode="r", options=dict(_OPEN_OPTIONS), metadata_errors="replace") as container:
            stream = container.streams.best("video")
            if stream is None or stream.disposition & av.stream.Disposition.attached_pic:
                raise MediaError(
                    Reason.NO_VIDEO_STREAM, "the file has no video stream", place=place, remedy="Remove it."
                )
            if stream.codec_context is None:
                raise MediaError(Reason.UNKNOWN_FORMAT, "no decoder for its codec", place=place, remedy="Re-encode it.")
            stream.codec_context.thread_count = 1  # more threads per clip do not help where many workers decode
            yield container, stream
    except MediaError:
        raise
    except (av.error.FFmpegError, OSError, ValueError, EOFError, OverflowError, LookupError) as error:
        # LookupError: PyAV does not expect a damaged file to grow streams while it is read.
        if storage_failed(error):
            raise
        raise _explain(error, file, size, place) from error


def coded_size(stream: Stream, *, limits: ProbeLimits, place: str) -> tuple[int, int]:
    """(width, height) in px before rotation, checked against the ceilings."""
    width_px, height_px = stream.codec_context.width, stream.codec_context.height
    if not width_px or not height_px:
        raise MediaError(
            Reason.CORRUPT, "the header has no frame size and no packet tells it", place=place, remedy="Remove it."
        )
    limits.check_size(width_px, height_px, place=place, frame=True)
    return width_px, height_px


def _duration_s(container: Container, stream: Stream) -> float:
    if stream.duration is not None and stream.time_base is not None and stream.duration > 0:
        return float(stream.duration * stream.time_base)
    return container.duration / av.time_base if container.duration and container.duration > 0 else 0.0


def _count(
    container: Container,
    stream: Stream,
    *,
    size: int,
    count_packets: bool,
    rate: float,
    duration_s: float,
    limits: ProbeLimits,
    place: str,
) -> tuple[int, Confidence]:
    """(frames, confidence) of the stream."""
    if stream.frames > 0:
        _check_frames(stream.frames, limits, place)
        return _shown(container, stream, size)
    if not count_packets and rate > 0 and duration_s > 0:
        frames = round(rate * duration_s)
        _check_frames(frames, limits, place)
        return frames, "estimated"
    deadline_s = time.monotonic() + limits.max_probe_s
    frames = 0
    for packet in container.demux(stream):
        frames += packet.size > 0 and not packet.is_discard
        if frames % 1024 == 0 and time.monotonic() > deadline_s:
            raise MediaError(
                Reason.TIMEOUT,
                f"counting packets took longer than max_probe_s={limits.max_probe_s}",
                place=place,
                remedy="Remux the file so that its header has a frame count.",
            )
        _check_frames(frames, limits, place)
    return frames, "counted"


def _shown(container: Container, stream: Stream, size: int) -> tuple[int, Confidence]:
    """Header count less what an edit list hides and what a cut file no longer holds (MP4 and QuickTime)."""
    index = getattr(stream, "index_entries", None) if "mp4" in container.format.name else None
    if index is None or len(index) != stream.frames:
        return stream.frames, "header"
    present = [entry for entry in index if entry.pos + entry.size <= size]
    shown = sum(not entry.is_discard for entry in present)
    return shown, "header" if len(present) == len(index) else "counted"


def _check_frames(frames: int, limits: ProbeLimits, place: str) -> None:
    if frames > limits.max_frames:
        raise MediaError(
            Reason.TOO_LARGE,
            f"{frames} frames exceed max_frames={limits.max_frames}",
            place=place,
            remedy="Cut the clip, or raise ProbeLimits.max_frames if it is meant.",
        )


def _known_container(head: bytes) -> bool:
    if head[4:8] in _FIRST_BOXES or (head[:4] == b"RIFF" and head[8:12] == b"AVI "):
        return True
    return head.startswith((b"\x1aE\xdf\xa3", b"FLV", b"OggS", b"GIF8", b"0&\xb2u", b"G", b"\0\0\1", b"\0\0\0\1"))


def _explain(error: Exception, file: BinaryIO, size: int, place: str) -> MediaError:
    """The `MediaError` for what FFmpeg raised."""
    remedy = "Remove or replace the file."
    file.seek(0)
    head = file.read(16)
    opened_nothing = isinstance(error, (av.error.ArgumentError, av.error.InvalidDataError))
    if opened_nothing and not _known_container(head):
        return MediaError(
            Reason.UNKNOWN_FORMAT, f"not in one of the containers {CONTAINERS}", place=place, remedy=remedy
        )
    if isinstance(error, av.error.DecoderNotFoundError):
        return MediaError(Reason.UNKNOWN_FORMAT, "no decoder for its codec", place=place, remedy="Re-encode it.")
    if head[4:8] in _FIRST_BOXES and isinstance(error, av.error.InvalidDataError):
        return MediaError(
            Reason.TRUNCATED,
            f"an MP4 or QuickTime file without an index ({size} bytes): it was cut off",
            place=place,
            remedy=remedy,
        )
    if isinstance(error, av.error.EOFError):
        return MediaError(Reason.TRUNCATED, f"the file ends early ({size} bytes)", place=place, remedy=remedy)
    return MediaError(Reason.CORRUPT, f"{type(error).__name__}: {error}", place=place, remedy=remedy)
