"""Scanning: costs from headers, unusable samples as rows, the cache, and the counts by modality."""

import csv
import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dataloaders import shard_scan
from dataloaders.chat import encode_record
from dataloaders.counts import MediaKind
from dataloaders.errors import IndexFormatError, SourceError
from dataloaders.estimators import Qwen25VLConfig, Qwen25VLEstimator
from dataloaders.index import Confidence, CostIndex
from dataloaders.probe import ProbeLimits
from dataloaders.scan import Modalities, build_index, count_modalities, index_key, scan_source
from dataloaders.tar_groups import media_kind
from dataloaders.tar_source import TarSource

ESTIMATOR = Qwen25VLEstimator()
Make = Callable[..., bytes]


@pytest.fixture(scope="module")
def source(small_shard: Path) -> TarSource:
    return TarSource(str(small_shard))


@pytest.fixture(scope="module")
def index(source: TarSource) -> CostIndex:
    return scan_source(source, ESTIMATOR)


def test_every_count_is_what_the_estimator_and_the_template_say(source: TarSource, index: CostIndex) -> None:
    for i in range(len(source)):
        rows = index.item_rows(i)
        counts = index.items["visual_tokens"][rows.start : rows.stop].tolist()
        encoded = encode_record(source.record(i), counts)
        row = {name: int(column[i]) for name, column in index.samples.items()}
        assert row["llm_tokens"] == len(encoded.tokens) == row["text_tokens"] + row["visual_tokens"]
        assert row["label_tokens"] == encoded.num_label_tokens > 0
        assert row["visual_tokens"] == sum(counts)
        assert row["patches"] == index.items["patches"][rows.start : rows.stop].sum() == 4 * sum(counts)
        assert row["num_items"] == len(rows) == len(source.record(i).media)
        assert row["bytes"] == sum(ref.size_bytes for ref in source.record(i).media)
        assert (index.keys(i), index.shard(i)) == (source.record(i).key, source.record(i).shard)
    assert index.bad == []
    assert (index.samples["confidence"] == Confidence.HEADER).all()


def test_item_rows_hold_headers_and_counts(index: CostIndex) -> None:
    row = index.item_rows(1)[0]
    counts = ESTIMATOR.image(120, 80)
    found = {name: column[row].item() for name, column in index.items.items()}
    assert (found["kind"], found["width_px"], found["height_px"]) == (MediaKind.IMAGE, 120, 80)
    assert (found["grid_t"], found["grid_h"], found["grid_w"]) == counts.grid
    assert (found["resized_height_px"], found["resized_width_px"]) == (counts.height_px, counts.width_px)
    assert (found["full_count"], found["full_total_sq"], found["full_longest"]) == (
        counts.full.count,
        counts.full.total_sq,
        counts.full.longest,
    )
    assert (found["window_count"], found["window_total"], found["window_total_sq"], found["window_longest"]) == (
        counts.window.count,
        counts.window.total,
        counts.window.total_sq,
        counts.window.longest,
    )


def test_videos_keep_what_the_decoder_will_need(index: CostIndex) -> None:
    row = index.item_rows(3)[0]
    found = {name: column[row].item() for name, column in index.items.items()}
    assert (found["kind"], found["source_frames"], found["fps"], found["duration_s"]) == (MediaKind.VIDEO, 16, 8, 2)
    assert found["frames"] == len(ESTIMATOR.frame_indices(16, 8.0, 2.0)) == 4
    assert found["visual_tokens"] == ESTIMATOR.video(96, 64, 16, 8.0, 2.0).llm_tokens


def test_ce08_items_of_a_sample_keep_their_own_numbers(index: CostIndex) -> None:
    rows = index.item_rows(2)
    assert index.items["width_px"][rows.start : rows.stop].tolist() == [60, 100, 140]
    mixed = index.item_rows(5)
    assert index.items["kind"][mixed.start : mixed.stop].tolist() == [MediaKind.VIDEO, MediaKind.IMAGE]


def test_a_sample_has_the_weakest_confidence_of_its_media(
    tmp_path: Path, write_shard: Callable[..., Path], chat_json: Make, image_bytes: Make, video_bytes: Make
) -> None:
    # Matroska headers have no frame count: its packets are walked.
    members = [
        ("1.json", chat_json("<image><video><image>", "x")),
        ("1.0.png", image_bytes(56, 56)),
        ("1.1.mkv", video_bytes(64, 64, 9, format="matroska")),
        ("1.2.png", image_bytes(56, 56)),
        ("2.json", chat_json("<image>", "x")),
        ("2.png", image_bytes(56, 56)),
    ]
    index = scan_source(TarSource(str(write_shard(tmp_path / "a.tar", members))), ESTIMATOR)
    assert index.samples["confidence"].tolist() == [Confidence.COUNTED, Confidence.HEADER]
    assert index.items["source_frames"][1] == 9


def test_modalities_are_counted(index: CostIndex) -> None:
    assert count_modalities(index) == Modalities(
        text_only=1, image_only=3, video_only=1, mixed=1, unusable=0, images=6, videos=2
    )


@pytest.mark.parametrize("train_on", ["assistant", "last", "all"])
def test_label_tokens_follow_train_on(source: TarSource, train_on: str) -> None:
    index = scan_source(source, ESTIMATOR, train_on=train_on)
    record = source.record(0)
    assert index.samples["label_tokens"][0] == encode_record(record, [], train_on=train_on).num_label_tokens


def test_orientation_changes_the_size_that_is_counted(
    tmp_path: Path, write_shard: Callable[..., Path], chat_json: Make, image_bytes: Make
) -> None:
    plain = image_bytes(120, 40, format="JPEG")
    tag = b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x03\0\0\0\x01\0\x06\0\0\0\0\0\0"
    turned = plain[:2] + b"\xff\xe1" + (len(tag) + 2).to_bytes(2, "big") + tag + plain[2:]
    source = TarSource(str(write_shard(tmp_path / "a.tar", [("1.json", chat_json("<image>", "a")), ("1.jpg", turned)])))
    sizes = [
        tuple(int(index.items[name][0]) for name in ("width_px", "height_px"))
        for index in (scan_source(source, ESTIMATOR, apply_orientation=on) for on in (True, False))
    ]
    assert sizes == [(40, 120), (120, 40)]


@pytest.fixture
def with_bad(tmp_path: Path, write_shard: Callable[..., Path], chat_json: Make, image_bytes: Make) -> TarSource:
    """Good samples around one of every kind of unusable ones."""
    good, ask = image_bytes(56, 56), chat_json("<image>?", "Yes.")
    members = [
        ("0.json", b"{broken"),
        ("1.json", ask),
        ("1.png", good),
        ("2.json", ask),
        ("2.png", b""),
        ("3.json", ask),
        ("3.jpg", b"this is no picture at all"),
        ("4.json", ask),
        ("5.json", ask),
        ("5.png", image_bytes(4, 1000)),
        ("6.png", good),
        ("7.json", ask),
        ("7.mp4", b"\0\0\0\x18ftypisom" + bytes(50)),
        ("8.json", chat_json("<video>?", "Yes.")),
        ("8.mp4", b"\0\0\0\x18ftypisom" + bytes(50)),
        ("9.json", ask),
        ("9.png", good),
        ("last.json", chat_json("<image><image>", "One is bad.")),
        ("last.0.png", good),
        ("last.1.png", good[:20]),
    ]
    return TarSource(str(write_shard(tmp_path / "bad.tar", members)))


def test_unusable_samples_are_rows_with_a_reason_and_never_an_exception(with_bad: TarSource) -> None:
    index = scan_source(with_bad, ESTIMATOR)
    assert [(bad.sample_id, bad.reason) for bad in index.bad] == [
        (0, "bad_record"),
        (2, "empty_file"),
        (3, "unknown_format"),
        (4, "placeholder_mismatch"),
        (5, "extreme_aspect"),
        (6, "bad_record"),
        (7, "placeholder_mismatch"),
        (8, "truncated"),
        (10, "truncated"),
    ]
    bad = [bad.sample_id for bad in index.bad]
    assert np.flatnonzero(index.samples["confidence"] == Confidence.UNUSABLE).tolist() == bad
    assert [index.reasons[row] for row in index.samples["reason"][bad]] == [entry.reason for entry in index.bad]
    assert not index.samples["reason"][[1, 9]].any()
    for name in ("llm_tokens", "label_tokens", "visual_tokens", "patches", "num_items", "bytes"):
        assert not index.samples[name][bad].any()
    assert len(index) == len(with_bad) == 11
    assert count_modalities(index) == Modalities(
        text_only=0, image_only=2, video_only=0, mixed=0, unusable=9, images=2, videos=0
    )


def test_every_unusable_sample_names_the_file_that_failed(with_bad: TarSource) -> None:
    for bad in scan_source(with_bad, ESTIMATOR).bad:
        assert "bad.tar" in bad.place
        assert bad.place in bad.message
    extreme = next(bad for bad in scan_source(with_bad, ESTIMATOR).bad if bad.reason == "extreme_aspect")
    assert extreme.place.endswith("key 5, member 5.png")


@pytest.mark.parametrize("position", ["first", "middle", "last"])
def test_id01_a_bad_sample_costs_its_neighbours_nothing(
    position: str, tmp_path: Path, write_shard: Callable[..., Path], chat_json: Make, image_bytes: Make
) -> None:
    at = {"first": 0, "middle": 2, "last": 4}[position]
    members = []
    for n in range(5):
        picture = image_bytes(60 + 30 * n, 60)
        members += [(f"{n}.json", chat_json("<image>", "x" * n)), (f"{n}.png", picture[:30] if n == at else picture)]
    index = scan_source(TarSource(str(write_shard(tmp_path / "a.tar", members))), ESTIMATOR)
    good = [n for n in range(5) if n != at]
    assert [bad.sample_id for bad in index.bad] == [at]
    assert index.items["width_px"].tolist() == [60 + 30 * n for n in good]
    assert [index.items["width_px"][index.item_rows(n)[0]] for n in good] == [60 + 30 * n for n in good]


def test_limits_decide_what_is_usable_and_are_part_of_the_key(source: TarSource) -> None:
    index = scan_source(source, ESTIMATOR, limits=ProbeLimits(max_side_px=150))
    assert [(bad.sample_id, bad.reason) for bad in index.bad] == [(4, "too_large")]
    assert index.key != index_key(source, ESTIMATOR)


def test_a_shard_that_vanishes_is_an_exception_and_not_a_bad_row(tmp_path: Path, small_shard: Path) -> None:
    shard = tmp_path / "a.tar"
    shard.write_bytes(small_shard.read_bytes())
    source = pickle.loads(pickle.dumps(TarSource(str(shard))))  # without the open file
    shard.unlink()
    with pytest.raises(FileNotFoundError):
        scan_source(source, ESTIMATOR)
    shard.write_bytes(b"short")
    with pytest.raises(SourceError, match="has changed since it was opened"):
        scan_source(source, ESTIMATOR)


def test_no_pixel_is_decoded(source: TarSource, monkeypatch: pytest.MonkeyPatch) -> None:
    from PIL import ImageFile

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("pixels were loaded")

    monkeypatch.setattr(ImageFile.ImageFile, "load", refuse)
    monkeypatch.setattr(TarSource, "media_bytes", refuse)
    assert scan_source(source, ESTIMATOR).bad == []


def test_progress_counts_every_sample(source: TarSource) -> None:
    calls: list[tuple[int, int]] = []
    scan_source(source, ESTIMATOR, progress=lambda done, total: calls.append((done, total)))
    assert calls == [(i + 1, 6) for i in range(6)]


def test_the_same_source_gives_the_same_index(source: TarSource, index: CostIndex) -> None:
    again = scan_source(source, ESTIMATOR)
    assert again.fingerprint == index.fingerprint
    other = Qwen25VLEstimator(Qwen25VLConfig(max_pixels=28 * 28 * 64, min_pixels=28 * 28))
    assert scan_source(source, other).fingerprint != index.fingerprint


def test_a_current_index_is_opened_and_not_built(
    source: TarSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = build_index(source, ESTIMATOR, tmp_path / "index")

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the source was scanned again")

    monkeypatch.setattr(shard_scan, "scan_rows", refuse)
    assert build_index(source, ESTIMATOR, tmp_path / "index").fingerprint == built.fingerprint


@pytest.mark.parametrize("change", ["train_on", "estimator", "damage", "limits", "orientation"])
def test_an_index_that_is_not_current_is_built_again(source: TarSource, tmp_path: Path, change: str) -> None:
    before = build_index(source, ESTIMATOR, tmp_path / "index")
    changes: dict[str, dict[str, object]] = {
        "train_on": {"train_on": "all"},
        "limits": {"limits": ProbeLimits(max_frames=99)},
        "orientation": {"apply_orientation": False},
    }
    options = changes.get(change, {})
    estimator = Qwen25VLEstimator(Qwen25VLConfig(max_pixels=99 * 784)) if change == "estimator" else ESTIMATOR
    if change == "damage":
        (tmp_path / "index" / "items.arrow").write_bytes(b"junk")
    after = build_index(source, estimator, tmp_path / "index", **options)  # type: ignore[arg-type]
    assert after.key == index_key(source, estimator, **options)  # type: ignore[arg-type]
    assert after.fingerprint == scan_source(source, estimator, **options).fingerprint  # type: ignore[arg-type]
    assert (after.fingerprint == before.fingerprint) == (change == "damage")


def test_a_foreign_folder_is_not_overwritten(source: TarSource, tmp_path: Path) -> None:
    (tmp_path / "photo.jpg").write_bytes(b"mine")
    with pytest.raises(IndexFormatError, match="holds something else"):
        build_index(source, ESTIMATOR, tmp_path)
    assert (tmp_path / "photo.jpg").exists()


def test_reference_files_are_planned_at_their_true_size_or_named_as_bad(
    shared_dir: Path, tmp_path: Path, write_shard: Callable[..., Path], chat_json: Make
) -> None:
    folder = shared_dir / "media"
    rows = list(csv.DictReader((folder / "manifest.csv").read_text().splitlines()))
    members: list[tuple[str, bytes]] = []
    for n, row in enumerate(rows):
        path = folder / row["path"]
        members += [(f"{n:03d}.json", chat_json(f"<{row['kind']}>", "x")), (f"{n:03d}{path.suffix}", path.read_bytes())]
    named = [media_kind(Path(row["path"]).suffix) is MediaKind[row["kind"].upper()] for row in rows]
    source = TarSource(str(write_shard(tmp_path / "a.tar", members, format=tarfile.GNU_FORMAT)))
    index = scan_source(source, ESTIMATOR)
    bad = {entry.sample_id: entry for entry in index.bad}
    assert len(index) == len(rows) > 100
    usable = 0
    for n, row in enumerate(rows):
        if n in bad:
            # Good files are refused only where the processor would fail, or for a name that hides their kind.
            allowed = bad[n].unfit if named[n] else bad[n].reason == "placeholder_mismatch"
            assert row["expect"] != "ok" or allowed, (row["path"], bad[n].message)
        elif row["expect"] == "ok":
            item = index.item_rows(n)[0]
            size = (int(index.items["width_px"][item]), int(index.items["height_px"][item]))
            assert size == (int(row["disp_w"]), int(row["disp_h"])), row["path"]
            usable += 1
    assert usable > 90
