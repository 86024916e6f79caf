"""Mutation fuzzing of the image probe: whatever the bytes, a size or a reason, soon, in little memory.

`MLLM_FUZZ_SECONDS` sets how long it runs (10 s when it is not set); the seed is fixed, so a failure comes back.
"""

import io
import os
import random
import struct
import time
import tracemalloc
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dataloaders.errors import MediaError, Reason
from dataloaders.probe import ImageMeta, ProbeLimits, probe_image

SECONDS = float(os.environ.get("MLLM_FUZZ_SECONDS", "10"))
LIMITS = ProbeLimits(max_header_bytes=1 << 20)
SLOWEST_S = 5.0  # of one probe; a hang, not a benchmark
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "JPEG": ("RGB", {}),
    "JPEG progressive": ("RGB", {"progressive": True, "icc_profile": bytes(2000)}),
    "MPO": ("RGB", {"save_all": True}),
    "PNG": ("RGBA", {}),
    "PNG palette": ("P", {"dpi": (1, 1)}),
    "PNG animated": ("RGB", {"save_all": True}),
    "WEBP": ("RGB", {}),
    "WEBP lossless": ("RGBA", {"lossless": True}),
    "WEBP animated": ("RGB", {"save_all": True}),
    "GIF": ("P", {}),
    "GIF animated": ("RGB", {"save_all": True}),
    "BMP": ("P", {}),
    "DIB": ("RGB", {}),
    "TIFF": ("RGB", {"compression": "tiff_lzw"}),
    "TIFF big": ("L", {"big_tiff": True}),
    "TIFF pages": ("P", {"save_all": True}),
    "JPEG2000": ("RGB", {}),
    "JPEG2000 stream": ("L", {"no_jp2": True}),
    "AVIF": ("RGBA", {}),
    "AVIF sequence": ("RGB", {"save_all": True}),
    "PPM": ("RGB", {}),
}


def seed_file(name: str) -> bytes:
    mode, options = KINDS[name]
    kind = name.split(maxsplit=1)[0]
    noise = np.random.default_rng(5).integers(0, 256, (3, 12, 18, 3), dtype=np.uint8)
    pages = [Image.fromarray(page).convert(mode) for page in noise]
    if "save_all" in options:
        options = options | {"append_images": pages[1:]}
    # libavif's encoder crashes on a turned sequence, so that seed goes without EXIF.
    if kind in ("JPEG", "PNG", "WEBP", "AVIF", "MPO") and name != "AVIF sequence":
        exif = Image.Exif()
        exif[0x010E], exif[0x0112] = "some words that do not fit into four bytes", 6
        options = options | {"exif": exif}
    out = io.BytesIO()
    pages[0].save(out, kind, **options)
    return out.getvalue()


def flip_bits(data: bytearray, rng: random.Random) -> None:
    for _ in range(rng.choice((1, 1, 2, 5, 20))):
        data[spot(data, rng)] ^= 1 << rng.randrange(8)


def set_bytes(data: bytearray, rng: random.Random) -> None:
    for _ in range(rng.choice((1, 1, 3))):
        data[spot(data, rng)] = rng.choice((0, 1, 0x7F, 0x80, 0xFF, rng.randrange(256)))


def cut(data: bytearray, rng: random.Random) -> None:
    del data[max(spot(data, rng), 1) :]


def edit_length(data: bytearray, rng: random.Random) -> None:
    """Overwrite two, four or eight aligned or unaligned bytes as a length, an offset or a count."""
    at, size, order = spot(data, rng), rng.choice((2, 4, 8)), rng.choice(("big", "little"))
    values = (0, 1, 7, 8, 255, 65_535, len(data), len(data) + 1, at, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**64 - 1)
    value = rng.choice(values) % 256**size
    data[at : at + size] = value.to_bytes(size, "big" if order == "big" else "little")


def duplicate(data: bytearray, rng: random.Random) -> None:
    """Insert a copy of a stretch somewhere, several times over."""
    start = spot(data, rng)
    stretch = bytes(data[start : start + rng.choice((4, 12, 40, 200))]) * rng.choice((1, 1, 3, 100))
    at = spot(data, rng)
    data[at:at] = stretch


def drop(data: bytearray, rng: random.Random) -> None:
    at = spot(data, rng)
    del data[at : at + rng.randrange(1, 40)]
    data += b"\0" * (not data)


def mend_png(data: bytearray, rng: random.Random) -> None:
    """Give PNG chunks right check sums again, so that mutations reach behind them."""
    at = 8
    while data[:4] == b"\x89PNG" and at + 12 <= len(data):
        length = struct.unpack_from(">I", data, at)[0]
        end = at + 8 + length
        if end + 4 > len(data):
            return
        data[end : end + 4] = struct.pack(">I", zlib.crc32(data[at + 4 : end]))
        at = end + 4


def spot(data: bytearray, rng: random.Random) -> int:
    """A position, more often in the header."""
    return rng.randrange(min(len(data), rng.choice((32, 128, 512, 1 << 30))))


MUTATIONS: tuple[Callable[[bytearray, random.Random], None], ...] = (
    flip_bits,
    set_bytes,
    cut,
    edit_length,
    duplicate,
    drop,
)


class Ranges:
    """The bytes behind a reader, which refuses to serve more than the budget."""

    def __init__(self, data: bytes) -> None:
        self.data, self.size, self.fetched = data, len(data), 0

    def read(self, offset: int, size: int) -> bytes:
        assert 0 <= offset <= self.size
        assert 0 < size <= self.size - offset
        self.fetched += size
        return self.data[offset : offset + size]


def outcome(src: Any) -> ImageMeta | tuple[Reason, str]:
    """The answer, or the reason and the words; anything else that is raised fails the test."""
    try:
        return probe_image(src, limits=LIMITS)
    except MediaError as error:
        return error.reason, str(error)


def acceptable(found: ImageMeta | tuple[Reason, str]) -> bool:
    if isinstance(found, tuple):
        return isinstance(found[0], Reason) and len(found[1]) < 2000
    sides = found.width_px, found.height_px
    return (
        min(sides) >= 1
        and max(sides) <= LIMITS.max_side_px
        and sides[0] * sides[1] <= LIMITS.max_pixels
        and 1 <= found.orientation <= 8
        and 1 <= found.frames <= LIMITS.max_frames
        and bool(found.mode)
    )


@pytest.mark.timeout(int(SECONDS) + 120)
def test_mutated_files_give_a_size_or_a_reason_and_nothing_else() -> None:
    rng = random.Random(20_261)
    seeds = {name: seed_file(name) for name in KINDS}
    for data in seeds.values():
        assert isinstance(outcome(data), ImageMeta)
    refused = read = 0
    slowest_s, deadline_s = 0.0, time.monotonic() + SECONDS
    while time.monotonic() < deadline_s:
        for name, original in seeds.items():
            data = bytearray(original)
            for mutate in rng.choices(MUTATIONS, k=rng.choice((1, 1, 2, 3))):
                mutate(data, rng)
            if rng.random() < 0.5:
                mend_png(data, rng)
            started_s = time.monotonic()
            found = outcome(bytes(data))
            slowest_s = max(slowest_s, time.monotonic() - started_s)
            assert acceptable(found), (name, found, bytes(data).hex())
            assert outcome(Ranges(bytes(data))) == found, (name, bytes(data).hex())
            refused, read = refused + isinstance(found, tuple), read + isinstance(found, ImageMeta)
    assert slowest_s < SLOWEST_S
    assert refused > 100
    assert read > 100


def hostile() -> dict[str, bytes]:
    """Small or repetitive files that would be slow or large for a parser that believes them."""
    gif = b"GIF89a\1\0\1\0\0\0\0" + b"\x2c\0\0\0\0\1\0\1\0\0\2"
    webp = b"VP8X\x0a\0\0\0\2\0\0\0\0\0\0\0\0\0" + b"JUNK\0\0\0\0" * 300_000
    page = struct.pack("<H", 1) + struct.pack("<HHII", 0xFFFF, 4, 1, 0)
    first = struct.pack("<H", 2) + struct.pack("<HHIIHHII", 256, 4, 1, 9, 257, 4, 1, 9)
    pages = b"".join(page + struct.pack("<I", 60 + 18 * (i + 1)) for i in range(200_000))
    jpeg = b"\xff\xd8"
    return {
        "gif of one-byte blocks": gif + b"\1\0" * 3_000_000 + b"\0;",
        "gif without an end": gif + b"\xff" * 3_000_000,
        "webp of empty chunks": b"RIFF" + struct.pack("<I", len(webp) + 4) + b"WEBP" + webp,
        "tiff of many pages": (b"II*\0\x08\0\0\0" + first + struct.pack("<I", 60)).ljust(60, b"\0") + pages,
        "tiff that says it has 65,535 entries": b"II*\0\x08\0\0\0\xff\xff"
        + struct.pack("<HHII", 9, 2, 2**31, 8) * 65_535,
        "exif that says it has 65,535 entries": jpeg
        + b"\xff\xe1\xff\xff"
        + b"Exif\0\0II*\0\x08\0\0\0\xff\xff"
        + b"\1" * 65_500,
        "jpeg of padding": jpeg + b"\xff" * 5_000_000,
        "jpeg of stray bytes": jpeg + b"\xff\xe0\0\2" + b"\0" * 5_000_000,
        "jpeg of empty segments": jpeg + b"\xff\xe0\0\2" * 1_000_000,
        "png of empty chunks": seed_file("PNG")[:33] + struct.pack(">I4sI", 0, b"abCd", zlib.crc32(b"abCd")) * 300_000,
        "jp2 of empty boxes": seed_file("JPEG2000")[:32] + b"\0\0\0\x08free" * 500_000,
        "ppm of comments": b"P6\n" + b"#\n" * 2_000_000,
        "ppm of one comment": b"P6\n#" + b"x" * 4_000_000,
        "bmp with a large palette": b"BM" + struct.pack("<3I3I2H6I", 9, 0, 54, 40, 5, 5, 1, 8, 0, 0, 0, 0, 65_536, 0),
    }


@pytest.mark.parametrize("name", sorted(hostile()))
@pytest.mark.timeout(60)
def test_hostile_repetition_is_bounded_in_time_memory_and_bytes_fetched(name: str) -> None:
    data = hostile()[name]
    reader = Ranges(data)
    tracemalloc.start()
    try:
        found = outcome(reader)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert acceptable(found)
    assert reader.fetched <= 4 * LIMITS.max_header_bytes + 2 * len(data) * (len(data) < LIMITS.max_header_bytes)
    assert peak_bytes < 40 << 20
    assert acceptable(outcome(data))
