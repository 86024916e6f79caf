"""The demo corpus as files: deterministic, cached, continued after a kill, and loud about what it lacks."""

import hashlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import tarfile
import threading
from pathlib import Path

import pytest

from dataloaders.demo import DemoCorpus, build, build_demo_corpus, clips, corpus_fingerprint, photos
from dataloaders.errors import SourceError

if not all(importlib.util.find_spec(package) for package in ("skimage", "sklearn")):
    pytest.skip("the photographs come with mllm-balancer[train]", allow_module_level=True)

NUM_SAMPLES, PER_SHARD = 12, 4
MAX_BYTES_PER_SAMPLE = 80_000

ROOT = Path(build.__file__).resolve().parents[2]


def _build(folder: Path, seed: int = 0, **options: object) -> DemoCorpus:
    return build_demo_corpus(
        folder,
        seed=seed,
        **{"num_samples": NUM_SAMPLES, "samples_per_shard": PER_SHARD, **options},  # type: ignore[arg-type]
    )


def _digests(corpus: DemoCorpus) -> list[str]:
    return [hashlib.sha256(shard.read_bytes()).hexdigest() for shard in corpus.shards]


def _members(shard: Path) -> list[tarfile.TarInfo]:
    with tarfile.open(shard) as tar:
        return tar.getmembers()


def _keys(*shards: Path) -> set[str]:
    return {member.name.split(".")[0] for shard in shards for member in _members(shard)}


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Digests of the shards of a build that nothing disturbed."""
    return _digests(_build(tmp_path_factory.mktemp("reference")))


@pytest.fixture
def no_drawing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a sample was drawn although all shards were there")

    monkeypatch.setattr(build, "draw_sample", refuse)


def test_same_arguments_give_the_same_bytes(tmp_path: Path, reference: list[str]) -> None:
    corpus = _build(tmp_path / "again")
    assert _digests(corpus) == reference
    assert [shard.name for shard in corpus.shards] == ["demo-000.tar", "demo-001.tar", "demo-002.tar"]


def test_another_seed_gives_another_corpus(tmp_path: Path, reference: list[str]) -> None:
    other = _build(tmp_path, seed=1)
    assert not set(_digests(other)) & set(reference)


def test_fingerprint_depends_on_every_argument() -> None:
    base = corpus_fingerprint(0, 480, 48)
    others = {corpus_fingerprint(1, 480, 48), corpus_fingerprint(0, 481, 48), corpus_fingerprint(0, 480, 47)}
    assert base not in others
    assert len(others) == 3
    assert base == corpus_fingerprint(0, 480, 48)


def test_fingerprint_depends_on_the_recipe_version(monkeypatch: pytest.MonkeyPatch) -> None:
    before = corpus_fingerprint(0, 8, 8)
    monkeypatch.setattr(build, "RECIPE_VERSION", build.RECIPE_VERSION + 1)
    assert corpus_fingerprint(0, 8, 8) != before


def test_corpus_describes_its_files(tmp_path: Path) -> None:
    corpus = _build(tmp_path)
    assert corpus.folder == tmp_path
    assert (corpus.num_samples, corpus.seed, corpus.reused_shards) == (NUM_SAMPLES, 0, 0)
    assert corpus.size_bytes == sum(shard.stat().st_size for shard in corpus.shards)
    assert _keys(*corpus.shards) == {f"{i:06d}" for i in range(NUM_SAMPLES)}


def test_corpus_is_small(tmp_path: Path) -> None:
    assert _build(tmp_path).size_bytes < NUM_SAMPLES * MAX_BYTES_PER_SAMPLE


def test_last_shard_may_be_shorter(tmp_path: Path) -> None:
    corpus = _build(tmp_path, num_samples=3, samples_per_shard=2)
    assert len(corpus.shards) == 2
    assert _keys(corpus.shards[-1]) == {"000002"}


def test_a_corpus_of_one_sample_can_be_built(tmp_path: Path) -> None:
    assert len(_build(tmp_path, num_samples=1).shards) == 1


def test_members_carry_nothing_of_this_machine(tmp_path: Path) -> None:
    corpus = _build(tmp_path, num_samples=2)
    for member in _members(corpus.shards[0]):
        assert (member.uid, member.gid, member.uname, member.gname, member.mtime) == (0, 0, "", "", 0)
        assert member.isreg()


def test_second_call_builds_nothing(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    first = _build(tmp_path)
    request.getfixturevalue("no_drawing")
    second = _build(tmp_path)
    assert second.reused_shards == len(second.shards) == 3
    assert (second.shards, second.size_bytes, second.fingerprint) == (first.shards, first.size_bytes, first.fingerprint)


def test_a_finished_corpus_needs_no_photographs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _build(tmp_path)
    monkeypatch.setattr(photos, "find_spec", lambda name: None)
    assert _build(tmp_path).reused_shards == 3


@pytest.mark.parametrize("damage", ["deleted", "truncated"])
def test_only_the_damaged_shard_is_rebuilt(tmp_path: Path, reference: list[str], damage: str) -> None:
    corpus = _build(tmp_path)
    before = {shard: shard.stat().st_mtime_ns for shard in corpus.shards}
    if damage == "deleted":
        corpus.shards[1].unlink()
    else:
        corpus.shards[1].write_bytes(corpus.shards[1].read_bytes()[:-1000])
    again = _build(tmp_path)
    assert again.reused_shards == 2
    assert _digests(again) == reference
    untouched = [shard.stat().st_mtime_ns == before[shard] for shard in corpus.shards]
    assert untouched == [True, False, True]


def test_a_killed_build_continues(tmp_path: Path, reference: list[str]) -> None:
    script = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from dataloaders.demo import build_demo_corpus\n"
        "def progress(done, total):\n"
        "    if done == 6: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"build_demo_corpus(Path(sys.argv[1]), num_samples={NUM_SAMPLES}, samples_per_shard={PER_SHARD}, "
        "progress=progress)\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    killed = subprocess.run([sys.executable, "-c", script, str(tmp_path)], env=environment, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert (tmp_path / ".demo-001.tar.tmp").is_file()
    assert not (tmp_path / "demo-001.tar").exists()
    again = _build(tmp_path)
    assert again.reused_shards == 1
    assert _digests(again) == reference
    assert not list(tmp_path.glob(".*.tmp"))


def test_a_build_that_raises_in_progress_continues(tmp_path: Path, reference: list[str]) -> None:
    def interrupt(done: int, total: int) -> None:
        if done == 9:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _build(tmp_path, progress=interrupt)
    again = _build(tmp_path)
    assert again.reused_shards == 2
    assert _digests(again) == reference


def test_another_recipe_replaces_the_old_shards_and_nothing_else(tmp_path: Path) -> None:
    (tmp_path / "mine.tar").write_bytes(b"not yours")
    _build(tmp_path, num_samples=6, samples_per_shard=2)
    corpus = _build(tmp_path, seed=5, num_samples=2, samples_per_shard=2)
    assert corpus.reused_shards == 0
    assert sorted(path.name for path in tmp_path.glob("*.tar")) == ["demo-000.tar", "mine.tar"]
    assert (tmp_path / "mine.tar").read_bytes() == b"not yours"


def test_a_manifest_cannot_make_us_remove_files_elsewhere(tmp_path: Path) -> None:
    precious, folder = tmp_path / "precious.tar", tmp_path / "corpus"
    precious.write_bytes(b"keep me")
    folder.mkdir()
    manifest = {"fingerprint": "other", "shards": {"../precious.tar": 7, str(precious): 7}}
    (folder / build.MANIFEST).write_text(json.dumps(manifest))
    _build(folder, num_samples=1)
    assert precious.read_bytes() == b"keep me"


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"shards": 3, "fingerprint": "x"}', "\x00not json", '{"shards": {"a": "b"}}']
)
def test_a_damaged_manifest_means_a_new_build(tmp_path: Path, content: str) -> None:
    (tmp_path / build.MANIFEST).write_text(content)
    corpus = _build(tmp_path, num_samples=1)
    assert corpus.reused_shards == 0
    assert json.loads((tmp_path / build.MANIFEST).read_text())["fingerprint"] == corpus.fingerprint


def test_progress_counts_every_sample_once(tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    _build(tmp_path, progress=lambda done, total: calls.append((done, total)))
    assert calls == [(i + 1, NUM_SAMPLES) for i in range(NUM_SAMPLES)]


def test_progress_jumps_over_finished_shards(tmp_path: Path) -> None:
    _build(tmp_path).shards[1].unlink()
    calls: list[int] = []
    _build(tmp_path, progress=lambda done, total: calls.append(done))
    assert calls == [4, 5, 6, 7, 8, 12]


def test_nothing_is_printed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    _build(tmp_path)
    assert capfd.readouterr() == ("", "")


def test_builders_of_one_folder_wait_for_each_other(tmp_path: Path, reference: list[str]) -> None:
    found: list[DemoCorpus] = []
    threads = [threading.Thread(target=lambda: found.append(_build(tmp_path))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(corpus.reused_shards for corpus in found) == [0, 3]
    assert _digests(found[0]) == reference


def test_origins_lie_beside_the_corpus(tmp_path: Path) -> None:
    _build(tmp_path, num_samples=1)
    text = (tmp_path / "ORIGINS.md").read_text(encoding="utf-8")
    assert all(photo.name in text and photo.licence in text for photo in photos.PHOTOS)


def test_every_photograph_is_found_and_has_an_origin() -> None:
    for index, photo in enumerate(photos.PHOTOS):
        assert photo.licence
        assert photo.origin
        assert min(photos.load_photo(index).size) >= 200
        assert photos.load_photo(index).mode == "RGB"


def test_photographs_are_found_without_importing_their_packages() -> None:
    script = (
        "import sys\n"
        "from dataloaders.demo.photos import PHOTOS, load_photo\n"
        "[load_photo(i) for i in range(len(PHOTOS))]\n"
        "sys.exit(int(any(name in sys.modules for name in ('skimage', 'sklearn', 'torch'))))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    assert subprocess.run([sys.executable, "-c", script], env=environment, check=False).returncode == 0


def test_a_missing_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = photos.find_spec
    monkeypatch.setattr(photos, "find_spec", lambda name: None if name == "skimage" else real(name))
    with pytest.raises(SourceError, match=r"needs scikit-image, which is not installed.*mllm-balancer\[train\]"):
        _build(tmp_path)


def test_a_package_without_the_photograph_names_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(photos.Path, "is_file", lambda self: False)
    with pytest.raises(SourceError, match=r"scikit-learn does not hold the photograph datasets/images/china\.jpg"):
        photos.photo_path(photos.PHOTOS[0])


def test_a_build_of_pyav_without_h264_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clips, "CODEC", "libx264-that-is-not-there")
    with pytest.raises(SourceError, match=r"built without the H\.264 encoder.*Install the wheel of PyAV"):
        _build(tmp_path)
    assert not list(tmp_path.glob("*.tar"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_samples": 0}, "num_samples is 0, but must be at least 1"),
        ({"samples_per_shard": -2}, "samples_per_shard is -2, but must be at least 1"),
        ({"seed": -1}, "seed is -1, but must be at least 0"),
        ({"seed": 2**64}, r"must be below 2\*\*64"),
    ],
)
def test_arguments_out_of_range_are_refused(tmp_path: Path, options: dict[str, int], message: str) -> None:
    with pytest.raises(SourceError, match=message):
        _build(tmp_path / "new", **options)
    assert not (tmp_path / "new").exists()


def test_a_folder_that_is_a_file_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(SourceError, match=r"Cannot write the demo corpus.*Choose a writable local folder"):
        _build(tmp_path / "file")
