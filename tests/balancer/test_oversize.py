"""Samples that are too large: cut or shrunk so that they fit, decoded as they were counted, and never silently."""

import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from balancer.counts import StepCounts
from balancer.errors import OversizeError, PlanError
from balancer.oversize import FittedIndex, OversizePolicy, fit_oversize
from balancer.plan import Capacities
from balancer.sample_reader import SampleReader
from balancer.select import eligible_ids
from dataloaders.adjusted_index import AdjustedIndex
from dataloaders.chat import IGNORED_LABEL
from dataloaders.counts import MediaKind
from dataloaders.encoder import ByteEncoder
from dataloaders.errors import DataError
from dataloaders.estimators import Qwen25VLConfig, Qwen25VLEstimator, estimator_from_config
from dataloaders.index import CostIndex
from dataloaders.rough_encoder import RoughEncoder
from dataloaders.scan import scan_source
from dataloaders.tar_source import TarSource

CELL = 784
CONFIG = Qwen25VLConfig(
    min_pixels=4 * CELL,
    max_pixels=256 * CELL,
    video_min_pixels=4 * CELL,
    video_max_pixels=64 * CELL,
    video_min_frames=4,
)
ESTIMATOR = Qwen25VLEstimator(CONFIG)
ENCODER = ByteEncoder()
NUM_SAMPLES = 7


@pytest.fixture(scope="module")
def source(
    tmp_path_factory: pytest.TempPathFactory,
    image_bytes: Callable[..., bytes],
    video_bytes: Callable[..., bytes],
    write_shard: Callable[..., Path],
    chat_json: Callable[..., bytes],
) -> TarSource:
    """0 fits; 1 long text; 2 large image; 3 two images; 4 video; 5 video and image; 6 image behind a long text."""
    members = [
        ("0.json", chat_json("Short?", "Yes.")),
        ("1.json", chat_json("Tell me.", "word " * 100)),
        ("2.json", chat_json("<image>What?", "A red one. " * 20)),
        ("2.png", image_bytes(448, 336, seed=1)),
        ("3.json", chat_json("<image> or <image>?", "Both.")),
        ("3.0.png", image_bytes(420, 300, seed=2)),
        ("3.1.png", image_bytes(84, 56, seed=3)),
        ("4.json", chat_json("<video>Where?", "Up.")),
        ("4.mp4", video_bytes(168, 112, 48, fps=4)),
        ("5.json", chat_json("<video> <image>?", "There.")),
        ("5.0.mp4", video_bytes(112, 168, 32, fps=4)),
        ("5.1.png", image_bytes(336, 336, seed=4)),
        ("6.json", chat_json("x" * 300 + "<image>", "Fine.")),
        ("6.png", image_bytes(56, 56, seed=5)),
    ]
    return TarSource(str(write_shard(tmp_path_factory.mktemp("large") / "large.tar", members)))


@pytest.fixture(scope="module")
def index(source: TarSource) -> CostIndex:
    return scan_source(source, ESTIMATOR)


def fitted(source: TarSource, index: CostIndex, policy: OversizePolicy, **limits: int) -> FittedIndex:
    capacities = Capacities(**limits)  # type: ignore[arg-type]
    return fit_oversize(index, capacities, policy, source=source, estimator=ESTIMATOR, encoder=ENCODER)


def reader(source: TarSource, index: CostIndex) -> SampleReader:
    return SampleReader(source=source, index=index, estimator=ESTIMATOR)


def assert_loads_as_counted(source: TarSource, index: CostIndex, ids: list[int]) -> None:
    """Law 6: every count of the index is what loading gives."""
    for i in ids:
        sample = reader(source, index).load(i)
        row = {name: int(index.samples[name][i]) for name in ("llm_tokens", "label_tokens", "visual_tokens", "patches")}
        assert sample.replaced is None
        assert not sample.num_conformed
        assert len(sample.tokens) == row["llm_tokens"]
        assert int((sample.labels != IGNORED_LABEL).sum()) == row["label_tokens"]
        assert len(sample.visual_index) == row["visual_tokens"]
        assert sample.patches.shape[0] == row["patches"]
        rows = index.item_rows(i)
        grids = [[int(index.items[f"grid_{axis}"][j]) for axis in "thw"] for j in rows]
        assert sample.grids.tolist() == grids
        stand_in = reader(source, index).stand_in(i, "timeout: test")
        assert stand_in.patches.shape == sample.patches.shape
        assert len(stand_in.tokens) == len(sample.tokens)


def test_the_fixture_has_what_the_tests_need(index: CostIndex) -> None:
    assert len(index) == NUM_SAMPLES
    assert (index.samples["llm_tokens"] > 200).tolist() == [False, True, True, True, True, True, True]


@pytest.mark.parametrize("policy", ["error", "drop"])
def test_policies_that_leave_samples_alone_give_the_very_same_index(
    source: TarSource, index: CostIndex, policy: OversizePolicy
) -> None:
    found = fitted(source, index, policy, tokens=100)
    assert found.index is index
    assert found.report.text() == ""


def test_text_is_cut_behind_the_last_medium_to_exactly_the_capacity(source: TarSource, index: CostIndex) -> None:
    found = fitted(source, index, "truncate_text", tokens=250)
    assert sorted(found.index.adjustments) == [1, 2]  # type: ignore[attr-defined]
    assert found.index.samples["llm_tokens"][[1, 2]].tolist() == [250, 250]
    assert_loads_as_counted(source, found.index, [0, 1, 2, 3])
    for i in (1, 2):
        whole, cut = reader(source, index).load(i), reader(source, found.index).load(i)
        assert cut.tokens.tolist() == whole.tokens[:250].tolist()
        assert cut.labels.tolist() == [*whole.labels[:249].tolist(), IGNORED_LABEL]
        assert cut.position_ids.tolist() == whole.position_ids[:, :250].tolist()
        assert np.array_equal(cut.patches, whole.patches)


def test_a_medium_is_never_cut_and_the_reason_names_what_it_needs(source: TarSource, index: CostIndex) -> None:
    found = fitted(source, index, "truncate_text", tokens=120)
    assert found.why[2] == f"media alone needs {sum(index.item_tokens(2))} tokens > 120"
    assert found.why[6].startswith("media and the text before the last of them need 3")
    eligibility = eligible_ids(found.index, Capacities(tokens=120), "drop", why=found.why)
    reasons = {drop.sample_id: drop.reason for drop in eligibility.dropped}
    assert reasons[2] == f"oversize: {found.why[2]}"
    assert set(reasons) == set(found.why)
    assert sorted([*eligibility.ids.tolist(), *reasons]) == list(range(NUM_SAMPLES))
    with pytest.raises(OversizeError, match=r"sample 2 \(shard .*\): media alone needs \d+ tokens > 120"):
        eligible_ids(found.index, Capacities(tokens=120), why=found.why)


def test_cutting_text_does_not_help_against_too_many_patches(source: TarSource, index: CostIndex) -> None:
    found = fitted(source, index, "truncate_text", tokens=10_000, patches=400)
    assert found.why[2] == f"media alone need {int(index.samples['patches'][2])} patches > 400"
    assert found.index is index


@pytest.mark.parametrize("limits", [{"tokens": 120}, {"tokens": 90}, {"tokens": 150, "patches": 160}])
def test_shrunk_media_fit_and_are_decoded_as_counted(
    source: TarSource, index: CostIndex, limits: dict[str, int]
) -> None:
    found = fitted(source, index, "shrink", **limits)
    adjusted = sorted(found.index.adjustments)  # type: ignore[attr-defined]
    assert {3, 4} <= set(adjusted)
    assert found.why[1] == f"text alone needs {int(index.samples['llm_tokens'][1])} tokens > {limits['tokens']}"
    for i in adjusted:
        assert int(found.index.samples["llm_tokens"][i]) <= limits["tokens"]
        assert int(found.index.samples["patches"][i]) <= limits.get("patches", 10**9)
    assert_loads_as_counted(source, found.index, adjusted)


def test_shrinking_keeps_the_aspect_and_what_is_already_small(source: TarSource, index: CostIndex) -> None:
    found = fitted(source, index, "shrink", tokens=100)
    large, small = found.index.item_rows(3)
    items = found.index.items
    assert int(items["visual_tokens"][large]) < int(index.items["visual_tokens"][large])
    assert int(items["visual_tokens"][small]) == int(index.items["visual_tokens"][small])
    before = index.items["grid_w"][large] / index.items["grid_h"][large]
    after = items["grid_w"][large] / items["grid_h"][large]
    assert after == pytest.approx(before, rel=0.25)


def test_a_shrunk_image_is_what_a_processor_with_smaller_limits_makes_of_it(
    source: TarSource, index: CostIndex
) -> None:
    found = fitted(source, index, "shrink", tokens=300)
    limits = found.index.adjustments[2].limits  # type: ignore[attr-defined]
    other = Qwen25VLEstimator(replace(CONFIG, max_pixels=limits.image_pixels))
    expected = SampleReader(source=source, index=scan_source(source, other), estimator=other).load(2)
    shrunk = reader(source, found.index).load(2)
    assert np.array_equal(shrunk.patches, expected.patches)
    assert np.array_equal(shrunk.position_ids, expected.position_ids)


def test_a_shrunk_video_has_fewer_frames_from_all_over_the_clip_and_its_own_clock(
    source: TarSource, index: CostIndex
) -> None:
    found = fitted(source, index, "shrink", tokens=90)
    limits = found.index.adjustments[4].limits  # type: ignore[attr-defined]
    other = Qwen25VLEstimator(
        replace(CONFIG, video_max_frames=limits.video_frames, video_max_pixels=limits.frame_pixels)
    )
    expected = SampleReader(source=source, index=scan_source(source, other), estimator=other).load(4)
    shrunk = reader(source, found.index).load(4)
    assert shrunk.grids[0, 0] < reader(source, index).load(4).grids[0, 0]
    assert np.array_equal(shrunk.patches, expected.patches)
    assert np.array_equal(shrunk.position_ids, expected.position_ids)


def test_a_shrunk_sample_could_not_be_much_larger(source: TarSource, index: CostIndex) -> None:
    """A search that gave tiny media would fit as well."""
    for capacity in (100, 150, 180):
        found = fitted(source, index, "shrink", tokens=capacity)
        row = found.index.item_rows(3)[0]
        grid_h, grid_w = (int(found.index.items[f"grid_{axis}"][row]) // 2 for axis in "hw")
        tokens = int(found.index.samples["llm_tokens"][3])
        assert tokens + grid_h + grid_w + 1 > capacity, "one more row and column would not fit"


def test_media_that_cannot_get_small_enough_are_named(source: TarSource, index: CostIndex) -> None:
    found = fitted(source, index, "shrink", tokens=40)
    assert found.why[5].startswith("media at their smallest need ")
    assert found.why[5].endswith("patches")
    assert fitted(source, index, "shrink", tokens=500, items=1).why[3] == "2 items > 1, which shrinking does not change"


def test_tokens_in_are_kept_cut_and_dropped(source: TarSource, index: CostIndex) -> None:
    for policy in ("shrink", "truncate_text"):
        found = fitted(source, index, policy, tokens=110)  # type: ignore[arg-type]
        report, before = found.report, index.samples["llm_tokens"].astype(np.int64)
        too_large = before > 110
        assert report.tokens_in == int(before[too_large].sum())
        assert report.tokens_in == report.tokens_kept + report.tokens_cut + report.tokens_dropped
        assert report.num_adjusted + report.num_left == int(too_large.sum())
        dropped = eligible_ids(found.index, Capacities(tokens=110), "drop", why=found.why).dropped
        assert report.tokens_dropped == sum(int(before[drop.sample_id]) for drop in dropped)
        assert report.text().startswith(f"{report.num_adjusted + report.num_left} samples of {report.tokens_in} tokens")


def test_plans_see_the_adjusted_counts(source: TarSource, index: CostIndex) -> None:
    found = fitted(source, index, "shrink", tokens=120)
    counts = StepCounts.from_index(found.index, [4, 0, 3])
    rows = [found.index.item_rows(i) for i in (4, 0, 3)]
    assert counts.llm_tokens.tolist() == [int(found.index.samples["llm_tokens"][i]) for i in (4, 0, 3)]
    assert counts.full_total_sq.tolist() == [
        sum(int(found.index.items["full_total_sq"][j]) for j in own) for own in rows
    ]
    assert counts.full_total_sq[0] < StepCounts.from_index(index, [4]).full_total_sq[0]


def test_what_is_done_is_a_function_of_the_index_and_names_itself(source: TarSource, index: CostIndex) -> None:
    first, again = (fitted(source, index, "shrink", tokens=120).index for _ in range(2))
    other = fitted(source, index, "shrink", tokens=100).index
    assert first.fingerprint == again.fingerprint
    assert len({index.fingerprint, first.fingerprint, other.fingerprint}) == 3


def test_an_adjusted_index_travels_to_workers(source: TarSource, index: CostIndex) -> None:
    found = fitted(source, index, "shrink", tokens=120)
    there = pickle.loads(pickle.dumps(reader(source, found.index)))
    here = reader(source, found.index)
    assert isinstance(there.index, AdjustedIndex)
    assert there.index.fingerprint == found.index.fingerprint
    assert np.array_equal(there.load(4).patches, here.load(4).patches)
    assert (
        there.room_bytes([3, 4]) == here.room_bytes([3, 4]) == int(found.index.samples["patches"][[3, 4]].sum()) * 4704
    )


def test_unusable_samples_are_left_as_they_are(
    tmp_path: Path, write_shard: Callable[..., Path], chat_json: Callable[..., bytes]
) -> None:
    shard = write_shard(tmp_path / "s.tar", [("0.json", b"{"), ("1.json", chat_json("Why?", "because " * 40))])
    source = TarSource(str(shard))
    index = scan_source(source, ESTIMATOR)
    found = fitted(source, index, "truncate_text", tokens=50)
    assert list(found.index.adjustments) == [1]  # type: ignore[attr-defined]
    assert [drop.sample_id for drop in eligible_ids(found.index, Capacities(tokens=50)).dropped] == [0]


def test_what_cannot_be_done_is_refused_with_a_remedy(source: TarSource, index: CostIndex) -> None:
    with pytest.raises(PlanError, match="oversize policy 'squeeze' does not exist; available: error, drop, shrink"):
        fitted(source, index, "squeeze", tokens=100)  # type: ignore[arg-type]
    tiles = estimator_from_config({"image_processor_type": "CLIPImageProcessor", "model_type": "llava"})
    with pytest.raises(DataError, match=r"media cannot be shrunk .*\n?.*'drop' or 'truncate_text'"):
        fit_oversize(index, Capacities(tokens=100), "shrink", source=source, estimator=tiles, encoder=ENCODER)
    rough = fit_oversize(
        index, Capacities(tokens=250), "truncate_text", source=source, estimator=ESTIMATOR, encoder=RoughEncoder()
    )
    assert rough.why[1].endswith("an estimated text cannot be cut")


def test_a_video_whose_frames_are_all_taken_loses_area_instead(source: TarSource) -> None:
    every = Qwen25VLEstimator(replace(CONFIG, sampling="all"))
    index = scan_source(source, every)
    found = fit_oversize(index, Capacities(tokens=250), "shrink", source=source, estimator=every, encoder=ENCODER)
    row = found.index.item_rows(4)[0]
    assert int(index.items["kind"][row]) == MediaKind.VIDEO
    assert int(found.index.items["frames"][row]) == int(index.items["frames"][row])
    assert int(found.index.items["grid_h"][row]) < int(index.items["grid_h"][row])
    assert int(found.index.samples["llm_tokens"][4]) <= 250
