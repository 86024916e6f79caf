"""Views on a source: subsets, and texts with the media of others."""

import pickle
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dataloaders.counts import MediaKind
from dataloaders.errors import DataError
from dataloaders.estimators import Qwen25VLEstimator
from dataloaders.record import MediaPart, MediaRef, Record, TextPart, Turn
from dataloaders.record_parser import RecordLimits
from dataloaders.sample import load_sample
from dataloaders.scan import scan_source
from dataloaders.shuffled import LeftOut, ShuffledMediaSource, SubsetSource
from dataloaders.source import SampleSource, prefetch
from dataloaders.tar_source import MemberReader, TarSource

IMAGE, VIDEO = MediaKind.IMAGE, MediaKind.VIDEO


class FakeSource:
    """Samples with media of the given kinds; medium j of sample i holds the bytes `i.j`."""

    fingerprint = "fake"

    def __init__(self, signatures: list[tuple[MediaKind, ...]]) -> None:
        self.signatures = signatures

    def __len__(self) -> int:
        return len(self.signatures)

    def record(self, i: int) -> Record:
        kinds = self.signatures[i]
        media = tuple(MediaRef(kind=kind, member=f"{i}.{j}", size_bytes=3) for j, kind in enumerate(kinds))
        parts: tuple[TextPart | MediaPart, ...] = (*(MediaPart(j) for j in range(len(kinds))), TextPart(f"text {i}"))
        return Record(shard="fake", key=str(i), turns=(Turn(role="user", parts=parts),), media=media)

    def media_reader(self, i: int, j: int) -> MemberReader:
        raise NotImplementedError

    def media_bytes(self, i: int, j: int) -> bytes:
        return f"{i}.{j}".encode()

    def place(self, i: int) -> str:
        return f"fake {i}"


class TellingSource(FakeSource):
    """Keeps what it was asked to fetch ahead, and knows groups and limits."""

    def __init__(self, signatures: list[tuple[MediaKind, ...]]) -> None:
        super().__init__(signatures)
        self.asked: list[tuple[list[int], bool]] = []
        self.groups = np.arange(len(signatures)) // 2
        self.record_limits = RecordLimits(max_bytes=77)

    def prefetch(self, ids: Sequence[int], *, media: bool = True) -> None:
        self.asked.append((list(ids), media))


def test_hints_groups_and_limits_go_through_a_subset() -> None:
    source = TellingSource([(IMAGE,)] * 6)
    subset = SubsetSource(source, [5, 0, 3])
    prefetch(subset, [2, 0])
    prefetch(subset, [1], media=False)
    assert source.asked == [([3, 5], True), ([0], False)]
    assert subset.groups is not None
    assert subset.groups.tolist() == [2, 0, 1]
    assert (subset.record_limits, SubsetSource(subset, [2]).record_limits) == (source.record_limits,) * 2


def test_hints_of_shuffled_media_name_the_texts_and_the_donors() -> None:
    source = TellingSource([(IMAGE,), (), (IMAGE,), (IMAGE,)])
    shuffled = ShuffledMediaSource(source, 1)
    prefetch(shuffled, [2, 0])
    donors = [shuffled.donors[2], shuffled.donors[0]]
    assert source.asked == [([3, 0], False), (donors, True)]
    assert shuffled.groups is not None
    assert shuffled.groups.tolist() == [0, 1, 1]
    assert shuffled.record_limits == source.record_limits


def test_views_of_a_source_without_groups_and_limits_have_the_usual_ones() -> None:
    for view in (SubsetSource(FakeSource([(IMAGE,)] * 2), [1]), ShuffledMediaSource(FakeSource([(IMAGE,)] * 2), 0)):
        assert view.groups is None
        assert view.record_limits == RecordLimits()
        prefetch(view, [0])


SIGNATURES = st.lists(st.lists(st.sampled_from([IMAGE, VIDEO]), max_size=2).map(tuple), max_size=25)


@given(SIGNATURES, st.integers(0, 2**32))
def test_nobody_keeps_its_own_media_and_every_signature_stays(
    signatures: list[tuple[MediaKind, ...]], seed: int
) -> None:
    source = FakeSource(signatures)
    shuffled = ShuffledMediaSource(source, seed)
    assert sorted(shuffled.donors) == list(shuffled.ids) == sorted(set(shuffled.ids))
    for i, (own, donor) in enumerate(zip(shuffled.ids, shuffled.donors, strict=True)):
        assert own != donor
        assert signatures[own] == signatures[donor] != ()
        record = shuffled.record(i)
        assert record.turns == source.record(own).turns
        assert [ref.member for ref in record.media] == [f"{donor}.{j}" for j in range(len(signatures[own]))]
        assert [shuffled.media_bytes(i, j) for j in range(len(record.media))] == [
            f"{donor}.{j}".encode() for j in range(len(record.media))
        ]


@given(SIGNATURES, st.integers(0, 2**32))
def test_every_sample_is_kept_or_listed_with_a_reason(signatures: list[tuple[MediaKind, ...]], seed: int) -> None:
    shuffled = ShuffledMediaSource(FakeSource(signatures), seed)
    left = {entry.sample_id: entry.reason for entry in shuffled.left_out}
    assert sorted([*shuffled.ids, *left]) == list(range(len(signatures)))
    for i, reason in left.items():
        alone = signatures.count(signatures[i]) == 1
        assert reason == ("no partner with the same media" if signatures[i] and alone else "no media")


def test_the_pairing_is_a_function_of_the_seed() -> None:
    source = FakeSource([(IMAGE,)] * 20)
    one, again, other = (ShuffledMediaSource(source, seed) for seed in (3, 3, 4))
    assert one.donors == again.donors != other.donors
    assert one.fingerprint == again.fingerprint != other.fingerprint
    assert source.fingerprint != one.fingerprint


def test_a_shuffled_shard_can_be_scanned_and_loaded(small_shard: Path) -> None:
    source, estimator = TarSource(str(small_shard)), Qwen25VLEstimator()
    shuffled = ShuffledMediaSource(source, 0)
    assert isinstance(shuffled, SampleSource)
    # Only samples 1 and 4 have the same media: they swap.
    assert (shuffled.ids, shuffled.donors) == ((1, 4), (4, 1))
    assert [entry.sample_id for entry in shuffled.left_out] == [0, 2, 3, 5]
    assert shuffled.left_out[0] == LeftOut(0, "no media")
    index = scan_source(shuffled, estimator)
    assert index.bad == []
    assert index.items["width_px"].tolist() == [200, 120]
    sample = load_sample(shuffled, index, 0, estimator)
    assert sample.replaced is None
    assert shuffled.media_reader(0, 0).size == len(source.media_bytes(4, 0))
    assert "key 001 with the media of" in shuffled.place(0)


def test_records_that_do_not_parse_are_left_out_with_their_error(
    tmp_path: Path, write_shard: Callable[..., Path], chat_json: Callable[..., bytes]
) -> None:
    ask = chat_json("<image>", "x")
    members = [("0.json", b"{"), ("1.json", ask), ("1.png", b"a"), ("2.json", ask), ("2.png", b"b")]
    shuffled = ShuffledMediaSource(TarSource(str(write_shard(tmp_path / "a.tar", members))), 0)
    assert shuffled.ids == (1, 2)
    assert "the JSON does not parse" in shuffled.left_out[0].reason


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.permutations(range(6)), st.integers(0, 6))
def test_a_subset_is_its_samples_in_the_given_order(small_shard: Path, order: list[int], size: int) -> None:
    source = TarSource(str(small_shard))
    subset = SubsetSource(source, order[:size])
    assert len(subset) == size
    for i, original in enumerate(order[:size]):
        assert subset.record(i) == source.record(original)
        assert subset.place(i) == source.place(original)
        for j in range(len(subset.record(i).media)):
            assert subset.media_bytes(i, j) == source.media_bytes(original, j)
            assert subset.media_reader(i, j).size == len(subset.media_bytes(i, j))


def test_subsets_differ_by_their_ids_and_nest() -> None:
    source = FakeSource([(IMAGE,)] * 6)
    assert SubsetSource(source, [1, 2]).fingerprint != SubsetSource(source, [2, 1]).fingerprint
    assert isinstance(SubsetSource(source, []), SampleSource)
    shuffled = ShuffledMediaSource(SubsetSource(source, [5, 3]), 0)
    assert [shuffled.media_bytes(i, 0) for i in range(2)] == [b"3.0", b"5.0"]


@pytest.mark.parametrize(
    ("ids", "message"),
    [([0, 6], r"ids \[6\] are not among the 6"), ([-1], r"ids \[-1\]"), ([1, 1], "an id is listed twice")],
)
def test_ids_that_the_source_does_not_have_once_are_refused(ids: list[int], message: str) -> None:
    with pytest.raises(DataError, match=message):
        SubsetSource(FakeSource([(IMAGE,)] * 6), ids)


def test_views_travel_by_pickle(small_shard: Path) -> None:
    view = ShuffledMediaSource(SubsetSource(TarSource(str(small_shard)), [1, 4]), 0)
    copy = pickle.loads(pickle.dumps(view))
    assert copy.fingerprint == view.fingerprint
    assert copy.media_bytes(0, 0) == view.media_bytes(0, 0)
