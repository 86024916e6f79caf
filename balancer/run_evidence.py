"""What a proof of a run needs beside its ledger, kept in the run folder: costs that selected, samples made to fit.

    RUN/selection/cost.json      what look-ahead evens; the ledger holds its fingerprint
    RUN/selection/memory.json    whose bytes say which samples fit a micro-batch, where bytes are limited
    RUN/selection/adjusted.npz   samples that were shrunk or cut: what was done, and their counts

With these, `balancer-analyze verify` selects again without the model and without the data. They are evidence, not
options: training never reads them. The first start of a run writes them; a resume, whose ledger refuses other samples,
only what is missing.

Price: kilobytes, and about 200 bytes per adjusted sample.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from balancer.cost_model import CostModel
from balancer.errors import CostModelError, LedgerError
from dataloaders.adjusted_file import write_adjusted
from dataloaders.adjusted_index import AdjustedIndex
from dataloaders.index import CostIndex

FOLDER = "selection"
COST_FILE, MEMORY_FILE, ADJUSTED_FILE = "cost.json", "memory.json", "adjusted.npz"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEvidence:
    """What a run has selected its samples by.

    Attributes:
        index: with adjusted samples, if there are any.
        lookahead_cost: what look-ahead evens; None: no look-ahead.
        memory_cost: cost model behind a limit on bytes; None: no such limit.
    """

    index: CostIndex
    lookahead_cost: CostModel | None = None
    memory_cost: CostModel | None = None

    def write(self, run: Path) -> None:
        """Write what is not yet in the folder of the run; each file appears whole or not at all."""
        folder = run / FOLDER
        for name, model in ((COST_FILE, self.lookahead_cost), (MEMORY_FILE, self.memory_cost)):
            if model is not None:
                _write(folder / name, _text_writer(model.to_json()))
        index = self.index
        if isinstance(index, AdjustedIndex):
            _write(folder / ADJUSTED_FILE, lambda path: write_adjusted(path, index))


def read_cost(run: Path, name: str) -> CostModel | None:
    """A stored cost model; None: the run has no such file.

    Raises:
        LedgerError: a file that is none, or was edited.
    """
    path = run / FOLDER / name
    if not path.is_file():
        return None
    try:
        return CostModel.from_json(path.read_text(encoding="utf-8"))
    except (CostModelError, OSError, UnicodeDecodeError) as error:
        raise LedgerError(f"{path} is not what the run has written: {error}") from None


def _text_writer(text: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_text(text + "\n", encoding="utf-8")

    return write


def _write(path: Path, write: Callable[[Path], None]) -> None:
    if path.exists():
        return
    path.parent.mkdir(exist_ok=True)
    draft = path.with_name(f".{path.name}.tmp")
    write(draft)
    with draft.open("rb") as file:
        os.fsync(file.fileno())
    draft.replace(path)
