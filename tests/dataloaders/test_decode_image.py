"""Images: every mode and format that Pillow opens comes out as 3 x 8 bits by the stated rules, or raises."""

import io
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image, ImageFile, features

from dataloaders.counts import MediaKind
from dataloaders.decode import PixelConfig, PlannedItem, decode_image
from dataloaders.decode_image import to_rgb
from dataloaders.errors import MediaError, Reason
from dataloaders.probe import ProbeLimits, probe_image

RAW = PixelConfig(mean=(0.0, 0.0, 0.0), std=(1 / 255, 1 / 255, 1 / 255))
ITEM = PlannedItem(kind=MediaKind.IMAGE, grid=(1, 2, 2), height_px=28, width_px=28)


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def noise(mode: str = "RGB") -> Image.Image:
    rng = np.random.default_rng(4)
    return Image.fromarray(rng.integers(0, 256, (60, 90, 4), dtype=np.uint8)).convert(mode)


def colour(data: bytes) -> tuple[int, ...]:
    """Mean (red, green, blue) of the decoded image."""
    patches: NDArray[np.float32] = decode_image(data, ITEM, pixels=RAW)
    return tuple(round(float(value)) for value in patches.reshape(4, 3, -1).mean(axis=(0, 2)))


def flat(mode: str, value: Any) -> Image.Image:
    return Image.new(mode, (28, 28), value)


PLAIN = {
    "1": (flat("1", 1), (255, 255, 255)),
    "L": (flat("L", 90), (90, 90, 90)),
    "LA": (flat("LA", (90, 255)), (90, 90, 90)),
    "P": (flat("RGB", (10, 200, 30)).convert("P", palette=Image.Palette.ADAPTIVE), (10, 200, 30)),
    "PA": (flat("RGBA", (10, 200, 30, 255)).convert("PA"), (10, 200, 30)),
    "RGB": (flat("RGB", (10, 200, 30)), (10, 200, 30)),
    "RGBX": (flat("RGBX", (10, 200, 30, 7)), (10, 200, 30)),
    "RGBA": (flat("RGBA", (10, 200, 30, 255)), (10, 200, 30)),
    "RGBa": (flat("RGBa", (10, 200, 30, 255)), (10, 200, 30)),
    "CMYK": (flat("CMYK", (0, 255, 255, 0)), (255, 0, 0)),
    "YCbCr": (flat("YCbCr", (76, 85, 255)), (254, 0, 0)),
    "HSV": (flat("HSV", (85, 255, 200)), (0, 200, 0)),
    "F": (flat("F", 90.4), (90, 90, 90)),
    "I": (flat("I", 0x5A00), (90, 90, 90)),
    "I;16": (flat("I;16", 0x5AFF), (90, 90, 90)),
    "I;16B": (flat("I;16B", 0x5AFF), (90, 90, 90)),
}


@pytest.mark.parametrize("mode", PLAIN)
def test_every_mode_comes_out_as_its_colour(mode: str) -> None:
    image, expected = PLAIN[mode]
    shown = to_rgb(image)
    assert (shown.mode, shown.size) == ("RGB", (28, 28))
    assert np.abs(np.asarray(shown, dtype=int) - np.array(expected)).max() <= 2


def test_lab_comes_out_as_its_colour() -> None:
    if not features.check("littlecms2"):
        pytest.skip("Pillow without littlecms2")
    grey = np.asarray(to_rgb(flat("LAB", (137, 128, 128))), dtype=int)[0, 0]  # L = 54 of 100, no colour
    assert np.abs(grey - 128).max() <= 4


@pytest.mark.parametrize(
    ("image", "text"),
    [(flat("I", 70_000), "70000"), (flat("I", -1), "-1 to -1")],
)
def test_pixels_without_an_agreed_white_are_refused(image: Image.Image, text: str) -> None:
    with pytest.raises(MediaError, match=text) as caught:
        decode_image(encoded(image, "TIFF"), ITEM, place="shard a.tar, key 3")
    assert caught.value.reason is Reason.UNSUPPORTED_MEDIA
    assert "shard a.tar, key 3" in str(caught.value)


HALF = [
    ("RGBA in PNG", encoded(flat("RGBA", (0, 0, 0, 128)), "PNG"), (127, 127, 127)),
    ("RGBA in WebP", encoded(flat("RGBA", (0, 0, 0, 128)), "WEBP", lossless=True), (127, 127, 127)),
    ("LA in PNG", encoded(flat("LA", (0, 128)), "PNG"), (127, 127, 127)),
    ("one grey", encoded(flat("L", 7), "PNG", transparency=7), (255, 255, 255)),
    ("one colour", encoded(flat("RGB", (7, 8, 9)), "PNG", transparency=(7, 8, 9)), (255, 255, 255)),
    ("another colour", encoded(flat("RGB", (7, 8, 9)), "PNG", transparency=(7, 8, 8)), (7, 8, 9)),
    ("one of a palette", encoded(flat("P", 0), "PNG", transparency=0), (255, 255, 255)),
    ("half of a palette", encoded(flat("P", 0), "PNG", transparency=bytes([128])), (127, 127, 127)),
    ("one of a GIF", encoded(flat("P", 0), "GIF", transparency=0), (255, 255, 255)),
    ("one 16-bit grey", encoded(flat("I;16", 0x0700), "PNG", transparency=0x0700), (255, 255, 255)),
]


@pytest.mark.parametrize(("what", "data", "expected"), HALF, ids=[row[0] for row in HALF])
def test_transparency_of_any_kind_lies_on_white(what: str, data: bytes, expected: tuple[int, ...]) -> None:
    assert np.abs(np.array(colour(data)) - np.array(expected)).max() <= 2, what


def test_cmyk_of_adobe_is_not_inverted(shared_dir: Path) -> None:
    # Pillow writes CMYK JPEG as Adobe does, inverted and marked so.
    assert np.abs(np.array(colour(encoded(flat("CMYK", (0, 255, 255, 0)), "JPEG"))) - (255, 0, 0)).max() <= 3
    data = (shared_dir / "media" / "images" / "i_pil_pil_sample_cmyk.jpg").read_bytes()
    red, green, blue = colour(data)  # red letters on black; inverted: cyan ones on white
    assert red > 2 * max(green, blue)
    assert red < 60


def test_the_first_page_of_a_document_is_taken() -> None:
    pages = [flat("RGB", (250, 0, 0)), flat("RGB", (0, 0, 250))]
    for kind in ("TIFF", "GIF", "PNG"):
        assert colour(encoded(pages[0], kind, save_all=True, append_images=pages[1:])) == (250, 0, 0)


FORMATS = [
    ("JPEG", {}),
    ("JPEG", {"progressive": True}),
    ("PNG", {}),
    ("WEBP", {}),
    ("WEBP", {"lossless": True}),
    ("GIF", {}),
    ("BMP", {}),
    ("TIFF", {}),
    ("TIFF", {"compression": "tiff_lzw"}),
    ("PPM", {}),
    ("JPEG2000", {}),
    ("AVIF", {}),
]


@pytest.mark.parametrize(("kind", "options"), FORMATS)
@pytest.mark.parametrize("tolerant", [False, True])
def test_id01_a_truncated_image_of_any_format_raises(
    kind: str, options: dict[str, Any], tolerant: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        data = encoded(noise(), kind, **options)
    except (OSError, KeyError):
        pytest.skip(f"Pillow without {kind}")
    # What many training scripts set, so that damaged images turn grey below.
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", tolerant)
    assert len(decode_image(data, ITEM)) == 4
    for share in (0.3, 0.6, 0.95):
        with pytest.raises(MediaError, match="key 1") as caught:
            decode_image(data[: int(share * len(data))], ITEM, place="shard z.tar, key 1")
        assert caught.value.reason in (Reason.TRUNCATED, Reason.CORRUPT)
    assert ImageFile.LOAD_TRUNCATED_IMAGES is tolerant


def test_the_switch_of_other_packages_is_put_back_when_threads_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    data, faults = encoded(noise(), "JPEG"), []

    def decode() -> None:
        for _ in range(20):
            try:
                decode_image(data[: len(data) // 2], ITEM)
                faults.append("a cut image was decoded")
            except MediaError:
                pass

    threads = [threading.Thread(target=decode) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == []
    assert ImageFile.LOAD_TRUNCATED_IMAGES is True


@pytest.mark.parametrize(("kind", "options"), FORMATS)
def test_id02_the_pixel_ceiling_holds_from_the_header(
    kind: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        data = encoded(noise(), kind, **options)
    except (OSError, KeyError):
        pytest.skip(f"Pillow without {kind}")
    monkeypatch.setattr(Image.Image, "load", lambda self: pytest.fail("decoded"))
    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda self: pytest.fail("decoded"))
    limits = ProbeLimits(max_pixels=90 * 60 - 1)
    for judge in (lambda: decode_image(data, ITEM, limits=limits, place="key 9"), lambda: probe(data, limits)):
        with pytest.raises(MediaError, match="90x60") as caught:
            judge()
        assert caught.value.reason is Reason.TOO_LARGE
        assert "key 9" in str(caught.value)


def probe(data: bytes, limits: ProbeLimits) -> object:
    return probe_image(data, limits=limits, place="key 9")


def test_floats_are_clipped_and_not_a_number_is_black() -> None:
    values = np.array([[-5.0, 300.0, np.nan, np.inf]], dtype=np.float32)
    assert np.asarray(to_rgb(Image.fromarray(values)))[0, :, 0].tolist() == [0, 255, 0, 255]
