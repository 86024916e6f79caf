"""The probe and the decoder agree: for every format that Pillow writes, in every mode and orientation."""

import csv
import io
import re
import struct
import warnings
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps, TiffImagePlugin

from dataloaders.counts import MediaKind
from dataloaders.decode import PlannedItem, decode_media
from dataloaders.errors import MediaError, Reason
from dataloaders.probe import ImageMeta, ProbeLimits, probe_image
from dataloaders.probe.image import read_header
from dataloaders.probe.reader import Window

MODES: dict[str, tuple[str, ...]] = {
    "JPEG": ("L", "RGB", "CMYK", "1"),
    "PNG": ("1", "L", "LA", "P", "RGB", "RGBA", "I;16"),
    "WEBP": ("L", "RGB", "RGBA", "LA", "P"),
    "GIF": ("1", "L", "P", "RGB", "RGBA"),
    "BMP": ("1", "L", "P", "RGB", "RGBA"),
    "DIB": ("1", "L", "P", "RGB"),
    "TIFF": ("1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr", "LAB", "I;16", "I;16B", "I", "F"),
    "JPEG2000": ("L", "LA", "RGB", "RGBA", "I;16"),
    "AVIF": ("L", "LA", "RGB", "RGBA", "P"),
    "PPM": ("1", "L", "RGB", "I", "F"),
}
OPTIONS: dict[str, tuple[dict[str, Any], ...]] = {
    "JPEG": (
        {},
        {"progressive": True},
        {"optimize": True, "quality": 95},
        {"subsampling": 0},
        {"restart_marker_rows": 1},
        {"comment": b"x" * 3000},
        {"icc_profile": bytes(200_000)},
        {"dpi": (300, 300)},
    ),
    "PNG": ({}, {"compress_level": 0}, {"icc_profile": bytes(50_000)}, {"dpi": (72, 72)}),
    "WEBP": ({}, {"lossless": True}, {"exact": True, "quality": 1}, {"icc_profile": bytes(5000)}),
    "GIF": ({}, {"interlace": 0}, {"comment": "c" * 600}),
    "TIFF": (
        {},
        {"compression": "tiff_lzw"},
        {"compression": "tiff_adobe_deflate"},
        {"compression": "packbits"},
        {"big_tiff": True},
        {"compression": "jpeg"},
        {"icc_profile": bytes(5000)},
    ),
    "JPEG2000": ({}, {"no_jp2": True}, {"tile_size": (16, 16)}, {"offset": (3, 5), "tile_offset": (1, 2)}),
    "AVIF": ({}, {"quality": 10}, {"subsampling": "4:4:4"}),
}
CASES = [
    (kind, mode, options) for kind, modes in MODES.items() for mode in modes for options in OPTIONS.get(kind, ({},))
]


def picture(mode: str, size_px: tuple[int, int] = (37, 21)) -> Image.Image:
    noise = np.random.default_rng(3).integers(0, 256, (size_px[1], size_px[0], 3), dtype=np.uint8)
    if mode in ("I;16", "I;16B", "I", "F"):
        return Image.fromarray(noise[..., 0].astype(np.uint16) * 200).convert("I").convert(mode)
    if mode == "LAB":
        return Image.fromarray(noise, mode=None).convert("RGB").convert("L").convert("RGB")
    return Image.fromarray(noise).convert(mode)


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def own_meta(data: bytes) -> ImageMeta:
    """The probe's answer; it must come from our own parser and not from Pillow."""
    with Window(data, limits=ProbeLimits(), place="") as window:
        read_header(window)
    return probe_image(data)


@contextmanager
def reference(data: bytes) -> Iterator[Image.Image]:
    """The image as Pillow opens it, whatever Pillow warns of."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Image.open(io.BytesIO(data)) as image:
            yield image


def shown_size(data: bytes) -> tuple[int, int]:
    """Size after decoding and turning as a reference loader does it."""
    with reference(data) as image:
        image.load()
        return ImageOps.exif_transpose(image).size


def conforms(data: bytes, meta: ImageMeta, *, apply_orientation: bool) -> bool:
    """Whether our decoder finds the probed size."""
    item = PlannedItem(
        kind=MediaKind.IMAGE,
        grid=(1, 4, 4),
        height_px=56,
        width_px=56,
        frames=1,
        frame_indices=None,
        source_height_px=meta.height_px,
        source_width_px=meta.width_px,
    )
    return not decode_media(data, item, apply_orientation=apply_orientation)[1].resized


def check(data: bytes) -> ImageMeta:
    """Probe, Pillow and our decoder say the same of a sound file."""
    meta = own_meta(data)
    with reference(data) as image:
        assert (meta.format, meta.mode) == (image.format, image.mode)
        assert (meta.frames, meta.frames_exact) == (getattr(image, "n_frames", 1), True)
    assert (meta.width_px, meta.height_px) == shown_size(data)
    assert conforms(data, meta, apply_orientation=True)
    assert conforms(data, probe_image(data, apply_orientation=False), apply_orientation=False)
    return meta


@pytest.mark.parametrize(("kind", "mode", "options"), CASES)
def test_every_format_and_mode_that_pillow_writes_is_probed_as_it_decodes(
    kind: str, mode: str, options: dict[str, Any]
) -> None:
    if kind == "TIFF" and options.get("compression") == "jpeg" and mode not in ("L", "RGB", "CMYK", "YCbCr"):
        pytest.skip("JPEG in TIFF holds photographs only")
    if options.get("big_tiff") and mode == "I;16B":
        pytest.skip("Pillow writes a big-endian BigTIFF, and cannot read it")
    try:
        data = encoded(picture(mode), kind, **options)
    except (OSError, ValueError) as error:
        pytest.skip(f"Pillow does not write it: {error}")
    meta = check(data)
    assert (meta.width_px, meta.height_px, meta.decodable) == (37, 21, True)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF", "AVIF", "MPO"])
@pytest.mark.parametrize("value", [*range(10), 65_535])
def test_orientation_is_that_of_the_decoder_and_invalid_ones_are_upright(kind: str, value: int) -> None:
    exif = Image.Exif()
    exif[0x010E], exif[0x010F], exif[0x0112] = "a description that lies outside the directory", "maker", value
    options = {"save_all": True, "append_images": [picture("RGB")]} if kind == "MPO" else {}
    if kind == "AVIF" and not 1 <= value <= 8:
        pytest.skip("AVIF has no invalid orientation")
    if kind == "TIFF":
        options["tiffinfo"] = {0x0112: value}
    data = encoded(picture("RGB"), kind, exif=exif, **options)
    meta = check(data)
    assert meta.orientation == (value if 1 <= value <= 8 else 1)
    assert (meta.width_px, meta.height_px) == ((21, 37) if 5 <= value <= 8 else (37, 21))
    assert meta.format == kind


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "TIFF", "MPO", "AVIF"])
@pytest.mark.parametrize("count", [2, 3, 25])
def test_frames_are_counted_as_the_decoder_counts_them(kind: str, count: int) -> None:
    pages = [picture("RGB").rotate(90 * (i % 4)) for i in range(count)]
    pages = [Image.eval(page, lambda value, shift=i: (value + 9 * shift) % 256) for i, page in enumerate(pages)]
    data = encoded(pages[0], kind, save_all=True, append_images=pages[1:])
    meta = check(data)
    assert (meta.frames, meta.format) == (count, kind)


def test_an_apng_with_a_default_image_outside_the_animation_counts_it() -> None:
    pages = [picture("RGB"), picture("RGB").rotate(90)]
    data = encoded(picture("L").convert("RGB"), "PNG", save_all=True, append_images=pages, default_image=True)
    assert check(data).frames == 3


# --- JPEG ---


def jpeg(*segments: bytes, mode: str = "RGB", at: int = 2) -> bytes:
    data = encoded(picture(mode), "JPEG")
    return data[:at] + b"".join(segments) + data[at:]


def segment(marker: int, payload: bytes) -> bytes:
    return bytes((0xFF, marker)) + struct.pack(">H", len(payload) + 2) + payload


def exif_block(value: int, order: str = "<", *, kind: int = 3, count: int = 1, before: int = 0, pad: int = 0) -> bytes:
    """A TIFF structure whose IFD0 has `before` other entries, then the orientation."""
    mark = b"II*\0" if order == "<" else b"MM\0*"
    entries = b"".join(struct.pack(order + "HHII", 0x0100 + i, 4, 1, 7) for i in range(before))
    packed = struct.pack(order + {3: "HH", 4: "I", 1: "B3x", 9: "i"}[kind], *((value, 0) if kind == 3 else (value,)))
    entries += struct.pack(order + "HHI", 0x0112, kind, count) + packed
    directory = struct.pack(order + "H", before + 1) + entries + bytes(4)
    return mark + struct.pack(order + "I", 8 + pad) + bytes(pad) + directory


def exif(value: int, **options: Any) -> bytes:
    return segment(0xE1, b"Exif\0\0" + exif_block(value, **options))


def xmp(text: str) -> bytes:
    return segment(0xE1, b"http://ns.adobe.com/xap/1.0/\0" + f"<x tiff:Orientation{text}/>".encode())


FILL = segment(0xED, bytes(65_000))
JPEGS: dict[str, tuple[bytes, int]] = {
    "exif big endian": (jpeg(exif(6, order=">")), 6),
    "exif as LONG": (jpeg(exif(8, kind=4)), 8),
    "exif as SLONG": (jpeg(exif(8, kind=9)), 8),
    "exif as BYTE is no number": (jpeg(exif(6, kind=1)), 1),
    "exif with many entries": (jpeg(exif(5, before=17)), 5),
    "exif directory beyond the first block": (jpeg(exif(7, pad=20_000)), 7),
    "exif prefix twice": (jpeg(segment(0xE1, b"Exif\0\0" * 2 + exif_block(6))), 6),
    "exif with several values": (jpeg(exif(6, count=2)), 6),
    "exif without data": (jpeg(segment(0xE1, b"Exif\0\0")), 1),
    "exif of garbage": (jpeg(segment(0xE1, b"Exif\0\0garbage!garbage!")), 1),
    "exif whose directory is outside": (jpeg(segment(0xE1, b"Exif\0\0II*\0\xff\xff\xff\x7f")), 1),
    "exif in two segments": (
        jpeg(segment(0xE1, b"Exif\0\0" + exif_block(6)[:20]), segment(0xE1, b"Exif\0\0" + exif_block(6)[20:])),
        6,
    ),
    "exif after megabytes of others": (jpeg(*[FILL] * 30, exif(6)), 6),
    "exif before megabytes of others": (jpeg(exif(6), *[FILL] * 30), 6),
    "xmp": (jpeg(xmp('="6"')), 6),
    "xmp as an element": (jpeg(xmp(">8<")), 8),
    "xmp invalid": (jpeg(xmp('="0"')), 1),
    "xmp loses to exif": (jpeg(xmp('="6"'), exif(3)), 3),
    "xmp loses to invalid exif": (jpeg(xmp('="6"'), exif(9)), 1),
    "xmp beside exif without orientation": (jpeg(xmp('="6"'), segment(0xE1, b"Exif\0\0II*\0\x08\0\0\0" + bytes(6))), 6),
    "padding and stray bytes": (jpeg(b"\xff\xff\xff" + exif(6), b"stray", b"\xff\0", b"\xff\xd0"), 6),
}


@pytest.mark.parametrize("name", JPEGS)
def test_jpeg_metadata_in_odd_places(name: str) -> None:
    data, orientation = JPEGS[name]
    assert check(data).orientation == orientation


def test_exif_between_frame_header_and_scan_counts() -> None:
    data = encoded(picture("RGB"), "JPEG")
    scan = data.index(b"\xff\xda")
    assert check(data[:scan] + exif(6) + data[scan:]).orientation == 6


def test_megabytes_of_segments_are_stepped_over_and_not_read() -> None:
    data = jpeg(*[FILL] * 60)

    class Ranges:
        size, fetched = len(data), 0

        def read(self, offset: int, size: int) -> bytes:
            self.fetched += size
            return data[offset : offset + size]

    reader = Ranges()
    meta = probe_image(reader)
    assert (meta.width_px, meta.height_px) == (37, 21)
    assert reader.fetched < reader.size // 3


def test_ultra_hdr_is_one_picture_with_a_gain_map_and_a_broken_mpf_index_is_a_jpeg() -> None:
    mpo = encoded(picture("RGB"), "MPO", save_all=True, append_images=[picture("RGB")])
    assert check(mpo).format == "MPO"
    gain = segment(0xE1, b'http://ns.adobe.com/xap/1.0/\0<x hdrgm:Version="1.0"/>')
    assert check(mpo[:2] + gain + mpo[2:]).format == "JPEG"
    at = mpo.index(b"MPF\0")
    for position in range(at + 4, at + 60):
        broken = bytearray(mpo)
        broken[position] ^= 0xFF
        with reference(bytes(broken)) as image:
            expected = image.format, getattr(image, "n_frames", 1)
        meta = own_meta(bytes(broken))
        assert (meta.format, meta.frames) == expected, position


@pytest.mark.parametrize(
    ("bits", "components", "reason"), [(12, 3, Reason.UNSUPPORTED_MEDIA), (8, 2, Reason.UNSUPPORTED_MEDIA)]
)
def test_jpegs_that_nothing_decodes_are_refused(bits: int, components: int, reason: Reason) -> None:
    frame = struct.pack(">BHHB", bits, 21, 37, components) + b"\1\x11\0" * components
    with pytest.raises(MediaError) as caught:
        probe_image(b"\xff\xd8" + segment(0xC1, frame) + segment(0xDA, b"\1\1\0\0\x3f\0"))
    assert caught.value.reason is reason


@pytest.mark.parametrize("marker", [0xC0, 0xC1, 0xC2, 0xC3, 0xC9, 0xCA])
def test_frame_headers_of_all_codings_give_the_size(marker: int) -> None:
    tables = (
        segment(0xC4, bytes(19)) * 20 + segment(0xDB, bytes(65)) * 4 + segment(0xCC, b"\0\0") + segment(0xDD, b"\0\1")
    )
    frame = segment(marker, struct.pack(">BHHB", 8, 21, 37, 4) + b"\1\x11\0" * 4)
    meta = own_meta(b"\xff\xd8" + tables + frame + segment(0xDA, b"\1\1\0\0\x3f\0"))
    assert (meta.width_px, meta.height_px, meta.mode) == (37, 21, "CMYK")


# --- PNG ---


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(*chunks: bytes, last: bool = False, mode: str = "RGB", **options: Any) -> bytes:
    data = encoded(picture(mode), "PNG", **options)
    at = len(data) - 12 if last else 33
    return data[:at] + b"".join(chunks) + data[at:]


XMP = b"XML:com.adobe.xmp\0"
PACKET = b'<x tiff:Orientation="6"/>'
MAGICK = b"\nexif\n      %d\n%s\n" % (26, exif_block(6).hex().encode())
PNGS: dict[str, tuple[bytes, int]] = {
    "eXIf": (png(chunk(b"eXIf", exif_block(6))), 6),
    "eXIf with the prefix of JPEG": (png(chunk(b"eXIf", b"Exif\0\0" + exif_block(6))), 6),
    "eXIf behind the pixels": (png(chunk(b"eXIf", exif_block(6)), last=True), 6),
    "iTXt": (png(chunk(b"iTXt", XMP + b"\0\0\0\0" + PACKET)), 6),
    "iTXt behind the pixels": (png(chunk(b"iTXt", XMP + b"\0\0\0\0" + PACKET), last=True), 6),
    "iTXt compressed": (png(chunk(b"iTXt", XMP + b"\1\0\0\0" + zlib.compress(PACKET))), 6),
    "tEXt of ImageMagick": (png(chunk(b"tEXt", b"Raw profile type exif\0" + MAGICK)), 6),
    "zTXt of ImageMagick": (png(chunk(b"zTXt", b"Raw profile type exif\0\0" + zlib.compress(MAGICK))), 6),
    "other texts": (
        png(chunk(b"tEXt", b"Comment\0tiff:Orientation=6"), chunk(b"zTXt", b"a\0\0" + zlib.compress(b"b"))),
        1,
    ),
    "eXIf in the pixels' tail without a check sum": (png(mode="L", compress_level=0), 1),
}


@pytest.mark.parametrize("name", PNGS)
def test_png_metadata_in_odd_places(name: str) -> None:
    data, orientation = PNGS[name]
    assert check(data).orientation == orientation


@pytest.mark.parametrize("order", ["RGB", "interlaced"])
def test_an_interlaced_png_has_the_size_of_its_header(order: str) -> None:
    data = png()
    if order == "interlaced":
        body = struct.pack(">IIBBBBB", 37, 21, 16, 2, 0, 0, 1)
        data = data[:8] + chunk(b"IHDR", body) + data[33:]
    meta = own_meta(data)
    assert (meta.width_px, meta.height_px, meta.mode) == (37, 21, "RGB")


def test_texts_and_profiles_are_not_inflated() -> None:
    bomb = zlib.compress(bytes(200_000_000), 9)
    for kind, head in (
        (b"zTXt", b"a\0\0"),
        (b"iCCP", b"a\0\0"),
        (b"iTXt", XMP + b"\1\0\0\0"),
        (b"iTXt", b"k\0\1\0\0\0"),
    ):
        meta = own_meta(png(chunk(kind, head + bomb)))
        assert (meta.width_px, meta.orientation) == (37, 1)


def test_a_chunk_is_not_taken_from_inside_the_pixels() -> None:
    fake = struct.pack(">I", 26) + b"eXIf" + exif_block(6) + b"nope"
    data = encoded(picture("RGB"), "PNG")
    at = data.index(b"IDAT")
    body = zlib.compress(b"".join(b"\0" + fake.ljust(37 * 3, b"\0") for _ in range(21)), 0)
    data = data[: at - 4] + chunk(b"IDAT", body) + data[-12:]
    assert check(data).orientation == 1


def test_a_png_of_ios_and_one_with_a_broken_check_sum_are_refused() -> None:
    data = png()
    cgbi = data[:8] + chunk(b"CgBI", b"\x50\0\x20\x02") + data[8:]
    broken = data[:29] + bytes((data[29] ^ 1,)) + data[30:]
    for case, reason in ((cgbi, Reason.UNSUPPORTED_MEDIA), (broken, Reason.CORRUPT)):
        with pytest.raises(MediaError) as caught:
            probe_image(case)
        assert caught.value.reason is reason


def test_an_apng_that_claims_more_frames_than_the_file_can_hold_is_not_believed() -> None:
    meta = own_meta(png(chunk(b"acTL", struct.pack(">II", 2_000_000_000, 0))))
    assert (meta.frames, meta.frames_exact) == (1, False)


# --- TIFF ---


def tiff(order: str, *, big: bool = False, side: str = "H", pages: int = 1, tiled: bool = False) -> bytes:
    """An 8-bit grey TIFF of 16 x 16 px with SHORT or LONG sides, in strips or tiles."""
    sides = {"H": 3, "I": 4}[side]
    tags = [(256, sides, 16), (257, sides, 16), (258, 3, 8), (259, 3, 1), (262, 3, 1)]
    tags += (
        [(322, 3, 16), (323, 3, 16), (324, 4, 0), (325, 4, 256)]
        if tiled
        else [(273, 4, 0), (278, 3, 16), (279, 4, 256)]
    )
    mark = (b"II" if order == "<" else b"MM") + struct.pack(order + "H", 43 if big else 42)
    header = mark + (struct.pack(order + "HHQ", 8, 0, 16) if big else struct.pack(order + "I", 8))
    out = bytearray(header)
    for page in range(pages):
        size = (8 + 20 * len(tags) + 8) if big else (2 + 12 * len(tags) + 4)
        pixels = len(out) + size
        following = pixels + 256 if page + 1 < pages else 0
        out += struct.pack(order + ("Q" if big else "H"), len(tags))
        for tag, kind, value in tags:
            number = pixels if tag in (273, 324) else value
            packed = struct.pack(order + {3: "H", 4: "I"}[kind], number).ljust(8 if big else 4, b"\0")
            out += struct.pack(order + ("HHQ" if big else "HHI"), tag, kind, 1) + packed
        out += struct.pack(order + ("Q" if big else "I"), following) + bytes(256)
    return bytes(out)


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("big", [False, True])
@pytest.mark.parametrize("side", ["H", "I"])
@pytest.mark.parametrize("pages", [1, 4])
@pytest.mark.parametrize("tiled", [False, True])
def test_tiff_of_either_byte_order_and_width(order: str, big: bool, side: str, pages: int, tiled: bool) -> None:
    data = tiff(order, big=big, side=side, pages=pages, tiled=tiled)
    meta = own_meta(data)
    assert (meta.width_px, meta.height_px, meta.mode, meta.frames, meta.frames_exact) == (16, 16, "L", pages, True)
    assert meta.decodable is (not big or order == "<")
    if meta.decodable:
        check(data)


def test_a_chain_of_pages_that_runs_in_a_circle_or_off_the_file_ends() -> None:
    data = bytearray(tiff("<", pages=3))
    third = 8 + 2 * (2 + 12 * 8 + 4 + 256)
    link = third + 2 + 12 * 8
    for target, expected in (
        (8, (3, True)),
        (third, (3, True)),
        (len(data) + 5, (3, False)),
        (len(data) - 1, (3, False)),
    ):
        data[link : link + 4] = struct.pack("<I", target)
        meta = own_meta(bytes(data))
        assert (meta.frames, meta.frames_exact) == expected


def test_a_tiff_is_turned_by_its_reader_whatever_the_switch_says() -> None:
    data = encoded(picture("RGB"), "TIFF", tiffinfo={0x0112: 6})
    for switch in (True, False):
        meta = probe_image(data, apply_orientation=switch)
        assert (meta.width_px, meta.height_px, meta.orientation) == (21, 37, 6)


@pytest.mark.parametrize("compression", ["raw", "tiff_lzw"])
def test_a_tiff_with_orientation_in_xmp_alone_is_turned_as_pillow_turns_it(compression: str) -> None:
    info = TiffImagePlugin.ImageFileDirectory_v2()
    info[700] = b'<x tiff:Orientation="6"/>'
    info.tagtype[700] = 1
    check(encoded(picture("RGB"), "TIFF", tiffinfo=info, compression=compression))


# --- the reference collection ---


def test_every_sound_reference_image_is_probed_as_it_is_shown_and_decoded(shared_dir: Path) -> None:
    folder = shared_dir / "media"
    rows = [row for row in csv.DictReader((folder / "manifest.csv").read_text().splitlines()) if row["kind"] == "image"]
    sound = [folder / row["path"] for row in rows if row["expect"] == "ok"]
    assert len(sound) > 60
    for path in sound:
        data = path.read_bytes()
        meta = own_meta(data)
        if meta.width_px * meta.height_px < 4_000_000:
            assert (meta.width_px, meta.height_px) == shown_size(data), path.name
            assert conforms(data, meta, apply_orientation=True), path.name


@pytest.mark.parametrize("kind", sorted(MODES))
def test_a_file_cut_anywhere_is_refused_with_a_reason_or_read_right(kind: str) -> None:
    data = encoded(picture("RGB", (9, 7)), kind)
    for end in range(len(data)):
        error, meta = probed(data[:end])
        if meta is None:
            assert error is not None
            assert error.reason in (Reason.TRUNCATED, Reason.EMPTY_FILE, Reason.UNKNOWN_FORMAT, Reason.CORRUPT), end
            assert re.search(r"Truncated|0 bytes|not an image|canvas|without|ends", str(error)), str(error)
        else:
            assert (meta.width_px, meta.height_px) == (9, 7), end


def probed(data: bytes) -> tuple[MediaError | None, ImageMeta | None]:
    try:
        return None, probe_image(data)
    except MediaError as error:
        return error, None
