"""The local search keeps time by the rules of the simulator: same makespans, before and after any number of moves."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from balancer.policies.joint import shortening_inputs
from balancer.policies.joint_core import shorten
from balancer.policies.joint_trial import Trials
from tests.balancer.test_joint import LAYOUTS, make_problem


@given(
    st.integers(0, 2**20),
    st.sampled_from(list(LAYOUTS)),
    st.integers(1, 3),
    st.integers(1, 7),
    st.sampled_from([0, 1, 7, 60]),
    st.sampled_from([0, 13]),
)
def test_makespans_of_the_search_are_those_of_the_simulator(  # noqa: PLR0917  hypothesis gives them in order
    seed: int, layout: str, dp_size: int, num_microbatches: int, turns: int, constant: int
) -> None:
    generator = np.random.Generator(np.random.Philox(seed))
    count = int(generator.integers(1, 40))
    encoder = generator.integers(0, 300, count) * (generator.random(count) < 0.7)
    problem = make_problem(
        encoder,
        generator.integers(1, 500, count),
        layout=layout,
        dp_size=dp_size,
        items=2,
        constant=constant,
        num_microbatches=num_microbatches,
    )
    trials = Trials(problem, num_microbatches)
    start = trials.evaluate(generator.integers(0, dp_size * num_microbatches, count).astype(np.int32))
    program, samples, places, capacity, fixed, unit_size = shortening_inputs(problem, trials, start, num_microbatches)
    makespans, _ = shorten(program, samples, places, capacity, fixed, unit_size, 0, 1000, turns)
    if start.times.routed:  # samples stay in their units and items where they are: stage 0 does not change
        moved = trials.times_of(places[0])
        moved.forward_ns[:, :, 0], moved.backward_ns[:, :, 0] = (
            start.times.forward_ns[:, :, 0],
            start.times.backward_ns[:, :, 0],
        )
        moved.weight_ns[:, :, 0], moved.present[:, :, 0] = start.times.weight_ns[:, :, 0], start.times.present[:, :, 0]
        times = type(moved)(
            forward_ns=moved.forward_ns,
            backward_ns=moved.backward_ns,
            weight_ns=moved.weight_ns,
            present=moved.present,
            routed=True,
        )
    else:
        times = trials.times_of(places[0])
    assert makespans.tolist() == problem.makespans_ns(times).tolist()
    assert makespans.max() <= start.makespan_ns
