"""The loader of streams in one process: every sample once, the same steps from any state, errors at their boundary."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from balancer.cost_model import CostModel  # noqa: E402
from balancer.errors import OversizeError, PlanError  # noqa: E402
from balancer.layout import Layout  # noqa: E402
from balancer.plan import Capacities  # noqa: E402
from balancer.plan_loader import StepBatches  # noqa: E402
from balancer.sample_reader import SampleReader  # noqa: E402
from balancer.stream_loader import StreamLoader, Window  # noqa: E402
from balancer.stream_plan import StreamState, WindowOptions, plan_window  # noqa: E402
from dataloaders.errors import DataError  # noqa: E402
from dataloaders.estimators import Qwen25VLConfig, Qwen25VLEstimator  # noqa: E402
from dataloaders.scan import scan_source  # noqa: E402
from dataloaders.stream_source import IterableStream, lane_of  # noqa: E402
from dataloaders.tar_source import TarSource  # noqa: E402
from dataloaders.tar_stream import TarStream  # noqa: E402

CELL = 784
ESTIMATOR = Qwen25VLEstimator(
    Qwen25VLConfig(min_pixels=4 * CELL, max_pixels=16 * CELL, video_min_pixels=4 * CELL, video_max_pixels=16 * CELL)
)
Loader = Callable[..., StreamLoader]


def chat(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": text}]}


def stream(sizes: tuple[int, ...] = (9, 0, 4, 11)) -> IterableStream:
    """Lanes that run dry at different times; sample k of lane l has 1 + (7 k + l) % 40 letters."""
    return IterableStream(
        [[chat("x" * (1 + (7 * k + lane) % 40)) for k in range(size)] for lane, size in enumerate(sizes)]
    )


@pytest.fixture
def options(plain_model: Callable[[int], CostModel]) -> WindowOptions:
    return WindowOptions(
        global_batch_size=4,
        capacities=Capacities(tokens=400),
        cost_model=plain_model(2),
        samples_per_lane=3,
        seed=3,
    )


@pytest.fixture
def loader(options: WindowOptions) -> Loader:
    def make(source: Any = None, *, changed: dict[str, Any] | None = None, **more: Any) -> StreamLoader:
        return StreamLoader(source or stream(), ESTIMATOR, replace(options, **(changed or {})), **more)

    return make


def ids_of(step: StepBatches) -> list[int]:
    if step.error is not None:
        raise step.error
    return [int(i) for batch in step.microbatches if batch is not None for i in batch.sample_ids]


def collect(run: StreamLoader, found: list[int]) -> None:
    """Add the ids of all steps to `found`, also of those before an error."""
    for step in run:
        found += ids_of(step)


def test_every_sample_comes_once_an_epoch_and_in_another_order_the_next(loader: Loader) -> None:
    steps = [(step.plan.epoch, ids_of(step)) for step in loader(epochs=2)]
    epochs = [[i for epoch, ids in steps if epoch == number for i in ids] for number in (0, 1)]
    wanted = sorted(lane << 32 | k for lane, size in enumerate((9, 0, 4, 11)) for k in range(size))
    assert sorted(epochs[0]) == sorted(epochs[1]) == wanted
    assert epochs[0] != epochs[1]
    assert [step.plan.step for step in loader(epochs=2)] == list(range(len(steps)))


def test_every_state_goes_on_with_exactly_what_is_left(loader: Loader) -> None:
    whole, states, run = [], [], loader(epochs=2)
    states.append(run.state)
    for step in run:
        whole.append((step.plan.digest, ids_of(step)))
        states.append(run.state)
    for number, state in enumerate(states):
        again = loader(epochs=2, state=StreamState.from_json(state.to_json()))
        assert [(step.plan.digest, ids_of(step)) for step in again] == whole[number:]
        assert again.state == states[-1]


def test_ten_resumes_in_a_row_lose_and_repeat_nothing(loader: Loader) -> None:
    whole = [ids_of(step) for step in loader()]
    found, state = [], None
    for _ in range(10):
        run = loader(state=state)
        for step in run:
            found.append(ids_of(step))
            break
        state = run.state
    assert found == whole[:10]


def test_a_tar_stream_gives_the_batches_that_its_samples_make(small_shard: Path, loader: Loader) -> None:
    source = TarSource(str(small_shard))
    reader = SampleReader(source=source, index=scan_source(source, ESTIMATOR), estimator=ESTIMATOR)
    count = 0
    for step in loader(TarStream(str(small_shard)), changed={"samples_per_lane": 6}):
        for batch in step.microbatches:
            assert batch is not None
            ids = ids_of(step)
            positions = [lane_of(i, lanes=1)[1] for i in batch.sample_ids.tolist()]
            alone = reader.read(positions)
            assert set(batch.sample_ids.tolist()) <= set(ids)
            for name in ("tokens", "labels", "position_ids", "cu_seqlens", "visual_index", "patches", "grids"):
                assert torch.equal(getattr(batch, name), getattr(alone, name)), name
            count += batch.num_samples
    assert count == 6


def test_look_ahead_is_one_window(loader: Loader) -> None:
    read = [0]

    def rows() -> Iterator[dict[str, Any]]:
        for k in range(1000):
            read[0] = k + 1
            yield chat("a")

    steps = iter(loader(IterableStream([rows]), changed={"samples_per_lane": 8}))
    next(steps)
    next(steps)
    assert read[0] <= 16
    next(steps)
    assert read[0] <= 24
    steps.close()  # type: ignore[attr-defined]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("stream-")]


def test_bad_samples_are_counted_listed_and_left_out(loader: Loader) -> None:
    rows = [chat("a"), {"no": "text"}, chat("b"), chat("x" * 500), chat("c")]
    seen: list[Window] = []
    run = loader(
        IterableStream([rows]),
        changed={"bad_records": "skip", "oversize": "drop", "samples_per_lane": 5},
        on_window=seen.append,
    )
    assert sorted(i for step in run for i in ids_of(step)) == [0, 2, 4]
    assert run.num_dropped == {"unusable": 1, "oversize": 1}
    assert [(drop.sample_id, drop.place) for drop in seen[0].dropped] == [
        (1, "shard lane 0, key 1"),
        (3, "shard lane 0, key 3"),
    ]
    assert len(seen[0].plan.table) == 5


def test_bad_samples_stop_the_run_unless_they_may_be_left_out(loader: Loader) -> None:
    with pytest.raises(DataError, match="1 samples of the window cannot be used") as error:
        list(loader(IterableStream([[chat("a"), {"no": "text"}]])))
    assert "lane 0, key 1" in str(error.value)
    with pytest.raises(OversizeError, match="lane 0, key 0: oversize: 5"):
        list(loader(IterableStream([[chat("x" * 500)]])))


def test_a_run_that_stopped_at_a_bad_sample_goes_on_when_it_may_be_skipped(loader: Loader) -> None:
    source = IterableStream([[chat("a")] * 3 + [{"no": "text"}] + [chat("b")] * 2])
    run, found = loader(source), list[int]()
    with pytest.raises(DataError):
        collect(run, found)
    for step in loader(source, changed={"bad_records": "skip"}, state=run.state):
        found += ids_of(step)
    assert sorted(found) == [0, 1, 2, 4, 5]


def test_a_failing_stream_raises_after_the_window_that_was_whole(loader: Loader) -> None:
    def rows() -> Iterator[dict[str, Any]]:
        yield from [chat("a")] * 4
        raise OSError("the disk is gone")

    found, run = list[int](), loader(IterableStream([rows]))
    with pytest.raises(OSError, match="the disk is gone"):
        collect(run, found)
    assert sorted(found) == [0, 1, 2]
    assert run.state.window == 1
    assert run.state.cursors == (3,)


def test_a_stream_without_a_usable_sample_ends_with_an_error_and_not_never(loader: Loader) -> None:
    for source in (IterableStream([[], []]), IterableStream([[{"no": "text"}] * 9])):
        with pytest.raises(PlanError, match="no sample to train on"):
            list(loader(source, changed={"bad_records": "skip"}, epochs=None))


def test_a_state_at_the_end_of_what_there_is_ends_without_an_error(loader: Loader) -> None:
    source = IterableStream([[chat("a")] * 3])  # its end is only found by the next window
    run = loader(source)
    next(iter(run))
    assert run.state.cursors == (3,)
    rest = loader(source, state=run.state)
    assert list(rest) == []
    assert rest.state.epoch == 1


def test_data_or_options_that_changed_are_refused(loader: Loader) -> None:
    run = loader()
    next(iter(run))
    assert run.state.step_in_window == 1
    with pytest.raises(PlanError, match="the state is of another stream or of other options"):
        loader(state=run.state, changed={"seed": 4})
    with pytest.raises(PlanError, match="the state is of another stream"):
        loader(IterableStream([[chat("a")]] * 5), state=run.state)
    changed = stream()
    rows = changed._lanes[0]
    rows[0] = chat("something else")  # type: ignore[index]
    with pytest.raises(PlanError, match="is not what it was when the state was saved"):
        list(loader(changed, state=run.state))


def test_planned_weights_and_a_recorded_window(loader: Loader, options: WindowOptions) -> None:
    seen: list[Window] = []
    run = loader(on_window=seen.append)
    for step in run:
        labels = sum(batch.num_label_tokens for batch in step.microbatches if batch is not None)
        assert run.planned_weight(step.plan) == labels == step.plan.num_label_tokens
        weights = sum(1 for i in ids_of(step))
        assert run.planned_weight(step.plan, "sample_mean") == pytest.approx(weights)
    for window in seen:
        again = plan_window([window.plan.table], window.plan.start, options, Layout(), lanes=4)
        assert [plan.digest for plan in again.steps] == [plan.digest for plan in window.plan.steps]


def test_an_undecodable_medium_becomes_a_stand_in_with_its_stream_id(
    loader: Loader, image_bytes: Callable[..., bytes]
) -> None:
    whole = image_bytes(200, 200, format="JPEG")
    rows = [
        {
            "messages": [{"role": "user", "content": "<image>?"}, {"role": "assistant", "content": "a"}],
            "images": [{"bytes": data, "path": None}],
        }
        for data in (whole, whole[:700])
    ]
    (step,) = loader(IterableStream([[], rows]))
    (batch,) = step.microbatches
    assert batch is not None
    assert [(item.sample_id, item.place) for item in batch.replaced] == [(1 << 32 | 1, "shard lane 1, key 1")]


@pytest.mark.parametrize("wrong", [{"epochs": 0}, {"read_threads": 0}, {"steps_ahead": 0}, {"round_bytes": 0}])
def test_options_out_of_range_are_refused(loader: Loader, wrong: dict[str, int]) -> None:
    with pytest.raises(PlanError, match=next(iter(wrong))):
        loader(**wrong)


def test_samples_stay_balanced_over_micro_batches(loader: Loader) -> None:
    for step in loader():
        assert int(step.plan.llm_tokens.max()) <= 400
        assert np.array_equal(np.sort(step.plan.sample_ids), np.sort(ids_of(step)))
