"""The table of a source: from a folder where it is kept, or by passing over the shards that changed since.

    shards --states--> unchanged in the folder? --> mapped, no header read
                       otherwise: rows of unchanged shards | pass_over(changed shards) --> table --> folder

One file per list of shards, so that several sources share a folder. A shard is unchanged when size and stamp
(modification time, ETag) are; an edit that restores both is not seen. Old files of lists that are no longer used are
left there.
"""

import hashlib
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

from dataloaders.errors import SourceError
from dataloaders.member_table import MemberTable, TableBuilder
from dataloaders.storage import FileState, Storage, is_local
from dataloaders.tar_index_files import IndexFiles
from dataloaders.tar_pass import pass_over

SUFFIX = ".members"
MAX_LOOKED_AT = 8  # tables of other lists of shards whose rows may be taken over
REMOTE_THREADS = 16  # shards, or stretches of one, whose headers are fetched at once


def table_of(states: Sequence[FileState], storage: Storage, folder: Path | None = None) -> MemberTable:
    """The table of the shards with these states (by absolute names), in order.

    Args:
        folder: where tables are kept; None: nowhere.

    Raises:
        SourceError, OSError: a shard cannot be passed over, see `pass_over`; nothing can be written in `folder`.
    """
    if folder is None:
        return _made(states, [], storage)
    path = folder / f"{_name(states)}{SUFFIX}"
    current, tables = _kept(states, path)
    return current if current is not None else _written(_made(states, tables, storage), path)


def known_rows(states: Sequence[FileState], folder: Path) -> MemberTable | None:
    """Rows of those of the shards that are unchanged in the folder; None where none is. No header is read."""
    current, tables = _kept(states, folder / f"{_name(states)}{SUFFIX}")
    return current if current is not None else _collected(states, tables, partly=True)


def keep_rows(states: Sequence[FileState], tables: Sequence[MemberTable], folder: Path) -> bool:
    """Keep the table of these shards in the folder, if `tables` and the folder have the rows of all; says whether.

    Raises:
        SourceError: nothing can be written there.
    """
    path = folder / f"{_name(states)}{SUFFIX}"
    current, kept = _kept(states, path)
    if current is not None:
        return True
    table = _collected(states, [*tables, *kept], partly=False)
    if table is not None:
        _written(table, path)
    return table is not None


def _collected(states: Sequence[FileState], tables: Sequence[MemberTable], *, partly: bool) -> MemberTable | None:
    """Rows of these shards out of several tables; None where there are none, or (not `partly`) not all."""
    known = {file: (table, k) for table in reversed(tables) for k, file in enumerate(table.files)}
    found = [known[state] for state in states if state in known]
    if not found or (len(found) < len(states) and not partly):
        return None
    builder = TableBuilder()
    for table, k in found:
        builder.add_shard_of(table, k)
    return builder.table()


def _kept(states: Sequence[FileState], path: Path) -> tuple[MemberTable | None, list[MemberTable]]:
    """(the table of these shards as they are, []); where it is not in the folder, (None, tables with rows of some)."""
    known = _opened(path)
    if known is not None and list(known.files) == list(states):
        return known, []  # others are not looked at: each costs a pass over its columns
    return None, [*([] if known is None else [known]), *_others(path)]


def _written(table: MemberTable, path: Path) -> MemberTable:
    try:
        return table.write(path)
    except OSError as error:
        raise SourceError(
            f"the table of members cannot be kept here: {error}",
            place=str(path.parent),
            remedy="Choose another folder for it (members=...), or change the permissions.",
        ) from error


def _made(states: Sequence[FileState], tables: Sequence[MemberTable], storage: Storage) -> MemberTable:
    """The table, with the rows of unchanged shards from other tables."""
    known = {file: (table, k) for table in reversed(tables) for k, file in enumerate(table.files)}
    passed = _passed([state for state in states if state not in known], storage)
    builder = TableBuilder()
    for state in states:
        builder.add_shard_of(*(known[state] if state in known else (next(passed), 0)))
    return builder.table()


def _passed(states: Sequence[FileState], storage: Storage) -> Iterator[MemberTable]:
    """Tables of single shards, passed over now: local ones one by one, remote ones several at a time."""
    with closing(IndexFiles(storage)) as indices:
        if all(is_local(state.url) for state in states):
            yield from (pass_over(state, indices) for state in states)
            return
        threads = max(1, REMOTE_THREADS // len(states))
        with ThreadPoolExecutor(REMOTE_THREADS, thread_name_prefix="shards") as pool:
            try:
                yield from pool.map(lambda state: pass_over(state, IndexFiles(storage), threads=threads), states)
            finally:
                pool.shutdown(cancel_futures=True)


def _opened(path: Path) -> MemberTable | None:
    """The table in a file; None where there is none, or a damaged one, which is made again."""
    try:
        return MemberTable.open(path)
    except (OSError, SourceError):
        return None


def _others(but: Path) -> Iterator[MemberTable]:
    """The newest tables of other lists of shards, beside that of this one."""
    try:
        paths = [entry for entry in os.scandir(but.parent) if entry.name.endswith(SUFFIX) and entry.path != str(but)]
        paths.sort(key=lambda entry: -entry.stat().st_mtime_ns)
    except OSError:
        return
    for entry in paths[:MAX_LOOKED_AT]:
        table = _opened(Path(entry.path))
        if table is not None:
            yield table


def _name(states: Sequence[FileState]) -> str:
    names = "\n".join(state.url for state in states)
    return hashlib.sha256(names.encode("utf-8", "surrogateescape")).hexdigest()[:24]
