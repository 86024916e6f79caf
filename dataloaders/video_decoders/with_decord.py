"""decord 0.6: read in display order from the start, one thread, from memory.

    VideoReader(BytesIO(data), num_threads=1) --skip inside a group, next at its end--> wanted frames

decord's own jumps are not used. `get_batch`, `seek_accurate` and `skip_frames` over a key frame return wrong frames, in
silence, where groups of frames are open or the file is fragmented (measured: 14 of 19 frames of a fragmented MP4);
`get_batch` can also hang for ever. What is left is exact on every file that `vet` lets through: a skip that stays
before the next key frame, and `next`. Edit lists are ignored by decord; they show in the frame count.

Its last release is of 2021 and so is the FFmpeg inside: no AV1, no fixes of security faults. Use it for data you trust.
"""

import bisect
import io
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from dataloaders.video_decoders.base import BackendFailed, Clip, Kept, Picture, ProcessBound, Shot, Taken
from dataloaders.video_decoders.vetting import Accepts, container_of, pick, vet

_ACCEPTS: Final = Accepts(
    containers=frozenset({"mp4", "matroska", "avi", "flv"}),
    codecs=frozenset({"h264", "hevc", "vp8", "vp9", "mpeg4", "mjpeg", "flv1", "h263", "mpeg1video", "mpeg2video"}),
    needs_duration=True,
)


class DecordDecoder:
    """decord."""

    name = "decord"

    def problem(self) -> str:
        """Why it cannot be imported; "" if it can. The import takes some 0.1 s."""
        try:
            _library()
        except (ImportError, OSError, RuntimeError) as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def take(self, clip: Clip, wanted: Sequence[int], keep: Callable[[Picture], Kept]) -> Taken[Kept]:
        """See `VideoDecoder.take`."""
        meta = vet(clip, _ACCEPTS)
        # AVI has no times of presentation; where frames come out of order, skipping counts wrongly.
        with DecordReader(clip.data, skips=container_of(clip.data[:16]) != "avi") as reader:
            picker = pick(reader, wanted, keep, meta, num_frames=reader.num_frames)
        return Taken(frames=picker.frames, repeated=picker.repeated, num_packets=reader.num_read, decoder=self.name)


class DecordReader(ProcessBound):
    """An open clip.

    Args:
        skips: pass over unwanted frames inside a group without converting them; False converts every frame.

    Attributes:
        num_frames: what decord counts.
        num_read: frames decoded so far.

    Raises:
        BackendFailed: decord cannot open it.
    """

    def __init__(self, data: bytes, *, skips: bool = True) -> None:
        super().__init__()
        decord = _library()
        self.num_read = 0
        with _explained():
            self._reader: Any = decord.VideoReader(io.BytesIO(data), ctx=decord.cpu(0), num_threads=1)
            self.num_frames = len(self._reader)
            self._keys: Sequence[int] = self._reader.get_key_indices() if skips else range(self.num_frames)

    def close(self) -> None:
        """Free decord's reader, with its thread."""
        self._reader = None

    def _shots(self, wanted: Sequence[int]) -> Iterator[Shot]:
        for number in dict.fromkeys(min(number, self.num_frames - 1) for number in wanted):
            with _explained():
                self._forward(number)
                picture: Picture = self._reader.next().asnumpy()
            self.num_read += 1
            yield Shot(number=number, picture=picture)

    def _forward(self, number: int) -> None:
        """Go to a frame, over each key frame by decoding the one before it."""
        while self.num_read < number:
            place = bisect.bisect_right(self._keys, self.num_read)
            key = self._keys[place] if place < len(self._keys) else self.num_frames
            stop = min(number, key - 1)
            if stop > self.num_read:
                self._reader.skip_frames(stop - self.num_read)
            if number >= key:
                self._reader.next()
                stop = key
            self.num_read = stop


class _explained:
    """Turns what decord raises into `BackendFailed` with the first line of its text."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, MemoryError) or not isinstance(error, Exception):
            return
        first_line = (str(error) or "no frame").splitlines()[0]
        raise BackendFailed(f"{type(error).__name__}: {first_line[:200]}") from error


def _library() -> Any:
    """decord, with its FFmpeg silent: its complaints about damaged files would fill the log of a run."""
    import decord

    decord.logging.set_level(decord.logging.QUIET)
    return decord
