"""A clip of known content, for the self-test of decoders: made on the spot, so that it needs no file and no download.

12 frames of 96 x 64 px, MPEG-4 in MP4: frame i is grey 16 i + 8, its top-left quarter white; turned on request
"""

import io
import struct
from functools import lru_cache

import av
import numpy as np

from dataloaders.video_decoders.base import Picture

NUM_FRAMES = 12
WIDTH_PX, HEIGHT_PX = 96, 64
_TURNED = (0, 1 << 16, 0, -1 << 16, 0, 0, 0, 0, 1 << 30)  # a display matrix: 90 degrees clockwise
_GROUP = 5  # key frames at 0, 5, 10, so that a self-test crosses some


@lru_cache(maxsize=2)
def builtin_clip(*, turned: bool = False) -> bytes:
    """The encoded clip; `turned` has a display rotation of 90 degrees clockwise."""
    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as file:
        stream = file.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = WIDTH_PX, HEIGHT_PX, "yuv420p"
        stream.gop_size, stream.bit_rate = _GROUP, 4_000_000
        for number in range(NUM_FRAMES):
            picture = np.full((HEIGHT_PX, WIDTH_PX, 3), 16 * number + 8, dtype=np.uint8)
            picture[: HEIGHT_PX // 2, : WIDTH_PX // 2] = 255
            file.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        file.mux(stream.encode(None))
    data = out.getvalue()
    if not turned:
        return data
    at = data.index(b"tkhd") + 4 + 40  # type, then 40 bytes up to the matrix (version 0)
    return data[:at] + struct.pack(">9i", *_TURNED) + data[at + 36 :]


def number_shown(picture: Picture, *, turned: bool = False) -> int:
    """Number of the frame that a picture shows; -1 for another shape, another turn, or no grey of the clip."""
    if picture.shape != ((WIDTH_PX, HEIGHT_PX, 3) if turned else (HEIGHT_PX, WIDTH_PX, 3)):
        return -1
    # Stored top left, the white quarter is shown top right after a clockwise turn.
    upper, lower = picture[8:16].astype(float), picture[-16:-8].astype(float)
    white = upper[:, -16:-8] if turned else upper[:, 8:16]
    grey = lower[:, 8:16]
    if white.mean() < 240:
        return -1
    number = round((grey.mean() - 8) / 16)
    return number if 0 <= number < NUM_FRAMES and abs(grey.mean() - 8 - 16 * number) < 5 else -1
