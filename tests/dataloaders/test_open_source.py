"""One call opens what lies there by its names, and says what to do about everything else."""

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dataloaders.errors import DataError, RecordError, SourceError
from dataloaders.hf_source import HFDatasetSource
from dataloaders.jsonl_source import JsonlSource
from dataloaders.open_source import open_source
from dataloaders.parquet_source import ParquetSource
from dataloaders.probe.limits import ProbeLimits
from dataloaders.record_parser import RecordLimits
from dataloaders.rows import RowFields
from dataloaders.storage import Storage, StorageOptions
from dataloaders.tar_source import TarSource

ROW = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture
def folder(tmp_path: Path, write_shard: Callable[..., Path]) -> Path:
    """Folders of one kind each, named after it."""
    for kind in ("tars", "lines", "array", "parquet", "mixed"):
        (tmp_path / kind).mkdir()
    for number in range(2):
        write_shard(tmp_path / "tars" / f"{number}.tar", [("a.json", json.dumps(ROW).encode())])
        (tmp_path / "lines" / f"{number}.jsonl").write_text(json.dumps(ROW))
        (tmp_path / "array" / f"{number}.json").write_text(json.dumps([ROW]))
        pq.write_table(pa.table({"text": ["a"]}), tmp_path / "parquet" / f"{number}.parquet")
    (tmp_path / "lines" / "README.md").write_text("#")
    (tmp_path / "lines" / "images").mkdir()
    write_shard(tmp_path / "mixed" / "0.tar", [("a.json", b"{}")])
    (tmp_path / "mixed" / "0.jsonl").write_text(json.dumps(ROW))
    return tmp_path


KINDS = [("tars", "tar", TarSource), ("lines", "jsonl", JsonlSource), ("array", "json", JsonlSource)]
KINDS += [("parquet", "parquet", ParquetSource)]


@pytest.mark.parametrize(("name", "extension", "kind"), KINDS)
def test_files_wildcards_braces_and_folders(folder: Path, name: str, extension: str, kind: type) -> None:
    specs = [
        str(folder / name),
        folder / name,
        str(folder / name / f"*.{extension}"),
        str(folder / name / f"{{0..1}}.{extension}"),
        [folder / name / f"0.{extension}", str(folder / name / f"1.{extension}")],
        f"file:{folder / name}",
    ]
    found = [open_source(spec) for spec in specs]
    assert {type(source) for source in found} == {kind}
    assert {len(source) for source in found} == {2}
    assert len({source.fingerprint for source in found}) == 1


def test_a_saved_data_set(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    datasets.disable_progress_bars()
    datasets.Dataset.from_dict({"text": ["a"]}).save_to_disk(tmp_path / "saved")
    assert isinstance(open_source(tmp_path / "saved"), HFDatasetSource)


def test_options_reach_the_source(folder: Path) -> None:
    source = open_source(
        folder / "lines",
        limits=RecordLimits(max_bytes=5),
        media_root=folder,
        media_schemes=("HTTPS",),
        storage=Storage(StorageOptions(schemes=("file",))),
        fields=RowFields(conversation="messages"),
    )
    assert isinstance(source, JsonlSource)
    assert (source.record_limits.max_bytes, source.options.media_root) == (5, folder)
    assert source.options.media_schemes == ("https",)
    assert source.storage.options.schemes == ("file",)
    with pytest.raises(SourceError, match="options that are not for tars: media_root, follow_links at "):
        open_source(folder / "tars", media_root=folder, follow_links=True)
    with pytest.raises(SourceError, match="options that are not for JSON: columns, cache_bytes at "):
        open_source(folder / "lines", columns=["a"], cache_bytes=1)
    with pytest.raises(SourceError, match="no record has the field 'turns'"):
        open_source(folder / "lines", fields=RowFields(conversation="turns"))


def test_what_an_error_of_a_source_proposes_can_be_given(tmp_path: Path) -> None:
    pq.write_table(
        pa.table({"text": ["a" * 500] * 9, "source": ["web"] * 9, "image": [b"x" * 90] * 9}), tmp_path / "a.pq"
    )
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "1.jpg").write_bytes(b"12345")
    (tmp_path / "media").mkdir()
    (tmp_path / "media" / "1.jpg").symlink_to(tmp_path / "elsewhere" / "1.jpg")
    (tmp_path / "a.jsonl").write_text('{"text": "<image>", "image": "1.jpg"}')
    with pytest.raises(SourceError, match="max_group_bytes"):
        open_source(tmp_path / "a.pq", max_group_bytes=100)
    parquet = open_source(tmp_path / "a.pq", columns=["source"], cache_bytes=10, max_group_bytes=10**6)
    assert parquet.record(0).extra == {"source": "web"}
    with pytest.raises(RecordError, match="follow_links=True"):
        open_source(tmp_path / "a.jsonl", media_root=tmp_path / "media").record(0)
    small = ProbeLimits(max_bytes=4)
    lines = open_source(tmp_path / "a.jsonl", media_root=tmp_path / "media", follow_links=True, media_limits=small)
    with pytest.raises(DataError, match="5 encoded bytes exceed max_bytes=4"):
        lines.media_bytes(0, 0)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("mixed", r"the folder holds files of several kinds: 1 of .* Name the files"),
        ("mixed/*", "files of several kinds: "),
        (".", "the folder holds no file of data"),
        ("lines/README.md", r"README.md' is no known source. Sources are \*.tar"),
        ("gone.jsonl", "1 of 1 files are missing"),
        ("gone", "is no known source"),
        ("a.tar.gz", "Unpack it"),
        ("a.jsonl.gz", "Unpack it"),
        ("a.csv", "Write it as JSON lines or Parquet"),
        ("a.arrow", "save_to_disk"),
    ],
)
def test_anything_else_is_an_error_with_a_way_out(folder: Path, spec: str, words: str) -> None:
    with pytest.raises(SourceError, match=words):
        open_source(str(folder / spec) if spec != "." else folder)


@pytest.mark.parametrize("name", ["HuggingFaceM4/the_cauldron", "liuhaotian/LLaVA-Instruct-150K"])
def test_names_of_the_hub_are_no_data(name: str) -> None:
    with pytest.raises(SourceError, match=r"data must be local.*datasets\.load_dataset.*HFDatasetSource"):
        open_source(name)


@pytest.mark.parametrize("spec", ["pipe:curl http://x/a.tar", "ftp://host/a.tar"])
def test_commands_and_unknown_schemes_are_refused(spec: str) -> None:
    with pytest.raises(SourceError):
        open_source(spec)


def test_no_name_is_an_error() -> None:
    with pytest.raises(SourceError, match="no file is named"):
        open_source([])
