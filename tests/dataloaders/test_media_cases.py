"""Cases of `cost-estimate`, `image-decode` and `video-decode` that go through several layers: header, index, decoder.

CE-01 (sides of 0 px), CE-05 (placeholders cut, features kept), CE-07 (frames per temporal patch), CE-10 (tiles in one
batch), ID-01 (a bad sample anywhere), ID-02 (bombs), VD-01 (headers that claim too much), VD-02 (no count), VD-04
(rotation), VD-05 (memory), VD-07 (workers that stop early), VD-08 (slow storage). Others are where their layer is.
"""

import io
import itertools
import json
import os
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, get_args

import av
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image, ImageFile

from balancer.errors import OversizeError
from balancer.oversize import OversizePolicy, fit_oversize
from balancer.plan import Capacities
from balancer.select import eligible_ids
from dataloaders.counts import MediaKind
from dataloaders.decode import PixelConfig, decode_image, decode_video, planned_item
from dataloaders.encoder import ByteEncoder
from dataloaders.errors import DataError, MediaError, Reason, UnfitError
from dataloaders.estimators import (
    PatchEstimator,
    Qwen25VLConfig,
    Qwen25VLEstimator,
    TokenEstimator,
    estimator_from_config,
)
from dataloaders.index import Confidence
from dataloaders.probe import ByteReader, ProbeLimits, probe_image, probe_video
from dataloaders.record import Record
from dataloaders.sample import load_sample
from dataloaders.scan import scan_source
from dataloaders.scan_rows import UNFIT
from dataloaders.tar_source import TarSource
from dataloaders.tokenizer import Special

CELL = 28 * 28
SMALL = Qwen25VLEstimator(
    Qwen25VLConfig(max_pixels=16_384 * CELL, video_min_pixels=4 * CELL, video_max_pixels=16 * CELL)
)
Make = Callable[..., bytes]


class Swapped:
    """A source whose media have changed since the scan: (sample, medium) -> bytes."""

    def __init__(self, source: TarSource, media: dict[tuple[int, int], bytes]) -> None:
        self.source, self.media, self.fingerprint = source, media, source.fingerprint

    def __len__(self) -> int:
        return len(self.source)

    def record(self, i: int) -> Record:
        return self.source.record(i)

    def media_reader(self, i: int, j: int) -> ByteReader:
        return self.source.media_reader(i, j)

    def media_bytes(self, i: int, j: int) -> bytes:
        return self.media.get((i, j)) or self.source.media_bytes(i, j)

    def place(self, i: int) -> str:
        return self.source.place(i)


@pytest.fixture
def shard_of(tmp_path: Path, write_shard: Callable[..., Path], chat_json: Make) -> Callable[..., TarSource]:
    """`shard_of([media of sample 0, ...])`: a source; each medium is (extension, bytes)."""

    def make(samples: Sequence[Sequence[tuple[str, bytes]]]) -> TarSource:
        members = []
        for n, media in enumerate(samples):
            marks = "".join("<video>" if kind in ("mp4", "mkv", "avi") else "<image>" for kind, _ in media)
            members.append((f"{n}.json", chat_json(f"{marks}?", "Yes.")))
            members += [(f"{n}.{j}.{kind}", data) for j, (kind, data) in enumerate(media)]
        return TarSource(str(write_shard(tmp_path / "cases.tar", members)))

    return make


def qwen(budget: int, *, model_type: str = "qwen2_5_vl") -> PatchEstimator:
    """An estimator that gives an image from 4 to `budget` tokens."""
    cell = CELL if model_type == "qwen2_5_vl" else 32 * 32
    bounds = {"min_pixels": 4 * cell, "max_pixels": budget * cell}
    found = estimator_from_config({"config": {"model_type": model_type}, "preprocessor_config": bounds})
    assert isinstance(found, PatchEstimator)
    return found


# --- CE-01: no side of 0 px, whatever the budget


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3_vl"])
@settings(deadline=None)
@given(width=st.integers(1, 4000), height=st.integers(1, 4000), budget=st.integers(4, 20_000))
def test_ce01_sides_are_whole_factors_and_tokens_are_their_area(
    model_type: str, width: int, height: int, budget: int
) -> None:
    estimator = qwen(budget, model_type=model_type)
    factor = estimator.patch_px * estimator.merge
    if max(width, height) > 200 * min(width, height):
        with pytest.raises(UnfitError, match=f"{width}x{height}") as caught:
            estimator.image(width, height)
        assert caught.value.nearest_size_px is not None
        width, height = caught.value.nearest_size_px
    counts = estimator.image(width, height)
    sides = (counts.height_px, counts.width_px)
    assert min(sides) >= factor
    assert sides[0] % factor == sides[1] % factor == 0
    assert counts.llm_tokens == sides[0] * sides[1] // factor**2 == counts.patches // estimator.merge**2


NARROW = [  # width, height, budget in tokens -> height and width of the grid in patches
    (31, 639, 20, (40, 2)),
    (639, 31, 20, (2, 40)),
    (20, 4000, 4, (56, 2)),
    (4000, 20, 20, (2, 126)),
    (1, 200, 4, (58, 2)),
    (28, 28, 4, (4, 4)),
    (27, 1000, 16, (48, 2)),  # above the budget: a side is at least one factor
    (640, 480, 20, (6, 10)),
    (1600, 1200, 1000, (54, 72)),
]


@pytest.mark.parametrize(("width", "height", "budget", "grid"), NARROW)
def test_ce01_estimator_decoder_and_reference_processor_agree_on_narrow_images(
    *, width: int, height: int, budget: int, grid: tuple[int, int], image_bytes: Make
) -> None:
    estimator = qwen(budget)
    counts = estimator.image(width, height)
    assert counts.grid == (1, *grid)
    data = image_bytes(width, height)
    assert decode_image(data, planned_item(MediaKind.IMAGE, counts)).shape == (grid[0] * grid[1], 1176)
    module = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    processor = module.Qwen2VLImageProcessorPil(min_pixels=4 * CELL, max_pixels=budget * CELL)
    with Image.open(io.BytesIO(data)) as image:
        assert processor(image)["image_grid_thw"].tolist() == [[1, *grid]]


# --- CE-05: media are never cut


CAP = 1500


def assert_features_fit(source: TarSource, index: Any, ids: Sequence[int], estimator: PatchEstimator) -> None:
    """Placeholders in the tokens, positions for embeddings and rows of the vision tower agree for every sample."""
    for sample_id in ids:
        sample = load_sample(source, index, sample_id, estimator)
        held = np.isin(sample.tokens, (Special.IMAGE_PAD, Special.VIDEO_PAD))
        assert np.flatnonzero(held).tolist() == sample.visual_index.tolist()
        assert held.sum() * estimator.merge**2 == len(sample.patches) == sample.grids.prod(axis=1).sum()
        assert len(sample.tokens) == index.samples["llm_tokens"][sample_id] <= CAP
        assert sample.patches.any() == bool(len(sample.grids))
        assert sample.replaced is None


@pytest.mark.parametrize(("oversize", "unfit"), list(itertools.product(get_args(OversizePolicy), UNFIT)))
def test_ce05_every_policy_leaves_as_many_placeholders_as_features(
    *, oversize: OversizePolicy, unfit: Any, shard_of: Callable[..., TarSource], image_bytes: Make, video_bytes: Make
) -> None:
    media = [
        [("png", image_bytes(200, 150))],
        [("png", image_bytes(1232, 1232))],  # 44 x 44 = 1936 tokens: more than a whole micro-batch holds
        [],
        [("png", image_bytes(8000, 20))],  # refused by the processor
        [("png", image_bytes(800, 800)), ("mp4", video_bytes(96, 64, 16)), ("png", image_bytes(800, 812))],  # together
        [("mp4", video_bytes(96, 64, 16)), ("png", image_bytes(60, 90))],
    ]
    source = shard_of(media)
    if unfit == "error":
        with pytest.raises(DataError, match=r"media of 1 of 6 samples(?s:.*)8000x20 px.*key 3, member 3\.0\.png"):
            scan_source(source, SMALL, unfit=unfit)
        return
    index = scan_source(source, SMALL, unfit=unfit)
    assert index.item_tokens(1) == [1936]
    if oversize == "error":
        with pytest.raises(OversizeError) as caught:
            eligible_ids(index, Capacities(tokens=CAP))
        for sample_id in (1, 4):
            need = f"key {sample_id}): {index.samples['llm_tokens'][sample_id]} tokens > {CAP}"
            assert need in str(caught.value)
        return
    capacities = Capacities(tokens=CAP)
    index = fit_oversize(index, capacities, oversize, source=source, estimator=SMALL, encoder=ByteEncoder()).index
    ids = eligible_ids(index, capacities, "drop").ids.tolist()
    # Text alone cannot be cut far enough here; smaller media fit.
    whole = [0, 1, 2, 3, 4, 5] if oversize == "shrink" else [0, 2, 3, 5]
    assert ids == [sample_id for sample_id in whole if unfit == "clamp" or sample_id != 3]
    assert_features_fit(source, index, ids, SMALL)


# --- CE-07: temporal positions


GOLDEN_T = {1: [1, 2, 3, 4, 5, 6, 7, 8, 9], 2: [1, 1, 2, 2, 3, 3, 4, 4, 5], 3: [1, 1, 1, 2, 2, 2, 3, 3, 3]}
TEMPORAL = [(frames, temporal, row[frames - 1]) for temporal, row in GOLDEN_T.items() for frames in range(1, 10)]


def every_frame(temporal: int) -> Qwen25VLEstimator:
    """A model that takes all frames of a clip."""
    bounds = {"video_min_pixels": 4 * CELL, "video_max_pixels": 16 * CELL}
    return Qwen25VLEstimator(Qwen25VLConfig(temporal_patch=temporal, sampling="all", **bounds))


@pytest.mark.parametrize(("frames", "temporal", "grid_t"), TEMPORAL)
def test_ce07_planned_and_decoded_positions_are_frames_rounded_up(
    frames: int, temporal: int, grid_t: int, video_bytes: Make
) -> None:
    estimator = every_frame(temporal)
    counts = estimator.video(64, 48, frames, 8.0, frames / 8)
    assert grid_t == -(-frames // temporal) == counts.grid[0]
    assert counts.frames == grid_t * temporal
    # The resize knows nothing of the frames that only fill the last patch.
    assert counts.grid[1:] == (4, 4)
    shown = estimator.explain_video(64, 48, frames, 8.0, frames / 8)
    assert str(counts.llm_tokens) in shown[-1].split()
    item = planned_item(MediaKind.VIDEO, counts, frame_indices=estimator.frame_indices(frames, 8.0, frames / 8))
    patches, report = decode_video(video_bytes(64, 48, frames), item, pixels=PixelConfig.of(estimator))
    assert patches.shape == (counts.patches, 3 * temporal * 14 * 14) == (grid_t * 16, 588 * temporal)
    assert not report


@pytest.mark.parametrize("temporal", list(GOLDEN_T))
def test_ce07_one_frame_fills_its_patch_as_in_the_reference_processor(temporal: int) -> None:
    module = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    processor = module.Qwen2VLImageProcessorPil(temporal_patch_size=temporal)
    expected = processor(np.zeros((48, 64, 3), dtype=np.uint8))
    counts = every_frame(temporal).image(64, 48)
    assert expected["image_grid_thw"].tolist() == [list(counts.grid)]
    assert expected["pixel_values"].shape == (counts.patches, 588 * temporal)


@pytest.mark.torch
@pytest.mark.parametrize(("temporal", "expected"), list(GOLDEN_T.items()))
def test_ce07_positions_are_those_of_the_reference_video_processor(temporal: int, expected: list[int]) -> None:
    pytest.importorskip("torchvision")  # without it transformers has no video processors
    torch = pytest.importorskip("torch")
    module = pytest.importorskip("transformers.models.qwen2_vl.video_processing_qwen2_vl")
    size = {"shortest_edge": 4 * CELL, "longest_edge": 16 * CELL}
    processor = module.Qwen2VLVideoProcessor(temporal_patch_size=temporal, do_sample_frames=False, size=size)
    for frames, grid_t in enumerate(expected, start=1):
        found = processor([torch.zeros((frames, 3, 48, 64), dtype=torch.uint8)], return_tensors="pt")
        grid = every_frame(temporal).video(64, 48, frames, 8.0, 1.0).grid
        assert found["video_grid_thw"].tolist() == [list(grid)]
        assert grid[0] == grid_t


# --- CE-10: tiles of several images in one tensor


TILED = {(448, 448): 1, (896, 1344): 7, (896, 448): 3}  # one tile; 2 x 3 and a thumbnail; 2 x 1 and a thumbnail


def internvl() -> TokenEstimator:
    image = {"size": {"height": 448, "width": 448}, "min_patches": 1, "max_patches": 12, "crop_to_patches": True}
    return estimator_from_config({"config": {"model_type": "internvl"}, "preprocessor_config": image})


def checksums(rows: NDArray[Any], counts: Sequence[int]) -> list[int]:
    """CRC of each part of `rows` that is `counts` long, cut by cumulative rows."""
    assert len(rows) == sum(counts)
    return [zlib.crc32(np.ascontiguousarray(part).tobytes()) for part in np.split(rows, np.cumsum(counts)[:-1])]


def test_ce10_tiles_of_a_batch_are_cut_by_cumulative_rows(
    shard_of: Callable[..., TarSource], image_bytes: Make
) -> None:
    pictures = [("png", image_bytes(*size)) for size in TILED]
    source = shard_of([[picture] for picture in pictures] + [[("png", b"\x89PNG")], pictures])
    index = scan_source(source, internvl())
    assert [bad.sample_id for bad in index.bad] == [3]
    tiles = index.items["tiles"]
    assert tiles.tolist() == [1, 7, 3, 1, 7, 3]
    assert index.items["patches"].tolist() == (1024 * tiles).tolist()
    assert index.samples["patches"].tolist() == [1024, 7168, 3072, 0, 11_264]
    assert index.item_offsets.tolist() == [0, 1, 2, 3, 3, 6]
    # The tensor of the batch: tile after tile, each marked by image and number.
    own = [np.array([[image, tile] for tile in range(count)]) for image, count in enumerate(tiles.tolist())]
    batch = np.concatenate(own)
    assert checksums(batch, tiles.tolist()) == [zlib.crc32(part.tobytes()) for part in own]
    per_sample = [sum(tiles[row] for row in index.item_rows(i)) for i in range(len(index))]
    assert per_sample == [1, 7, 3, 0, 11]
    parts = np.split(batch, np.cumsum(per_sample)[:-1])
    assert [sorted(set(part[:, 0].tolist())) for part in parts] == [[0], [1], [2], [], [3, 4, 5]]


def test_ce10_rows_of_the_reference_processor_go_back_to_their_images(image_bytes: Make) -> None:
    module = pytest.importorskip("transformers.models.got_ocr2.image_processing_pil_got_ocr2")
    processor = module.GotOcr2ImageProcessorPil(
        crop_to_patches=True, size={"height": 448, "width": 448}, max_patches=12
    )
    pictures = [np.asarray(Image.open(io.BytesIO(image_bytes(*size, seed=n)))) for n, size in enumerate(TILED)]
    batch = np.asarray(processor(pictures, return_tensors="np")["pixel_values"])
    estimator = internvl()
    counts = [estimator.image(*size).tiles for size in TILED]
    assert counts == list(TILED.values())
    alone = [np.asarray(processor([picture], return_tensors="np")["pixel_values"]) for picture in pictures]
    assert checksums(batch, counts) == [zlib.crc32(rows.tobytes()) for rows in alone]


# --- ID-01: a bad sample anywhere


@pytest.mark.torch
@pytest.mark.parametrize("bad", [0, 2, 4], ids=["first", "middle", "last"])
@pytest.mark.parametrize("found_by", ["scan", "decoder"])
def test_id01_steps_are_equal_on_all_ranks_and_the_bad_sample_has_no_loss_and_is_named(
    found_by: str, bad: int, shard_of: Callable[..., TarSource], image_bytes: Make
) -> None:
    pytest.importorskip("torch")
    from balancer.cost_model import CostModel, StageCost, StageTerms
    from balancer.layout import Layout
    from balancer.plan_loader import PlanLoader, SampleReader
    from balancer.plan_sequence import PlanSequence

    keep = 100 if found_by == "scan" else 700  # the header of this JPEG ends between them
    pictures = [image_bytes(300, 200, seed=n, format="JPEG") for n in range(5)]
    pictures[bad] = pictures[bad][:keep]
    source = shard_of([[("jpg", picture)] for picture in pictures])
    terms = StageTerms(per_patch_ns=1.0, per_token_ns=1.0)
    ranks = []
    for dp_rank in range(2):
        index = scan_source(source, SMALL)
        plans = PlanSequence(
            index=index,
            ids=eligible_ids(index, Capacities(tokens=CAP)).ids,
            global_batch_size=2,
            layout=Layout(dp_size=2),
            cost_model=CostModel(stages=(StageCost(forward=terms, backward=terms),) * 2),
            capacities=Capacities(tokens=CAP),
        )
        steps = range(-(-len(plans.ids) // 2))
        ranks.append(
            list(
                PlanLoader(
                    SampleReader(source=source, index=index, estimator=SMALL), plans, dp_rank=dp_rank, steps=steps
                )
            )
        )
    assert [s.plan.digest for s in ranks[0]] == [s.plan.digest for s in ranks[1]]
    assert [len(s.microbatches) for s in ranks[0]] == [len(s.microbatches) for s in ranks[1]]
    batches = [batch for steps in ranks for s in steps for batch in s.microbatches if batch is not None]
    replaced = [item for batch in batches for item in batch.replaced]
    trained = {int(i) for batch in batches if batch.weight_sum for i in batch.sample_ids}
    assert trained >= {0, 1, 2, 3, 4} - {bad}
    if found_by == "scan":
        assert (len(ranks[0]), replaced, [entry.sample_id for entry in index.bad]) == (2, [], [bad])
        assert index.bad[0].place.endswith(f"cases.tar, key {bad}, member {bad}.0.jpg")
        return
    assert len(ranks[0]) == 3
    assert [item.sample_id for item in replaced] == [bad]
    assert replaced[0].reason.startswith("truncated")
    assert f"cases.tar, key {bad}, member {bad}.0.jpg" in replaced[0].reason
    for batch in batches:
        for i, (start, end) in zip(
            batch.sample_ids.tolist(), itertools.pairwise(batch.cu_seqlens.tolist()), strict=False
        ):
            learns = bool((batch.labels[start:end] != -100).any())
            assert learns == bool(batch.loss_weights[start:end].sum()) == (i != bad)


# --- ID-02: bombs


def png_of(width: int, height: int) -> bytes:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    size = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", size) + chunk(b"IDAT", zlib.compress(bytes(99))) + chunk(b"IEND", b"")


def bombs() -> dict[str, bytes]:
    """Pictures of a few hundred bytes whose headers claim 20,000 x 20,000 px."""
    small = {}
    for kind in ("BMP", "GIF", "JPEG", "TIFF"):
        out = io.BytesIO()
        Image.new("RGB", (16, 16), (9, 99, 200)).save(out, kind)
        small[kind] = bytearray(out.getvalue())
    struct.pack_into("<ii", small["BMP"], 18, 20_000, 20_000)
    struct.pack_into("<HH", small["GIF"], 6, 20_000, 20_000)
    struct.pack_into(">HH", small["JPEG"], small["JPEG"].index(b"\xff\xc0") + 5, 20_000, 20_000)
    entries = struct.unpack_from("<I", small["TIFF"], 4)[0] + 2
    for at in range(entries, len(small["TIFF"]) - 12, 12):
        tag, kind_of, count = struct.unpack_from("<HHI", small["TIFF"], at)
        if tag in (256, 257) and count == 1:
            struct.pack_into("<H" if kind_of == 3 else "<I", small["TIFF"], at + 8, 20_000)
    return {"png": png_of(20_000, 20_000)} | {kind.lower(): bytes(data) for kind, data in small.items()}


@pytest.mark.parametrize("kind", ["png", "bmp", "gif", "jpeg", "tiff"])
def test_id02_a_bomb_is_named_by_the_scan_and_decoded_neither_there_nor_later(
    kind: str, shard_of: Callable[..., TarSource], image_bytes: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    bomb = bombs()[kind]
    source = shard_of([[(kind, bomb)], [("png", image_bytes(60, 40))]])
    Image.init()  # some of Pillow's plugins make a picture when they are loaded
    for owner in (Image.Image, ImageFile.ImageFile):
        monkeypatch.setattr(owner, "load", lambda self: pytest.fail("decoded"))
    index = scan_source(source, SMALL)
    (found,) = index.bad
    assert (found.sample_id, found.reason) == (0, "too_large")
    assert found.place == f"shard {source.shards[0]}, key 0, member 0.0.{kind}"
    assert found.place in found.message
    assert "20000x20000 px" in found.message
    # A file that was sound when it was scanned, and is a bomb now.
    sample = load_sample(Swapped(source, {(1, 0): bomb}), index, 1, SMALL)
    assert sample.replaced is not None
    assert sample.replaced.startswith("too_large: ")
    assert sample.replaced.endswith("key 1, member 1.0.png")
    assert not sample.patches.any()


def test_id02_the_ceiling_of_the_config_holds_in_scan_and_decoder(
    shard_of: Callable[..., TarSource], image_bytes: Make
) -> None:
    source = shard_of([[("png", image_bytes(60, 40))], [("png", image_bytes(90, 40))]])
    limits = ProbeLimits(max_pixels=60 * 40)
    index = scan_source(source, SMALL, limits=limits)
    assert [(bad.sample_id, bad.reason) for bad in index.bad] == [(1, "too_large")]
    larger = Swapped(source, {(0, 0): image_bytes(61, 40)})
    assert "max_pixels=2400" in str(load_sample(larger, index, 0, SMALL, limits=limits).replaced)
    assert load_sample(larger, index, 0, SMALL).replaced is None


def test_id02_ceilings_on_what_a_video_claims_hold_in_the_decoder(video_bytes: Make) -> None:
    data = bytearray(video_bytes(64, 48, 4))
    counts = SMALL.video(64, 48, 4, 8.0, 0.5)
    item = planned_item(MediaKind.VIDEO, counts, frame_indices=SMALL.frame_indices(4, 8.0, 0.5))
    struct.pack_into(">II", data, data.index(b"stsz") + 8, 1, 2_000_000)  # two million samples of one byte
    with pytest.raises(MediaError, match="key 7") as caught:
        decode_video(bytes(data), item, limits=ProbeLimits(max_frames=100), place="key 7")
    assert caught.value.reason is Reason.TOO_LARGE


# --- VD-01, VD-02: headers that claim too much, or nothing


def claiming_one_more(data: bytes, *, fps: int = 8) -> bytes:
    """An MP4 whose index, at the end of the file, lists one frame more than there is: bytes that are no picture."""
    out = bytearray(data)

    def add(kind: bytes, offset: int, amount: int) -> None:
        at = out.index(kind) + offset
        struct.pack_into(">I", out, at, struct.unpack_from(">I", out, at)[0] + amount)

    stsz = out.index(b"stsz")
    end = stsz - 4 + struct.unpack_from(">I", out, stsz - 4)[0]
    add(b"stsz", 12, 1)
    add(b"stts", 12, 1)  # of the first run of equal durations
    add(b"stsc", 16, 1)  # of the first chunk
    add(b"elst", 12, 1000 // fps)
    for kind in (b"moov", b"trak", b"mdia", b"minf", b"stbl", b"stsz"):
        add(kind, -4, 4)
    return bytes(out[:end] + struct.pack(">I", 90) + out[end:])


def test_vd01_a_header_that_claims_a_frame_too_many_is_planned_and_clamped_by_one(
    shard_of: Callable[..., TarSource], video_bytes: Make
) -> None:
    sound, edited = video_bytes(64, 48, 15), claiming_one_more(video_bytes(64, 48, 15))
    assert (probe_video(sound).num_frames, probe_video(edited).num_frames) == (15, 16)
    estimator = every_frame(2)
    source = shard_of([[("mp4", edited)]])
    index = scan_source(source, estimator)
    assert index.items["source_frames"].tolist() == [16]
    sample = load_sample(source, index, 0, estimator)
    assert sample.replaced is None
    assert sample.patches.shape == (index.items["patches"][0], 1176)
    assert sample.grids.tolist() == [[8, 4, 4]]
    assert (sample.num_conformed, sample.conformed[0].frames_repeated) == (1, 1)
    last = sample.patches.reshape(8, -1, 3, 2, 196)[-1]
    assert np.array_equal(last[:, :, 0], last[:, :, 1])  # the last good frame, twice
    assert (sample.labels != -100).any()


def encoded(num_frames: int, container: str, codec: str, options: dict[str, str]) -> bytes:
    """A clip of 64 x 64 px and 25 frames per second."""
    if codec not in av.codecs_available:
        pytest.skip(f"this FFmpeg has no encoder {codec}")
    out = io.BytesIO()
    with av.open(out, "w", format=container, options=options) as file:
        stream = file.add_stream(codec, rate=25)
        stream.width, stream.height, stream.pix_fmt = 64, 64, "yuv420p"
        for number in range(num_frames):
            grey = np.full((64, 64, 3), 5 * number % 256, dtype=np.uint8)
            file.mux(stream.encode(av.VideoFrame.from_ndarray(grey, format="rgb24")))
        file.mux(stream.encode(None))
    return out.getvalue()


UNCOUNTED = [
    ("matroska", "mpeg4", {}),
    ("webm", "libvpx", {}),
    ("flv", "flv", {}),
    ("flv", "libx264", {}),  # B-frames: it starts late
    ("mpegts", "mpeg2video", {}),
    ("mp4", "mpeg4", {"movflags": "frag_keyframe+empty_moov"}),
]


@pytest.mark.parametrize(("container", "codec", "options"), UNCOUNTED, ids=[row[0] for row in UNCOUNTED])
def test_vd02_a_count_that_no_header_has_is_estimated_and_flagged_or_counted_into_the_index(
    container: str, codec: str, options: dict[str, str], shard_of: Callable[..., TarSource]
) -> None:
    data = encoded(37, container, codec, options)
    rough = probe_video(data, count_packets=False)
    assert abs(rough.num_frames - 37) <= 1
    assert rough.confidence == "estimated" or (rough.confidence, rough.num_frames) == ("counted", 37)
    source = shard_of([[("mp4", data)]])
    index = scan_source(source, SMALL)
    assert index.items["source_frames"].tolist() == [37]
    assert index.samples["confidence"].tolist() == [Confidence.COUNTED]
    sample = load_sample(source, index, 0, SMALL)
    assert (sample.replaced, sample.num_conformed) == (None, 0)


# --- VD-04: rotation


def with_pyav(data: bytes) -> tuple[int, ...]:
    with av.open(io.BytesIO(data)) as file:
        frame = next(file.decode(video=0))
    return np.rot90(frame.to_ndarray(format="rgb24"), round(frame.rotation / 90)).shape[:2]


def with_decord(data: bytes) -> tuple[int, ...]:
    decord = pytest.importorskip("decord")
    return tuple(decord.VideoReader(io.BytesIO(data), num_threads=1)[0].shape[:2])


def with_torchcodec(data: bytes) -> tuple[int, ...]:
    decoders = pytest.importorskip("torchcodec.decoders")
    return tuple(decoders.VideoDecoder(data)[0].shape[-2:])


def with_ours(data: bytes) -> tuple[int, ...]:
    """The probed size, where the decoder has nothing to conform to it."""
    meta = probe_video(data)
    counts = every_frame(2).video(meta.width_px, meta.height_px, meta.num_frames, meta.fps, meta.duration_s)
    seen = {"width_px": meta.width_px, "height_px": meta.height_px}
    assert not decode_video(data, planned_item(MediaKind.VIDEO, counts, **seen))[1]
    return meta.height_px, meta.width_px


BACKENDS = [with_ours, with_pyav, with_decord, with_torchcodec]


@pytest.fixture(scope="module")
def phone_clip(video_bytes: Make) -> bytes:
    """1440 x 1080 px as stored."""
    return video_bytes(1440, 1080, 2)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("degrees", [0, 90, -90, 180])
def test_vd04_the_probed_size_of_a_turned_clip_is_the_decoded_one(
    degrees: int, backend: Callable[[bytes], tuple[int, ...]], phone_clip: bytes
) -> None:
    a, b, c, d = {0: (1, 0, 0, 1), 90: (0, -1, 1, 0), -90: (0, 1, -1, 0), 180: (-1, 0, 0, -1)}[degrees]
    at = phone_clip.index(b"tkhd") + 44
    matrix = struct.pack(">9i", a << 16, b << 16, 0, c << 16, d << 16, 0, 0, 0, 1 << 30)
    data = phone_clip[:at] + matrix + phone_clip[at + 36 :]
    meta = probe_video(data)
    assert (meta.height_px, meta.width_px) == ((1440, 1080) if degrees in (90, -90) else (1080, 1440))
    assert backend(data) == (meta.height_px, meta.width_px)


# --- VD-05, VD-07: many opens, in workers that stop early. In processes of their own, which no other test has touched.


SCRIPT = """
import gc, io, json, multiprocessing, os, sys
from pathlib import Path
import numpy as np
from dataloaders.counts import MediaKind
from dataloaders.decode import PlannedItem, decode_video
from dataloaders.probe.video import open_video

DATA = Path(sys.argv[2]).read_bytes()
ITEM = PlannedItem(kind=MediaKind.VIDEO, grid=(1, 2, 2), height_px=28, width_px=28, frame_indices=np.array([0, 2]))

def decode(number):
    patches, report = decode_video(DATA, ITEM)
    return os.getpid(), len(patches), bool(report)

def resident():
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def growth(opens, leak):
    kept = []
    for _ in range(100):
        decode(0)
    before, handles = resident(), len(os.listdir("/proc/self/fd"))
    for number in range(opens):
        decode(number)
        if leak:
            opened = open_video(io.BytesIO(DATA), len(DATA), place="")
            container, stream = opened.__enter__()
            kept.append((opened, next(container.decode(stream))))
    return resident() - before, len(os.listdir("/proc/self/fd")) - handles

def early_stops(method):
    # The parent holds a reader that has begun: what workers inherit must not matter to them.
    with open_video(io.BytesIO(DATA), len(DATA), place="") as (container, stream):
        next(container.decode(stream))
        with multiprocessing.get_context(method).Pool(4) as pool:
            return pool.map_async(decode, range(200), chunksize=5).get(timeout=60)

if __name__ == "__main__":
    mode, argument = sys.argv[1], json.loads(sys.argv[3])
    json.dump([growth(*each) for each in argument] if mode == "growth" else early_stops(argument), sys.stdout)
"""


@pytest.fixture
def in_process(tmp_path: Path) -> Callable[..., Any]:
    """`in_process(clip, mode, argument)`: what SCRIPT answers."""

    def run(clip: bytes, mode: str, argument: object) -> Any:
        (tmp_path / "script.py").write_text(SCRIPT)
        (tmp_path / "clip").write_bytes(clip)
        command = [sys.executable, str(tmp_path / "script.py"), mode, str(tmp_path / "clip"), json.dumps(argument)]
        path = os.pathsep.join([str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")])
        environment = {**os.environ, "PYTHONPATH": path}
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, timeout=90)
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout)

    return run


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs /proc")
def test_vd05_two_thousand_opens_keep_memory_level_and_a_leak_would_show(in_process: Callable[..., Any]) -> None:
    clip = encoded(4, "mp4", "mpeg4", {})
    (grown, handles), (leaked, _) = in_process(clip, "growth", [[2000, False], [200, True]])
    assert grown < 50 * 1024**2
    assert handles == 0
    assert leaked * 10 > 50 * 1024**2  # 200 readers that stay open grow by more than 2,000 may


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_vd07_two_hundred_early_stops_in_four_workers_end(method: str, in_process: Callable[..., Any]) -> None:
    # Delayed output and B-frames: a decoder with frame threads would still hold frames when it is left.
    codec = "libx264" if "libx264" in av.codecs_available else "mpeg4"
    done = in_process(encoded(60, "mp4", codec, {}), "early", method)
    assert len(done) == 200
    assert {(rows, conformed) for _, rows, conformed in done} == {(4, False)}
    assert 1 < len({pid for pid, _, _ in done}) <= 4


# --- VD-08: slow storage


class Slow:
    """A `ByteReader` that takes 20 ms a read."""

    def __init__(self, data: bytes) -> None:
        self.data, self.size, self.reads = data, len(data), 0

    def read(self, offset: int, size: int) -> bytes:
        self.reads += 1
        time.sleep(0.02)
        return self.data[offset : offset + size]


@pytest.mark.parametrize(("container", "codec", "options"), UNCOUNTED[:4], ids=[row[0] for row in UNCOUNTED[:4]])
def test_vd08_opening_a_video_on_slow_storage_costs_the_budget_and_one_read(
    container: str, codec: str, options: dict[str, str]
) -> None:
    data = encoded(25, container, codec, options)
    data += bytes(40 * 16_384)  # much to look through
    slow = Slow(data)
    with pytest.raises(MediaError, match=r"max_probe_s=0\.1") as caught:
        probe_video(slow, limits=ProbeLimits(max_probe_s=0.1), place="key 3")
    assert caught.value.reason is Reason.TIMEOUT
    assert "key 3" in str(caught.value)
    assert slow.reads <= 12


def test_vd08_many_boxes_on_slow_storage_cost_the_budget_and_one_read(video_bytes: Make) -> None:
    data = video_bytes(64, 48, 4)
    end = struct.unpack_from(">I", data)[0]
    free = (struct.pack(">I4s", 20_000, b"free") + bytes(19_992)) * 40
    slow = Slow(data[:end] + free + data[end:])
    with pytest.raises(MediaError, match=r"max_probe_s=0\.1"):
        probe_video(slow, limits=ProbeLimits(max_probe_s=0.1))
    assert slow.reads <= 12


def test_vd08_an_image_header_takes_few_reads_whatever_the_storage(image_bytes: Make) -> None:
    slow = Slow(image_bytes(300, 200))
    assert probe_image(slow).width_px == 300
    assert slow.reads <= 2
