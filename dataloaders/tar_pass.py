"""One shard, from its headers to the table of its members: the pass that makes a tar a random-access source.

    shard --index beside it, believed?--> members                      dataloaders.tar_index_files
          --otherwise: every header-----> members --tar_groups--> samples --TableBuilder--> table of this shard

The table, and so the fingerprint, is the same either way. Price of the pass: 512 bytes read per member (about 20 us
each on a local disk). On an object store headers are fetched ahead, several stretches of a shard at once where an index
says where samples start.
"""

import hashlib
import os
import posixpath
from collections.abc import Iterable, Iterator
from urllib.parse import urlsplit

from dataloaders.errors import SourceError
from dataloaders.member_table import MemberTable, TableBuilder
from dataloaders.storage import FileState, is_local, shown
from dataloaders.tar_groups import SampleMembers, TarReport, group_members, report_json
from dataloaders.tar_headers import STREAMED_NAMES, decompress
from dataloaders.tar_index_files import IndexFiles

COMPRESSED = (*STREAMED_NAMES, ".zst", ".tzst", ".lz4", ".zip")


def pass_over(state: FileState, indices: IndexFiles, *, threads: int = 1) -> MemberTable:
    """The table of one shard.

    Args:
        state: the shard, by its absolute name.
        indices: opens it, and reads what lies beside it.
        threads: stretches of a remote shard that may be read at once.

    Raises:
        SourceError: it is empty, cut, no plain tar, or has changed; or the members of a key are scattered.
        OSError: it cannot be read.
    """
    place, report, builder = f"shard {shown(state.url)}", TarReport(), TableBuilder()
    digest = hashlib.sha256(f"tar-shard-1\n{base_name(state.url)}\0{state.size}".encode("utf-8", "surrogatepass"))
    members = indices.members(state, report, place=place, threads=threads)

    def digested(samples: Iterable[SampleMembers]) -> Iterator[SampleMembers]:
        for sample in samples:
            digest.update(_table_line(sample).encode("utf-8", "surrogatepass"))
            yield sample

    builder.add(digested(group_members(members, place=place, report=report)))
    if not report.num_samples:
        raise SourceError(
            "the shard holds no sample", place=place, remedy="Remove it, or put members like 0001.json in."
        )
    builder.end_shard(state, digest.hexdigest(), report_json(report))
    return builder.table()


def source_fingerprint(shard_fingerprints: Iterable[str]) -> str:
    """Fingerprint of a source of these shards, in order: of names, sizes and members, not of folders or contents."""
    return hashlib.sha256("\n".join(["tar-source-2", *shard_fingerprints]).encode()).hexdigest()


def base_name(url: str) -> str:
    """Last part of a path; of a URL, without its query, which may be a signature that expires."""
    return os.path.basename(url) if is_local(url) else posixpath.basename(urlsplit(url).path)


def check_plain(urls: Iterable[str]) -> None:
    """Raise SourceError for a shard whose name says that it is compressed."""
    for url in urls:
        name = base_name(url).lower()
        if name.endswith(COMPRESSED):
            raise SourceError(
                "this is a compressed file, not a plain tar",
                place=f"shard {shown(url)}",
                remedy=decompress(streamed=name.endswith(STREAMED_NAMES)),
            )


def _table_line(sample: SampleMembers) -> str:
    """One sample of the member table as text, for the fingerprint."""
    fields = (f"{field.suffix}\0{field.offset}\0{field.size}" for field in (*sample.texts, *sample.media))
    return "\n".join((sample.key, *fields, ""))
