"""Building of the demo corpus: WebDataset tar shards with a manifest, made once and continued after a kill.

    recipe (pure) -> per shard: draw samples -> .demo-003.tar.tmp -> rename -> demo-003.tar -> manifest.json (same way)

A shard exists whole or not at all, and the manifest lists only finished shards, so a killed build loses at most the
shard it was in. The manifest carries a fingerprint over (recipe version, seed, sizes): another recipe in the folder is
built anew. Builders of one folder wait for each other on a lock, which the system releases when a process dies.
The same arguments give the same bytes as long as Pillow, PyAV and the photographs are the same.
"""

import fcntl
import hashlib
import json
import os
import tarfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path

import av

from dataloaders.demo.clips import require_encoder
from dataloaders.demo.draw import draw_sample
from dataloaders.demo.photos import ORIGINS, PHOTOS, photo_path
from dataloaders.demo.recipe import plan_samples
from dataloaders.errors import SourceError

RECIPE_VERSION = 1
"""Raised whenever the same arguments would give other bytes: cached corpora are then rebuilt."""

MANIFEST = "manifest.json"
_LOCK = ".lock"

Progress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoCorpus:
    """A finished demo corpus.

    Attributes:
        folder: where it lies; shards: its tar files, in order.
        fingerprint: hex digest of recipe version, seed and sizes.
        size_bytes: of all shards together.
        reused_shards: how many were there already; equal to len(shards) when nothing was built.
    """

    folder: Path
    shards: tuple[Path, ...]
    num_samples: int
    seed: int
    fingerprint: str
    size_bytes: int
    reused_shards: int


def build_demo_corpus(
    folder: Path,
    *,
    seed: int = 0,
    num_samples: int = 480,
    samples_per_shard: int = 48,
    progress: Progress | None = None,
) -> DemoCorpus:
    """Build the demo corpus in `folder`, or continue or reuse what is there.

    Args:
        folder: made if missing; only files of the corpus in it are written or removed.
        seed: 0 or more; another seed is another corpus.
        num_samples: samples in all; samples_per_shard: in each tar, the last one may hold fewer.
        progress: called with (samples done, samples in all) after each sample.

    Raises:
        SourceError: an argument is out of range, a photograph or the H.264 encoder is missing, or the folder cannot be
            used.
    """
    _check_arguments(seed, num_samples, samples_per_shard)
    fingerprint = corpus_fingerprint(seed, num_samples, samples_per_shard)
    names = [f"demo-{i:03d}.tar" for i in range(-(-num_samples // samples_per_shard))]
    corpus = DemoCorpus(
        folder=folder,
        shards=tuple(folder / name for name in names),
        num_samples=num_samples,
        seed=seed,
        fingerprint=fingerprint,
        size_bytes=0,
        reused_shards=0,
    )
    with _locked(folder):
        done = _finished(folder, fingerprint)
        reused = sum(name in done for name in names)
        if reused < len(names):
            _check_ingredients()
            _build_missing(corpus, done, samples_per_shard, progress)
    return replace(corpus, size_bytes=sum(done.values()), reused_shards=reused)


def corpus_fingerprint(seed: int, num_samples: int, samples_per_shard: int) -> str:
    """Hex digest of everything that decides the content."""
    values = {
        "recipe_version": RECIPE_VERSION,
        "seed": seed,
        "num_samples": num_samples,
        "samples_per_shard": samples_per_shard,
    }
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _check_arguments(seed: int, num_samples: int, samples_per_shard: int) -> None:
    limits = {"seed": (seed, 0), "num_samples": (num_samples, 1), "samples_per_shard": (samples_per_shard, 1)}
    for name, (value, least) in limits.items():
        if value < least:
            raise SourceError(f"{name} is {value}, but must be at least {least}", place="build_demo_corpus")
    if seed >= 2**64:
        raise SourceError(f"seed is {seed}, but must be below 2**64", place="build_demo_corpus")


def _check_ingredients() -> None:
    """Fail before the first sample, not in the middle of a build."""
    for photo in PHOTOS:
        photo_path(photo)
    require_encoder()


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with open(folder / _LOCK, "wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield
    except OSError as error:
        if isinstance(error, av.FFmpegError):  # some of these are OSErrors too, but say nothing about the folder
            raise
        raise SourceError(
            f"Cannot write the demo corpus: {error}", place=str(folder), remedy="Choose a writable local folder."
        ) from error


def _finished(folder: Path, fingerprint: str) -> dict[str, int]:
    """Sizes in bytes of the shards that are finished and whole; shards of another recipe are removed."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        shards = {str(name): int(size) for name, size in manifest["shards"].items()}
        same = manifest["fingerprint"] == fingerprint
    except (FileNotFoundError, ValueError, KeyError, TypeError, AttributeError):
        return {}  # no manifest or not one of ours: nothing is known to be finished
    if same:
        return {n: s for n, s in shards.items() if (folder / n).is_file() and (folder / n).stat().st_size == s}
    for name in shards:
        if name == Path(name).name:  # a manifest must not name files elsewhere
            (folder / name).unlink(missing_ok=True)
    return {}


def _build_missing(corpus: DemoCorpus, done: dict[str, int], samples_per_shard: int, progress: Progress | None) -> None:
    """Build the shards that `done` does not list; `done` (name -> bytes) and the manifest grow with each."""
    specs = plan_samples(corpus.num_samples, corpus.seed)
    _replace(corpus.folder / "ORIGINS.md", f"# Photographs of the demo corpus\n\n{ORIGINS}".encode())
    for index, path in enumerate(corpus.shards):
        first = index * samples_per_shard
        members = specs[first : first + samples_per_shard]
        if path.name not in done:
            part = path.with_name(f".{path.name}.tmp")
            with tarfile.open(part, "w", format=tarfile.USTAR_FORMAT) as tar:
                for offset, spec in enumerate(members):
                    _add(tar, draw_sample(spec, corpus.seed))
                    if progress is not None and offset + 1 < len(members):
                        progress(first + offset + 1, len(specs))
            os.replace(part, path)
            done[path.name] = path.stat().st_size
            manifest = {"format_version": 1, "fingerprint": corpus.fingerprint, "seed": corpus.seed, "shards": done}
            _replace(corpus.folder / MANIFEST, json.dumps(manifest, indent=1).encode())
        if progress is not None:
            progress(first + len(members), len(specs))


def _add(tar: tarfile.TarFile, members: Sequence[tuple[str, bytes]]) -> None:
    # Owner, date and mode are the defaults of TarInfo, not those of this machine: equal bytes everywhere.
    for name, data in members:
        info = tarfile.TarInfo(name)
        info.size = len(data)
        tar.addfile(info, BytesIO(data))


def _replace(path: Path, data: bytes) -> None:
    part = path.with_name(f".{path.name}.tmp")
    part.write_bytes(data)
    os.replace(part, path)
