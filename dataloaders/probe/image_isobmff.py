"""AVIF and HEIC headers: the primary item of an ISO media file, and the first track of an image sequence.

    ftyp brands | meta: pitm (which item) iinf iref iprp: ipco (properties) ipma (item -> properties) | mdat
                | moov: trak: tkhd (size) mdia: hdlr minf: stbl: stsd stsz (frames)             sequences (avis, hevc)

An item's size is its `ispe` property; that of a picture made of tiles (`grid`) is the whole picture's. It is turned by
`irot` and mirrored by `imir`, and by nothing else: EXIF and XMP inside are for information (ISO/IEC 23008-12).
HEIC is also cut to `clap`, as HEIC decoders do and libavif does not. Boxes are walked level by level over bounded
numbers, never recursively.
"""

from collections.abc import Iterator

from dataloaders.errors import MediaError, Reason
from dataloaders.probe.image_header import ImageHeader
from dataloaders.probe.reader import Window

_MAX_TOP_BOXES = 256
_MAX_BOXES = 20_000
_MAX_META_BYTES = 16 << 20
_AVIF = frozenset({b"avif", b"avis"})
_HEIF = frozenset(
    {b"mif1", b"mif2", b"msf1", b"miaf", b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"hevm", b"hevs"}
)
_ALPHA = (b"urn:mpeg:mpegB:cicp:systems:auxiliary:alpha", b"urn:mpeg:hevc:2015:auxid:1")
# (quarter turns counterclockwise, mirror axis or None) -> EXIF orientation; mirroring comes after turning.
_ORIENTATIONS = {
    (0, None): 1,
    (0, 0): 4,
    (0, 1): 2,
    (1, None): 8,
    (1, 0): 5,
    (1, 1): 7,
    (2, None): 3,
    (2, 0): 2,
    (2, 1): 4,
    (3, None): 6,
    (3, 0): 7,
    (3, 1): 5,
}


def read_isobmff(window: Window) -> ImageHeader:
    """Header of an AVIF or HEIC file.

    Raises:
        MediaError: `truncated`, `corrupt`, or `unknown_format` for other ISO media files, which are videos.
    """
    length = int.from_bytes(window.at(0, 16)[:4], "big")
    brands = window.peek(8, min(max(length - 8, 4), 1024))
    major, known = brands[:4], {brands[i : i + 4] for i in (0, *range(8, len(brands) - 3, 4))}
    name = "AVIF" if known & _AVIF else "HEIF" if known & _HEIF else ""
    if not name:
        raise MediaError(
            Reason.UNKNOWN_FORMAT,
            f"not an image: an ISO media file of brand {major!r}, as videos have",
            place=window.place,
            remedy="Load it as a video, or remove it.",
        )
    meta, moov = _top_boxes(window)
    if moov is not None and (meta is None or major in (b"avis", b"hevc", b"msf1")):
        track = _sequence(window, name, window.at(moov[0], moov[1] - moov[0]))
        if track is not None:
            return track
    if meta is None:
        raise MediaError(
            Reason.UNKNOWN_FORMAT,
            f"not an image: a {'HEIC' if name == 'HEIF' else name} file without a picture (no meta box)",
            place=window.place,
            remedy="Remove or replace the file.",
        )
    return _item(window, name, window.at(meta[0], meta[1] - meta[0]))


def boxes(data: bytes, start: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    """(type, payload start, payload end) of the boxes in data[start:end]; ends at the first impossible size."""
    for _ in range(_MAX_BOXES):
        if start + 8 > end:
            return
        length, kind, payload = int.from_bytes(data[start : start + 4], "big"), data[start + 4 : start + 8], start + 8
        if length == 1 and payload + 8 <= end:
            length, payload = int.from_bytes(data[payload : payload + 8], "big"), payload + 8
        elif length == 0:
            length = end - start
        if start + length < payload or start + length > end:
            return
        yield kind, payload, start + length
        start += length


def _top_boxes(window: Window) -> tuple[tuple[int, int] | None, tuple[int, int] | None]:
    """(start, end) of the payloads of `meta` and `moov`."""
    found: dict[bytes, tuple[int, int]] = {}
    position = 0
    for _ in range(_MAX_TOP_BOXES):
        head = window.peek(position, 16)
        if len(head) < 8:
            break
        length, kind, start = int.from_bytes(head[:4], "big"), head[4:8], position + 8
        if length == 1 and len(head) == 16:
            length, start = int.from_bytes(head[8:], "big"), position + 16
        end = window.size if length == 0 else position + length
        if end < start:
            raise window.corrupt(f"a box {kind!r} of {length} bytes")
        if kind in (b"meta", b"moov") and kind not in found:
            if end > window.size:
                raise window.truncated(f"the {kind.decode()} box")
            if end - start > _MAX_META_BYTES:
                raise window.corrupt(f"a {kind.decode()} box of {end - start} bytes")
            found[kind] = start, end
            if kind == b"meta" and window.head[8:12] not in (b"avis", b"hevc", b"msf1"):
                break
        position = end
    return found.get(b"meta"), found.get(b"moov")


def _item(window: Window, name: str, meta: bytes) -> ImageHeader:
    """The primary item of a `meta` box."""
    # meta is a box with version and flags (4 bytes) before its children; QuickTime writers leave them out.
    inside = {kind: (start, end) for kind, start, end in boxes(meta, 0 if meta[4:8] == b"hdlr" else 4, len(meta))}
    if b"iprp" not in inside or b"pitm" not in inside:
        raise window.corrupt(f"an {name} file without a primary item or its properties")
    start = inside[b"pitm"][0]
    primary = int.from_bytes(meta[start + 4 : start + (8 if meta[start] else 6)], "big")
    properties, owners = _properties(meta, *inside[b"iprp"])
    mine = [properties[i] for i in owners.get(primary, ()) if 0 <= i < len(properties)]
    size = next((meta[at + 4 : at + 12] for kind, at, end in mine if kind == b"ispe" and end - at >= 12), b"")
    if not size:
        raise window.corrupt(f"an {name} file whose primary item {primary} has no size")
    width_px, height_px = int.from_bytes(size[:4], "big"), int.from_bytes(size[4:], "big")
    if name == "HEIF":
        width_px, height_px = _clean_aperture(meta, mine, width_px, height_px)
    turns = next((meta[at] & 3 for kind, at, end in mine if kind == b"irot" and end > at), 0)
    axis = next((meta[at] & 1 for kind, at, end in mine if kind == b"imir" and end > at), None)
    references = _references(meta, *inside.get(b"iref", (0, 0)))
    tiles = [to for kind, origin, to in references if kind == b"dimg" and origin == primary]
    alpha = any(
        kind == b"auxl" and to == primary and _is_alpha(meta, properties, owners.get(origin, ()))
        for kind, origin, to in references
    )
    coded = [properties[i] for item in (primary, *tiles[:1]) for i in owners.get(item, ()) if 0 <= i < len(properties)]
    grey = any(kind == b"av1C" and end - at >= 3 and meta[at + 2] & 0x10 for kind, at, end in coded)
    mode = "RGBA" if alpha else "L" if grey else "RGB"
    return ImageHeader(name, width_px, height_px, mode, _ORIENTATIONS[turns, axis])


def _properties(meta: bytes, start: int, end: int) -> tuple[list[tuple[bytes, int, int]], dict[int, list[int]]]:
    """(properties in order, item -> indices of its properties)."""
    listed: list[tuple[bytes, int, int]] = []
    owners: dict[int, list[int]] = {}
    for kind, at, stop in boxes(meta, start, end):
        if kind == b"ipco":
            listed = list(boxes(meta, at, stop))
        elif kind == b"ipma":
            _associations(meta, at, stop, owners)
    return listed, owners


def _associations(meta: bytes, at: int, stop: int, owners: dict[int, list[int]]) -> None:
    """One `ipma` box: count | { item, number, number x (essential bit, index from 1) }."""
    id_bytes, index_bytes = (4 if meta[at] else 2), (2 if meta[at + 3] & 1 else 1)
    mask = (1 << (8 * index_bytes - 1)) - 1
    count, at = int.from_bytes(meta[at + 4 : at + 8], "big"), at + 8
    for _ in range(min(count, (stop - at) // (id_bytes + 1))):
        if at + id_bytes >= stop:
            return
        item, number = int.from_bytes(meta[at : at + id_bytes], "big"), meta[at + id_bytes]
        at += id_bytes + 1
        last = min(at + number * index_bytes, stop)
        indices = [int.from_bytes(meta[i : i + index_bytes], "big") & mask for i in range(at, last, index_bytes)]
        owners.setdefault(item, []).extend(index - 1 for index in indices if index)
        at = last


def _references(meta: bytes, start: int, end: int) -> list[tuple[bytes, int, int]]:
    """(kind, from item, to item) of an `iref` box."""
    found: list[tuple[bytes, int, int]] = []
    if end <= start:
        return found
    id_bytes = 4 if meta[start] else 2
    for kind, at, stop in boxes(meta, start + 4, end):
        origin = int.from_bytes(meta[at : at + id_bytes], "big")
        first = at + id_bytes + 2
        count = int.from_bytes(meta[first - 2 : first], "big")
        for i in range(first, min(first + count * id_bytes, stop), id_bytes):
            found.append((kind, origin, int.from_bytes(meta[i : i + id_bytes], "big")))
    return found


def _is_alpha(meta: bytes, properties: list[tuple[bytes, int, int]], indices: list[int] | tuple[()]) -> bool:
    mine = [properties[i] for i in indices if 0 <= i < len(properties)]
    return any(kind == b"auxC" and meta[at + 4 : end].split(b"\0")[0] in _ALPHA for kind, at, end in mine)


def _clean_aperture(meta: bytes, mine: list[tuple[bytes, int, int]], width_px: int, height_px: int) -> tuple[int, int]:
    """Size after `clap`: four fractions, of which the first two are width and height."""
    for kind, at, end in mine:
        if kind == b"clap" and end - at >= 32:
            numbers = [int.from_bytes(meta[i : i + 4], "big") for i in range(at, at + 16, 4)]
            if numbers[1] and numbers[3]:
                cut = round(numbers[0] / numbers[1]), round(numbers[2] / numbers[3])
                if 0 < cut[0] <= width_px and 0 < cut[1] <= height_px:
                    return cut
    return width_px, height_px


def _sequence(window: Window, name: str, moov: bytes) -> ImageHeader | None:
    """The first picture track of a `moov` box; None when there is none."""
    shown: tuple[int, int, int, bool] | None = None
    alpha = False
    for kind, start, end in boxes(moov, 0, len(moov)):
        if kind != b"trak":
            continue
        track = {child: (at, stop) for child, at, stop in boxes(moov, start, end)}
        media = {child: (at, stop) for child, at, stop in boxes(moov, *track.get(b"mdia", (0, 0)))}
        handler = moov[media[b"hdlr"][0] + 8 : media[b"hdlr"][0] + 12] if b"hdlr" in media else b""
        alpha = alpha or handler == b"auxv"
        if shown is None and handler in (b"pict", b"vide") and b"tkhd" in track and b"minf" in media:
            shown = _track(moov, track[b"tkhd"], media[b"minf"])
    if shown is None:
        return None
    width_px, height_px, frames, grey = shown
    possible = 0 < frames <= min(window.size, window.limits.max_frames)
    mode = "RGBA" if alpha else "L" if grey else "RGB"
    return ImageHeader(name, width_px, height_px, mode, frames=frames if possible else 1, frames_exact=possible)


def _track(moov: bytes, header: tuple[int, int], information: tuple[int, int]) -> tuple[int, int, int, bool]:
    """(width, height, samples, monochrome) of a track. Sides are 16.16 numbers at the end of its header."""
    width_px, height_px = (int.from_bytes(moov[header[1] - i : header[1] - i + 4], "big") >> 16 for i in (8, 4))
    frames, grey = 0, False
    for kind, start, end in boxes(moov, *information):
        if kind != b"stbl":
            continue
        for inner, at, stop in boxes(moov, start, end):
            if inner == b"stsz":
                frames = int.from_bytes(moov[at + 8 : at + 12], "big")
            elif inner == b"stsd":
                config = moov.find(b"av1C", at, stop)
                grey = config >= 0 and config + 6 < stop and bool(moov[config + 6] & 0x10)
    return width_px, height_px, frames, grey
