"""Video probing: size after rotation, frame counts and how they are known."""

import csv
import io
import struct
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest

from dataloaders.errors import MediaError, Reason
from dataloaders.probe import ProbeLimits, probe_video


def clip(
    num_frames: int = 10,
    *,
    width_px: int = 64,
    height_px: int = 48,
    fps: int = 10,
    container: str = "mp4",
    codec: str = "mpeg4",
    options: dict[str, str] | None = None,
    path: Path | None = None,
) -> bytes:
    out = io.BytesIO()
    with av.open(path or out, "w", format=container, options=options or {}) as file:
        stream = file.add_stream(codec, rate=fps)
        stream.width, stream.height, stream.pix_fmt = width_px, height_px, "yuv420p"
        stream.time_base = Fraction(1, fps)
        for index in range(num_frames):
            picture = np.full((height_px, width_px, 3), 20 * index % 256, dtype=np.uint8)
            for packet in stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")):
                file.mux(packet)
        for packet in stream.encode(None):
            file.mux(packet)
    return path.read_bytes() if path else out.getvalue()


def turned(data: bytes, degrees: int) -> bytes:
    """The clip with a display matrix of `degrees` (counterclockwise positive) in its track header."""
    a, b, c, d = {0: (1, 0, 0, 1), 90: (0, -1, 1, 0), -90: (0, 1, -1, 0), 180: (-1, 0, 0, -1)}[degrees]
    matrix = struct.pack(">9i", a << 16, b << 16, 0, c << 16, d << 16, 0, 0, 0, 1 << 30)
    at = data.index(b"tkhd") + 4 + 40
    return data[:at] + matrix + data[at + 36 :]


def reason_of(data: bytes, **options: object) -> Reason:
    with pytest.raises(MediaError) as caught:
        probe_video(data, place="shard s.tar, key 3", **options)
    assert "at shard s.tar, key 3" in str(caught.value)
    return caught.value.reason


def test_header_gives_size_count_rate_and_duration(tmp_path: Path) -> None:
    path = tmp_path / "clip"
    path.write_bytes(clip(25, fps=5))
    meta = probe_video(path)
    assert (meta.width_px, meta.height_px, meta.num_frames, meta.fps) == (64, 48, 25, 5.0)
    assert meta.duration_s == pytest.approx(5.0)
    assert (meta.codec, meta.rotation, meta.confidence) == ("mpeg4", 0, "header")
    assert probe_video(path.read_bytes()) == meta


@pytest.mark.parametrize(
    ("container", "codec"), [("avi", "mpeg4"), ("matroska", "mpeg4"), ("mpegts", "mpeg2video"), ("flv", "flv1")]
)
def test_other_containers_have_exact_counts_too(container: str, codec: str) -> None:
    data = clip(33, container=container, codec=codec, fps=25, width_px=80)
    meta = probe_video(data)
    assert (meta.width_px, meta.height_px, meta.num_frames, meta.fps) == (80, 48, 33, 25.0)
    assert meta.confidence == ("header" if container == "avi" else "counted")


def test_vd02_missing_count_is_counted_or_estimated_and_flagged() -> None:
    data = clip(37, container="matroska", fps=25)
    exact = probe_video(data)
    assert (exact.num_frames, exact.confidence) == (37, "counted")
    rough = probe_video(data, count_packets=False)
    assert rough.confidence == "estimated"
    assert abs(rough.num_frames - exact.num_frames) <= 1


@pytest.mark.parametrize(("degrees", "swapped"), [(0, False), (90, True), (-90, True), (180, False)])
def test_vd04_rotation_swaps_the_sides(degrees: int, swapped: bool) -> None:
    meta = probe_video(turned(clip(), degrees))
    assert (meta.width_px, meta.height_px) == ((48, 64) if swapped else (64, 48))
    assert abs(meta.rotation) == abs(degrees)


def test_fragmented_mp4_is_counted() -> None:
    meta = probe_video(clip(20, options={"movflags": "frag_keyframe+empty_moov"}))
    assert (meta.num_frames, meta.confidence) == (20, "counted")


def test_file_cut_behind_its_index_counts_only_what_is_there(tmp_path: Path) -> None:
    data = clip(20, options={"movflags": "faststart"}, path=tmp_path / "clip.mp4")
    whole = probe_video(data)
    cut = probe_video(data[: len(data) - 200])
    assert (whole.num_frames, whole.confidence) == (20, "header")
    assert 0 < cut.num_frames < 20
    assert cut.confidence == "counted"


def test_file_cut_before_its_index_is_truncated() -> None:
    assert reason_of(clip(20)[:300]) is Reason.TRUNCATED


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", Reason.EMPTY_FILE),
        (b"<html>404</html>" * 10, Reason.UNKNOWN_FORMAT),
        (b"\x89PNG\r\n\x1a\n" + bytes(64), Reason.UNKNOWN_FORMAT),
        (bytes(4096), Reason.UNKNOWN_FORMAT),
    ],
)
def test_what_is_no_video_has_a_reason(data: bytes, reason: Reason) -> None:
    assert reason_of(data) is reason


def test_sound_alone_is_no_video() -> None:
    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as file:
        stream = file.add_stream("aac", rate=16_000)
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), dtype=np.float32), format="fltp", layout="mono")
        frame.sample_rate = 16_000
        for packet in [*stream.encode(frame), *stream.encode(None)]:
            file.mux(packet)
    assert reason_of(out.getvalue()) is Reason.NO_VIDEO_STREAM


def test_playlists_are_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "secret.ts"
    target.write_bytes(clip(container="mpegts", codec="mpeg2video"))
    playlist = f"#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:10,\n{target}\n#EXT-X-ENDLIST\n"
    assert probe_video(target).num_frames == 10
    assert reason_of(playlist.encode()) is Reason.UNKNOWN_FORMAT
    assert reason_of(f"ffconcat version 1.0\nfile {target}\n".encode()) is Reason.UNKNOWN_FORMAT


def test_ceilings_are_checked_against_the_header() -> None:
    assert reason_of(clip(), limits=ProbeLimits(max_frame_pixels=64 * 47)) is Reason.TOO_LARGE
    assert reason_of(clip(), limits=ProbeLimits(max_frames=9)) is Reason.TOO_LARGE
    assert reason_of(clip(container="matroska"), limits=ProbeLimits(max_frames=9)) is Reason.TOO_LARGE
    assert reason_of(clip(), limits=ProbeLimits(max_bytes=100)) is Reason.TOO_LARGE
    assert probe_video(clip(), limits=ProbeLimits(max_frames=10, max_frame_pixels=64 * 48)).num_frames == 10


def test_counting_stops_at_the_time_limit() -> None:
    data = clip(1100, container="matroska", width_px=16, height_px=16)
    assert reason_of(data, limits=ProbeLimits(max_probe_s=1e-9)) is Reason.TIMEOUT


def test_byte_reader_serves_the_header_and_failing_storage_stays_an_os_error() -> None:
    data = clip(15)

    class Ranges:
        size = len(data)

        def read(self, offset: int, size: int) -> bytes:
            return data[offset : offset + size]

    class BrokenDisk(Ranges):
        def read(self, offset: int, size: int) -> bytes:
            if offset + size > len(data) // 2:
                raise OSError(5, "Input/output error")
            return super().read(offset, size)

    assert probe_video(Ranges()) == probe_video(data)
    with pytest.raises(OSError, match="Input/output error"):
        probe_video(BrokenDisk())


def test_mutated_files_give_a_size_or_a_reason_and_nothing_else() -> None:
    rng = np.random.default_rng(11)
    refused = 0
    for original in (clip(6), clip(6, container="matroska"), clip(6, container="avi")):
        for _ in range(60):
            data = bytearray(original)
            for position in rng.integers(0, len(data), size=int(rng.integers(1, 12))):
                data[position] = int(rng.integers(0, 256))
            try:
                meta = probe_video(bytes(data))
            except MediaError:
                refused += 1
            else:
                assert min(meta.width_px, meta.height_px, meta.num_frames) >= 1
                assert meta.fps > 0
    assert 0 < refused < 180


def test_nested_or_endless_boxes_do_not_trap_the_header_walk() -> None:
    box = struct.pack(">I4s", 8, b"moov")
    assert reason_of(struct.pack(">I4s4sI", 16, b"ftyp", b"isom", 0) + box * 1000) is Reason.NO_VIDEO_STREAM
    tiny = struct.pack(">I4s", 3, b"moov")
    assert reason_of(struct.pack(">I4s4sI", 16, b"ftyp", b"isom", 0) + tiny * 100) is Reason.TRUNCATED


def test_every_reference_video_is_read_right_or_refused(shared_dir: Path) -> None:
    folder = shared_dir / "media"
    rows = [row for row in csv.DictReader((folder / "manifest.csv").read_text().splitlines()) if row["kind"] == "video"]
    assert len(rows) >= 35
    # Some packets of these do not decode: their header count is an upper bound that decoding conforms to.
    above = {"v_dec_corrupted.mp4": 1, "v_g_corrupt_mid.mp4": 2}
    for row in rows:
        path = folder / row["path"]
        if row["expect"] == "header_error":
            with pytest.raises(MediaError):
                probe_video(path)
            continue
        meta = probe_video(path)
        assert (meta.width_px, meta.height_px) == (int(row["disp_w"]), int(row["disp_h"])), path.name
        assert meta.rotation == int(row["rotation"] or 0), path.name
        assert meta.num_frames == int(row["n_frames"]) + above.get(path.name, 0), path.name
        assert meta.fps == pytest.approx(float(Fraction(row["avg_fps"]))), path.name
        assert meta.codec == row["codec"], path.name
