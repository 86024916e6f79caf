"""Data sets that others wrote: map-style ones as torch knows them, and those of Hugging Face, which never decode."""

import json
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from dataloaders.errors import Reason, RecordError, SourceError
from dataloaders.estimators import Qwen25VLEstimator
from dataloaders.hf_source import HFDatasetSource
from dataloaders.map_source import MapDatasetSource
from dataloaders.rows import RowFields
from dataloaders.scan import scan_source

ESTIMATOR = Qwen25VLEstimator()
Make = Callable[..., bytes]


class _Pairs:
    """A map-style data set of (PIL image, label), as torchvision's are."""

    def __init__(self, num: int, *, random: bool = False) -> None:
        self.num, self.random, self.asked = num, random, 0

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, i: int) -> tuple[Image.Image, int]:
        self.asked += 1
        if not 0 <= i < self.num:
            raise IndexError(i)
        return Image.new("RGB", (40 + i, 30), (self.asked if self.random else i, 0, 0)), i


def _pair_to_row(item: tuple[Image.Image, int]) -> dict[str, Any]:
    return {"image": item[0], "text": f"class {item[1]}"}


class _Failing(list[Any]):
    """Item i raises the i-th error."""

    def __getitem__(self, i: Any) -> Any:
        item = super().__getitem__(i)
        if isinstance(item, Exception):
            raise item
        return item


GOOD = {"text": "fine"}


def test_items_become_rows_by_a_function() -> None:
    source = MapDatasetSource(_Pairs(3), to_row=_pair_to_row)
    index = scan_source(source, ESTIMATOR)
    assert index.bad == []
    assert index.items["width_px"].tolist() == [40, 41, 42]
    assert source.media_bytes(2, 0).startswith(b"\x89PNG")
    assert source.place(2) == "shard _Pairs, key item 2"


def test_an_image_is_encoded_once_for_record_and_bytes() -> None:
    dataset = _Pairs(2)
    source = MapDatasetSource(dataset, to_row=_pair_to_row, fingerprint="1")
    before = dataset.asked
    source.record(1)
    source.media_reader(1, 0)
    source.media_bytes(1, 0)
    assert dataset.asked == before + 1


def test_items_that_are_no_mappings_say_what_to_do() -> None:
    source = MapDatasetSource(_Pairs(2), fingerprint="1")
    with pytest.raises(
        RecordError, match=r"the item is a tuple, not a mapping at shard _Pairs, key item 0. Give `to_row`"
    ):
        source.record(0)


def test_errors_of_items_are_bad_samples_and_those_of_storage_are_not() -> None:
    items = [
        GOOD,
        ValueError("odd"),
        KeyError("k"),
        FileNotFoundError(2, "gone"),
        OSError("cannot identify image"),
        GOOD,
    ]
    source = MapDatasetSource(_Failing(items), fingerprint="1")
    index = scan_source(source, ESTIMATOR)
    assert [(bad.sample_id, bad.reason) for bad in index.bad] == [
        (1, "bad_record"),
        (2, "bad_record"),
        (3, "missing_media"),
        (4, "bad_record"),
    ]
    assert "the data set raised ValueError: odd" in index.bad[0].message
    with pytest.raises(OSError, match="disk"):
        MapDatasetSource(_Failing([GOOD, OSError(5, "disk")]), fingerprint="1").record(1)


def test_items_that_differ_each_time_are_refused() -> None:
    with pytest.raises(SourceError, match=r"item 0 differs each time.*random augmentation"):
        MapDatasetSource(_Pairs(3, random=True), to_row=_pair_to_row)


def test_the_fingerprint_is_given_or_of_a_few_items_and_says_so() -> None:
    first = MapDatasetSource([{"text": str(i)} for i in range(100)])
    assert "goes unseen unless you give `fingerprint`" in first.notes[0]
    assert MapDatasetSource([{"text": str(i)} for i in range(100)]).fingerprint == first.fingerprint
    assert MapDatasetSource([{"text": str(i)} for i in range(101)]).fingerprint != first.fingerprint
    assert MapDatasetSource([{"text": str(-i)} for i in range(100)]).fingerprint != first.fingerprint
    given = MapDatasetSource([GOOD], fingerprint="v1")
    assert given.notes == ()
    assert given.fingerprint != MapDatasetSource([GOOD], fingerprint="v2").fingerprint


def test_what_is_no_map_style_data_set_is_refused() -> None:
    def stream() -> Iterator[dict[str, str]]:
        yield GOOD

    with pytest.raises(SourceError, match=r"a generator has no len\(\) and \[i\]"):
        MapDatasetSource(stream())  # type: ignore[arg-type]
    with pytest.raises(SourceError, match="has no items"):
        MapDatasetSource([])
    with pytest.raises(SourceError, match=r"`to_row` cannot be pickled.*top level"):
        MapDatasetSource([GOOD], to_row=lambda item: item)


def test_paths_of_items_need_a_root(tmp_path: Path) -> None:
    (tmp_path / "1.png").write_bytes(b"x")
    row = {"image": "1.png", "text": "a"}
    assert MapDatasetSource([row], media_root=tmp_path).media_bytes(0, 0) == b"x"
    with pytest.raises(RecordError, match="Give the folder as `media_root`"):
        MapDatasetSource([row]).record(0)


def test_a_named_field_that_no_item_has_is_an_error() -> None:
    with pytest.raises(SourceError, match=r"no record has the field 'images'.*'image' \(1\)"):
        MapDatasetSource([{"image": b"x", "text": "a"}], fields=RowFields(images="images"))


@pytest.mark.torch
def test_a_torch_data_set_is_a_map_style_data_set() -> None:
    data = pytest.importorskip("torch.utils.data")
    subset = data.Subset(_Pairs(5), [4, 2])
    source = MapDatasetSource(subset, to_row=_pair_to_row)
    assert [source.record(i).turns[1].parts[0].text for i in range(2)] == ["class 4", "class 2"]  # type: ignore[union-attr]


# Hugging Face


@pytest.fixture(scope="module")
def datasets() -> Any:
    module = pytest.importorskip("datasets")
    module.disable_progress_bars()
    return module


def _dataset(datasets: Any, num: int = 4, image: bytes = b"not an image") -> Any:
    rows = {
        "image": [{"bytes": image + bytes([i]), "path": None} for i in range(num)],
        "text": [f"number {i}" for i in range(num)],
        "label": list(range(num)),
    }
    features = datasets.Features(
        {"image": datasets.Image(), "text": datasets.Value("string"), "label": datasets.Value("int64")}
    )
    return datasets.Dataset.from_dict(rows, features=features)


def test_media_of_a_data_set_are_its_bytes_even_where_they_do_not_decode(datasets: Any) -> None:
    source = HFDatasetSource(_dataset(datasets))
    assert [source.media_bytes(i, 0) for i in range(4)] == [b"not an image" + bytes([i]) for i in range(4)]
    assert source.record(1).extra == {}
    assert HFDatasetSource(_dataset(datasets), columns=["label"]).record(1).extra == {"label": 1}


def test_the_order_of_a_data_set_is_kept_and_is_in_the_fingerprint(datasets: Any) -> None:
    dataset = _dataset(datasets)
    chosen = HFDatasetSource(dataset.select([3, 1]))
    assert [chosen.media_bytes(i, 0)[-1] for i in range(2)] == [3, 1]
    shuffled = HFDatasetSource(dataset.shuffle(seed=1))
    assert len({HFDatasetSource(dataset).fingerprint, chosen.fingerprint, shuffled.fingerprint}) == 3
    assert HFDatasetSource(_dataset(datasets)).fingerprint == HFDatasetSource(dataset).fingerprint
    again = pickle.loads(pickle.dumps(shuffled))
    assert [again.media_bytes(i, 0) for i in range(4)] == [shuffled.media_bytes(i, 0) for i in range(4)]


def test_formats_and_transforms_do_not_apply(datasets: Any) -> None:
    dataset = _dataset(datasets)
    dataset.set_transform(lambda batch: pytest.fail("called"))
    assert HFDatasetSource(dataset).media_bytes(0, 0) == b"not an image\0"


def test_a_saved_folder_is_opened_in_every_process_and_watched(datasets: Any, tmp_path: Path) -> None:
    _dataset(datasets).save_to_disk(tmp_path / "a")
    source = HFDatasetSource(tmp_path / "a")
    pickled = pickle.dumps(source)
    assert b"not an image" not in pickled
    assert pickle.loads(pickled).media_bytes(3, 0) == b"not an image\3"
    (tmp_path / "b").mkdir()
    for path in (tmp_path / "a").iterdir():
        (tmp_path / "b" / path.name).write_bytes(path.read_bytes())
    assert HFDatasetSource(tmp_path / "b").fingerprint == source.fingerprint
    _dataset(datasets, 5).save_to_disk(tmp_path / "c")
    for path in (tmp_path / "c").iterdir():
        (tmp_path / "a" / path.name).write_bytes(path.read_bytes())
    with pytest.raises(SourceError, match="has changed since it was opened"):
        pickle.loads(pickled).record(0)


def test_folders_and_data_sets_of_other_kinds_are_refused(datasets: Any, tmp_path: Path) -> None:
    splits = datasets.DatasetDict({"train": _dataset(datasets), "test": _dataset(datasets)})
    splits.save_to_disk(tmp_path / "splits")
    with pytest.raises(SourceError, match=r"several splits: test, train\b.*Name one of them: .*splits/test"):
        HFDatasetSource(tmp_path / "splits")
    with pytest.raises(SourceError, match=r'Pass one of them, such as dataset\["train"\]'):
        HFDatasetSource(splits)
    with pytest.raises(SourceError, match=r"Load it without streaming=True, or .*dataloaders\.HFStream"):
        HFDatasetSource(_dataset(datasets).to_iterable_dataset())
    with pytest.raises(SourceError, match="Data must be on this machine"):
        HFDatasetSource("owner/name")
    with pytest.raises(SourceError, match="there is no column 'images'; there are 'image', 'text', 'label'"):
        HFDatasetSource(_dataset(datasets), fields=RowFields(images="images"))


@pytest.mark.parametrize(
    "state", [b"", b"[]", b"{}", b"[" * 100_000, json.dumps({"_data_files": [{"filename": "../x"}]}).encode()]
)
def test_a_damaged_state_is_a_source_error(datasets: Any, tmp_path: Path, state: bytes) -> None:
    _dataset(datasets).save_to_disk(tmp_path / "a")
    (tmp_path / "a" / "state.json").write_bytes(state)
    with pytest.raises(SourceError, match=r"damaged|does not open"):
        HFDatasetSource(tmp_path / "a")


def test_paths_in_a_data_set_are_references(datasets: Any, tmp_path: Path) -> None:
    (tmp_path / "1.png").write_bytes(b"file")
    rows = {"image": [str(tmp_path / "1.png"), "/etc/passwd"], "text": ["a", "b"]}
    features = datasets.Features({"image": datasets.Image(), "text": datasets.Value("string")})
    source = HFDatasetSource(datasets.Dataset.from_dict(rows, features=features), media_root=tmp_path)
    assert source.media_bytes(0, 0) == b"file"
    with pytest.raises(RecordError) as raised:
        source.record(1)
    assert raised.value.reason is Reason.BAD_RECORD


def test_videos_and_lists_of_images_are_not_decoded(datasets: Any, video_bytes: Make) -> None:
    clip = video_bytes(64, 48, 8)
    rows = {"video": [{"bytes": clip, "path": None}], "images": [[{"bytes": b"1", "path": None}]]}
    rows["messages"] = [[{"role": "user", "content": "<video><image>"}]]  # type: ignore[list-item]
    dataset = datasets.Dataset.from_dict(rows)
    features = dataset.features.copy()
    features["video"], features["images"] = datasets.Video(), datasets.List(datasets.Image())
    source = HFDatasetSource(dataset.cast(features))
    assert [source.media_bytes(0, j) for j in range(2)] == [clip, b"1"]


def test_numpy_ids_are_ids(datasets: Any) -> None:
    for source in (HFDatasetSource(_dataset(datasets)), MapDatasetSource([GOOD] * 3)):
        assert source.record(int(np.int64(2))) == source.record(np.int64(2))  # type: ignore[arg-type]
