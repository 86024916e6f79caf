"""Layouts: ranks and coordinates are inverse, what cannot run is refused with the nearest that can."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.errors import LayoutError
from balancer.layout import Layout


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
    with pytest.raises(LayoutError, match="the nearest that does is 1"):
        Layout.for_world(2, pp_size=0)


@pytest.mark.parametrize(("pp_size", "stage_ranks"), [(1, [0, 0]), (2, [0, 1]), (3, [0, 1, 2])])
def test_encoder_is_stage_0_and_shares_the_rank_only_without_a_pipeline(pp_size: int, stage_ranks: list[int]) -> None:
    layout = Layout(pp_size=pp_size)
    assert layout.stage_ranks() == stage_ranks
    assert layout.num_stages == len(stage_ranks)
