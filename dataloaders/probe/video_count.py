"""How many frames a video stream delivers: from its index, from its packets, or guessed.

header_frames    MP4 and AVI: entries of the index that are whole and shown; others: the container's own number
count_frames     packets from the first key frame on, with the times they span
estimate_frames  duration x rate
"""

from dataclasses import dataclass
from typing import Literal

from dataloaders.errors import MediaError, Reason
from dataloaders.probe.limits import ProbeLimits
from dataloaders.probe.mp4_guard import Mp4Claims
from dataloaders.probe.video_open import Container, Packet, Stream

_SHOW_FRAME = 0x10  # bit of a VP8 frame's first byte (RFC 6386, 9.1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """A number of frames and what was learnt with it; rate in Hz and duration in s are 0 where nothing was.

    `truncated`: the index lists more than the file holds.
    """

    num_frames: int
    confidence: Literal["header", "counted", "estimated"]
    rate: float = 0.0
    duration_s: float = 0.0
    truncated: bool = False


def header_frames(
    container: Container, stream: Stream, claims: Mp4Claims | None, *, size: int, limits: ProbeLimits, place: str
) -> Count | None:
    """The count that header and index tell; None: packets must be counted.

    Raises:
        MediaError: `too_large`.
    """
    if stream.frames <= 0:
        return None
    check_frames(stream.frames, limits=limits, place=place)
    if claims is not None:
        return None if claims.fragmented else _mp4_index(stream, size)
    if container.format.name == "avi":
        return _avi_index(stream, size)
    if container.format.name == "gif":  # FFmpeg walked all of its blocks
        duration_s = float(stream.duration * stream.time_base) if stream.duration else 0.0
        rate = _average(stream.frames, duration_s, float(stream.average_rate or 0))
        return Count(num_frames=stream.frames, confidence="header", rate=rate)
    return None


def estimate_frames(rate: float, duration_s: float, *, limits: ProbeLimits, place: str) -> Count:
    """Duration times rate.

    Raises:
        MediaError: `too_large`.
    """
    frames = round(min(rate * duration_s, 2.0**62))
    check_frames(frames, limits=limits, place=place)
    return Count(num_frames=max(frames, 1), confidence="estimated")


def count_frames(container: Container, stream: Stream, *, rate: float, limits: ProbeLimits, place: str) -> Count:
    """Walk all packets of the stream; `rate` is what the header says, 0 where it says nothing.

    Raises:
        MediaError: `too_large`.
    """
    tally = _Tally(is_vp8=stream.codec_context.codec.canonical_name == "vp8")
    for packet in container.demux(stream):
        tally.add(packet)
        check_frames(tally.num_frames, limits=limits, place=place)
    span_s = tally.span_s(float(stream.time_base or 0), rate)
    return Count(
        num_frames=tally.num_frames,
        confidence="counted",
        rate=_average(tally.num_frames, span_s, rate),
        duration_s=span_s or (tally.num_frames / rate if rate > 0 else 0.0),
    )


def check_frames(frames: int, *, limits: ProbeLimits, place: str) -> None:
    """Raise `MediaError` for more frames than the ceiling."""
    if frames > limits.max_frames:
        raise MediaError(
            Reason.TOO_LARGE,
            f"{frames} frames exceed max_frames={limits.max_frames}",
            place=place,
            remedy="Cut the clip, or raise ProbeLimits.max_frames if it is meant.",
        )


@dataclass(slots=True, kw_only=True)
class _Tally:
    """Packets that become frames, and the times they span.

    Packets in front of the first key frame do not decode, nor do those behind it that are shown before it: a recording
    that was cut out of a broadcast starts so. Where no packet is marked as a key frame, all of them count.
    """

    is_vp8: bool
    num_frames: int = 0
    first_key: int | None = None
    has_key: bool = False
    leading: bool = False
    timed: bool = True
    first: int | None = None
    end: int = 0
    last_duration: int = 0
    last_dts: int | None = None

    def add(self, packet: Packet) -> None:
        if not packet.size or packet.is_discard or (self.is_vp8 and not memoryview(packet)[0] & _SHOW_FRAME):
            return
        pts, dts = packet.pts, packet.dts
        if packet.is_keyframe and not self.has_key:
            self.num_frames, self.first, self.last_dts, self.timed = 0, None, None, True
            self.has_key, self.first_key, self.leading = True, pts, pts is not None
        elif self.leading and pts is not None and self.first_key is not None:
            if pts < self.first_key:
                return
            self.leading = False
        self.num_frames += 1
        self._clock(dts if pts is None else pts, dts, packet.duration or 0)

    def _clock(self, when: int | None, dts: int | None, duration: int) -> None:
        if when is None or (dts is not None and self.last_dts is not None and dts < self.last_dts):
            self.timed = False  # no times, or a clock that was set back
            return
        self.last_dts = dts
        if self.first is None or when < self.first:
            self.first = when
            if self.num_frames == 1:
                self.end, self.last_duration = when, duration
        if when >= self.end:
            self.end, self.last_duration = when, duration

    def span_s(self, time_base: float, rate: float) -> float:
        """Seconds from the first frame to the end of the last one; 0 where the times do not tell."""
        if not self.timed or self.first is None or time_base <= 0:
            return 0.0
        step = self.last_duration * time_base or (1 / rate if rate > 0 else 0.0)
        return (self.end - self.first) * time_base + step


def _average(num_frames: int, span_s: float, rate: float) -> float:
    """Frames per second: what the header says where it agrees with the count to 1.5 frames; else the average."""
    if span_s <= 0 or num_frames < 2:
        return rate
    if rate > 0 and abs(num_frames / rate - span_s) <= 1.5 / rate:
        return rate
    return num_frames / span_s


def _mp4_index(stream: Stream, size: int) -> Count:
    """Samples that are shown and that the file still holds; samples without bytes are no frames."""
    entries = [(entry.pos + entry.size, entry.is_discard) for entry in stream.index_entries if entry.size]
    shown = sum(end <= size and not discard for end, discard in entries)
    truncated = any(end > size for end, _ in entries)
    return Count(num_frames=shown, confidence="counted" if truncated else "header", truncated=truncated)


def _avi_index(stream: Stream, size: int) -> Count | None:
    """Entries of the index where it is whole; the header's number counts frames that were left out on purpose, too."""
    entries = list(stream.index_entries)
    if not entries or entries[-1].timestamp + 1 < stream.frames:
        return None
    whole = sum(entry.size > 0 and entry.pos + entry.size <= size for entry in entries)
    rate, duration_s = float(stream.average_rate or 0), stream.frames / float(stream.average_rate or 1)
    rate = _average(whole, duration_s, rate) if whole != stream.frames else rate
    truncated = any(entry.pos + entry.size > size for entry in entries)
    return Count(num_frames=whole, confidence="counted" if truncated else "header", rate=rate, truncated=truncated)
