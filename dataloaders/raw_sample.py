"""A sample in memory: its record beside the encoded bytes of its media, and a source made of such samples.

    RawSample --to_bytes--> one blob --(another process, rank or host)--> from_bytes --> the same RawSample
                                                                                           | MemorySource
                                                                                           v
                                              the path of every other source: scan, load_sample, loader

    blob = magic (4 B) | bytes of the JSON (u32) | number of media (u32) | size of each medium (u64 each) | JSON | media

The JSON holds the record and nothing is ever unpickled: a blob from a hostile peer is a `DataError` at worst. All sizes
are checked against the length of the blob before a byte is taken. Price: a media byte is copied once each way, and
`Record.extra` may hold JSON values only, since nothing else comes back as it went.
"""

import hashlib
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dataloaders.counts import MediaKind
from dataloaders.errors import DataError, MediaError, RecordError
from dataloaders.record import MediaPart, MediaRef, Record, TextPart, Turn

_HEAD = struct.Struct("<4sII")
_MAGIC = b"RAW1"
_MAX_DEPTH = 200  # of `extra`; a parser's own bound is lower


@dataclass(frozen=True, slots=True)
class RawSample:
    """A record and the encoded bytes of its media, in the order of `record.media`.

    Raises:
        DataError: another number of media, or other sizes, than the record says.
    """

    record: Record
    media: tuple[bytes, ...] = ()

    def __post_init__(self) -> None:
        named, held = [ref.size_bytes for ref in self.record.media], [len(medium) for medium in self.media]
        if named != held:
            raise DataError(
                f"the record names media of {named} bytes, but media of {held} bytes are given",
                place=self.record.place,
                remedy="Give every medium of the record, whole and in its order.",
            )

    def to_bytes(self) -> bytes:
        """The sample as one blob; `from_bytes` gives an equal one back.

        Raises:
            DataError: `extra` holds something that JSON cannot carry unchanged.
        """
        text = _encode(self.record)
        sizes = struct.pack(f"<{len(self.media)}Q", *map(len, self.media))
        return b"".join([_HEAD.pack(_MAGIC, len(text), len(self.media)), sizes, text, *self.media])

    @classmethod
    def from_bytes(cls, blob: bytes | bytearray | memoryview, *, place: str = "") -> "RawSample":
        """The sample that `to_bytes` wrote.

        Args:
            place: where the blob came from, for messages.

        Raises:
            DataError: damaged, cut, or no such blob.
        """
        view = memoryview(blob).cast("B")
        if len(view) < _HEAD.size:
            raise _damaged(f"{len(view)} bytes are no sample", place)
        magic, text_bytes, num_media = _HEAD.unpack_from(view)
        start = _HEAD.size + 8 * num_media
        if magic != _MAGIC or start + text_bytes > len(view):
            raise _damaged("its head does not fit its length", place)
        sizes = struct.unpack_from(f"<{num_media}Q", view, _HEAD.size)
        if start + text_bytes + sum(sizes) != len(view):
            raise _damaged(f"{len(view)} bytes where its head names {start + text_bytes + sum(sizes)}", place)
        at = start + text_bytes
        media: list[bytes] = []
        for size in sizes:
            media.append(bytes(view[at : at + size]))
            at += size
        return cls(_decode(bytes(view[start : start + text_bytes]), place), tuple(media))


@dataclass(frozen=True, slots=True)
class BadRecord:
    """A sample that its source could not make: it keeps its place in the count and says why."""

    place: str
    error: RecordError | MediaError


class MemorySource:
    """Samples that lie in memory (a `SampleSource`).

    A `BadRecord` among them keeps its number, and `record` raises its error, so that a scan lists it with its reason.

    Args:
        samples: sample `i` is the i-th of them.
        fingerprint: of what they are; None: a digest over every byte, made when it is first asked for.
    """

    def __init__(self, samples: Sequence[RawSample | BadRecord], *, fingerprint: str | None = None) -> None:
        self._samples, self._fingerprint = tuple(samples), fingerprint

    @property
    def fingerprint(self) -> str:
        """Hex digest over records and media, or the text that was given."""
        if self._fingerprint is None:
            digest = hashlib.sha256(b"memory-source-1\n")
            for sample in self._samples:
                blob = (
                    sample.to_bytes() if isinstance(sample, RawSample) else str(sample.error).encode("utf-8", "replace")
                )
                digest.update(f"{len(blob)}:".encode() + blob)
            self._fingerprint = digest.hexdigest()
        return self._fingerprint

    def __len__(self) -> int:
        return len(self._samples)

    def record(self, i: int) -> Record:
        """Record of sample `i`. Raises the error of a sample that could not be made."""
        return self._sample(i).record

    def media_reader(self, i: int, j: int) -> "MemoryReader":
        """Ranges of medium `j` of sample `i`."""
        return MemoryReader(self.media_bytes(i, j))

    def media_bytes(self, i: int, j: int) -> bytes:
        """All bytes of medium `j` of sample `i`, not copied."""
        media = self._sample(i).media
        if not 0 <= j < len(media):
            raise IndexError(f"medium {j} is not one of the {len(media)} media of {self.place(i)}")
        return media[j]

    def place(self, i: int) -> str:
        """Where sample `i` came from."""
        sample = self._at(i)
        return sample.place if isinstance(sample, BadRecord) else sample.record.place

    def shard_and_key(self, i: int) -> tuple[str, str]:
        """What the record of sample `i` says, or the place of one that could not be made."""
        sample = self._at(i)
        return ("", sample.place) if isinstance(sample, BadRecord) else (sample.record.shard, sample.record.key)

    def _at(self, i: int) -> RawSample | BadRecord:
        if not 0 <= i < len(self._samples):
            raise IndexError(f"sample {i} is not one of the {len(self._samples)} samples of this source")
        return self._samples[i]

    def _sample(self, i: int) -> RawSample:
        sample = self._at(i)
        if isinstance(sample, BadRecord):
            raise sample.error
        return sample


class MemoryReader:
    """Ranges of bytes in memory (a `ByteReader`)."""

    def __init__(self, data: bytes) -> None:
        self._data, self.size = data, len(data)

    def read(self, offset: int, size: int) -> bytes:
        """Bytes [offset, offset + size), fewer at the end."""
        start = max(offset, 0)
        return self._data[start : start + max(size, 0)]


def _encode(record: Record) -> bytes:
    """The record as JSON: turns are [role, [text or number of a medium, ...]]."""
    _check_json(record.extra, record.place)
    turns = [
        [turn.role, [part.text if isinstance(part, TextPart) else part.index for part in turn.parts]]
        for turn in record.turns
    ]
    media = [[int(ref.kind), ref.member] for ref in record.media]
    sizes = [ref.size_bytes for ref in record.media]
    content = [record.shard, record.key, turns, media, sizes, dict(record.extra)]
    try:
        return json.dumps(content, separators=(",", ":")).encode("ascii")
    except ValueError as error:  # an integer of thousands of digits
        raise _not_json(str(error), record.place) from None


def _decode(text: bytes, place: str) -> Record:
    try:
        shard, key, turns, media, sizes, extra = json.loads(text)
        record = Record(
            shard=_text(shard),
            key=_text(key),
            turns=tuple(Turn(role=_text(role), parts=tuple(map(_part, parts))) for role, parts in turns),
            media=tuple(
                MediaRef(kind=MediaKind(kind), member=_text(member), size_bytes=_count(size))
                for (kind, member), size in zip(media, sizes, strict=True)
            ),
            extra=extra,
        )
        if not isinstance(extra, dict):
            raise TypeError(f"extra is a {type(extra).__name__}")
    except (TypeError, ValueError, RecursionError) as error:
        raise _damaged(f"its record does not parse: {type(error).__name__}: {error}", place) from None
    indices = [part.index for turn in record.turns for part in turn.parts if isinstance(part, MediaPart)]
    if any(index >= len(record.media) for index in indices):
        raise _damaged(f"its text refers to medium {max(indices)} of {len(record.media)}", place)
    return record


def _part(value: object) -> TextPart | MediaPart:
    return TextPart(value) if isinstance(value, str) else MediaPart(_count(value))


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{str(value)[:40]!r} where a text is needed")
    return value


def _count(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise TypeError(f"{str(value)[:40]!r} where a number of at least 0 is needed")
    return value


def _check_json(extra: object, place: str) -> None:
    """Raise DataError for what JSON would drop, change or refuse; without recursion."""
    level = [extra if isinstance(extra, dict) else dict(extra)] if isinstance(extra, (dict, Mapping)) else [extra]
    for _ in range(_MAX_DEPTH):
        inner: list[object] = []
        for value in level:
            if isinstance(value, dict):
                for odd in (name for name in value if not isinstance(name, str)):  # None is one, too
                    raise _not_json(f"a field is named {_short(odd)}, a {type(odd).__name__}", place)
                inner.extend(value.values())
            elif isinstance(value, list):
                inner.extend(value)
            elif value is not None and not isinstance(value, (str, bool, int, float)):
                raise _not_json(f"a value is a {type(value).__name__}", place)
        level = [value for value in inner if value is not None]
        if not level:
            return
    raise _not_json(f"it is nested deeper than {_MAX_DEPTH}", place)


def _short(name: object) -> str:
    # Python refuses to write integers of thousands of digits.
    return "by a long integer" if isinstance(name, int) and name.bit_length() > 200 else repr(name)[:80]


def _not_json(how: str, place: str) -> DataError:
    return DataError(
        f"`extra` of the record cannot be carried to another rank unchanged: {how}",
        place=place,
        remedy="Keep text, numbers, lists and objects with text keys there, or leave the field out.",
    )


def _damaged(how: str, place: str) -> DataError:
    return DataError(f"a sample in transit is damaged: {how}", place=place, remedy="Start again from the last state.")
