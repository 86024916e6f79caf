"""Fixtures for all tests: the shared reference folder, small media made on the spot, and tar shards of them."""

import io
import json
import os
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import av
import numpy as np
import pytest
from PIL import Image

Member = tuple[str, bytes]


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The reference folder next to the repository; tests that need it are skipped where it is absent."""
    folder = Path(__file__).resolve().parents[2] / "shared"
    if not folder.is_dir():
        pytest.skip("no shared reference folder next to the repository")
    return folder


@pytest.fixture(scope="session")
def image_bytes() -> Callable[..., bytes]:
    """`image_bytes(width_px, height_px, seed=0, format="PNG")`: an encoded picture of smooth noise."""

    def make(width_px: int, height_px: int, *, seed: int = 0, format: str = "PNG") -> bytes:
        rng = np.random.Generator(np.random.Philox(seed))
        coarse = Image.fromarray(rng.integers(0, 256, size=(4, 4, 3), dtype=np.uint8))
        buffer = io.BytesIO()
        coarse.resize((width_px, height_px), Image.Resampling.BICUBIC).save(buffer, format)
        return buffer.getvalue()

    return make


@pytest.fixture(scope="session")
def video_bytes() -> Callable[..., bytes]:
    """`video_bytes(width_px, height_px, num_frames, fps=8, format="mp4")`: a clip that grows brighter."""

    def make(width_px: int, height_px: int, num_frames: int, *, fps: int = 8, format: str = "mp4") -> bytes:
        buffer = io.BytesIO()
        with av.open(buffer, "w", format=format) as container:
            stream = container.add_stream("mpeg4", rate=fps)
            stream.width, stream.height, stream.pix_fmt = width_px, height_px, "yuv420p"
            for number in range(num_frames):
                grey = np.full((height_px, width_px, 3), 255 * number // max(num_frames - 1, 1), dtype=np.uint8)
                container.mux(stream.encode(av.VideoFrame.from_ndarray(grey, format="rgb24")))
            container.mux(stream.encode(None))
        return buffer.getvalue()

    return make


@pytest.fixture(scope="session")
def write_shard() -> Callable[..., Path]:
    """`write_shard(path, [(name, data), ...], format=tarfile.PAX_FORMAT)`: a tar with these members in this order."""

    def write(path: Path, members: Sequence[Member], *, format: int = tarfile.PAX_FORMAT) -> Path:
        with tarfile.open(path, "w", format=format) as tar:
            for name, data in members:
                info = tarfile.TarInfo(name)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
        return path

    return write


@pytest.fixture(scope="session")
def chat_json() -> Callable[..., bytes]:
    """`chat_json(question, answer, **extra)`: a key.json of one exchange."""

    def make(question: str, answer: str, **extra: object) -> bytes:
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        return json.dumps({"messages": messages, **extra}).encode()

    return make


@pytest.fixture(scope="session")
def small_shard(
    tmp_path_factory: pytest.TempPathFactory,
    image_bytes: Callable[..., bytes],
    video_bytes: Callable[..., bytes],
    write_shard: Callable[..., Path],
    chat_json: Callable[..., bytes],
) -> Path:
    """Six samples: text only, one image, three images, one video, another image, image and video interleaved."""
    members: list[Member] = [
        ("000.json", chat_json("1 plus 1?", "2.", facts=["2"])),
        ("001.json", chat_json("<image>What?", "A red one.", facts=["red"])),
        ("001.png", image_bytes(120, 80, seed=1)),
        ("002.json", chat_json("<image><image> and <image>?", "Three.")),
        *((f"002.{j}.jpg", image_bytes(60 + 40 * j, 90, seed=2 + j, format="JPEG")) for j in range(3)),
        ("003.json", chat_json("<video>Where?", "Up.")),
        ("003.mp4", video_bytes(96, 64, 16)),
        ("004.json", chat_json("<image>Which?", "That one, of course.")),
        ("004.jpg", image_bytes(200, 150, seed=7, format="JPEG")),
        ("005.json", chat_json("<video> or <image>?", "Both.")),
        ("005.0.png", image_bytes(64, 64, seed=8)),
        ("005.1.mp4", video_bytes(64, 96, 10)),
    ]
    return write_shard(tmp_path_factory.mktemp("shards") / "small.tar", members)
