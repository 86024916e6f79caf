"""The fast MP4 reader: equal to FFmpeg where it answers, silent where it is not sure; the guard before FFmpeg."""

import csv
import io
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest

from dataloaders.errors import MediaError, Reason
from dataloaders.probe import ProbeLimits, VideoMeta, probe_video
from dataloaders.probe.mp4_codecs import coded_size
from dataloaders.probe.mp4_guard import check_claims, rotation_of
from dataloaders.probe.mp4_index import Mp4Video, read_index
from dataloaders.probe.video import _from_ffmpeg

MATRICES = {0: (1, 0, 0, 1), 90: (0, -1, 1, 0), -90: (0, 1, -1, 0), -180: (-1, 0, 0, -1)}
STBL = (b"moov", b"trak", b"mdia", b"minf", b"stbl")
HOLDERS = {b"moov", b"trak", b"mdia", b"minf", b"stbl", b"edts", b"udta", b"dinf"}


def clip(
    num_frames: int = 24,
    *,
    size: tuple[int, int] = (64, 48),
    fps: int = 12,
    codec: str = "libx264",
    container: str = "mp4",
    options: dict[str, str] | None = None,
    codec_options: dict[str, str] | None = None,
    pix_fmt: str = "yuv420p",
    sar: Fraction | None = None,
    pts: Sequence[int] | None = None,
    sound: str = "",
    second: tuple[int, int] | None = None,
) -> bytes:
    """A clip of moving noise; `sound` is "before" or "behind" the video track, `second` the size of another track."""
    if codec not in av.codecs_available:
        pytest.skip(f"this FFmpeg has no encoder {codec}")
    out = io.BytesIO()
    with av.open(out, "w", format=container, options=options or {}) as file:
        tracks = [file.add_stream("aac", rate=16_000)] if sound == "before" else []
        videos = []
        for width_px, height_px in (size, *([second] if second else [])):
            stream = file.add_stream(codec, rate=fps, options=codec_options or {})
            stream.width, stream.height, stream.pix_fmt = width_px, height_px, pix_fmt
            stream.codec_context.time_base, stream.codec_context.gop_size = Fraction(1, fps), 8
            if sar:
                stream.codec_context.sample_aspect_ratio = sar
            videos.append(stream)
        tracks += [file.add_stream("aac", rate=16_000)] if sound == "behind" else []
        for track in tracks:
            for _ in range(num_frames):
                silence = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
                silence.sample_rate = 16_000
                file.mux(track.encode(silence))
            file.mux(track.encode(None))
        for number, stream in enumerate(videos):
            noise = np.random.default_rng(3).integers(0, 256, (stream.height, stream.width, 3), dtype=np.uint8)
            for index in range(num_frames * (number + 1)):
                frame = av.VideoFrame.from_ndarray(np.roll(noise, index, axis=1), format="rgb24")
                if pts:
                    frame.pts, frame.time_base = pts[index], Fraction(1, fps)
                file.mux(stream.encode(frame))
            file.mux(stream.encode(None))
    return out.getvalue()


def boxes(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """(type, whole box) of the boxes in data."""
    at = 0
    while at + 8 <= len(data):
        length, kind = struct.unpack_from(">I4s", data, at)
        yield kind, data[at : at + length]
        at += length


def box(kind: bytes, payload: bytes) -> bytes:
    return struct.pack(">I4s", len(payload) + 8, kind) + payload


def wide(kind: bytes, payload: bytes) -> bytes:
    return struct.pack(">I4sQ", 1, kind, len(payload) + 16) + payload


def rewritten(data: bytes, path: Sequence[bytes], change: Callable[[bytes], bytes]) -> bytes:
    """The file with each box at `path` replaced by `change(payload)`; lengths of what holds it are put right."""
    out = []
    for kind, whole in boxes(data):
        if kind != path[0]:
            out.append(whole)
        elif len(path) == 1:
            out.append(change(whole[8:]))
        else:
            out.append(box(kind, rewritten(whole[8:], path[1:], change)))
    return b"".join(out)


def payload(data: bytes, *path: bytes) -> bytes:
    for kind, whole in boxes(data):
        if kind == path[0]:
            return payload(whole[8:], *path[1:]) if len(path) > 1 else whole[8:]
    raise AssertionError(path)


def matrix(degrees: int) -> bytes:
    a, b, c, d = MATRICES[degrees]
    return struct.pack(">9i", a << 16, b << 16, 0, c << 16, d << 16, 0, 0, 0, 1 << 30)


def turned(data: bytes, degrees: int, *, movie: bool = False) -> bytes:
    path, at = ((b"moov", b"mvhd"), 36) if movie else ((b"moov", b"trak", b"tkhd"), 40)
    return rewritten(data, path, lambda head: box(path[-1], head[:at] + matrix(degrees) + head[at + 36 :]))


def with_edits(data: bytes, *edits: tuple[int, int], version: int = 0) -> bytes:
    """The file with an edit list of (duration in ms, media time)."""
    code = ">QqI" if version else ">IiI"
    rows = b"".join(struct.pack(code, *edit, 1 << 16) for edit in edits)
    elst = box(b"elst", struct.pack(">B3xI", version, len(edits)) + rows)
    return rewritten(data, (b"moov", b"trak", b"edts"), lambda _: box(b"edts", elst))


def fast(data: bytes) -> Mp4Video | None:
    return read_index(io.BytesIO(data), len(data))


def by_ffmpeg(data: bytes) -> VideoMeta:
    return _from_ffmpeg(io.BytesIO(data), len(data), limits=ProbeLimits(), count_packets=True, place="")


def decoded(data: bytes) -> tuple[set[tuple[int, int]], int]:
    """({(width, height) as shown}, number) of the frames of the best stream."""
    sizes, count = set(), 0
    with av.open(io.BytesIO(data)) as file:
        for frame in file.decode(file.streams.best("video")):
            count += 1
            sideways = round(frame.rotation / 90) % 2
            sizes.add((frame.height, frame.width) if sideways else (frame.width, frame.height))
    return sizes, count


def assert_agreement(data: bytes, *, is_fast: bool) -> VideoMeta:
    """The fast reader answers or not; FFmpeg says the same; decoding delivers just that."""
    meta = probe_video(data)
    assert (fast(data) is not None) == is_fast
    assert by_ffmpeg(data) == meta
    assert decoded(data) == ({(meta.width_px, meta.height_px)}, meta.num_frames)
    return meta


@pytest.mark.parametrize(
    ("codec", "size", "pix_fmt"),
    [
        ("libx264", (64, 48), "yuv420p"),
        ("libx264", (66, 50), "yuv420p"),
        ("libx264", (65, 49), "yuv444p"),
        ("libx264", (66, 49), "yuv422p"),
        ("libx264", (130, 72), "yuv420p10le"),
        ("libx265", (70, 66), "yuv420p"),
        ("libx265", (71, 67), "yuv444p"),
        ("libsvtav1", (66, 68), "yuv420p"),
        ("mpeg4", (66, 50), "yuv420p"),
    ],
)
def test_sizes_come_from_the_parameter_sets(codec: str, size: tuple[int, int], pix_fmt: str) -> None:
    meta = assert_agreement(clip(9, codec=codec, size=size, pix_fmt=pix_fmt), is_fast=True)
    assert (meta.width_px, meta.height_px, meta.num_frames, meta.fps) == (*size, 9, 12.0)


def test_a_track_that_says_mp4v_and_holds_another_codec_is_left_to_ffmpeg() -> None:
    data = clip(codec="mpeg4")
    track = read_index(io.BytesIO(data), len(data))
    assert track is not None
    assert track.codec == "mpeg4"
    kind = data.index(b"esds") + 4 + 4 + data[data.index(b"esds") + 8 :].index(b"\4\x80\x80\x80") + 5
    assert data[kind] == 0x20
    other = data[:kind] + b"\x61" + data[kind + 1 :]  # MPEG-2 Main
    assert read_index(io.BytesIO(other), len(other)) is None


@pytest.mark.parametrize("num_frames", [1, 2, 3, 8])
def test_short_clips_count_right(num_frames: int) -> None:
    meta = assert_agreement(clip(num_frames), is_fast=True)
    assert (meta.num_frames, meta.confidence) == (num_frames, "header")
    assert meta.duration_s == pytest.approx(num_frames / 12)


def test_interlaced_and_long_clips_count_right() -> None:
    assert_agreement(clip(10, size=(64, 64), codec_options={"x264-params": "interlaced=1"}), is_fast=True)
    assert assert_agreement(clip(1500, size=(16, 16)), is_fast=True).num_frames == 1500


@pytest.mark.parametrize("sound", ["before", "behind"])
@pytest.mark.parametrize("container", ["mp4", "mov"])
def test_sound_beside_the_video_changes_nothing(container: str, sound: str) -> None:
    meta = assert_agreement(clip(container=container, sound=sound), is_fast=True)
    assert meta.duration_s == pytest.approx(2.0)


@pytest.mark.parametrize("degrees", [0, 90, -90, -180])
def test_vd04_rotation_of_the_track(degrees: int) -> None:
    meta = assert_agreement(turned(clip(4), degrees), is_fast=True)
    assert (meta.width_px, meta.height_px) == ((48, 64) if abs(degrees) == 90 else (64, 48))
    assert meta.rotation == degrees


@pytest.mark.parametrize("degrees", [90, -90])
def test_rotation_of_the_whole_movie_and_mirrored_pictures_are_left_to_ffmpeg(degrees: int) -> None:
    meta = assert_agreement(turned(clip(4), degrees, movie=True), is_fast=False)
    assert (meta.width_px, meta.height_px, meta.rotation) == (48, 64, degrees)
    mirror = struct.pack(">9i", -1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30)
    path = (b"moov", b"trak", b"tkhd")
    mirrored = rewritten(clip(4), path, lambda head: box(b"tkhd", head[:40] + mirror + head[76:]))
    assert_agreement(mirrored, is_fast=False)


def test_rotations_multiply_and_nothing_shown_is_no_rotation() -> None:
    assert rotation_of(matrix(90), matrix(90)) in (180, -180)
    assert rotation_of(matrix(90), matrix(-90)) == 0
    assert rotation_of(bytes(36)) == 0


def test_sample_aspect_ratio_is_told_and_not_applied() -> None:
    meta = assert_agreement(clip(4, sar=Fraction(4, 3)), is_fast=True)
    assert (meta.width_px, meta.height_px, meta.sar) == (64, 48, Fraction(4, 3))
    from_codec = rewritten(clip(4, sar=Fraction(12, 11)), (*STBL, b"stsd"), without_pasp)
    assert by_ffmpeg(from_codec).sar == probe_video(from_codec).sar
    assert probe_video(clip(4)).sar == 1


def without_pasp(stsd: bytes) -> bytes:
    at = stsd.index(b"pasp") - 4
    entry = stsd[8:at] + stsd[at + 16 :]
    return box(b"stsd", stsd[:8] + struct.pack(">I", len(entry)) + entry[4:])


def test_variable_rate_gives_the_average() -> None:
    pts = [0, 1, 2, 3, 12, 24, 36, 48]
    meta = assert_agreement(clip(8, pts=pts, codec_options={"x264-params": "bframes=0"}), is_fast=True)
    assert meta.fps == pytest.approx(8 / meta.duration_s)
    assert meta.duration_s == pytest.approx(48 / 12, abs=1.1)
    # With B-frames FFmpeg takes the average over decoding times, which end earlier; so do we.
    assert_agreement(clip(8, pts=pts), is_fast=True)


@pytest.mark.parametrize("bframes", [0, 3])
@pytest.mark.parametrize(
    "edits",
    [
        [(2000, 0)],
        [(1000, 0)],
        [(1000, 12_288 // 2)],
        [(500, 12_288)],
        [(300, 12_288 + 700)],
        [(500, -1), (2000, 1024)],
        [(500, -1), (700, 5000)],
        [(400, 0), (400, 12_288)],
        [(1500, 1024)],
        [(10_000, 2048)],
    ],
)
def test_edit_lists_show_what_decoding_shows(bframes: int, edits: list[tuple[int, int]]) -> None:
    data = with_edits(clip(24, codec_options={"x264-params": f"bframes={bframes}:scenecut=0"}), *edits)
    meta = probe_video(data)
    assert by_ffmpeg(data) == meta
    assert decoded(data)[1] == meta.num_frames
    assert meta.confidence == "header"


def test_edit_lists_of_64_bits_are_read() -> None:
    data = clip(24)
    (length, time, _), wide_edit = struct.unpack(">IiI", payload(data, b"moov", b"trak", b"edts", b"elst")[8:]), 1
    assert_agreement(with_edits(data, (length, time), version=wide_edit), is_fast=True)


def test_edits_that_hide_leading_frames_are_left_out() -> None:
    meta = probe_video(with_edits(clip(24, codec_options={"x264-params": "bframes=0"}), (1000, 12_288)))
    assert 0 < meta.num_frames <= 13
    assert meta.duration_s == pytest.approx(1.0)


def to_co64(stco: bytes) -> bytes:
    places = [place for (place,) in struct.iter_unpack(">I", stco[8:])]
    return box(b"co64", stco[:8] + struct.pack(f">{len(places)}Q", *places))


def to_stz2(bits: int) -> Callable[[bytes], bytes]:
    def change(stsz: bytes) -> bytes:
        sizes = [size for (size,) in struct.iter_unpack(">I", stsz[12:])]
        rows = struct.pack(f">{len(sizes)}H", *sizes) if bits == 16 else bytes(sizes)
        return box(b"stz2", struct.pack(">4x3xBI", bits, len(sizes)) + rows)

    return change


def test_other_forms_of_the_tables_say_the_same() -> None:
    data = clip(10)
    plain = probe_video(data)
    small = clip(10, size=(16, 16), codec_options={"x264-params": "bframes=0:qp=51:keyint=1"})
    forms = {
        "64-bit offsets": rewritten(data, (*STBL, b"stco"), to_co64),
        "16-bit sizes": rewritten(data, (*STBL, b"stsz"), to_stz2(16)),
        "wide moov": rewritten(data, (b"moov",), lambda inner: wide(b"moov", inner)),
        "wide trak": rewritten(data, (b"moov", b"trak"), lambda inner: wide(b"trak", inner)),
        "free in front of the index": rewritten(
            data, (b"moov",), lambda inner: box(b"free", bytes(70_000)) + box(b"moov", inner)
        ),
        "free inside": rewritten(data, STBL, lambda inner: box(b"stbl", box(b"free", bytes(999)) + inner)),
        "index up to the end": data[: data.rindex(b"moov") - 4] + bytes(4) + data[data.rindex(b"moov") :],
    }
    for name, form in forms.items():
        assert form != data, name
        assert probe_video(form) == plain, name
        assert fast(form) is not None, name
        assert by_ffmpeg(form) == plain, name
    assert probe_video(small).num_frames == 10


def test_wide_media_box_is_jumped_over() -> None:
    data = clip(10)
    out = b"".join(
        b"" if kind == b"free" else wide(kind, whole[8:]) if kind == b"mdat" else whole for kind, whole in boxes(data)
    )
    assert len(out) == len(data)
    assert assert_agreement(out, is_fast=True) == probe_video(data)


def test_samples_of_one_size_are_counted() -> None:
    data = clip(12, codec="mjpeg", container="mov", pix_fmt="yuvj420p", size=(16, 16))
    # Still pictures have one size each; the table is then a single number.
    sizes = struct.unpack(">12I", payload(data, *STBL, b"stsz")[12:])
    same = rewritten(data, (*STBL, b"stsz"), lambda _: box(b"stsz", struct.pack(">4x2I", min(sizes), 12)))
    assert probe_video(same).num_frames == by_ffmpeg(same).num_frames == 12
    h264 = clip(12)
    smallest = min(struct.unpack(">12I", payload(h264, *STBL, b"stsz")[12:]))
    constant = rewritten(h264, (*STBL, b"stsz"), lambda _: box(b"stsz", struct.pack(">4x2I", smallest, 12)))
    assert fast(constant) is not None
    assert probe_video(constant) == probe_video(h264) == by_ffmpeg(constant)


def test_index_in_front_and_behind_is_read_by_ranges(tmp_path: Path) -> None:
    path = tmp_path / "clip.mp4"
    with av.open(path, "w", format="mp4", options={"movflags": "faststart"}) as file:
        stream = file.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt, stream.bit_rate = 320, 240, "yuv420p", 50_000_000
        noise = np.random.default_rng(0).integers(0, 256, (240, 320, 3), dtype=np.uint8)
        for _ in range(20):
            file.mux(stream.encode(av.VideoFrame.from_ndarray(noise, format="rgb24")))
        file.mux(stream.encode(None))
    faststart = path.read_bytes()
    behind = clip(20, codec="mpeg4", fps=10, size=(320, 240))

    class Ranges:
        def __init__(self, data: bytes) -> None:
            self.data, self.size, self.fetched = data, len(data), 0

        def read(self, offset: int, size: int) -> bytes:
            self.fetched += size
            return self.data[offset : offset + size]

    for data in (faststart, behind):
        reader = Ranges(data)
        assert probe_video(reader).num_frames == 20
        assert reader.fetched < 64 * 1024 < len(data)


def test_two_video_tracks_give_the_one_that_decoding_takes() -> None:
    data = clip(10, size=(64, 48), second=(128, 96))
    meta = assert_agreement(data, is_fast=False)
    with av.open(io.BytesIO(data)) as file:
        best = file.streams.best("video")
        assert (meta.width_px, meta.height_px, meta.num_frames) == (best.width, best.height, best.frames)


def test_a_track_of_a_kind_that_may_be_video_is_left_to_ffmpeg() -> None:
    data = clip(10, second=(128, 96))
    first = data.index(b"hdlr")
    at = data.index(b"hdlr", first + 4) + 4 + 8
    for handler in (b"pict", b"auxv"):
        assert fast(data[:at] + handler + data[at + 4 :]) is None
    assert fast(data[:at] + b"meta" + data[at + 4 :]) is not None


@pytest.mark.parametrize("flags", ["frag_keyframe+empty_moov", "frag_keyframe", "frag_keyframe+default_base_moof"])
def test_fragments_are_counted(flags: str) -> None:
    meta = assert_agreement(clip(30, options={"movflags": flags}), is_fast=False)
    assert (meta.num_frames, meta.confidence, meta.fps) == (30, "counted", 12.0)


def test_negative_composition_offsets_are_read() -> None:
    assert_agreement(clip(30, options={"movflags": "negative_cts_offsets"}), is_fast=True)


def test_container_that_contradicts_the_codec_gives_the_size_of_decoded_frames() -> None:
    def lie(stsd: bytes) -> bytes:
        return box(b"stsd", stsd[:40] + struct.pack(">2H", 640, 480) + stsd[44:])

    data = rewritten(clip(4), (*STBL, b"stsd"), lie)
    meta = assert_agreement(data, is_fast=False)
    assert (meta.width_px, meta.height_px) == (64, 48)


def test_samples_without_bytes_are_no_frames() -> None:
    data = clip(12, codec_options={"x264-params": "bframes=0:keyint=1"})
    gap = rewritten(data, (*STBL, b"stsz"), lambda stsz: box(b"stsz", stsz[:-4] + bytes(4)))
    assert fast(gap) is None
    assert probe_video(gap).num_frames == 11 == decoded(gap)[1]


def test_vd01_samples_behind_the_end_are_flagged(tmp_path: Path) -> None:
    path = tmp_path / "clip.mp4"
    with av.open(path, "w", format="mp4", options={"movflags": "faststart"}) as file:
        stream = file.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt, stream.codec_context.gop_size = 64, 48, "yuv420p", 1
        for level in range(20):
            file.mux(stream.encode(av.VideoFrame.from_ndarray(np.full((48, 64, 3), level, np.uint8), format="rgb24")))
        file.mux(stream.encode(None))
    data = path.read_bytes()
    assert not probe_video(data).truncated
    cut = probe_video(data[: -len(data) // 4])
    assert cut.truncated
    assert cut.confidence == "counted"
    assert 0 < cut.num_frames < 20
    assert cut.duration_s == pytest.approx(cut.num_frames / 10)


def test_every_reference_file_is_read_the_same_both_ways(shared_dir: Path) -> None:
    folder, answered = shared_dir / "media", 0
    for row in csv.DictReader((folder / "manifest.csv").read_text().splitlines()):
        if row["kind"] != "video" or row["expect"] == "header_error" or "mp4" not in row["format"]:
            continue
        data = (folder / row["path"]).read_bytes()
        assert probe_video(data) == by_ffmpeg(data), row["path"]
        answered += fast(data) is not None
    assert answered >= 25


# The guard


def number_at(data: bytes, kind: bytes, offset: int, *values: int) -> bytes:
    out = bytearray(data)
    struct.pack_into(f">{len(values)}I", out, data.index(kind) + 4 + offset, *values)
    return bytes(out)


def refusal(data: bytes) -> Reason:
    with pytest.raises(MediaError) as caught:
        probe_video(data, place="shard s.tar, key 3")
    assert "shard s.tar, key 3" in str(caught.value)
    return caught.value.reason


def test_tables_that_claim_gigabytes_are_refused_before_ffmpeg_sees_them() -> None:
    data, huge = clip(8), 0x0FFFFFFF
    bomb = number_at(data, b"stsz", 4, 1, huge)
    bomb = number_at(number_at(bomb, b"stsc", 12, huge), b"stts", 8, huge)
    assert refusal(bomb) is Reason.TOO_LARGE
    fragments = clip(8, options={"movflags": "frag_keyframe+empty_moov"})
    assert refusal(number_at(fragments, b"trun", 4, huge)) is Reason.TOO_LARGE
    for kind, head in ((b"keys", bytes(4)), (b"sgpd", bytes(4) + b"sync"), (b"iinf", b"\1\0\0\0")):
        table = box(kind, head + struct.pack(">I", huge))
        claim = rewritten(data, (b"moov",), lambda inner, table=table: box(b"moov", inner + table))
        assert refusal(rewritten(claim, STBL, lambda _: box(b"stbl", b""))) is Reason.TOO_LARGE


def test_claims_are_checked_however_the_file_begins() -> None:
    bomb = number_at(clip(8), b"stsz", 4, 1, 0x0FFFFFFF)
    bomb = number_at(number_at(bomb, b"stsc", 12, 0x0FFFFFFF), b"stts", 8, 0x0FFFFFFF)
    inner = payload(bomb, b"moov")
    for start in (box(b"uuid", bytes(32)), box(b"junk", bytes(8)), box(b"udta", b"")):
        assert refusal(start + bomb) is Reason.TOO_LARGE
    assert refusal(box(b"ftyp", b"isom" + bytes(4)) + box(b"free", inner)) is Reason.TOO_LARGE  # an index in disguise
    assert refusal(box(b"free", b"") * 120_000 + bomb) is Reason.TOO_LARGE
    assert refusal(box(b"ftyp", b"isom" + bytes(4)) + wide(b"moov", inner)) is Reason.TOO_LARGE
    longer = struct.pack(">I4s", 1 << 30, b"moov") + inner  # longer than the file
    assert refusal(box(b"ftyp", b"isom" + bytes(4)) + longer) is Reason.TOO_LARGE


def test_edits_that_repeat_everything_are_refused() -> None:
    data = rewritten(clip(24), (b"moov", b"trak", b"edts"), lambda _: b"")
    edits = struct.pack(">IiI", 2000, 0, 1 << 16) * 60_000
    elst = box(b"edts", box(b"elst", struct.pack(">4xI", 60_000) + edits))
    many = rewritten(data, (b"moov", b"trak"), lambda inner: box(b"trak", inner + elst))
    with pytest.raises(MediaError) as caught:
        probe_video(many, limits=ProbeLimits(max_frames=100))
    assert caught.value.reason is Reason.TOO_LARGE


def test_compressed_index_is_bounded_and_looked_into() -> None:
    data = clip(8)
    moov = payload(data, b"moov")
    rest = data[: data.rindex(b"moov") - 4]

    def compressed(inner: bytes) -> bytes:
        packed = box(b"dcom", b"zlib") + box(b"cmvd", struct.pack(">I", len(inner)) + zlib.compress(inner))
        return rest + box(b"moov", box(b"cmov", packed))

    whole = compressed(box(b"moov", moov))
    assert probe_video(whole) == probe_video(data)
    assert fast(whole) is None
    assert refusal(compressed(box(b"free", bytes(80 * 1024**2)))) is Reason.TOO_LARGE
    bomb = number_at(number_at(box(b"moov", moov), b"stsz", 4, 1, 1 << 28), b"stts", 8, 1 << 28)
    assert refusal(compressed(bomb)) is Reason.TOO_LARGE


def test_uncompressed_sound_has_as_many_samples_as_it_likes() -> None:
    out = io.BytesIO()
    with av.open(out, "w", format="mov") as file:
        stream = file.add_stream("libx264" if "libx264" in av.codecs_available else "mpeg4", rate=1)
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv420p"
        sound = file.add_stream("pcm_s16le", rate=48_000)
        for _ in range(30):
            file.mux(stream.encode(av.VideoFrame.from_ndarray(np.zeros((48, 64, 3), np.uint8), format="rgb24")))
            silence = av.AudioFrame.from_ndarray(np.zeros((1, 96_000), np.int16), format="s16", layout="stereo")
            silence.sample_rate = 48_000
            file.mux(sound.encode(silence))
        file.mux(stream.encode(None))
    data = out.getvalue()
    claims = check_claims(io.BytesIO(data), len(data), limits=ProbeLimits(max_frames=30), place="")
    assert not claims.fragmented
    assert by_ffmpeg(data) == probe_video(data, limits=ProbeLimits(max_frames=30))


def test_deep_and_endless_boxes_are_walked_without_recursion() -> None:
    start = box(b"ftyp", b"isom" + bytes(4))
    deep = start + b"".join(
        struct.pack(">I4s", 8 * (20_000 - level), b"udta" if level else b"moov") for level in range(20_000)
    )
    assert refusal(deep) is Reason.CORRUPT
    assert refusal(start + box(b"moov", box(b"udta", b"") * 120_000)) is Reason.TOO_LARGE
    assert refusal(start + box(b"moov", struct.pack(">I4s", 4, b"trak") * 100)) in (
        Reason.TRUNCATED,
        Reason.NO_VIDEO_STREAM,
    )


def test_references_to_other_files_are_not_followed(tmp_path: Path) -> None:
    secret = tmp_path / "secret.mov"
    secret.write_bytes(clip(8, container="mov"))
    alias = box(b"alis", bytes(4) + str(secret).encode().ljust(200, b"\0"))
    url = box(b"url ", bytes(4) + f"file://{secret}".encode() + b"\0")
    for entry in (alias, url):
        dref = box(b"dinf", box(b"dref", struct.pack(">4xI", 1) + entry))
        data = rewritten(clip(8, container="mov"), (b"moov", b"trak", b"mdia", b"minf", b"dinf"), lambda _, d=dref: d)
        assert fast(data) is None
        try:
            meta = probe_video(data)
        except MediaError:
            continue
        assert (meta.width_px, meta.num_frames) == (64, 8)  # its own samples, not those of the other file


@pytest.mark.parametrize("fourcc", [b"avc1", b"hvc1", b"av01", b"mp4v"])
def test_parameter_sets_of_noise_are_refused_quietly(fourcc: bytes) -> None:
    rng = np.random.default_rng(5)
    for length in (0, 1, 7, 30, 200):
        for _ in range(40):
            noise = bytes(rng.integers(0, 256, length, dtype=np.uint8))
            size = coded_size(fourcc, noise)
            assert size is None or size.width_px <= 1 << 36


def test_one_pixel_missing_in_the_chunk_table_is_noticed() -> None:
    data = clip(12)
    for change in (
        lambda d: number_at(d, b"stsc", 12, 11),
        lambda d: number_at(d, b"stts", 8, 11),
        lambda d: number_at(d, b"stsc", 16, 2),
        lambda d: number_at(d, b"stco", 8, len(data) + 5),
        lambda d: rewritten(d, (*STBL, b"stts"), lambda stts: box(b"stts", stts) * 2),
        lambda d: rewritten(d, STBL, lambda inner: box(b"stbl", inner) * 2),
    ):
        assert fast(change(data)) is None
