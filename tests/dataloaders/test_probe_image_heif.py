"""AVIF and HEIC headers, built box by box: which item counts, and how it is turned."""

import io
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dataloaders.errors import MediaError, Reason
from dataloaders.estimators import Qwen25VLEstimator
from dataloaders.probe import ProbeLimits, probe_image
from dataloaders.scan import scan_source
from dataloaders.tar_source import TarSource


def box(kind: bytes, *parts: bytes, long: bool = False) -> bytes:
    data = b"".join(parts)
    return (
        struct.pack(">I", 1) + kind + struct.pack(">Q", len(data) + 16) + data
        if long
        else (struct.pack(">I", len(data) + 8) + kind + data)
    )


def full(kind: bytes, *parts: bytes, version: int = 0, flags: int = 0) -> bytes:
    return box(kind, struct.pack(">I", version << 24 | flags), *parts)


def ispe(width_px: int, height_px: int) -> bytes:
    return full(b"ispe", struct.pack(">II", width_px, height_px))


def clap(width: tuple[int, int], height: tuple[int, int]) -> bytes:
    return box(b"clap", struct.pack(">8I", *width, *height, 0, 1, 0, 1))


IROT = [box(b"irot", bytes((angle,))) for angle in range(4)]
IMIR = [box(b"imir", bytes((axis,))) for axis in range(2)]
ALPHA = full(b"auxC", b"urn:mpeg:mpegB:cicp:systems:auxiliary:alpha\0")


def heif(
    properties: list[bytes],
    owners: dict[int, list[int]],
    *,
    primary: int = 1,
    brands: tuple[bytes, ...] = (b"heic", b"mif1", b"heic"),
    references: bytes = b"",
    wide: bool = False,
    before: bytes = b"",
    long: bool = False,
) -> bytes:
    """A file without pixels. `owners`: item -> its properties, numbered from 1; `wide`: 32-bit ids, 15-bit numbers."""
    entries = [struct.pack(">I", len(owners))]
    for item, numbers in owners.items():
        entries.append(struct.pack(">IB" if wide else ">HB", item, len(numbers)))
        entries += [struct.pack(">H", 0x8000 | n) if wide else bytes((0x80 | n,)) for n in numbers]
    ipma = full(b"ipma", *entries, version=int(wide), flags=int(wide))
    children = (
        full(b"hdlr", bytes(4), b"pict", bytes(13)),
        full(b"pitm", struct.pack(">I" if wide else ">H", primary), version=int(wide)),
        references,
        box(b"iprp", box(b"ipco", *properties), ipma),
    )
    ftyp = box(b"ftyp", brands[0], bytes(4), *brands[1:])
    return ftyp + before + box(b"meta", bytes(4), *children, long=long) + box(b"mdat", bytes(100))


def iref(kind: bytes, origin: int, *to: int) -> bytes:
    return box(kind, struct.pack(f">HH{len(to)}H", origin, len(to), *to))


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize("before", [b"", box(b"free", bytes(70_000)), box(b"mdat", bytes(200_000))])
def test_the_size_is_that_of_the_primary_item_and_not_of_a_tile_or_thumbnail(
    wide: bool, long: bool, before: bytes
) -> None:
    properties = [ispe(512, 512), ispe(320, 240), ispe(4032, 3024), IROT[3]]
    owners = {1: [1], 2: [1], 49: [3, 4], 50: [2, 4]}
    references = full(b"iref", iref(b"dimg", 49, 1, 2), iref(b"thmb", 50, 49))
    data = heif(properties, owners, primary=49, wide=wide, references=references, before=before, long=long)
    meta = probe_image(data)
    assert (meta.width_px, meta.height_px, meta.orientation, meta.format) == (3024, 4032, 6, "HEIF")
    stored = probe_image(data, apply_orientation=False)
    assert (stored.width_px, stored.height_px, stored.orientation) == (4032, 3024, 6)


@pytest.mark.parametrize("brand", [b"heic", b"heix", b"heim", b"heis", b"mif1", b"msf1", b"hevc"])
def test_heic_gives_its_size_and_says_that_nothing_decodes_it(brand: bytes) -> None:
    meta = probe_image(heif([ispe(64, 48)], {1: [1]}, brands=(brand, b"mif1")))
    assert (meta.width_px, meta.height_px, meta.format, meta.frames) == (64, 48, "HEIF", 1)
    assert meta.decodable is ("HEIF" in Image.OPEN)


def turned(pixels: Any, turns: int, axis: int | None) -> Any:
    """Pixels as ISO/IEC 23008-12 says: quarter turns counterclockwise, then the mirror (0: top and bottom swap)."""
    pixels = np.rot90(pixels, turns)
    return pixels if axis is None else pixels[::-1] if axis == 0 else pixels[:, ::-1]


@pytest.mark.parametrize("turns", range(4))
@pytest.mark.parametrize("axis", [None, 0, 1])
def test_irot_then_imir_are_the_exif_orientation_with_the_same_effect(turns: int, axis: int | None) -> None:
    extra = [IROT[turns]] + ([] if axis is None else [IMIR[axis]])
    numbers = list(range(1, len(extra) + 2))
    meta = probe_image(heif([ispe(60, 40), *extra], {1: numbers}))
    pixels = np.arange(6, dtype=np.uint8).reshape(2, 3)
    exif = Image.Exif()
    exif[0x0112] = meta.orientation
    image = Image.fromarray(pixels)
    image.info["exif"] = exif.tobytes()
    from PIL import ImageOps

    assert np.array_equal(np.asarray(ImageOps.exif_transpose(image)), turned(pixels, turns, axis))
    assert (meta.width_px, meta.height_px) == ((40, 60) if turns % 2 else (60, 40))


def test_clap_cuts_a_heic_but_not_an_avif() -> None:
    properties, owners = [ispe(1440, 960), clap((1436, 1), (1914, 2)), IROT[1]], {1: [1, 2, 3]}
    meta = probe_image(heif(properties, owners))
    assert (meta.width_px, meta.height_px) == (957, 1436)
    meta = probe_image(heif(properties, owners, brands=(b"avif", b"mif1", b"avif")))
    assert (meta.width_px, meta.height_px, meta.format) == (960, 1440, "AVIF")
    for nonsense in (clap((9999, 1), (10, 1)), clap((10, 0), (10, 1)), clap((0, 1), (0, 1))):
        meta = probe_image(heif([ispe(1440, 960), nonsense], {1: [1, 2]}))
        assert (meta.width_px, meta.height_px) == (1440, 960)


def test_alpha_is_an_auxiliary_item_of_the_primary_one() -> None:
    properties, owners = [ispe(30, 20), ALPHA], {1: [1], 2: [1, 2]}
    plain = probe_image(heif(properties, owners))
    seen = probe_image(heif(properties, owners, references=full(b"iref", iref(b"auxl", 2, 1))))
    other = probe_image(heif(properties, owners, references=full(b"iref", iref(b"auxl", 2, 7))))
    assert (plain.mode, seen.mode, other.mode) == ("RGB", "RGBA", "RGB")


def test_a_long_chain_of_items_is_read() -> None:
    owners = {item: [1] for item in range(1, 3000)} | {3000: [2]}
    meta = probe_image(heif([ispe(512, 512), ispe(8064, 6048)], owners, primary=3000))
    assert (meta.width_px, meta.height_px) == (8064, 6048)


def test_a_sequence_has_the_size_and_the_samples_of_its_track() -> None:
    pages = [Image.new("RGB", (40, 24), (30 * i, 0, 0)) for i in range(6)]
    out = io.BytesIO()
    pages[0].save(out, "AVIF", save_all=True, append_images=pages[1:])
    data = out.getvalue()
    assert data[8:12] == b"avis"
    meta = probe_image(data)
    assert (meta.width_px, meta.height_px, meta.frames, meta.frames_exact) == (40, 24, 6, True)
    at = data.index(b"stsz") + 12
    lying = data[:at] + b"\xff\xff\xff\xff" + data[at + 4 :]
    assert (probe_image(lying).frames, probe_image(lying).frames_exact) == (1, False)
    still = data[:8] + b"avif" + data[12:]  # the same file, asked for as a still picture
    assert probe_image(still).frames == 1


@pytest.mark.parametrize(
    ("data", "reason", "words"),
    [
        (heif([ispe(64, 48)], {1: [1]}, brands=(b"isom", b"mp42")), Reason.UNKNOWN_FORMAT, "video"),
        (heif([ispe(64, 48)], {1: [1]}, brands=(b"crx ", b"isom")), Reason.UNKNOWN_FORMAT, "crx"),
        (heif([ispe(64, 48)], {1: [1]}, primary=2), Reason.CORRUPT, "item 2 has no size"),
        (heif([ispe(64, 48)], {1: [9]}), Reason.CORRUPT, "no size"),
        (heif([ispe(0, 48)], {1: [1]}), Reason.CORRUPT, "0x48"),
        (heif([ispe(2**31, 48)], {1: [1]}), Reason.TOO_LARGE, "2147483648x48"),
        (heif([ispe(64, 48)], {1: [1]})[:90], Reason.TRUNCATED, "meta"),
        (box(b"ftyp", b"heic", bytes(4)), Reason.UNKNOWN_FORMAT, "HEIC"),
        (box(b"ftyp", b"avif", bytes(4)) + b"\0\0\0\1free\0\0\0\0\0\0\0\1", Reason.CORRUPT, "free"),
    ],
)
def test_what_cannot_be_used_is_refused_with_a_reason(data: bytes, reason: Reason, words: str) -> None:
    with pytest.raises(MediaError, match=words) as caught:
        probe_image(data)
    assert caught.value.reason is reason


def test_nested_and_repeated_boxes_end_in_bounded_time() -> None:
    nested = b""
    for _ in range(20_000):
        nested = struct.pack(">I", len(nested) + 8)[:4] + b"meta" + nested[:60_000]
    many = box(b"ftyp", b"heic", bytes(4)) + box(b"free") * 400_000
    zero = box(b"ftyp", b"heic", bytes(4)) + b"\0\0\0\0meta" + bytes(1000)
    for data in (box(b"ftyp", b"heic", bytes(4)) + nested, many, zero):
        with pytest.raises(MediaError):
            probe_image(data, limits=ProbeLimits(max_header_bytes=1 << 20))


def test_a_file_of_known_size_that_nothing_decodes_is_refused_by_the_scan(
    tmp_path: Path, write_shard: Callable[..., Path], chat_json: Callable[..., bytes]
) -> None:
    photo = heif([ispe(640, 480)], {1: [1]})
    if probe_image(photo).decodable:
        pytest.skip("a plug-in for HEIC is installed")
    shard = write_shard(tmp_path / "a.tar", [("0.json", chat_json("<image>?", "Yes.")), ("0.heic", photo)])
    (bad,) = scan_source(TarSource(str(shard)), Qwen25VLEstimator()).bad
    assert bad.reason == "unsupported_media"
    assert "640x480 px, but nothing here decodes HEIF" in bad.message
