"""Sound media that the model's processor would fail on: found by the scan, a policy there, never an exception later.

CE-02 (one strip ends a run), CE-04 (1x1 images), CE-08 (two videos in one sample), ID-01 (a bad sample anywhere),
ID-02 (bombs are named and never decoded).
"""

import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dataloaders.counts import ItemCounts
from dataloaders.errors import DataError, Reason, UnfitError
from dataloaders.estimators import Qwen25VLEstimator, estimator_from_config
from dataloaders.index import Confidence, CostIndex, write_index
from dataloaders.index_build import build_shards
from dataloaders.sample import LoadedSample, load_sample, planned_items
from dataloaders.scan import count_modalities, scan_source
from dataloaders.scan_rows import ScanOptions
from dataloaders.tar_source import TarSource

ESTIMATOR = estimator_from_config({"model_type": "qwen2_5_vl"})
Make = Callable[..., bytes]


@pytest.fixture
def source(
    tmp_path: Path, write_shard: Callable[..., Path], chat_json: Make, image_bytes: Make, video_bytes: Make
) -> TarSource:
    """A strip of 8000 x 20, a good picture, a clip of one frame, a strip beside a good picture, a broken one."""
    strip, good = image_bytes(8000, 20), image_bytes(120, 80)
    members = [
        ("0.json", chat_json("<image>?", "A strip.")),
        ("0.png", strip),
        ("1.json", chat_json("<image>?", "A picture.")),
        ("1.png", good),
        ("2.json", chat_json("<video>?", "A moment.")),
        ("2.mp4", video_bytes(64, 48, 1)),
        ("3.json", chat_json("<image> and <image>?", "Both.")),
        ("3.0.png", good),
        ("3.1.png", image_bytes(12, 3000)),
        ("4.json", chat_json("<image>?", "Nothing.")),
        ("4.png", strip[:20]),
    ]
    return TarSource(str(write_shard(tmp_path / "unfit.tar", members)))


def _assert_planned_shape(sample: LoadedSample, index: CostIndex) -> None:
    row = {name: int(column[sample.sample_id]) for name, column in index.samples.items()}
    assert sample.tokens.shape == (row["llm_tokens"],)
    assert sample.patches.shape == (row["patches"], 1176)
    assert sample.visual_index.shape == (row["visual_tokens"],)
    assert len(sample.patches) == sample.grids.prod(axis=1).sum() == 4 * row["visual_tokens"]
    assert (sample.labels != -100).sum() == row["label_tokens"] > 0


def test_ce02_skip_lists_them_with_place_and_reason_and_leaves_the_others(source: TarSource) -> None:
    index = scan_source(source, ESTIMATOR)
    assert [(bad.sample_id, bad.reason, bad.unfit) for bad in index.bad] == [
        (0, "extreme_aspect", True),
        (2, "too_few_frames", True),
        (3, "extreme_aspect", True),
        (4, "truncated", False),
    ]
    assert all("unfit.tar" in bad.place and f"key {bad.sample_id}, member" in bad.message for bad in index.bad)
    _assert_planned_shape(load_sample(source, index, 1, ESTIMATOR), index)


def test_ce02_clamped_media_are_usable_flagged_and_planned_at_what_the_processor_takes(source: TarSource) -> None:
    index = scan_source(source, ESTIMATOR, unfit="clamp")
    assert [bad.sample_id for bad in index.bad] == [4]
    assert index.samples["clamped"].tolist() == [1, 0, 1, 1, 0]
    assert index.items["clamped"].tolist() == [1, 0, 1, 0, 1]
    sizes = np.stack([index.items["width_px"], index.items["height_px"]], axis=1).tolist()
    assert sizes == [[8000, 40], [120, 80], [64, 48], [120, 80], [15, 3000]]
    assert index.items["source_frames"].tolist() == [1, 1, 2, 1, 1]
    assert index.items["visual_tokens"][0] == ESTIMATOR.image(8000, 40).visual_tokens
    assert index.samples["confidence"].tolist() == [0, 0, 0, 0, Confidence.UNUSABLE]
    assert count_modalities(index).unusable == 1


@pytest.mark.parametrize("sample_id", [0, 2, 3])
def test_ce02_a_clamped_medium_loads_in_exactly_the_planned_shape_and_is_no_surprise(
    source: TarSource, sample_id: int, tmp_path: Path
) -> None:
    index = write_index(tmp_path / "index", scan_source(source, ESTIMATOR, unfit="clamp"))
    sample = load_sample(source, index, sample_id, ESTIMATOR)
    _assert_planned_shape(sample, index)
    assert (sample.replaced, sample.num_conformed) == (None, 0)
    assert sample.patches.any()
    for item in planned_items(index, sample_id, ESTIMATOR):
        assert item.num_patches > 0


def test_a_clip_of_one_frame_repeats_it(source: TarSource) -> None:
    index = scan_source(source, ESTIMATOR, unfit="clamp")
    patches = load_sample(source, index, 2, ESTIMATOR).patches.reshape(-1, 3, 2, 196)
    assert np.array_equal(patches[:, :, 0], patches[:, :, 1])


def test_ce02_error_lists_all_of_them_after_the_scan(source: TarSource, tmp_path: Path) -> None:
    with pytest.raises(
        DataError, match=r"(?s)would fail on the media of 3 of 5 samples:.*unfit=skip .*unfit=clamp"
    ) as e:
        scan_source(source, ESTIMATOR, unfit="error")
    lines = str(e.value).splitlines()
    assert ["key 0, member 0.png" in lines[1], "key 2, member 2.mp4" in lines[2], "member 3.1.png" in lines[3]] == [
        True
    ] * 3
    assert not any("key 4" in line for line in lines)
    with pytest.raises(DataError, match="of 3 of 5 samples"):
        build_shards(source.shards, ESTIMATOR, tmp_path / "index", ScanOptions(unfit="error"))
    assert not (tmp_path / "index").exists()


def test_error_lists_twenty_and_counts_the_rest(
    tmp_path: Path, write_shard: Callable[..., Path], chat_json: Make, image_bytes: Make
) -> None:
    strip = image_bytes(2010, 4)
    members = [m for n in range(23) for m in ((f"{n}.json", chat_json("<image>", "x")), (f"{n}.png", strip))]
    with pytest.raises(DataError, match="of 23 of 23 samples") as caught:
        scan_source(TarSource(str(write_shard(tmp_path / "a.tar", members))), ESTIMATOR, unfit="error")
    lines = str(caught.value).splitlines()
    assert len(lines) == 1 + 20 + 1 + 1
    assert lines[21] == "  and 3 more"


def test_error_without_unfit_media_is_an_ordinary_index(small_shard: Path) -> None:
    source = TarSource(str(small_shard))
    strict = scan_source(source, ESTIMATOR, unfit="error")
    assert strict.bad == []
    assert strict.key.unfit == "error"
    assert np.array_equal(strict.samples["llm_tokens"], scan_source(source, ESTIMATOR).samples["llm_tokens"])


def test_a_policy_that_is_none_is_refused(source: TarSource) -> None:
    with pytest.raises(DataError, match=r"unfit='ignore' at ScanOptions. Choose one of skip, clamp, error"):
        scan_source(source, ESTIMATOR, unfit="ignore")  # type: ignore[arg-type]


class Stubborn(Qwen25VLEstimator):
    """Names a nearest size that it refuses again, or none at all."""

    def __init__(self, nearest: tuple[int, int] | None, step: int = 0) -> None:
        super().__init__()
        self.nearest, self.step, self.asked = nearest, step, 0

    def image(self, width_px: int, height_px: int, *, num_images: int = 1) -> ItemCounts:
        self.asked += 1
        nearest = None if self.nearest is None else (self.nearest[0] + self.step * self.asked, self.nearest[1])
        raise UnfitError(Reason.TOO_SMALL, "never", nearest_size_px=nearest)


@pytest.mark.parametrize("nearest", [None, (9, 9)])
@pytest.mark.parametrize("step", [0, 1])
def test_clamping_ends_and_what_cannot_be_clamped_is_unusable(
    source: TarSource, nearest: tuple[int, int] | None, step: int
) -> None:
    estimator = Stubborn(nearest, step)
    index = scan_source(source, estimator, unfit="clamp")
    assert [(bad.sample_id, bad.reason) for bad in index.bad] == [
        (0, "too_small"),
        (1, "too_small"),
        (3, "too_small"),
        (4, "truncated"),
    ]
    assert estimator.asked <= 3 * 5


class Counting(Qwen25VLEstimator):
    """Remembers how many images a sample was said to have."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def image(self, width_px: int, height_px: int, *, num_images: int = 1) -> ItemCounts:
        self.seen.append(num_images)
        return super().image(width_px, height_px, num_images=num_images)


def test_the_estimator_is_told_how_many_images_the_sample_has(small_shard: Path) -> None:
    estimator = Counting()
    scan_source(TarSource(str(small_shard)), estimator)
    assert estimator.seen == [1, 3, 3, 3, 1, 1]


class Huge(Qwen25VLEstimator):
    """Counts beyond 32 bits for the largest picture."""

    def image(self, width_px: int, height_px: int, *, num_images: int = 1) -> ItemCounts:
        counts = super().image(width_px, height_px, num_images=num_images)
        if width_px < 150:
            return counts
        values = {name: getattr(counts, name) for name in ("visual_tokens", "height_px", "width_px", "full", "window")}
        return ItemCounts(**values, llm_tokens=2**31, patches=2**33)


def test_counts_that_do_not_fit_the_index_make_a_sample_unusable(small_shard: Path) -> None:
    index = scan_source(TarSource(str(small_shard)), Huge())
    assert [(bad.sample_id, bad.reason) for bad in index.bad] == [(4, "too_large")]
    assert "do not fit the index" in index.bad[0].message


def test_ce04_tiny_images_are_planned_and_load(
    tmp_path: Path, write_shard: Callable[..., Path], chat_json: Make, image_bytes: Make
) -> None:
    sizes = [(1, 1), (1, 3), (3, 3), (3, 1), (5, 3)]
    members = [
        m
        for n, size in enumerate(sizes)
        for m in ((f"{n}.json", chat_json("<image>", "x")), (f"{n}.png", image_bytes(*size)))
    ]
    source = TarSource(str(write_shard(tmp_path / "a.tar", members)))
    index = scan_source(source, ESTIMATOR)
    assert index.bad == []
    for n in range(len(sizes)):
        _assert_planned_shape(load_sample(source, index, n, ESTIMATOR), index)


def test_ce08_two_videos_of_one_sample_cost_what_each_of_them_costs(
    tmp_path: Path, write_shard: Callable[..., Path], chat_json: Make, video_bytes: Make
) -> None:
    members = [("k.json", chat_json("<video> or <video>", "x"))]
    members += [(f"k.{j}.mp4", video_bytes(64, 64, frames)) for j, frames in enumerate((32, 40))]
    source = TarSource(str(write_shard(tmp_path / "a.tar", members)))
    index = scan_source(source, ESTIMATOR)
    alone = [ESTIMATOR.video(64, 64, frames, 8.0, frames / 8) for frames in (32, 40)]
    assert index.items["grid_t"].tolist() == [counts.grid[0] for counts in alone]
    assert len(set(index.items["visual_tokens"].tolist())) == 2
    assert index.item_tokens(0) == [counts.llm_tokens for counts in alone]
    sample = load_sample(source, index, 0, ESTIMATOR)
    _assert_planned_shape(sample, index)
    assert (sample.grids.prod(axis=1) // 4).tolist() == [counts.visual_tokens for counts in alone]


def _png_header(width_px: int, height_px: int) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width_px, height_px, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(99))) + chunk(b"IEND", b"")
    )


@pytest.mark.parametrize("unfit", ["skip", "clamp"])
def test_id02_a_bomb_is_named_with_key_and_member_and_never_decoded(
    unfit: str, tmp_path: Path, write_shard: Callable[..., Path], chat_json: Make
) -> None:
    members = [("bomb.json", chat_json("<image>", "x")), ("bomb.png", _png_header(20_000, 20_000))]
    source = TarSource(str(write_shard(tmp_path / "a.tar", members)))
    index = scan_source(source, ESTIMATOR, unfit=unfit)  # type: ignore[arg-type]
    (bad,) = index.bad
    assert (bad.reason, bad.unfit) == ("too_large", False)
    assert bad.place.endswith("a.tar, key bomb, member bomb.png")
    assert "20000x20000" in bad.message
