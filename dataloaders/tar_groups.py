"""Grouping of tar members into samples by the WebDataset convention, and what a report should say about it.

    train/0001.json  train/0001.0.jpg  train/0001.1.jpg     ->  key "train/0001", fields json, 0.jpg, 1.jpg

The key is the folder and the base name up to its first dot; members of a key must follow each other. Media fields are
recognised by their last extension; numbered ones (`0.jpg`, `1.mp4`) are ordered by number, others as in the tar.
Anything else is reported, not read: a `.pth` or `.pickle` is a name in a report, never a file that is opened.
"""

import json
import posixpath
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields

from dataloaders.counts import MediaKind
from dataloaders.errors import SourceError
from dataloaders.printable import printable
from dataloaders.tar_headers import IgnoredMember, TarMember

# One line each is easier to read than a list; sniffing, not the name, decides the format later.
_IMAGES = "avif bmp gif heic heif jfif jp2 j2k jpe jpeg jpf jpg jpx png pnm ppm pgm tif tiff webp"
_VIDEOS = "3gp avi flv m4v mkv mov mp4 mpeg mpg ogv ts webm wmv"
IMAGE_EXTENSIONS, VIDEO_EXTENSIONS = frozenset(_IMAGES.split()), frozenset(_VIDEOS.split())
TEXT_FIELDS = ("json", "txt")
MAX_LISTED = 20
MAX_OTHERS = 5
MAX_UNEXPECTED = 1000  # suffixes that a report counts one by one
MAX_NAMED_CHARS = 80

_NUMBERED = re.compile(r"(\d{1,9})\.[^.]+")
_META = re.compile(r"__[^/]*__($|/)")


@dataclass(frozen=True, slots=True)
class SampleField:
    """One member of a sample. `kind` is None for the text fields."""

    suffix: str
    kind: MediaKind | None
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class SampleMembers:
    """The members of one key: `json`, `txt` (at most one each), media in order; suffixes of `others`, a few."""

    key: str
    texts: tuple[SampleField, ...]
    media: tuple[SampleField, ...]
    others: tuple[str, ...] = ()


@dataclass(slots=True)
class TarReport:
    """What the header pass saw besides good samples.

    Attributes:
        num_shards, num_members, num_samples: seen, regular files, groups.
        ignored: members that are not regular files, by kind; and names without key or extension ("no extension").
        unexpected: fields that are neither text nor media, by suffix.
        incomplete: keys without any text field, at most `MAX_LISTED` of `num_incomplete`.
        notes: sentences about indices beside the shards that were not believed, at most `MAX_LISTED`.
    """

    num_shards: int = 0
    num_members: int = 0
    num_samples: int = 0
    num_incomplete: int = 0
    ignored: Counter[str] = field(default_factory=Counter)
    unexpected: Counter[str] = field(default_factory=Counter)
    incomplete: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def note(self, sentence: str) -> None:
        """Add a note, unless there are enough."""
        if len(self.notes) < MAX_LISTED:
            self.notes.append(sentence)

    def count_unexpected(self, suffix: str) -> None:
        """Count a field that is neither text nor media; a tar may hold millions of different ones."""
        name = f".{printable(suffix[:MAX_NAMED_CHARS])}"
        if name not in self.unexpected and len(self.unexpected) >= MAX_UNEXPECTED:
            name = "others"
        self.unexpected[name] += 1

    def lines(self) -> list[str]:
        """The report as short sentences; empty when there is nothing to say."""
        said = []
        if self.ignored:
            said.append(f"ignored members: {_counts(self.ignored)}")
        if self.unexpected:
            said.append(
                f"fields that are neither text nor media: {_counts(self.unexpected)}"
                " (a key ends at the first dot of the base name; name files like 0001.jpg, not 22.05.jpg)"
            )
        if self.num_incomplete:
            share = 100 * self.num_incomplete / self.num_samples
            said.append(
                f"{self.num_incomplete} of {self.num_samples} samples ({share:.1f} %) have no .json or .txt:"
                f" {', '.join(self.incomplete)}"
            )
        return said + self.notes


def report_json(report: TarReport) -> str:
    """The report as text."""
    # Not `asdict`: it makes a Counter of pairs out of a Counter.
    return json.dumps({entry.name: getattr(report, entry.name) for entry in fields(report)})


def add_report(whole: TarReport, text: str) -> None:
    """Add what `report_json` gave to another report.

    Raises:
        AttributeError, RecursionError, TypeError, ValueError: it did not give this.
    """
    found = TarReport(**json.loads(text))
    for name in ("num_shards", "num_members", "num_samples", "num_incomplete"):
        setattr(whole, name, getattr(whole, name) + getattr(found, name))
    whole.ignored += Counter(found.ignored)
    whole.unexpected += Counter(found.unexpected)
    whole.incomplete = (whole.incomplete + found.incomplete)[:MAX_LISTED]
    whole.notes = (whole.notes + found.notes)[:MAX_LISTED]


def is_field(name: str) -> bool:
    """Whether a member of this name belongs to a sample."""
    return _META.match(name) is None and split_name(name) is not None


def split_name(name: str) -> tuple[str, str] | None:
    """(key, suffix) of a member name; None for hidden files and names without an extension."""
    folder, base = posixpath.split(name)
    stem, dot, suffix = base.partition(".")
    if not stem or not dot:
        return None
    return (posixpath.join(folder, stem) if folder else stem), suffix


def media_kind(suffix: str) -> MediaKind | None:
    """Kind of a media field by its last extension."""
    extension = suffix.rpartition(".")[2].lower()
    if extension in IMAGE_EXTENSIONS:
        return MediaKind.IMAGE
    return MediaKind.VIDEO if extension in VIDEO_EXTENSIONS else None


def group_members(
    members: Iterable[TarMember | IgnoredMember], *, place: str, report: TarReport
) -> Iterator[SampleMembers]:
    """Samples of one shard, in order; `report` is filled on the way.

    Raises:
        SourceError: the members of a key are not adjacent, or a field occurs twice.
    """
    report.num_shards += 1
    seen: set[str] = set()
    current, fields, lowered = "", dict[str, TarMember](), set[str]()
    for member in members:
        named = _named(member, report)
        if named is None or isinstance(member, IgnoredMember):
            continue
        key, suffix = named
        if key != current:
            if fields:
                yield _sample(current, fields, report)
            if key in seen:
                raise _not_adjacent(key, suffix, place)
            seen.add(key)
            current, fields, lowered = key, {}, set()
        if suffix.lower() in lowered:
            raise SourceError(
                f"key {printable(key)} has two members .{printable(suffix)}",
                place=place,
                remedy="Build the shard again with one member per field.",
            )
        fields[suffix] = member
        lowered.add(suffix.lower())
    if fields:
        yield _sample(current, fields, report)


def _named(member: TarMember | IgnoredMember, report: TarReport) -> tuple[str, str] | None:
    """(key, suffix) if the member belongs to a sample; otherwise it is counted."""
    if isinstance(member, IgnoredMember):
        report.ignored[member.kind] += 1
        return None
    report.num_members += 1
    if _META.match(member.name):
        report.ignored["shard metadata"] += 1
        return None
    named = split_name(member.name)
    if named is None:
        report.ignored["no extension"] += 1
    return named


def _sample(key: str, fields: Mapping[str, TarMember], report: TarReport) -> SampleMembers:
    texts: list[SampleField] = []
    media: list[tuple[int, SampleField]] = []
    others: list[str] = []
    for suffix, member in fields.items():
        kind = media_kind(suffix)
        entry = SampleField(suffix, kind, member.offset, member.size)
        if suffix.lower() in TEXT_FIELDS:
            texts.append(entry)
        elif kind is not None:
            number = _NUMBERED.fullmatch(suffix)
            media.append((int(number[1]) if number else -1, entry))
        else:
            report.count_unexpected(suffix)
            others.append(suffix)
    media.sort(key=lambda numbered: numbered[0])  # stable: equal numbers stay in tar order
    report.num_samples += 1
    if not texts:
        report.num_incomplete += 1
        if len(report.incomplete) < MAX_LISTED:
            report.incomplete.append(printable(key))
    return SampleMembers(key, tuple(texts), tuple(entry for _, entry in media), tuple(others[:MAX_OTHERS]))


def _not_adjacent(key: str, suffix: str, place: str) -> SourceError:
    return SourceError(
        f"the members of key {printable(key)} do not follow each other: .{printable(suffix)} comes after other keys",
        place=place,
        remedy="Build the shard again in sorted order: tar --sort=name -cf shard.tar folder.",
    )


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{count} x {name}" for name, count in counter.most_common(MAX_LISTED))
