"""JSON lines, or one JSON array, beside a folder of media: LLaVA, ShareGPT, OpenAI messages, captions.

    train.jsonl --one pass--> byte spans of its records --read(offset, size)--> JSON --rows--> record
    images/...  --stat-->     sizes                     --open, read-->         media

Files and media may be local or at URLs (`dataloaders.storage`). Relative paths of media start from the folder of the
file that names them, unless `media_root` says otherwise; see `dataloaders.media_files` for what is refused.

Price: opening reads every file once, see `dataloaders.json_spans` (a remote one crosses the network), and keeps 24
bytes per record, which travel to workers. The fingerprint covers the records, not the media: an image that is replaced
by one of another size is noticed when it is decoded, and then the plan wins (law 6).
"""

import hashlib
import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dataloaders.errors import Reason, RecordError, SourceError
from dataloaders.json_spans import json_spans
from dataloaders.printable import printable
from dataloaders.probe.limits import ProbeLimits
from dataloaders.record_parser import RecordLimits, load_json
from dataloaders.row_source import FileRowSource, RowOptions, listed
from dataloaders.rows import RowFields, check_fields
from dataloaders.storage import Storage, is_local, shown

LINE_EXTENSIONS = (".jsonl", ".ndjson")
KEPT_BYTES = 32 * 1024**2  # of texts that a hint has read


class JsonlSource(FileRowSource):
    """Records of JSONL files or JSON arrays (a `SampleSource`).

    Args:
        paths: files, see `Storage.list`: braces, wildcards, URLs.
        fields: names of the fields of a record; None: the usual ones, see `dataloaders.rows`.
        media_root: folder or URL that paths of media start from; None: the folder of the file.
        media_schemes: of URLs in records that may be fetched, such as ("https",); none by default.
        follow_links: whether links in the folder of media may lead out of it.
        limits: bounds on a record. media_limits: ceilings on media.

    Raises:
        SourceError: files are missing, empty, or no JSON array; or no record has a field that `fields` names.
    """

    media_apart = True  # media are files of their own, which may change while the records stay

    def __init__(
        self,
        paths: str | Path | Sequence[str | Path],
        *,
        fields: RowFields | None = None,
        media_root: str | os.PathLike[str] | None = None,
        media_schemes: Sequence[str] = (),
        follow_links: bool = False,
        storage: Storage | None = None,
        limits: RecordLimits | None = None,
        media_limits: ProbeLimits | None = None,
    ) -> None:
        options = RowOptions.of(fields, media_root, media_schemes, limits, media_limits, follow_links=follow_links)
        super().__init__(paths, options, storage=storage)
        self._nouns: list[str] = []
        self._kept = _KeptTexts()
        seen = self._index()
        check_fields(self._checked_rows(), options.fields, place=listed(self.files), seen=seen)

    def _index(self) -> frozenset[str]:
        """One pass over every file; returns the names of fields that were seen in it."""
        digest = hashlib.sha256(f"jsonl-source-1\n{self.options.fields}".encode())
        starts, sizes, numbers, counts = [], [], [], []
        seen: frozenset[str] = frozenset()
        for state in self._states:
            name = state.url
            only_lines = name.partition("?")[0].lower().endswith(LINE_EXTENSIONS)
            spans = json_spans(self.storage.open(name, state), only_lines=only_lines, wanted=self.options.fields.named)
            if len(spans.start) == 0:
                raise SourceError("the file holds no record", place=shown(name), remedy="Remove it, or fill it.")
            digest.update(f"\n{os.path.basename(name)}\0{state.size}\0{spans.digest}".encode("utf-8", "surrogatepass"))
            starts.append(spans.start)
            sizes.append(spans.size)
            numbers.append(spans.number)
            counts.append(len(spans.start))
            self._nouns.append(spans.noun)
            seen |= spans.names_seen
        # Record i is bytes [start[i], start[i] + size[i]) of its file.
        self._start, self._size, self._number = map(np.concatenate, (starts, sizes, numbers))
        self._ends = np.cumsum(counts)
        self._fingerprint = digest.hexdigest()
        return seen

    @property
    def fingerprint(self) -> str:
        """Over names, sizes and contents of the files, in order, and the names of fields; not over folders or media."""
        return self._fingerprint

    def row(self, i: int, *, keep: bool = False) -> Mapping[str, Any]:
        """The JSON object of record `i`, whose text is kept for the next call with `keep`.

        Raises:
            RecordError: it does not parse.
        """
        shard, key = self._where(i)
        size = int(self._size[i])
        if size > self.options.limits.max_bytes:
            raise RecordError(
                Reason.BAD_RECORD,
                f"the JSON has {size} bytes, above max_bytes={self.options.limits.max_bytes}",
                place=f"shard {shard}, key {key}",
                remedy="Raise RecordLimits.max_bytes if that is meant.",
            )
        state = self._states[self._file_of(i)]
        raw = self._kept.take(i) or self.storage.open(state.url, state).read(int(self._start[i]), size)
        if keep and not is_local(state.url):
            self._kept.put(i, raw)
        value = load_json(raw, shard=shard, key=key, limits=self.options.limits)
        if not isinstance(value, dict):
            raise RecordError(
                Reason.BAD_RECORD,
                f"the JSON is a {type(value).__name__}, not an object",
                place=f"shard {shard}, key {key}",
                remedy='A record is an object: {"messages": [{"role": ...}, ...]}.',
            )
        return value

    def prefetch(self, ids: Sequence[int], *, media: bool = True) -> None:
        """Start fetching the records `ids`, and with `media` those of their media that lie at URLs.

        Media are known by the texts alone: with media at URLs a hint reads the texts of all `ids`. It waits for texts
        that lie at URLs too, and keeps them until they are read.
        """
        for state in {self._states[self._file_of(i)] for i in ids}:
            if not is_local(state.url):
                self.storage.open(state.url, state)  # what is fetched ahead has to be of this state
        self.storage.prefetch(
            [(self._states[self._file_of(i)].url, int(self._start[i]), int(self._size[i])) for i in ids]
        )
        if media:
            for i in ids:
                if self._files.may_be_remote(root := self._media_root(i)):
                    self._files.prefetch(root, self._references(i))

    def _references(self, i: int) -> list[str]:
        """What record `i` says where its media lie; nothing for one that does not parse."""
        found: list[str] = []

        def remember(reference: str, place: str) -> int:
            found.append(reference)
            return 0

        shard, key = self._where(i)
        try:
            self._parser.parse(self.row(i, keep=True), remember, shard=shard, key=key)
        except RecordError:
            return []
        return found

    def _where(self, i: int) -> tuple[str, str]:
        file = self._file_of(i)
        return printable(shown(self._states[file].url)), f"{self._nouns[file]} {self._number[i]}"

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_kept": _KeptTexts()}


class _KeptTexts:
    """Texts by sample, at most `KEPT_BYTES` of them; the oldest go first."""

    def __init__(self) -> None:
        self._texts: OrderedDict[int, bytes] = OrderedDict()
        self._num_bytes = 0

    def put(self, i: int, text: bytes) -> None:
        self.take(i)
        self._texts[i] = text
        self._num_bytes += len(text)
        while self._num_bytes > KEPT_BYTES:
            self._num_bytes -= len(self._texts.popitem(last=False)[1])

    def take(self, i: int) -> bytes | None:
        text = self._texts.pop(i, None)
        self._num_bytes -= len(text or b"")
        return text
