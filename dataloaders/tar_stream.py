"""WebDataset tars from front to back: any shard that can be opened as a stream, compressed or printed by a command.

    urls --Storage--> shards --dealt to lanes--> ForwardReader --tar_headers--> members --tar_groups--> RawSample

Headers, names and grouping follow the rules of `TarSource`; here a member's bytes are taken as they pass. Use
`TarSource` where shards are plain files: it plans over everything and reads only what is planned.

Price: every byte of a shard passes this process, and going on at sample k of a shard passes what lies before it
(of a plain stored file its headers alone). In memory at a time: the members of one sample and one member of the next.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from dataloaders.byte_stream import ForwardReader, StreamLimits, command_output, open_stored
from dataloaders.counts import MediaKind
from dataloaders.errors import Reason, RecordError, SourceError
from dataloaders.printable import printable
from dataloaders.raw_sample import BadRecord, RawSample
from dataloaders.record import MediaRef
from dataloaders.record_parser import RecordLimits, parse_record
from dataloaders.storage import FileState, Storage, absolute, shown
from dataloaders.stream_source import StreamItem, checked_lanes, part_of, position_of
from dataloaders.tar_groups import (
    TEXT_FIELDS,
    SampleField,
    SampleMembers,
    TarReport,
    group_members,
    media_kind,
    split_name,
)
from dataloaders.tar_headers import IgnoredMember, TarHeaders, TarMember
from dataloaders.tar_pass import base_name

PIPE = "pipe:"
MAX_MEMBERS_PER_SAMPLE = 100_000


class TarStream:
    """Tar shards as a stream (a `StreamSource`): lane l reads shards l, l + lanes, l + 2 lanes, ...

    Args:
        urls: as for `TarSource`, and `pipe:command` with `allow_pipe`.
        lanes: sub-streams; None: one for each shard, at most 16. The window of a loader takes from all lanes alike.
        storage: where shards are opened; None: a new `Storage()`.
        limits: bounds on a record. bounds: on members, samples and shards.
        allow_pipe: run `pipe:` commands in a shell. Only for URLs that you wrote yourself.

    Raises:
        SourceError: no shard, one that is missing or listed twice, or a `pipe:` without `allow_pipe`.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        lanes: int | None = None,
        storage: Storage | None = None,
        limits: RecordLimits | None = None,
        bounds: StreamLimits | None = None,
        allow_pipe: bool = False,
    ) -> None:
        self._storage = storage or Storage()
        self._limits, self._bounds = limits or RecordLimits(), bounds or StreamLimits()
        self._shards = _shards(urls, self._storage, allow_pipe=allow_pipe)
        self.lanes = checked_lanes(lanes, len(self._shards), "TarStream")
        named = "\n".join(shard.label for shard in self._shards)
        text = f"tar-stream-1\n{self.lanes}\n{named}"
        self.fingerprint = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()

    @property
    def shards(self) -> tuple[str, ...]:
        """Absolute paths, URLs and commands, in order."""
        return tuple(shard.url for shard in self._shards)

    def read(self, lane: int, cursor: int) -> Iterator[tuple[int, StreamItem]]:
        """Samples of the lane's shards from `cursor` on.

        Raises:
            SourceError: a shard is damaged, cut, over a bound, without a sample, or its command fails.
            OSError: storage fails.
        """
        first, skipped = part_of(cursor)
        for part, number in enumerate(range(lane, len(self._shards), self.lanes)):
            if part < first:
                continue
            for index, item in self._read_shard(self._shards[number], skipped if part == first else 0):
                yield position_of(part, index), item

    def _read_shard(self, shard: "_Shard", skip: int) -> Iterator[tuple[int, StreamItem]]:
        """(number in the shard, sample) of the samples from number `skip` on."""
        place = f"shard {shard.shown}"
        reader, close = self._open(shard, place)
        try:
            members = _PassingMembers(reader, self._bounds, place=place, skip=skip)
            for sample in group_members(members.members(), place=place, report=TarReport()):
                number = members.count()
                if number >= skip:
                    yield number, self._sample(sample, members, shard.shown)
                members.drop()
            if not members.num_samples:
                raise SourceError(
                    "the shard holds no sample", place=place, remedy="Remove it, or put members like 0001.json in."
                )
            if shard.state is None:
                reader.drain()
        finally:
            close()

    def _open(self, shard: "_Shard", place: str) -> tuple[ForwardReader, Callable[[], None]]:
        if shard.state is None:
            return command_output(shard.url.removeprefix(PIPE), limits=self._bounds, place=place)
        return open_stored(self._storage, shard.state, limits=self._bounds, place=place), _nothing

    def _sample(self, sample: SampleMembers, members: "_PassingMembers", shard: str) -> StreamItem:
        key = printable(sample.key)
        place = f"shard {shard}, key {key}"
        media = [
            (MediaRef(kind=entry.kind, member=f"{key}.{printable(entry.suffix)}", size_bytes=entry.size), entry)
            for entry in sample.media
            if entry.kind is not None
        ]
        try:
            texts = {entry.suffix.lower(): members.data(entry, place) for entry in sample.texts}
            record = parse_record(
                texts.get("json"),
                texts.get("txt"),
                [ref for ref, _ in media],
                shard=shard,
                key=key,
                limits=self._limits,
            )
            # The k-th placeholder of a kind stands for the k-th member of that kind.
            queues = {kind: iter([entry for _, entry in media if entry.kind is kind]) for kind in MediaKind}
            return RawSample(record, tuple(members.data(next(queues[ref.kind]), place) for ref in record.media))
        except RecordError as error:
            return BadRecord(place=place, error=error)


@dataclass(frozen=True, slots=True)
class _Shard:
    """A shard: a stored file with its state, or a command without one. `label` is what the fingerprint covers."""

    url: str
    label: str
    state: FileState | None = None

    @property
    def shown(self) -> str:
        """For messages and records."""
        return printable(shown(self.url))


def _shards(urls: str | Sequence[str], storage: Storage, *, allow_pipe: bool) -> list[_Shard]:
    listed = [urls] if isinstance(urls, (str, os.PathLike)) else list(urls)
    commands = [url for url in listed if isinstance(url, str) and url.startswith(PIPE)]
    if commands and not allow_pipe:
        raise SourceError(
            f"{commands[0]!r} is a command, and commands are not run unless that is asked for",
            remedy="Pass allow_pipe=True if you wrote it yourself.",
        )
    names = [] if commands else list(map(absolute, storage.list(listed)))
    if commands:  # in the order in which they are given, which one call for all files would not keep
        names = [n for url in listed for n in ([url] if url in commands else map(absolute, storage.list(url)))]
    if len(set(names)) < len(names):
        raise SourceError("a shard or command is listed twice", remedy="List every one once.")
    states = {state.url: state for state in storage.states([name for name in names if name not in commands])}
    return [_shard(name, states.get(name)) for name in names]


def _shard(url: str, state: FileState | None) -> _Shard:
    return _Shard(url, url if state is None else f"{base_name(url)}\0{state.size}", state)


def _nothing() -> None:
    return


@dataclass(slots=True)
class _PassingMembers:
    """Members of one archive on their way to be grouped; the bytes of those that a sample may need are kept.

    A sample is known to be complete when the first member of the next one has passed, so `skip` samples are told by the
    number that is complete already: at most one sample is kept in vain.
    """

    reader: ForwardReader
    bounds: StreamLimits
    place: str
    skip: int
    num_samples: int = 0
    _kept: dict[int, bytes] = field(default_factory=dict)
    _kept_bytes: int = 0
    _too_large: dict[int, int] = field(default_factory=dict)
    _key: str = ""
    _key_bytes: int = 0
    _key_members: int = 0
    _key_start: int = 0

    def members(self) -> Iterator[TarMember | IgnoredMember]:
        """Members in archive order, their bytes taken before they are handed on."""
        for member in TarHeaders(self.reader, place=self.place).members():
            if isinstance(member, TarMember):
                self._pass(member)
            yield member

    def count(self) -> int:
        """Number of the sample that was grouped just now."""
        self.num_samples += 1
        return self.num_samples - 1

    def data(self, entry: SampleField, place: str) -> bytes:
        """Bytes of a member. Raises RecordError where it exceeded a bound."""
        if entry.offset in self._too_large:
            raise RecordError(
                Reason.TOO_LARGE,
                f"member .{printable(entry.suffix)} of {entry.size} bytes brings the sample above "
                f"max_member_bytes={self.bounds.max_member_bytes} or max_sample_bytes={self.bounds.max_sample_bytes}",
                place=place,
                remedy="Raise StreamLimits if that is meant.",
            )
        return self._taken(entry.offset)

    def drop(self) -> None:
        """Forget what was kept for the sample that was grouped; the first member of the next one stays."""
        for offset in [offset for offset in self._kept if offset < self._key_start]:
            self._taken(offset)
        for offset in [offset for offset in self._too_large if offset < self._key_start]:
            del self._too_large[offset]

    def _taken(self, offset: int) -> bytes:
        data = self._kept.pop(offset)
        self._kept_bytes -= len(data)
        return data

    def _pass(self, member: TarMember) -> None:
        named = split_name(member.name)
        if named is None:
            return
        key, suffix = named
        if key != self._key:
            self._key, self._key_bytes, self._key_members, self._key_start = key, 0, 0, member.offset
        self._key_members += 1
        if self._key_members > MAX_MEMBERS_PER_SAMPLE:
            raise SourceError(
                f"key {printable(key)} has more than {MAX_MEMBERS_PER_SAMPLE} members",
                place=self.place,
                remedy="Build the shard again with fewer members for a sample.",
            )
        if self.num_samples + 1 < self.skip or not _is_read(suffix):
            return
        self._key_bytes += member.size
        bounds = self.bounds
        # The second bound is on two samples, one complete and one beginning, and holds however names alternate.
        held = self._kept_bytes + member.size
        if member.size > bounds.max_member_bytes or max(self._key_bytes, held // 2) > bounds.max_sample_bytes:
            self._too_large[member.offset] = member.size
        else:
            self._kept[member.offset] = self.reader.read(member.offset, member.size)
            self._kept_bytes += member.size


def _is_read(suffix: str) -> bool:
    return suffix.lower() in TEXT_FIELDS or media_kind(suffix) is not None
