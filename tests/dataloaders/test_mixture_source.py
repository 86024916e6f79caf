"""Several sources as one: ids, places, bytes and hints reach the part they belong to."""

import json
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from dataloaders.errors import DataError
from dataloaders.estimators import Qwen25VLEstimator
from dataloaders.index import write_index
from dataloaders.index_concat import IndexConcat
from dataloaders.mixture_source import MixtureSource, id_ranges, mixture_fingerprint
from dataloaders.sample import load_sample
from dataloaders.scan import scan_source
from dataloaders.source import Prefetching, SampleSource, groups, prefetch
from dataloaders.tar_source import TarSource

ESTIMATOR = Qwen25VLEstimator()
Make = Callable[..., bytes]


@pytest.fixture(scope="module")
def sources(
    small_shard: Path, tmp_path_factory: pytest.TempPathFactory, write_shard: Callable[..., Path], chat_json: Make,
    image_bytes: Make,
) -> dict[str, TarSource]:  # fmt: skip
    members = [("a.json", chat_json("<image>?", "Yes.")), ("a.png", image_bytes(84, 56))]
    members += [("b.json", chat_json("2?", "3"))]
    pages = write_shard(tmp_path_factory.mktemp("pages") / "pages.tar", members)
    return {"small": TarSource(str(small_shard)), "pages": TarSource(str(pages))}


class Empty:
    """A source without samples that keeps the hints it gets."""

    fingerprint = "empty"

    def __init__(self, length: int = 0) -> None:
        self.length = length
        self.hints: list[tuple[list[int], bool]] = []

    def __len__(self) -> int:
        return self.length

    def prefetch(self, ids: Sequence[int], *, media: bool = True) -> None:
        self.hints.append((list(ids), media))


def test_ids_follow_each_other_part_after_part(sources: dict[str, TarSource]) -> None:
    mixture = MixtureSource({"none": Empty(), **sources, "last": Empty()})  # type: ignore[dict-item]
    assert isinstance(mixture, SampleSource)
    assert mixture.ranges == {"none": range(0), "small": range(6), "pages": range(6, 8), "last": range(8, 8)}
    assert len(mixture) == 8
    assert [mixture.locate(i)[::2] for i in (0, 5, 6, 7)] == [("small", 0), ("small", 5), ("pages", 0), ("pages", 1)]
    for outside in (-1, 8):
        with pytest.raises(IndexError, match=f"sample {outside} is not among the 8 of this mixture"):
            mixture.record(outside)


def test_records_and_media_are_those_of_the_part(sources: dict[str, TarSource]) -> None:
    mixture = pickle.loads(pickle.dumps(MixtureSource(sources)))
    for i in range(len(mixture)):
        _, part, own = mixture.locate(i)
        assert mixture.record(i) == part.record(own)
        for j in range(len(part.record(own).media)):
            assert mixture.media_bytes(i, j) == part.media_bytes(own, j)
            assert mixture.media_reader(i, j).size == part.media_reader(own, j).size
    assert mixture.place(6).startswith("pages: ")
    assert "pages.tar" in mixture.place(6)


def test_a_hint_reaches_each_part_with_its_own_ids_in_order(sources: dict[str, TarSource]) -> None:
    first, last = Empty(10), Empty(5)
    mixture = MixtureSource({"first": first, "tar": sources["pages"], "last": last})  # type: ignore[dict-item]
    assert isinstance(mixture, Prefetching)
    prefetch(mixture, np.array([13, 2, 10, 16, 0]).tolist(), media=False)
    assert (first.hints, last.hints) == ([([2, 0], False)], [([1, 4], False)])


def test_the_fingerprint_changes_with_parts_and_their_order_alone(sources: dict[str, TarSource]) -> None:
    small, pages = sources.values()
    fingerprint = MixtureSource({"x": small, "y": pages}).fingerprint
    assert MixtureSource({"other": small, "names": pages}).fingerprint == fingerprint
    assert MixtureSource({"x": pages, "y": small}).fingerprint != fingerprint
    assert MixtureSource({"x": small}).fingerprint not in (fingerprint, small.fingerprint)
    assert mixture_fingerprint([small.fingerprint, pages.fingerprint]) == fingerprint


def test_a_mixture_needs_a_part() -> None:
    with pytest.raises(DataError, match="a mixture without parts"):
        MixtureSource({})
    assert id_ranges({}) == {}


def test_samples_load_from_a_mixture_as_from_their_source(sources: dict[str, TarSource], tmp_path: Path) -> None:
    indices = {name: write_index(tmp_path / name, scan_source(s, ESTIMATOR)) for name, s in sources.items()}
    mixture, index = MixtureSource(sources), IndexConcat(indices)
    assert index.key.source == mixture.fingerprint
    for i in range(len(mixture)):
        name, part, own = mixture.locate(i)
        one = load_sample(mixture, index, i, ESTIMATOR)
        other = load_sample(part, indices[name], own, ESTIMATOR)
        for field in ("tokens", "labels", "position_ids", "patches", "grids", "visual_index"):
            assert np.array_equal(getattr(one, field), getattr(other, field)), (i, field)
        assert (one.sample_id, one.place, one.replaced) == (i, other.place, None)
    assert json.dumps(index.item_tokens(6)) == json.dumps(indices["pages"].item_tokens(0))


class Grouped(Empty):
    """A source that reads two samples at once."""

    @property
    def groups(self) -> np.ndarray:
        return np.arange(self.length) // 2


def test_groups_of_parts_are_numbered_on(sources: dict[str, TarSource]) -> None:
    parts = {"a": Grouped(3), "none": Empty(), "whole": Empty(2), **sources, "b": Grouped(2)}
    mixture = MixtureSource(parts)  # type: ignore[arg-type]
    expected = [0, 0, 1, 2, 2, *[3] * 6, *[4] * 2, 5, 5]
    assert groups(mixture, SimpleNamespace(shard_numbers=np.zeros(15, dtype=np.int32))).tolist() == expected
    assert MixtureSource({"whole": Empty(2)}).groups is None  # type: ignore[dict-item]


def test_what_is_read_together_is_the_sources_to_say_else_the_shards_of_the_index(
    sources: dict[str, TarSource],
) -> None:
    shards = SimpleNamespace(shard_numbers=np.array([0, 0, 1], dtype=np.int32))
    found = groups(Empty(3), shards)  # type: ignore[arg-type]
    assert (found.tolist(), found.dtype) == ([0, 0, 1], np.int64)
    assert groups(Grouped(3), SimpleNamespace(shard_numbers=np.zeros(3, dtype=np.int32))).tolist() == [0, 0, 1]  # type: ignore[arg-type]
    tar = sources["small"]
    assert groups(tar, scan_source(tar, ESTIMATOR)).tolist() == scan_source(tar, ESTIMATOR).shard_numbers.tolist()
