"""Streams: every implementation starts exactly at its cursor, repeats itself, and keeps bad samples in their places."""

import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from dataloaders.errors import DataError, Reason
from dataloaders.raw_sample import BadRecord, RawSample
from dataloaders.record import Record, TextPart, Turn
from dataloaders.stream_source import (
    HFStream,
    IterableStream,
    StreamSource,
    lane_of,
    part_of,
    position_of,
    stream_sample_id,
)
from dataloaders.tar_stream import TarStream

Make = Callable[[], StreamSource]


def chat(text: str, **more: object) -> dict[str, object]:
    return {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": text}], **more}


def texts(stream: StreamSource, lane: int, cursor: int = 0) -> list[tuple[int, str]]:
    """(position, text of the last turn, or the reason of a bad sample)."""
    found = []
    for position, item in stream.read(lane, cursor):
        if isinstance(item, BadRecord):
            found.append((position, f"bad: {item.error.reason}"))
        else:
            part = item.record.turns[-1].parts[-1]
            found.append((position, part.text if isinstance(part, TextPart) else "medium"))
    return found


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory, write_shard: Callable[..., Path]) -> list[str]:
    folder, paths = tmp_path_factory.mktemp("stream"), []
    for number, size in enumerate((4, 1, 3, 2, 5)):
        members = [(f"{k:03}.json", json.dumps(chat(f"{number}-{k}")).encode()) for k in range(size)]
        paths.append(str(write_shard(folder / f"{number}.tar", members)))
    return paths


@pytest.fixture(params=["list", "function", "tar", "hf"])
def make(request: pytest.FixtureRequest, shards: list[str]) -> Make:
    """Makers of every implementation, three lanes or two."""
    lists = [[chat(f"{lane}-{k}") for k in range(size)] for lane, size in enumerate((4, 0, 3))]
    if request.param == "list":
        return lambda: IterableStream(lists)
    if request.param == "function":
        return lambda: IterableStream([lambda rows=rows: iter(rows) for rows in lists])
    if request.param == "tar":
        return lambda: TarStream(shards, lanes=2)
    datasets = pytest.importorskip("datasets")

    def rows(shard: list[int]) -> Iterator[dict[str, Any]]:
        for number in shard:
            for k in range(number + 1):
                yield chat(f"{number}-{k}")

    return lambda: HFStream(datasets.IterableDataset.from_generator(rows, gen_kwargs={"shard": [0, 1, 2, 3]}), lanes=2)


def test_reading_starts_exactly_at_the_cursor_wherever_it_is(make: Make) -> None:
    stream = make()
    assert isinstance(stream, StreamSource)
    total = 0
    for lane in range(stream.lanes):
        every = texts(stream, lane)
        positions = [position for position, _ in every]
        assert positions == sorted(set(positions))
        for number, position in enumerate(positions):
            assert texts(stream, lane, position) == every[number:]
            assert texts(stream, lane, position + 1) == every[number + 1 :]
        total += len(every)
    assert total > 5


def test_two_readings_and_two_processes_agree(make: Make) -> None:
    one, other = make(), make()
    assert one.fingerprint == other.fingerprint
    for lane in range(one.lanes):
        assert texts(one, lane) == texts(one, lane) == texts(other, lane)


def test_every_sample_is_in_one_lane_and_ids_are_unique(make: Make) -> None:
    stream = make()
    seen = [
        (stream_sample_id(lane, position, lanes=stream.lanes), text)
        for lane in range(stream.lanes)
        for position, text in texts(stream, lane)
    ]
    assert len({sample_id for sample_id, _ in seen}) == len({text for _, text in seen}) == len(seen)


@given(st.integers(1, 1000), st.data())
def test_an_id_is_a_lane_and_a_position(lanes: int, data: st.DataObject) -> None:
    lane, part = data.draw(st.integers(0, lanes - 1)), data.draw(st.integers(0, 10**6))
    position = position_of(part, data.draw(st.integers(0, 2**32 - 1)))
    sample_id = stream_sample_id(lane, position, lanes=lanes)
    assert 0 <= sample_id < 2**62
    assert lane_of(sample_id, lanes=lanes) == (lane, position)
    assert position_of(*part_of(position)) == position


def test_the_id_of_a_tar_sample_does_not_depend_on_the_lanes(shards: list[str]) -> None:
    found = []
    for lanes in (1, 2, 5):
        stream = TarStream(shards, lanes=lanes)
        found.append(
            {
                stream_sample_id(lane, position, lanes=lanes): text
                for lane in range(lanes)
                for position, text in texts(stream, lane)
            }
        )
    assert found[0] == found[1] == found[2]
    assert len(found[0]) == 15


def test_rows_that_are_no_samples_keep_their_place() -> None:
    rows: list[Any] = [chat("a"), {"no": "text"}, 7, chat("b", images=["elsewhere.jpg"]), chat("c")]
    assert texts(IterableStream([rows]), 0) == [
        (0, "a"),
        (1, "bad: bad_record"),
        (2, "bad: bad_record"),
        (3, "bad: missing_media"),
        (4, "c"),
    ]


def test_a_row_function_makes_samples_and_says_what_is_bad() -> None:
    def to_sample(row: Any, shard: str, key: str) -> RawSample:
        return RawSample(Record(shard=shard, key=key, turns=(Turn(role="assistant", parts=(TextPart(row * 2),)),)))

    (pair,) = texts(IterableStream([["ab"]], to_sample=to_sample), 0)
    assert pair == (0, "abab")
    whole = RawSample(Record(shard="s", key="k", turns=(Turn(role="assistant", parts=(TextPart("as it is"),)),)))
    assert texts(IterableStream([[whole]]), 0) == [(0, "as it is")]


def test_media_in_rows_arrive_encoded(image_bytes: Callable[..., bytes]) -> None:
    picture = image_bytes(30, 20)
    row = {
        "messages": [{"role": "user", "content": "<image>?"}, {"role": "assistant", "content": "a"}],
        "images": [{"bytes": picture, "path": None}],
    }
    ((_, item),) = IterableStream([[row]]).read(0, 0)
    assert isinstance(item, RawSample)
    assert item.media == (picture,)


def test_an_iterator_is_refused_because_it_cannot_start_anew() -> None:
    with pytest.raises(DataError, match="lane 0 is a list_iterator, which can be read only once"):
        IterableStream([iter([1])])
    with pytest.raises(DataError, match="at least one lane"):
        IterableStream([])


def test_an_error_of_the_data_is_not_taken_for_a_bad_sample() -> None:
    def broken() -> Iterator[dict[str, object]]:
        yield chat("a")
        raise OSError("the disk is gone")

    read = IterableStream([broken]).read(0, 0)
    next(read)
    with pytest.raises(OSError, match="the disk is gone"):
        next(read)


def test_hf_images_are_not_decoded() -> None:
    datasets = pytest.importorskip("datasets")
    buffer = io.BytesIO()
    Image.fromarray(np.zeros((20, 30, 3), dtype=np.uint8)).save(buffer, "PNG")
    table = datasets.Dataset.from_dict(
        {"image": [{"bytes": buffer.getvalue(), "path": None}], "text": ["black"]},
        features=datasets.Features({"image": datasets.Image(), "text": datasets.Value("string")}),
    )
    ((_, item),) = HFStream(table.to_iterable_dataset()).read(0, 0)
    assert isinstance(item, RawSample)
    assert item.media == (buffer.getvalue(),)


def test_hf_data_that_are_reordered_inside_are_refused() -> None:
    datasets = pytest.importorskip("datasets")
    distributed = pytest.importorskip("datasets.distributed")
    stream = datasets.Dataset.from_dict({"text": ["a", "b", "c", "d"]}).to_iterable_dataset(num_shards=2)
    with pytest.raises(DataError, match="shuffles with a buffer, whose content is lost"):
        HFStream(stream.shuffle(seed=1, buffer_size=2))
    with pytest.raises(DataError, match="shuffles with a buffer"):
        HFStream(stream.shuffle(seed=1, buffer_size=2).map(lambda row: row))
    with pytest.raises(DataError, match="split by node"):
        HFStream(distributed.split_dataset_by_node(stream, rank=0, world_size=2))
    with pytest.raises(DataError, match="a list is no streaming dataset"):
        HFStream([1])


def test_a_bad_record_says_which_row_it_was() -> None:
    ((_, item),) = IterableStream([[{}]]).read(0, 0)
    assert isinstance(item, BadRecord)
    assert item.place == "shard lane 0, key 0"
    assert item.error.reason is Reason.BAD_RECORD
