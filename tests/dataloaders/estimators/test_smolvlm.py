"""SmolVLM2 against the reference table, and its own properties; texts of videos in words, as the processor writes them.

The table's video rows leave the texts out (timestamps, tags), so LLM tokens of videos are compared with golden values.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataloaders.errors import DataError, Reason, UnfitError
from dataloaders.estimators import TokenEstimator, estimator_from_config
from dataloaders.estimators.smolvlm import number_in_words

Oracle = Callable[[str], list[dict[str, Any]]]


def smolvlm(
    *, longest: int = 1536, tile: int = 384, tokens: int = 81, patch: int = 14, scale: int = 3, **image: Any
) -> TokenEstimator:
    files = {
        "config": {"model_type": "smolvlm", "vision_config": {"patch_size": patch}, "scale_factor": scale},
        "preprocessor_config": {
            "size": {"longest_edge": longest},
            "max_image_size": {"longest_edge": tile},
            "video_sampling": {"fps": 1, "max_frames": 64, "video_size": {"longest_edge": tile}},
            **image,
        },
        "processor_config": {"processor_class": "SmolVLMProcessor", "image_seq_len": tokens},
    }
    return estimator_from_config(files)


SMALL = {"longest": 2048, "tile": 512, "tokens": 64, "patch": 16, "scale": 4}


@pytest.mark.parametrize(("family", "sizes"), [("smolvlm2(2.2B)", {}), ("smolvlm2(256M/500M)", SMALL)])
def test_every_image_of_the_table_is_equal(oracle: Oracle, family: str, sizes: dict[str, int]) -> None:
    estimator = smolvlm(**sizes)
    for row in oracle(family):
        counts = estimator.image(row["w"], row["h"])
        got = (counts.patches, counts.visual_tokens, counts.llm_tokens)
        assert got == (row["patches"], row["embed_tokens"], row["llm_tokens"]), row


def test_every_video_of_the_table_is_equal_but_for_the_texts(oracle: Oracle) -> None:
    estimator = smolvlm()
    for row in oracle("smolvlm2(2.2B)@video"):
        clip = (row["src_frames"], row["fps"], row["duration"])
        counts = estimator.video(row["w"], row["h"], *clip)
        got = (counts.frames, counts.patches, counts.visual_tokens)
        assert got == (row["sampled_frames"], row["patches"], row["embed_tokens"]), row
        assert row["llm_tokens"] == row["embed_tokens"]  # the table has no texts: introduction, times, delimiters
        assert counts.llm_tokens >= counts.visual_tokens + 12 * counts.frames
        assert len(estimator.frame_indices(*clip)) == counts.frames


@pytest.mark.parametrize(
    ("size", "expected"),
    [((640, 480), (13, 1083)), ((480, 640), (13, 1084)), ((1, 1), (17, 1416)), ((3000, 300), (5, 417))],
)
def test_known_images(size: tuple[int, int], expected: tuple[int, int]) -> None:
    counts = smolvlm().image(*size)
    assert (counts.tiles, counts.llm_tokens) == expected


def test_a_video_is_counted_text_by_text_as_the_processor_writes_it() -> None:
    texts: list[str] = []

    def count(text: str) -> int:
        texts.append(text)
        return len(text)

    files = {
        "config": {"model_type": "smolvlm", "vision_config": {"patch_size": 14}, "scale_factor": 3},
        "preprocessor_config": {"max_image_size": {"longest_edge": 384}},
        "video_preprocessor_config": {"num_frames": 3, "fps": 1, "max_image_size": {"longest_edge": 384}},
    }
    estimator = estimator_from_config(files, count_text=count)
    texts.clear()
    counts = estimator.video(640, 360, 750, 10.0, 75.0)
    assert texts == [
        "You are provided the following series of three frames from a 0:01:15 [H:MM:SS] video.\n\nFrame from 00:01:",
        "\nFrame from 00:37:",
        "\nFrame from 01:14:",
        "\n\n",
    ]
    assert estimator.frame_indices(750, 10.0, 75.0).tolist() == [10, 375, 740]
    assert counts.visual_tokens == 3 * 81
    assert counts.llm_tokens == 3 * (81 + 3) + sum(map(len, texts))
    assert (counts.tiles, counts.grid, counts.full.count) == (3, (3, 27, 27), 3)


@pytest.mark.parametrize(
    ("clip", "expected"),
    [
        ((1, 25.0, 0.04), [0]),
        ((50, 25.0, 2.0), [0, 49]),
        ((62, 25.0, 2.5), [0, 61]),  # round is half to even: 2 frames
        ((3, 1.0, 10.0), [0, 1, 2]),  # more are wanted than there are: repeats are dropped
        ((6600, 100.0, 66.0), None),  # 64 s are left between the skipped ends: nothing is skipped
        ((6700, 100.0, 67.0), None),
    ],
)
def test_frames_are_evenly_spaced_between_the_ends(clip: tuple[int, float, float], expected: list[int] | None) -> None:
    indices = smolvlm().frame_indices(*clip)
    if expected is None:
        skipped = clip[2] > 66.0
        assert len(indices) == 64
        assert (indices[0], indices[-1]) == ((100, 6600) if skipped else (0, 6599))
    else:
        assert indices.tolist() == expected


def test_all_frames_are_taken_where_the_options_do_not_say_how_many() -> None:
    estimator = smolvlm(video_sampling=None)
    assert estimator.frame_indices(7, 25.0, 0.28).tolist() == list(range(7))
    assert estimator.video(64, 64, 7, 25.0, 0.28).visual_tokens == 7 * 81


def test_the_tile_of_a_frame_may_differ_from_that_of_an_image() -> None:
    files = {
        "config": {"model_type": "smolvlm", "vision_config": {"patch_size": 14}, "scale_factor": 3},
        "preprocessor_config": {"max_image_size": {"longest_edge": 384}},
        "video_preprocessor_config": {"num_frames": 8, "fps": 2},
        "processor_config": {"image_seq_len": 81},
    }
    counts = estimator_from_config(files).video(64, 64, 100, 25.0, 4.0)
    assert (counts.height_px, counts.patches) == (364, 8 * 26 * 26)


@pytest.mark.parametrize("sampling", [{"num_frames": 8}, {"fps": 1}])
def test_half_a_sampling_rule_is_refused(sampling: dict[str, int]) -> None:
    with pytest.raises(DataError, match="both are needed"):
        smolvlm(video_sampling=None, **sampling)


def test_a_video_without_a_frame_is_refused_with_the_nearest_number() -> None:
    with pytest.raises(UnfitError) as caught:
        smolvlm().video(64, 64, 0, 25.0, 0.0)
    assert caught.value.reason is Reason.TOO_FEW_FRAMES
    assert caught.value.nearest_frames == 1
    assert smolvlm().video(64, 64, 1, 25.0, 0.0).frames == 1


@given(num_frames=st.integers(1, 30_000), fps=st.sampled_from([0.5, 1.0, 24.0, 29.97, 60.0]))
def test_frames_lie_in_the_clip_and_explanations_end_with_the_counts(num_frames: int, fps: float) -> None:
    estimator = smolvlm()
    clip = (num_frames, fps, num_frames / fps)
    indices = estimator.frame_indices(*clip)
    assert 1 <= len(indices) <= 64
    assert indices.min() >= 0
    assert indices.max() < num_frames
    assert (np.diff(indices) > 0).all()
    counts = estimator.video(320, 240, *clip)
    *_, last = estimator.explain_video(320, 240, *clip)
    assert last.endswith(f"= {counts.llm_tokens}")
    assert counts.full.total == counts.patches


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (0, "zero"),
        (13, "thirteen"),
        (20, "twenty"),
        (64, "sixty-four"),
        (100, "one hundred"),
        (101, "one hundred and one"),
        (999, "nine hundred and ninety-nine"),
        (1001, "one thousand and one"),
        (12_345, "twelve thousand, three hundred and forty-five"),
    ],
)
def test_numbers_are_written_in_words(number: int, words: str) -> None:
    assert number_in_words(number) == words


def test_all_numbers_of_frames_are_written_as_num2words_writes_them() -> None:
    num2words = pytest.importorskip("num2words").num2words
    assert [number_in_words(number) for number in range(3000)] == [num2words(number) for number in range(3000)]
