"""M-RoPE positions: worked by hand, by property, and against transformers."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataloaders.chat import MediaSpan
from dataloaders.errors import DataError
from dataloaders.positions import mrope_positions

TOKENS_PER_SECOND = 2  # of the published Qwen2.5-VL configs


def test_text_advances_all_axes_together() -> None:
    assert mrope_positions(4, [], np.zeros((0, 3))).tolist() == [[0, 1, 2, 3]] * 3


def test_no_tokens_give_no_positions() -> None:
    assert mrope_positions(0, [], []).shape == (3, 0)


def test_the_example_of_the_module() -> None:
    positions = mrope_positions(6, [MediaSpan(1, 4, 0)], [(1, 4, 4)], time_steps=[0])
    assert positions.tolist() == [[0, 1, 1, 1, 1, 3], [0, 1, 1, 2, 2, 3], [0, 1, 2, 1, 2, 3]]
    assert positions.dtype == np.int64


def test_a_video_advances_in_time_by_whole_steps_rounded_down() -> None:
    # Three slices of 1 x 2 tokens, 1.5 indices apart; text goes on behind the largest index (5 + 3).
    positions = mrope_positions(12, [MediaSpan(5, 6, 0)], [(3, 2, 4)], time_steps=[1.5])
    assert positions[:, 5:].tolist() == [[5, 5, 6, 6, 8, 8, 9], [5, 5, 5, 5, 5, 5, 9], [5, 6, 5, 6, 5, 6, 9]]


def test_each_medium_uses_its_own_grid_and_step() -> None:
    spans = [MediaSpan(0, 2, 1), MediaSpan(2, 1, 0)]
    positions = mrope_positions(3, spans, [(1, 2, 2), (2, 2, 2)], time_steps=[0, 7.0])
    assert positions.tolist() == [[0, 7, 8], [0, 0, 8], [0, 0, 8]]


@st.composite
def _layouts(draw: st.DrawFn) -> tuple[int, list[MediaSpan], list[tuple[int, int, int]], list[float]]:
    sides, steps = st.integers(1, 4), st.floats(0, 6, allow_nan=False)
    cells = draw(st.lists(st.tuples(st.integers(1, 4), sides, sides), max_size=4))
    cursor, spans = draw(st.integers(0, 5)), []
    for j, (t, h, w) in enumerate(cells):
        spans.append(MediaSpan(cursor, t * h * w, j))
        cursor += t * h * w + draw(st.integers(0, 4))
    grids = [(t, 2 * h, 2 * w) for t, h, w in cells]
    return cursor + draw(st.integers(0, 4)), spans, grids, [draw(steps) for _ in cells]


@given(_layouts())
def test_positions_never_go_back_behind_a_medium(
    case: tuple[int, list[MediaSpan], list[tuple[int, int, int]], list[float]],
) -> None:
    length, spans, grids, steps = case
    positions = mrope_positions(length, spans, grids, time_steps=steps)
    is_text = np.ones(length, dtype=bool)
    for span in spans:
        is_text[span.start : span.start + span.count] = False
        inside, before = positions[:, span.start : span.start + span.count], positions[:, : span.start]
        assert inside.min() == (before.max() + 1 if span.start else 0)
        t, h, w = grids[span.media_index][0], *(side // 2 for side in grids[span.media_index][1:])
        # axes: (3, t * h * w) -> (3, t, h, w); each index depends on its own axis alone
        time, row, column = (inside - inside[:, :1]).reshape(3, t, h, w)
        assert (time == np.floor(np.arange(t) * steps[span.media_index])[:, None, None]).all()
        assert (row == np.arange(h)[:, None]).all()
        assert (column == np.arange(w)).all()
    text = positions[:, is_text]
    assert (text == text[0]).all()
    assert (np.diff(text[0]) >= 1).all()


@pytest.mark.parametrize("count", [3, 5])
def test_a_span_that_does_not_fit_its_grid_is_refused(count: int) -> None:
    with pytest.raises(DataError, match=r"does not hold the 4 visual tokens of grid \(1, 4, 4\) with merge 2"):
        mrope_positions(9, [MediaSpan(1, count, 0)], [(1, 4, 4)], time_steps=[0])


@pytest.mark.parametrize("spans", [[MediaSpan(0, 4, 0), MediaSpan(3, 4, 0)], [MediaSpan(6, 4, 0)]])
def test_spans_that_overlap_or_leave_the_sample_are_refused(spans: list[MediaSpan]) -> None:
    with pytest.raises(DataError, match="overlaps another one or leaves the 9 tokens"):
        mrope_positions(9, spans, [(1, 4, 4)], time_steps=[0])


@pytest.mark.torch
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(
    ("grids", "seconds"),
    [
        ([(1, 4, 6)], [0.0]),
        ([(1, 12, 2), (1, 2, 8), (1, 6, 6)], [0.0, 0.0, 0.0]),
        ([(3, 8, 12)], [1.0]),  # 3 slices, 2 indices apart: within the 6 columns
        ([(4, 16, 8), (1, 4, 4), (2, 6, 10)], [0.5, 0.0, 1.25]),
    ],
)
def test_positions_equal_those_of_transformers(grids: list[tuple[int, int, int]], seconds: list[float]) -> None:
    torch = pytest.importorskip("torch")
    modeling = pytest.importorskip("transformers.models.qwen2_5_vl.modeling_qwen2_5_vl")
    config = pytest.importorskip("transformers.models.qwen2_5_vl.configuration_qwen2_5_vl").Qwen2_5_VLConfig()
    config.vision_config.tokens_per_second = TOKENS_PER_SECOND
    is_video = [step > 0 for step in seconds]
    spans, kinds = [], [0, 0, 0]
    for j, (t, h, w) in enumerate(grids):
        spans.append(MediaSpan(len(kinds), t * h * w // 4, j))
        kinds += [2 if is_video[j] else 1] * (t * h * w // 4) + [0] * (j + 1)
    rule = object.__new__(modeling.Qwen2_5_VLModel)  # the rule reads nothing but the config; no weights are made
    torch.nn.Module.__init__(rule)
    rule.config = config
    expected, _ = rule.get_rope_index(
        torch.zeros(1, len(kinds), dtype=torch.long),
        torch.tensor([kinds]),
        image_grid_thw=torch.tensor([g for g, video in zip(grids, is_video, strict=True) if not video]),
        video_grid_thw=torch.tensor([g for g, video in zip(grids, is_video, strict=True) if video]),
        second_per_grid_ts=torch.tensor([s for s in seconds if s], dtype=torch.float64),
    )
    steps = [TOKENS_PER_SECOND * step for step in seconds]
    assert np.array_equal(mrope_positions(len(kinds), spans, grids, time_steps=steps), expected[:, 0].numpy())
