"""Video probing: size as decoded, frame counts and how they are known, in every container; limits, deadlines, leaks."""

import csv
import gc
import io
import os
import struct
import time
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest

from dataloaders.errors import MediaError, Reason
from dataloaders.probe import ProbeLimits, VideoMeta, probe_video
from dataloaders.probe.video import open_video


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
    pix_fmt: str = "yuv420p",
    pts: Sequence[int] | None = None,
    rotation: int | None = None,
    noise: bool = False,
    gop: int = 12,
) -> bytes:
    if codec not in av.codecs_available:
        pytest.skip(f"this FFmpeg has no encoder {codec}")
    out = io.BytesIO()
    with av.open(path or out, "w", format=container, options=options or {}) as file:
        stream = file.add_stream(codec, rate=fps)
        stream.width, stream.height, stream.pix_fmt = width_px, height_px, pix_fmt
        stream.time_base = stream.codec_context.time_base = Fraction(1, fps)
        stream.gop_size = gop
        if rotation is not None:
            stream.set_display_rotation(rotation)
        base = np.random.default_rng(1).integers(0, 256, (height_px, width_px, 3), dtype=np.uint8)
        for index in range(num_frames):
            flat = np.full((height_px, width_px, 3), 20 * index % 256, dtype=np.uint8)
            frame = av.VideoFrame.from_ndarray(np.roll(base, index, axis=1) if noise else flat, format="rgb24")
            if pts:
                frame.pts, frame.time_base = pts[index], Fraction(1, fps)
            for packet in stream.encode(frame):
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


def reason_of(data: object, **options: object) -> Reason:
    with pytest.raises(MediaError) as caught:
        probe_video(data, place="shard s.tar, key 3", **options)
    assert "at shard s.tar, key 3" in str(caught.value)
    return caught.value.reason


def decoded(data: bytes) -> tuple[set[tuple[int, int]], int]:
    """({(width, height) as shown}, number) of the frames that our decoder's own way of opening delivers."""
    sizes, count = set(), 0
    with open_video(io.BytesIO(data), len(data), place="") as (container, stream):
        for packet in container.demux(stream):
            try:
                frames = stream.decode(packet)
            except av.error.InvalidDataError:
                continue
            for frame in frames:
                count += 1
                sideways = round(frame.rotation / 90) % 2
                sizes.add((frame.height, frame.width) if sideways else (frame.width, frame.height))
    return sizes, count


def assert_as_decoded(data: bytes) -> VideoMeta:
    meta = probe_video(data)
    assert decoded(data) == ({(meta.width_px, meta.height_px)}, meta.num_frames)
    return meta


def test_header_gives_size_count_rate_and_duration(tmp_path: Path) -> None:
    path = tmp_path / "clip"
    path.write_bytes(clip(25, fps=5))
    meta = probe_video(path)
    assert (meta.width_px, meta.height_px, meta.num_frames, meta.fps) == (64, 48, 25, 5.0)
    assert meta.duration_s == pytest.approx(5.0)
    assert (meta.codec, meta.rotation, meta.confidence) == ("mpeg4", 0, "header")
    assert (meta.sar, meta.truncated) == (1, False)
    assert probe_video(path.read_bytes()) == meta


@pytest.mark.parametrize(
    ("container", "codec", "pix_fmt", "confidence"),
    [
        ("mp4", "libx264", "yuv420p", "header"),
        ("mp4", "libvpx-vp9", "yuv420p", "header"),
        ("mov", "mjpeg", "yuvj420p", "header"),
        ("mov", "prores", "yuv422p10le", "header"),
        ("3gp", "mpeg4", "yuv420p", "header"),
        ("avi", "mpeg4", "yuv420p", "header"),
        ("avi", "mjpeg", "yuvj420p", "header"),
        ("gif", "gif", "rgb8", "header"),
        ("matroska", "mpeg4", "yuv420p", "counted"),
        ("matroska", "libx264", "yuv420p", "counted"),
        ("webm", "libvpx", "yuv420p", "counted"),
        ("webm", "libvpx-vp9", "yuv420p", "counted"),
        ("mpegts", "mpeg2video", "yuv420p", "counted"),
        ("mpegts", "libx264", "yuv420p", "counted"),
        ("mpeg", "mpeg2video", "yuv420p", "counted"),
        ("flv", "libx264", "yuv420p", "counted"),
        ("asf", "wmv2", "yuv420p", "counted"),
        ("ogg", "libvpx", "yuv420p", "counted"),
        ("ivf", "libvpx", "yuv420p", "counted"),
        ("h264", "libx264", "yuv420p", "counted"),
    ],
)
def test_every_container_gives_what_decoding_gives(container: str, codec: str, pix_fmt: str, confidence: str) -> None:
    data = clip(33, container=container, codec=codec, fps=25, width_px=80, pix_fmt=pix_fmt, noise=True)
    meta = assert_as_decoded(data)
    assert (meta.width_px, meta.height_px, meta.num_frames, meta.fps) == (80, 48, 33, 25.0)
    assert meta.duration_s == pytest.approx(33 / 25, abs=0.002)
    assert meta.confidence == confidence


@pytest.mark.parametrize("num_frames", [1, 2, 3])
@pytest.mark.parametrize("container", ["mp4", "matroska", "avi", "mpegts"])
def test_short_clips_count_right(container: str, num_frames: int) -> None:
    codec = "mpeg2video" if container == "mpegts" else "mpeg4"
    # FFmpeg takes nothing below ten packets of 188 bytes for a transport stream.
    meta = assert_as_decoded(clip(num_frames, container=container, codec=codec, fps=25, noise=True, width_px=160))
    assert meta.num_frames == num_frames
    if num_frames > 1:  # one picture of MPEG-2 alone tells FFmpeg the rate of fields
        assert meta.fps == 25.0


def test_vd02_missing_count_is_counted_or_estimated_and_flagged() -> None:
    data = clip(37, container="matroska", fps=25)
    exact = probe_video(data)
    assert (exact.num_frames, exact.confidence) == (37, "counted")
    rough = probe_video(data, count_packets=False)
    assert rough.confidence == "estimated"
    assert abs(rough.num_frames - exact.num_frames) <= 1


def test_variable_rate_in_matroska_is_counted_and_averaged() -> None:
    data = clip(10, container="matroska", pts=[0, 1, 2, 3, 4, 5, 26, 37, 48, 63])
    meta = assert_as_decoded(data)
    assert (meta.num_frames, meta.confidence) == (10, "counted")
    assert meta.duration_s == pytest.approx(6.4, abs=0.01)
    assert meta.fps == pytest.approx(10 / 6.4, rel=0.01)
    assert probe_video(data, count_packets=False).num_frames > 30  # the header's rate is that of the first frames


def test_avi_that_leaves_frames_out_counts_those_that_are_there() -> None:
    meta = assert_as_decoded(clip(10, container="avi", pts=[0, 1, 2, 5, 6, 7, 10, 11, 12, 13]))
    assert (meta.num_frames, meta.confidence) == (10, "header")
    assert meta.fps == pytest.approx(10 / 1.4)
    assert meta.duration_s == pytest.approx(1.4)


def test_gif_of_uneven_delays_gives_the_average() -> None:
    data = clip(10, container="gif", codec="gif", pix_fmt="rgb8", pts=[0, 1, 2, 3, 4, 5, 26, 37, 48, 63], noise=True)
    meta = assert_as_decoded(data)
    assert meta.num_frames == 10
    assert meta.fps == pytest.approx(10 / meta.duration_s)


@pytest.mark.parametrize("codec", ["libx264", "mpeg2video"])
def test_recording_cut_out_of_a_broadcast_starts_at_its_first_key_frame(codec: str) -> None:
    data = clip(60, container="mpegts", codec=codec, fps=25, noise=True, gop=20)
    cut = data[len(data) // 8 // 188 * 188 :]
    meta = assert_as_decoded(cut)
    assert meta.num_frames == 40
    assert meta.duration_s == pytest.approx(40 / 25, abs=0.1)


def test_recordings_put_one_behind_the_other_count_together() -> None:
    data = clip(30, container="mpegts", codec="mpeg2video", fps=25)
    meta = probe_video(data + data)
    assert (meta.num_frames, meta.fps) == (60, 25.0)
    assert meta.duration_s == pytest.approx(60 / 25)


def test_vp8_frames_that_are_never_shown_do_not_count() -> None:
    data = bytearray(clip(20, container="webm", codec="libvpx", noise=True))
    with av.open(io.BytesIO(data)) as file:
        packets = [bytes(packet) for packet in file.demux(file.streams.video[0]) if packet.size]
    at = data.index(packets[7])
    data[at] &= ~0x10
    meta = assert_as_decoded(bytes(data))
    assert meta.num_frames == 19


@pytest.mark.parametrize(("degrees", "swapped"), [(0, False), (90, True), (-90, True), (180, False)])
def test_vd04_rotation_swaps_the_sides(degrees: int, swapped: bool) -> None:
    meta = assert_as_decoded(turned(clip(), degrees))
    assert (meta.width_px, meta.height_px) == ((48, 64) if swapped else (64, 48))
    assert abs(meta.rotation) == abs(degrees)


@pytest.mark.parametrize("rotation", [0, 90, -90, 180])
def test_vd04_rotation_in_matroska_is_found(rotation: int) -> None:
    data = clip(container="matroska", rotation=rotation)
    meta = assert_as_decoded(data)
    assert abs(meta.rotation) == abs(rotation)
    assert meta.num_frames == 10
    assert probe_video(data, count_packets=False).width_px == meta.width_px


def test_fragmented_mp4_is_counted() -> None:
    meta = probe_video(clip(20, options={"movflags": "frag_keyframe+empty_moov"}))
    assert (meta.num_frames, meta.confidence) == (20, "counted")


def test_file_cut_behind_its_index_counts_only_what_is_there(tmp_path: Path) -> None:
    data = clip(20, options={"movflags": "faststart"}, path=tmp_path / "clip.mp4")
    whole = probe_video(data)
    cut = probe_video(data[: len(data) - 200])
    assert (whole.num_frames, whole.confidence, whole.truncated) == (20, "header", False)
    assert 0 < cut.num_frames < 20
    assert (cut.confidence, cut.truncated) == ("counted", True)


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


def test_lists_of_other_files_are_not_followed(tmp_path: Path) -> None:
    target = tmp_path / "secret.ts"
    target.write_bytes(clip(container="mpegts", codec="mpeg2video"))
    assert probe_video(target).num_frames == 10
    dash = f'<?xml version="1.0"?><MPD xmlns="urn:mpeg:dash:schema:mpd:2011"><BaseURL>file://{target}</BaseURL></MPD>'
    lists = {
        "list.m3u8": f"#EXTM3U\n#EXT-X-TARGETDURATION:10\n#EXTINF:10,\n{target}\n#EXT-X-ENDLIST\n",
        "web.m3u8": "#EXTM3U\n#EXTINF:10,\nhttp://127.0.0.1:9/x.ts\n",
        "list.ffconcat": f"ffconcat version 1.0\nfile {target}\n",
        "list.mpd": dash,
        "list.sdp": "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=x\nc=IN IP4 127.0.0.1\nt=0 0\nm=video 5004 RTP/AVP 96\n",
        "frames%03d.png": "not an image",
    }
    for name, text in lists.items():
        assert reason_of(text.encode()) is Reason.UNKNOWN_FORMAT, name
        (tmp_path / name).write_text(text)
        assert reason_of(tmp_path / name) is Reason.UNKNOWN_FORMAT, name


def test_paths_are_files_and_never_addresses() -> None:
    for address in ("http://127.0.0.1:9/a.mp4", "concat:a.ts|b.ts", "pipe:0", "file:/etc/passwd", "lavfi:testsrc"):
        with pytest.raises(FileNotFoundError):
            probe_video(address)


def test_ceilings_are_checked_against_the_header() -> None:
    for container in ("mp4", "matroska", "avi"):
        data = clip(container=container)
        assert reason_of(data, limits=ProbeLimits(max_frame_pixels=64 * 47)) is Reason.TOO_LARGE, container
        assert reason_of(data, limits=ProbeLimits(max_frames=9)) is Reason.TOO_LARGE, container
        assert reason_of(data, limits=ProbeLimits(max_bytes=100)) is Reason.TOO_LARGE, container
        exact = ProbeLimits(max_frames=10, max_frame_pixels=64 * 48)
        assert probe_video(data, limits=exact).num_frames == 10, container


def test_huge_canvas_is_not_allocated() -> None:
    data = bytearray(clip(container="gif", codec="gif", pix_fmt="rgb8"))
    struct.pack_into("<HH", data, 6, 65_535, 65_535)
    with pytest.raises(MediaError, match="max_frame_pixels"):
        probe_video(bytes(data))


def test_counting_stops_at_the_time_limit() -> None:
    data = clip(1100, container="matroska", width_px=16, height_px=16)
    assert reason_of(data, limits=ProbeLimits(max_probe_s=1e-9)) is Reason.TIMEOUT


class Ranges:
    """A `ByteReader` over bytes."""

    def __init__(self, data: bytes) -> None:
        self.data, self.size = data, len(data)

    def read(self, offset: int, size: int) -> bytes:
        return self.data[offset : offset + size]


def test_vd08_slow_storage_costs_the_time_budget_and_not_more() -> None:
    class Slow(Ranges):
        reads = 0

        def read(self, offset: int, size: int) -> bytes:
            self.reads += 1
            time.sleep(0.02)
            return super().read(offset, size)

    for container, codec in (("matroska", "libx264"), ("mpegts", "mpeg2video")):
        data = clip(40, container=container, codec=codec, fps=25, width_px=320, height_px=240, noise=True)
        slow = Slow(data)
        assert reason_of(slow, limits=ProbeLimits(max_probe_s=0.05)) is Reason.TIMEOUT
        assert slow.reads < len(data) / (16 * 1024) / 2


def test_byte_reader_serves_the_header_and_failing_storage_stays_an_os_error() -> None:
    class BrokenDisk(Ranges):
        def read(self, offset: int, size: int) -> bytes:
            if offset + size > self.size // 2:
                raise OSError(5, "Input/output error")
            return super().read(offset, size)

    for container in ("mp4", "matroska", "avi"):
        data = clip(15, container=container)
        assert probe_video(Ranges(data)) == probe_video(data)
        with pytest.raises(OSError, match="Input/output error"):
            probe_video(BrokenDisk(data))


def test_nested_or_endless_boxes_do_not_trap_the_header_walk() -> None:
    box = struct.pack(">I4s", 8, b"moov")
    assert reason_of(struct.pack(">I4s4sI", 16, b"ftyp", b"isom", 0) + box * 1000) is Reason.NO_VIDEO_STREAM
    tiny = struct.pack(">I4s", 3, b"moov")
    assert reason_of(struct.pack(">I4s4sI", 16, b"ftyp", b"isom", 0) + tiny * 100) is Reason.TRUNCATED


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_vd05_opening_many_files_keeps_memory_and_files_level(tmp_path: Path) -> None:
    files = {
        "clip.mp4": clip(10),
        "fragments.mp4": clip(10, options={"movflags": "frag_keyframe+empty_moov"}),
        "turned.mkv": clip(10, container="matroska", rotation=90),
        "clip.avi": clip(10, container="avi"),
        "cut.mp4": clip(10)[:300],
    }
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)

    def probe_all(rounds: int) -> None:
        for _ in range(rounds):
            for name in files:
                try:
                    probe_video(tmp_path / name)
                except MediaError:
                    continue

    probe_all(20)
    gc.collect()
    memory, handles = resident_bytes(), len(os.listdir("/proc/self/fd"))
    probe_all(100)
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == handles
    assert resident_bytes() - memory < 50 * 500 / 2000 * 1024**2  # 50 MB in 2,000 openings


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
        assert meta.sar == Fraction((row["sar"] or "1:1").replace(":", "/")), path.name
        if row["expect"] == "ok":
            # Containers without a duration of the video itself: that of the whole, or what the frames span.
            duration_s = float(row["v_duration"] or row["duration"] or meta.num_frames / meta.fps)
            assert meta.duration_s == pytest.approx(duration_s, abs=1e-4), path.name
            if meta.num_frames < 200 and path.name != "v_g_edit.mp4":
                assert decoded(path.read_bytes()) == ({(meta.width_px, meta.height_px)}, meta.num_frames), path.name
        assert meta.truncated == (path.name == "v_g_trunc_faststart.mp4")
