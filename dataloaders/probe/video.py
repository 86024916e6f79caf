"""Video headers: display size, frame count, rate and duration, with no pixel decoded.

    bytes -> MP4 index by our own reader (some 50 us)                                       mp4_index.py
          -> else FFmpeg: open (allowed containers only) -> best video stream               video_open.py
               -> its index (MP4, AVI) or frame count (GIF, ...), about 1 ms
               -> else packets counted: matroska, webm, flv, mpegts, mpeg, asf, ogg, fragmented MP4

`confidence` says how the frame count is known, and at what price:

    header     the container says so: kilobytes are read
    counted    packets were walked (the whole file is read, about 1 ms per MB), or samples that the file still holds
    estimated  duration x rate, when the caller declined counting; a variable rate makes it wrong by far

What is counted are frames that decoding delivers: frames hidden by an edit list, samples behind the end of a cut file,
packets without content, VP8 frames that are never shown, and packets in front of the first key frame are left out.
Where every field of an interlaced film is a packet of its own (H.264 from broadcast), fields are counted.

Size is what decoders deliver (law 6): parameter sets of the codec over numbers of the container, sides swapped by a
rotation of +-90 degrees. Pixels that are not square are not stretched, by no decoder (decord, torchcodec, PyAV), nor by
ours, so `sar` only informs: it never enters a size. Mirrored matrices count as their rotation.
"""

import time
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache
from typing import BinaryIO, Literal, TypeAlias, cast

import av
import av.codec

from dataloaders.errors import MediaError, Reason
from dataloaders.probe.limits import ProbeLimits
from dataloaders.probe.mp4_boxes import is_mp4
from dataloaders.probe.mp4_codecs import SQUARE
from dataloaders.probe.mp4_index import Mp4Video, read_index
from dataloaders.probe.reader import MediaSource, open_source, place_of
from dataloaders.probe.video_count import check_frames, count_frames, estimate_frames, header_frames
from dataloaders.probe.video_open import (
    Container,
    Frame,
    OutOfTime,
    Stream,
    TimedFile,
    coded_size,
    decoded_rotation,
    matroska_may_turn,
    open_video,
    open_with_claims,
    timeout,
)

__all__ = ["Container", "Frame", "Stream", "VideoMeta", "coded_size", "open_video", "probe_video"]

_DEFAULT_LIMITS = ProbeLimits()
Confidence: TypeAlias = Literal["header", "counted", "estimated"]


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoMeta:
    """What a video's header says.

    Attributes:
        width_px, height_px: size of decoded frames, after rotation.
        num_frames: frames that decoding delivers.
        fps: frames per second, on average where the rate varies.
        duration_s: of the video stream as it is shown (num_frames / fps where the file does not say).
        rotation: degrees, counterclockwise positive.
        codec: FFmpeg's name (`h264`, `vp9`, ...).
        confidence: how `num_frames` is known.
        sar: sample aspect ratio, width over height of a stored pixel before rotation; 1 where unknown. No size
            here is stretched by it, as no decoder does that.
        truncated: the header lists more frames than the file holds; `num_frames` are those that it holds.
    """

    width_px: int
    height_px: int
    num_frames: int
    fps: float
    duration_s: float
    rotation: int
    codec: str
    confidence: Confidence
    sar: Fraction = SQUARE
    truncated: bool = False


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
    limits, place = limits or _DEFAULT_LIMITS, place_of(src, place)
    with open_source(src, limits=limits, place=place) as (file, size):
        timed = cast(BinaryIO, TimedFile(file, time.monotonic() + limits.max_probe_s))
        try:
            if is_mp4(timed.read(8)):
                track = read_index(timed, size)
                if track is not None and can_decode(track.codec):
                    return _from_index(track, limits, place)
            return _from_ffmpeg(timed, size, limits=limits, count_packets=count_packets, place=place)
        except OutOfTime:
            raise timeout(limits, place) from None


def is_sideways(rotation: int) -> bool:
    """Whether a rotation in degrees swaps width and height."""
    return round(rotation / 90) % 2 == 1


@lru_cache(maxsize=64)
def can_decode(codec: str) -> bool:
    """Whether FFmpeg, as installed, has a decoder for a codec."""
    try:
        av.codec.Codec(codec, "r")
    except ValueError:
        return False
    return True


def _from_index(track: Mp4Video, limits: ProbeLimits, place: str) -> VideoMeta:
    limits.check_size(track.width_px, track.height_px, place=place, frame=True)
    check_frames(track.num_frames, limits=limits, place=place)
    sideways = track.rotation in (90, -90)
    return VideoMeta(
        width_px=track.height_px if sideways else track.width_px,
        height_px=track.width_px if sideways else track.height_px,
        num_frames=track.num_frames,
        fps=track.fps,
        duration_s=track.duration_s,
        rotation=track.rotation,
        codec=track.codec,
        confidence="header",
        sar=track.sar,
    )


def _from_ffmpeg(file: BinaryIO, size: int, *, limits: ProbeLimits, count_packets: bool, place: str) -> VideoMeta:
    turned = 0
    if matroska_may_turn(file):
        with open_video(file, size, place=place, limits=limits) as (container, stream):
            coded_size(stream, limits=limits, place=place)
            turned = decoded_rotation(container, stream)
    with open_with_claims(file, size, place=place, limits=limits) as (container, stream, claims):
        width_px, height_px = coded_size(stream, limits=limits, place=place)
        rate, duration_s = float(stream.average_rate or stream.guessed_rate or 0.0), _duration_s(container, stream)
        counted = header_frames(container, stream, claims, size=size, limits=limits, place=place)
        if counted is None and not count_packets and rate > 0 and duration_s > 0:
            counted = estimate_frames(rate, duration_s, limits=limits, place=place)
        if counted is None:
            counted = count_frames(container, stream, rate=rate, limits=limits, place=place)
        meta = VideoMeta(
            width_px=width_px,
            height_px=height_px,
            num_frames=counted.num_frames,
            fps=counted.rate or rate,
            duration_s=counted.duration_s or duration_s,
            rotation=claims.rotations.get(stream.id, 0) if claims else turned,
            codec=stream.codec_context.codec.canonical_name,
            confidence=counted.confidence,
            sar=_sar(stream),
            truncated=counted.truncated,
        )
    return _finish(meta, place=place)


def _finish(meta: VideoMeta, *, place: str) -> VideoMeta:
    """Rate and duration that agree with the count, and the turned size.

    Raises:
        MediaError: not one frame, or neither a rate nor a duration.
    """
    if meta.num_frames < 1:
        raise MediaError(Reason.TOO_FEW_FRAMES, "no complete frame in the file", place=place, remedy="Remove it.")
    rate, duration_s = meta.fps, meta.duration_s
    if rate <= 0 and duration_s > 0:
        rate = meta.num_frames / duration_s
    if rate <= 0:
        raise MediaError(Reason.CORRUPT, "neither a frame rate nor a duration", place=place, remedy="Remux the file.")
    if meta.truncated or duration_s <= 0:
        duration_s = meta.num_frames / rate
    size_px = (meta.width_px, meta.height_px)
    width_px, height_px = reversed(size_px) if is_sideways(meta.rotation) else size_px
    return replace(meta, width_px=width_px, height_px=height_px, fps=rate, duration_s=duration_s)


def _duration_s(container: Container, stream: Stream) -> float:
    if stream.duration is not None and stream.time_base is not None and stream.duration > 0:
        return float(stream.duration * stream.time_base)
    if not container.duration or container.duration < 0:
        return 0.0
    # An FLV header has the last timestamp, not the span of them.
    before = container.start_time if container.format.name == "flv" and container.start_time else 0
    return float(max(container.duration - before, 0) / av.time_base)


def _sar(stream: Stream) -> Fraction:
    sar = stream.sample_aspect_ratio
    return Fraction(sar) if sar else SQUARE
