"""Counts of a step: gathered from the two tables of an index, checked on the way in."""

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.counts import COUNT_COLUMNS, StepCounts
from balancer.errors import PlanError


@dataclass
class FakeIndex:
    """Samples with 0, 1 or more items, in CSR order."""

    items_per_sample: list[int]
    samples: dict[str, np.ndarray] = field(init=False)
    items: dict[str, np.ndarray] = field(init=False)
    item_offsets: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        n, num_items = len(self.items_per_sample), sum(self.items_per_sample)
        rows = np.arange(n, dtype=np.int32)
        self.samples = {
            "llm_tokens": rows + 100,
            "label_tokens": rows + 10,
            "visual_tokens": np.array(self.items_per_sample, dtype=np.int32),
            "patches": 4 * np.array(self.items_per_sample, dtype=np.int32),
            "num_items": np.array(self.items_per_sample, dtype=np.int32),
        }
        item_rows = np.arange(1, num_items + 1, dtype=np.int64)
        self.items = {
            "patches": np.full(num_items, 4, dtype=np.int32),
            "visual_tokens": np.ones(num_items, dtype=np.int32),
            "full_total_sq": item_rows * 10**12,
            "window_total_sq": item_rows,
        }
        self.item_offsets = np.concatenate([[0], np.cumsum(self.items_per_sample)]).astype(np.int64)

    def __len__(self) -> int:
        return len(self.items_per_sample)


def test_rows_are_gathered_in_the_order_asked_for() -> None:
    counts = StepCounts.from_index(FakeIndex([1, 0, 2]), [2, 0])
    assert counts.sample_ids.tolist() == [2, 0]
    assert counts.llm_tokens.tolist() == [102, 100]
    assert counts.patches.dtype == np.int64
    assert len(counts) == 2


@given(st.lists(st.integers(0, 4), min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_segment_sums_are_those_of_the_items_of_each_sample(items_per_sample: list[int], random) -> None:
    index = FakeIndex(items_per_sample)
    ids = random.sample(range(len(index)), random.randint(0, len(index)))
    counts = StepCounts.from_index(index, np.array(ids, dtype=np.int64))
    for row, sample_id in enumerate(ids):
        mine = slice(index.item_offsets[sample_id], index.item_offsets[sample_id + 1])
        assert counts.full_total_sq[row] == index.items["full_total_sq"][mine].sum()
        assert counts.window_total_sq[row] == index.items["window_total_sq"][mine].sum()


def test_a_row_outside_the_index_is_named() -> None:
    with pytest.raises(PlanError, match=r"samples \[3, -1\] are not rows of an index of 3 samples"):
        StepCounts.from_index(FakeIndex([0, 0, 0]), [1, 3, -1])


def columns(n: int, **changed: list[int]) -> dict[str, np.ndarray]:
    zeros = {name: np.zeros(n, dtype=np.int64) for name in COUNT_COLUMNS}
    return {"sample_ids": np.arange(n), **zeros, **{name: np.array(values) for name, values in changed.items()}}


def test_a_sample_listed_twice_is_refused() -> None:
    with pytest.raises(PlanError, match=r"samples \[7\] are listed more than once"):
        StepCounts(**columns(3, sample_ids=[7, 1, 7]))


def test_a_negative_count_names_column_and_sample() -> None:
    with pytest.raises(PlanError, match="patches=-4 of sample 1 is negative"):
        StepCounts(**columns(3, patches=[0, -4, 0]))


def test_columns_of_unequal_length_are_refused() -> None:
    with pytest.raises(PlanError, match=r"llm_tokens has shape \(2,\); expected \(3,\)"):
        StepCounts(**columns(3, llm_tokens=[1, 2]))


def test_columns_are_read_only_copies() -> None:
    tokens = np.array([1, 2, 3])
    counts = StepCounts(**{**columns(3), "llm_tokens": tokens})
    tokens[0] = 99
    assert counts.llm_tokens.tolist() == [1, 2, 3]
    with pytest.raises(ValueError, match="read-only"):
        counts.llm_tokens[0] = 5


def test_items_are_gathered_in_the_order_of_their_samples() -> None:
    counts = StepCounts.from_index(FakeIndex([1, 0, 2]), [2, 1, 0])
    assert counts.item_offsets.tolist() == [0, 2, 2, 3]
    assert counts.item_window_sq.tolist() == [2, 3, 1]
    assert counts.item_rows().tolist() == [0, 0, 2]
    assert counts.num_media == 3
    assert counts.sum_of_items(counts.item_patches).tolist() == counts.patches.tolist()
    assert counts.longest_of_items(counts.item_window_sq).tolist() == [3, 0, 1]


def test_without_an_item_table_a_sample_with_patches_is_one_item() -> None:
    counts = StepCounts(**columns(3, patches=[8, 0, 4], visual_tokens=[2, 0, 1], full_total_sq=[64, 0, 16]))
    assert counts.item_offsets.tolist() == [0, 1, 1, 2]
    assert counts.item_patches.tolist() == [8, 4]
    assert counts.item_full_sq.tolist() == [64, 16]
    assert counts.longest_of_items(counts.item_patches).tolist() == [8, 0, 4]


ITEMS = {
    "item_offsets": [0, 1, 2],
    "item_patches": [4, 8],
    "item_visual_tokens": [1, 2],
    "item_full_sq": [16, 64],
    "item_window_sq": [0, 0],
}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"item_patches": [4, 9]}, "item_patches of sample 1 do not add up to its patches"),
        ({"item_offsets": [0, 2, 1]}, "item_offsets do not cut 2 items into 2 samples"),
        ({"item_offsets": [1, 1, 2]}, "item_offsets do not cut 2 items into 2 samples"),
        ({"item_offsets": [0, 2]}, r"item_offsets has shape \(2,\); expected \(3,\)"),
        ({"item_full_sq": [16]}, r"item_full_sq has shape \(1,\); expected \(2,\)"),
        ({"item_window_sq": [1, -1]}, "item_window_sq=-1 of sample 1 is negative"),
        ({"item_full_sq": None}, "item columns .* without .'item_full_sq'.; give all or none"),
    ],
)
def test_an_item_table_that_contradicts_its_samples_is_refused(changed: dict, message: str) -> None:
    table = {name: values for name, values in {**ITEMS, **changed}.items() if values is not None}
    sums = columns(2, patches=[4, 8], visual_tokens=[1, 2], full_total_sq=[16, 64])
    with pytest.raises(PlanError, match=message):
        StepCounts(**sums, **table)


def test_whole_numbers_in_floats_are_taken_as_they_are() -> None:
    counts = StepCounts(**columns(2, llm_tokens=[3.0, 5.0], label_tokens=np.array([1, 5], dtype=np.uint16)))
    assert counts.llm_tokens.tolist() == [3, 5]
    assert {getattr(counts, name).dtype for name in COUNT_COLUMNS} == {np.dtype(np.int64)}


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([4.0, 1.5], "llm_tokens=1.5 of sample 9 is no whole number"),
        ([4.0, math.nan], "llm_tokens=nan of sample 9 is no whole number"),
        ([-math.inf, 1], "llm_tokens=-inf of sample 4 is no whole number"),
        ([1.0, 2.0**63], "llm_tokens=9.22.*e.18 of sample 9 is no whole number"),
        (np.array([1, 2**63], dtype=np.uint64), "llm_tokens=9223372036854775808 of sample 9 is no whole number"),
        ([True, False], "llm_tokens=True of sample 4 is no whole number"),
        (["7", "8"], "llm_tokens='7' of sample 4 is no whole number"),
        ([1, None], "llm_tokens=1 of sample 4 is no whole number .* object"),
        (np.array([1j, 2]), "llm_tokens=1j of sample 4 is no whole number"),
        (np.array(["2020-01-01", "2020-01-02"], dtype="M8[D]"), "llm_tokens=.* of sample 4 is no whole number"),
    ],
)
def test_a_count_that_is_no_whole_number_names_column_sample_and_value(values: Any, said: str) -> None:
    """`np.array([1.5, 5.9], dtype=np.int64)` is [1 5], without a word."""
    with pytest.raises(PlanError, match=said):
        StepCounts(**{**columns(2, sample_ids=[4, 9]), "llm_tokens": values})


def test_sample_ids_are_whole_numbers_too() -> None:
    with pytest.raises(PlanError, match=r"sample_ids=0\.5 in row 1 is no whole number"):
        StepCounts(**columns(2, sample_ids=[0, 0.5]))


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (5, r"llm_tokens has shape \(\); expected \(2,\)"),
        ([[1, 2]], r"llm_tokens has shape \(1, 2\); expected \(2,\)"),
        ([[1], [2, 3]], "llm_tokens is no column of numbers"),
    ],
)
def test_what_is_no_column_is_refused(values: Any, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        StepCounts(**{**columns(2), "llm_tokens": values})
    if said.startswith("llm_tokens is"):
        return
    with pytest.raises(PlanError, match=r"sample_ids has shape .*; expected \(n,\)"):
        StepCounts(**{**columns(2), "sample_ids": values})


def test_more_labels_than_positions_are_refused() -> None:
    message = "label_tokens=11 of sample 9 is above its llm_tokens=10: labels are those of the LLM positions that carry"
    with pytest.raises(PlanError, match=message):
        StepCounts(**columns(3, sample_ids=[4, 9, 2], llm_tokens=[5, 10, 3], label_tokens=[5, 11, 9]))
    assert StepCounts(**columns(2, llm_tokens=[5, 10], label_tokens=[5, 10])).label_tokens.tolist() == [5, 10]


def test_more_visual_tokens_than_positions_are_what_cross_attention_has() -> None:
    """Mllama: an image is one position, and 1,601 keys and values a tile."""
    counts = StepCounts(**columns(1, llm_tokens=[30], visual_tokens=[6404], patches=[6404]))
    assert counts.visual_tokens.tolist() == [6404]


def test_a_negative_item_is_told_by_the_sample_it_belongs_to() -> None:
    table = {**ITEMS, "item_offsets": [0, 0, 2], "item_window_sq": [-1, 0]}
    with pytest.raises(PlanError, match="item_window_sq=-1 of sample 7 is negative"):
        StepCounts(**columns(2, sample_ids=[3, 7]), **table)
