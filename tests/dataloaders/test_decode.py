"""Decoding: patches of exactly the planned shape, whatever the file holds."""

import csv
import io
import struct
import zlib
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from dataloaders.counts import MediaKind
from dataloaders.decode import (
    Conformed,
    PixelConfig,
    PlannedItem,
    decode_image,
    decode_media,
    decode_video,
    planned_item,
    stand_in,
)
from dataloaders.decode_image import to_rgb
from dataloaders.decode_patches import cut_patches
from dataloaders.errors import MediaError, Reason
from dataloaders.estimators import Qwen25VLConfig, Qwen25VLEstimator
from dataloaders.probe import ProbeLimits, probe_image, probe_video

# Raw pixels: mean 0 and std 1/255 make a patch value the byte itself.
RAW = PixelConfig(mean=(0.0, 0.0, 0.0), std=(1 / 255, 1 / 255, 1 / 255))
ESTIMATOR = Qwen25VLEstimator(Qwen25VLConfig(video_min_pixels=3136, video_max_pixels=12_544, max_pixels=200_704))


def png(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def noise(width_px: int, height_px: int, mode: str = "RGB") -> Image.Image:
    rng = np.random.default_rng(width_px + 7 * height_px)
    return Image.fromarray(rng.integers(0, 256, (height_px, width_px, 4), dtype=np.uint8)).convert(mode)


def clip(levels: list[int], *, width_px: int = 64, height_px: int = 48, container: str = "mp4", fps: int = 10) -> bytes:
    """A clip whose frame i is grey of `levels[i]`, with a white top-left quarter."""
    out = io.BytesIO()
    with av.open(out, "w", format=container) as file:
        stream = file.add_stream("mpeg4", rate=fps)
        stream.width, stream.height, stream.pix_fmt = width_px, height_px, "yuv420p"
        stream.time_base, stream.bit_rate, stream.gop_size = Fraction(1, fps), 4_000_000, 1
        for level in levels:
            picture = np.full((height_px, width_px, 3), level, dtype=np.uint8)
            picture[: height_px // 2, : width_px // 2] = 255
            for packet in stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")):
                file.mux(packet)
        for packet in stream.encode(None):
            file.mux(packet)
    return out.getvalue()


def plan_image(data: bytes, *, apply_orientation: bool = True) -> PlannedItem:
    meta = probe_image(data, apply_orientation=apply_orientation)
    counts = ESTIMATOR.image(meta.width_px, meta.height_px)
    return planned_item(MediaKind.IMAGE, counts, width_px=meta.width_px, height_px=meta.height_px)


def plan_video(data: bytes, *, num_frames: int | None = None, estimator: Qwen25VLEstimator = ESTIMATOR) -> PlannedItem:
    meta = probe_video(data)
    timing = (num_frames or meta.num_frames, meta.fps, meta.duration_s)
    return planned_item(
        MediaKind.VIDEO,
        estimator.video(meta.width_px, meta.height_px, *timing),
        frame_indices=estimator.frame_indices(*timing),
        width_px=meta.width_px,
        height_px=meta.height_px,
    )


def pictures(patches: NDArray[np.float32], grid: tuple[int, int, int]) -> NDArray[np.float32]:
    """Undo the patch layout: [t * 2, H, W, 3]."""
    t, h, w = grid
    blocks = patches.reshape(t, h // 2, w // 2, 2, 2, 3, 2, 14, 14)
    return blocks.transpose(0, 6, 1, 3, 7, 2, 4, 8, 5).reshape(t * 2, h * 14, w * 14, 3)


def levels_of(patches: NDArray[np.float32], grid: tuple[int, int, int]) -> list[int]:
    """Grey level in the lower right corner of each frame."""
    return [round(float(frame[-20:-4, -20:-4].mean())) for frame in pictures(patches, grid)]


@given(t=st.integers(1, 3), h=st.integers(1, 4), w=st.integers(1, 4), num_frames=st.integers(1, 7))
@settings(max_examples=30)
def test_patches_hold_every_pixel_in_merge_block_order(t: int, h: int, w: int, num_frames: int) -> None:
    rng = np.random.default_rng(t + 10 * h + 100 * w)
    frames = list(rng.integers(0, 256, (num_frames, h * 28, w * 28, 3), dtype=np.uint8))
    grid = (t, 2 * h, 2 * w)
    patches = cut_patches(frames, grid, RAW)
    assert (patches.shape, patches.dtype) == ((t * 4 * h * w, 1176), np.float32)
    shown = pictures(patches, grid)
    for index in range(2 * t):
        np.testing.assert_allclose(shown[index], frames[min(index, num_frames - 1)], atol=1e-3)


def plain_patches(frames: list[NDArray[np.uint8]], grid: tuple[int, int, int], pixels: PixelConfig) -> bytes:
    """The patch layout as one transpose of float32 values, scaled in float64 as transformers does it."""
    t, h, w = grid
    m, p, depth = pixels.merge, pixels.patch_px, pixels.temporal_patch
    padded = np.stack([frames[min(i, len(frames) - 1)] for i in range(t * depth)])
    scaled = (padded.astype(np.float64) * (1 / 255)).astype(np.float32)
    values = (scaled - np.array(pixels.mean, dtype=np.float32)) / np.array(pixels.std, dtype=np.float32)
    # axes: (t, T, h/m, m, p, w/m, m, p, C) -> (t, h/m, w/m, m, m, C, T, p, p)
    blocks = values.reshape(t, depth, h // m, m, p, w // m, m, p, 3)
    return blocks.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7).tobytes()


@given(
    size=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)),
    layout=st.tuples(st.sampled_from([1, 3, 14, 16]), st.integers(1, 4), st.integers(1, 3)),
    num_frames=st.integers(1, 10),
    seed=st.integers(0, 1000),
)
@settings(max_examples=80)
def test_patches_are_those_of_a_plain_transpose_bit_for_bit(
    size: tuple[int, int, int], layout: tuple[int, int, int], num_frames: int, seed: int
) -> None:
    patch, merge, depth = layout
    pixels = PixelConfig(patch_px=patch, merge=merge, temporal_patch=depth)
    grid = (size[0], size[1] * merge, size[2] * merge)
    rng = np.random.Generator(np.random.Philox(seed))
    frames = list(rng.integers(0, 256, (num_frames, grid[1] * patch, grid[2] * patch, 3), dtype=np.uint8))
    expected = plain_patches(frames, grid, pixels)
    assert cut_patches(frames, grid, pixels).tobytes() == expected
    # Into the middle of memory that is not ours, which stays as it is left and right of it.
    memory = np.full((grid[0] * grid[1] * grid[2] + 2, pixels.patch_dim), np.nan, dtype=np.float32)
    assert cut_patches(frames, grid, pixels, out=memory[1:-1]).base is memory
    assert memory[1:-1].tobytes() == expected
    assert np.isnan(memory[[0, -1]]).all()


def test_every_byte_is_normalised_as_the_reference_does_it() -> None:
    every = np.arange(256, dtype=np.uint8).reshape(16, 16)
    pixels = PixelConfig(patch_px=16, merge=1, temporal_patch=1)
    frame = np.stack([every, every[::-1], every.T], axis=2)
    assert cut_patches([frame], (1, 1, 1), pixels).tobytes() == plain_patches([frame], (1, 1, 1), pixels)


def test_memory_for_patches_that_does_not_fit_them_is_refused() -> None:
    frame = np.zeros((28, 28, 3), dtype=np.uint8)
    whole = np.zeros((8, 1176), dtype=np.float32)
    for out in (whole, whole[::2], np.zeros((4, 1176)), np.zeros((4, 2352), dtype=np.float32)[:, :1176]):
        with pytest.raises(ValueError, match=r"contiguous float32 \(4, 1176\) is needed"):
            cut_patches([frame], (1, 2, 2), RAW, out=out)


def test_first_patches_of_a_row_form_a_two_by_two_block() -> None:
    picture = np.zeros((28, 56, 3), dtype=np.uint8)
    for row in range(2):
        for column in range(4):
            picture[row * 14 : row * 14 + 14, column * 14 : column * 14 + 14] = 10 * row + column
    patches = cut_patches([picture], (1, 2, 4), RAW)
    assert [round(float(value)) for value in patches[:, 0]] == [0, 1, 10, 11, 2, 3, 12, 13]


@pytest.mark.parametrize(("width", "height"), [(1, 1), (1, 3), (3, 3), (3, 1), (3, 5), (640, 480)])
def test_ce04_estimate_equals_decode_for_tiny_and_ordinary_images(width: int, height: int) -> None:
    data = png(noise(width, height))
    item = plan_image(data)
    patches = decode_image(data, item)
    assert patches.shape == (ESTIMATOR.image(width, height).patches, 1176)
    assert np.isfinite(patches).all()


def test_planned_grid_wins_over_the_pixels() -> None:
    item = plan_image(png(noise(200, 100)))
    data = png(Image.new("RGB", (90, 300), (200, 10, 60)))
    patches, report = decode_media(data, item, pixels=RAW)
    assert patches.shape == (item.num_patches, 1176)
    assert report == Conformed(resized=True)
    assert report
    np.testing.assert_allclose(pictures(patches, item.grid)[0, 30, 30], (200, 10, 60), atol=1e-3)
    memory = np.empty_like(patches)
    same, nothing = decode_media(png(noise(200, 100)), item, out=memory)
    assert same is memory
    assert same.shape == patches.shape
    assert not nothing


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_orientation_is_applied_as_planned(orientation: int, kind: str) -> None:
    stored = np.zeros((56, 112, 3), dtype=np.uint8)
    stored[:28, :28] = 255  # the corner that is stored first
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = png(Image.fromarray(stored), kind, exif=exif)
    item = plan_image(data)
    shown = pictures(decode_image(data, item, pixels=RAW), item.grid)[0]
    assert shown.shape[:2] == ((112, 56) if orientation >= 5 else (56, 112))
    right, below = (orientation in (2, 3, 6, 7)), (orientation in (3, 4, 7, 8))
    corner = shown[-10 if below else 10, -10 if right else 10]
    assert corner.min() > 240
    plain = plan_image(data, apply_orientation=False)
    unturned = pictures(decode_image(data, plain, apply_orientation=False, pixels=RAW), plain.grid)[0]
    assert unturned.shape[:2] == (56, 112)
    assert unturned[10, 10].min() > 240


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparency_is_flattened_on_white(mode: str) -> None:
    image = Image.new("RGBA", (28, 28), (0, 0, 0, 0)).convert(mode)
    options = {"transparency": image.getpixel((0, 0))} if mode == "P" else {}
    data = png(image, **options)
    patches = decode_image(data, plan_image(data), pixels=RAW)
    np.testing.assert_allclose(patches, 255, atol=1e-3)


@pytest.mark.parametrize("mode", ["1", "L", "P", "CMYK", "YCbCr"])
def test_other_modes_become_rgb(mode: str) -> None:
    assert to_rgb(noise(10, 10, mode)).mode == "RGB"


def test_sixteen_bit_grey_is_scaled_and_not_clipped() -> None:
    data = png(Image.fromarray(np.full((28, 28), 0x8000, dtype=np.uint16)))
    np.testing.assert_allclose(decode_image(data, plan_image(data), pixels=RAW), 0x80, atol=1e-3)


def test_first_frame_of_an_animation_is_taken() -> None:
    colours = [(250, 0, 0), (0, 250, 0), (0, 0, 250)]
    pages = [Image.new("RGB", (56, 28), colour) for colour in colours]
    for kind, options in (("PNG", {}), ("WEBP", {"lossless": True}), ("GIF", {})):
        data = png(pages[0], kind, save_all=True, append_images=pages[1:], **options)
        assert probe_image(data).frames == 3
        item = plan_image(data)
        assert pictures(decode_image(data, item, pixels=RAW), item.grid)[0, 5, 5] == pytest.approx(colours[0], abs=4)


def test_cut_and_damaged_bodies_are_told_apart_and_leave_a_stand_in() -> None:
    whole = png(noise(300, 200), "JPEG")
    item = plan_image(whole)
    with pytest.raises(MediaError, match="key 5") as cut:
        decode_image(whole[: len(whole) // 2], item, place="shard a.tar, key 5")
    assert cut.value.reason is Reason.TRUNCATED
    damaged = bytearray(png(noise(300, 200)))
    damaged[200:260] = bytes(60)
    with pytest.raises(MediaError) as broken:
        decode_image(bytes(damaged), item)
    assert broken.value.reason in (Reason.CORRUPT, Reason.TRUNCATED)
    zeros = stand_in(item)
    assert (zeros.shape, zeros.dtype, zeros.any()) == (decode_image(whole, item).shape, np.float32, False)


def test_id02_a_bomb_is_never_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", 13_000, 13_000, 8, 0, 0, 0, 0)
    data = (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(100))) + chunk(b"IEND", b"")
    )
    monkeypatch.setattr(Image.Image, "load", lambda self: pytest.fail("decoded"))
    item = PlannedItem(kind=MediaKind.IMAGE, grid=(1, 2, 2), height_px=28, width_px=28)
    for limits in (ProbeLimits(max_pixels=150_000_000), ProbeLimits(max_side_px=12_999)):
        with pytest.raises(MediaError, match="13000x13000") as caught:
            decode_image(data, item, limits=limits, place="shard a.tar, key 9")
        assert caught.value.reason is Reason.TOO_LARGE
        assert "shard a.tar, key 9" in str(caught.value)


def test_planned_frames_are_taken_in_order() -> None:
    levels = list(range(0, 200, 10))
    data = clip(levels)
    item = plan_video(data, estimator=Qwen25VLEstimator(Qwen25VLConfig(video_fps=5.0, video_min_pixels=3136)))
    assert item.frame_indices is not None
    assert item.frame_indices.tolist() == [0, 2, 4, 6, 8, 11, 13, 15, 17, 19]
    patches, report = decode_video(data, item, pixels=RAW)
    assert not report
    expected = [levels[index] for index in item.frame_indices]
    assert levels_of(patches, item.grid) == pytest.approx(expected, abs=4)


@pytest.mark.parametrize(("num_frames", "grid_t"), [(1, 1), (2, 1), (3, 1), (4, 2), (5, 2)])
def test_short_clips_fill_the_temporal_patch(num_frames: int, grid_t: int) -> None:
    data = clip([40 * index for index in range(num_frames)])
    item = plan_video(data, num_frames=max(num_frames, 2))  # one frame is planned as the two that the processor needs
    patches, report = decode_video(data, item, pixels=RAW)
    assert item.grid[0] == grid_t
    assert patches.shape == (item.num_patches, 1176)
    assert report == Conformed(frames_repeated=1 if num_frames == 1 else 0)
    shown = levels_of(patches, item.grid)
    assert shown[0] == pytest.approx(0, abs=4)
    assert shown[-1] == pytest.approx(40 * (num_frames - 1), abs=4)


def test_vd01_a_stream_that_ends_early_repeats_its_last_good_frame() -> None:
    levels = [0, 30, 60, 90, 120, 150, 180]
    data = clip(levels, container="matroska")
    item = plan_video(data, num_frames=8, estimator=Qwen25VLEstimator(Qwen25VLConfig(video_fps=10.0)))
    patches, report = decode_video(data, item, pixels=RAW)
    assert patches.shape == (item.num_patches, 1176)
    assert report == Conformed(frames_repeated=1)
    assert levels_of(patches, item.grid) == pytest.approx([*levels, 180], abs=4)


def test_vd01_an_undecodable_last_packet_is_clamped_and_counted() -> None:
    data = clip([0, 30, 60, 90, 120, 150])
    with av.open(io.BytesIO(data)) as file:
        packets = [(packet.pos, packet.size) for packet in file.demux(video=0) if packet.size]
    start, size = packets[-1]
    broken = data[:start] + bytes([0xFF]) * size + data[start + size :]
    item = plan_video(broken, estimator=Qwen25VLEstimator(Qwen25VLConfig(video_fps=10.0)))
    assert item.grid[0] == 3
    patches, report = decode_video(broken, item, pixels=RAW)
    assert (report.frames_repeated, report.resized) == (1, False)
    assert levels_of(patches, item.grid) == pytest.approx([0, 30, 60, 90, 120, 120], abs=4)


def test_longer_streams_are_trimmed() -> None:
    data = clip(list(range(0, 200, 20)))
    item = plan_video(data, num_frames=4, estimator=Qwen25VLEstimator(Qwen25VLConfig(video_fps=10.0)))
    patches, report = decode_video(data, item, pixels=RAW)
    assert not report
    assert levels_of(patches, item.grid) == pytest.approx([0, 20, 40, 60], abs=4)


def test_frames_of_another_size_are_resized_to_the_plan() -> None:
    item = plan_video(clip([0, 0, 0, 0]))
    patches, report = decode_video(clip([0, 0, 0, 0], width_px=96, height_px=96), item)
    assert patches.shape == (item.num_patches, 1176)
    assert report == Conformed(resized=True)


@pytest.mark.parametrize("degrees", [90, -90, 180])
def test_vd04_estimate_and_decode_agree_on_a_turned_clip(degrees: int) -> None:
    a, b, c, d = {90: (0, -1, 1, 0), -90: (0, 1, -1, 0), 180: (-1, 0, 0, -1)}[degrees]
    data = clip([90, 90, 90, 90], width_px=112, height_px=56)
    at = data.index(b"tkhd") + 4 + 40
    data = data[:at] + struct.pack(">9i", a << 16, b << 16, 0, c << 16, d << 16, 0, 0, 0, 1 << 30) + data[at + 36 :]
    item = plan_video(data)
    patches, report = decode_video(data, item, pixels=RAW)
    assert not report  # the decoded size is the probed one
    shown = pictures(patches, item.grid)[0]
    assert shown.shape[:2] == ((56, 112) if degrees == 180 else (112, 56))
    # The white quarter is stored top left; a counterclockwise turn takes it to the bottom left.
    row, column = {90: (-8, 8), -90: (8, -8), 180: (-8, -8)}[degrees]
    assert shown[row, column].min() > 230
    assert shown[-row, -column].max() < 110


def test_vd04_decord_agrees_on_the_turned_size(shared_dir: Path) -> None:
    decord = pytest.importorskip("decord")
    for name in ("v_dec_video_90.mov", "v_dec_video_270.mov", "v_g_rot90.mp4"):
        path = shared_dir / "media" / "videos" / name
        reference = decord.VideoReader(str(path), num_threads=1)[0].asnumpy()
        meta = probe_video(path)
        assert reference.shape[:2] == (meta.height_px, meta.width_px)
        item = plan_video(path.read_bytes())
        ours = pictures(decode_video(path.read_bytes(), item, pixels=RAW)[0], item.grid)[0]
        size = (ours.shape[1], ours.shape[0])
        theirs = np.asarray(
            Image.fromarray(reference).resize(size, resample=Image.Resampling.BICUBIC), dtype=np.float32
        )
        assert np.abs(ours - theirs).mean() < 3


def test_ce08_two_videos_decode_to_their_own_counts() -> None:
    estimator = Qwen25VLEstimator(Qwen25VLConfig(video_fps=10.0, video_min_pixels=3136, video_max_pixels=12_544))
    rows = []
    for num_frames, grid_t in ((8, 4), (10, 5)):
        data = clip([0] * num_frames)
        item = plan_video(data, estimator=estimator)
        rows.append(len(decode_video(data, item)[0]))
        assert (item.grid[0], rows[-1]) == (grid_t, item.num_patches)
    assert rows[0] * 5 == rows[1] * 4


def test_video_without_one_good_frame_has_a_reason() -> None:
    data = clip([0, 50, 100])
    item = plan_video(data)
    with av.open(io.BytesIO(data)) as file:
        packets = [(packet.pos, packet.size) for packet in file.demux(video=0) if packet.size]
    broken = bytearray(data)
    for start, size in packets:
        broken[start : start + size] = bytes([0xFF]) * size
    with pytest.raises(MediaError, match=r"shard b\.tar") as caught:
        decode_video(bytes(broken), item, place="shard b.tar")
    assert caught.value.reason in (Reason.CORRUPT, Reason.TRUNCATED)
    with pytest.raises(MediaError) as cut:
        decode_video(data[:60], item)
    assert cut.value.reason is Reason.TRUNCATED


def test_frame_ceiling_holds_in_decode_too() -> None:
    data = clip([0, 0])
    with pytest.raises(MediaError, match="max_frame_pixels=3071") as caught:
        decode_video(data, plan_video(data), limits=ProbeLimits(max_frame_pixels=64 * 48 - 1))
    assert caught.value.reason is Reason.TOO_LARGE


def test_mutated_media_give_the_planned_shape_or_a_reason() -> None:
    rng = np.random.default_rng(5)
    refused = 0
    for original, item in ((data, plan) for data, plan in _samples() for _ in range(30)):
        data = bytearray(original)
        for position in rng.integers(0, len(data), size=int(rng.integers(1, 20))):
            data[position] = int(rng.integers(0, 256))
        try:
            patches, _ = decode_media(bytes(data), item)
        except MediaError:
            refused += 1
        else:
            assert patches.shape == (item.num_patches, 1176)
            assert np.isfinite(patches).all()
    assert 0 < refused < 150


def _samples() -> list[tuple[bytes, PlannedItem]]:
    images = [png(noise(80, 60), kind) for kind in ("PNG", "JPEG", "WEBP")]
    clips = [clip([0, 60, 120, 180], container=container) for container in ("mp4", "matroska")]
    return [(data, plan_image(data)) for data in images] + [(data, plan_video(data)) for data in clips]


def test_impossible_plans_are_named() -> None:
    with pytest.raises(ValueError, match=r"grid=\(0, 2, 2\)"):
        PlannedItem(kind=MediaKind.IMAGE, grid=(0, 2, 2), height_px=28, width_px=28)
    with pytest.raises(ValueError, match="ascending"):
        PlannedItem(
            kind=MediaKind.VIDEO,
            grid=(1, 2, 2),
            height_px=28,
            width_px=28,
            frame_indices=np.array([3, 1], dtype=np.int64),
        )
    with pytest.raises(ValueError, match="multiples of merge"):
        cut_patches([np.zeros((42, 28, 3), dtype=np.uint8)], (1, 3, 2), RAW)


def test_pixel_config_follows_the_estimator() -> None:
    estimator = Qwen25VLEstimator(Qwen25VLConfig(mean=(0.1, 0.2, 0.3), temporal_patch=1))
    config = PixelConfig.of(estimator)
    assert (config.mean, config.temporal_patch, config.patch_dim) == ((0.1, 0.2, 0.3), 1, 588)
    assert PixelConfig.of(Qwen25VLEstimator()) == PixelConfig()


def test_every_reference_file_decodes_to_its_plan_or_says_why(shared_dir: Path) -> None:
    folder = shared_dir / "media"
    refused, conformed = set(), {}
    for row in csv.DictReader((folder / "manifest.csv").read_text().splitlines()):
        # Decoding long or large files tells nothing new here.
        if row["expect"] == "header_error" or int(row["bytes"]) > 400_000 or "bomb" in row["path"]:
            continue
        name, data = Path(row["path"]).name, (folder / row["path"]).read_bytes()
        try:
            item = plan_image(data) if row["kind"] == "image" else plan_video(data)
            patches, report = decode_media(data, item)
        except MediaError as error:
            refused.add((name, str(error.reason)))
            continue
        assert patches.shape == (item.num_patches, 1176), name
        if report:
            conformed[name] = report
    assert refused == {
        ("g_1x500.png", "extreme_aspect"),
        ("g_tall_30x8000.png", "extreme_aspect"),
        ("g_wide_10000x40.jpg", "extreme_aspect"),
        ("g_flip_bits.png", "corrupt"),
        ("g_truncated_half.jpg", "truncated"),
        ("i_pil_truncated_image.png", "truncated"),
        ("v_g_1frame.mp4", "too_few_frames"),
    }
    assert conformed == {"v_dec_corrupted.mp4": Conformed(bad_packets=1)}


@pytest.mark.torch
@pytest.mark.parametrize(
    ("width", "height", "mode"),
    [(640, 480, "RGB"), (100, 37, "RGBA"), (3, 5, "RGB"), (1, 1, "L"), (2000, 1500, "RGB"), (333, 777, "LA")],
)
def test_patches_equal_those_of_the_reference_processor_bit_for_bit(width: int, height: int, mode: str) -> None:
    pytest.importorskip("torch")
    reference = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    estimator = Qwen25VLEstimator()
    data = png(noise(width, height, mode))
    with Image.open(io.BytesIO(data)) as image:
        expected = reference.Qwen2VLImageProcessorPil()(images=[image], return_tensors="np")
    item = planned_item(MediaKind.IMAGE, estimator.image(width, height))
    assert expected["image_grid_thw"].tolist() == [list(item.grid)]
    np.testing.assert_array_equal(decode_image(data, item), expected["pixel_values"])
