"""Building by shards: the same index in every way to get there, nothing read twice, nothing lost when it goes wrong."""

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dataloaders import index_build, member_cache, shard_scan
from dataloaders.build_progress import BuildProgress
from dataloaders.counts import ItemCounts
from dataloaders.encoder import ByteEncoder, TextCounts
from dataloaders.errors import DataError, IndexFormatError, SourceError
from dataloaders.estimators import Qwen25VLConfig, Qwen25VLEstimator, estimator_from_config
from dataloaders.index import CostIndex
from dataloaders.index_build import Part, build_shards
from dataloaders.index_merge import merge_parts
from dataloaders.record import Record
from dataloaders.scan import build_index, scan_source
from dataloaders.scan_rows import ScanOptions
from dataloaders.shard_scan import shard_notes
from dataloaders.tar_source import TarSource

ESTIMATOR = Qwen25VLEstimator()
Make = Callable[..., bytes]


@pytest.fixture(scope="module")
def made(
    tmp_path_factory: pytest.TempPathFactory, write_shard: Callable[..., Path], chat_json: Make, image_bytes: Make
) -> Path:
    """Five shards of 3 to 7 samples; in each but the first, one picture is none and one member has no extension."""
    folder = tmp_path_factory.mktemp("made")
    for number in range(5):
        members: list[tuple[str, bytes]] = [("README", b"x")] if number else []
        for n in range(3 + number):
            picture = b"junk" if number and n == 1 else image_bytes(60 + 20 * n + number, 50, seed=n)
            members += [(f"{n}.json", chat_json("<image>?", "Yes." * n)), (f"{n}.png", picture)]
        write_shard(folder / f"s{number}.tar", members)
    return folder


@pytest.fixture
def shards(made: Path, tmp_path: Path) -> Path:
    """A copy of the shards that a test may change."""
    return Path(shutil.copytree(made, tmp_path / "shards"))


class Scanned:
    """The names of the shards that were really scanned."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        original = shard_scan.TarSource

        def opened(urls: list[str], **options: object) -> TarSource:
            self.names += [Path(url).name for url in urls]
            return original(urls, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(shard_scan, "TarSource", opened)

    def take(self) -> list[str]:
        taken, self.names = self.names, []
        return taken


def _touch(path: Path) -> None:
    """Give the file another modification time, whatever the clock's resolution."""
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 1_000_000))


def _same(one: CostIndex, other: CostIndex) -> None:
    assert one.fingerprint == other.fingerprint
    assert one.key == other.key
    assert one.names.to_pydict() == other.names.to_pydict()
    assert one.bad == other.bad
    for name, column in [*one.samples.items(), *one.items.items()]:
        found = other.samples[name] if name in other.samples and len(column) == len(other) else other.items[name]
        assert np.array_equal(column, found), name


@pytest.mark.parametrize("workers", [1, 2])
def test_a_built_index_is_the_one_that_is_scanned_in_memory(shards: Path, tmp_path: Path, workers: int) -> None:
    built = build_shards(str(shards / "*.tar"), ESTIMATOR, tmp_path / "index", workers=workers)
    _same(scan_source(TarSource(str(shards / "*.tar")), ESTIMATOR), built)
    assert [shard.num_samples for shard in built.shards] == [3, 4, 5, 6, 7]
    assert [bad.sample_id for bad in built.bad] == [4, 8, 13, 19]
    assert sorted(os.listdir(tmp_path)) == ["index", "shards"]


def test_the_files_are_the_same_however_many_processes_wrote_them(shards: Path, tmp_path: Path) -> None:
    for name, workers in (("one", 1), ("two", 3)):
        build_shards(str(shards / "*.tar"), ESTIMATOR, tmp_path / name, workers=workers)
    names = sorted(os.listdir(tmp_path / "one"))
    assert len(names) == 7
    assert all((tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes() for name in names)


def test_what_the_header_pass_noticed_is_kept(shards: Path, tmp_path: Path) -> None:
    index = build_shards(str(shards / "*.tar"), ESTIMATOR, tmp_path / "index")
    assert shard_notes(CostIndex.open(index.folder or "").shards) == ["ignored members: 4 x no extension"]
    assert shard_notes(index.shards) == TarSource(str(shards / "*.tar")).report.lines()


def test_nothing_is_scanned_when_nothing_changed(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, scanned = build_shards(str(shards / "*.tar"), ESTIMATOR, tmp_path / "index"), Scanned(monkeypatch)
    seen: list[BuildProgress] = []
    again = build_shards(str(shards / "*.tar"), ESTIMATOR, tmp_path / "index", progress=seen.append)
    _same(first, again)
    assert scanned.take() == []
    assert [(state.shards, state.reused, state.samples) for state in seen] == [(5, 5, 25)]


@pytest.mark.parametrize("change", ["added", "removed", "edited", "edited at the same size", "touched", "reordered"])
def test_only_what_changed_is_scanned_again(
    change: str,
    shards: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    write_shard: Callable[..., Path],
) -> None:
    urls = [str(shards / f"s{number}.tar") for number in range(5)]
    other = [("0.txt", b"a caption")]
    before = build_shards(urls, ESTIMATOR, tmp_path / "index")
    expected: list[str] = []
    if change == "added":
        urls.insert(2, str(write_shard(shards / "new.tar", other)))
        expected = ["new.tar"]
    elif change == "removed":
        del urls[1]
    elif change == "reordered":
        urls.reverse()
    elif change == "edited":
        write_shard(Path(urls[3]), other)
        expected = ["s3.tar"]
    else:
        content = Path(urls[3]).read_bytes()
        if change != "touched":
            edited = content.replace(b"<image>?", b"image???", 1)
            assert len(edited) == len(content) != edited
            Path(urls[3]).write_bytes(edited)
        _touch(Path(urls[3]))
        expected = ["s3.tar"]
    scanned = Scanned(monkeypatch)
    after = build_shards(urls, ESTIMATOR, tmp_path / "index", replace=change == "removed")
    assert scanned.take() == expected
    assert (after.fingerprint == before.fingerprint) == (change == "touched")
    _same(scan_source(TarSource(urls), ESTIMATOR), after)
    assert [Path(shard.path).name for shard in after.shards] == [Path(url).name for url in urls]
    assert {after.shard(i) for i in range(len(after))} - {""} == set(urls)


def test_an_edit_of_the_same_size_is_seen_by_the_cached_index_too(shards: Path, tmp_path: Path) -> None:
    urls = str(shards / "*.tar")
    before = build_index(TarSource(urls), ESTIMATOR, tmp_path / "index")
    path = shards / "s0.tar"
    path.write_bytes(path.read_bytes().replace(b"<image>?", b"image???"))
    _touch(path)
    after = build_index(TarSource(urls), ESTIMATOR, tmp_path / "index")
    assert after.key == before.key
    assert [bad.sample_id for bad in after.bad] == [0, 1, 2, *(bad.sample_id for bad in before.bad)]


def test_a_shard_that_cannot_be_read_does_not_stop_the_others_and_they_are_kept(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = (shards / "s1.tar").read_bytes()
    (shards / "s1.tar").write_bytes(good[:2000])
    with pytest.raises(SourceError, match=r"cut at .*s1.tar"):
        build_shards(str(shards / "*.tar"), ESTIMATOR, tmp_path / "index")
    assert not (tmp_path / "index").exists()
    (shards / "s1.tar").write_bytes(good)
    scanned = Scanned(monkeypatch)
    _same(
        scan_source(TarSource(str(shards / "*.tar")), ESTIMATOR),
        build_shards(str(shards / "*.tar"), ESTIMATOR, tmp_path / "index"),
    )
    assert scanned.take() == ["s1.tar"]


@pytest.mark.parametrize("workers", [1, 2])
def test_all_shards_that_cannot_be_read_are_listed(shards: Path, tmp_path: Path, workers: int) -> None:
    for number in (1, 3):
        (shards / f"s{number}.tar").write_bytes(b"")
    with pytest.raises(SourceError, match=r"(?s)2 of 5 shards cannot be scanned:.*s1.tar.*0 bytes.*s3.tar.*are kept"):
        build_shards(str(shards / "*.tar"), ESTIMATOR, tmp_path / "index", workers=workers)


@pytest.mark.parametrize("workers", [1, 2])
def test_a_fault_of_an_estimator_is_an_error_with_its_place(shards: Path, tmp_path: Path, workers: int) -> None:
    broken = Qwen25VLEstimator()
    broken.image_cells = None  # type: ignore[assignment]
    with pytest.raises(
        DataError, match=r"(?s)the scan failed with AttributeError.*s0.tar, key 0.*fault of the estimator"
    ):
        build_shards(str(shards / "*.tar"), broken, tmp_path / "index", workers=workers)


def test_an_estimator_that_cannot_travel_is_refused_before_a_process_starts(shards: Path, tmp_path: Path) -> None:
    local = Qwen25VLEstimator()
    local.told = lambda: None  # type: ignore[attr-defined]
    with pytest.raises(DataError, match="does not travel to other processes"):
        build_shards(str(shards / "*.tar"), local, tmp_path / "index", workers=2)
    assert len(build_shards(str(shards / "*.tar"), local, tmp_path / "index", workers=1)) == 25


def test_an_index_of_other_options_is_replaced_only_when_asked(shards: Path, tmp_path: Path) -> None:
    urls, other = str(shards / "*.tar"), Qwen25VLEstimator(Qwen25VLConfig(max_pixels=99 * 784))
    build_shards(urls, ESTIMATOR, tmp_path / "index")
    with pytest.raises(IndexFormatError, match=r"made from something else: estimator is .*another folder.*--replace"):
        build_shards(urls, other, tmp_path / "index")
    options = ScanOptions(encoder=ByteEncoder(train_on="all"))
    with pytest.raises(IndexFormatError, match="train_on is assistant, expected all"):
        build_shards(urls, ESTIMATOR, tmp_path / "index", options)
    _same(scan_source(TarSource(urls), other), build_shards(urls, other, tmp_path / "index", replace=True))


def test_a_folder_with_something_else_is_refused_before_anything_is_scanned(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scanned = Scanned(monkeypatch)
    with pytest.raises(IndexFormatError, match="holds something else"):
        build_shards(str(shards / "*.tar"), ESTIMATOR, shards, replace=True)
    assert scanned.take() == []
    assert len(os.listdir(shards)) == 5


def test_an_index_is_built_by_one_process_at_a_time(shards: Path, tmp_path: Path) -> None:
    said: list[str] = []

    def again(state: BuildProgress) -> None:
        if state.shards == 2:
            with pytest.raises(IndexFormatError, match="another process is building this index") as caught:
                build_shards(str(shards / "*.tar"), ESTIMATOR, tmp_path / "index")
            said.append(str(caught.value))

    build_shards(str(shards / "*.tar"), ESTIMATOR, tmp_path / "index", progress=again)
    assert len(said) == 1


def test_the_cached_index_waits_for_another_process(shards: Path, tmp_path: Path) -> None:
    source, done = TarSource(str(shards / "*.tar")), []
    threads: list[threading.Thread] = []

    def again(state: BuildProgress) -> None:
        if state.shards == 2 and not threads:
            target = lambda: done.append(build_index(source, ESTIMATOR, tmp_path / "index"))  # noqa: E731
            threads.append(threading.Thread(target=target))
            threads[0].start()
            threads[0].join(0.2)
            assert not done

    built = build_shards(source.shards, ESTIMATOR, tmp_path / "index", progress=again)
    threads[0].join(30)
    assert [index.fingerprint for index in done] == [built.fingerprint]
    assert sorted(os.listdir(tmp_path)) == ["index", "shards"]


def test_a_shard_under_two_names_is_refused(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(shards)
    with pytest.raises(SourceError, match=r"shards listed twice: .*s1.tar"):
        build_shards(["s1.tar", "./s1.tar"], ESTIMATOR, tmp_path / "index")


@pytest.mark.parametrize("workers", [1, 2])
def test_progress_adds_up(shards: Path, tmp_path: Path, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_build, "num_cpus", lambda: 2)
    seen: list[tuple[int, int, int]] = []
    build_shards(
        str(shards / "*.tar"),
        ESTIMATOR,
        tmp_path / "index",
        workers=workers,
        progress=lambda state: seen.append((state.shards, state.samples, state.bytes)),
    )
    total = sum(path.stat().st_size for path in shards.iterdir())
    assert seen[-1] == (5, 25, total)
    assert seen == sorted(seen)


@pytest.mark.parametrize("text", ["", "1", "a/b", "3/2", "2/2", "-1/2", "1/0", "0/0", "1/2/3"])
def test_a_part_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(DataError, match=r"part .*Write i/n"):
        Part.parse(text)


def test_parts_are_counted_from_zero() -> None:
    assert [Part.parse(text) for text in ("0/3", "2/3", " 0/1 ")] == [
        Part(number=0, count=3),
        Part(number=2, count=3),
        Part(number=0, count=1),
    ]


@pytest.mark.parametrize("part", [None, Part(number=0, count=1)])
def test_shards_never_leave_an_index_silently(shards: Path, tmp_path: Path, part: Part | None) -> None:
    urls = [str(shards / f"s{number}.tar") for number in range(5)]
    before = build_shards(urls, ESTIMATOR, tmp_path / "index", part=part)
    message = (
        r"4 of the 5 shards in this index are not among .*: .*s0.tar, .*s3.tar at .*index. Name them too.*--replace"
    )
    with pytest.raises(IndexFormatError, match=message):
        build_shards(urls[4:], ESTIMATOR, tmp_path / "index", part=part)
    _same(before, CostIndex.open(tmp_path / "index"))
    assert len(build_shards(urls[4:], ESTIMATOR, tmp_path / "index", part=part, replace=True)) == 7
    # A cache follows its source.
    assert len(build_index(TarSource(urls[:1]), ESTIMATOR, tmp_path / "index")) == 3


def test_many_shards_that_would_leave_are_counted_not_listed(shards: Path, tmp_path: Path) -> None:
    for number in range(5, 9):
        shutil.copy(shards / "s0.tar", shards / f"s{number}.tar")
    build_shards(str(shards / "*.tar"), ESTIMATOR, tmp_path / "index")
    with pytest.raises(IndexFormatError, match=r"8 of the 9 shards .*s5.tar and 3 more at") as caught:
        build_shards(str(shards / "s0.tar"), ESTIMATOR, tmp_path / "index")
    assert "s6.tar" not in str(caught.value)


def test_a_part_is_not_made_another_part_silently(shards: Path, tmp_path: Path) -> None:
    urls = str(shards / "*.tar")
    part = build_shards(urls, ESTIMATOR, tmp_path / "index", part=Part(number=0, count=2))
    with pytest.raises(IndexFormatError, match=r"part 0/2, and would become part 1/2 at .*index. Choose another"):
        build_shards(urls, ESTIMATOR, tmp_path / "index", part=Part(number=1, count=2))
    with pytest.raises(
        IndexFormatError, match=r"this is part 0/2, and would become an index of all shards at .*replace"
    ):
        build_shards(urls, ESTIMATOR, tmp_path / "index")
    _same(part, CostIndex.open(tmp_path / "index"))
    assert build_shards(urls, ESTIMATOR, tmp_path / "index", replace=True).part is None


def test_under_error_it_is_said_where_finished_shards_are_kept(
    tmp_path: Path, write_shard: Callable[..., Path], chat_json: Make, image_bytes: Make
) -> None:
    shard = write_shard(tmp_path / "s.tar", [("0.json", chat_json("<image>?", "x")), ("0.png", image_bytes(2100, 4))])
    with pytest.raises(DataError, match=r"Finished shards are kept in .*ix.building"):
        build_shards(str(shard), ESTIMATOR, tmp_path / "ix", ScanOptions(unfit="error"))
    assert (tmp_path / "ix.building").is_dir()


def test_another_model_is_told_in_words(shards: Path, tmp_path: Path) -> None:
    urls = str(shards / "s0.tar")
    build_shards(urls, ESTIMATOR, tmp_path / "index")
    other = estimator_from_config({"model_type": "qwen3_vl"})
    with pytest.raises(
        IndexFormatError, match=r"estimator is \w+, .* \(media counted by 'Qwen2.5-VL.*, not by 'Qwen3-VL"
    ):
        build_shards(urls, other, tmp_path / "index")


def test_a_path_where_an_object_is_needed_is_told_so(shards: Path, tmp_path: Path) -> None:
    path: Any = str(shards / "s0.tar")
    for build in (build_index, lambda source, rule, _: scan_source(source, rule)):
        with pytest.raises(DataError, match=r"s0.tar' is a str where a source of samples is needed. Open .*TarSource"):
            build(path, ESTIMATOR, tmp_path / "index")
        for model in ("models/x", tmp_path, {"model_type": "qwen2_5_vl"}):
            with pytest.raises(DataError, match=r"where an estimator is needed. Make one with .*estimator_from_config"):
                build(TarSource(path), model, tmp_path / "index")  # type: ignore[operator]
    with pytest.raises(DataError, match="where an estimator is needed"):
        build_shards(path, "models/x", tmp_path / "index")  # type: ignore[arg-type]


def test_a_folder_that_cannot_be_written_is_named_before_anything_is_scanned(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("x")
    scanned = Scanned(monkeypatch)
    with pytest.raises(
        IndexFormatError, match=r"nothing can be written here: .* at .*file/index. Choose another folder"
    ):
        build_shards(str(shards / "*.tar"), ESTIMATOR, tmp_path / "file" / "index")
    assert scanned.take() == []


def test_the_home_folder_is_expanded(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(shards)
    assert build_shards("~/shards/s0.tar", ESTIMATOR, "~/one").folder == tmp_path / "one"
    assert build_index(TarSource("~/shards/s0.tar"), ESTIMATOR, "~/two").folder == tmp_path / "two"
    build_shards("~/shards/s0.tar", ESTIMATOR, "~/part", part=Part(number=0, count=1))
    assert merge_parts(["~/part"], "~/three").folder == tmp_path / "three"
    assert len(os.listdir(shards)) == 5


_BUILD = """
from dataloaders.index_build import build_shards
build_shards(sys.argv[1], Qwen25VLEstimator(), sys.argv[2], workers=2, progress=act)
"""


@pytest.mark.parametrize("signal_name", ["SIGKILL", "SIGINT", "worker"])
def test_a_build_that_is_ended_leaves_no_process_and_goes_on_where_it_was(
    signal_name: str, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end_build: Callable[..., None]
) -> None:
    urls, folder = str(shards / "*.tar"), tmp_path / "index"
    end_build(_BUILD, urls, folder, signal_name)
    scanned = Scanned(monkeypatch)
    _same(scan_source(TarSource(urls), ESTIMATOR), build_shards(urls, ESTIMATOR, folder))
    assert len(scanned.take()) <= 3  # two shards were finished
    assert sorted(os.listdir(tmp_path)) == ["index", "shards"]


def test_units_of_other_options_are_not_taken(shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = (shards / "s4.tar").read_bytes()
    (shards / "s4.tar").write_bytes(b"")
    with pytest.raises(SourceError, match="0 bytes"):
        build_shards(str(shards / "*.tar"), ESTIMATOR, tmp_path / "index")
    (shards / "s4.tar").write_bytes(good)
    scanned = Scanned(monkeypatch)
    clamped = build_shards(str(shards / "*.tar"), ESTIMATOR, tmp_path / "index", ScanOptions(unfit="clamp"))
    assert len(scanned.take()) == 5
    assert replace(clamped.key, unfit="skip") == scan_source(TarSource(str(shards / "*.tar")), ESTIMATOR).key


def test_what_a_killed_build_was_writing_is_swept_by_the_next_one(shards: Path, tmp_path: Path) -> None:
    killed = "import os, sys\nfrom dataloaders import index\nindex._write_files = lambda *_: os.kill(os.getpid(), 9)\n"
    killed += (
        "from dataloaders.estimators import Qwen25VLEstimator as E\nfrom dataloaders.index_build import build_shards\n"
    )
    killed += "build_shards(sys.argv[1], E(), sys.argv[2])"
    argv = [sys.executable, "-c", killed, str(shards / "*.tar"), str(tmp_path / "index")]
    assert subprocess.run(argv, timeout=60, check=False).returncode == -9
    assert sorted(os.listdir(tmp_path)) == ["index.building", "shards"]
    build_shards(str(shards / "*.tar"), ESTIMATOR, tmp_path / "index")
    assert sorted(os.listdir(tmp_path)) == ["index", "shards"]


def test_the_whole_index_is_written_inside_the_folder_of_the_build(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(folder: Path, index: CostIndex, *, scratch: Path | None = None) -> CostIndex:
        assert scratch == tmp_path / "index.building"
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(index_build, "write_index", full)
    with pytest.raises(OSError, match="No space left"):
        build_shards(str(shards / "*.tar"), ESTIMATOR, tmp_path / "index")


def test_the_folder_of_a_build_may_vanish_before_it_is_locked(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, tries = Path.open, []

    def opened(path: Path, *args: object, **options: object) -> object:
        if path.name == "lock" and not tries:
            tries.append(path)
            shutil.rmtree(path.parent)  # as a build that ends just now does
        return real(path, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "open", opened)
    assert len(build_shards(str(shards / "*.tar"), ESTIMATOR, tmp_path / "index")) == 25
    assert tries


def test_replacing_never_deletes_a_folder_that_is_no_index(shards: Path, tmp_path: Path) -> None:
    (tmp_path / "step_000100").mkdir()
    (tmp_path / "step_000100" / "meta.json").write_text("{}")
    (tmp_path / "step_000100" / "weights").write_text("x")
    with pytest.raises(IndexFormatError, match="holds something else"):
        build_shards(str(shards / "*.tar"), ESTIMATOR, tmp_path / "step_000100", replace=True)
    assert len(os.listdir(tmp_path / "step_000100")) == 2


def test_a_damaged_report_of_a_shard_is_an_index_error(shards: Path, tmp_path: Path) -> None:
    index = build_shards(str(shards / "*.tar"), ESTIMATOR, tmp_path / "index")
    for report in ('{"num_samples": "x"}', '{"no": 1}', "[", "[1]"):
        with pytest.raises(IndexFormatError, match="damaged: the report on"):
            shard_notes([replace(index.shards[0], report=report)])


@pytest.mark.parametrize("workers", [1, 2])
def test_members_that_a_build_passed_over_are_found_when_the_shards_are_opened(
    workers: int, shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    urls, members = str(shards / "*.tar"), tmp_path / "members"
    index = build_shards(urls, ESTIMATOR, tmp_path / "index", workers=workers, members=members)
    assert sorted(os.listdir(tmp_path)) == ["index", "members", "shards"]
    monkeypatch.setattr(member_cache, "pass_over", pytest.fail)
    source = TarSource(urls, members=members)
    assert source.fingerprint == index.key.source
    # A build of other options reads no header either, and one more shard is the only one that is passed over.
    build_shards(urls, ESTIMATOR, tmp_path / "clamped", ScanOptions(unfit="clamp"), members=members)
    monkeypatch.undo()
    shutil.copy(shards / "s0.tar", shards / "s9.tar")
    scanned = Scanned(monkeypatch)
    build_shards(urls, ESTIMATOR, tmp_path / "index", members=members)
    assert scanned.take() == ["s9.tar"]
    monkeypatch.setattr(member_cache, "pass_over", pytest.fail)
    assert len(TarSource(urls, members=members)) == 28


def test_members_of_finished_shards_outlive_a_build_that_failed(
    shards: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    urls, members, good = str(shards / "*.tar"), tmp_path / "members", (shards / "s4.tar").read_bytes()
    (shards / "s4.tar").write_bytes(b"")
    with pytest.raises(SourceError, match="0 bytes"):
        build_shards(urls, ESTIMATOR, tmp_path / "index", members=members)
    assert not members.exists()
    (shards / "s4.tar").write_bytes(good)
    scanned = Scanned(monkeypatch)
    build_shards(urls, ESTIMATOR, tmp_path / "index", members=members)
    assert scanned.take() == ["s4.tar"]
    monkeypatch.setattr(member_cache, "pass_over", pytest.fail)
    assert len(TarSource(urls, members=members)) == 25


def test_members_that_cannot_be_kept_are_a_warning_and_the_index_is_complete(
    shards: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("x")
    index = build_shards(str(shards / "*.tar"), ESTIMATOR, tmp_path / "index", members=tmp_path / "file" / "members")
    assert len(index) == 25
    assert "the table of members cannot be kept here" in caplog.text


class Negative(Qwen25VLEstimator):
    """Counts that are none."""

    def image(self, width_px: int, height_px: int, *, num_images: int = 1) -> ItemCounts:
        counts = super().image(width_px, height_px, num_images=num_images)
        return replace(counts, **{self.name: self.value})

    name: str
    value: object


@pytest.mark.parametrize(
    ("name", "value"), [("llm_tokens", -1), ("tiles", 1.5), ("visual_tokens", "x"), ("grid", (0, 0, -1))]
)
def test_counts_that_are_none_are_a_fault_of_the_estimator(
    shards: Path, tmp_path: Path, name: str, value: object
) -> None:
    kind = type("Faulty", (Negative,), {"name": name, "value": value})
    with pytest.raises(DataError, match=r"the estimator gives .* where a count is needed at .*member 0.png"):
        build_shards(str(shards / "s0.tar"), kind(), tmp_path / "index")


def test_sums_of_tokens_that_do_not_fit_a_column_leave_out_the_sample_alone(shards: Path, tmp_path: Path) -> None:
    kind = type("Huge", (Negative,), {"name": "tiles", "value": 2**31})
    index = build_shards(str(shards / "s0.tar"), kind(), tmp_path / "index")
    assert {bad.reason for bad in index.bad} == {"too_large"}


class NegativeText(ByteEncoder):
    """An encoder whose text is shorter than nothing."""

    def count(self, record: Record, item_tokens: Sequence[int]) -> TextCounts:
        return TextCounts(sum(item_tokens) - 1, 0)


def test_text_of_less_than_nothing_is_a_fault_of_the_encoder(shards: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"the encoder gives -1 where a count is needed at shard .*, key 0"):
        build_shards(str(shards / "s0.tar"), ESTIMATOR, tmp_path / "index", ScanOptions(encoder=NegativeText()))


class Hungry(Qwen25VLEstimator):
    """An estimator that finds no memory."""

    def image(self, width_px: int, height_px: int, *, num_images: int = 1) -> ItemCounts:
        raise MemoryError


def test_want_of_memory_is_an_error_with_its_place_and_the_remedy(shards: Path, tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"memory ran out at shard .*s0.tar, key 0. Take fewer workers"):
        build_shards(str(shards / "s0.tar"), Hungry(), tmp_path / "index")


def test_a_disk_that_is_full_is_named_and_leaves_nothing_half_written(shards: Path, tmp_path: Path) -> None:
    run = (
        "import resource, sys\n"
        "from tools.cli import main\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "sys.exit(main(sys.argv[1:]))"
    )
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "qwen2_5_vl"}')
    argv = ["index", str(shards / "s0.tar"), "--model", str(tmp_path / "model"), "--output", str(tmp_path / "index")]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "model")}
    command = [sys.executable, "-c", run, *argv]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, env=environment)
    assert done.returncode == 1
    assert "File too large: '" in done.stderr
    assert ".arrow'" in done.stderr
    assert sorted(os.listdir(tmp_path)) == ["model", "shards"]
