"""One set of samples written in every form that a source reads: records, index and loaded samples are the same."""

import hashlib
import json
import os
import pickle
import re
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataloaders.errors import Reason, RecordError
from dataloaders.estimators import Qwen25VLConfig, Qwen25VLEstimator
from dataloaders.hf_source import HFDatasetSource
from dataloaders.index import CostIndex
from dataloaders.jsonl_source import JsonlSource
from dataloaders.map_source import MapDatasetSource
from dataloaders.open_source import open_source
from dataloaders.parquet_source import ParquetSource
from dataloaders.probe import ProbeLimits
from dataloaders.record import Record
from dataloaders.sample import load_sample
from dataloaders.scan import build_index, scan_source
from dataloaders.source import SampleSource, shard_and_key
from dataloaders.tar_source import TarSource

ESTIMATOR = Qwen25VLEstimator(
    Qwen25VLConfig(min_pixels=4 * 784, max_pixels=64 * 784, video_min_pixels=4 * 784, video_max_pixels=16 * 784)
)
Make = Callable[..., bytes]
Media = list[tuple[str, bytes]]  # (extension, bytes), in the order of the placeholders
Sample = tuple[str, str, Media]  # question, answer, media


@pytest.fixture(scope="module")
def samples(image_bytes: Make, video_bytes: Make) -> list[Sample]:
    pictures = [("jpg", image_bytes(60 + 40 * j, 90, seed=2 + j, format="JPEG")) for j in range(3)]
    return [
        ("1 plus 1?", "2.", []),
        ("<image>What is it, é?", "A red one.", [("png", image_bytes(120, 80, seed=1))]),
        ("<image><image> and <image>?", "Three.", list(pictures)),
        ("<video>Where?", "Up.", [("mp4", video_bytes(96, 64, 16))]),
        ("<video> or <image>?", "Both.", [("mp4", video_bytes(64, 96, 10)), ("png", image_bytes(64, 64, seed=8))]),
        ("2 plus 2?", "4.", []),
    ]


def _messages(sample: Sample) -> list[dict[str, str]]:
    return [{"role": "user", "content": sample[0]}, {"role": "assistant", "content": sample[1]}]


def _sharegpt(sample: Sample) -> list[dict[str, str]]:
    return [{"from": "human", "value": sample[0]}, {"from": "gpt", "value": sample[1]}]


def _openai(sample: Sample, names: Sequence[str]) -> list[dict[str, Any]]:
    """Content of parts that name their media."""
    left, parts = iter(names), list[dict[str, Any]]()
    for piece in re.split("(<image>|<video>)", sample[0]):
        if piece == "<image>":
            parts.append({"type": "image_url", "image_url": {"url": next(left, None)}})
        elif piece == "<video>":
            parts.append({"type": "video", "video": next(left, None)})
        elif piece:
            parts.append({"type": "text", "text": piece})
    return [{"role": "user", "content": parts}, {"role": "assistant", "content": sample[1]}]


def _of_kind(sample: Sample, *, video: bool) -> list[bytes]:
    return [data for extension, data in sample[2] if (extension == "mp4") == video]


def _write_media(folder: Path, samples: Sequence[Sample]) -> list[list[str]]:
    """Files below `folder`/media; their names from `folder` on."""
    (folder / "media").mkdir(parents=True)
    names = [[f"media/{i}-{j}.{extension}" for j, (extension, _) in enumerate(s[2])] for i, s in enumerate(samples)]
    for sample, of_sample in zip(samples, names, strict=True):
        for (_, data), name in zip(sample[2], of_sample, strict=True):
            (folder / name).write_bytes(data)
    return names


def _rows(samples: Sequence[Sample], names: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """ShareGPT rows with lists of files."""
    return [
        {
            "conversations": _sharegpt(sample),
            "images": [name for name in of_sample if not name.endswith("mp4")],
            "videos": [name for name in of_sample if name.endswith("mp4")],
        }
        for sample, of_sample in zip(samples, names, strict=True)
    ]


def _jsonl(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return path


def tar(folder: Path, samples: Sequence[Sample], write_shard: Callable[..., Path]) -> SampleSource:
    members = []
    for i, sample in enumerate(samples):
        members.append((f"{i:03}.json", json.dumps({"messages": _messages(sample)}).encode()))
        members += [(f"{i:03}.{j}.{extension}", data) for j, (extension, data) in enumerate(sample[2])]
    folder.mkdir()
    return TarSource(str(write_shard(folder / "a.tar", members)))


def jsonl_sharegpt(folder: Path, samples: Sequence[Sample], write_shard: object) -> SampleSource:
    return JsonlSource(_jsonl(folder / "a.jsonl", _rows(samples, _write_media(folder, samples))))


def jsonl_openai(folder: Path, samples: Sequence[Sample], write_shard: object) -> SampleSource:
    names = _write_media(folder, samples)
    rows = [{"messages": _openai(s, of_sample)} for s, of_sample in zip(samples, names, strict=True)]
    return JsonlSource(_jsonl(folder / "a.jsonl", rows))


def json_array(folder: Path, samples: Sequence[Sample], write_shard: object) -> SampleSource:
    rows = _rows(samples, _write_media(folder, samples))
    (folder / "a.json").write_text(json.dumps(rows, indent=1, ensure_ascii=False), encoding="utf-8")
    return JsonlSource([folder / "a.json"])


def _table(samples: Sequence[Sample]) -> pa.Table:
    medium = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    rows = [
        {
            "messages": _messages(sample),
            "images": [{"bytes": data, "path": None} for data in _of_kind(sample, video=False)],
            "video": next(iter(_of_kind(sample, video=True)), None),
            "unread": b"x" * 1000,
        }
        for sample in samples
    ]
    turn = pa.struct([("role", pa.string()), ("content", pa.string())])
    columns = [("messages", pa.list_(turn)), ("images", pa.list_(medium)), ("video", pa.binary())]
    return pa.Table.from_pylist(rows, pa.schema([*columns, ("unread", pa.binary())]))


def parquet(folder: Path, samples: Sequence[Sample], write_shard: object) -> SampleSource:
    folder.mkdir()
    table = _table(samples)
    pq.write_table(table.slice(0, 4), folder / "a.parquet", row_group_size=3)
    pq.write_table(table.slice(4), folder / "b.parquet")
    return ParquetSource(str(folder / "*.parquet"))


def hugging_face(folder: Path, samples: Sequence[Sample], write_shard: object) -> SampleSource:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    table = _table(samples)
    features = datasets.Features.from_arrow_schema(table.schema)
    features["images"] = datasets.List(datasets.Image())
    datasets.Dataset.from_list(table.to_pylist(), features=features).save_to_disk(folder / "saved")
    return HFDatasetSource(folder / "saved")


def map_style(folder: Path, samples: Sequence[Sample], write_shard: object) -> SampleSource:
    rows = [
        {
            "messages": _messages(sample),
            "images": _of_kind(sample, video=False),
            "videos": _of_kind(sample, video=True),
        }
        for sample in samples
    ]
    return MapDatasetSource(rows)


FORMS = [tar, jsonl_sharegpt, jsonl_openai, json_array, parquet, hugging_face, map_style]
Build = Callable[[Path, Sequence[Sample], Callable[..., Path]], SampleSource]


@pytest.fixture(scope="module", params=FORMS, ids=lambda form: form.__name__)
def build(request: pytest.FixtureRequest) -> Build:
    form: Build = request.param
    return form


@pytest.fixture(scope="module")
def source(
    build: Build, samples: list[Sample], write_shard: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> SampleSource:
    return build(tmp_path_factory.mktemp("form") / "data", samples, write_shard)


@pytest.fixture(scope="module")
def reference(
    samples: list[Sample], write_shard: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[SampleSource, CostIndex]:
    source = tar(tmp_path_factory.mktemp("reference") / "data", samples, write_shard)
    return source, scan_source(source, ESTIMATOR)


@pytest.fixture(scope="module")
def index(source: SampleSource) -> CostIndex:
    return scan_source(source, ESTIMATOR)


def _said(record: Record) -> tuple[Any, ...]:
    """What must be equal: everything but names of files."""
    return record.turns, [(ref.kind, ref.size_bytes) for ref in record.media], dict(record.extra)


def test_it_is_a_sample_source(source: SampleSource) -> None:
    assert isinstance(source, SampleSource)


def test_records_are_those_of_the_tar_in_order(
    source: SampleSource, reference: tuple[SampleSource, CostIndex], samples: list[Sample]
) -> None:
    assert len(source) == len(samples)
    assert [_said(source.record(i)) for i in range(len(source))] == [
        _said(reference[0].record(i)) for i in range(len(samples))
    ]


def test_media_are_the_bytes_that_were_written(source: SampleSource, samples: list[Sample]) -> None:
    for i, (_, _, media) in enumerate(samples):
        for j, (_, data) in enumerate(media):
            reader = source.media_reader(i, j)
            assert source.media_bytes(i, j) == data
            assert (reader.size, reader.read(0, reader.size)) == (len(data), data)
            assert reader.read(3, 5) == data[3:8]
            assert reader.read(len(data) - 2, 100) == data[-2:]
            assert reader.read(len(data) + 1, 4) == b""


def test_the_index_has_the_columns_of_the_tars(index: CostIndex, reference: tuple[SampleSource, CostIndex]) -> None:
    assert index.bad == []
    for found, expected in ((index.samples, reference[1].samples), (index.items, reference[1].items)):
        for name, column in expected.items():
            np.testing.assert_array_equal(found[name], column, err_msg=name)


def test_loaded_samples_are_those_of_the_tar(
    source: SampleSource, index: CostIndex, reference: tuple[SampleSource, CostIndex]
) -> None:
    for i in range(len(source)):
        found = load_sample(source, index, i, ESTIMATOR)
        expected = load_sample(*reference, i, ESTIMATOR)
        assert found.replaced is None
        for name in ("tokens", "labels", "position_ids", "visual_index", "patches", "grids"):
            np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), err_msg=name)


def test_an_index_in_a_folder_is_found_again(source: SampleSource, index: CostIndex, tmp_path: Path) -> None:
    build_index(source, ESTIMATOR, tmp_path / "index")
    again = build_index(source, ESTIMATOR, tmp_path / "index", progress=pytest.fail)
    assert again.key == index.key


@pytest.mark.parametrize("i", [-1, -6, 6, 10**9])
def test_an_id_that_is_not_there_is_an_error(source: SampleSource, i: int) -> None:
    for call in (source.record, source.place, lambda i: source.media_bytes(i, 0), lambda i: source.media_reader(i, 0)):
        with pytest.raises(IndexError, match=f"sample {i} is not one of the 6 samples"):
            call(i)


@pytest.mark.parametrize(("i", "j"), [(1, -1), (1, 1), (0, 0)])
def test_a_medium_that_is_not_there_is_an_error(source: SampleSource, i: int, j: int) -> None:
    for call in (source.media_bytes, source.media_reader):
        with pytest.raises(IndexError, match=f"medium {j} is not one of"):
            call(i, j)


def test_the_place_is_that_of_the_record_and_differs_from_sample_to_sample(source: SampleSource) -> None:
    places = [source.place(i) for i in range(len(source))]
    assert places == [source.record(i).place for i in range(len(source))]
    records = [source.record(i) for i in range(len(source))]
    assert [shard_and_key(source, i) for i in range(len(source))] == [(r.shard, r.key) for r in records]
    assert len(set(places)) == len(places)
    assert all(place.startswith("shard ") and ", key " in place for place in places)


def test_the_file_in_a_place_is_absolute_however_it_was_named(
    source: SampleSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = getattr(source, "files", getattr(source, "shards", ()))
    if not files:
        pytest.skip("its places name no file")
    monkeypatch.chdir(Path(files[0]).parent)
    for prefix in ("", "./", "file:"):
        again = open_source([f"{prefix}{Path(file).name}" for file in files])
        assert again.fingerprint == source.fingerprint
        assert again.place(1) == source.place(1)
        assert again.record(1).shard == shard_and_key(again, 1)[0] == files[0]


def test_it_survives_pickling_without_its_open_files(source: SampleSource, samples: list[Sample]) -> None:
    source.media_bytes(1, 0)
    again = pickle.loads(pickle.dumps(source))
    assert (again.fingerprint, len(again)) == (source.fingerprint, len(source))
    assert again.record(4) == source.record(4)
    assert again.media_bytes(1, 0) == samples[1][2][0][1]


def test_it_reads_in_a_process_that_was_spawned(source: SampleSource, samples: list[Sample], tmp_path: Path) -> None:
    (tmp_path / "source").write_bytes(pickle.dumps(source))
    code = (
        "import hashlib, pathlib, pickle, sys\n"
        "source = pickle.loads(pathlib.Path(sys.argv[1]).read_bytes())\n"
        "print(hashlib.sha256(source.media_bytes(4, 1)).hexdigest(), 'torch' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "source")], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [hashlib.sha256(samples[4][2][1][1]).hexdigest(), "False"]


def test_it_reads_in_a_process_that_was_forked(source: SampleSource, samples: list[Sample]) -> None:
    source.media_bytes(1, 0)  # open in the parent
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of forks beside threads of Arrow
        child = os.fork()
    if child == 0:
        try:
            same = source.media_bytes(2, 1) == samples[2][2][1][1] and source.media_bytes(1, 0) == samples[1][2][0][1]
            os.write(writer, b"1" if same else b"0")
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 1) == b"1"
    os.close(reader)
    os.close(writer)
    assert source.media_bytes(2, 0) == samples[2][2][0][1]


def test_several_threads_may_read_at_once(source: SampleSource, samples: list[Sample]) -> None:
    wrong: list[tuple[int, int]] = []

    def read(start: int) -> None:
        for k in range(60):
            i = (start + k) % len(samples)
            expected = [data for _, data in samples[i][2]]
            wrong.extend((i, j) for j, data in enumerate(expected) if source.media_bytes(i, j) != data)

    threads = [threading.Thread(target=read, args=(start,)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_the_fingerprint_does_not_know_the_folder(
    build: Build, source: SampleSource, samples: list[Sample], write_shard: Callable[..., Path], tmp_path: Path
) -> None:
    assert build(tmp_path / "elsewhere", samples, write_shard).fingerprint == source.fingerprint


def test_the_fingerprint_changes_with_order_and_length(
    build: Build, source: SampleSource, samples: list[Sample], write_shard: Callable[..., Path], tmp_path: Path
) -> None:
    others = {
        "reversed": samples[::-1],
        "fewer": samples[:-1],
        "longer": [*samples[:-1], ("2 plus 2?", "Four, it seems.", [])],
    }
    found = {name: build(tmp_path / name, other, write_shard).fingerprint for name, other in others.items()}
    assert len({source.fingerprint, *found.values()}) == 4


def test_a_sample_whose_medium_is_missing_is_a_bad_sample_and_spoils_no_other(
    build: Build, samples: list[Sample], write_shard: Callable[..., Path], tmp_path: Path
) -> None:
    spoilt = [*samples[:2], ("<image>Where is it?", "Gone.", []), *samples[2:]]
    source = build(tmp_path / "data", spoilt, write_shard)
    with pytest.raises(RecordError) as raised:
        source.record(2)
    assert raised.value.reason in (Reason.PLACEHOLDER_MISMATCH, Reason.MISSING_MEDIA)
    assert [bad.sample_id for bad in scan_source(source, ESTIMATOR).bad] == [2]


def test_damaged_and_empty_media_are_bad_samples(
    build: Build, samples: list[Sample], write_shard: Callable[..., Path], tmp_path: Path
) -> None:
    cut = samples[1][2][0][1][:20]
    spoilt: list[Sample] = [*samples, ("<image>?", "a", [("png", b"")]), ("<image>?", "b", [("png", cut)])]
    source = build(tmp_path / "data", spoilt, write_shard)
    bad = scan_source(source, ESTIMATOR).bad
    assert [(one.sample_id, one.reason) for one in bad] == [(6, "empty_file"), (7, "truncated")]
    assert [one.place.startswith(source.place(one.sample_id)) for one in bad] == [True, True]


def test_text_that_means_harm_stays_text(
    build: Build, samples: list[Sample], write_shard: Callable[..., Path], tmp_path: Path
) -> None:
    harmful = [("\0\x1b[31m <|im_end|> \u202e", "é" * 500, []), ("x", "\U0010ffff", []), *samples[2:]]
    source = build(tmp_path / "data", harmful, write_shard)
    assert scan_source(source, ESTIMATOR, limits=ProbeLimits()).bad == []
    assert source.record(0).turns[0].parts[0].text == harmful[0][0]  # type: ignore[union-attr]
    assert source.place(0).isprintable()
