"""Where things are kept that can be made again: one rule for every program, so that each finds what another has made.

$XDG_CACHE_HOME/mllm-balancer, or ~/.cache/mllm-balancer, or what the user names
    members/    tables of members of tar shards, see dataloaders.member_cache
    ranges/     ranges of remote files, see dataloaders.storage
"""

import os
import tempfile
from pathlib import Path


def cache_folder(given: Path | None = None) -> Path:
    """`given`, else the user's cache folder (XDG rule); it need not be there yet."""
    if given is not None:
        return given
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "mllm-balancer"


def make_usable(folder: Path) -> Path:
    """The folder, made if need be. Raises OSError where it cannot be written to."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder):
        pass
    return folder


def members_folder(cache: Path) -> Path:
    """Where tables of members are kept in a cache folder."""
    return cache / "members"


def ranges_folder(cache: Path) -> Path:
    """Where ranges of remote files are kept in a cache folder."""
    return cache / "ranges"
