"""The benchmark of probing and indexing runs, measures what it says, and its token rules agree with the oracle."""

import json
import tarfile
from pathlib import Path

import pytest

pytest.importorskip("skimage", reason="the photographs of the corpus")
pytest.importorskip("sklearn", reason="the photographs of the corpus")

from tools.benchmarks.agreement import CONFIGURATIONS, NOTES, agreement_rows
from tools.benchmarks.measuring import cpu_with_children_s
from tools.benchmarks.media import main
from tools.benchmarks.media_corpus import write_clips, write_images
from tools.benchmarks.media_methods import header_methods, members


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # webdataset leaves shards open
def test_every_method_understands_every_medium(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--output", str(tmp_path), "--quick"]) == 0
    content = json.loads((tmp_path / "media.json").read_text())
    sections = {row["section"] for row in content["rows"]}
    assert sections == {"images", "mp4", "mkv", "index"}
    for row in content["rows"]:
        assert row["num_understood"] == row["num_media"] > 0, row
        assert row["median_us"] > 0, row
    for row in content["sizes"]:
        assert row["num_samples"] >= 2_000
        assert 10 * row["num_samples"] < row["size_bytes"] < 500 * row["num_samples"]
    assert (tmp_path / "media.md").read_text() == capsys.readouterr().out
    assert "python" in content["environment"]


def test_the_corpus_is_a_function_of_its_seed(tmp_path: Path) -> None:
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
        write_images(folder, 3)
        write_clips(folder, 5)
    names = sorted(path.name for path in folders[0].iterdir())
    assert names == ["clips-000.tar", "images-000.tar"]
    for name in names:
        tables = []
        for folder in folders:
            with tarfile.open(folder / name) as tar:
                tables.append([(member.name, member.size) for member in tar])
        assert tables[0] == tables[1]
    found = members([folders[0] / "clips-000.tar"], (".mkv",))
    assert len(found) == 1
    assert all(method() == 1 for method in header_methods(found, "mkv").values())


def test_the_clock_runs_while_this_process_works() -> None:
    start = cpu_with_children_s()
    assert sum(i * i for i in range(300_000)) > 0
    assert cpu_with_children_s() > start


def test_token_rules_agree_with_the_oracle_but_for_what_is_noted(shared_dir: Path) -> None:
    found = agreement_rows(shared_dir / "data")
    assert {row.family for row in found} == set(CONFIGURATIONS)
    for row in found:
        assert row.rows == row.equal + row.refused + row.texts + row.differ
        assert row.note != "unexplained", row
        assert bool(row.note) is (row.texts + row.differ > 0), row
    assert {row.family for row in found if row.note} == set(NOTES)
