"""Tar shards of pictures for reading over a network: every sample a JPEG and a JSON record, a function of the seed.

    remote-000.tar ...   000007.jpg (60 to 150 kB by default) and 000007.json (a question, an answer)

Pictures are soft fields of colour under grain, in the sizes of photographs; what they show does not matter, how many
bytes they have and how long they take to decode does. Price: a corpus repeats `num_pictures` distinct ones.
"""

import io
import json
import tarfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from tools.benchmarks.media_corpus import add_member

SIZES_PX = ((640, 480), (480, 640), (800, 600), (600, 600), (768, 512))  # width, height
_NOUNS = ("harbour", "market", "bridge", "garden", "kitchen", "station", "valley")


def write_remote_corpus(
    folder: Path,
    *,
    num_shards: int,
    samples_per_shard: int,
    seed: int = 0,
    num_pictures: int = 200,
    sizes_px: Sequence[tuple[int, int]] = SIZES_PX,
) -> list[Path]:
    """Write the shards; returns their paths."""
    draw = np.random.default_rng(seed)
    pictures = [_picture(draw, sizes_px[i % len(sizes_px)]) for i in range(num_pictures)]
    shards = []
    for start in range(0, num_shards * samples_per_shard, samples_per_shard):
        path = folder / f"remote-{start // samples_per_shard:03d}.tar"
        with tarfile.open(path, "w") as tar:
            for number in range(start, start + samples_per_shard):
                add_member(tar, f"{number:06d}.jpg", pictures[int(draw.integers(num_pictures))])
                add_member(tar, f"{number:06d}.json", _record(draw, number))
        shards.append(path)
    return shards


def _picture(draw: np.random.Generator, size_px: tuple[int, int]) -> bytes:
    width_px, height_px = size_px
    coarse = draw.integers(0, 256, (9, 12, 3), dtype=np.uint8)
    soft = np.asarray(Image.fromarray(coarse).resize(size_px, Image.Resampling.BICUBIC), dtype=np.float32)
    # axes: height, width, channel; grain is grey, as a camera's is
    grain = draw.normal(0.0, draw.uniform(4.0, 9.0), (height_px, width_px, 1)).astype(np.float32)
    out = io.BytesIO()
    Image.fromarray(np.clip(soft + grain, 0, 255).astype(np.uint8)).save(out, "JPEG", quality=88)
    return out.getvalue()


def _record(draw: np.random.Generator, number: int) -> bytes:
    words = draw.choice(_NOUNS, size=int(draw.integers(5, 60))).tolist()
    messages = [
        {"role": "user", "content": f"<image>What does picture {number} show?"},
        {"role": "assistant", "content": f"It shows a {' and a '.join(words)}."},
    ]
    return json.dumps({"messages": messages}).encode()
