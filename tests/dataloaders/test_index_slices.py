"""Building in slices: the index of one process whatever the source, nothing scanned twice, nothing lost."""

import json
import logging
import os
import sys
import threading
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataloaders import index_slices
from dataloaders.build_progress import BuildProgress
from dataloaders.encoder import ByteEncoder
from dataloaders.errors import DataError, IndexFormatError, SourceError
from dataloaders.estimators import Qwen25VLEstimator
from dataloaders.hf_source import HFDatasetSource
from dataloaders.index import CostIndex, write_index
from dataloaders.index_build import build_shards
from dataloaders.index_slices import build_slices
from dataloaders.jsonl_source import JsonlSource
from dataloaders.map_source import MapDatasetSource
from dataloaders.mixture_source import MixtureSource
from dataloaders.parquet_source import ParquetSource
from dataloaders.record_parser import RecordLimits
from dataloaders.scan import build_index, index_key, scan_source
from dataloaders.scan_rows import ScanOptions
from dataloaders.shuffled import SubsetSource
from dataloaders.slice_scan import SliceJob, slice_jobs
from dataloaders.source import SampleSource
from dataloaders.tar_source import TarSource

ESTIMATOR = Qwen25VLEstimator()
NUM = 23
Make = Callable[..., bytes]


@pytest.fixture(scope="module")
def rows(image_bytes: Make) -> list[dict[str, Any]]:
    """Rows with a picture each; 5 and 11 hold none that is one, 17 has no conversation."""
    made = []
    for n in range(NUM):
        picture = b"junk" if n in (5, 11) else image_bytes(40 + 8 * n, 50, seed=n)
        turns = [{"role": "user", "content": "<image>?"}, {"role": "assistant", "content": "Yes." * (n % 4)}]
        made.append({"messages": [] if n == 17 else turns, "image": picture})
    return made


@pytest.fixture
def jsonl(rows: list[dict[str, Any]], tmp_path: Path) -> Path:
    """The rows in two files beside their pictures; line 21 of the second is no JSON."""
    folder = tmp_path / "data"
    folder.mkdir()
    lines = []
    for n, row in enumerate(rows):
        (folder / f"{n}.png").write_bytes(row["image"])
        lines.append(json.dumps({**row, "image": f"{n}.png"}) if n != 21 else '{"messages": [}')
    (folder / "a.jsonl").write_text("\n".join(lines[:9]), encoding="utf-8")
    (folder / "b.jsonl").write_text("\n".join(lines[9:]), encoding="utf-8")
    return folder


def _sources(jsonl: Path, rows: list[dict[str, Any]]) -> dict[str, SampleSource]:
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, jsonl / "rows.parquet", row_group_size=5)
    lines = JsonlSource(str(jsonl / "*.jsonl"))
    found: dict[str, SampleSource] = {
        "jsonl": lines,
        "parquet": ParquetSource(jsonl / "rows.parquet"),
        "map": MapDatasetSource(rows),
        "mixture": MixtureSource({"lines": lines, "none": SubsetSource(lines, []), "items": MapDatasetSource(rows)}),
        "subset": SubsetSource(lines, range(20, 2, -1)),
        "empty": SubsetSource(lines, []),
    }
    return found


def _files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def _same_files(index: CostIndex, source: SampleSource, tmp_path: Path) -> None:
    assert index.folder is not None
    whole = write_index(tmp_path / "whole", scan_source(source, ESTIMATOR))
    assert _files(index.folder) == _files(whole.folder or Path())


class Scanned:
    """The slices that were really scanned in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bounds: list[tuple[int, int]] = []
        real = SliceJob.scan

        def scan(job: SliceJob, *args: Any, **options: Any) -> int:
            self.bounds.append((job.start, job.stop))
            return real(job, *args, **options)

        monkeypatch.setattr(SliceJob, "scan", scan)

    def take(self) -> list[tuple[int, int]]:
        taken, self.bounds = self.bounds, []
        return taken


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "map", "mixture", "subset", "empty"])
def test_the_files_are_those_of_a_scan_in_one_process(
    kind: str, jsonl: Path, rows: list[dict[str, Any]], tmp_path: Path
) -> None:
    source = _sources(jsonl, rows)[kind]
    index = build_slices(source, ESTIMATOR, tmp_path / "index", slice_samples=4)
    _same_files(index, source, tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["data", "index", "whole"]


def test_several_processes_write_the_same_files(jsonl: Path, rows: list[dict[str, Any]], tmp_path: Path) -> None:
    source = _sources(jsonl, rows)["mixture"]
    index = build_slices(source, ESTIMATOR, tmp_path / "index", slice_samples=12, workers=2)
    _same_files(index, source, tmp_path)
    assert [bad.sample_id for bad in index.bad] == [5, 11, 17, 21, 28, 34, 40]


def test_a_saved_data_set_is_scanned_by_several_processes(rows: list[dict[str, Any]], tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / "saved"))
    source = HFDatasetSource(tmp_path / "saved")
    index = build_slices(source, ESTIMATOR, tmp_path / "index", slice_samples=8, workers=2)
    _same_files(index, source, tmp_path)


def test_a_bad_line_is_listed_with_its_place(jsonl: Path, tmp_path: Path) -> None:
    index = build_index(JsonlSource(str(jsonl / "*.jsonl")), ESTIMATOR, tmp_path / "index")
    (bad,) = [bad for bad in index.bad if bad.sample_id == 21]
    assert (bad.reason, "b.jsonl" in bad.place, "13" in bad.place) == ("bad_record", True, True)
    assert [bad.sample_id for bad in index.bad] == [5, 11, 17, 21]


class _Grouped:
    """A source of which only the groups are asked."""

    fingerprint = "x"

    def __init__(self, sizes: Sequence[int]) -> None:
        self.groups = np.repeat(np.arange(len(sizes)), sizes)

    def __len__(self) -> int:
        return len(self.groups)


@given(st.lists(st.integers(1, 40), max_size=12), st.integers(1, 15))
def test_slices_hold_every_sample_once_and_cut_only_large_groups(sizes: list[int], size: int) -> None:
    source: Any = _Grouped(sizes)
    jobs = slice_jobs(source, size)
    assert [i for job in jobs for i in range(job.start, job.stop)] == list(range(sum(sizes)))
    assert all(0 < job.size <= 2 * size for job in jobs)
    ends = np.cumsum(sizes).tolist()
    inside = [job.stop for job in jobs if job.stop not in ends]
    large = [range(end - n, end) for end, n in zip(ends, sizes, strict=True) if n > 2 * size]
    assert all(any(stop in group for group in large) for stop in inside)
    assert len(jobs) <= 2 * sum(sizes) / size + 1


def test_a_source_without_groups_is_cut_evenly() -> None:
    class Plain:
        fingerprint = "x"

        def __len__(self) -> int:
            return 10_001

    source: Any = Plain()
    assert [job.size for job in slice_jobs(source)] == [2000, 2000, 2000, 2000, 2001]


def test_finished_slices_are_kept_and_not_scanned_again(
    jsonl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, scanned = JsonlSource(str(jsonl / "*.jsonl")), Scanned(monkeypatch)
    seen: list[BuildProgress] = []

    def stop(state: BuildProgress) -> None:
        if state.shards == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_slices(source, ESTIMATOR, tmp_path / "index", slice_samples=4, progress=stop)
    first = scanned.take()
    index = build_slices(source, ESTIMATOR, tmp_path / "index", slice_samples=4, progress=seen.append)
    second = scanned.take()
    assert (len(first), len(second)) == (3, 3)
    assert not set(first) & set(second)
    _same_files(index, source, tmp_path)
    assert (seen[-1].noun, seen[-1].shards, seen[-1].reused, seen[-1].samples, seen[-1].share) == ("slice", 6, 3, 23, 1)
    assert build_slices(source, ESTIMATOR, tmp_path / "index", progress=pytest.fail).key == index.key


_BUILD = """
from dataloaders.index_slices import build_slices
from dataloaders.jsonl_source import JsonlSource
build_slices(JsonlSource(sys.argv[1]), Qwen25VLEstimator(), sys.argv[2], workers=2, slice_samples=4, progress=act)
"""


@pytest.mark.parametrize("signal_name", ["SIGKILL", "SIGINT", "worker"])
def test_a_build_that_is_ended_leaves_no_process_and_goes_on_where_it_was(
    signal_name: str, jsonl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end_build: Callable[..., None]
) -> None:
    urls, folder = str(jsonl / "*.jsonl"), tmp_path / "index"
    end_build(_BUILD, urls, folder, signal_name)
    source, scanned = JsonlSource(urls), Scanned(monkeypatch)
    index = build_slices(source, ESTIMATOR, folder, slice_samples=4)
    assert len(scanned.take()) <= 4  # of six, two were finished
    _same_files(index, source, tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["data", "index", "whole"]


@pytest.mark.parametrize("change", ["options", "data", "encoder"])
def test_slices_of_other_options_or_data_are_not_taken(
    change: str, jsonl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(state: BuildProgress) -> None:
        if state.shards == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build_slices(JsonlSource(str(jsonl / "*.jsonl")), ESTIMATOR, tmp_path / "i", slice_samples=4, progress=stop)
    options = ScanOptions()
    if change == "options":
        options = ScanOptions(unfit="clamp")
    elif change == "encoder":
        options = ScanOptions(encoder=ByteEncoder(train_on="all"))
    else:
        path = jsonl / "b.jsonl"
        path.write_text(path.read_text().replace("Yes.", "No, ."), encoding="utf-8")
    scanned, source = Scanned(monkeypatch), JsonlSource(str(jsonl / "*.jsonl"))
    index = build_slices(source, ESTIMATOR, tmp_path / "i", options, slice_samples=4)
    assert len(scanned.take()) == 6
    assert index.key == options.key(source.fingerprint, ESTIMATOR)
    assert sorted(os.listdir(tmp_path)) == ["data", "i"]


class _Flaky:
    """Items whose storage fails where the file `broken` says so."""

    def __init__(self, broken: Path) -> None:
        self.broken = broken

    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> dict[str, str]:
        if self.broken.exists() and str(i) in self.broken.read_text().split():
            raise OSError(5, f"the disk of item {i} fails")
        return {"text": f"item {i}"}


def test_a_slice_that_cannot_be_read_does_not_stop_the_others_and_they_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, scanned = MapDatasetSource(_Flaky(tmp_path / "broken"), fingerprint="1"), Scanned(monkeypatch)
    (tmp_path / "broken").write_text("4")
    with pytest.raises(OSError, match="disk of item 4 fails"):
        build_slices(source, ESTIMATOR, tmp_path / "index", slice_samples=3)
    (tmp_path / "broken").write_text("4 11")
    with pytest.raises(SourceError, match=r"(?s)2 of 4 slices cannot be scanned:.*samples 3 to 5: .*samples 9 to 11"):
        build_slices(source, ESTIMATOR, tmp_path / "other", slice_samples=3)
    assert not (tmp_path / "index").exists()
    (tmp_path / "broken").unlink()
    scanned.take()
    assert len(build_slices(source, ESTIMATOR, tmp_path / "index", slice_samples=3)) == 12
    assert scanned.take() == [(3, 6)]


def test_a_file_that_changes_under_the_scan_is_an_error(jsonl: Path, tmp_path: Path) -> None:
    source = JsonlSource(str(jsonl / "*.jsonl"))
    with (jsonl / "b.jsonl").open("a") as file:
        file.write("\n{}")
    with pytest.raises(SourceError, match="changed"):
        build_slices(source, ESTIMATOR, tmp_path / "index", slice_samples=30)
    assert not (tmp_path / "index").exists()


@pytest.mark.parametrize("workers", [1, 2])
def test_a_fault_of_an_estimator_is_an_error_with_its_place(jsonl: Path, tmp_path: Path, workers: int) -> None:
    broken = Qwen25VLEstimator()
    broken.image_cells = None  # type: ignore[assignment]
    source = JsonlSource(str(jsonl / "a.jsonl"))
    with pytest.raises(DataError, match=r"(?s)failed with AttributeError.*a.jsonl, key line 1.*fault of the e"):
        build_slices(source, broken, tmp_path / "index", workers=workers, slice_samples=4)


class _Local:
    """Items that hold what no process can be sent."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def __len__(self) -> int:
        return 9

    def __getitem__(self, i: int) -> dict[str, str]:
        return {"text": f"item {i}"}


def test_a_source_that_does_not_travel_is_scanned_by_one_process_and_that_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source = MapDatasetSource(_Local(), fingerprint="1")
    with caplog.at_level(logging.WARNING):
        index = build_slices(source, ESTIMATOR, tmp_path / "index", workers=2, slice_samples=3)
    assert len(index) == 9
    assert "one process scans: the source, the estimator or the encoder does not travel" in caplog.text
    caplog.clear()
    build_slices(source, ESTIMATOR, tmp_path / "one", workers=1, slice_samples=3)
    assert caplog.text == ""


def test_a_source_whose_class_no_other_process_finds_is_scanned_by_one_process(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = types.ModuleType("only_in_this_process")  # as __main__ of a notebook is
    kind = type("Items", (list,), {"__module__": module.__name__})
    monkeypatch.setattr(module, "Items", kind, raising=False)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    source = MapDatasetSource(kind({"text": f"item {n}"} for n in range(9)))
    with caplog.at_level(logging.WARNING):
        index = build_slices(source, ESTIMATOR, tmp_path / "index", workers=2, slice_samples=3)
    assert len(index) == 9
    assert "No module named 'only_in_this_process'" in caplog.text


def test_limits_of_a_source_of_rows_are_in_the_key(jsonl: Path) -> None:
    usual = JsonlSource(str(jsonl / "a.jsonl"))
    tight = JsonlSource(str(jsonl / "a.jsonl"), limits=RecordLimits(max_bytes=90))
    assert usual.fingerprint == tight.fingerprint
    keys = [index_key(source, ESTIMATOR) for source in (usual, tight, SubsetSource(tight, [1]))]
    assert ["record.max_bytes=90 " in key.limits for key in keys] == [False, True, True]
    assert scan_source(tight, ESTIMATOR).key == keys[1]


def test_an_index_of_other_options_or_other_files_is_replaced_only_when_asked(jsonl: Path, tmp_path: Path) -> None:
    source, folder = JsonlSource(str(jsonl / "*.jsonl")), tmp_path / "index"
    build_slices(source, ESTIMATOR, folder)
    with pytest.raises(IndexFormatError, match="unfit is skip, expected clamp"):
        build_slices(source, ESTIMATOR, folder, ScanOptions(unfit="clamp"))
    fewer = JsonlSource(str(jsonl / "a.jsonl"))
    with pytest.raises(IndexFormatError, match=r"1 of the 2 files in this index are not among .*b.jsonl.*--replace"):
        build_slices(fewer, ESTIMATOR, folder)
    assert len(CostIndex.open(folder)) == NUM
    assert len(build_slices(fewer, ESTIMATOR, folder, replace=True)) == 9
    assert len(build_slices(source, ESTIMATOR, folder)) == NUM  # nothing is lost by more files
    (jsonl / "a.jsonl").write_text(json.dumps({"text": "a caption"}), encoding="utf-8")
    assert len(build_slices(JsonlSource(str(jsonl / "*.jsonl")), ESTIMATOR, folder)) == NUM - 8


def test_an_index_of_tars_and_one_of_other_data_do_not_replace_each_other(
    jsonl: Path, tmp_path: Path, write_shard: Callable[..., Path]
) -> None:
    shard = str(write_shard(tmp_path / "s.tar", [("0.txt", b"a caption")]))
    source = JsonlSource(str(jsonl / "a.jsonl"))
    build_shards(shard, ESTIMATOR, tmp_path / "tars")
    build_slices(source, ESTIMATOR, tmp_path / "lines")
    with pytest.raises(IndexFormatError, match=r"1 of the 1 files in this index are not among .*s.tar"):
        build_slices(source, ESTIMATOR, tmp_path / "tars")
    with pytest.raises(IndexFormatError, match=r"an index of 9 samples that are not in tar shards .*--replace"):
        build_shards(shard, ESTIMATOR, tmp_path / "lines")
    # The cache of a source follows it.
    assert len(build_index(TarSource(shard), ESTIMATOR, tmp_path / "lines")) == 1
    assert len(build_index(source, ESTIMATOR, tmp_path / "tars")) == 9


def test_under_error_all_are_listed_and_what_was_scanned_is_kept(tmp_path: Path, image_bytes: Make) -> None:
    source = MapDatasetSource([{"image": image_bytes(2100, 4), "text": "a strip"}] * 3)
    with pytest.raises(DataError, match=r"(?s)the media of 3 of 3 samples.*item 0.*item 2.*are kept in .*i.building"):
        build_slices(source, ESTIMATOR, tmp_path / "i", ScanOptions(unfit="error"), slice_samples=1)


def test_a_place_where_no_index_can_lie_is_refused_before_anything_is_scanned(
    jsonl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("x")
    source, scanned = JsonlSource(str(jsonl / "a.jsonl")), Scanned(monkeypatch)
    with pytest.raises(IndexFormatError, match="nothing can be written here"):
        build_slices(source, ESTIMATOR, tmp_path / "file" / "index")
    for url in ("s3://bucket/index", Path("s3://bucket/index")):
        with pytest.raises(IndexFormatError, match="cannot lie at a URL"):
            build_slices(source, ESTIMATOR, url)
    with pytest.raises(IndexFormatError, match="holds something else"):
        build_slices(source, ESTIMATOR, jsonl, replace=True)
    assert scanned.take() == []
    assert sorted(os.listdir(tmp_path)) == ["data", "file"]


def test_an_index_is_built_by_one_process_at_a_time(jsonl: Path, tmp_path: Path) -> None:
    source, said = JsonlSource(str(jsonl / "*.jsonl")), list[str]()

    def again(state: BuildProgress) -> None:
        if state.shards == 2:
            with pytest.raises(IndexFormatError, match="another process is building this index") as caught:
                build_slices(source, ESTIMATOR, tmp_path / "index")
            said.append(str(caught.value))

    build_slices(source, ESTIMATOR, tmp_path / "index", slice_samples=4, progress=again)
    assert len(said) == 1


def test_there_are_as_many_processes_as_pay(jsonl: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, taken = JsonlSource(str(jsonl / "*.jsonl")), list[int]()
    real = index_slices.scan_here

    def in_workers(jobs: Any, context: Any, report: Any, *, workers: int) -> None:
        taken.append(workers)
        real(jobs, context, report)

    monkeypatch.setattr(index_slices, "scan_in_workers", in_workers)
    monkeypatch.setattr(index_slices, "num_cpus", lambda: 7)
    build_slices(source, ESTIMATOR, tmp_path / "few", workers=None, slice_samples=4)
    assert taken == []
    monkeypatch.setattr(index_slices, "SMALL_SAMPLES", NUM)
    build_slices(source, ESTIMATOR, tmp_path / "many", workers=None, slice_samples=4)
    assert taken == [7]
