"""Groups of packets that decode on their own, so that those without a wanted frame need not be decoded.

    packets in file order  --cut at frames that forget the past-->  groups:  I P B B P | I P P P | I B P ...
                                                            numbers of their frames:  0..4     5..8    9..

Seeking lands on wrong frames in many containers. Here nothing is sought: every packet is read (3 us each), frames are
numbered by counting, and the packets of a group in which no frame is wanted are not handed to the decoder. What comes
out is what decoding from the start gives, because a group opens with a frame after which no earlier one is referred
to: an IDR picture (H.264, HEVC), a key frame (VP8, VP9, AV1), any JPEG. The key-frame flag of a container says less
(open groups, recovery points), so the packet itself is looked at.

Price: the packets of one group are held in memory, and it works for the codecs and containers below alone. A stream
where anything is unusual (times that are missing, double or out of order between groups, parameter sets that change
on the way) raises `Irregular`; it is then decoded from its start, frame by frame.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final

import av

from dataloaders.probe.video_open import Container, Packet, Stream

CONTAINERS: Final = frozenset({"mov,mp4,m4a,3gp,3g2,mj2", "matroska,webm"})
_KEEPS_ALL_INSIDE: Final = frozenset({"mjpeg"})  # every frame is a picture of its own
_MAX_GROUP_BYTES: Final = 256 * 1024**2


class Irregular(Exception):
    """Frames of this stream cannot be numbered from its packets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameGroup:
    """Packets from one fresh start to the next, and the frames that they show.

    Attributes:
        first: number of its first frame in display order.
        packets: in decoding order.
        number_of: frame number of each presentation time.
        last: nothing comes behind it.
    """

    first: int
    packets: list[Packet]
    number_of: dict[int, int]
    last: bool

    @property
    def end(self) -> int:
        """Number of the first frame behind the group."""
        return self.first + len(self.number_of)


@dataclass(frozen=True, slots=True)
class Start:
    """What the first bytes of a packet say.

    Attributes:
        fresh: no frame from here on refers to an earlier one.
        shown: the packet holds a frame that is shown.
        headers: parameter sets come with it.
    """

    fresh: bool
    shown: bool = True
    headers: bool = False


def start_reader(container: Container, stream: Stream) -> Callable[[Packet], Start] | None:
    """How packets of a stream are looked at; None: not cut into groups."""
    if container.format.name not in CONTAINERS or not hasattr(av.Packet, "has_sidedata"):
        return None  # versions of PyAV before 15 do not tell where parameter sets change
    codec, extra = stream.codec_context.codec.canonical_name, stream.codec_context.extradata or b""
    if codec == "h264" and len(extra) > 6 and extra[0] == 1:
        return _nal_reader((extra[4] & 3) + 1, _h264)
    if codec == "hevc" and len(extra) > 22 and extra[0] == 1:
        return _nal_reader((extra[21] & 3) + 1, _hevc)
    if codec in _KEEPS_ALL_INSIDE:
        return lambda packet: Start(True)
    return {"vp8": _vp8, "vp9": _vp9, "av1": _av1}.get(codec)


def frame_groups(packets: Iterable[Packet], look: Callable[[Packet], Start]) -> Iterator[FrameGroup]:
    """Cut packets into groups.

    Raises:
        Irregular: frames cannot be numbered from these packets.
    """
    held: list[Packet] = []
    times: list[int] = []
    first, held_bytes, latest, headers = 0, 0, None, False
    for packet in packets:
        if not packet.size:
            continue  # the end of the stream
        start = look(packet) if packet.is_keyframe or not held else _QUICK.get(look, _inside)(packet)
        if not held and not start.fresh:
            raise Irregular("the stream does not start with a key frame")
        if start.fresh and held:
            group = _group(first, held, times, latest, last=False)
            yield group
            first, latest = group.end, max(times, default=latest)
            held, times, held_bytes = [], [], 0
            if headers and not start.headers:
                raise Irregular("parameter sets come with some key frames only")
        headers |= start.headers
        if packet.has_sidedata("new_extradata"):
            raise Irregular("parameter sets change on the way")
        held_bytes += packet.size
        if held_bytes > _MAX_GROUP_BYTES:
            raise Irregular("a group of frames is too long to be held")
        held.append(packet)
        if start.shown and not packet.is_discard:
            if packet.pts is None:
                raise Irregular("a frame without a time")
            times.append(packet.pts)
    if held:
        yield _group(first, held, times, latest, last=True)


def _group(first: int, packets: list[Packet], times: list[int], latest: int | None, *, last: bool) -> FrameGroup:
    ordered = sorted(times)
    number_of = {time: first + place for place, time in enumerate(ordered)}
    if len(number_of) < len(times):
        raise Irregular("two frames at one time")
    if ordered and latest is not None and ordered[0] <= latest:
        raise Irregular("groups of frames overlap in time")
    return FrameGroup(first=first, packets=packets, number_of=number_of, last=last)


def _inside(packet: Packet) -> Start:
    return Start(False)


def _nal_reader(length_bytes: int, kind_of: Callable[[int], Start | None]) -> Callable[[Packet], Start]:
    """Reader of packets that are units with a length of `length_bytes` before each; `kind_of` judges a unit by its
    first byte, None: look at the next one."""

    def look(packet: Packet) -> Start:
        data = memoryview(packet)
        at, headers = 0, False
        while at + length_bytes < len(data):
            length = int.from_bytes(data[at : at + length_bytes], "big")
            found = kind_of(data[at + length_bytes])
            if found is not None and not found.headers:
                return Start(found.fresh, headers=headers)
            headers |= found is not None
            at += length_bytes + length
        return Start(False, headers=headers)

    return look


def _h264(first: int) -> Start | None:
    kind = first & 31
    if kind in (7, 8):
        return Start(False, headers=True)
    return Start(kind == 5) if 1 <= kind <= 5 else None  # 5: IDR


def _hevc(first: int) -> Start | None:
    kind = (first >> 1) & 63
    if kind in (32, 33, 34):
        return Start(False, headers=True)
    return Start(kind in (19, 20)) if kind < 32 else None  # 19, 20: IDR


def _vp8(packet: Packet) -> Start:
    # RFC 6386, 9.1: bit 0 is 0 for key frames, bit 4 says whether the frame is shown.
    first = memoryview(packet)[0]
    return Start(not first & 1, shown=bool(first & 0x10))


def _vp9(packet: Packet) -> Start:
    # VP9 bitstream, 6.2: marker 2, profile 2, [reserved 1 for profile 3], show_existing 1, not_key 1, show 1.
    data = memoryview(packet)
    first = data[0]
    if first >> 6 != 2 or first & 0x30 == 0x30:
        raise Irregular("a VP9 frame of profile 3")
    existing, key, shown = first & 8, not first & 4, first & 2
    superframe = data[len(data) - 1] & 0xE0 == 0xC0  # holds one frame that is shown, behind hidden ones
    return Start(bool(key and not existing and (shown or superframe)), shown=bool(existing or shown or superframe))


def _av1(packet: Packet) -> Start:
    # AV1 bitstream, 5.3: units of forbidden 1, type 4, extension 1, has_size 1; types 3 and 6 start with a frame
    # header: show_existing 1, frame_type 2 (0: key), show 1. One frame of a packet is shown.
    data = memoryview(packet)
    at, headers = 0, False
    while at + 2 < len(data):
        head = data[at]
        kind, at = (head >> 3) & 15, at + (2 if head & 4 else 1)
        size, shift = len(data) - at, 0
        if head & 2:
            size = 0
            while at < len(data) and shift < 35:
                byte = data[at]
                size, shift, at = size | (byte & 127) << shift, shift + 7, at + 1
                if byte < 128:
                    break
        if kind in (3, 6) and at < len(data):
            return Start(data[at] >> 4 == 1, headers=headers)
        headers |= kind == 1
        at += size
    return Start(False, headers=headers)


# Packets that are not marked as key frames never open a group, but of these codecs some show nothing.
_QUICK: Final[dict[Callable[[Packet], Start], Callable[[Packet], Start]]] = {
    _vp8: lambda packet: Start(False, shown=_vp8(packet).shown),
    _vp9: lambda packet: Start(False, shown=_vp9(packet).shown),
}
