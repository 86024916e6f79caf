"""What a file must prove before its bytes reach a library that we do not control: decord, torchcodec.

    first bytes: MP4, matroska, AVI or FLV? -> ceilings and MP4 claims -> PyAV's FFmpeg, allow-list of containers
        -> codec, pixel format and first frame of kinds that all decode alike -> frame count by the probe

decord carries an FFmpeg of 2021 without a list of allowed containers or protocols: a playlist (HLS, DASH, concat) or a
session description would make it open other files and addresses. These are text, or found by text; a file is handed
over only if it starts with the mark of a binary container, so no version of FFmpeg takes it for one of them. What is
known to come out otherwise than from PyAV is not handed over either, so that the choice of a decoder changes no pixel.

Price: a second opening with one frame decoded, and for containers without a frame count a walk over the packets.
"""

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import Final

import av.error

from dataloaders.errors import MediaError
from dataloaders.probe.mp4_boxes import is_mp4
from dataloaders.probe.reader import open_source
from dataloaders.probe.video import VideoMeta, probe_video
from dataloaders.probe.video_open import Container, Stream, coded_size, open_video
from dataloaders.video_decoders.base import BackendFailed, Clip, Kept, Picker, Picture, ProcessBound
from dataloaders.video_decoders.frame_groups import start_reader

_FORMATS: Final = {
    "mp4": "mov,mp4,m4a,3gp,3g2,mj2",
    "matroska": "matroska,webm",
    "avi": "avi",
    "flv": "flv",
}


PLAIN_PIXELS: Final = frozenset({"yuv420p", "yuvj420p", "yuv422p", "yuvj422p", "yuv444p", "yuvj444p"})
"""Eight bits a channel: what all versions of FFmpeg turn into the same RGB. Above, chroma is interpolated in ways that
differ by up to half of the range at edges; so are interlaced frames."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Accepts:
    """What a backend is trusted with.

    Attributes:
        containers: of `mp4`, `matroska`, `avi`, `flv`.
        codecs: by FFmpeg's names.
        needs_duration: the backend fails on a container that has none.
        jumps: the backend jumps to key frames by the container's flags. Where one of H.264 is no IDR picture, what
            follows need not decode as it would from the start.
    """

    containers: Set[str]
    codecs: Set[str]
    needs_duration: bool = False
    jumps: bool = False


def container_of(head: bytes) -> str:
    """The container by its first bytes, "" for all that is not surely one of four."""
    if is_mp4(head):
        return "mp4"
    if head.startswith(b"\x1aE\xdf\xa3"):
        return "matroska"
    if head[:4] == b"RIFF" and head[8:12] == b"AVI ":
        return "avi"
    return "flv" if head.startswith(b"FLV\1") else ""


def vet(clip: Clip, accepts: Accepts) -> VideoMeta:
    """Header of a clip that a backend may have.

    Raises:
        BackendFailed: another backend may decode it.
        MediaError: none may.
    """
    found = container_of(clip.data[:16])
    with open_source(clip.data, limits=clip.limits, place=clip.place) as (file, size):
        if found not in accepts.containers:
            raise BackendFailed(f"container {found or 'unknown'} is not handed to it")
        with open_video(file, size, place=clip.place, limits=clip.limits) as (container, stream):
            coded_size(stream, limits=clip.limits, place=clip.place)
            if container.format.name != _FORMATS.get(found, found):
                raise BackendFailed(f"container {container.format.name} starts like {found}")
            if accepts.needs_duration and not container.duration:
                raise BackendFailed("the container has no duration")
            _check_stream(container, stream, accepts)
    try:
        return probe_video(clip.data, limits=clip.limits, place=clip.place)
    except MediaError as error:  # FFmpeg opens it, so PyAV may find frames where no count can be told
        raise BackendFailed(f"its frames cannot be counted: {error.cause}") from error


def _check_stream(container: Container, stream: Stream, accepts: Accepts) -> None:
    """Judge codec, pixel format, first frame and key frames."""
    context = stream.codec_context
    codec, pixel_format = context.codec.canonical_name, context.pix_fmt or "unknown"
    if codec not in accepts.codecs:
        raise BackendFailed(f"codec {codec} is not handed to it")
    if pixel_format not in PLAIN_PIXELS:
        raise BackendFailed(f"pixel format {pixel_format} is not handed to it")
    look = start_reader(container, stream) if accepts.jumps and codec == "h264" else None
    first = None
    for packet in container.demux(stream):
        if look is not None and packet.size and packet.is_keyframe and not look(packet).fresh:
            raise BackendFailed("a key frame that is no fresh start")
        if first is None:
            try:
                first = next(iter(stream.decode(packet)), None)
            except av.error.FFmpegError as error:
                raise BackendFailed(f"its start does not decode: {type(error).__name__}") from error
        if first is not None and look is None:
            break
    if first is None or first.interlaced_frame:
        raise BackendFailed("no frame" if first is None else "interlaced frames are not handed to it")


def pick(
    reader: ProcessBound, wanted: Sequence[int], keep: Callable[[Picture], Kept], meta: VideoMeta, *, num_frames: int
) -> Picker[Kept]:
    """The wanted frames of an open reader that agrees with the header.

    Args:
        num_frames: as the backend counts them.

    Raises:
        BackendFailed: it counts other frames than the probe (an edit list that it ignores), shows pictures of another
            shape, or none.
    """
    if num_frames != meta.num_frames:
        raise BackendFailed(f"it counts {num_frames} frames where the probe counts {meta.num_frames}")
    picker = Picker(wanted, keep)
    for shot in reader.shots(wanted):
        if picker.empty:
            _check_shape(meta, shot.picture.shape)
        picker.add(shot)
    picker.finish()
    if picker.empty:
        raise BackendFailed("it delivers no frame")
    return picker


def _check_shape(meta: VideoMeta, shape: tuple[int, ...]) -> None:
    """Raise `BackendFailed` for a picture of another shape than (height_px, width_px, 3) of the header.

    decord takes the padding of narrow frames (below 64 px) for a fourth channel.
    """
    if shape != (meta.height_px, meta.width_px, 3):
        raise BackendFailed(f"its picture is {shape} where the header says {meta.width_px}x{meta.height_px} px")
