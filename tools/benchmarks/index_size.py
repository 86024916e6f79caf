"""Size on disk and opening time of a large index: the rows of a real scan, repeated under keys of their own.

    scan of the corpus [n] --repeat--> index of `num_samples` rows --write--> bytes; --open, look at a column--> ms

No column is compressed, so repeated numbers take the room of different ones; columns that are constant in the corpus
(one image a sample) are stored once, as they would be in a real index of such samples.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from dataloaders.estimators import estimator_from_config
from dataloaders.index import ITEM_COLUMNS, SAMPLE_COLUMNS, CostIndex, write_index
from dataloaders.scan import scan_source
from dataloaders.tar_source import TarSource

SAMPLES_PER_SHARD = 1_000
OPENINGS = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeRow:
    """One large index.

    Attributes:
        name: whose rows are repeated. num_samples: rows of the sample table. size_bytes: of the folder.
        open_ms: CPU milliseconds to open it and sum one column of each table, every time.
    """

    name: str
    num_samples: int
    size_bytes: int
    open_ms: tuple[float, ...]


def size_row(name: str, shards: Sequence[Path], folder: Path, *, num_samples: int) -> SizeRow:
    """Scan `shards`, repeat the rows, write the index to `folder` and open it again and again."""
    index = scan_source(
        TarSource([str(shard) for shard in shards]), estimator_from_config({"model_type": "qwen2_5_vl"})
    )
    write_index(folder, _repeated(index, num_samples))
    times = []
    for _ in range(OPENINGS):
        start = time.process_time()
        opened = CostIndex.open(folder)
        opened.samples["llm_tokens"].sum(), opened.items["patches"].sum(), opened.item_offsets[-1]
        times.append(1e3 * (time.process_time() - start))
    size_bytes = sum(path.stat().st_size for path in folder.iterdir())
    return SizeRow(name=name, num_samples=len(opened), size_bytes=size_bytes, open_ms=tuple(times))


def _repeated(index: CostIndex, num_samples: int) -> CostIndex:
    times = -(-num_samples // len(index))
    keys = [f"{i:09d}" for i in range(times * len(index))]
    shards = [f"/data/train/shard-{i // SAMPLES_PER_SHARD:06d}.tar" for i in range(len(keys))]
    return CostIndex(
        key=index.key,
        samples={name: np.tile(index.samples[name], times) for name in SAMPLE_COLUMNS},
        items={name: np.tile(index.items[name], times) for name in ITEM_COLUMNS},
        names=pa.table({"shard": pa.array(shards), "key": pa.array(keys)}),
        bad=[],
        reasons=index.reasons,
        rules=index.rules,
    )
