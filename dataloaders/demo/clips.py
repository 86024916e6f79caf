"""Drawing of demo clips: a camera pans or zooms over a tinted photograph, encoded as H.264 in MP4 by PyAV, one thread.

`left` means that the camera moves left, so the content moves right; `in` means that things grow. Colour and brightness
are measured on decoded frames, about two per second; the motion is true by construction.
"""

from fractions import Fraction
from io import BytesIO
from itertools import chain
from typing import Final

import av
import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray
from PIL import Image

from dataloaders.demo.facts import Measure, measure
from dataloaders.demo.recipe import ClipSpec
from dataloaders.demo.render import crop_photo, first_clear, hue_draw, tint
from dataloaders.errors import SourceError

Box = tuple[float, float, float, float]

CODEC: Final = "libx264"
# Camera speed in frame sides per second: a 10 s pan must fit a photograph, and half a second must show the motion.
_MIN_SPEED, _MAX_SPEED = 0.10, 0.18
_MAX_TRAVEL = 1.6
_MAX_ZOOM = 2.2
_MEASURED_PER_S = 2


def render_clip(spec: ClipSpec, rng: Generator) -> tuple[bytes, Measure]:
    """MP4 bytes of one clip and the facts measured in its decoded frames.

    Raises:
        SourceError: this build of PyAV has no H.264 encoder.
    """
    require_encoder()
    width_px, height_px, boxes = _camera(spec, _MIN_SPEED + (_MAX_SPEED - _MIN_SPEED) * float(rng.random()))
    still = crop_photo(spec.photo, width_px, height_px, rng)
    hue = hue_draw(rng)

    def attempt(strength: float) -> tuple[bytes, Measure]:
        tinted = Image.fromarray(tint(still, spec.colour, spec.brightness, strength, hue))
        data = _encode(tinted, boxes, spec)
        return data, measure(sampled_frames(data, spec.fps))

    return first_clear(attempt, spec.colour, spec.brightness)


def require_encoder() -> None:
    """Refuse a PyAV without libx264: another codec would silently make a different corpus."""
    try:
        av.codec.Codec(CODEC, "w")
    except Exception as error:  # PyAV has changed the class of this error between versions
        raise SourceError(
            f"PyAV {av.__version__} was built without the H.264 encoder {CODEC}, which the demo clips need",
            remedy="Install the wheel of PyAV: pip install --only-binary av --force-reinstall av",
        ) from error


def _camera(spec: ClipSpec, speed: float) -> tuple[int, int, list[Box]]:
    """Size of the still to draw, (width_px, height_px), and the camera window of every frame in it."""
    width, height, last = spec.width_px, spec.height_px, max(1, spec.num_frames - 1)
    duration_s = float(spec.num_frames / spec.fps)
    times = [i / last for i in range(spec.num_frames)]
    if spec.motion in ("in", "out"):
        zoom = min(_MAX_ZOOM, 1.25 + speed * duration_s)
        # The still is larger than a frame, so that zooming in finds detail.
        big_w, big_h = round(width * 1.5), round(height * 1.5)
        if spec.motion == "out":
            times.reverse()
        return big_w, big_h, [_zoomed(big_w, big_h, zoom**t) for t in times]
    sideways = spec.motion in ("left", "right")
    travel = round(min(_MAX_TRAVEL, speed * duration_s + 0.1) * (width if sideways else height))
    if spec.motion in ("left", "up"):
        times.reverse()
    # Whole pixels: a window is then a slice without resampling.
    shifts = [round(t * travel) for t in times]
    if sideways:
        return width + travel, height, [(s, 0, s + width, height) for s in shifts]
    return width, height + travel, [(0, s, width, s + height) for s in shifts]


def _zoomed(width: int, height: int, zoom: float) -> Box:
    half_w, half_h = width / (2 * zoom), height / (2 * zoom)
    return (width / 2 - half_w, height / 2 - half_h, width / 2 + half_w, height / 2 + half_h)


def _encode(still: Image.Image, boxes: list[Box], spec: ClipSpec) -> bytes:
    buffer = BytesIO()
    # Bit-exact muxing leaves out version strings and dates: the same input gives the same bytes.
    with av.open(buffer, "w", format="mp4", options={"fflags": "+bitexact"}) as container:
        stream = container.add_stream(
            CODEC, rate=spec.fps, options={"preset": "superfast", "crf": "26", "threads": "1"}
        )
        stream.width, stream.height, stream.pix_fmt = spec.width_px, spec.height_px, "yuv420p"
        stream.codec_context.thread_count = 1
        frames = (_frame(still, box, spec.width_px, spec.height_px) for box in boxes)
        for packet in chain.from_iterable(stream.encode(frame) for frame in chain(frames, (None,))):
            container.mux(packet)
    return buffer.getvalue()


def _frame(still: Image.Image, box: Box, width_px: int, height_px: int) -> av.VideoFrame:
    size = (width_px, height_px)
    if (box[2] - box[0], box[3] - box[1]) == size:
        window = still.crop((round(box[0]), round(box[1]), round(box[2]), round(box[3])))
    else:
        window = still.resize(size, Image.Resampling.BILINEAR, box=box)
    return av.VideoFrame.from_ndarray(np.asarray(window), format="rgb24")


def sampled_frames(data: bytes, fps: Fraction) -> NDArray[np.uint8]:
    """Decoded frames of an MP4, about two per second from the first one on: uint8 [frames, height, width, 3]."""
    step = max(1, round(fps / _MEASURED_PER_S))
    with av.open(BytesIO(data), "r") as container:
        stream = container.streams.video[0]
        stream.codec_context.thread_count = 1
        frames = [f.to_ndarray(format="rgb24") for i, f in enumerate(container.decode(stream)) if i % step == 0]
    return np.stack(frames)
