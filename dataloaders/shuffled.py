"""Views on a source: a subset of its samples, and the same samples with the media of others.

`ShuffledMediaSource` answers whether a model has *seen* its media: trained or evaluated on texts whose pictures belong
to other samples, it can only know what the texts tell. Records stay valid, because media are exchanged inside groups of
one signature (the same kinds in the same order).
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dataloaders.counts import MediaKind
from dataloaders.errors import DataError, RecordError
from dataloaders.probe.reader import ByteReader
from dataloaders.record import Record
from dataloaders.record_parser import RecordLimits
from dataloaders.source import SampleSource, prefetch, record_limits, shard_and_key


class _View:
    """What views share: sample `i` here is called, and lies, as sample `ids[i]` of the source."""

    source: SampleSource
    ids: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.ids)

    def shard_and_key(self, i: int) -> tuple[str, str]:
        """Shard and key of sample `i`, those of its text."""
        return shard_and_key(self.source, self.ids[i])

    @property
    def groups(self) -> NDArray[np.int64] | None:
        """int64 [n]: number of the file or block of each text, as in the source (of no medium); None: no such."""
        groups: NDArray[np.int64] | None = getattr(self.source, "groups", None)
        return None if groups is None else np.asarray(groups, dtype=np.int64)[np.asarray(self.ids, dtype=np.int64)]

    @property
    def record_limits(self) -> RecordLimits:
        """Bounds on a record, those of the source."""
        return record_limits(self.source)


class SubsetSource(_View):
    """Samples `ids` of a source, renumbered from 0 in that order (a `SampleSource`).

    Raises:
        DataError: an id that the source does not have, or one that is listed twice.
    """

    def __init__(self, source: SampleSource, ids: Iterable[int]) -> None:
        self.source, self.ids = source, tuple(int(i) for i in ids)
        outside = [i for i in self.ids if not 0 <= i < len(source)]
        if outside:
            raise DataError(f"ids {outside[:10]} are not among the {len(source)} samples", place="SubsetSource")
        if len(set(self.ids)) < len(self.ids):
            raise DataError("an id is listed twice", place="SubsetSource", remedy="A subset holds a sample once.")
        self.fingerprint = _digest("subset", source.fingerprint, *self.ids)

    def record(self, i: int) -> Record:
        """Record of the subset's sample `i`."""
        return self.source.record(self.ids[i])

    def media_reader(self, i: int, j: int) -> ByteReader:
        """Ranges of medium `j` of the subset's sample `i`."""
        return self.source.media_reader(self.ids[i], j)

    def media_bytes(self, i: int, j: int) -> bytes:
        """Bytes of medium `j` of the subset's sample `i`."""
        return self.source.media_bytes(self.ids[i], j)

    def place(self, i: int) -> str:
        """Where the subset's sample `i` lies."""
        return self.source.place(self.ids[i])

    def prefetch(self, ids: Sequence[int], *, media: bool = True) -> None:
        """Pass the hint on."""
        prefetch(self.source, [self.ids[i] for i in ids], media=media)


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A sample without a partner, and why: `no media`, `no partner with the same media`, or the error of its record."""

    sample_id: int
    reason: str


class ShuffledMediaSource(_View):
    """The text of each sample with the media of another one (a `SampleSource`).

    Inside every group of samples with one signature, samples are put on a ring in a random order and each takes the
    media of the next: no sample keeps its own, every medium is used once.

    Attributes:
        ids: ids in `source` of the samples that are kept, ascending; sample `i` here is `ids[i]` there.
        donors: ids in `source` whose media they get.
        left_out: samples without media or without a partner.
    """

    def __init__(self, source: SampleSource, seed: int) -> None:
        self.source = source
        groups, self.left_out = _groups(source)
        partner: dict[int, int] = {}
        for number, signature in enumerate(sorted(groups)):
            members = groups[signature]
            if len(members) < 2:
                self.left_out.append(LeftOut(members[0], "no partner with the same media"))
                continue
            words = np.random.Philox(key=seed, counter=number << 192).random_raw(len(members))
            ring = [members[k] for k in np.argsort(words, kind="stable").tolist()]
            partner |= dict(zip(ring, ring[1:] + ring[:1], strict=True))
        self.left_out.sort(key=lambda left: left.sample_id)
        self.ids = tuple(sorted(partner))
        self.donors = tuple(partner[i] for i in self.ids)
        self.fingerprint = _digest("shuffled-media", source.fingerprint, *self.donors)

    def record(self, i: int) -> Record:
        """Text of sample `i`, media of its donor."""
        return replace(self.source.record(self.ids[i]), media=self.source.record(self.donors[i]).media)

    def media_reader(self, i: int, j: int) -> ByteReader:
        """Ranges of medium `j` of the donor."""
        return self.source.media_reader(self.donors[i], j)

    def media_bytes(self, i: int, j: int) -> bytes:
        """Bytes of medium `j` of the donor."""
        return self.source.media_bytes(self.donors[i], j)

    def place(self, i: int) -> str:
        """Where text and media lie."""
        return f"{self.source.place(self.ids[i])} with the media of {self.source.place(self.donors[i])}"

    def prefetch(self, ids: Sequence[int], *, media: bool = True) -> None:
        """Pass the hint on: the texts of both samples, of which a record is made, and with `media` those of the donor.

        A source has no hint for media alone, so the text of a donor comes with them.
        """
        prefetch(self.source, [self.ids[i] for i in ids], media=False)
        prefetch(self.source, [self.donors[i] for i in ids], media=media)


def _groups(source: SampleSource) -> tuple[dict[tuple[MediaKind, ...], list[int]], list[LeftOut]]:
    """Sample ids by media signature, and the samples that have none."""
    groups: dict[tuple[MediaKind, ...], list[int]] = {}
    left_out: list[LeftOut] = []
    for i in range(len(source)):
        try:
            signature = tuple(ref.kind for ref in source.record(i).media)
        except RecordError as error:
            left_out.append(LeftOut(i, str(error)))
            continue
        if signature:
            groups.setdefault(signature, []).append(i)
        else:
            left_out.append(LeftOut(i, "no media"))
    return groups, left_out


def _digest(*parts: object) -> str:
    return hashlib.sha256("\n".join(str(part) for part in parts).encode()).hexdigest()
