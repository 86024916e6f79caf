"""The eligible ids of a run, derived again from its cost index, by the rules that its ledger names.

    index (as scanned) --selection/adjusted.npz--> samples made to fit --capacities, held-out share--> ids
                fingerprint in the ledger                  fingerprint too             number and digest in the ledger

What is missing (an index that was moved) is a note: the rest is proven without it. What contradicts is a finding.
"""

from pathlib import Path

from balancer.errors import BalancerError, LedgerError
from balancer.ledger import ids_digest
from balancer.ledger_lines import RunLine
from balancer.plan import Capacities
from balancer.run_evidence import ADJUSTED_FILE, FOLDER, MEMORY_FILE, read_cost
from balancer.select import eligible_ids, oversize_reasons, split_held_out
from dataloaders.adjusted_file import read_adjusted
from dataloaders.errors import DataError, IndexFormatError
from dataloaders.index import CostIndex
from dataloaders.index_concat import IndexConcat
from tools.found import Found, Int64Array, few


def known_ids(run: RunLine, folder: Path, found: Found, notes: list[str]) -> tuple[CostIndex, Int64Array] | None:
    """(index of a run, the ids it trains on); None, with a note or a finding, where they cannot be had."""
    try:
        index = _adjusted(run, _scanned(run), folder, found)
        ids = None if index is None else _trained_ids(index, run, folder)
    except (BalancerError, DataError, OSError) as error:
        notes.append(f"the ledger is checked without the index: {error}")
        return None
    if index is None or ids is None:
        return None
    if len(ids) != run.num_ids or ids_digest(ids) != run.ids_digest:
        found("the eligible ids that follow from the index are not those of the run: one of its options differs")
        return None
    return index, ids


def _scanned(run: RunLine) -> CostIndex:
    """The cost index of a run before any sample is made to fit, of a mixture those of its parts seen as one.

    Raises:
        LedgerError: it is gone, or another one lies there now.
    """
    fingerprint = run.base_index or run.index
    if not run.parts:
        return _open(run.index_folder, fingerprint)
    index = IndexConcat({part.name: _open(part.index_folder, part.index) for part in run.parts})
    if index.fingerprint != fingerprint:
        raise LedgerError(f"the indices of its parts make up {index.fingerprint}, that of the run is {fingerprint}")
    return index


def _open(folder: str, fingerprint: str) -> CostIndex:
    if not folder:
        raise LedgerError("it was kept in memory")
    if not Path(folder).is_dir():
        raise LedgerError(f"{folder} is gone")
    index = CostIndex.open(folder)
    if index.fingerprint != fingerprint:
        raise LedgerError(f"{folder} has fingerprint {index.fingerprint}, that of the run is {fingerprint}")
    return index


def _adjusted(run: RunLine, base: CostIndex, folder: Path, found: Found) -> CostIndex | None:
    """`base` with the samples that the run has made to fit; None, with a finding, where these are not the run's.

    Raises:
        LedgerError: what was adjusted is gone.
    """
    if not run.base_index:
        return base
    path = folder / FOLDER / ADJUSTED_FILE
    if not path.is_file():
        raise LedgerError(f"{path}, which says how samples were made to fit, is gone")
    try:
        index = read_adjusted(path, base)
    except IndexFormatError as error:
        found(str(error))
        return None
    if index.fingerprint != run.index:
        found(f"{path} does not hold the samples made to fit of this run: it was edited, or is another run's")
        return None
    needless = sorted(set(index.adjustments) - set(oversize_reasons(base, _capacities(run))))
    if needless:
        found(f"samples {few(needless)} were made to fit, but fit a micro-batch as they are")
    return index


def _trained_ids(index: CostIndex, run: RunLine, folder: Path) -> Int64Array:
    """The ids that a run trains on, by its own rules, int64 [n]."""
    memory = read_cost(folder, MEMORY_FILE) if run.capacity_bytes else None
    if run.capacity_bytes and memory is None:
        raise LedgerError(f"{folder / FOLDER / MEMORY_FILE}, which says what fits a micro-batch, is gone")
    eligible = eligible_ids(index, _capacities(run), "drop", cost_model=memory).ids
    return split_held_out(eligible, share=run.eval_share, seed=run.seed)[0]


def _capacities(run: RunLine) -> Capacities:
    return Capacities(
        tokens=run.capacity_tokens, patches=run.capacity_patches, activation_bytes=run.capacity_bytes or None
    )
