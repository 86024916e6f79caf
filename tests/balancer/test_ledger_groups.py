"""What block shuffle deals in, kept in a ledger: found again for any ids, bounded, and part of what a run is."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.errors import LedgerError
from balancer.ledger import LedgerWriter, ids_digest, read_lines, refuse_other_run
from balancer.ledger_groups import group_runs, groups_of_ids, recorded_groups, runs_digest
from balancer.ledger_lines import RunLine

RUNS = ((0, 4), (1, 3), (2, 5))
RUN = RunLine(
    index="aaaa",
    source="bbbb",
    index_folder="",
    data="a.parquet",
    num_samples=12,
    num_ids=12,
    ids_digest=ids_digest(range(12)),
    seed=1,
    global_batch_size=2,
    shuffle="block",
    block_shards=2,
    groups_digest=runs_digest(RUNS),
    group_runs=RUNS,
)


@given(st.lists(st.integers(0, 4), max_size=60), st.randoms())
def test_groups_are_found_again_for_any_ids(groups: list[int], random: Random) -> None:
    runs = group_runs(groups)
    assert sum(length for _, length in runs) == len(groups)
    assert all(a[0] != b[0] for a, b in pairwise(runs))
    ids = [i for i in range(len(groups)) for _ in range(i % 3)]
    random.shuffle(ids)
    assert groups_of_ids(runs, np.array(ids, dtype=np.int64), num_samples=len(groups)).tolist() == [
        groups[i] for i in ids
    ]


def test_nothing_is_recorded_where_groups_are_the_shards_of_the_index() -> None:
    shards = np.array([0, 0, 1], dtype=np.int32)
    assert recorded_groups(None, shards) == recorded_groups(np.array([0, 0, 1]), shards) == ()
    assert recorded_groups(np.array([0, 1, 1]), shards) == ((0, 1), (1, 2))
    assert runs_digest(()) == ""


def test_groups_are_written_and_read(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    LedgerWriter(path, RUN, step=0, world_size=1, dp_size=1).close()
    assert next(read_lines(path)) == RUN


def test_a_run_with_other_groups_is_another_run_and_the_message_is_short(tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    LedgerWriter(path, RUN, step=0, world_size=1, dp_size=1).close()
    runs = ((0, 6), (1, 6))
    with pytest.raises(LedgerError, match=r"groups_digest was \w{64} and is now \w{64} \(data") as refused:
        refuse_other_run(path, replace(RUN, group_runs=runs, groups_digest=runs_digest(runs)))
    assert "group_runs" not in str(refused.value)


@pytest.mark.parametrize("runs", [((0, 5), (1, 6)), ((0, 12), (1, 0)), ((0, 2**62),), ()])
def test_runs_of_other_samples_are_refused(runs: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(LedgerError, match=r"the run is of 12$"):
        groups_of_ids(runs, np.arange(12), num_samples=12)


def test_ids_of_other_samples_are_refused() -> None:
    with pytest.raises(LedgerError, match="ids from 3 to 12 are not among the 12 samples"):
        groups_of_ids(RUNS, np.array([12, 3]), num_samples=12)


@pytest.mark.parametrize("runs", [((0, 4), (1, 8)), ((2**63, 12),)])
def test_groups_that_do_not_fit_their_digest_or_64_bits_are_no_line(
    tmp_path: Path, runs: tuple[tuple[int, int], ...]
) -> None:
    path = tmp_path / "ledger.jsonl"
    LedgerWriter(path, replace(RUN, group_runs=runs), step=0, world_size=1, dp_size=1).close()
    with pytest.raises(LedgerError, match="line 1: no line of a ledger"):
        list(read_lines(path))
