"""The media that probing and indexing are measured on: tar shards of photographs and of clips, in a folder.

    images-000.tar ...   key.jpg (photograph, JPEG) + key.txt (caption)
    clips-000.tar ...    key.mp4 or key.mkv (H.264) + key.txt

Photographs are crops of those the demo corpus is drawn from, about 110 kB each. One in ten carries a thumbnail in its
EXIF data and one in thirty a large colour profile: in ImageNet, too, 10 % of the size fields lie behind the first 4 KB
and 3 % behind the first 16 KB. The corpus is a function of its seed.
"""

import io
import random
import tarfile
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from PIL import Image

from dataloaders.demo.photos import PHOTOS, load_photo

SEED = 0
SAMPLES_PER_SHARD = 200
_SIZES_PX = ((500, 375), (375, 500), (640, 480), (800, 600), (1024, 768), (333, 500))
_CLIPS = ((320, 180, 25, 50), (640, 360, 30, 90), (426, 240, 24, 240), (640, 360, 25, 25))


def write_images(folder: Path, count: int) -> list[Path]:
    """Write `count` photographs into shards of `folder`; returns the shards."""
    random_ = random.Random(SEED)
    samples = (("jpg", _photograph(random_, i)) for i in range(count))
    return _write_shards(folder, "images", list(samples))


def write_clips(folder: Path, count: int) -> list[Path]:
    """Write `count` clips into shards of `folder`; every fifth is Matroska, which stores no frame count."""
    kinds = ["mkv" if i % 5 == 4 else "mp4" for i in range(count)]
    made: dict[tuple[str, int], bytes] = {}  # encoding is slow, and headers of equal clips cost the same
    for i, kind in enumerate(kinds):
        made.setdefault((kind, i % len(_CLIPS)), _clip(kind, *_CLIPS[i % len(_CLIPS)]))
    return _write_shards(folder, "clips", [(kind, made[kind, i % len(_CLIPS)]) for i, kind in enumerate(kinds)])


def _photograph(random_: random.Random, i: int) -> bytes:
    photo = load_photo(random_.randrange(len(PHOTOS)))
    size = random_.choice(_SIZES_PX)
    left, top = (random_.randrange(max(1, have - 200)) for have in photo.size)
    crop = photo.crop((left, top, left + 200, top + 200)).resize(size, Image.Resampling.BICUBIC)
    grain = np.random.default_rng(i).normal(0, 6, (size[1], size[0], 1))  # so that files have the size of real ones
    picture = Image.fromarray(np.clip(np.asarray(crop) + grain, 0, 255).astype(np.uint8))
    extra: dict[str, bytes] = {}
    if i % 10 == 0:
        exif = Image.Exif()
        exif[0x0112] = 1 + i // 10 % 8
        exif[0x010E] = "x" * random_.randrange(5_000, 12_000)
        extra["exif"] = exif.tobytes()
    if i % 30 == 1:
        extra["icc_profile"] = bytes(random_.randrange(20_000, 60_000))
    out = io.BytesIO()
    picture.save(out, "JPEG", quality=90, **extra)
    return out.getvalue()


def _clip(kind: str, width_px: int, height_px: int, fps: int, frames: int) -> bytes:
    out = io.BytesIO()
    with av.open(out, "w", format="matroska" if kind == "mkv" else kind) as container:
        stream = container.add_stream("libx264", rate=Fraction(fps))
        stream.width, stream.height, stream.pix_fmt = width_px, height_px, "yuv420p"
        stream.options = {"preset": "ultrafast"}
        photo = np.asarray(load_photo(0).resize((width_px, height_px)))
        for i in range(frames):
            frame = av.VideoFrame.from_ndarray(np.roll(photo, 2 * i, axis=1), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return out.getvalue()


def _write_shards(folder: Path, name: str, samples: list[tuple[str, bytes]]) -> list[Path]:
    shards = []
    for start in range(0, len(samples), SAMPLES_PER_SHARD):
        path = folder / f"{name}-{start // SAMPLES_PER_SHARD:03d}.tar"
        with tarfile.open(path, "w") as tar:
            for i, (kind, data) in enumerate(samples[start : start + SAMPLES_PER_SHARD], start):
                add_member(tar, f"{i:06d}.{kind}", data)
                add_member(tar, f"{i:06d}.txt", f"a picture of the kind {i % 7}".encode())
        shards.append(path)
    return shards


def add_member(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    """Add a file to an archive."""
    info = tarfile.TarInfo(name)
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))
