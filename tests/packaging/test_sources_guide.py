"""The guide to sources names options, defaults, bounds and tests as they are. Its blocks run in test_readme.py."""

import re
from dataclasses import fields
from pathlib import Path

import pytest

import dataloaders
from dataloaders.byte_stream import StreamLimits
from dataloaders.parquet_source import ParquetSource
from dataloaders.record_parser import RecordLimits
from dataloaders.storage import SCHEMES, StorageOptions
from trainer.config import FitConfig

ROOT = Path(__file__).resolve().parents[2]
MIB = 1024**2


@pytest.fixture(scope="module")
def guide() -> str:
    return (ROOT / "docs" / "sources.md").read_text(encoding="utf-8")


def _table(guide: str, heading: str) -> list[list[str]]:
    """Cells of the table whose first heading this is, without headings."""
    rows = guide.partition(f"\n| {heading} |")[2].partition("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]


def _told(value: object) -> str:
    """A default as the guide writes it."""
    if value is None:
        return "none"
    if isinstance(value, int) and value >= MIB:
        return f"{value // 1024 // MIB} GiB" if value >= 1024 * MIB else f"{value // MIB} MiB"
    return f"{value:g}" if isinstance(value, float) else str(value)


def test_the_defaults_of_storage_are_those_of_the_table(guide: str) -> None:
    said: dict[str, str] = {}
    for names, values, _ in _table(guide, "`StorageOptions`"):
        listed = re.findall(r"`(\w+)`", names)
        said |= dict(zip(listed, values.split(", ") if len(listed) > 1 else [values], strict=True))
    assert said.pop("schemes").replace("http(s)", "http, https").split(", ") == list(SCHEMES)
    options = StorageOptions()
    assert said == {
        field.name: _told(getattr(options, field.name)) for field in fields(options) if field.name != "schemes"
    }


def test_the_bounds_in_the_table_of_refusals_are_the_defaults(guide: str) -> None:
    refused = {row[0]: row[1] for row in _table(guide, "refused")}
    records, streams = RecordLimits(), StreamLimits()
    assert f"JSON above {records.max_bytes // MIB} MiB or {records.max_depth} levels" in refused
    stream = next(text for text in refused if text.startswith("streams"))
    for bound in (
        f"members above {streams.max_member_bytes // MIB} MiB",
        f"samples above {streams.max_sample_bytes // 1024 // MIB} GiB",
        f"shards above {streams.max_shard_bytes // MIB // MIB} TiB",
        f"more than {streams.max_expansion} bytes out of one in",
    ):
        assert bound in stream
    defaults = ParquetSource.__init__.__kwdefaults__
    assert (defaults["max_group_bytes"], defaults["cache_bytes"]) == (1024 * MIB, 256 * MIB)


def test_options_of_training_exist_and_their_defaults_are_those_told(guide: str) -> None:
    names = {field.name for field in fields(FitConfig)}
    named = {name.replace("-", "_") for name in re.findall(r"`--([a-z-]+)", guide)}
    assert named <= names
    assert {"shuffle", "media_root", "sample_timeout_s", "max_replaced_consecutive", "video_decoder"} <= named
    config = FitConfig()
    for text in (
        f"`--shuffle-block-shards` ({config.shuffle_block_shards})",
        f"`--max-replaced {config.max_replaced}`",
        f"`--sample-timeout-s {config.sample_timeout_s:g}`",
        f"`--bad-records {config.bad_records}`",
        f"`--unfit {config.unfit}`",
    ):
        assert text in guide


def test_every_source_and_every_file_that_is_named_exists(guide: str) -> None:
    for name in re.findall(r"`(\w+(?:Source|Stream|Options|Limits|Fields|Concat|Sample))[`(]", guide):
        assert hasattr(dataloaders, name), name
    for path in re.findall(r"`(tests/[\w/.]+)`", guide):
        assert (ROOT / path).exists(), path
    for target in re.findall(r"\]\(([\w.]+\.md)\)", guide):
        assert (ROOT / "docs" / target).exists(), target
