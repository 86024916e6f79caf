"""From a file to the samples of all its parts, of any kind; what cannot be opened is named by its part."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from dataloaders.errors import DataError
from dataloaders.jsonl_source import JsonlSource
from dataloaders.mixture_spec import read_mixture
from dataloaders.open_mixture import open_mixture
from dataloaders.rows import RowFields

Make = Callable[..., bytes]


@pytest.fixture
def folder(tmp_path: Path, write_shard: Callable[..., Path], chat_json: Make, image_bytes: Make) -> Path:
    """Two tars, a JSONL file with a picture in a folder of its own, and nothing else."""
    for number in range(2):
        members = [("0.json", chat_json("<image>?", f"Tar {number}.")), ("0.png", image_bytes(56, 56))]
        write_shard(tmp_path / f"tar-{number}.tar", members)
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "p.png").write_bytes(image_bytes(84, 56))
    messages = [{"role": "user", "content": "<image>?"}, {"role": "assistant", "content": "Line."}]
    (tmp_path / "lines.jsonl").write_text(json.dumps({"messages": messages, "images": ["p.png"]}) + "\n")
    return tmp_path


def _write(folder: Path, parts: list[dict[str, object]]) -> Path:
    entries = [{"weight": 1, **part} for part in parts]
    (folder / "mixture.json").write_text(json.dumps({"unit": "samples", "parts": entries}))
    return folder / "mixture.json"


def test_parts_of_different_kinds_are_one_source(folder: Path, image_bytes: Make) -> None:
    file = _write(
        folder,
        [
            {"name": "tars", "data": "tar-{0..1}.tar"},
            {"name": "lines", "data": "lines.jsonl", "media_root": "pictures"},
            {"name": "one", "data": ["tar-0.tar"]},
        ],
    )
    source = open_mixture(read_mixture(file))
    assert {name: len(part) for name, part in source.parts.items()} == {"tars": 2, "lines": 1, "one": 1}
    answers = [source.record(i).turns[-1].parts for i in range(4)]
    assert [parts[0].text for parts in answers] == ["Tar 0.", "Tar 1.", "Line.", "Tar 0."]  # type: ignore[union-attr]
    assert source.media_bytes(2, 0) == image_bytes(84, 56)
    assert source.place(2).startswith("lines: ")


def test_fields_and_schemes_of_a_part_reach_its_source(folder: Path) -> None:
    (folder / "other.jsonl").write_text(json.dumps({"turns": [{"role": "user", "content": "<image>"}], "pic": "p.png"}))
    other = {"name": "other", "data": "other.jsonl", "media_root": "pictures", "media_schemes": ["HTTPS"]}
    fields = {"conversation": "turns", "images": "pic"}
    source = open_mixture(read_mixture(_write(folder, [{**other, "fields": fields}]))).parts["other"]
    assert isinstance(source, JsonlSource)
    assert len(source.record(0).media) == 1
    assert source.options.media_schemes == ("https",)
    assert source.fingerprint == JsonlSource(folder / "other.jsonl", fields=RowFields(**fields)).fingerprint


def test_a_part_that_cannot_be_opened_is_named(folder: Path) -> None:
    good = {"name": "good", "data": "tar-0.tar"}
    for part, text in (
        ({"name": "bad", "data": "none-*.tar"}, "part 'bad': "),
        ({"name": "bad", "data": "tar-0.tar", "media_root": "pictures"}, "part 'bad': .*not for tars"),
        ({"name": "bad", "data": "pipe:cat x.tar"}, "part 'bad': "),
    ):
        with pytest.raises(DataError, match=text):
            open_mixture(read_mixture(_write(folder, [good, part])))
