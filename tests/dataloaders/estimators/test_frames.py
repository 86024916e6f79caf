"""Even sampling of frames: numbers, positions, and what a clip that is too short needs."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataloaders.errors import DataError, MediaError, Reason, UnfitError
from dataloaders.estimators.frames import FrameSampling

FRAMES = st.integers(1, 20_000)


@given(total=FRAMES, wanted=st.integers(1, 64))
def test_frames_are_taken_once_each_and_spread_evenly(total: int, wanted: int) -> None:
    for middle in (False, True):
        sampling = FrameSampling(num_frames=wanted, middle=middle)
        if wanted > total:
            with pytest.raises(UnfitError) as caught:
                sampling.indices(total, 25.0, 1.0)
            assert caught.value.nearest_frames == wanted
            continue
        indices = sampling.indices(total, 25.0, 1.0)
        assert (len(indices), sampling.count(total, 25.0, 1.0)) == (wanted, wanted)
        gaps = np.diff(indices)
        assert gaps.size == 0 or 1 <= gaps.min() <= gaps.max() <= gaps.min() + 1
        assert indices[0] == (total // (2 * wanted) if middle else 0)


def test_known_positions() -> None:
    assert FrameSampling(num_frames=4).indices(10, 25.0, 0.4).tolist() == [0, 2, 5, 7]
    assert FrameSampling(num_frames=4, middle=True).indices(10, 25.0, 0.4).tolist() == [1, 3, 6, 8]


@given(total=FRAMES, rate=st.floats(1.0, 120.0), fps=st.sampled_from([0.5, 1.0, 2.0]))
def test_a_rate_gives_the_frames_of_its_duration(total: int, rate: float, fps: float) -> None:
    sampling = FrameSampling(fps=fps)
    wanted = max(1, int(total / rate * fps))
    if wanted > total:
        with pytest.raises(UnfitError) as caught:
            sampling.count(total, rate, 1.0)
        assert caught.value.nearest_frames is None  # more frames at this rate want more again
    else:
        assert sampling.count(total, rate, 1.0) == wanted


def test_internvl_finds_no_frame_where_its_rate_gives_none() -> None:
    assert FrameSampling(fps=1.0).count(10, 25.0, 0.4) == 1
    with pytest.raises(UnfitError) as caught:
        FrameSampling(fps=1.0, middle=True).count(10, 25.0, 0.4)
    assert caught.value.reason is Reason.TOO_FEW_FRAMES


def test_a_missing_rate_follows_from_the_duration_or_is_an_error() -> None:
    assert FrameSampling(fps=2.0).count(100, 0.0, 10.0) == 20
    with pytest.raises(MediaError) as caught:
        FrameSampling(fps=2.0).count(100, float("nan"), 0.0)
    assert caught.value.reason is Reason.CORRUPT


@pytest.mark.parametrize(
    ("video", "default", "expected"),
    [
        (None, None, FrameSampling()),
        ({}, 32, FrameSampling(num_frames=32)),
        ({"num_frames": 8}, 32, FrameSampling(num_frames=8)),
        ({"fps": 2, "num_frames": None}, None, FrameSampling(fps=2)),
        ({"num_frames": 8, "do_sample_frames": False}, 32, FrameSampling()),
        ({"num_frames": 8, "do_sample_frames": True}, None, FrameSampling(num_frames=8)),
    ],
)
def test_options_of_a_video_processor(
    video: dict[str, object] | None, default: int | None, expected: FrameSampling
) -> None:
    assert FrameSampling.from_video(video, num_frames=default) == expected


def test_every_frame_is_taken_where_nothing_is_said() -> None:
    for middle in (False, True):
        assert FrameSampling(middle=middle).indices(5, 0.0, 0.0).tolist() == [0, 1, 2, 3, 4]
        with pytest.raises(UnfitError) as caught:
            FrameSampling(middle=middle).count(0, 25.0, 0.0)
        assert caught.value.nearest_frames == 1


def test_a_number_and_a_rate_together_are_refused_as_the_processor_does() -> None:
    both = {"num_frames": 8, "fps": 2}
    with pytest.raises(DataError, match="takes one"):
        FrameSampling.from_video(both)
    assert FrameSampling.from_video(both, middle=True) == FrameSampling(num_frames=8, middle=True)
    for sampling in ({"num_frames": 0}, {"fps": -1.0}):
        with pytest.raises(DataError, match="must be positive"):
            FrameSampling.from_video(sampling)
