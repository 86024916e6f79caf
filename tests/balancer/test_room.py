"""Rooms: pieces one behind the other, joined without a copy where they lie so and only there."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from balancer.room import Room, joined

rows = st.lists(st.integers(0, 5), min_size=1, max_size=6)


def filled(room: Room, counts: list[int], width: int) -> list[np.ndarray]:
    parts = [room.allocate(count, width) for count in counts]
    for number, part in enumerate(parts):
        part[...] = np.arange(part.size).reshape(part.shape) + 1000 * number
    return parts


@given(rows, st.integers(1, 4))
def test_pieces_of_a_room_are_joined_without_a_copy(counts: list[int], width: int) -> None:
    room = Room.of(4 * width * sum(counts))
    parts = filled(room, counts, width)
    expected = np.concatenate(parts)
    whole = joined(parts)
    assert whole.tobytes() == expected.tobytes()
    assert whole.shape == expected.shape
    assert room.used_bytes == whole.nbytes
    for part in parts:
        assert not part.size or np.shares_memory(whole, part)


@given(rows, st.integers(1, 4), st.integers(0, 100), st.randoms(use_true_random=False))
def test_joining_gives_the_same_from_wherever_the_pieces_come(counts: list[int], width: int, size: int, random) -> None:  # type: ignore[no-untyped-def]
    parts = filled(Room.of(4 * size), counts, width)  # those that found no room are arrays of their own
    assert all(part.shape == (count, width) for part, count in zip(parts, counts, strict=True))
    chosen = random.choices(parts, k=random.randint(1, 8))
    assert joined(chosen).tobytes() == np.concatenate(chosen).tobytes()
    views = [part[::-1] for part in chosen]
    assert joined(views).tobytes() == np.concatenate(views).tobytes()


def test_a_room_knows_what_lies_in_it() -> None:
    room = Room.of(4 * 100)
    first, second = room.allocate(3, 4), room.allocate(5, 4)
    assert [room.offset_of(memoryview(part)) for part in (first, second)] == [0, 48]
    assert room.offset_of(memoryview(joined([first, second]))) == 0
    assert room.offset_of(memoryview(np.zeros(4))) is None
    assert room.offset_of(memoryview(first[:0])) is None
    assert Room.of(0).offset_of(memoryview(first)) is None


def test_a_full_room_gives_arrays_of_their_own() -> None:
    room = Room.of(4 * 10)
    assert room.allocate(2, 4).base is room.allocate(0, 4).base
    large = room.allocate(1, 4)
    assert large.base is None
    assert room.used_bytes == 32
    with pytest.raises(ValueError, match="dimension"):
        joined([np.zeros((2, 3), dtype=np.float32), np.zeros((2, 4), dtype=np.float32)])
