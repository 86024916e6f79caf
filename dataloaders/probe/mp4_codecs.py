"""Frame sizes as decoders know them: from the codec's own parameter sets, not from what the container repeats.

    avcC -> H.264 SPS        ITU-T H.264, 7.3.2.1.1      width = 16 x macroblocks - cropping
    hvcC -> HEVC SPS         ITU-T H.265, 7.3.2.2        width - conformance window
    av1C -> AV1 sequence     AV1 specification, 5.5      max_frame_width
    esds -> MPEG-4 VOL       ISO/IEC 14496-2, 6.2.3      video_object_layer_width

A few dozen bits are read from at most 1 KiB. Whatever does not parse is `None`: the caller then asks FFmpeg.
"""

from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

SQUARE = Fraction(1)
_MAX_BYTES = 1024
# Profiles whose SPS tells the chroma format (7.3.2.1.1).
_HIGH_PROFILES = frozenset({100, 110, 122, 244, 44, 83, 86, 118, 128, 138, 139, 134, 135})
# aspect_ratio_idc of table E-1 (H.264, H.265).
_ASPECT_TEXT = "1 12/11 10/11 16/11 40/33 24/11 20/11 32/11 80/33 18/11 15/11 64/33 160/99 4/3 3/2 2"
_ASPECTS = {code: Fraction(text) for code, text in enumerate(_ASPECT_TEXT.split(), start=1)}
_EXTENDED_ASPECT = 255


@dataclass(frozen=True, slots=True, kw_only=True)
class CodedSize:
    """Size of decoded frames in px; `sar` is None where the parameter set does not say or was not read that far."""

    width_px: int
    height_px: int
    sar: Fraction | None = None


class _Bits:
    """Reads bits, most significant first, from a text of 0 and 1: the fastest way in plain Python for some 40 fields.

    Raises ValueError behind the end.
    """

    __slots__ = ("_at", "_text")

    def __init__(self, data: bytes) -> None:
        self._text = f"{int.from_bytes(data, 'big'):0{8 * len(data)}b}"
        self._at = 0

    def u(self, count: int) -> int:
        """The next `count` bits as an unsigned number."""
        at = self._at
        end = self._at = at + count
        if end > len(self._text):
            raise ValueError("parameter set ends early")
        return int(self._text[at:end], 2) if count else 0

    def skip(self, count: int) -> None:
        self._at += count

    def ue(self) -> int:
        """Exp-Golomb code (9.1 of H.264): z zeros, then z + 1 bits less one."""
        one = self._text.index("1", self._at)
        end = 2 * one - self._at + 1
        self._at = end
        if end > len(self._text):
            raise ValueError("parameter set ends early")
        return int(self._text[one:end], 2) - 1

    def se(self) -> int:
        code = self.ue()
        return (code + 1) // 2 if code % 2 else -(code // 2)


@lru_cache(maxsize=4096)  # clips of one encoder share their parameter sets
def coded_size(fourcc: bytes, config: bytes) -> CodedSize | None:
    """Frame size from the configuration box of a sample entry; None where it cannot be told."""
    try:
        if fourcc == b"avc1":
            return _h264(_avc_sps(config))
        if fourcc in (b"hvc1", b"hev1"):
            return _hevc(_hevc_sps(config))
        if fourcc == b"av01":
            return _av1(_av1_sequence(config))
        return _mpeg4(config)
    except (ValueError, IndexError, OverflowError):
        return None


def _payload(nal: bytes) -> bytes:
    """Raw bytes of a NAL unit: emulation prevention bytes (7.4.1) taken out."""
    return nal[:_MAX_BYTES].replace(b"\0\0\3", b"\0\0")


def _sized(config: bytes, at: int) -> bytes:
    length = int.from_bytes(config[at : at + 2], "big")
    if not 0 < length <= len(config) - at - 2:
        raise ValueError("parameter set ends early")
    return config[at + 2 : at + 2 + length]


def _avc_sps(config: bytes) -> bytes:
    # version, profile, compatibility, level, lengths | number of SPS (low 5 bits) | length 2, NAL unit
    if config[5] & 31 != 1:
        raise ValueError("not exactly one SPS")
    nal = _sized(config, 6)
    if nal[0] & 31 != 7:
        raise ValueError("not an SPS")
    return _payload(nal[1:])


def _hevc_sps(config: bytes) -> bytes:
    # 22 bytes | number of arrays | arrays of: type (low 6 bits), number of NAL units 2, (length 2, NAL unit) ...
    at, found = 23, []
    for _ in range(config[22]):
        kind, count = config[at] & 63, int.from_bytes(config[at + 1 : at + 3], "big")
        at += 3
        for _ in range(count):
            nal = _sized(config, at)
            at += 2 + len(nal)
            if kind == 33:
                found.append(nal)
    if len(found) != 1:
        raise ValueError("not exactly one SPS")
    return _payload(found[0][2:])


def _h264(sps: bytes) -> CodedSize:
    bits = _Bits(sps)
    profile = bits.u(8)
    bits.skip(16)
    bits.ue()
    chroma, separate = 1, 0
    if profile in _HIGH_PROFILES:
        chroma = bits.ue()
        separate = bits.u(1) if chroma == 3 else 0
        bits.ue()
        bits.ue()
        bits.skip(1)
        if bits.u(1):
            _skip_scaling_lists(bits, 12 if chroma == 3 else 8)
    bits.ue()
    _skip_picture_order(bits)
    bits.ue()
    bits.skip(1)
    width_px, rows = 16 * (bits.ue() + 1), 16 * (bits.ue() + 1)
    field_rows = 2 - bits.u(1)
    if field_rows == 2:
        bits.skip(1)
    bits.skip(1)
    height_px = rows * field_rows
    if bits.u(1):
        left, right, top, bottom = (bits.ue() for _ in range(4))
        subsampled = not separate and chroma in (1, 2)
        width_px -= (left + right) * (2 if subsampled else 1)
        height_px -= (top + bottom) * field_rows * (2 if not separate and chroma == 1 else 1)
    sar = _aspect(bits) if bits.u(1) else None
    return CodedSize(width_px=width_px, height_px=height_px, sar=sar)


def _skip_scaling_lists(bits: _Bits, count: int) -> None:
    for index in range(count):
        if not bits.u(1):
            continue
        last = following = 8
        for _ in range(16 if index < 6 else 64):
            if following:
                following = (last + bits.se()) % 256
            last = following or last


def _skip_picture_order(bits: _Bits) -> None:
    kind = bits.ue()
    if kind == 0:
        bits.ue()
    elif kind == 1:
        bits.skip(1)
        bits.ue()
        bits.ue()
        count = bits.ue()
        if count > 255:
            raise ValueError("a cycle of more than 255 reference frames")
        for _ in range(count):
            bits.ue()


def _aspect(bits: _Bits) -> Fraction | None:
    """Sample aspect ratio at the start of the VUI (annex E)."""
    if not bits.u(1):
        return None
    code = bits.u(8)
    if code != _EXTENDED_ASPECT:
        return _ASPECTS.get(code)
    width, height = bits.u(16), bits.u(16)
    return Fraction(width, height) if width and height else None


def _hevc(sps: bytes) -> CodedSize:
    bits = _Bits(sps)
    bits.skip(4)
    sub_layers = bits.u(3)
    bits.skip(1 + 96)
    flags = [bits.u(2) for _ in range(sub_layers)]
    if sub_layers:
        bits.skip(2 * (8 - sub_layers))
    for flag in flags:
        bits.skip((88 if flag & 2 else 0) + (8 if flag & 1 else 0))
    bits.ue()
    chroma = bits.ue()
    separate = bits.u(1) if chroma == 3 else 0
    width_px, height_px = bits.ue(), bits.ue()
    if bits.u(1):
        left, right, top, bottom = (bits.ue() for _ in range(4))
        width_px -= (left + right) * (2 if not separate and chroma in (1, 2) else 1)
        height_px -= (top + bottom) * (2 if not separate and chroma == 1 else 1)
    return CodedSize(width_px=width_px, height_px=height_px)


def _av1_sequence(config: bytes) -> bytes:
    # marker and version, profile and level, flags, delay | OBU: header, [extension], length as LEB128, payload
    if config[0] != 0x81 or (config[4] >> 3) & 15 != 1 or not config[4] & 2:
        raise ValueError("no sequence header")
    at = 6 if config[4] & 4 else 5
    while config[at] & 128:
        at += 1
    return config[at + 1 : at + 1 + _MAX_BYTES]


def _av1(sequence: bytes) -> CodedSize:
    bits = _Bits(sequence)
    bits.skip(4)
    if bits.u(1):  # reduced_still_picture_header
        bits.skip(5)
    else:
        _skip_operating_points(bits)
    width_bits, height_bits = bits.u(4) + 1, bits.u(4) + 1
    return CodedSize(width_px=bits.u(width_bits) + 1, height_px=bits.u(height_bits) + 1)


def _skip_operating_points(bits: _Bits) -> None:
    delay_bits = model = 0
    if bits.u(1):  # timing information
        bits.skip(64)
        if bits.u(1):
            bits.ue()
        model = bits.u(1)
        if model:
            delay_bits = bits.u(5) + 1
            bits.skip(42)
    delays = bits.u(1)
    for _ in range(bits.u(5) + 1):
        bits.skip(12)
        if bits.u(5) > 7:
            bits.skip(1)
        if model and bits.u(1):
            bits.skip(2 * delay_bits + 1)
        if delays and bits.u(1):
            bits.skip(4)


def _mpeg4(config: bytes) -> CodedSize:
    if _object_type(config) != 0x20:  # "mp4v" may also hold MPEG-1 and MPEG-2
        raise ValueError("not MPEG-4 Visual")
    at = config.find(b"\0\0\1\x20")
    if at < 0:
        raise ValueError("no video object layer")
    bits = _Bits(config[at + 4 : at + 4 + 64])
    bits.skip(9)
    version = 1
    if bits.u(1):
        version = bits.u(4)
        bits.skip(3)
    sar = _mpeg4_aspect(bits)
    if bits.u(1):  # control parameters
        bits.skip(3)
        if bits.u(1):
            bits.skip(79)
    if bits.u(2) != 0 or version > 2:
        raise ValueError("not a rectangular layer")
    bits.skip(1)
    resolution = bits.u(16)
    bits.skip(1)
    if bits.u(1):  # fixed rate: its increment takes as many bits as the resolution needs
        bits.skip(max((resolution - 1).bit_length(), 1))
    bits.skip(1)
    width_px = bits.u(13)
    bits.skip(1)
    return CodedSize(width_px=width_px, height_px=bits.u(13), sar=sar)


def _object_type(config: bytes) -> int:
    """objectTypeIndication of an esds box, behind the heads of two nested descriptors (ISO/IEC 14496-1, 7.2.6)."""
    at = _descriptor(config, 4, tag=3)
    flags = config[at + 2]
    if flags & 0xE0:
        raise ValueError("a stream that depends on another one")
    return config[_descriptor(config, at + 3, tag=4)]


def _descriptor(config: bytes, at: int, *, tag: int) -> int:
    """Where the content of the descriptor at `at` starts: its length takes one to four bytes."""
    if config[at] != tag:
        raise ValueError(f"no descriptor of tag {tag}")
    for end in range(at + 1, at + 5):
        if not config[end] & 0x80:
            return end + 1
    raise ValueError("a length of more than four bytes")


def _mpeg4_aspect(bits: _Bits) -> Fraction | None:
    code = bits.u(4)
    if code == 15:
        width, height = bits.u(8), bits.u(8)
        return Fraction(width, height) if width and height else None
    return {1: SQUARE, 2: Fraction(12, 11), 3: Fraction(10, 11), 4: Fraction(16, 11), 5: Fraction(40, 33)}.get(code)
