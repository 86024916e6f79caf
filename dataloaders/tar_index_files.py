"""Indices that lie beside shards already: read instead of a pass over every header, but only where the shard agrees.

    shard.idx              text of tar2idx and wds2idx (DALI):   `v1.2 N`, then `ext offset size name ...` a sample
    .nv-meta/index.sqlite  Energon's table of sample parts       (local folders; see dataloaders.energon_index)
    shard.tar.idx          Energon's sample offsets (uint64): every header is read still, but in several stretches at
                           once, which helps on object stores and is left out on local disks

They are files that anybody may have written, at any time. So members must lie one behind another from the first byte
to the end-of-archive block; headers are read wherever something lies in between, and in front of the first, the last
and a few other members, those first whose samples look unlike the others. What does not fit, or is older than its
shard, is not believed: the pass over the headers finds
out, and the report says so. Price: an index that lies about names, or about the sizes of two neighbours, in the middle
of a shard is found out by chance alone; what is read wrongly then are bytes of the same shard.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

import numpy as np

from dataloaders.energon_index import EnergonIndex
from dataloaders.errors import MissingFileError, SourceError
from dataloaders.probe.reader import ByteReader
from dataloaders.storage import FileState, Storage, is_local, shown
from dataloaders.storage.read_ahead import ReadAhead
from dataloaders.tar_groups import TarReport, is_field, split_name
from dataloaders.tar_headers import BLOCK, IgnoredMember, TarHeaders, TarMember, padded_end
from dataloaders.tar_index_errors import NotBelieved

MAX_INDEX_BYTES = 256 * 1024**2
NUM_SPOTS = 8  # headers that are read of members that lie one behind another
NUM_ODD = 64  # and of those in samples that have other fields than most: a damaged name makes such a sample

Members = Iterable[TarMember | IgnoredMember]


class IndexFiles:
    """Opens shards and gives their members, from an index where there is one that fits.

    Args:
        storage: opens shards and indices.
        use: False: indices beside the shards are left alone.
    """

    def __init__(self, storage: Storage, *, use: bool = True) -> None:
        self._storage, self._use, self._energon = storage, use, EnergonIndex()

    def close(self) -> None:
        """Let go of open databases."""
        self._energon.close()

    def members(self, state: FileState, report: TarReport, *, place: str, threads: int = 1) -> Members:
        """Every member of a shard in order; `report` gets a note for every index that was not believed.

        Raises:
            SourceError, OSError: the shard cannot be opened, or (when the members are taken) read.
        """
        file = self._opened(state)
        readers: list[Callable[[], Members | None]] = []
        if self._use:
            readers = [lambda: self._from_text(state, file), lambda: self._from_parts(state, file)]
            if threads > 1 and not is_local(state.url):
                readers.append(lambda: self._in_stretches(state, place, threads))
        for read in readers:
            try:
                found = read()
            except NotBelieved as error:
                report.note(f"{place}: {error}; its headers were read instead")
            else:
                if found is not None:
                    return found
        return TarHeaders(file, place=place).members()

    def _from_text(self, state: FileState, file: ByteReader) -> Members | None:
        found = self._beside(state, ".idx")
        if found is None:
            return None
        name, text = found
        return believed(text_members(text, name), file, name=name)

    def _from_parts(self, state: FileState, file: ByteReader) -> Members | None:
        """The members that Energon's database names."""
        found = self._energon.members(state)
        return None if found is None else believed(found, file, name="index.sqlite")

    def _in_stretches(self, state: FileState, place: str, threads: int) -> Members | None:
        """All headers, in stretches that start at samples."""
        found = self._beside(state, ".tar.idx")
        if found is None:
            return None
        name, raw = found
        starts = _stretches(sample_offsets(raw, state.size, name), threads)

        def read(bounds: tuple[int, int | None]) -> Sequence[TarMember | IgnoredMember]:
            headers = TarHeaders(self._opened(state), place=place)
            members = list(headers.members(*bounds))
            if headers.has_globals:
                raise NotBelieved(f"{name} is of no use: the shard has headers that hold for all members behind them")
            return members

        bounds = [*pairwise(starts), (starts[-1], None)]
        try:
            with ThreadPoolExecutor(len(bounds), thread_name_prefix="headers") as pool:
                return [member for members in pool.map(read, bounds) for member in members]
        except SourceError as error:
            raise NotBelieved(f"{name} does not fit the shard ({error.cause})") from error

    def _opened(self, state: FileState) -> ByteReader:
        return ReadAhead(self._storage.open(state.url, state))

    def _beside(self, state: FileState, suffix: str) -> tuple[str, bytes] | None:
        """(name for messages, content) of the file beside a shard; None where there is none.

        Raises:
            NotBelieved: it is too old or too large, or the server does not say whether it is there: stores answer so
                where listing is not allowed. One that fails altogether fails the pass over the headers next.
        """
        url = beside(state.url, suffix)
        if url is None:
            return None
        name = shown(url).rpartition("/")[2]
        try:
            (found,) = self._storage.states([url])
        except MissingFileError:
            return None
        except SourceError as error:
            raise NotBelieved(f"whether {name} is there cannot be told ({error.cause})") from error
        check_age(found, state, name)
        if found.size > MAX_INDEX_BYTES:
            raise NotBelieved(f"{name} has {found.size} bytes, above {MAX_INDEX_BYTES}")
        return name, self._storage.open(url, found).read(0, found.size)


def beside(url: str, suffix: str) -> str | None:
    """Address of a shard with another suffix in place of `.tar`."""
    address, mark, query = (url, "", "") if is_local(url) else url.partition("?")
    return f"{address[:-4]}{suffix}{mark}{query}" if address.endswith(".tar") else None


def check_age(index: FileState, shard: FileState, name: str) -> None:
    """Raise NotBelieved where a local index is older than its shard."""
    if is_local(shard.url) and int(index.stamp) < int(shard.stamp):
        raise NotBelieved(f"{name} is older than the shard")


def text_members(text: bytes, name: str) -> Iterator[TarMember]:
    """The members that a text index names.

    Raises:
        NotBelieved: it is no such index.
    """
    head, _, lines = text.partition(b"\n")
    version, _, count = head.partition(b" ")
    if version != b"v1.2" or not count.strip().isdigit() or len(count) > 20:
        raise NotBelieved(f"{name} is no text index of version v1.2")
    rows = lines.splitlines()
    if len(rows) != int(count):
        raise NotBelieved(f"{name} has {len(rows)} samples, but says {int(count)}")
    for row in rows:
        words = row.split(b" ")
        # A name with blanks cannot be told from two words; tar spells names with others than ASCII by backslashes.
        if len(words) % 4 or b"\\" in row:
            raise NotBelieved(f"{name} has names with blanks or backslashes, or is damaged")
        for suffix, offset, size, member in zip(*[iter(words)] * 4, strict=True):
            if not (offset.isdigit() and size.isdigit() and len(offset) < 19 and len(size) < 19):
                raise NotBelieved(f"{name} has offsets or sizes that are no numbers")
            if not member.endswith(b"." + suffix):
                raise NotBelieved(f"{name} has names that do not end in their extension")
            yield TarMember(member.decode("utf-8", "surrogateescape"), int(offset), int(size))


def sample_offsets(raw: bytes, size: int, name: str) -> list[int]:
    """Offsets of samples in an Energon index; the last one is the end, and left out.

    Raises:
        NotBelieved: they are not offsets of headers in a file of `size` bytes.
    """
    if len(raw) % 8 or not 16 <= len(raw) <= 8 * (size // BLOCK + 2):
        raise NotBelieved(f"{name} has {len(raw)} bytes, for a shard of {size}")
    offsets = np.frombuffer(raw, dtype="<u8")
    if bool((offsets % BLOCK).any()) or bool((offsets[1:] <= offsets[:-1]).any()) or int(offsets[-1]) > size:
        raise NotBelieved(f"{name} has offsets where no header can be")
    return [int(offset) for offset in offsets[:-1]]


def _stretches(starts: Sequence[int], count: int) -> list[int]:
    """0 and up to `count` - 1 of the starts, evenly spread."""
    step = max(1, -(-len(starts) // count))
    return [0, *(start for start in starts[step::step] if start > 0)]


def believed(members: Iterable[TarMember], file: ByteReader, *, name: str) -> list[TarMember | IgnoredMember]:
    """The members that an index names, and what lies between and behind them, if the shard agrees.

    Raises:
        NotBelieved: it does not.
    """
    headers = TarHeaders(file, place=name)
    found: list[TarMember | IgnoredMember] = []
    direct: list[TarMember] = []  # members whose header lies where the one before ends
    at = 0
    try:
        for member in members:
            header = member.offset - BLOCK
            if header < at or member.size > file.size - member.offset:
                raise NotBelieved(f"{name} names bytes that overlap, or lie outside the shard")
            end = padded_end(member.offset, member.size)
            if header == at:
                direct.append(member)
                found.append(member)
            else:
                found += _gap(headers, at, end, member, name)
            at = end
        rest = list(headers.members(at))
        _check_known(rest, name)
        odd = _odd(found, name)
        odd_direct = [member for member in direct if member.offset in odd]
        for member in {*_spread(direct, NUM_SPOTS), *_spread(odd_direct, NUM_ODD)}:
            start, end = member.offset - BLOCK, padded_end(member.offset, member.size)
            if list(headers.members(start, end)) != [member]:
                raise NotBelieved(f"{name} names a member that is another one in the shard")
    except SourceError as error:
        raise NotBelieved(f"{name} does not fit the shard ({error.cause})") from error
    if headers.has_globals:
        raise NotBelieved(f"{name} is of no use: the shard has headers that hold for all members behind them")
    return found + rest


def _odd(members: Sequence[TarMember | IgnoredMember], name: str) -> set[int]:
    """Offsets of the members of samples whose fields are not those that most have.

    Raises:
        NotBelieved: the names do not make samples.
    """
    fields: dict[str, tuple[list[str], list[int]]] = {}
    last = ""
    for member in members:
        named = split_name(member.name) if isinstance(member, TarMember) and is_field(member.name) else None
        if named is None or isinstance(member, IgnoredMember):
            continue
        key, suffix = named
        if key != last and key in fields:
            raise NotBelieved(f"{name} scatters the members of a sample")
        last = key
        suffixes, offsets = fields.setdefault(key, ([], []))
        suffixes.append(suffix.lower())
        offsets.append(member.offset)
    kinds = Counter(tuple(sorted(suffixes)) for suffixes, _ in fields.values())
    usual = kinds.most_common(1)[0][0] if kinds else ()
    if any(len(set(kind)) < len(kind) for kind in kinds):
        raise NotBelieved(f"{name} names a field of a sample twice")
    return {offset for suffixes, offsets in fields.values() if tuple(sorted(suffixes)) != usual for offset in offsets}


def _spread(members: Sequence[TarMember], count: int) -> list[TarMember]:
    """The first, the last, and evenly between them `count` in all."""
    last = len(members) - 1
    return [members[k] for k in sorted({k * last // (count - 1) for k in range(count)})] if members else []


def _gap(headers: TarHeaders, at: int, end: int, member: TarMember, name: str) -> list[TarMember | IgnoredMember]:
    """What lies between `at` and the end of a member: extension headers and members that are no fields."""
    between = list(headers.members(at, end))
    if not between or between[-1] != member:
        raise NotBelieved(f"{name} names a member that is another one in the shard")
    _check_known(between[:-1], name)
    return between


def _check_known(others: Iterable[TarMember | IgnoredMember], name: str) -> None:
    if any(isinstance(other, TarMember) and is_field(other.name) for other in others):
        raise NotBelieved(f"{name} lacks members of the shard")
