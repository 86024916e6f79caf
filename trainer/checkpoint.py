"""Checkpoints: torch.distributed.checkpoint files in a folder that exists only when it is complete.

    checkpoints/.step_000100.tmp/   being written: every rank its own pieces, then meta.json, each synced to disk
      | rename (atomic)
    checkpoints/step_000100/        .metadata, __0_0.distcp, __1_0.distcp, meta.json (format version, step, progress)

Tensors are stored under names that do not know the layout: `model.NAME`, `optimizer.NAME.exp_avg`, `rng.RANK.cpu`.
What was saved by one layout is loaded by any other; replicas' copies are stored once. Weights are strict (a missing,
unexpected or reshaped one is an error on every rank), optimizer state is not: a parameter that was never stepped has
none. What is no tensor is JSON in meta.json. DCP's own `.metadata` is a pickle: load only checkpoints you trust.
"""

import json
import os
import pickle
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from trainer.comm import Comm
from trainer.errors import CheckpointError
from trainer.optim import empty_optimizer_tensors, optimizer_tensors, set_optimizer_tensors

FORMAT_VERSION = 1
_NAME = re.compile(r"step_(\d{6,})")
_META = "meta.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedCheckpoint:
    """What came out of a checkpoint besides the tensors.

    Attributes:
        step: finished steps.
        progress: the JSON values given to `save_checkpoint`.
        without_state: this rank's parameters whose optimizer state was not in the checkpoint.
        rng_restored: whether this rank's generators were set; False when it was saved with fewer ranks.
    """

    step: int
    progress: dict[str, Any]
    without_state: tuple[str, ...] = ()
    rng_restored: bool = False


def save_checkpoint(
    folder: Path,
    step: int,
    *,
    model: Mapping[str, torch.Tensor],
    optimizer: torch.optim.Optimizer | None,
    progress: Mapping[str, Any],
    comm: Comm,
    keep_last: int | None = None,
) -> Path:
    """Write folder/step_NNNNNN; called by all ranks together, each with its own pieces.

    Args:
        folder: where the checkpoints of a run lie.
        step: finished steps.
        model: canonical name -> tensor, of this rank.
        optimizer: made by `trainer.optim.build_optimizer`.
        progress: JSON values that are the same on every rank.
        keep_last: complete checkpoints to keep, the new one included; None keeps all.

    Raises:
        CheckpointError: on every rank, when any of them could not write. Complete checkpoints are left as they were.
    """
    draft, final = folder / f".step_{step:06d}.tmp", folder / f"step_{step:06d}"
    with _agreement(comm, f"checkpoint {final} could not be started"):
        if comm.is_main:
            _clear_leftovers(folder)
            draft.mkdir(parents=True)
    tensors = {f"model.{name}": tensor.detach() for name, tensor in model.items()}
    if optimizer is not None:
        tensors.update({f"optimizer.{name}": tensor for name, tensor in optimizer_tensors(optimizer).items()})
    tensors.update({f"rng.{comm.rank}.{name}": tensor for name, tensor in _rng_state().items()})
    with _agreement(comm, f"checkpoint {final} could not be written"), _quiet():
        dcp.save(tensors, storage_writer=dcp.FileSystemWriter(draft), no_dist=comm.world_size == 1)
    with _agreement(comm, f"checkpoint {final} could not be completed"):
        if comm.is_main:
            _complete(draft, final, step=step, progress=progress, world_size=comm.world_size)
            _prune(folder, keep_last)
    return final


def load_checkpoint(
    path: Path,
    *,
    model: Mapping[str, torch.Tensor],
    comm: Comm,
    optimizer: torch.optim.Optimizer | None = None,
    restore_rng: bool = True,
) -> LoadedCheckpoint:
    """Fill this rank's tensors in place; called by all ranks together, under any layout.

    Args:
        path: a checkpoint, such as `latest_complete` gives.
        model: canonical name -> tensor to fill, of this rank. Over all ranks: the whole model.
        optimizer: receives the state of this rank's parameters; None leaves it out.
        restore_rng: set this rank's generators to where they were.

    Raises:
        CheckpointError: on every rank: not a complete checkpoint, another format version, or a weight that is
            missing, unexpected, or of another shape or dtype.
    """
    with _agreement(comm, f"checkpoint {path} cannot be loaded"):
        meta = read_meta(path)
        reader = dcp.FileSystemReader(path)
        stored = reader.read_metadata().state_dict_metadata
    known = {name for names in comm.gather(list(model)) for name in names}
    with _agreement(comm, f"checkpoint {path} does not fit the model"):
        _refuse_unexpected(stored, known)
        tensors = {f"model.{name}": tensor.detach() for name, tensor in model.items()}
        state: dict[str, torch.Tensor] = {}
        if optimizer is not None:
            found = [key.removeprefix("optimizer.") for key in stored if key.startswith("optimizer.")]
            state = empty_optimizer_tensors(optimizer, found)
            tensors.update({f"optimizer.{name}": tensor for name, tensor in state.items()})
        rng = _empty_rng(stored, comm.rank) if restore_rng else {}
        tensors.update(rng)
        _refuse_misfits(stored, tensors)
    with _agreement(comm, f"checkpoint {path} cannot be read"), _quiet():
        # Every rank reads its own pieces; no collective is needed, and none can hang.
        dcp.load(tensors, storage_reader=reader, no_dist=True)
    without_state = set_optimizer_tensors(optimizer, state) if optimizer is not None else ()
    for key, value in rng.items():
        _set_rng(key.rpartition(".")[2], value)
    return LoadedCheckpoint(
        step=meta["step"], progress=meta["progress"], without_state=without_state, rng_restored=bool(rng)
    )


def latest_complete(folder: Path) -> Path | None:
    """The complete checkpoint with the most finished steps; half-written and damaged ones are passed over."""
    for _, path in sorted(_numbered(folder), reverse=True):
        try:
            read_meta(path)
        except CheckpointError:
            continue
        return path
    return None


def _complete(draft: Path, final: Path, *, step: int, progress: Mapping[str, Any], world_size: int) -> None:
    """Add meta.json to a written draft, bring all of it to the disk and give it its name."""
    sizes = {entry.name: entry.stat().st_size for entry in sorted(draft.iterdir())}
    meta = {
        "format_version": FORMAT_VERSION,
        "step": step,
        "world_size": world_size,
        "torch": str(torch.__version__),
        "progress": dict(progress),
        "files": sizes,
    }
    with (draft / _META).open("w", encoding="utf-8") as file:
        json.dump(meta, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    _sync(draft)
    if final.exists():  # this step was reached before, by the run that is being continued
        _delete(final)
    os.rename(draft, final)
    _sync(final.parent)


def read_meta(path: Path) -> dict[str, Any]:
    """`step` and `progress` of a complete checkpoint: all files are there with the size they were written with.

    Raises:
        CheckpointError: it is not complete, damaged, or of another format version.
    """
    try:
        meta = json.loads((path / _META).read_text(encoding="utf-8"))
        version, files = meta["format_version"], dict(meta["files"])
        meta = {"step": int(meta["step"]), "progress": dict(meta["progress"])}
        sizes = {name: (path / name).stat().st_size for name in files if version == FORMAT_VERSION}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is not a complete checkpoint: {error}") from None
    if version != FORMAT_VERSION:
        raise CheckpointError(f"{path} has format version {version}; this version reads {FORMAT_VERSION}")
    for name, size in files.items():
        if sizes[name] != size:
            raise CheckpointError(f"{path / name} is damaged: {sizes[name]} bytes, {size} were written")
    return meta


def _refuse_unexpected(stored: Mapping[str, object], known: set[str]) -> None:
    unexpected = sorted({k.removeprefix("model.") for k in stored if k.startswith("model.")} - known)
    if unexpected:
        raise CheckpointError(f"it holds weights that the model lacks: {_listed(unexpected)}")


def _refuse_misfits(stored: Mapping[str, object], tensors: Mapping[str, torch.Tensor]) -> None:
    missing = [key for key in tensors if key not in stored]
    if missing:
        raise CheckpointError(f"it lacks {_listed(missing)}")
    misfits = []
    for key, tensor in tensors.items():
        entry = stored[key]
        if not isinstance(entry, TensorStorageMetadata):
            misfits.append(f"{key} is no tensor")
        elif (entry.size, entry.properties.dtype) != (tensor.shape, tensor.dtype):
            was, now = f"{entry.properties.dtype}{list(entry.size)}", f"{tensor.dtype}{list(tensor.shape)}"
            misfits.append(f"{key} is {was} there and {now} in the model")
    if misfits:
        raise CheckpointError(_listed(misfits))


def _listed(names: list[str], limit: int = 5) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def _rng_state() -> dict[str, torch.Tensor]:
    """State of the generators a model may draw from: torch's, on the CPU and on this rank's GPU."""
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _empty_rng(stored: Mapping[str, object], rank: int) -> dict[str, torch.Tensor]:
    """Tensors to load this rank's generators into; only those that were saved for it and exist here."""
    return {
        key: torch.empty_like(state) for name, state in _rng_state().items() if (key := f"rng.{rank}.{name}") in stored
    }


def _set_rng(name: str, state: torch.Tensor) -> None:
    if name == "cuda":
        torch.cuda.set_rng_state(state)
    else:
        torch.set_rng_state(state)


def _numbered(folder: Path) -> list[tuple[int, Path]]:
    if not folder.is_dir():
        return []
    matches = ((_NAME.fullmatch(entry.name), entry) for entry in folder.iterdir())
    return [(int(match[1]), entry) for match, entry in matches if match]


def _prune(folder: Path, keep_last: int | None) -> None:
    """Delete the oldest checkpoints; the newest complete one always stays."""
    if keep_last is None:
        return
    for _, path in sorted(_numbered(folder), reverse=True)[max(keep_last, 1) :]:
        _delete(path)


def _delete(path: Path) -> None:
    # Renamed first: a kill while files are being removed must not leave something that looks like a checkpoint.
    doomed = path.with_name(f".{path.name}.deleting")
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(path, doomed)
    shutil.rmtree(doomed)


def _clear_leftovers(folder: Path) -> None:
    """Remove what a killed save left; complete checkpoints have other names."""
    if folder.is_dir():
        for entry in folder.iterdir():
            if entry.name.startswith(".step_") and entry.name.endswith((".tmp", ".deleting")):
                shutil.rmtree(entry)


def _sync(folder: Path) -> None:
    """Bring a folder's list of names to the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _agreement(comm: Comm, what: str) -> Iterator[None]:
    """Run the same block on every rank and raise on all of them what failed on any: none is left waiting."""
    failure, cause = "", None
    try:
        yield
    except (Exception, dcp.CheckpointException) as error:  # the latter is no Exception
        _raise_interrupt(error)
        failure, cause = _first_line(error), error
    failures = [(rank, text) for rank, text in enumerate(comm.gather(failure)) if text]
    if failures:
        where = f" (rank {failures[0][0]}): " if comm.world_size > 1 else ": "
        raise CheckpointError(what + where + failures[0][1]) from cause


def _raise_interrupt(error: BaseException) -> None:
    """Raise Ctrl-C again as what it is, where DCP has wrapped it as a failure of its own."""
    if isinstance(error, dcp.CheckpointException):
        for failure, _ in error.failures.values():
            if not isinstance(failure, Exception):
                raise failure from None


def _first_line(error: BaseException) -> str:
    """The cause in one line; DCP wraps it in the traceback of every rank."""
    if isinstance(error, dcp.CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    if isinstance(error, pickle.UnpicklingError):  # torch's own text advises to load the file unsafely
        return "a file is damaged. Delete the folder of this checkpoint; --resume then continues from the one before it"
    return next(iter(str(error).splitlines()), "") or type(error).__name__


@contextmanager
def _quiet() -> Iterator[None]:
    """Leave out DCP's remark that one process saves and loads alone, which is what was asked for."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        yield
