"""Videos: encoded bytes -> patches of the planned shape.

    packets --decode in order, one thread--> frames --keep the planned ones--> RGB, turned, resized --> patches

Decoding is sequential from the start and stops after the last planned frame: seeking per frame costs 3-40x more and
lands on wrong frames in some containers. The plan wins: a stream that ends early repeats its last good frame, a longer
one is trimmed, and every frame is resized to the planned grid. Packets that do not decode are passed over; later frames
then move up in the count.
"""

from collections.abc import Iterator

import av.error
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from dataloaders.decode_patches import Conformed, PixelConfig, PlannedItem, cut_patches, differs, target_size
from dataloaders.errors import MediaError, Reason
from dataloaders.probe.limits import ProbeLimits
from dataloaders.probe.reader import open_source
from dataloaders.probe.video import Container, Frame, Stream, coded_size, open_video


def decode_video(
    data: bytes,
    item: PlannedItem,
    *,
    pixels: PixelConfig | None = None,
    limits: ProbeLimits | None = None,
    place: str = "",
) -> tuple[NDArray[np.float32], Conformed]:
    """Decode a video to its planned patches.

    Returns:
        (float32 [t * h * w, patch_dim], what had to be conformed).

    Raises:
        MediaError: not one frame decodes (`truncated` or `corrupt`), or the file cannot be opened; the caller
            substitutes `stand_in`.
    """
    pixels, limits = pixels or PixelConfig(), limits or ProbeLimits()
    with (
        open_source(data, limits=limits, place=place) as (file, size),
        open_video(file, size, place=place, limits=limits) as (container, stream),
    ):
        coded_size(stream, limits=limits, place=place)
        frames, report = _take(container, stream, item, pixels=pixels, limits=limits, place=place)
    return cut_patches(frames, item.grid, pixels), report


def _take(
    container: Container, stream: Stream, item: PlannedItem, *, pixels: PixelConfig, limits: ProbeLimits, place: str
) -> tuple[list[NDArray[np.uint8]], Conformed]:
    """The planned frames, resized, and the report."""
    wanted = item.frame_indices if item.frame_indices is not None else np.arange(item.grid[0] * pixels.temporal_patch)
    size_px = target_size(item, pixels)
    taken: list[NDArray[np.uint8]] = []
    last: Frame = None
    resized, bad = False, [0]
    for count, frame in enumerate(_frames(container, stream, bad)):
        limits.check_size(frame.width, frame.height, place=place, frame=True)
        last = frame
        if count == wanted[len(taken)]:
            image = _upright(frame)
            resized |= differs(item, *image.size)
            picture = _resized(image, size_px)
            while len(taken) < len(wanted) and wanted[len(taken)] == count:
                taken.append(picture)
            if len(taken) == len(wanted):
                break
    if last is None:
        reason = Reason.CORRUPT if bad[0] else Reason.TRUNCATED
        raise MediaError(
            reason,
            f"no frame decodes ({bad[0]} packets failed)",
            place=place,
            remedy="Remove or replace the file.",
        )
    missing = len(wanted) - len(taken)
    if missing:
        taken.extend([_resized(_upright(last), size_px)] * missing)
    return taken, Conformed(frames_repeated=missing, resized=resized, bad_packets=bad[0])


def _frames(container: Container, stream: Stream, bad: list[int]) -> Iterator[Frame]:
    """Frames in display order; counts packets that fail in `bad[0]` and goes on behind them."""
    packets = container.demux(stream)
    while True:
        try:
            packet = next(packets)
        except StopIteration:
            return
        except (
            av.error.InvalidDataError,
            LookupError,
        ):  # the container itself breaks off: flush what the decoder still holds
            bad[0] += 1
            packet = None
        try:
            yield from stream.decode(packet)
        except (av.error.InvalidDataError, av.error.EOFError):
            bad[0] += 1
        if packet is None:
            return


def _upright(frame: Frame) -> Image.Image:
    """RGB image of a frame, turned by its display rotation in steps of 90 degrees (counterclockwise positive)."""
    pixels: NDArray[np.uint8] = frame.to_ndarray(format="rgb24")
    turns = round(frame.rotation / 90) % 4
    return Image.fromarray(np.ascontiguousarray(np.rot90(pixels, turns)) if turns else pixels)


def _resized(image: Image.Image, size_px: tuple[int, int]) -> NDArray[np.uint8]:
    return np.asarray(image.resize(size_px, resample=Image.Resampling.BICUBIC), dtype=np.uint8)
