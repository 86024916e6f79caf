"""Multimodal data as a map-style dataset: `dataset[i]` is a sample ready to be packed, and its cost is known before.

    data (tars, JSON, Parquet, ...) --open_source--> source --headers and text--> CostIndex     (kept in a folder)
    dataset[i] --SampleReader--> LoadedSample: tokens [T], labels [T], patches [P, d], in the shape that was planned

No torch here; torch's DataLoader takes it as it is, and `BalancedDataLoader` finds its costs by itself:

    dataset = SampleDataset.open("shards/*.tar", "path/to/model", index="cache/index")
    loader = BalancedDataLoader(dataset, batch_size=4, shuffle=True)

A medium that does not decode makes its sample a zero-loss stand-in of the planned shape, which says so in `replaced`.
Samples that the scan found unusable have a row and no content: the loader leaves them out, indexing them raises.

Price: without `index`, every process scans all data when it opens them. With it, the first process does, ranks that
start at the same time wait for that one, and later runs map the finished index.
"""

import logging
import operator
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, SupportsIndex, TypeAlias, get_args

from balancer.sample_reader import SampleReader
from dataloaders.counts import MediaKind
from dataloaders.decode import PixelConfig
from dataloaders.encoder import ByteEncoder, RecordEncoder
from dataloaders.errors import DataError
from dataloaders.estimators import estimator_from_config
from dataloaders.index import CostIndex
from dataloaders.index_format import unusable_text
from dataloaders.open_source import open_source
from dataloaders.rows import RowFields
from dataloaders.sample import LoadedSample, check_loadable
from dataloaders.scan import build_index, scan_source
from dataloaders.scan_rows import Unfit
from dataloaders.storage import Storage
from dataloaders.template_encoder import TemplateEncoder
from dataloaders.tokenizer import Special

Model: TypeAlias = str | os.PathLike[str] | Mapping[str, Any]
BadRecords = Literal["error", "skip"]

_MAX_LISTED = 10

# What a folder with a tokenizer has at least one of; which of them are needed says `TemplateEncoder.from_folder`.
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
_logger = logging.getLogger(__name__)


class SampleDataset:
    """Samples 0 .. len - 1 of a source; picklable, so that workers get it under fork and spawn.

    Args:
        reader: source, index, token rule and options.

    Attributes:
        reader: as given.

    Raises:
        DataError: samples of this model can be costed but not loaded.
    """

    def __init__(self, reader: SampleReader) -> None:
        self.reader = reader
        self._estimator = check_loadable(reader.estimator, reader.index)

    def __len__(self) -> int:
        return len(self.reader.index)

    def __getitem__(self, i: SupportsIndex) -> LoadedSample:
        """Sample `i`, decoded; a negative one counts from the end.

        Raises:
            IndexError: there is no such sample.
            IndexFormatError: the scan found it unusable, or the data are no longer those of the index.
            OSError, SourceError, RecordError: its shard is gone or has changed.
        """
        return self.reader.load(self._row(i))

    def __getitems__(self, indices: Sequence[SupportsIndex]) -> list[LoadedSample]:
        """Several samples; the source is told of all of them first. torch's DataLoader asks for batches like this."""
        rows = [self._row(i) for i in indices]
        self.reader.prefetch(rows)
        return [self.reader.load(row) for row in rows]

    def __repr__(self) -> str:
        return f"SampleDataset({len(self)} samples, {len(self.cost_index.bad)} of them unusable)"

    @property
    def cost_index(self) -> CostIndex:
        """What every sample costs."""
        return self.reader.index

    @property
    def merge(self) -> int:
        """Patches that become one visual token, along each side."""
        return self._estimator.merge

    @property
    def patch_dim(self) -> int:
        """Numbers of a patch."""
        return PixelConfig.of(self._estimator).patch_dim

    @property
    def placeholder_ids(self) -> tuple[int | None, int | None]:
        """Token that stands at every position of an image, of a video; None: the model has none."""
        encoder = self.reader.encoder
        if isinstance(encoder, TemplateEncoder):
            image, video = (encoder.shape.placeholder(kind) for kind in (MediaKind.IMAGE, MediaKind.VIDEO))
            return (None if image is None else image.token_id), (None if video is None else video.token_id)
        if encoder is None or isinstance(encoder, ByteEncoder):
            return int(Special.IMAGE_PAD), int(Special.VIDEO_PAD)
        return None, None

    def place(self, i: SupportsIndex) -> str:
        """Where sample `i` lies, for messages."""
        return self.reader.place(self._row(i))

    def _row(self, i: SupportsIndex) -> int:
        at, length = operator.index(i), len(self)
        if not -length <= at < length:
            raise IndexError(f"sample {at} is not one of the {length} samples of this dataset")
        return at + length if at < 0 else at

    @classmethod
    def open(
        cls,
        data: str | Path | Sequence[str | Path],
        model: Model,
        *,
        index: str | Path | None = None,
        train_on: str = "assistant",
        encoder: RecordEncoder | None = None,
        fields: RowFields | None = None,
        media_root: str | os.PathLike[str] | None = None,
        storage: Storage | None = None,
        members: Path | None = None,
        apply_orientation: bool = True,
        unfit: Unfit = "skip",
        bad_records: BadRecords = "error",
        video_decoder: str = "auto",
        workers: int | None = 1,
        progress: Callable[[int, int], None] | None = None,
    ) -> "SampleDataset":
        """The samples of `data` as `model` sees them.

        Args:
            data: paths, URLs or a folder, see `dataloaders.open_source`; so are fields, media_root, storage, members.
            model: a Hugging Face folder, or the contents of its configuration files, see `estimator_from_config`.
            index: folder where the index is kept: opened if it is there and current, else built; None: in memory.
            train_on: which turns carry labels: `assistant`, `last` or `all`.
            encoder: tokens of texts, with a `train_on` of its own; None: chat template and tokenizer of the model
                folder, or bytes where it has none.
            apply_orientation, unfit, workers, progress: as in `dataloaders.build_index`.
            bad_records: samples that the scan finds unusable (a missing or damaged file, a record that makes no sense):
                `error` lists them, `skip` leaves them out with a warning.
            video_decoder: see `SampleReader`.

        Raises:
            DataError: no such model, one whose samples cannot be loaded, unfit media under `unfit="error"`, or unusable
                samples under `bad_records="error"`.
            SourceError, OSError: data that are missing, of no known kind, or unreadable.
            IndexFormatError: `index` is a folder of something else, or cannot be written.
        """
        if bad_records not in get_args(BadRecords):
            raise DataError(f"bad_records={bad_records!r}: choose one of {', '.join(get_args(BadRecords))}")
        estimator = check_loadable(estimator_from_config(model))
        encoder = encoder or _encoder_of(model, train_on)
        source = open_source(data, fields=fields, media_root=media_root, storage=storage, members=members)
        if index is None:
            costs = scan_source(
                source,
                estimator,
                train_on=encoder.train_on,
                encoder=encoder,
                apply_orientation=apply_orientation,
                unfit=unfit,
                progress=progress,
            )
        else:
            # Ranks that start at once wait for the one that builds: `build_index` holds a lock beside the folder.
            costs = build_index(
                source,
                estimator,
                index,
                train_on=encoder.train_on,
                encoder=encoder,
                apply_orientation=apply_orientation,
                unfit=unfit,
                workers=workers,
                progress=progress,
            )
        _tell_unusable(costs, bad_records)
        return cls(
            SampleReader(
                source=source,
                index=costs,
                estimator=estimator,
                train_on=encoder.train_on,
                encoder=encoder,
                apply_orientation=apply_orientation,
                video_decoder=video_decoder,
            )
        )


def _encoder_of(model: Model, train_on: str) -> RecordEncoder:
    """The encoder of the model's own files, or bytes."""
    if not isinstance(model, Mapping):
        folder = Path(os.path.expanduser(model))
        if any((folder / name).is_file() for name in _TOKENIZER_FILES):
            return TemplateEncoder.from_folder(folder, train_on=train_on)
    _logger.info("the model has no tokenizer files: one byte is one token")
    return ByteEncoder(train_on=train_on)


def _tell_unusable(index: CostIndex, bad_records: BadRecords) -> None:
    """Say which samples cannot be used, or refuse them.

    Raises:
        DataError: there are some under `error`.
    """
    if not index.bad:
        return
    text = unusable_text(index.bad, len(index), most=_MAX_LISTED)
    if bad_records == "error":
        raise DataError(
            text,
            remedy="Repair them (media that JSON or Parquet name lie under media_root=), or pass bad_records='skip' to "
            "leave them out.",
        )
    _logger.warning("%s", text)
