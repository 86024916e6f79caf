"""PyAV: the decoder that is always there, and to which the others fall back.

    packets --groups with a wanted frame--> decoder, one thread --> wanted frames --> RGB, turned

Frames that are not wanted are decoded where later ones refer to them, and never converted to RGB. Groups of frames
without a wanted one are not decoded (`frame_groups`); where groups cannot be told, all packets are, from the start to
the last wanted frame. Both number frames alike on sound files. On damaged ones, groups lose no more than they must: a
frame that does not decode is missing at its own number, while without groups later frames move up in the count.
"""

from collections.abc import Callable, Iterator, Sequence

import av.error
import numpy as np

from dataloaders.probe.reader import open_source
from dataloaders.probe.video_open import Container, Frame, Packet, Stream, coded_size, open_video
from dataloaders.video_decoders.base import Clip, Kept, Picker, Picture, ProcessBound, Shot, Taken, no_frame
from dataloaders.video_decoders.frame_groups import FrameGroup, Irregular, frame_groups, start_reader


class PyavDecoder:
    """PyAV.

    Args:
        skip_groups: leave out groups without a wanted frame. False decodes from the start: slower, for comparisons.
    """

    name = "pyav"

    def __init__(self, *, skip_groups: bool = True) -> None:
        self._skip_groups = skip_groups

    def problem(self) -> str:
        """Nothing: it is a dependency."""
        return ""

    def take(self, clip: Clip, wanted: Sequence[int], keep: Callable[[Picture], Kept]) -> Taken[Kept]:
        """See `VideoDecoder.take`; never raises `BackendFailed`."""
        if self._skip_groups:
            try:
                return _take(clip, wanted, keep, by_groups=True)
            except Irregular:
                pass
        return _take(clip, wanted, keep, by_groups=False)


def _take(clip: Clip, wanted: Sequence[int], keep: Callable[[Picture], Kept], *, by_groups: bool) -> Taken[Kept]:
    with (
        open_source(clip.data, limits=clip.limits, place=clip.place) as (file, size),
        open_video(file, size, place=clip.place, limits=clip.limits) as (container, stream),
        PyavReader(clip, container, stream, by_groups=by_groups) as reader,
    ):
        coded_size(stream, limits=clip.limits, place=clip.place)
        picker = Picker(wanted, keep)
        for shot in reader.shots(wanted):
            picker.add(shot)
            if picker.done:
                break
        if picker.empty:
            if by_groups:
                raise Irregular("none of the groups with a wanted frame decodes")
            raise no_frame(reader.bad_packets, clip.place)
        picker.finish()
        return Taken(
            frames=picker.frames,
            repeated=picker.repeated,
            bad_packets=reader.bad_packets,
            num_packets=reader.num_packets,
            num_frames=reader.num_frames,
            decoder="pyav",
        )


class PyavReader(ProcessBound):
    """An open clip; `bad_packets`, `num_packets` and `num_frames` as in `Taken`, up to where it was read."""

    def __init__(self, clip: Clip, container: Container, stream: Stream, *, by_groups: bool) -> None:
        super().__init__()
        self._clip, self._container, self._stream, self._by_groups = clip, container, stream, by_groups
        self.bad_packets = self.num_packets = 0
        self.num_frames: int | None = None

    def close(self) -> None:
        """Nothing: `open_video` closes the container."""

    def _shots(self, wanted: Sequence[int]) -> Iterator[Shot]:
        if not self._by_groups:
            return self._in_sequence(wanted)
        look = start_reader(self._container, self._stream)
        if look is None:
            raise Irregular("not a codec or container that is cut into groups")
        return self._in_groups(wanted, frame_groups(self._packets(), look))

    def _in_sequence(self, wanted: Sequence[int]) -> Iterator[Shot]:
        missing, at = _distinct(wanted), 0
        number, unseen = -1, None
        for number, frame in enumerate(self._decoded(self._packets())):
            unseen = frame
            if at < len(missing) and number == missing[at]:
                yield self._shot(number, frame)
                unseen, at = None, at + 1
        self.num_frames = number + 1
        if unseen is not None:
            yield self._shot(number, unseen)

    def _in_groups(self, wanted: Sequence[int], groups: Iterator[FrameGroup]) -> Iterator[Shot]:
        missing, at = _distinct(wanted), 0
        for group in groups:
            hits = []
            while at < len(missing) and missing[at] < group.end:
                hits.append(missing[at])
                at += 1
            to_the_end = group.last and at < len(missing)
            if group.last:
                self.num_frames = group.end
            if hits or to_the_end:
                yield from self._of_group(group, hits, to_the_end=to_the_end)

    def _of_group(self, group: FrameGroup, hits: list[int], *, to_the_end: bool) -> Iterator[Shot]:
        """The shots `hits` of a group; where one is missing, or up to the last frame, the last good one before it."""
        bad_before, count, at, number, unseen = self.bad_packets, 0, 0, -1, None
        for frame in self._decoded([*group.packets, None]):
            later = group.number_of.get(frame.pts, -1)
            if later <= number:
                raise Irregular("a frame comes at a time that no packet has")
            while at < len(hits) and hits[at] < later:  # this one did not decode
                at += 1
                if unseen is not None:
                    yield self._shot(number, unseen)
                    unseen = None
            number, unseen, count = later, frame, count + 1
            if at < len(hits) and hits[at] == number:
                yield self._shot(number, frame)
                unseen, at = None, at + 1
            if at == len(hits) and not to_the_end:
                break
        else:
            if count < len(group.number_of) and self.bad_packets == bad_before:
                raise Irregular("fewer frames than packets, and none of them bad")
            if unseen is not None:
                yield self._shot(number, unseen)
        self._stream.codec_context.flush_buffers()

    def _packets(self) -> Iterator[Packet]:
        """Packets of the stream; where the container breaks off, they end there with one bad packet."""
        packets = self._container.demux(self._stream)
        while True:
            try:
                packet = next(packets)
            except StopIteration:
                return
            except (av.error.InvalidDataError, LookupError):
                self.bad_packets += 1
                self.num_packets += 1
                if not self._by_groups:
                    yield None  # what the decoder still holds
                return
            yield packet

    def _decoded(self, packets: Iterator[Packet] | list[Packet]) -> Iterator[Frame]:
        """Frames in display order; counts packets that fail and goes on behind them."""
        for packet in packets:
            self.num_packets += packet is not None and packet.size > 0
            try:
                frames = self._stream.decode(packet)
            except (av.error.InvalidDataError, av.error.EOFError):
                self.bad_packets += 1
                continue
            for frame in frames:
                self._clip.limits.check_size(frame.width, frame.height, place=self._clip.place, frame=True)
                yield frame

    def _shot(self, number: int, frame: Frame) -> Shot:
        return Shot(number=number, picture=upright(frame))


def upright(frame: Frame) -> Picture:
    """RGB of a frame, uint8 [H, W, 3], turned by its display rotation in steps of 90 degrees."""
    pixels: Picture = frame.to_ndarray(format="rgb24")
    turns = round(frame.rotation / 90) % 4  # counterclockwise positive
    return np.ascontiguousarray(np.rot90(pixels, turns)) if turns else pixels


def _distinct(wanted: Sequence[int]) -> list[int]:
    return list(dict.fromkeys(wanted))
