"""Loading a sample: the planned shape always wins, and a stand-in learns nothing."""

import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dataloaders.chat import IGNORED_LABEL
from dataloaders.counts import ItemCounts, MediaKind
from dataloaders.decode import PixelConfig, decode_image, decode_video
from dataloaders.encoder import ByteEncoder
from dataloaders.errors import DataError, IndexFormatError, SourceError
from dataloaders.estimators import Qwen25VLConfig, Qwen25VLEstimator, estimator_from_config
from dataloaders.index import Confidence, CostIndex, write_index
from dataloaders.probe.reader import ByteReader
from dataloaders.record import Record
from dataloaders.rough_encoder import RoughEncoder
from dataloaders.sample import LoadedSample, check_loadable, load_sample, planned_items, stand_in_sample
from dataloaders.scan import scan_source
from dataloaders.source import SampleSource
from dataloaders.tar_source import TarSource
from dataloaders.tokenizer import Special

ESTIMATOR = Qwen25VLEstimator(
    Qwen25VLConfig(min_pixels=4 * 784, max_pixels=64 * 784, video_min_pixels=4 * 784, video_max_pixels=16 * 784)
)
PATCH_DIM = 1176
Make = Callable[..., bytes]


@pytest.fixture(scope="module")
def source(small_shard: Path) -> TarSource:
    return TarSource(str(small_shard))


@pytest.fixture(scope="module")
def index(source: TarSource) -> CostIndex:
    return scan_source(source, ESTIMATOR)


class LyingSource:
    """A source whose media changed after the scan: `media[(i, j)]` replaces the bytes that decoding gets."""

    def __init__(self, source: TarSource, media: dict[tuple[int, int], bytes]) -> None:
        self.source, self.media, self.fingerprint = source, media, source.fingerprint

    def __len__(self) -> int:
        return len(self.source)

    def record(self, i: int) -> Record:
        return self.source.record(i)

    def media_reader(self, i: int, j: int) -> ByteReader:
        return self.source.media_reader(i, j)

    def media_bytes(self, i: int, j: int) -> bytes:
        return self.media[(i, j)] if (i, j) in self.media else self.source.media_bytes(i, j)

    def place(self, i: int) -> str:
        return self.source.place(i)


def _assert_planned_shape(sample: LoadedSample, index: CostIndex) -> None:
    row = {name: int(column[sample.sample_id]) for name, column in index.samples.items()}
    assert sample.tokens.shape == sample.labels.shape == (row["llm_tokens"],)
    assert sample.position_ids.shape == (3, row["llm_tokens"])
    assert sample.visual_index.shape == (row["visual_tokens"],)
    assert sample.patches.shape == (row["patches"], PATCH_DIM)
    assert sample.grids.shape == (row["num_items"], 3)
    assert {sample.tokens.dtype, sample.labels.dtype} == {np.dtype(np.int32)}
    assert {sample.position_ids.dtype, sample.visual_index.dtype, sample.grids.dtype} == {np.dtype(np.int64)}
    assert sample.patches.dtype == np.float32
    if sample.replaced is None:
        assert (sample.labels != IGNORED_LABEL).sum() == row["label_tokens"]


def test_both_sources_are_sample_sources(source: TarSource) -> None:
    assert isinstance(source, SampleSource)
    assert isinstance(LyingSource(source, {}), SampleSource)


def test_every_sample_has_exactly_the_planned_shape(source: TarSource, index: CostIndex) -> None:
    for i in range(len(source)):
        sample = load_sample(source, index, i, ESTIMATOR)
        _assert_planned_shape(sample, index)
        assert (sample.sample_id, sample.place, sample.replaced) == (i, source.place(i), None)
        assert sample.num_conformed == 0
        assert len(sample.conformed) == len(sample.grids)


def test_ce05_placeholders_equal_features_for_every_sample(source: TarSource, index: CostIndex) -> None:
    for i in range(len(source)):
        sample = load_sample(source, index, i, ESTIMATOR)
        features = len(sample.patches) // ESTIMATOR.merge**2
        assert np.isin(sample.tokens, [Special.IMAGE_PAD, Special.VIDEO_PAD]).sum() == features
        assert len(sample.visual_index) == features == sample.grids.prod(axis=1).sum() // 4


def test_ce10_each_medium_keeps_its_own_rows(source: TarSource, index: CostIndex) -> None:
    # Two kinds, interleaved: rows are split by cumulative counts and each part is that medium decoded alone.
    sample, items, pixels = load_sample(source, index, 5, ESTIMATOR), planned_items(index, 5, ESTIMATOR), PixelConfig()
    video, image = np.split(sample.patches, [items[0].num_patches])
    assert np.array_equal(video, decode_video(source.media_bytes(5, 0), items[0], pixels=pixels)[0])
    assert np.array_equal(image, decode_image(source.media_bytes(5, 1), items[1], pixels=pixels))
    assert sample.grids.tolist() == [list(item.grid) for item in items]
    three = load_sample(source, index, 2, ESTIMATOR)
    parts = np.split(three.patches, np.cumsum(three.grids.prod(axis=1))[:-1])
    for j, (part, item) in enumerate(zip(parts, planned_items(index, 2, ESTIMATOR), strict=True)):
        assert np.array_equal(part, decode_image(source.media_bytes(2, j), item))


def test_ce08_two_videos_of_one_sample_have_their_own_frames(
    tmp_path: Path, write_shard: Callable[..., Path], chat_json: Make, video_bytes: Make
) -> None:
    members = [("k.json", chat_json("<video> or <video>", "x"))]
    members += [(f"k.{j}.mp4", video_bytes(64, 64, frames)) for j, frames in enumerate((32, 40))]
    source = TarSource(str(write_shard(tmp_path / "a.tar", members)))
    index = scan_source(source, ESTIMATOR)
    assert index.items["grid_t"].tolist() == [4, 5]
    sample = load_sample(source, index, 0, ESTIMATOR)
    _assert_planned_shape(sample, index)
    assert sample.grids[:, 0].tolist() == [4, 5]
    assert (sample.tokens == Special.VIDEO_PAD).sum() == index.items["visual_tokens"].sum()


def test_positions_of_a_video_follow_its_sampled_rate(source: TarSource, index: CostIndex) -> None:
    sample = load_sample(source, index, 3, ESTIMATOR)
    # 16 frames at 8 per second, 4 sampled: two slices, one second apart, two time indices per second.
    times = sample.position_ids[0, sample.visual_index]
    assert sorted(set((times - times[0]).tolist())) == [0, 2]


def test_the_time_scale_of_the_model_s_config_is_used(source: TarSource, index: CostIndex) -> None:
    faster = Qwen25VLEstimator(replace(ESTIMATOR.config, tokens_per_second=5))
    sample = load_sample(source, index, 3, faster)
    assert np.ptp(sample.position_ids[0, sample.visual_index]) == 5


def test_patches_are_written_to_the_caller_s_memory_and_nowhere_else(source: TarSource, index: CostIndex) -> None:
    made: list[np.ndarray] = []

    def allocate(num_rows: int, width: int) -> np.ndarray:
        made.append(np.full((num_rows, width), np.nan, dtype=np.float32))
        return made[-1]

    for i in range(len(source)):
        own = load_sample(source, index, i, ESTIMATOR)
        sample = load_sample(source, index, i, ESTIMATOR, allocate=allocate)
        assert sample.patches is made[-1]
        assert sample.patches.tobytes() == own.patches.tobytes()
        zero = stand_in_sample(index, i, ESTIMATOR, place="", reason="timeout: ", allocate=allocate)
        assert zero.patches is made[-1]
        assert zero.patches.shape == own.patches.shape
        assert not zero.patches.any()
    assert len(made) == 2 * len(source)
    broken = LyingSource(source, {(i, j): b"" for i in range(len(source)) for j in range(9)})
    sample = load_sample(broken, index, 1, ESTIMATOR, allocate=allocate)
    assert sample.replaced is not None
    assert sample.patches is made[-1]
    assert not sample.patches.any(), "nothing of what the memory held before is trained on"


def test_a_text_sample_has_no_patches_but_all_shapes(source: TarSource, index: CostIndex) -> None:
    sample = load_sample(source, index, 0, ESTIMATOR)
    assert sample.patches.shape == (0, PATCH_DIM)
    assert sample.grids.shape == (0, 3)
    assert sample.visual_index.shape == (0,)
    assert (sample.position_ids == np.arange(len(sample.tokens))).all()


def test_without_pixels_no_medium_is_read(source: TarSource, index: CostIndex, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = load_sample(source, index, 5, ESTIMATOR)

    def refuse(*_: object) -> bytes:
        raise AssertionError("media were read")

    monkeypatch.setattr(TarSource, "media_bytes", refuse)
    light = load_sample(source, index, 5, ESTIMATOR, with_pixels=False)
    assert light.patches.shape == (0, PATCH_DIM)
    for name in ("tokens", "labels", "position_ids", "visual_index", "grids"):
        assert np.array_equal(getattr(light, name), getattr(whole, name))


@pytest.mark.parametrize(("i", "j"), [(1, 0), (2, 0), (2, 1), (2, 2), (3, 0), (5, 0), (5, 1)])
@pytest.mark.parametrize("data", [b"", b"no medium", b"\x89PNG\r\n\x1a\n", b"\0\0\0\x18ftypisom" + bytes(40)])
def test_id01_media_that_do_not_decode_become_a_zero_loss_stand_in_of_the_planned_shape(
    source: TarSource, index: CostIndex, i: int, j: int, data: bytes
) -> None:
    good = load_sample(source, index, i, ESTIMATOR)
    sample = load_sample(LyingSource(source, {(i, j): data}), index, i, ESTIMATOR)
    _assert_planned_shape(sample, index)
    assert (sample.labels == IGNORED_LABEL).all()
    assert not sample.patches.any()
    assert sample.replaced is not None
    assert source.record(i).media[j].member in sample.replaced
    assert sample.replaced.partition(":")[0] in {"empty_file", "unknown_format", "truncated", "corrupt"}
    for name in ("tokens", "position_ids", "visual_index", "grids"):
        assert np.array_equal(getattr(sample, name), getattr(good, name))


@pytest.mark.parametrize("bad", [0, 2, 4], ids=["first", "middle", "last"])
def test_id01_a_bad_sample_anywhere_keeps_the_others_and_is_named(
    bad: int, tmp_path: Path, write_shard: Callable[..., Path], chat_json: Make, image_bytes: Make
) -> None:
    # The header is whole, so the scan plans it; only decoding finds that the data is cut.
    members = []
    for n in range(5):
        picture = image_bytes(300, 200, seed=n, format="JPEG")
        members += [(f"{n}.json", chat_json("<image>", "yes")), (f"{n}.jpg", picture[: 700 if n == bad else None])]
    source = TarSource(str(write_shard(tmp_path / "a.tar", members)))
    index = scan_source(source, ESTIMATOR)
    assert index.bad == []
    samples = [load_sample(source, index, n, ESTIMATOR) for n in range(5)]
    assert [sample.replaced is not None for sample in samples] == [n == bad for n in range(5)]
    assert len({sample.patches.shape for sample in samples}) == 1
    assert "truncated" in str(samples[bad].replaced)
    assert f"key {bad}, member {bad}.jpg" in str(samples[bad].replaced)


def test_media_that_changed_are_conformed_to_the_plan_and_reported(
    source: TarSource, index: CostIndex, image_bytes: Make, video_bytes: Make
) -> None:
    larger = load_sample(LyingSource(source, {(1, 0): image_bytes(640, 480)}), index, 1, ESTIMATOR)
    _assert_planned_shape(larger, index)
    assert (larger.replaced, larger.num_conformed) == (None, 1)
    assert larger.conformed[0].resized
    shorter = load_sample(LyingSource(source, {(3, 0): video_bytes(96, 64, 5)}), index, 3, ESTIMATOR)
    _assert_planned_shape(shorter, index)
    assert shorter.conformed[0].frames_repeated > 0
    assert (shorter.labels != IGNORED_LABEL).any()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40, deadline=None)
@given(st.integers(0, 3000), st.binary(min_size=1, max_size=40))
def test_damage_anywhere_never_changes_the_shape(source: TarSource, index: CostIndex, at: int, junk: bytes) -> None:
    for i in (4, 3):
        data = bytearray(source.media_bytes(i, 0))
        data[at % len(data) : at % len(data) + len(junk)] = junk
        _assert_planned_shape(load_sample(LyingSource(source, {(i, 0): bytes(data)}), index, i, ESTIMATOR), index)


def test_a_missing_shard_raises(tmp_path: Path, small_shard: Path) -> None:
    shard = tmp_path / "a.tar"
    shard.write_bytes(small_shard.read_bytes())
    source = TarSource(str(shard))
    index = scan_source(source, ESTIMATOR)
    fresh = pickle.loads(pickle.dumps(source))
    shard.unlink()
    with pytest.raises(FileNotFoundError):
        load_sample(fresh, index, 1, ESTIMATOR)
    shard.write_bytes(b"short")
    with pytest.raises(SourceError, match="has changed"):
        load_sample(fresh, index, 1, ESTIMATOR)


def test_an_index_of_another_labelling_or_source_is_refused(
    source: TarSource, index: CostIndex, tmp_path: Path, write_shard: Callable[..., Path], chat_json: Make
) -> None:
    with pytest.raises(
        IndexFormatError, match=r"differs from the index: \(tokens, labels\) are .*Build the index again"
    ):
        load_sample(source, index, 1, ESTIMATOR, train_on="all")
    other = TarSource(str(write_shard(tmp_path / "a.tar", [(f"{n}.json", chat_json("1", "2")) for n in range(6)])))
    with pytest.raises(IndexFormatError, match="0 media where the index has 1"):
        load_sample(other, index, 1, ESTIMATOR)


def test_an_unusable_sample_is_not_loaded(tmp_path: Path, write_shard: Callable[..., Path], chat_json: Make) -> None:
    members = [("1.json", chat_json("<image>", "x")), ("1.png", b"junk")]
    source = TarSource(str(write_shard(tmp_path / "a.tar", members)))
    with pytest.raises(IndexFormatError, match=r"sample 0 is unusable and cannot be loaded at shard .*key 1"):
        load_sample(source, scan_source(source, ESTIMATOR), 0, ESTIMATOR)


def test_a_mapped_index_gives_the_same_samples(source: TarSource, index: CostIndex, tmp_path: Path) -> None:
    mapped = write_index(tmp_path / "index", index)
    for i in range(len(source)):
        one, other = (load_sample(source, table, i, ESTIMATOR) for table in (index, mapped))
        assert np.array_equal(one.tokens, other.tokens)
        assert np.array_equal(one.patches, other.patches)


def test_a_loaded_sample_travels_by_pickle(source: TarSource, index: CostIndex) -> None:
    sample = load_sample(source, index, 5, ESTIMATOR)
    copy = pickle.loads(pickle.dumps(sample))
    assert np.array_equal(copy.patches, sample.patches)
    assert copy.conformed == sample.conformed


def test_a_model_whose_patches_are_not_laid_out_is_costed_but_not_loaded(source: TarSource) -> None:
    tiled = estimator_from_config({"model_type": "internvl"})
    index = scan_source(source, tiled)
    assert index.bad == [] or {bad.reason for bad in index.bad} == {"too_few_frames"}
    assert index.samples["llm_tokens"][1] > 0
    for call in (lambda: load_sample(source, index, 1, tiled), lambda: check_loadable(tiled)):
        with pytest.raises(DataError, match=r"can be costed but not loaded: .*InternVL.*Train with a model"):
            call()


class Timed(Qwen25VLEstimator):
    """Writes a token between the visual ones of every video."""

    def video(self, width_px: int, height_px: int, num_frames: int, fps: float, duration_s: float) -> ItemCounts:
        counts = super().video(width_px, height_px, num_frames, fps, duration_s)
        return replace(counts, llm_tokens=counts.llm_tokens + 1)


def test_positions_and_embeddings_of_a_medium_are_told_apart(source: TarSource) -> None:
    index = scan_source(source, Timed(ESTIMATOR.config))
    videos = index.items["kind"] == MediaKind.VIDEO
    assert (index.items["llm_tokens"] - index.items["visual_tokens"]).tolist() == videos.astype(int).tolist()
    plain = scan_source(source, ESTIMATOR)
    assert (index.samples["llm_tokens"] - plain.samples["llm_tokens"]).tolist() == [0, 0, 0, 1, 0, 1]
    for name in ("text_tokens", "label_tokens", "visual_tokens"):
        assert np.array_equal(index.samples[name], plain.samples[name])
    assert index.item_tokens(3) == [int(index.items["llm_tokens"][index.item_rows(3)[0]])]
    check_loadable(ESTIMATOR, plain)
    with pytest.raises(DataError, match="its processor writes other tokens between the visual ones"):
        check_loadable(ESTIMATOR, index)


def test_an_encoder_takes_the_place_of_train_on(source: TarSource) -> None:
    encoder = ByteEncoder(train_on="all")
    index = scan_source(source, ESTIMATOR, encoder=encoder)
    assert index.key.train_on == "all"
    sample = load_sample(source, index, 1, ESTIMATOR, encoder=encoder)
    _assert_planned_shape(sample, index)
    assert np.array_equal(sample.labels, load_sample(source, index, 1, ESTIMATOR, train_on="all").labels)


def test_estimated_text_is_marked_and_not_trained_on(source: TarSource) -> None:
    index = scan_source(source, ESTIMATOR, encoder=RoughEncoder())
    assert (index.samples["confidence"] == Confidence.ESTIMATED).all()
    with pytest.raises(DataError, match="an encoder that estimates has no tokens to train on"):
        load_sample(source, index, 0, ESTIMATOR, encoder=RoughEncoder())


# --- stand-ins without the data


@given(i=st.integers(0, 5), with_pixels=st.booleans())
def test_a_stand_in_has_the_shape_of_the_sample_and_teaches_nothing(
    source: TarSource, index: CostIndex, i: int, with_pixels: bool
) -> None:
    real = load_sample(source, index, i, ESTIMATOR, with_pixels=with_pixels)
    sample = stand_in_sample(
        index, i, ESTIMATOR, place=source.place(i), reason="timeout: too slow", with_pixels=with_pixels
    )
    for name in ("tokens", "labels", "position_ids", "visual_index", "patches", "grids"):
        one, other = getattr(sample, name), getattr(real, name)
        assert (one.shape, one.dtype) == (other.shape, other.dtype), name
    assert np.array_equal(sample.grids, real.grids)
    assert (sample.labels == IGNORED_LABEL).all()
    assert not sample.patches.any()
    assert len(sample.visual_index) * ESTIMATOR.merge**2 == sample.grids.prod(axis=1).sum()
    assert len(np.unique(sample.visual_index)) == len(sample.visual_index)
    assert (sample.visual_index < len(sample.tokens)).all()
    assert (sample.sample_id, sample.place, sample.replaced) == (i, source.place(i), "timeout: too slow")
    assert sample.num_conformed == 0


def test_the_decoder_of_videos_is_the_caller_s_choice(source: TarSource, index: CostIndex) -> None:
    named = load_sample(source, index, 3, ESTIMATOR, video_decoder="pyav")
    assert named.patches.shape == load_sample(source, index, 3, ESTIMATOR).patches.shape
    with pytest.raises(DataError, match="slides"):
        load_sample(source, index, 3, ESTIMATOR, video_decoder="slides")
