"""Which parser reads an image: told from its first bytes, never from its name."""

from collections.abc import Callable
from typing import TypeAlias

from dataloaders.probe.image_bmp import HEADER_SIZES, read_bmp, read_dib
from dataloaders.probe.image_gif import read_gif
from dataloaders.probe.image_header import ImageHeader
from dataloaders.probe.image_isobmff import read_isobmff
from dataloaders.probe.image_jpeg import read_jpeg
from dataloaders.probe.image_jpeg2000 import read_codestream, read_jp2
from dataloaders.probe.image_png import read_png
from dataloaders.probe.image_pnm import read_pnm
from dataloaders.probe.image_tiff import read_tiff
from dataloaders.probe.image_webp import read_webp
from dataloaders.probe.reader import Window

Parser: TypeAlias = Callable[[Window], ImageHeader]

_BY_START: tuple[tuple[bytes, Parser], ...] = (
    (b"\x89PNG\r\n\x1a\n", read_png),
    (b"GIF87a", read_gif),
    (b"GIF89a", read_gif),
    (b"BM", read_bmp),
    (b"II*\0", read_tiff),
    (b"MM\0*", read_tiff),
    (b"II\0*", read_tiff),
    (b"MM*\0", read_tiff),
    (b"II+\0", read_tiff),
    (b"MM\0+", read_tiff),
    (b"\0\0\0\x0cjP  \r\n\x87\n", read_jp2),
    (b"\xff\x4f\xff\x51", read_codestream),
    *((size.to_bytes(4, "little"), read_dib) for size in HEADER_SIZES),
)
# Frequent finds among files that are called images, for the message.
_FOREIGN: tuple[tuple[bytes, str], ...] = (
    (b"\xff\x0a", "JPEG XL"),
    (b"\0\0\0\x0cJXL ", "JPEG XL"),
    (b"II\xbc\x01", "JPEG XR"),
    (b"\0\0\1\0", "a Windows icon"),
    (b"\0\0\2\0", "a Windows cursor"),
    (b"8BPS", "a Photoshop document"),
    (b"%PDF", "a PDF document"),
    (b"%!PS", "PostScript"),
    (b"\xc5\xd0\xd3\xc6", "PostScript"),
    (b"v/1\x01", "OpenEXR"),
    (b"#?RADIANCE", "Radiance HDR"),
    (b"DDS ", "a DirectDraw surface"),
    (b"qoif", "QOI"),
    (b"P7", "PAM"),
    (b"\x8aMNG", "MNG"),
    (b"\x8bJNG", "JNG"),
    (b"\x1f\x8b", "gzip"),
    (b"PK\x03\x04", "a zip archive"),
    (b"version https://git-lfs", "a Git LFS pointer"),
)


def parser_for(head: bytes) -> Parser | None:
    """The parser for a file that begins with `head`; None when it is no image that can be decoded."""
    if head[:3] == b"\xff\xd8\xff":
        return read_jpeg
    if head[:4] == b"RIFF":
        return read_webp if head[8:12] == b"WEBP" else None
    if head[4:8] == b"ftyp":
        return read_isobmff
    for start, parser in _BY_START:
        if head.startswith(start):
            return parser
    if head[:1] == b"P" and head[1:2] in b"0123456fy" and len(head) > 2:
        return read_pnm
    return None


def foreign_name(head: bytes) -> str:
    """What a file is that no parser reads, where its first bytes say so; "HEIC" for ISO media of its brands."""
    if head[4:8] == b"ftyp" and head[8:11] in (b"hei", b"hev", b"mif", b"msf"):
        return "HEIC"
    for start, name in _FOREIGN:
        if head.startswith(start):
            return name
    text = head.lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if b"<svg" in text:
        return "SVG"
    if text.startswith((b"<!doctype html", b"<html", b"<head", b"<body")):
        return "an HTML page"
    return "XML or SVG" if text.startswith(b"<?xml") else "JSON" if text.startswith(b"{") else ""
