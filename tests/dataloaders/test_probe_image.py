"""Image probing: display size and reason codes, from headers alone."""

import csv
import io
import struct
import threading
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dataloaders.errors import MediaError, Reason
from dataloaders.probe import ByteReader, MediaSource, ProbeLimits, probe_image


def encoded(width_px: int, height_px: int, kind: str = "PNG", mode: str = "RGB", **options: object) -> bytes:
    rng = np.random.default_rng(width_px * 1000 + height_px)
    image = Image.fromarray(rng.integers(0, 256, (height_px, width_px, 4), dtype=np.uint8)).convert(mode)
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def with_orientation(value: int, kind: str = "JPEG") -> bytes:
    exif = Image.Exif()
    exif[0x0112] = value
    return encoded(60, 40, kind, exif=exif)


def png_header(width_px: int, height_px: int) -> bytes:
    """A PNG that claims a size and holds hardly any pixel data."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width_px, height_px, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0")) + chunk(b"IEND", b"")


class Ranges:
    """A byte-range reader over memory that counts what is asked for."""

    def __init__(self, data: bytes) -> None:
        self.data, self.size, self.fetched = data, len(data), 0

    def read(self, offset: int, size: int) -> bytes:
        self.fetched += min(size, self.size - offset)
        return self.data[offset : offset + size]


class BrokenDisk(Ranges):
    def read(self, offset: int, size: int) -> bytes:
        raise OSError(5, "Input/output error")


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "BMP", "TIFF", "WEBP", "PPM"])
def test_size_and_format_come_from_the_content(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "misnamed.dat"
    path.write_bytes(encoded(123, 45, kind))
    meta = probe_image(path)
    assert (meta.width_px, meta.height_px, meta.format, meta.orientation, meta.frames) == (123, 45, kind, 1, 1)
    assert meta == probe_image(path.read_bytes()) == probe_image(str(path))


def test_every_kind_of_source_gives_the_same_answer(tmp_path: Path) -> None:
    data = with_orientation(6)
    path = tmp_path / "image.bin"
    path.write_bytes(data)
    doubled = np.repeat(np.frombuffer(data, dtype=np.uint8), 2)
    sources: list[MediaSource] = [
        bytearray(data),
        memoryview(data),
        memoryview(doubled.tobytes())[::2],
        memoryview(np.frombuffer(data + bytes(-len(data) % 4), dtype=np.uint32)),
        path,
        str(path),
        Ranges(data),
    ]
    for source in sources:
        assert probe_image(source) == probe_image(data)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("value", range(1, 9))
def test_orientations_5_to_8_swap_the_sides_when_applied(value: int, kind: str) -> None:
    data = with_orientation(value, kind)
    meta = probe_image(data)
    assert (meta.width_px, meta.height_px) == ((40, 60) if value >= 5 else (60, 40))
    assert meta.orientation == value
    stored = probe_image(data, apply_orientation=False)
    assert (stored.width_px, stored.height_px) == (60, 40)


def test_invalid_orientation_counts_as_upright() -> None:
    meta = probe_image(with_orientation(9))
    assert (meta.width_px, meta.height_px, meta.orientation) == (60, 40, 1)


def test_damaged_exif_does_not_lose_the_image() -> None:
    data = with_orientation(6).replace(b"MM\x00*\x00\x00\x00\x08", b"MM\x00*\xff\xff\xff\xf0")
    meta = probe_image(data)
    assert (meta.width_px, meta.height_px, meta.orientation) == (60, 40, 1)


def test_animation_reports_its_frames() -> None:
    out = io.BytesIO()
    pages = [Image.new("RGB", (20, 10), (index * 60, 0, 0)) for index in range(4)]
    pages[0].save(out, "GIF", save_all=True, append_images=pages[1:])
    assert probe_image(out.getvalue()).frames == len(pages)


def test_byte_reader_fetches_the_header_and_not_the_file() -> None:
    reader = Ranges(encoded(2000, 1500, "JPEG", quality=95))
    assert isinstance(reader, ByteReader)
    meta = probe_image(reader)
    assert (meta.width_px, meta.height_px) == (2000, 1500)
    assert reader.fetched <= 32 * 1024 < reader.size


def test_header_behind_64_kib_of_metadata_is_found() -> None:
    plain = encoded(64, 48, "JPEG")
    segment = b"\xff\xed" + struct.pack(">H", 65_000) + bytes(64_998)
    meta = probe_image(Ranges(plain[:2] + segment * 2 + plain[2:]))
    assert (meta.width_px, meta.height_px) == (64, 48)


def test_most_headers_cost_one_read_of_4_kib() -> None:
    for kind in ("JPEG", "WEBP", "BMP", "JPEG2000", "PPM"):
        reader = Ranges(encoded(300, 200, kind))
        probe_image(reader)
        assert reader.fetched == 4096, kind


def test_a_header_that_spreads_over_the_whole_file_ends_at_the_budget() -> None:
    pages = [Image.new("RGB", (200, 200), (index, 0, 0)) for index in range(3)]
    out = io.BytesIO()
    pages[0].save(out, "GIF", save_all=True, append_images=pages[1:])
    data = out.getvalue() + bytes(100_000)
    noisy = encoded(500, 500, "GIF", "P")
    meta = probe_image(Ranges(noisy), limits=ProbeLimits(max_header_bytes=100_000))
    assert (meta.width_px, meta.frames, meta.frames_exact) == (500, 1, False)
    assert probe_image(Ranges(noisy)).frames_exact
    assert probe_image(Ranges(data)).frames == 3


def test_failing_storage_is_an_os_error_and_not_bad_media() -> None:
    with pytest.raises(OSError, match="Input/output error"):
        probe_image(BrokenDisk(encoded(8, 8)))


def test_missing_file_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        probe_image(tmp_path / "absent.png")


@pytest.mark.parametrize(
    ("data", "reason", "words"),
    [
        (b"", Reason.EMPTY_FILE, "0 bytes"),
        (b"<html>404</html>", Reason.UNKNOWN_FORMAT, "not an image"),
        (b'<?xml version="1.0"?><svg width="9" height="9"/>', Reason.UNKNOWN_FORMAT, "not an image"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", Reason.UNKNOWN_FORMAT, "not an image"),
        (b"\x00\x00\x00\x18ftypheic\x00\x00\x00\x00mif1heic", Reason.UNKNOWN_FORMAT, "HEIC"),
        (encoded(64, 64)[:20], Reason.TRUNCATED, "Truncated"),
        (encoded(64, 64, "JPEG")[:40], Reason.TRUNCATED, "Truncated"),
        (png_header(0, 5), Reason.CORRUPT, "PNG"),
    ],
)
def test_what_cannot_be_read_has_a_reason(data: bytes, reason: Reason, words: str) -> None:
    with pytest.raises(MediaError, match=words) as caught:
        probe_image(data, place="shard a.tar, key 0007, 0007.jpg")
    assert caught.value.reason is reason
    assert "at shard a.tar, key 0007, 0007.jpg" in str(caught.value)


@pytest.mark.parametrize("side", [11_000, 14_000, 20_000, 60_000])
def test_id02_bombs_are_refused_from_the_header_and_named(side: int, tmp_path: Path) -> None:
    # 11,000 px warns and 20,000 px fails inside Pillow; what counts is our own ceiling and our own message.
    path = tmp_path / "bomb.png"
    path.write_bytes(png_header(side, side))
    with pytest.raises(MediaError, match=r"bomb\.png") as caught:
        probe_image(path, limits=ProbeLimits(max_pixels=100_000_000))
    assert caught.value.reason is Reason.TOO_LARGE


def test_pixel_ceiling_is_ours_to_set() -> None:
    limits = ProbeLimits(max_pixels=5_000)
    assert probe_image(encoded(50, 100), limits=limits).width_px == 50
    with pytest.raises(MediaError, match="max_pixels=5000"):
        probe_image(encoded(51, 100), limits=limits)
    with pytest.raises(MediaError, match="max_side_px=49"):
        probe_image(encoded(50, 100), limits=ProbeLimits(max_side_px=49))
    with pytest.raises(MediaError, match="max_bytes=10"):
        probe_image(encoded(50, 100), limits=ProbeLimits(max_bytes=10))
    with pytest.raises(ValueError, match="max_frames=0"):
        ProbeLimits(max_frames=0)


@pytest.mark.parametrize(
    ("header", "size_px"),
    [
        (struct.pack("<I4H", 12, 70, 50, 1, 24), (70, 50)),
        (struct.pack("<IiiHH6I", 40, 70, 50, 1, 24, 0, 0, 0, 0, 0, 0), (70, 50)),
        (struct.pack("<IiiHH6I", 40, 70, -50, 1, 24, 0, 0, 0, 0, 0, 0), (70, 50)),
        (struct.pack("<IiiHH6I", 64, 70, 50, 1, 24, 0, 0, 0, 0, 0, 0) + bytes(24), (70, 50)),
        (
            struct.pack("<IiiHH6I", 108, 70, -50, 1, 32, 3, 0, 0, 0, 0, 0)
            + struct.pack("<4I", 0xFF0000, 0xFF00, 0xFF, 0xFF000000)
            + bytes(52),
            (70, 50),
        ),
        (
            struct.pack("<IiiHH6I", 124, 1, 1, 1, 16, 3, 0, 0, 0, 0, 0)
            + struct.pack("<4I", 0xF800, 0x7E0, 0x1F, 0)
            + bytes(68),
            (1, 1),
        ),
    ],
)
def test_bmp_headers_of_every_age(header: bytes, size_px: tuple[int, int]) -> None:
    file_header = b"BM" + struct.pack("<IHHI", 0, 0, 0, 14 + len(header))
    data = file_header + header + bytes(4 * 70 * 50)
    meta = probe_image(data)
    assert (meta.width_px, meta.height_px) == size_px
    with Image.open(io.BytesIO(data)) as image:
        assert (image.size, image.mode) == (size_px, meta.mode)
    bare = probe_image(header + bytes(4 * 70 * 50))
    assert (bare.width_px, bare.height_px, bare.format) == (*size_px, "DIB")


def test_a_gif_frame_beyond_the_screen_enlarges_it() -> None:
    data = bytearray(encoded(40, 30, "GIF", "L"))
    data[6:10] = struct.pack("<HH", 5, 7)
    meta = probe_image(bytes(data))
    with Image.open(io.BytesIO(bytes(data))) as image:
        image.load()
        assert (meta.width_px, meta.height_px) == image.size == (40, 30)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"\xff\x0a" + bytes(30), "JPEG XL"),
        (b"\0\0\0\x0cJXL \r\n\x87\n", "JPEG XL"),
        (b"\0\0\1\0\1\0" + bytes(30), "icon"),
        (b"%PDF-1.7", "PDF"),
        (b"8BPS\0\1", "Photoshop"),
        (b"\n<!DOCTYPE html><html>", "HTML"),
        (b'<svg xmlns="http://www.w3.org/2000/svg"/>', "SVG"),
        (b"version https://git-lfs.github.com/spec/v1\n", "LFS"),
        (b"RIFF\0\0\0\0AVI LIST", "not an image"),
        (b"\0" * 100, "not an image"),
        (b"P7\nWIDTH 3\n", "PAM"),
    ],
)
def test_other_files_are_named_where_their_first_bytes_say_what_they_are(data: bytes, words: str) -> None:
    with pytest.raises(MediaError, match=words) as caught:
        probe_image(data)
    assert caught.value.reason is Reason.UNKNOWN_FORMAT


def test_bmp_that_claims_billions_of_rows_is_too_large() -> None:
    data = bytearray(encoded(4, 4, "BMP"))
    data[22:26] = struct.pack("<i", 2_000_000_000)
    with pytest.raises(MediaError) as caught:
        probe_image(bytes(data))
    assert caught.value.reason is Reason.TOO_LARGE


def test_overlapping_threads_leave_the_warning_filters_as_they_were() -> None:
    before = list(warnings.filters)
    data = encoded(30, 30)
    threads = [threading.Thread(target=lambda: [probe_image(data) for _ in range(30)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert list(warnings.filters) == before


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "GIF", "BMP", "TIFF", "WEBP", "JPEG2000"])
def test_mutated_headers_give_a_size_or_a_reason_and_nothing_else(kind: str) -> None:
    rng = np.random.default_rng(7)
    original = encoded(40, 30, kind)
    refused = 0
    for _ in range(150):
        data = bytearray(original[: int(rng.integers(1, len(original) + 1))] if rng.random() < 0.3 else original)
        for position in rng.integers(0, min(len(data), 200), size=int(rng.integers(1, 6))):
            data[position] = int(rng.integers(0, 256))
        try:
            meta = probe_image(bytes(data))
        except MediaError:
            refused += 1
        else:
            assert 1 <= meta.width_px * meta.height_px <= ProbeLimits().max_pixels
    assert 0 < refused < 150


def test_every_reference_image_is_read_right_or_refused(shared_dir: Path) -> None:
    folder = shared_dir / "media"
    rows = [row for row in csv.DictReader((folder / "manifest.csv").read_text().splitlines()) if row["kind"] == "image"]
    assert len(rows) > 70
    # The header of these is fine; only their body is damaged.
    body_only = {"g_truncated_half.jpg": (640, 427), "i_pil_truncated_image.png": (640, 480)}
    for row in rows:
        path = folder / row["path"]
        if row["expect"] == "ok":
            meta = probe_image(path)
            assert (meta.width_px, meta.height_px) == (int(row["disp_w"]), int(row["disp_h"])), path.name
            assert (meta.format, meta.mode, meta.frames) == (row["format"], row["mode"], int(row["n_frames"])), (
                path.name
            )
        elif path.name in body_only:
            meta = probe_image(path)
            assert (meta.width_px, meta.height_px) == body_only[path.name]
        else:
            with pytest.raises(MediaError) as caught:
                probe_image(path)
            assert path.name in str(caught.value)
