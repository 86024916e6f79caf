"""A small corpus of texts and pictures for runs that are killed and resumed: tar shards, a function of the seed.

soak-000.tar ...   00007.json (one question, one answer) and, in two samples of three, 00007.png
"""

import io
import json
import random
import tarfile
from pathlib import Path

from PIL import Image

SAMPLES_PER_SHARD = 10
_COLOURS = ("red", "green", "blue", "yellow", "white", "black")
_SIDES_PX = (56, 84, 112)


def write_soak_corpus(folder: Path, num_samples: int, *, seed: int) -> str:
    """Write the shards; returns their pattern."""
    draw = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for start in range(0, num_samples, SAMPLES_PER_SHARD):
        with tarfile.open(folder / f"soak-{start // SAMPLES_PER_SHARD:03d}.tar", "w") as tar:
            for number in range(start, min(start + SAMPLES_PER_SHARD, num_samples)):
                _add_sample(tar, number, draw)
    return str(folder / "soak-*.tar")


def _add_sample(tar: tarfile.TarFile, number: int, draw: random.Random) -> None:
    colour, repeats = draw.choice(_COLOURS), draw.randint(1, 6)
    has_picture = number % 3 != 0
    question = "<image>Which colour? " if has_picture else f"Say {colour}. "
    messages = [
        {"role": "user", "content": question * (1 if has_picture else repeats)},
        {"role": "assistant", "content": f"It is {colour}. " * repeats},
    ]
    _add(tar, f"{number:05d}.json", json.dumps({"messages": messages}).encode())
    if has_picture:
        out = io.BytesIO()
        Image.new("RGB", (draw.choice(_SIDES_PX), draw.choice(_SIDES_PX)), colour).save(out, "PNG")
        _add(tar, f"{number:05d}.png", out.getvalue())


def _add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    tar.addfile(info, io.BytesIO(content))
