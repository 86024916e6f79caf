"""Layouts: ranks and coordinates are inverse, what cannot run is refused with the nearest that can."""

import math
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.errors import LayoutError
from balancer.layout import SPREAD, Domain, Layout, ParallelSpec


@given(st.integers(1, 9), st.integers(1, 9))
def test_rank_and_coordinates_are_inverse(dp_size: int, pp_size: int) -> None:
    layout = Layout(dp_size=dp_size, pp_size=pp_size)
    coordinates = [layout.coordinates(rank) for rank in range(layout.world_size)]
    assert [layout.rank(*pair) for pair in coordinates] == list(range(dp_size * pp_size))
    assert len(set(coordinates)) == layout.world_size


def test_pipeline_neighbours_are_rank_neighbours() -> None:
    layout = Layout(dp_size=2, pp_size=3)
    assert layout.rank(1, 1) == layout.rank(1, 0) + 1 == 4


def test_a_rank_outside_the_world_is_refused() -> None:
    with pytest.raises(LayoutError, match="rank 6 is outside a world of 6"):
        Layout(dp_size=2, pp_size=3).coordinates(6)


@pytest.mark.parametrize("name", ["dp_size", "pp_size", "tp_size", "cp_size", "ep_size"])
def test_a_degree_below_one_is_refused(name: str) -> None:
    with pytest.raises(LayoutError, match=f"{name}=0: a degree of parallelism is at least 1"):
        Layout(**{name: 0})


@pytest.mark.parametrize("name", ["tp_size", "cp_size", "ep_size"])
def test_a_degree_that_nothing_runs_yet_is_refused(name: str) -> None:
    with pytest.raises(LayoutError, match=f"{name}=2 is not available yet; use {name}=1"):
        Layout(**{name: 2})


def test_for_world_fills_all_processes_with_replicas() -> None:
    assert Layout.for_world(6, pp_size=2) == Layout(dp_size=3, pp_size=2)


def test_a_world_that_cannot_be_filled_names_the_nearest_degree() -> None:
    with pytest.raises(LayoutError, match=r"pp_size=4 does not divide the world of 6 processes; the nearest .* is 3"):
        Layout.for_world(6, pp_size=4)
    with pytest.raises(LayoutError, match="pp_size=0: a degree of parallelism is at least 1"):
        Layout.for_world(2, pp_size=0)


@pytest.mark.parametrize(("pp_size", "stage_ranks"), [(1, [0, 0]), (2, [0, 1]), (3, [0, 1, 2])])
def test_encoder_is_stage_0_and_shares_the_rank_only_without_a_pipeline(pp_size: int, stage_ranks: list[int]) -> None:
    layout = Layout(pp_size=pp_size)
    assert layout.stage_ranks() == stage_ranks
    assert layout.num_stages == len(stage_ranks)


@pytest.mark.parametrize(
    ("options", "stage_ranks", "domains"),
    [
        ({}, (0, 0), "encoder llm"),
        ({"pp_size": 3}, (0, 1, 2), "encoder llm llm"),
        ({"pp_size": 3, "encoder": "shared"}, (0, 0, 1, 2), "encoder llm llm llm"),
        ({"pp_size": 3, "encoder": "spread"}, (SPREAD, 0, 1, 2), "encoder llm llm llm"),
        ({"pp_size": 2, "encoder": "none"}, (0, 1), "llm llm"),
        ({"pp_size": 2, "encoder": "shared", "num_chunks": 2}, (0, 0, 1, 0, 1), "encoder llm llm llm llm"),
        ({"pp_size": 2, "encoder": "shared", "generator": True}, (0, 0, 1, 1), "encoder llm llm generator"),
        ({"pp_size": 2, "encoder": "spread", "generator": True}, (SPREAD, 0, 1, SPREAD), "encoder llm llm generator"),
    ],
)
def test_stages_of_a_pipeline_lie_where_its_table_says(options: dict, stage_ranks, domains: str) -> None:
    spec = ParallelSpec.pipeline(**options)
    assert spec.stage_ranks == stage_ranks
    assert " ".join(spec.domain_of_stage) == domains
    assert spec.num_stages == len(stage_ranks)
    assert spec.num_ranks == options.get("pp_size", 1)
    assert spec.num_chunks == options.get("num_chunks", 1)
    assert spec.spread_stages == tuple(rank == SPREAD for rank in stage_ranks)
    assert spec.has_encoder == (options.get("encoder") != "none")
    assert spec.encoder_is_spread == (options.get("encoder") == "spread")


@given(st.integers(1, 5), st.integers(1, 5))
def test_the_spec_of_a_layout_has_its_stages_and_ranks(dp_size: int, pp_size: int) -> None:
    layout = Layout(dp_size=dp_size, pp_size=pp_size)
    spec = ParallelSpec.of(layout, num_microbatches=6, num_microbatches_multiple=3, meet="microbatch")
    assert list(spec.stage_ranks) == layout.stage_ranks()
    assert (spec.num_stages, spec.num_ranks, spec.dp_size) == (layout.num_stages, pp_size, dp_size)
    assert (spec.num_microbatches, spec.num_microbatches_multiple, spec.meet) == (6, 3, "microbatch")


LLM = Domain(name="llm", ranks=(0, 1))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Domain(name="audio", ranks=(0,)), "domain 'audio' does not exist; domains: encoder, llm, generator"),
        (lambda: Domain(name="llm", ranks=()), r"domain llm: ranks=\(\): give each rank from 0 on once"),
        (lambda: Domain(name="llm", ranks=(0, 0)), r"ranks=\(0, 0\): give each rank from 0 on once"),
        (lambda: Domain(name="llm", ranks=(0,), num_chunks=0), "domain llm: num_chunks=0: a domain has at least one"),
        (lambda: Domain(name="encoder", ranks=(0,), num_chunks=2, spread=True), "and a spread one exactly one"),
        (lambda: ParallelSpec(domains=(LLM, Domain(name="encoder", ranks=(0,)))), "give encoder, llm, generator in"),
        (lambda: ParallelSpec(domains=(Domain(name="encoder", ranks=(0,)),)), "each once, the llm always"),
        (lambda: ParallelSpec(domains=(LLM, LLM)), "each once, the llm always"),
        (lambda: ParallelSpec(domains=(Domain(name="llm", ranks=(1,)),)), r"pipeline ranks \[0\] of 2 hold no domain"),
        (lambda: ParallelSpec(domains=(Domain(name="llm", ranks=(0,), spread=True),)), "the llm cannot be spread"),
        (lambda: ParallelSpec(domains=(LLM,), dp_size=0), "dp_size=0: a degree of parallelism is at least 1"),
        (lambda: ParallelSpec.pipeline(pp_size=0), "pp_size=0: a degree of parallelism is at least 1"),
        (lambda: ParallelSpec.pipeline(encoder="everywhere"), "encoder='everywhere' does not exist; available: own"),
        (lambda: ParallelSpec.pipeline(meet="never"), "meet='never' does not exist; available: step, microbatch, unit"),
        (lambda: ParallelSpec(domains=(LLM,), encoder_group="all"), "encoder_group='all' does not exist"),
        (
            lambda: ParallelSpec(domains=(LLM,), dp_size=2, encoder_group="world"),
            "encoder_group='world' needs one schedule cut .* use encoder_group='replica'",
        ),
        (lambda: ParallelSpec.pipeline(min_num_microbatches=0), "both are at least 1"),
        (
            lambda: ParallelSpec.pipeline(num_microbatches=3, num_microbatches_multiple=8),
            r"3 is no multiple of 8 \(3 = 0 x 8 \+ 3\); use 8",
        ),
    ],
)
def test_a_layout_that_cannot_be_is_refused_with_what_can(make, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        make()


def test_one_replica_is_its_own_world() -> None:
    assert ParallelSpec(domains=(LLM,), encoder_group="world").encoder_group == "world"


def test_domains_and_ranks_may_be_lists_and_numpy_integers() -> None:
    listed = ParallelSpec(dp_size=np.int64(2), domains=[Domain(name="llm", ranks=[np.int32(0), 1])])
    plain = ParallelSpec(dp_size=2, domains=(Domain(name="llm", ranks=(0, 1)),))
    assert listed == plain
    assert hash(listed) == hash(plain)


@pytest.mark.parametrize(
    "value", ["2", True, 2.0, 1.5, None, math.nan, math.inf, 2**70, -1, 0, pytest.param(10**5000, id="long")]
)
@pytest.mark.parametrize(
    "name",
    ["dp_size", "pp_size", "num_chunks", "num_microbatches", "min_num_microbatches", "num_microbatches_multiple"],
)
def test_degrees_are_whole_numbers_in_range(name: str, value: object) -> None:
    if name == "num_microbatches" and value is None:
        return  # the least that fits
    with pytest.raises(LayoutError, match=f"{name}(=|: )"):
        ParallelSpec.pipeline(**{name: value})
    if name in ("dp_size", "pp_size"):
        with pytest.raises(LayoutError, match=f"{name}="):
            Layout(**{name: value})


@pytest.mark.parametrize(
    "options",
    [
        {"pp_size": 10**9},
        {"dp_size": 10**9},
        {"pp_size": 4, "num_chunks": 10**8},
        {"pp_size": 2**12, "num_chunks": 2**12},
        {"num_microbatches": 10**12},
        {"min_num_microbatches": 10**12},
        {"num_microbatches_multiple": 10**12},
        {"dp_size": 2**20, "pp_size": 2**10, "num_microbatches": 2**10},
    ],
)
def test_what_no_cluster_holds_is_refused_before_anything_is_allocated(options: dict[str, int]) -> None:
    tracemalloc.start()
    try:
        with pytest.raises(LayoutError, match="at most"):
            ParallelSpec.pipeline(**options)
        assert tracemalloc.get_traced_memory()[1] < 8 * 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("size", [0, -4, 10**12, 1.0, True, "8"])
def test_a_world_of_another_kind_of_number_is_refused(size: object) -> None:
    with pytest.raises(LayoutError, match="world_size="):
        Layout.for_world(size, pp_size=3)
    with pytest.raises(LayoutError, match="pp_size="):
        Layout.for_world(8, pp_size=10**12 if size == 10**12 else size)


def test_ranks_and_domains_of_another_type_are_refused() -> None:
    for ranks in ("01", ("0",), (1.0,), (True,), 3, {0, 1}, range(10**9)):
        with pytest.raises(LayoutError, match="rank"):
            Domain(name="llm", ranks=ranks)
    for domains in ("llm", ("llm",), None, Domain(name="llm", ranks=(0,))):
        with pytest.raises(LayoutError, match="give a tuple of Domain"):
            ParallelSpec(domains=domains)
