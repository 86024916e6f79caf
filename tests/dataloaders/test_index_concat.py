"""Indices seen as one: the same numbers as those of one copied index, without the copy."""

import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dataloaders.errors import IndexFormatError
from dataloaders.estimators import Qwen25VLConfig, Qwen25VLEstimator
from dataloaders.index import ITEM_COLUMNS, SAMPLE_COLUMNS, CostIndex, write_index
from dataloaders.index_build import Part, build_shards
from dataloaders.index_concat import IndexConcat
from dataloaders.index_merge import concatenate
from dataloaders.scan import count_modalities, scan_source
from dataloaders.tar_source import TarSource

ESTIMATOR = Qwen25VLEstimator()
Make = Callable[..., bytes]


@pytest.fixture(scope="module")
def parts(
    small_shard: Path, tmp_path_factory: pytest.TempPathFactory, write_shard: Callable[..., Path], chat_json: Make,
    image_bytes: Make,
) -> dict[str, CostIndex]:  # fmt: skip
    """Three written indices (one with unusable samples, one without media) and one in memory without samples."""
    folder = tmp_path_factory.mktemp("parts")
    broken = [("0.json", b"{"), ("1.json", chat_json("<image>", "x")), ("1.png", b"")]
    broken += [("2.json", chat_json("<image>?", "y")), ("2.png", image_bytes(140, 84))]
    shards = {
        "small": small_shard,
        "broken": write_shard(folder / "broken.tar", broken),
        "text": write_shard(folder / "text.tar", [(f"{k}.json", chat_json("1?" * k, "2")) for k in range(4)]),
    }
    written = {
        name: write_index(folder / name, scan_source(TarSource(str(shard)), ESTIMATOR))
        for name, shard in shards.items()
    }
    empty = concatenate([], replace(written["small"].key, source="nothing"))
    return {"small": written["small"], "empty": empty, "broken": written["broken"], "text": written["text"]}


@pytest.fixture(scope="module")
def index(parts: dict[str, CostIndex]) -> IndexConcat:
    return IndexConcat(parts)


@pytest.fixture(scope="module")
def copied(parts: dict[str, CostIndex]) -> CostIndex:
    """The same samples as an index of their own."""
    pieces = list(parts.values())
    return concatenate(pieces, pieces[0].key)


def test_every_column_has_the_numbers_of_a_copy(index: IndexConcat, copied: CostIndex) -> None:
    for table, other, names in (
        (index.samples, copied.samples, SAMPLE_COLUMNS),
        (index.items, copied.items, ITEM_COLUMNS),
    ):
        assert list(table) == list(names)
        for name in names:
            if name == "reason":  # numbered by another table
                continue
            assert np.array_equal(np.asarray(table[name]), other[name]), name
            assert table[name].dtype == other[name].dtype
    assert np.array_equal(index.item_offsets, copied.item_offsets)
    assert len(index) == len(copied) == 13


def test_reasons_are_those_of_the_parts(index: IndexConcat, parts: dict[str, CostIndex]) -> None:
    found = [index.reasons[number] for number in index.samples["reason"]]
    assert found == [part.reasons[number] for part in parts.values() for number in part.samples["reason"]]
    assert [reason for reason in found if reason] == ["bad_record", "empty_file"]


def test_names_bad_samples_and_media_are_found_by_the_id_of_the_whole(index: IndexConcat, copied: CostIndex) -> None:
    for i in range(len(index)):
        assert (index.keys(i), index.shard(i)) == (copied.keys(i), copied.shard(i))
        assert index.item_rows(i) == copied.item_rows(i)
        assert index.item_tokens(i) == copied.item_tokens(i)
        assert [index.source_of(row) for row in index.item_rows(i)] == [
            copied.source_of(r) for r in copied.item_rows(i)
        ]
    assert index.names.equals(copied.names.cast(index.names.schema))
    assert [bad.sample_id for bad in index.bad] == [bad.sample_id for bad in copied.bad] == [6, 7]
    assert index.bad[0].place.startswith("broken: ")
    assert [shard.num_samples for shard in index.shards] == [6, 3, 4] or not index.shards
    assert count_modalities(index) == count_modalities(copied)
    with pytest.raises(IndexError, match="sample 13 is not among the 13"):
        index.keys(13)


def test_shards_are_told_apart_for_shuffling_in_blocks(index: IndexConcat) -> None:
    assert index.shard_numbers.tolist() == [0] * 6 + [1] * 3 + [2] * 4
    assert index.shard_numbers.dtype == np.int32


@settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_column_reads_as_an_array(index: IndexConcat, copied: CostIndex, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(["llm_tokens", "confidence", "bytes", "text_tokens"]))
    column, array = index.samples[name], copied.samples[name]
    row = data.draw(st.integers(-13, 12))
    assert column[row] == array[row]
    assert isinstance(column[row], np.generic)
    start, stop = data.draw(st.integers(-15, 15)), data.draw(st.integers(-15, 15))
    assert np.array_equal(column[start:stop], array[start:stop])
    assert np.array_equal(column[start:stop:2], array[start:stop:2])
    rows = data.draw(st.lists(st.integers(-13, 12), max_size=20))
    assert np.array_equal(column[np.array(rows, dtype=np.int64)], array[np.array(rows, dtype=np.int64)])
    assert np.array_equal(column[column > array[row]], array[array > array[row]])
    assert (column + 1).sum() == array.sum() + len(array)
    assert (int(column.max()), column.shape, column.ndim) == (int(array.max()), array.shape, 1)
    assert list(column) == array.tolist()
    assert np.array_equal(np.asarray(column, dtype=np.int64), array)


def test_rows_outside_are_errors_and_columns_cannot_be_written(index: IndexConcat) -> None:
    column = index.samples["llm_tokens"]
    for rows in (13, -14, np.array([0, 13]), np.array([-14])):
        with pytest.raises(IndexError, match="of a column of 13"):
            column[rows]
    with pytest.raises(TypeError):
        column[0] = 1
    with pytest.raises(ValueError, match="read-only"):
        column[0:3][0] = 1
    with pytest.raises(ValueError, match="cannot be had without a copy"):
        np.array(column, copy=False)
    with pytest.raises(KeyError, match="no column 'tokens'; there are text_tokens"):
        index.samples["tokens"]
    with pytest.raises(AttributeError):
        column.no_such_method()


def test_rows_of_one_part_are_no_copy(index: IndexConcat, parts: dict[str, CostIndex]) -> None:
    assert np.shares_memory(index.samples["llm_tokens"][9:12], parts["text"].samples["llm_tokens"])


def test_it_travels_by_reference_to_the_parts(index: IndexConcat) -> None:
    written = IndexConcat({name: part for name, part in index.parts.items() if name != "empty"})
    sent = pickle.dumps(written)
    assert len(sent) < 2000  # three folders, whatever the number of samples
    code = (
        "import pickle, sys; index = pickle.load(sys.stdin.buffer); "
        "print(len(index), int(index.samples['llm_tokens'].sum()), index.fingerprint)"
    )
    answer = subprocess.run([sys.executable, "-c", code], input=sent, capture_output=True, check=True)
    expected = f"{len(written)} {int(written.samples['llm_tokens'].sum())} {written.fingerprint}"
    assert answer.stdout.decode().strip() == expected
    assert pickle.loads(pickle.dumps(index)).fingerprint == index.fingerprint != written.fingerprint


def test_rows_and_copies_of_it_are_indices(index: IndexConcat, copied: CostIndex, tmp_path: Path) -> None:
    some = index.rows(4, 9)
    assert np.array_equal(some.samples["llm_tokens"], copied.samples["llm_tokens"][4:9])
    assert [bad.sample_id for bad in some.bad] == [2, 3]
    written = write_index(tmp_path / "written", concatenate(list(index.parts.values()), index.key))
    assert np.array_equal(written.items["patches"], np.asarray(index.items["patches"]))


def test_parts_that_were_counted_differently_are_refused_with_every_difference(
    small_shard: Path, parts: dict[str, CostIndex]
) -> None:
    other = scan_source(
        TarSource(str(small_shard)),
        Qwen25VLEstimator(Qwen25VLConfig(max_pixels=64 * 784)),
        train_on="all",
        apply_orientation=False,
    )
    with pytest.raises(IndexFormatError) as caught:
        IndexConcat({"small": parts["small"], "other": other})
    text = str(caught.value)
    assert "estimator is" in text
    assert "train_on is all, expected assistant as in 'small'" in text
    assert "apply_orientation is False, expected True as in 'small'" in text
    assert "build the index of 'other' or of 'small' again" in text
    assert "source is" not in text


def test_an_unmerged_part_and_an_empty_mixture_are_refused(small_shard: Path, tmp_path: Path) -> None:
    part = build_shards([str(small_shard)], ESTIMATOR, tmp_path / "part", part=Part(number=0, count=2))
    with pytest.raises(IndexFormatError, match="the index of 'x' is part 0/2 of a source, not the whole"):
        IndexConcat({"x": part})
    with pytest.raises(IndexFormatError, match="a mixture without parts"):
        IndexConcat({})


def test_a_part_whose_samples_and_items_differ_in_number_is_named(parts: dict[str, CostIndex]) -> None:
    damaged = parts["small"].rows(0, 3)
    column = damaged.samples["num_items"].copy()
    column[0] += 1
    damaged.samples._made["num_items"] = column  # type: ignore[attr-defined]
    with pytest.raises(IndexFormatError, match="the samples of 'x' name 5 items, but there are 4"):
        IndexConcat({"text": parts["text"], "x": damaged})
