"""The members of a tar file from its headers alone: one pass, bounded, no data read, nothing extracted.

    header (512 B, checksum)  -> name, size, type        ustar | old GNU ('L' long names) | pax ('x' records)
    data   (size, padded)     -> skipped: next offset

Names are labels, never paths: `../../etc/passwd` and `/abs` are compared and printed, and nothing else. Only regular
files are usable; links, devices, folders and sparse files are counted by kind. A file that ends inside a member, or
without the end-of-archive block, was cut: an error, because the samples behind the cut would be missing silently.
Memory is bounded by ceilings on names, extension headers and the number of members; sizes are checked against the file.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from dataloaders.errors import SourceError
from dataloaders.printable import printable
from dataloaders.probe.reader import ByteReader

BLOCK = 512
MAX_NAME_BYTES = 64 * 1024
MAX_PAX_BYTES = 1024**2
MAX_MEMBERS = 10_000_000  # of one archive
MAX_ALL_NAMES_BYTES = 1024**3  # of one archive, together

_REGULAR = (b"0", b"\0", b"7")
_WITHOUT_DATA = {
    b"1": "hard link",
    b"2": "symbolic link",
    b"3": "device",
    b"4": "device",
    b"5": "folder",
    b"6": "fifo",
}
_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZ": "bzip2", b"\xfd7": "xz", b"\x28\xb5": "zstd"}


# Compressions that a stream undoes (`dataloaders.byte_stream`), by magic bytes and by the ends of names.
STREAMED = ("gzip", "bzip2", "xz")
STREAMED_NAMES = (".gz", ".tgz", ".bz2", ".tbz2", ".xz", ".txz")
_AS_STREAM = " TarStream (no index, no plan ahead) reads it as it is."


def decompress(*, streamed: bool) -> str:
    """What to do about a compressed shard; `streamed`: whether a stream can undo the compression."""
    return "Decompress it: samples are read at random." + (
        _AS_STREAM if streamed else " (Compressed again with gzip, bzip2 or xz, TarStream reads it.)"
    )


class TarMember(NamedTuple):
    """A regular file in a tar: `size` bytes of data from byte `offset` of the archive on."""

    name: str
    offset: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class IgnoredMember:
    """A member that is not a regular file."""

    name: str
    kind: str


@dataclass(slots=True)
class _Overrides:
    """What extension headers say about the next member."""

    name: str | None = None
    size: int | None = None
    sparse: bool = False


class TarHeaders:
    """Reader of one archive.

    Args:
        file: the archive, or what reads ahead in it.
        place: the shard, for messages.

    Attributes:
        has_globals: a pax header gave a name or a size to all members behind it.
    """

    def __init__(self, file: ByteReader, *, place: str) -> None:
        self._file, self._size, self._place = file, file.size, place
        self.has_globals = False

    def members(self, start: int = 0, stop: int | None = None) -> Iterator[TarMember | IgnoredMember]:
        """Every member in archive order.

        Args:
            start: offset of the header to start at.
            stop: offset of a header to stop in front of; None: the end-of-archive block.

        Raises:
            SourceError: not a tar, a damaged header, a file that was cut, no header at `stop`, or more members or
                longer names than are allowed; names the offset.
        """
        if self._size == 0:
            raise SourceError("the shard has 0 bytes", place=self._place, remedy="Download or build it again.")
        num_members, name_bytes = 0, 0
        offset, overrides, everywhere = start, _Overrides(), _Overrides()
        while stop is None or offset < stop:
            header = self._header(offset)
            if header is None:
                return
            size = self._number(header[124:136], offset, "size")
            kind, data = header[156:157], offset + BLOCK
            if kind == b"L":
                overrides.name = _name(self._read(data, size, MAX_NAME_BYTES, "long name"))
            elif kind in (b"x", b"g", b"X"):
                target = everywhere if kind == b"g" else overrides
                self._pax(self._read(data, size, MAX_PAX_BYTES, "pax header"), target, offset)
                self.has_globals |= everywhere.name is not None or everywhere.size is not None
            elif kind != b"K":
                name = _pick(overrides.name, everywhere.name) or _header_name(header)
                size = size if overrides.size is None else overrides.size
                if kind == b"S":
                    data = self._skip_sparse_map(header, data)
                num_members, name_bytes = num_members + 1, name_bytes + len(name)
                self._check_totals(num_members, name_bytes)
                sparse = kind == b"S" or overrides.sparse
                ignored = "sparse file" if sparse else _ignored_kind(kind, name)
                size = 0 if kind in _WITHOUT_DATA else size
                self._check_end(data, size, name)
                yield IgnoredMember(name=name, kind=ignored) if ignored else TarMember(name, data, size)
                overrides = _Overrides()
            self._check_end(data, size, _header_name(header))
            offset = padded_end(data, size)
        if offset != stop:
            raise SourceError(
                f"there is no header at byte {stop}: a member ends at byte {offset}",
                place=self._place,
                remedy="Build the index of the shard again.",
            )

    def _check_totals(self, num_members: int, name_bytes: int) -> None:
        if num_members > MAX_MEMBERS or name_bytes > MAX_ALL_NAMES_BYTES:
            raise SourceError(
                f"more than {MAX_MEMBERS} members, or {MAX_ALL_NAMES_BYTES} bytes of names",
                place=self._place,
                remedy="Split the shard.",
            )

    def _header(self, offset: int) -> bytes | None:
        """The header block at `offset`, checked; None at the end-of-archive block."""
        if offset + BLOCK > self._size:
            raise SourceError(
                f"the shard ends at byte {self._size} without its end-of-archive block: it was cut",
                place=f"{self._place}, byte {offset}",
                remedy="Copy or build the shard again.",
            )
        block = self._file.read(offset, BLOCK)
        if not any(block):
            return None
        stored = self._number(block[148:156], offset, "checksum")
        computed = sum(block) - sum(block[148:156]) + 8 * ord(" ")
        if stored != computed:
            known = next((name for magic, name in _COMPRESSED.items() if offset == 0 and block.startswith(magic)), None)
            raise SourceError(
                f"this is a {known} file, not a plain tar" if known else "no valid tar header: the checksum is wrong",
                place=f"{self._place}, byte {offset}",
                remedy=decompress(streamed=known in STREAMED) if known else "Copy or build the shard again.",
            )
        return block

    def _number(self, field: bytes, offset: int, what: str) -> int:
        """A numeric field: octal text, or big-endian binary when the top bit is set (GNU, sizes above 8 GiB)."""
        if field[0] == 0x80:
            return int.from_bytes(field[1:], "big")
        text = field.split(b"\0", 1)[0].strip()
        if text.isdigit() and b"8" not in text and b"9" not in text:
            return int(text, 8)
        if not text and what == "size":
            return 0
        if what == "checksum":
            return -1  # never equal to a computed one: reported as such
        raise SourceError(
            f"the {what} field {field!r} is not a number",
            place=f"{self._place}, byte {offset}",
            remedy="Build the shard again.",
        )

    def _read(self, offset: int, size: int, most: int, what: str) -> bytes:
        if size > most:
            raise SourceError(
                f"a {what} of {size} bytes exceeds {most}",
                place=f"{self._place}, byte {offset}",
                remedy="Build the shard again with short names.",
            )
        self._check_end(offset, size, what)
        return self._file.read(offset, size) if size else b""

    def _pax(self, records: bytes, target: _Overrides, offset: int) -> None:
        """Apply pax records, each `length key=value newline`."""
        at = 0
        while at < len(records) and records[at] != 0:
            space = records.find(b" ", at, at + 20)
            length = int(records[at:space]) if space > at and records[at:space].isdigit() else 0
            key, equals, value = records[space + 1 : at + length - 1].partition(b"=")
            # Without a blank, `space` is -1 and `key` may be of records that were applied already.
            if space <= at or length <= space - at or not equals or at + length > len(records):
                raise SourceError(
                    "a pax header does not parse",
                    place=f"{self._place}, byte {offset}",
                    remedy="Build the shard again.",
                )
            at += length
            if key == b"path":
                target.name = _name(value)
            elif key == b"size":
                target.size = self._pax_size(value, offset)
            elif key.startswith(b"GNU.sparse."):
                target.sparse = True

    def _pax_size(self, value: bytes, offset: int) -> int:
        if value.isdigit() and len(value) <= 20:
            return int(value)
        raise SourceError(
            f"pax size {value[:40]!r} is not a number",
            place=f"{self._place}, byte {offset}",
            remedy="Build the shard again.",
        )

    def _skip_sparse_map(self, header: bytes, data: int) -> int:
        """Offset behind the extension blocks of an old GNU sparse header."""
        more = header[482]
        while more:
            self._check_end(data, BLOCK, "sparse map")
            more, data = self._file.read(data, BLOCK)[504], data + BLOCK
        return data

    def _check_end(self, offset: int, size: int, name: str) -> None:
        if offset + size > self._size:
            raise SourceError(
                f"member {printable(name)} needs {size} bytes from byte {offset} on, but the shard ends at byte"
                f" {self._size}: it was cut",
                place=self._place,
                remedy="Copy or build the shard again.",
            )


def padded_end(offset: int, size: int) -> int:
    """Where the header behind a member lies."""
    return offset + -(-size // BLOCK) * BLOCK


def _ignored_kind(kind: bytes, name: str) -> str:
    """Why a member is not used; empty for a regular file. Before ustar, a folder was a file whose name ends in `/`."""
    if kind in _REGULAR:
        return "folder" if name.endswith("/") else ""
    return _WITHOUT_DATA.get(kind, f"type {kind!r}")


def _header_name(header: bytes) -> str:
    name = _name(header[:100])
    # Old GNU headers (magic "ustar  ") keep times where ustar has the prefix.
    prefix = _name(header[345:500]) if header[257:263] == b"ustar\0" else ""
    return f"{prefix}/{name}" if prefix else name


def _name(raw: bytes) -> str:
    return raw.split(b"\0", 1)[0].decode("utf-8", "surrogateescape")


def _pick(*values: str | None) -> str | None:
    return next((value for value in values if value is not None), None)
