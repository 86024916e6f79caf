"""From options to samples: source, cost index, what is eligible, what is held out, and every sample left out by name.

    --data (or the demo corpus) -> source -> CostIndex (cached) -> eligible ids -> train ids | held-out ids
    --mixture   -> source and CostIndex of every part, cached alone -> MixtureSource, IndexConcat -> the same

Runs before any process group exists: the ranks of a node take turns behind a file lock, so that a long scan never
happens inside a collective. The first one builds, the others find the result.
"""

import fcntl
import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from balancer.cost_model import CostModel
from balancer.oversize import OversizeReport, fit_oversize
from balancer.plan import Capacities
from balancer.plan_loader import SampleReader
from balancer.select import Dropped, eligible_ids, split_held_out
from dataloaders.cache_folder import cache_folder, make_usable, members_folder
from dataloaders.demo import build_demo_corpus
from dataloaders.encoder import ByteEncoder
from dataloaders.errors import DataError
from dataloaders.estimators import TokenEstimator, estimator_from_config
from dataloaders.index import BadSample, CostIndex
from dataloaders.index_concat import IndexConcat
from dataloaders.index_format import unusable_text
from dataloaders.mixture_source import MixtureSource
from dataloaders.mixture_spec import MixtureSpec, read_mixture
from dataloaders.open_mixture import open_mixture
from dataloaders.open_source import open_source
from dataloaders.sample import check_loadable
from dataloaders.scan import build_index
from dataloaders.source import SampleSource, groups
from dataloaders.storage import Storage, StorageOptions
from dataloaders.tar_source import TarSource
from trainer.config import DataOptions, PlacementOptions, StepOptions
from trainer.errors import ConfigError
from trainer.option_checks import GIB

Progress = Callable[[str, int, int], None]

MAX_LISTED = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSide:
    """One source with its costs.

    Attributes:
        source, index, estimator: see `dataloaders`.
        ids: int64 [n], eligible samples in index order.
        dropped: samples left out by the oversize policy.
        bad: samples left out by the scan (unusable record or media).
        oversize: what became of samples larger than a micro-batch that were shrunk or cut.
        mixture: what the mixture asks for; None: one set of samples. Then `source` is a `MixtureSource`, `index` an
            `IndexConcat`.
    """

    source: SampleSource
    index: CostIndex
    estimator: TokenEstimator
    ids: np.ndarray
    dropped: tuple[Dropped, ...]
    bad: tuple[BadSample, ...]
    oversize: OversizeReport | None = None
    mixture: MixtureSpec | None = None


def capacities_of(options: PlacementOptions) -> Capacities:
    """Hard limits of one micro-batch."""
    return Capacities(
        tokens=options.capacity_tokens, patches=options.patch_limit, activation_bytes=options.activation_bytes
    )


def training_side(
    options: PlacementOptions,
    processor: Mapping[str, Any],
    *,
    memory: CostModel | None = None,
    progress: Progress | None = None,
) -> DataSide:
    """What is trained on: the mixture or the data that were named, or the demo corpus. As `prepare`."""
    if options.mixture is None:
        return prepare(options, options.data, processor, memory=memory, progress=progress)
    spec = read_mixture(options.mixture)
    cache = usable_cache(options)
    estimator = check_loadable(estimator_from_config(processor))
    with locked(cache / "build.lock"):
        source = open_mixture(spec, storage=remote_storage(options), members=members_folder(cache))
        parts = {
            name: _indexed(options, part, estimator, cache, _named(progress, f"index of {name}"))
            for name, part in source.parts.items()
        }
    return replace(select(options, source, IndexConcat(parts), estimator, memory=memory), mixture=spec)


def prepare(
    options: PlacementOptions,
    data: str | None,
    processor: Mapping[str, Any],
    *,
    memory: CostModel | None = None,
    progress: Progress | None = None,
) -> DataSide:
    """Open `data` (None: the demo corpus), index it or find its index, and apply the policies for unusable samples.

    Args:
        processor: config mapping of the token rule.
        memory: models the bytes of samples under `capacity_memory_gib`, see `trainer.calibrated.memory_model`.

    Raises:
        DataError: bad records under `bad_records=error`, listing them; a missing or broken shard; a model whose samples
            can be costed, but not loaded.
        OversizeError: samples above the capacities under `oversize=error`, listing them.
    """
    cache = usable_cache(options)
    estimator = check_loadable(estimator_from_config(processor))
    with locked(cache / "build.lock"):
        if data is None:
            corpus = build_demo_corpus(cache / "demo", progress=_named(progress, "demo corpus"))
            source: SampleSource = TarSource([str(shard) for shard in corpus.shards])
        else:
            source = open_source(
                data, media_root=options.media_root, storage=remote_storage(options), members=members_folder(cache)
            )
        index = _indexed(options, source, estimator, cache, _named(progress, "index"))
    return select(options, source, index, estimator, memory=memory)


def _indexed(
    options: PlacementOptions,
    source: SampleSource,
    estimator: TokenEstimator,
    cache: Path,
    progress: Callable[[int, int], None] | None,
) -> CostIndex:
    """The index of one source, found in the cache or built there."""
    return build_index(
        source,
        estimator,
        index_folder(cache, source, estimator, options),
        train_on=options.train_on,
        apply_orientation=options.apply_orientation,
        unfit=options.unfit,
        workers=None,
        progress=progress,
    )


def select(
    options: PlacementOptions,
    source: SampleSource,
    index: CostIndex,
    estimator: TokenEstimator,
    *,
    memory: CostModel | None = None,
) -> DataSide:
    """Apply the policies for unusable and for oversize samples to an index."""
    check_loadable(estimator, index)
    if index.bad and options.bad_records == "error":
        remedy = "Repair them, or pass --bad-records skip to train without them (they are counted in the summary)"
        if any(bad.unfit for bad in index.bad):
            remedy += ", or --unfit clamp to train on media that the processor would fail on as nearly as it can"
        raise DataError(f"{unusable_text(index.bad, len(index), most=MAX_LISTED)}\n{remedy}.")
    capacities = capacities_of(options)
    fitted = fit_oversize(
        index,
        capacities,
        options.oversize,
        source=source,
        estimator=estimator,
        encoder=ByteEncoder(train_on=options.train_on),
    )
    index, adjusts = fitted.index, options.oversize in ("shrink", "truncate_text")
    eligibility = eligible_ids(
        index,
        capacities,
        options.oversize_rest if adjusts else options.oversize,
        why=fitted.why,
        cost_model=memory,
    )
    if not len(eligibility.ids):
        raise DataError(
            f"no sample is left of {len(index)}: {len(index.bad)} unusable, {eligibility.num_oversize} above the "
            f"capacity of a micro-batch ({_limits(capacities)}). The first one: {source.place(0)}: "
            f"{eligibility.dropped[0].reason}",
            remedy="Raise the capacity that it exceeds (--capacity-tokens, --capacity-patches, --capacity-memory-gib), "
            "or repair the samples.",
        )
    return DataSide(
        source=source,
        index=index,
        estimator=estimator,
        ids=eligibility.ids,
        dropped=eligibility.dropped,
        bad=tuple(index.bad),
        oversize=fitted.report,
    )


def _limits(capacities: Capacities) -> str:
    return ", ".join(f"{limit} {name.replace('_', ' ')}" for name, limit in capacities.limits())


def split(side: DataSide, *, share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(training ids, held-out ids), seeded, disjoint, together all eligible samples.

    Raises:
        DataError: no training sample has a label token, so that no step could change a weight.
    """
    train_ids, held_out = split_held_out(side.ids, share=share, seed=seed)
    if not side.index.samples["label_tokens"][train_ids].any():
        raise DataError(
            f"none of the {len(train_ids)} training samples has a label token: nothing would be learned",
            remedy="Give them assistant turns, or label other turns with --train-on all.",
        )
    return train_ids, held_out


def read_groups(side: DataSide, options: PlacementOptions) -> np.ndarray | None:
    """int64 [n]: what block shuffle deals in, see `dataloaders.source.groups`; None where nothing is shuffled so."""
    if not isinstance(options, StepOptions) or options.shuffle != "block":
        return None
    return groups(side.source, side.index)


def sample_reader(side: DataSide, options: PlacementOptions, *, with_pixels: bool = True) -> SampleReader:
    """How samples of `side` become micro-batches; ranks without an encoder need no pixels."""
    return SampleReader(
        source=side.source,
        index=side.index,
        estimator=side.estimator,
        train_on=options.train_on,
        apply_orientation=options.apply_orientation,
        loss_reduction=options.loss_reduction,
        with_pixels=with_pixels,
        video_decoder=options.video_decoder,
    )


def usable_cache(options: DataOptions) -> Path:
    """`--cache-dir`, else the user's cache folder; made if need be.

    Raises:
        ConfigError: it cannot be written to.
    """
    folder = cache_folder(options.cache_dir)
    try:
        return make_usable(folder)
    except OSError as error:
        raise ConfigError(
            f"the cache folder {folder} cannot be written to: {error}. Give another --cache-dir."
        ) from None


def remote_storage(options: DataOptions) -> Storage:
    """How URLs are read: with a local cache if `--remote-cache` names one.

    Raises:
        ConfigError: it cannot be written to.
    """
    if options.remote_cache is None:
        return Storage()
    try:
        folder = make_usable(options.remote_cache.expanduser().absolute())
    except OSError as error:
        raise ConfigError(
            f"the cache folder {options.remote_cache} cannot be written to: {error}. Give another --remote-cache."
        ) from None
    return Storage(
        StorageOptions(cache_dir=folder, cache_bytes=max(1, int(min(options.remote_cache_gib * GIB, 2**62))))
    )


def notes(side: DataSide) -> list[str]:
    """What somebody should know about a data set although it can be trained on: likely slips, one sentence each."""
    said = []
    for name, part in _named_parts(side.source):
        said += [f"{name}{line}" for line in (part.report.lines() if isinstance(part, TarSource) else [])]
    if side.oversize is not None and side.oversize.text():
        said.append(side.oversize.text())
    unlabelled = int((side.index.samples["label_tokens"][side.ids] == 0).sum())
    if unlabelled:
        said.append(f"{unlabelled} of {len(side.ids)} samples have no label token: they cost time and teach nothing")
    return said


def _named_parts(source: SampleSource) -> list[tuple[str, SampleSource]]:
    """(what messages about it begin with, source) of every part of a mixture, or of the one source."""
    if isinstance(source, MixtureSource):
        return [(f"{name}: ", part) for name, part in source.parts.items()]
    return [("", source)]


def index_folder(cache: Path, source: SampleSource, estimator: TokenEstimator, options: DataOptions) -> Path:
    """One folder per (source, token rule, labelling, policy): changing one of them never finds a stale index."""
    decides = (source.fingerprint, estimator.fingerprint, options.train_on, options.apply_orientation, options.unfit)
    key = "|".join(map(str, decides))
    return cache / "index" / hashlib.sha256(key.encode()).hexdigest()[:24]


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock on `path`; released by the system if the process dies."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(handle, fcntl.LOCK_UN)


def _named(progress: Progress | None, name: str) -> Callable[[int, int], None] | None:
    return None if progress is None else lambda done, total: progress(name, done, total)
