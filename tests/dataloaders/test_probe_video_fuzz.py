"""Mutated videos: a size or a reason, within bounded time and memory, and never anything else.

The default is a few seconds; `MLLM_FUZZ_SECONDS` lengthens it. Each run is seeded, so that a failure repeats: its
message has the seed, the container and the number of the mutation, and `mutated` makes the file again. The work runs in
a process of its own with a ceiling on its memory, so that a file that exhausts it, or that crashes FFmpeg, fails the
test and not the run.
"""

import io
import os
import resource
import struct
import subprocess
import sys
import time
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest

from dataloaders.errors import MediaError
from dataloaders.probe import ProbeLimits, probe_video
from dataloaders.probe.mp4_boxes import is_mp4
from dataloaders.probe.mp4_index import read_index
from dataloaders.probe.video import _from_ffmpeg

SECONDS = float(os.environ.get("MLLM_FUZZ_SECONDS", "10"))
MEMORY_BYTES = 2 * 1024**3
SLOW_S = 5.0
LIMITS = ProbeLimits(max_probe_s=4.0, max_frames=100_000)
KINDS = (
    ("mp4", "mpeg4", {}),
    ("mp4", "libx264", {}),
    ("mp4", "libx265", {}),
    ("mp4", "libx264", {"movflags": "frag_keyframe+empty_moov"}),
    ("mov", "mjpeg", {}),
    ("3gp", "mpeg4", {}),
    ("matroska", "libx264", {}),
    ("webm", "libvpx", {}),
    ("avi", "mpeg4", {}),
    ("mpegts", "mpeg2video", {}),
    ("mpegts", "libx264", {}),
    ("mpeg", "mpeg2video", {}),
    ("flv", "libx264", {}),
    ("asf", "wmv2", {}),
    ("ogg", "libvpx", {}),
    ("gif", "gif", {}),
)
HUGE = (0, 1, 7, 8, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 0x0FFFFFFF, 0x00FFFFFF, 0xFFFF)
TABLES = tuple(
    b"stsz stts ctts stsc stco stss elst stsd trun tkhd mdhd mvhd hdlr dref avcC hvcC esds tfhd trex sidx".split()
)


def clip(container: str, codec: str, options: dict[str, str]) -> bytes:
    out = io.BytesIO()
    pix_fmt = {"mjpeg": "yuvj420p", "gif": "rgb8"}.get(codec, "yuv420p")
    with av.open(out, "w", format=container, options=options) as file:
        quiet = {"x265-params": "log-level=none"} if codec == "libx265" else {}
        stream = file.add_stream(codec, rate=25, options=quiet)
        stream.width, stream.height, stream.pix_fmt = 64, 48, pix_fmt
        stream.codec_context.time_base, stream.codec_context.gop_size = Fraction(1, 25), 4
        noise = np.random.default_rng(2).integers(0, 256, (48, 64, 3), dtype=np.uint8)
        for index in range(12):
            file.mux(stream.encode(av.VideoFrame.from_ndarray(np.roll(noise, index, axis=0), format="rgb24")))
        file.mux(stream.encode(None))
    return out.getvalue()


def spots(data: bytes) -> list[int]:
    """Where the tables of an MP4 file start (at their type)."""
    found = []
    for kind in TABLES:
        at = data.find(kind)
        while at >= 0:
            found.append(at)
            at = data.find(kind, at + 4)
    return found


def mutated(data: bytes, rng: np.random.Generator) -> bytes:
    """One to three mutations: bits, bytes, runs, cuts, doublings, lengths and counts of boxes, whole boxes doubled."""
    out, tables = bytearray(data), spots(data)
    for _ in range(int(rng.integers(1, 4))):
        what, at = int(rng.integers(0, 10)), int(rng.integers(0, max(len(out), 1)))
        head = int(rng.integers(0, min(len(out), 600) or 1))
        table = tables[int(rng.integers(0, len(tables)))] if tables else head
        if what == 0 and out:
            out[at] ^= 1 << int(rng.integers(0, 8))
        elif what == 1:
            for _ in range(20):
                out[int(rng.integers(0, max(len(out), 1))) % max(len(out), 1)] = int(rng.integers(0, 256))
        elif what == 2:
            del out[at:]
        elif what == 3:
            span = bytes(out[at : at + int(rng.integers(1, 2000))])
            out[at:at] = span * int(rng.integers(1, 4))
        elif what == 4:
            del out[at : at + int(rng.integers(1, 200))]
        elif what == 5 and len(out) >= head + 4:
            struct.pack_into(">I", out, head, HUGE[int(rng.integers(0, len(HUGE)))])
        elif what == 6 and len(out) >= table + 4 >= 8:  # the length of a box
            struct.pack_into(">I", out, table - 4, HUGE[int(rng.integers(0, len(HUGE)))])
        elif what in (7, 8):  # a field of a table: a count, a size, a time
            field = table + 4 + 4 * int(rng.integers(0, 8))
            if len(out) >= field + 4:
                struct.pack_into(">I", out, field, HUGE[int(rng.integers(0, len(HUGE)))])
        elif what == 9 and len(out) >= table + 4 >= 8:  # a box twice
            length = int.from_bytes(out[table - 4 : table], "big")
            out[table - 4 : table - 4] = out[table - 4 : table - 4 + length % 4096]
        if not out:
            return b""
    return bytes(out)


def run(seconds: float, seed: int) -> tuple[int, int]:
    """Probe mutations for a while; (number probed, number refused).

    Raises:
        AssertionError: a result out of bounds, another error than `MediaError`, or a probe that took too long.
    """
    originals = [(kind, clip(*kind)) for kind in KINDS if kind[1] in av.codecs_available]
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    end, number, refused = time.monotonic() + seconds, 0, 0
    while time.monotonic() < end or number < 2 * len(originals):
        kind, original = originals[number % len(originals)]
        data = mutated(original, np.random.default_rng((seed, number)))
        name, begin = f"seed {seed}, mutation {number} of {kind}", time.monotonic()
        try:
            meta = probe_video(data, limits=LIMITS, count_packets=number % 7 != 0)
        except MediaError:
            refused += 1
        except BaseException as error:
            raise AssertionError(f"{name}: {type(error).__name__}: {error}") from error
        else:
            assert min(meta.width_px, meta.height_px, meta.num_frames) >= 1, name
            assert max(meta.width_px, meta.height_px) <= LIMITS.max_side_px, name
            assert meta.width_px * meta.height_px <= LIMITS.max_frame_pixels, name
            assert meta.num_frames <= LIMITS.max_frames, name
            assert 0 < meta.fps < float("inf"), name
            assert 0 < meta.duration_s < float("inf"), name
        assert time.monotonic() - begin < SLOW_S, name
        assert_both_ways_agree(data, name)
        number += 1
    return number, refused


def assert_both_ways_agree(data: bytes, name: str) -> None:
    """What the fast reader says of a damaged file, FFmpeg says, too, unless other damage makes it refuse the file."""
    track = read_index(io.BytesIO(data), len(data)) if is_mp4(data[:8]) else None
    if track is None:
        return
    try:
        meta = _from_ffmpeg(io.BytesIO(data), len(data), limits=LIMITS, count_packets=True, place="")
    except MediaError:
        return
    size_px = (meta.height_px, meta.width_px) if abs(meta.rotation) == 90 else (meta.width_px, meta.height_px)
    theirs = (*size_px, meta.num_frames, meta.fps, meta.duration_s, meta.rotation, meta.codec)
    assert track[:-1] == theirs, f"{name}: {track} differs from {meta}"


@pytest.mark.timeout(max(120.0, 4 * SECONDS))
def test_mutated_videos_give_a_size_or_a_reason() -> None:
    code = (
        "import runpy, sys; fuzz = runpy.run_path(sys.argv[1]);"
        "sys.stdout.write('%d %d' % fuzz['run'](float(sys.argv[2]), int(sys.argv[3])))"
    )
    command = [sys.executable, "-c", code, __file__, str(SECONDS), "20"]
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment, timeout=60 + 3 * SECONDS
    )
    assert done.returncode == 0, done.stderr[-2000:]
    number, refused = map(int, done.stdout.split()[-2:])
    assert number >= 2 * len(KINDS) // 2
    assert 0 < refused < number


def test_mutations_are_repeatable_and_differ() -> None:
    data = clip("mp4", "mpeg4", {})
    same = [mutated(data, np.random.default_rng((1, number))) for number in range(30)]
    assert same == [mutated(data, np.random.default_rng((1, number))) for number in range(30)]
    assert len(set(same)) > 25
