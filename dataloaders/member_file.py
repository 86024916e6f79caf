"""The file of a table of members: columns of fixed types behind a head, mapped, and checked before they are believed.

    magic (8 B) | length of the head (8 B) | head (JSON) | columns, 64 B aligned
    head: version, digest, rows of every column, crc32 of the columns

One file, so that a rename puts all of it in place or nothing. What is in it decides which bytes of a shard are read, so
whoever opens it looks through the columns once (about 30 ns a member): they are as they were written, none leads
outside another one, no member outside its shard.
"""

import json
import mmap
import os
import secrets
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from dataloaders.errors import SourceError

FORMAT_VERSION = 1
TEXT = -1  # kind of a text member
_MAGIC = b"MLLMMEM1"
_MAX_HEAD_BYTES = 64 * 1024
_ALIGN = 64
_CHUNK = 4 * 1024**2  # members that are checked at a time

Column = NDArray[Any]

COLUMNS: Mapping[str, DTypeLike] = {
    "shard_size": np.int64,
    "sample_end": np.int64,
    "others": np.int16,
    "member_end": np.int64,
    "offset": np.int64,
    "size": np.int64,
    "kind": np.int8,
    "suffix": np.int32,
}
TEXTS = ("url", "stamp", "fingerprint", "report", "key", "suffixes", "combinations")
DTYPES: Mapping[str, DTypeLike] = {
    **COLUMNS,
    **{f"{name}_bytes": np.uint8 for name in TEXTS},
    **{f"{name}_end": np.int64 for name in TEXTS},
}


def before(ends: Column, row: int) -> int:
    """Where row `row` starts, given where rows end."""
    return int(ends[row - 1]) if row else 0


def write_columns(path: Path, columns: Mapping[str, Column], digest: str) -> None:
    """Write the columns of `DTYPES` to a file, whole or not at all.

    Raises:
        OSError: nothing can be written there.
    """
    lengths = {name: len(columns[name]) for name in DTYPES}
    crc = _checksum(columns)
    text = json.dumps({"version": FORMAT_VERSION, "digest": digest, "columns": lengths, "crc32": crc}).encode()
    head = _MAGIC + len(text).to_bytes(8, "little") + text
    starts, _ = _layout(lengths, len(head))
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.parent / f".new-{secrets.token_hex(8)}.tmp"
    try:
        with draft.open("xb") as file:
            file.write(head)
            for name, start in zip(DTYPES, starts, strict=True):
                file.write(bytes(start - file.tell()))
                file.write(np.ascontiguousarray(columns[name]).data)
            file.flush()
            os.fsync(file.fileno())  # a name that reaches the disk before its bytes may stand for zeros after a crash
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def map_columns(path: Path, *, check: bool = True) -> tuple[dict[str, Column], str]:
    """(columns of a file, mapped and read-only; its digest).

    Args:
        check: False: the columns are not looked through, for a file that was checked a moment ago.

    Raises:
        FileNotFoundError: there is none.
        SourceError: it is no such file, of another version, or damaged.
    """
    try:
        with path.open("rb") as file:
            columns, digest, crc = _map(file.fileno())
        if check:
            if _checksum(columns) != crc:
                raise ValueError("its columns are not as they were written")
            check_columns(columns)
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise SourceError(
            f"not a table of members, or a damaged one: {error}",
            place=str(path),
            remedy="Delete the file; it is made again.",
        ) from error
    return columns, digest


def _layout(lengths: Mapping[str, int], head: int) -> tuple[list[int], int]:
    """(start of every column, end of the file) in bytes."""
    starts, at = [], head
    for name, dtype in DTYPES.items():
        at = -(-at // _ALIGN) * _ALIGN
        starts.append(at)
        at += lengths[name] * np.dtype(dtype).itemsize
    return starts, at


def _checksum(columns: Mapping[str, Column]) -> int:
    crc = 0
    for name in DTYPES:
        crc = zlib.crc32(np.ascontiguousarray(columns[name]).data, crc)
    return crc


def _map(descriptor: int) -> tuple[dict[str, Column], str, object]:
    """(columns of a file, its digest, its checksum). Raises ValueError, KeyError or TypeError where it is none."""
    size = os.fstat(descriptor).st_size
    head = os.pread(descriptor, len(_MAGIC) + 8, 0)
    length = int.from_bytes(head[len(_MAGIC) :], "little")
    if not head.startswith(_MAGIC) or length > min(size, _MAX_HEAD_BYTES):
        raise ValueError("it does not start like one")
    said = json.loads(os.pread(descriptor, length, len(head)))
    if said["version"] != FORMAT_VERSION:
        raise ValueError(f"format version {said['version']}, but this release reads {FORMAT_VERSION}")
    lengths = said["columns"]
    if any(type(lengths[name]) is not int or not 0 <= lengths[name] <= size for name in DTYPES):
        raise ValueError("the lengths of its columns are no numbers")
    starts, end = _layout(lengths, len(head) + length)
    if end != size:
        raise ValueError(f"it has {size} bytes, but its head speaks of {end}")
    whole = np.frombuffer(mmap.mmap(descriptor, size, access=mmap.ACCESS_READ), dtype=np.uint8)
    columns = {
        name: whole[start : start + lengths[name] * np.dtype(dtype).itemsize].view(dtype)
        for (name, dtype), start in zip(DTYPES.items(), starts, strict=True)
    }
    return columns, str(said["digest"]), said["crc32"]


def check_columns(columns: Mapping[str, Column]) -> None:
    """Raise ValueError where a column leads outside another one, or a member outside its shard."""
    _check_ends("sample_end", columns["sample_end"], len(columns["member_end"]))
    _check_ends("member_end", columns["member_end"], len(columns["offset"]))
    rows = {
        **dict.fromkeys(("url", "stamp", "fingerprint", "report"), len(columns["sample_end"])),
        "key": len(columns["member_end"]),
    }
    for name in TEXTS:
        ends = columns[f"{name}_end"]
        _check_ends(f"{name}_end", ends, len(columns[f"{name}_bytes"]))
        if len(ends) != rows.get(name, len(ends)):
            raise ValueError(f"{len(ends)} texts in {name}")
    pairs = (("size", "offset"), ("kind", "offset"), ("suffix", "offset"), ("others", "member_end"))
    for name, other in (*pairs, ("shard_size", "sample_end")):
        if len(columns[name]) != len(columns[other]):
            raise ValueError(f"{len(columns[name])} rows in {name}, {len(columns[other])} in {other}")
    _check_codes(columns, "suffix", "suffixes")
    _check_codes(columns, "others", "combinations")
    if len(columns["kind"]) and not (TEXT <= columns["kind"].min() <= columns["kind"].max() <= 1):
        raise ValueError("an unknown kind of member")
    _check_members(columns)


def _check_ends(name: str, ends: Column, length: int) -> None:
    if (int(ends[-1]) if len(ends) else 0) != length or (len(ends) and int(ends[0]) < 0):
        raise ValueError(f"{name} does not end where it should")
    if len(ends) > 1 and bool((ends[1:] < ends[:-1]).any()):
        raise ValueError(f"{name} runs backwards")


def _check_codes(columns: Mapping[str, Column], name: str, texts: str) -> None:
    codes = columns[name]
    if len(codes) and not (0 <= codes.min() <= codes.max() < len(columns[f"{texts}_end"])):
        raise ValueError(f"{name} names a text that is not there")


def _check_members(columns: Mapping[str, Column]) -> None:
    """Every member lies in its shard."""
    samples = np.concatenate([[0], columns["sample_end"]])
    rows = np.concatenate([[0], columns["member_end"]])[samples]  # [S + 1]: first member of every shard
    for start in range(0, len(columns["offset"]), _CHUNK):
        stop = min(start + _CHUNK, len(columns["offset"]))
        within = np.diff(np.clip(rows, start, stop))  # members of every shard in this chunk
        ends = np.repeat(columns["shard_size"], within)
        offsets, sizes = columns["offset"][start:stop], columns["size"][start:stop]
        if bool((offsets < 0).any() or (sizes < 0).any() or (offsets > ends).any() or (sizes > ends - offsets).any()):
            raise ValueError("a member lies outside its shard")
