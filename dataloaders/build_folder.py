"""The folder of a build: where its finished pieces lie until the index is complete, held by one process at a time.

INDEX.building/lock              the system lets go of it when the process dies
INDEX.building/<unit>/...        one small index per finished piece, taken as it is by the next try
INDEX/                           the index itself, moved here whole; then INDEX.building is removed
"""

import fcntl
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from dataloaders.errors import IndexFormatError
from dataloaders.index import unwritable
from dataloaders.storage import shown

MAX_NAMED = 5
OTHERWISE = "choose another folder, or replace this index with --replace (in Python: replace=True)."
_LOCK = "lock"


@contextmanager
def build_folder(folder: Path, *, wait: bool) -> Iterator[Path]:
    """The folder for units beside `folder`, held by this process alone.

    Args:
        wait: wait while another process holds it; False: that is an error.

    Raises:
        IndexFormatError: nothing can be written there, or another process holds it.
    """
    building = folder.parent / f"{folder.name}.building"
    with _lock_file(building / _LOCK, folder, wait=wait):
        try:
            yield building
        finally:
            for path in building.iterdir():
                if path.is_dir():
                    with suppress(OSError):  # those that hold something stay
                        path.rmdir()
            if [path.name for path in building.iterdir()] == [_LOCK]:
                shutil.rmtree(building, ignore_errors=True)


def remove_units(building: Path) -> None:
    """Remove the units when the index that they are for is complete."""
    for path in building.iterdir():
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)


def check_none_lost(folder: Path | None, held: Sequence[str], named: set[str], *, noun: str) -> None:
    """Raise IndexFormatError where an index in `folder` holds files that are not among those that are named."""
    lost = [file for file in held if file not in named]
    if lost:
        more = f" and {len(lost) - MAX_NAMED} more" if len(lost) > MAX_NAMED else ""
        raise IndexFormatError(
            f"{len(lost)} of the {len(held)} {noun}s in this index are not among those that are named: "
            f"{', '.join(map(shown, lost[:MAX_NAMED]))}{more}",
            place=str(folder),
            remedy=f"Name them too, {OTHERWISE}",
        )


@contextmanager
def _lock_file(path: Path, folder: Path, *, wait: bool) -> Iterator[None]:
    while True:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            handle = path.open("a")
        except FileNotFoundError:  # a build that ended just now has removed the folder
            continue
        except OSError as error:
            raise unwritable(folder, error) from error
        with handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise IndexFormatError(
                    "another process is building this index", place=str(folder), remedy="Wait for it, or end it."
                ) from None
            # A build that ended just now has removed the file under our hands: then the lock means nothing.
            if _is_same(path, handle.fileno()):
                yield
                return


def _is_same(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False
