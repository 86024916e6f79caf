"""torchcodec: the frames that its exact mode finds, one thread, from memory.

    VideoDecoder(data, seek_mode="exact", num_ffmpeg_threads=1, dimension_order="NHWC") --get_frame_at--> numpy

It is imported by name only, never to see whether it is there: the import loads torch (2 to 4 s), and fails where no
FFmpeg libraries of a version it knows are installed on the system. Installed is not usable; `problem` says what is
missing. Its FFmpeg is whatever the system has, so files are vetted first, as for decord.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np

from dataloaders.video_decoders.base import BackendFailed, Clip, Kept, Picture, ProcessBound, Shot, Taken
from dataloaders.video_decoders.vetting import Accepts, pick, vet

_ACCEPTS: Final = Accepts(
    containers=frozenset({"mp4", "matroska"}),  # of MPEG-TS and some AVI it gives wrong frames, or fails at the end
    codecs=frozenset({"h264", "hevc", "vp8", "vp9", "av1", "mpeg4", "mjpeg"}),
    jumps=True,
)


class TorchcodecDecoder:
    """torchcodec."""

    name = "torchcodec"

    def problem(self) -> str:
        """Why it cannot be imported; "" if it can. Imports torch."""
        try:
            _library()
        except (ImportError, OSError, RuntimeError) as error:
            return f"{type(error).__name__}: {(str(error).strip() or 'no reason given').splitlines()[0]}"
        return ""

    def take(self, clip: Clip, wanted: Sequence[int], keep: Callable[[Picture], Kept]) -> Taken[Kept]:
        """See `VideoDecoder.take`."""
        meta = vet(clip, _ACCEPTS)
        with TorchcodecReader(clip.data) as reader:
            picker = pick(reader, wanted, keep, meta, num_frames=reader.num_frames)
        return Taken(frames=picker.frames, repeated=picker.repeated, num_packets=len(wanted), decoder=self.name)


class TorchcodecReader(ProcessBound):
    """An open clip; `num_frames` as torchcodec counts them.

    Raises:
        BackendFailed: torchcodec cannot open it.
    """

    def __init__(self, data: bytes) -> None:
        super().__init__()
        decoders = _library()
        try:
            self._reader: Any = decoders.VideoDecoder(
                data, dimension_order="NHWC", num_ffmpeg_threads=1, seek_mode="exact"
            )
            self.num_frames = len(self._reader)
        except (RuntimeError, ValueError, TypeError) as error:
            raise _failed(error) from error

    def close(self) -> None:
        """Free torchcodec's reader."""
        self._reader = None

    def _shots(self, wanted: Sequence[int]) -> Iterator[Shot]:
        for number in dict.fromkeys(min(number, self.num_frames - 1) for number in wanted):
            try:
                picture: Picture = np.asarray(self._reader.get_frame_at(number).data.numpy(), dtype=np.uint8)
            except (RuntimeError, IndexError, ValueError) as error:
                raise _failed(error) from error
            yield Shot(number=number, picture=picture)


def _failed(error: Exception) -> BackendFailed:
    return BackendFailed(f"{type(error).__name__}: {(str(error) or 'no reason given').splitlines()[0][:200]}")


def _library() -> Any:
    import torchcodec.decoders

    return torchcodec.decoders
