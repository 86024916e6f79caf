"""A tiny built-in set for `check`: text only, label-free, one image, several images, in an order that matters.

In sequential order over four micro-batches of one replica (or over the cells of two), the first pack holds text
only and the second no label token at all: the two cases that break naive losses and naive pipelines.
"""

import io

import numpy as np
from PIL import Image

from dataloaders.counts import MediaKind
from dataloaders.record import MediaPart, MediaRef, Record, TextPart, Turn

GROUP = 4  # samples of each kind
NUM_SAMPLES = 4 * GROUP


class CheckSource:
    """`NUM_SAMPLES` generated samples held in memory (a `SampleSource`).

    Samples 0-3 are text only; 4-7 have an image and no assistant turn, so no label; 8-15 have one to three images.
    """

    def __init__(self, *, seed: int = 0) -> None:
        rng = np.random.Generator(np.random.Philox(seed))
        self._media = [[_picture(rng) for _ in range(_num_images(i))] for i in range(NUM_SAMPLES)]
        self.fingerprint = f"check-{seed}"

    def __len__(self) -> int:
        return NUM_SAMPLES

    def record(self, i: int) -> Record:
        """Sample `i` as a conversation."""
        images = tuple(
            MediaRef(kind=MediaKind.IMAGE, member=f"{i}.{j}.png", size_bytes=len(data))
            for j, data in enumerate(self._media[i])
        )
        question = (*(MediaPart(j) for j in range(len(images))), TextPart("What is it? " + "abc " * (i % 5)))
        turns = [Turn(role="user", parts=question)]
        if not GROUP <= i < 2 * GROUP:
            turns.append(Turn(role="assistant", parts=(TextPart(f"Sample {i}. " + "xyz " * (3 * i % 7)),)))
        return Record(shard="check", key=str(i), turns=tuple(turns), media=images)

    def media_reader(self, i: int, j: int) -> "_Bytes":
        """Ranges of medium `j` of sample `i`."""
        return _Bytes(self._media[i][j])

    def media_bytes(self, i: int, j: int) -> bytes:
        """Encoded bytes of medium `j` of sample `i`."""
        return self._media[i][j]

    def place(self, i: int) -> str:
        """Where sample `i` is, for messages."""
        return f"built-in check sample {i}"


class _Bytes:
    """Encoded media in memory as a byte-range reader."""

    def __init__(self, data: bytes) -> None:
        self._data, self.size = data, len(data)

    def read(self, offset: int, size: int) -> bytes:
        """Up to `size` bytes from `offset`."""
        return self._data[offset : offset + size]


def _num_images(i: int) -> int:
    if i < GROUP:
        return 0
    return 1 if i < 3 * GROUP else 1 + i % 3


def _picture(rng: np.random.Generator) -> bytes:
    width, height = (int(side) for side in rng.integers(40, 240, size=2))
    pixels = rng.integers(0, 256, size=(height // 8 + 1, width // 8 + 1, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).resize((width, height), Image.Resampling.BILINEAR).save(buffer, "PNG")
    return buffer.getvalue()
