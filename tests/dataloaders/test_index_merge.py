"""Parts of several machines: merged they are the index of one machine, and anything else is named."""

import json
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from dataloaders.errors import IndexFormatError, SourceError
from dataloaders.estimators import Qwen25VLConfig, Qwen25VLEstimator
from dataloaders.index import CostIndex, write_index
from dataloaders.index_build import Part, build_shards
from dataloaders.index_merge import concatenate, merge_parts
from dataloaders.scan import scan_source
from dataloaders.tar_source import TarSource

ESTIMATOR = Qwen25VLEstimator()
Make = Callable[..., bytes]


@pytest.fixture(scope="module")
def urls(
    tmp_path_factory: pytest.TempPathFactory, write_shard: Callable[..., Path], chat_json: Make, image_bytes: Make
) -> list[str]:
    """Seven shards with unusable samples of different kinds in some of them."""
    folder = tmp_path_factory.mktemp("shards")
    paths = []
    for number in range(7):
        members = [("0.json", chat_json("<image>?", "Yes.")), ("0.png", image_bytes(56 + 28 * number, 56))]
        members += [("1.json", b"{" if number in (2, 5) else chat_json("1?", "2" * number))]
        members += [("2.json", chat_json("<image>", "x")), ("2.png", b"" if number % 3 == 1 else image_bytes(99, 60))]
        paths.append(str(write_shard(folder / f"s{number}.tar", members)))
    return paths


def _parts(urls: list[str], folder: Path, count: int) -> list[Path]:
    folders = [folder / f"part{number}" for number in range(count)]
    for number, path in enumerate(folders):
        build_shards(urls, ESTIMATOR, path, part=Part(number=number, count=count))
    return folders


@pytest.mark.parametrize("count", [1, 2, 3, 7, 9])
def test_merged_parts_are_the_index_of_a_single_build_to_the_byte(urls: list[str], tmp_path: Path, count: int) -> None:
    whole = build_shards(urls, ESTIMATOR, tmp_path / "whole")
    parts = _parts(urls, tmp_path, count)
    random.Random(count).shuffle(parts)
    merged = merge_parts(parts, tmp_path / "merged")
    assert merged.fingerprint == whole.fingerprint
    assert merged.part is None
    for name in sorted(os.listdir(tmp_path / "whole")):
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "merged" / name).read_bytes(), name


def test_a_part_holds_every_nth_shard_and_says_so(urls: list[str], tmp_path: Path) -> None:
    index = build_shards(urls, ESTIMATOR, tmp_path / "part", part=Part(number=1, count=3))
    assert [shard.path for shard in index.shards] == [urls[1], urls[4]]
    assert str(CostIndex.open(tmp_path / "part").part) == "1/3"
    assert index.fingerprint == scan_source(TarSource([urls[1], urls[4]]), ESTIMATOR).fingerprint


def test_a_machine_needs_the_shards_of_its_own_part_alone(urls: list[str], tmp_path: Path) -> None:
    listed = [urls[0], str(tmp_path / "elsewhere.tar"), urls[2]]
    assert len(build_shards(listed, ESTIMATOR, tmp_path / "part", part=Part(number=0, count=2))) == 6
    with pytest.raises(SourceError, match=r"1 of 1 shards are missing or no files: .*elsewhere.tar"):
        build_shards(listed, ESTIMATOR, tmp_path / "other", part=Part(number=1, count=2))


def test_missing_and_repeated_parts_are_named(urls: list[str], tmp_path: Path) -> None:
    parts = _parts(urls, tmp_path, 3)
    with pytest.raises(IndexFormatError, match=r"part 1/3 is missing. Name the folder of every part once"):
        merge_parts([parts[2], parts[0]], tmp_path / "merged")
    with pytest.raises(IndexFormatError, match=r"part 2/3 is missing; part 0/3 is there 2 times: .*part0, .*part0"):
        merge_parts([parts[0], parts[1], parts[0]], tmp_path / "merged")
    with pytest.raises(IndexFormatError, match="no part is named"):
        merge_parts([], tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_what_does_not_belong_together_is_refused_with_the_reason(urls: list[str], tmp_path: Path) -> None:
    first, second = _parts(urls, tmp_path, 2)
    whole = tmp_path / "whole"
    build_shards(urls, ESTIMATOR, whole)
    with pytest.raises(IndexFormatError, match=r"is no part: it was built without --part at .*whole. Use it as it is"):
        merge_parts([first, whole], tmp_path / "merged")
    part = Part(number=1, count=2)
    build_shards(urls, Qwen25VLEstimator(Qwen25VLConfig(max_pixels=999 * 784)), tmp_path / "rule", part=part)
    with pytest.raises(IndexFormatError, match=r"estimator is .*, expected .*rule. Merge the parts of one source"):
        merge_parts([first, tmp_path / "rule"], tmp_path / "merged")
    build_shards(urls[:-1], ESTIMATOR, tmp_path / "list", part=part)
    with pytest.raises(IndexFormatError, match="it is a part of another list of shards"):
        merge_parts([first, tmp_path / "list"], tmp_path / "merged")
    build_shards(urls, ESTIMATOR, tmp_path / "three", part=Part(number=1, count=3))
    with pytest.raises(IndexFormatError, match=r"it is part 1/3, while .*part0 is part 0/2"):
        merge_parts([first, tmp_path / "three"], tmp_path / "merged")
    with pytest.raises(IndexFormatError, match="not a cost index"):
        merge_parts([first, tmp_path / "nowhere"], tmp_path / "merged")
    assert len(merge_parts([second, first], tmp_path / "merged")) == 21


def test_a_part_is_not_taken_for_the_whole(urls: list[str], tmp_path: Path) -> None:
    build_shards(urls, ESTIMATOR, tmp_path / "index", part=Part(number=0, count=2))
    whole = build_shards(urls, ESTIMATOR, tmp_path / "index", replace=True)
    assert (len(whole), whole.part) == (21, None)
    assert whole.fingerprint == scan_source(TarSource(urls), ESTIMATOR).fingerprint


def test_pieces_without_samples_are_legal(urls: list[str], tmp_path: Path) -> None:
    index = scan_source(TarSource(urls[:2]), ESTIMATOR)
    empty = concatenate([], index.key)
    assert (len(empty), empty.reasons, empty.bad) == (0, ("",), [])
    both = concatenate([empty, index, empty], index.key)
    assert both.fingerprint == index.fingerprint
    assert len(write_index(tmp_path / "empty", empty)) == 0


def test_very_many_missing_parts_are_counted_not_listed(urls: list[str], tmp_path: Path) -> None:
    (folder,) = _parts(urls, tmp_path, 1)
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps({**meta, "part": {**meta["part"], "count": 10**9}}))
    with pytest.raises(IndexFormatError, match=r"part 20/1000000000 is missing; and 999999979 more. Name") as caught:
        merge_parts([folder], tmp_path / "whole")
    assert len(str(caught.value)) < 2000


def test_a_part_that_lacks_a_shard_is_damaged(urls: list[str], tmp_path: Path) -> None:
    (folder,) = _parts(urls, tmp_path, 1)
    meta = json.loads((folder / "meta.json").read_text())
    (folder / "meta.json").write_text(json.dumps({**meta, "part": {**meta["part"], "num_shards": 99}}))
    with pytest.raises(IndexFormatError, match=r"damaged: \d+ shards in a part of 99"):
        merge_parts([folder], tmp_path / "whole")
