"""How commands reach data: the storage, and where the table of members of tar shards is kept.

--cache-dir FOLDER    ranges of remote files and tables of members, in FOLDER
(none)                tables of members, in the user's cache folder, where training looks for them
"""

from dataclasses import dataclass
from pathlib import Path

from dataloaders.cache_folder import cache_folder, make_usable, members_folder, ranges_folder
from dataloaders.storage import Storage, StorageOptions
from tools.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """What the sources of a command are opened with.

    Attributes:
        members: folder for tables of members; None: there is none that can be written to.
    """

    storage: Storage
    members: Path | None


def reach(cache_dir: Path | None) -> Reach:
    """Storage and tables for `--cache-dir`.

    Raises:
        UsageError: a folder that was named cannot be written to; without the user's own nothing is kept.
    """
    try:
        cache = make_usable(cache_folder(cache_dir))
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home folder
        if cache_dir is not None:
            raise UsageError(f"--cache-dir {cache_dir} cannot be written to: {error}.") from None
        return Reach(storage=Storage(), members=None)
    options = StorageOptions() if cache_dir is None else StorageOptions(cache_dir=ranges_folder(cache))
    return Reach(storage=Storage(options), members=members_folder(cache))
