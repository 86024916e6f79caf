"""Kimi-VL and Kimi-K2.5 against the reference table, golden values, and their own properties.

Both processors of transformers need torchvision, so they are not run here; the table's rows are from them. The table's
video rows that come from a helper leave timestamps and markers out.
"""

import pickle
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataloaders.errors import DataError, MediaError, Reason, UnfitError
from dataloaders.estimators import TokenEstimator, estimator_from_config
from dataloaders.estimators.kimi import NavitConfig, navit_resize

Oracle = Callable[[str], list[dict[str, Any]]]

KIMI_VL = {
    "model_type": "kimi_vl",
    "in_token_limit": 4096,
    "patch_size": 14,
    "merge_kernel_size": [2, 2],
    "pad_input": True,
}


def kimi_k25(video: dict[str, Any] | None = None, **image: Any) -> TokenEstimator:
    files = {"config": {"model_type": "kimi_k25"}, "preprocessor_config": image}
    return estimator_from_config(files if video is None else {**files, "video_preprocessor_config": video})


def test_k25_equals_every_image_of_the_table(oracle: Oracle) -> None:
    estimator = kimi_k25(size={"max_height": 512, "max_width": 512}, max_patches=16_384)
    for row in oracle("kimi_k25"):
        counts = estimator.image(row["w"], row["h"])
        got = (counts.patches, counts.visual_tokens, counts.llm_tokens)
        assert got == (row["patches"], row["embed_tokens"], row["llm_tokens"]), row


def test_kimi_vl_equals_every_row_of_the_table_up_to_its_longest_side(oracle: Oracle) -> None:
    """The table has the K2.5 processor in its place, which scales a side of 512 patches where Kimi-VL fails."""
    family = "kimi_vl(approx: navit_resize,max_patches 4096)"
    estimator = estimator_from_config(KIMI_VL)
    as_k25 = estimator_from_config({**KIMI_VL, "size": {"max_height": 512, "max_width": 512}})
    refused = []
    for row in oracle(family):
        expected = (row["patches"], row["embed_tokens"], row["llm_tokens"])
        counts = as_k25.image(row["w"], row["h"])
        assert (counts.patches, counts.visual_tokens, counts.llm_tokens) == expected, row
        try:
            assert estimator.image(row["w"], row["h"]) == counts
        except UnfitError as error:
            refused.append((row["w"], row["h"], error.reason))
    reason = Reason.EXTREME_ASPECT
    assert sorted(refused) == [(40, 10_000, reason), (8192, 24, reason), (10_000, 40, reason)]


def test_k25_equals_every_video_of_the_table(oracle: Oracle) -> None:
    estimator = kimi_k25({})
    for row in oracle("kimi_k25@video"):
        clip = (row["src_frames"], row["fps"], row["duration"])
        counts = estimator.video(row["w"], row["h"], *clip)
        got = (counts.frames, counts.patches, counts.visual_tokens)
        assert got == (row["sampled_frames"], row["patches"], row["embed_tokens"]), row
        with_texts = (
            row["embed_tokens"] + 16 * counts.grid[0]
        )  # 12 for hh:mm:ss.fff, digit by digit; 3 markers; "video"
        assert counts.llm_tokens == with_texts
        assert row["llm_tokens"] == (with_texts if row["method"] == "run" else row["embed_tokens"])


@pytest.mark.parametrize(
    ("size", "tokens"),
    [
        ((224, 224), 64),
        ((640, 480), 414),
        ((1024, 768), 1036),
        ((1920, 1080), 2691),
        ((2480, 3508), 4158),
        ((3000, 300), 1188),
        ((1, 1), 1),
    ],
)
def test_known_images(size: tuple[int, int], tokens: int) -> None:
    counts = kimi_k25().image(*size)
    assert (counts.llm_tokens, counts.patches) == (tokens, 4 * tokens)
    assert counts.full.total == counts.patches


def test_a_chunk_attends_to_itself_and_costs_one_frame() -> None:
    counts = kimi_k25().video(280, 140, 130, 20.0, 6.5)
    assert (counts.frames, counts.grid, counts.patches) == (13, (4, 10, 20), 13 * 200)
    assert counts.visual_tokens == 4 * 50
    segments = [800, 800, 800, 200]
    assert counts.full.count == 4
    assert counts.full.total == sum(segments)
    assert counts.full.total_sq == sum(length**2 for length in segments)
    assert counts.full.longest == 800


def test_a_chunk_is_written_with_the_time_of_its_first_frame() -> None:
    texts: list[str] = []

    def count(text: str) -> int:
        texts.append(text)
        return len(text)

    estimator = estimator_from_config({"model_type": "kimi_k25", "num_frames": 6, "fps": None}, count_text=count)
    texts.clear()
    counts = estimator.video(28, 28, 600, 30.0, 20.0)
    assert texts == ["00:00:00.000", "00:00:13.333"]
    assert counts.llm_tokens == 2 * (1 + 3 + len("video") + 12)
    texts.clear()
    estimator.video(28, 28, 6_000_000, 30.0, 200_000.0)  # hours are those of a day: 37:02:13 is written 13:02:13
    assert texts == ["00:00:00.000", "13:02:13.333"] or texts[1].startswith("13:")


@pytest.mark.parametrize(
    ("estimator", "clip", "expected"),
    [
        (kimi_k25(), (2, 25.0, 0.08), [0]),
        (kimi_k25(), (50, 25.0, 2.0), [0, 12, 25, 37]),
        (kimi_k25({"fps": 1}), (75, 25.0, 3.0), [0, 25, 50]),
        (kimi_k25({"num_frames": 4, "fps": None}), (10, 25.0, 0.4), [0, 2, 5, 7]),
        (kimi_k25({"do_sample_frames": False}), (3, 25.0, 0.12), [0, 1, 2]),
    ],
)
def test_frames_are_evenly_spaced(
    estimator: TokenEstimator, clip: tuple[int, float, float], expected: list[int]
) -> None:
    assert estimator.frame_indices(*clip).tolist() == expected
    assert estimator.video(100, 100, *clip).frames == len(expected)


def test_clips_that_have_fewer_frames_than_are_sampled_are_refused() -> None:
    with pytest.raises(UnfitError, match="10 frames") as slow:
        kimi_k25().video(640, 480, 10, 1.0, 10.0)
    assert slow.value.reason is Reason.TOO_FEW_FRAMES
    assert slow.value.nearest_frames is None  # at one frame per second no number of frames would do
    fixed = kimi_k25({"num_frames": 16, "fps": None})
    with pytest.raises(UnfitError) as short:
        fixed.video(640, 480, 10, 25.0, 0.4)
    assert short.value.nearest_frames == 16
    assert fixed.video(640, 480, short.value.nearest_frames, 25.0, 0.64).frames == 16


def test_the_files_of_remote_code_give_the_same_counts() -> None:
    """`media_proc_cfg` of the published weights, whose numbers are the class defaults of transformers."""
    media = {
        "in_patch_limit": 16_384,
        "patch_size": 14,
        "merge_kernel_size": 2,
        "fixed_output_tokens": None,
        "patch_limit_on_one_side": 512,
        "in_patch_limit_each_frame": 4096,
        "in_patch_limit_video": None,
        "sample_fps": 2.0,
        "max_num_frames_each_video": None,
        "temporal_merge_kernel_size": 4,
        "timestamp_mode": "hh:mm:ss.fff",
    }
    remote, native = kimi_k25(media_proc_cfg=media), kimi_k25()
    assert remote.fingerprint == native.fingerprint
    smaller = kimi_k25(media_proc_cfg={**media, "in_patch_limit": 256, "in_patch_limit_each_frame": 64})
    assert smaller.image(1000, 1000).patches == 18 * 18
    assert smaller.video(1000, 1000, 50, 25.0, 2.0).patches == 4 * 8 * 8


def test_without_a_file_of_its_own_the_video_processor_is_made_from_the_images() -> None:
    assert kimi_k25(max_patches=256).video(1000, 1000, 50, 25.0, 2.0).grid == (1, 18, 18)


@pytest.mark.parametrize(
    ("build", "named"),
    [
        (lambda: kimi_k25(do_resize=False), "do_resize"),
        (lambda: kimi_k25(size={"max_height": 512, "max_width": 256}), "max_height"),
        (lambda: kimi_k25({"num_frames": 8, "fps": 2}), "num_frames"),
        (lambda: kimi_k25(media_proc_cfg={"fixed_output_tokens": 64}), "fixed_output_tokens"),
        (lambda: kimi_k25(media_proc_cfg={"in_patch_limit_video": 9}), "in_patch_limit_video"),
        (lambda: kimi_k25(media_proc_cfg={"timestamp_mode": "mm:ss"}), "timestamp_mode"),
        (lambda: kimi_k25({"temporal_patch_size": -1}), "temporal_patch"),
        (lambda: estimator_from_config({**KIMI_VL, "pad_input": False}), "pad_input"),
        (lambda: estimator_from_config({**KIMI_VL, "in_token_limit": 0}), "max_patches"),
    ],
)
def test_options_that_are_not_covered_are_refused_by_name(build: Callable[[], TokenEstimator], named: str) -> None:
    with pytest.raises(DataError, match=named):
        build()


@given(
    width=st.integers(1, 60_000),
    height=st.integers(1, 60_000),
    limit=st.integers(1, 20_000),
    side=st.integers(1, 600),
    merge=st.integers(1, 3),
)
def test_sizes_are_multiples_within_the_limits(width: int, height: int, limit: int, side: int, merge: int) -> None:
    config = NavitConfig(max_patches=limit, max_side=side, merge=merge)
    new_height, new_width = navit_resize(width, height, config)
    factor = 14 * merge
    assert new_height % factor == new_width % factor == 0
    assert 0 < max(new_height, new_width) < side * 14 + factor
    assert new_height < height + factor  # never scaled up
    assert new_width < width + factor


@given(long=st.integers(7000, 60_000), short=st.integers(0, 200), tall=st.booleans())
def test_a_refused_size_comes_with_one_that_is_taken(long: int, short: int, tall: bool) -> None:
    estimator = estimator_from_config(KIMI_VL)
    size = (short, long) if tall else (long, short)
    try:
        tokens, nearest = estimator.image(*size).llm_tokens, size
    except UnfitError as error:
        tokens, nearest = 0, error.nearest_size_px or (0, 0)
    assert (tokens or estimator.image(*nearest).llm_tokens) > 0
    assert min(nearest) >= min(size)
    assert max(nearest) == long


@given(
    width=st.integers(1, 20_000),
    height=st.integers(1, 20_000),
    num_frames=st.integers(1, 2000),
    fps=st.sampled_from([4.0, 23.976, 30.0]),
)
def test_explanations_end_with_the_counts(width: int, height: int, num_frames: int, fps: float) -> None:
    estimator = kimi_k25()
    *_, last = estimator.explain_image(width, height)
    assert last.endswith(f"= {estimator.image(width, height).llm_tokens}")
    clip = (num_frames, fps, num_frames / fps)
    *_, last = estimator.explain_video(width, height, *clip)
    counts = estimator.video(width, height, *clip)
    assert last == f"LLM tokens: {counts.llm_tokens}"
    assert counts.full.total == counts.patches


def test_kimi_vl_takes_no_videos_and_estimators_pickle() -> None:
    kimi_vl = estimator_from_config(KIMI_VL)
    with pytest.raises(MediaError) as caught:
        kimi_vl.video(640, 480, 10, 25.0, 0.4)
    assert caught.value.reason is Reason.UNSUPPORTED_MEDIA
    for estimator in (kimi_vl, kimi_k25()):
        again = pickle.loads(pickle.dumps(estimator))
        assert (again.fingerprint, again.image(640, 480)) == (estimator.fingerprint, estimator.image(640, 480))
