"""`StreamingPacker`: exactly once, hard capacities, the same bins however asked for, bounded delay and state."""

import itertools
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from packing import CapacityError, ItemTooLargeError, NegativeSizeError, PackingError, SizeOverflowError, pack
from packing.stream_rule import PATIENCE
from packing.stream_state import StreamedBin
from packing.streaming import MAX_LOOKAHEAD, StreamingPacker, pack_stream, pack_windowed

quick = settings(max_examples=60, deadline=None)
Rows = list[list[int]]


@st.composite
def streams(draw: st.DrawFn) -> tuple[Rows, list[int], int, int | None]:
    """(rows, capacity, lookahead, most items in a bin); zeros and items at capacity are common."""
    capacity = draw(st.lists(st.integers(1, 50) | st.just(10_007), min_size=1, max_size=3))
    row = st.tuples(*(st.just(0) | st.just(limit) | st.integers(0, limit) for limit in capacity)).map(list)
    rows = draw(st.lists(row, max_size=60))
    return rows, capacity, draw(st.integers(1, 20)), draw(st.none() | st.integers(1, 30))


def packed(rows: Rows, capacity: list[int], lookahead: int, most: int | None) -> list[tuple[list[int], list[int]]]:
    """Items and load of every bin when all items arrive in one call."""
    packer = StreamingPacker(capacity, lookahead, max_items_per_bin=most)
    packer.add(np.array(rows, np.int64).reshape(len(rows), len(capacity)))
    return plain(packer.flush())


def plain(bins: Sequence[StreamedBin]) -> list[tuple[list[int], list[int]]]:
    return [(one.items.tolist(), one.load.tolist()) for one in bins]


def best_fit_num_bins(sizes: Sequence[int], capacity: int, lookahead: int) -> int:
    """Best-fit in order of arrival that holds `lookahead` items in open bins, and else closes the fullest."""
    rooms: list[list[int]] = []  # [room, number of items] of each open bin
    num_bins = held = 0
    for size in sizes:
        fitting = [one for one in rooms if one[0] >= size]
        if fitting:
            chosen = min(fitting)
        else:
            chosen = [capacity, 0]
            rooms.append(chosen)
            num_bins += 1
        chosen[0] -= size
        chosen[1] += 1
        held += 1
        while held > lookahead:
            fullest = min(rooms)
            held -= fullest[1]
            rooms.remove(fullest)
    return num_bins


def lengths(count: int, *, seed: int = 0, capacity: int = 4096) -> npt.NDArray[np.int64]:
    """Text-like: many short items, a few at the capacity, and a crowd just above a third of it."""
    generator = np.random.default_rng(seed)
    sizes = np.exp(generator.normal(6.3, 1.0, count)).astype(np.int64) + 1
    crowd = generator.random(count) < 0.2
    sizes[crowd] = generator.integers(capacity // 3, 2 * capacity // 5, crowd.sum())
    return np.minimum(sizes, capacity)


@quick
@given(case=streams())
@example(case=([[6], [5], [4], [3], [2], [2]], [10], 5, None))
def test_every_item_leaves_once_and_no_bin_exceeds_a_limit(case: tuple[Rows, list[int], int, int | None]) -> None:
    rows, capacity, lookahead, most = case
    bins = packed(*case)
    assert sorted(item for items, _ in bins for item in items) == list(range(len(rows)))
    for items, load in bins:
        assert items == sorted(items)
        assert load == np.array([rows[item] for item in items]).sum(axis=0).tolist()
        assert all(total <= limit for total, limit in zip(load, capacity, strict=True))
        assert 1 <= len(items) <= (lookahead + 1 if most is None else most)


def test_the_example_of_the_docstring() -> None:
    packer = StreamingPacker(10, 5)
    packer.add([6, 5, 4, 3, 2, 2])
    assert plain([packer.pop()]) == [([0, 2], [10])]  # type: ignore[list-item]
    assert packer.pop() is None
    assert packer.num_waiting == 4
    assert plain(packer.flush()) == [([1, 3, 4], [10]), ([5], [2])]


@quick
@given(case=streams(), cuts=st.lists(st.integers(0, 60), max_size=8), pops=st.lists(st.integers(0, 5), max_size=8))
def test_bins_depend_neither_on_calls_nor_on_when_they_are_popped(
    case: tuple[Rows, list[int], int, int | None], cuts: list[int], pops: list[int]
) -> None:
    rows, capacity, lookahead, most = case
    table = np.array(rows, np.int64).reshape(len(rows), len(capacity))
    packer = StreamingPacker(capacity, lookahead, max_items_per_bin=most)
    bins: list[StreamedBin] = []
    edges = [0, *sorted(min(cut, len(rows)) for cut in cuts), len(rows)]
    for turn, (start, stop) in enumerate(itertools.pairwise(edges)):
        packer.add(table[start:stop])
        assert packer.num_waiting <= lookahead
        for _ in range(pops[turn] if turn < len(pops) else 0):
            one = packer.pop()
            bins += [] if one is None else [one]
    assert plain([*bins, *packer.flush()]) == packed(*case)


@quick
@given(case=streams(), cut=st.integers(0, 60), pops=st.integers(0, 3))
def test_a_restored_packer_goes_on_identically(
    case: tuple[Rows, list[int], int, int | None], cut: int, pops: int
) -> None:
    rows, capacity, lookahead, most = case
    table = np.array(rows, np.int64).reshape(len(rows), len(capacity))
    packer = StreamingPacker(capacity, lookahead, max_items_per_bin=most)
    packer.add(table[:cut])
    before = [one for one in (packer.pop() for _ in range(pops)) if one is not None]
    text = json.dumps(packer.state())
    restored = StreamingPacker.from_state(json.loads(text))
    assert json.dumps(restored.state()) == text
    assert (restored.num_items, restored.num_bins, restored.num_ready) == (
        packer.num_items,
        packer.num_bins,
        packer.num_ready,
    )
    restored.add(table[cut:])
    assert plain([*before, *restored.flush()]) == packed(*case)
    packer.add(table[cut:])
    packer.flush()
    assert restored.fill.tolist() == packer.fill.tolist()


@pytest.mark.parametrize("order", ["arrival", "ascending", "descending", "ends first", "blocks"])
@pytest.mark.parametrize("capacity", [4096, 16384])
def test_never_more_bins_than_best_fit_with_the_same_look_ahead(order: str, capacity: int) -> None:
    sizes = lengths(6000, capacity=capacity)
    ascending = np.sort(sizes)
    arranged = {
        "arrival": sizes,
        "ascending": ascending,
        "descending": ascending[::-1],
        "ends first": np.concatenate([ascending[:1500], ascending[:4499:-1], sizes[:3000]]),
        "blocks": ascending.reshape(60, 100)[np.random.default_rng(1).permutation(60)].reshape(-1),
    }[order]
    _, num_bins = pack_windowed(arranged, capacity=capacity, lookahead=200)
    assert num_bins <= best_fit_num_bins(arranged.tolist(), capacity, 200)


@pytest.mark.parametrize(("lookahead", "excess"), [(256, 1.01), (1000, 1.005)])
def test_shuffled_input_packs_as_well_as_offline(lookahead: int, excess: float) -> None:
    sizes = lengths(20_000, seed=3)
    _, num_bins = pack_windowed(sizes, capacity=4096, lookahead=lookahead)
    assert num_bins <= excess * pack(sizes, capacity=4096).num_bins


def test_two_dimensions_pack_as_well_as_offline() -> None:
    generator = np.random.default_rng(5)
    images = generator.integers(0, 5, 6000)
    tokens = np.minimum(images * generator.integers(64, 640, 6000) + generator.integers(10, 400, 6000), 4096)
    table = np.stack([tokens, images], axis=1)
    _, num_bins = pack_windowed(table, capacity=[4096, 8], lookahead=1000)
    assert num_bins <= 1.01 * pack(table, capacity=[4096, 8]).num_bins


def test_an_overdue_item_leaves_within_lookahead_bins() -> None:
    lookahead, capacity = 8, 100
    packer = StreamingPacker(capacity, lookahead)
    packer.add([34, 34, 34])  # pairs of 50 fill a bin exactly, so nothing else asks for these
    left: dict[int, int] = {}
    for number in range(3, 3 + 40 * lookahead):
        packer.add(50)
        while (one := packer.pop()) is not None:
            left.update(dict.fromkeys(one.items.tolist(), number))
    arrivals = PATIENCE * lookahead
    assert all(left[item] >= arrivals for item in range(3))  # it is patience that ends their wait
    assert all(left[item] <= arrivals + 3 * lookahead for item in range(3))


def test_items_without_size_take_no_room_and_do_not_stay() -> None:
    packer = StreamingPacker(10, 4)
    packer.add([10, 0, 0, 10, 0])
    assert plain([packer.pop()]) == [([0, 1, 2, 4], [10])]  # type: ignore[list-item]
    assert plain(packer.flush()) == [([3], [10])]
    assert packed([[0]] * 7, [1], 3, None) == [([0, 1, 2, 3], [0]), ([4, 5, 6], [0])]
    assert packed([[0]] * 5, [1], 4, 2) == [([0, 1], [0]), ([2, 3], [0]), ([4], [0])]


def test_sizes_near_the_largest_integers_stay_exact() -> None:
    capacity = 2**62 - 1
    rows = [[2**61], [2**61 - 1], [2**61 - 2], [1], [2**61], [capacity]]
    packer = StreamingPacker(capacity, 4)
    for row in rows:
        packer.add(row[0])
    bins = plain(packer.flush())
    assert sorted(item for items, _ in bins for item in items) == list(range(6))
    assert ([0, 1], [capacity]) in bins or ([1, 4], [capacity]) in bins
    assert packer.fill[0] == sum(row[0] for row in rows) / (capacity * len(bins))
    wide = packed([[2**60, 5], [2**60 - 1, 2**60], [1, 1], [2**60, 2**60]], [2**61 - 1, 2**60 + 5], 2, None)
    assert ([0, 1], [2**61 - 1, 2**60 + 5]) in wide


@pytest.mark.parametrize("lookahead", [1, 2, MAX_LOOKAHEAD])
def test_any_lookahead_from_one_up(lookahead: int) -> None:
    bins = packed([[3], [3], [3], [4]], [10], lookahead, None)
    assert sum(len(items) for items, _ in bins) == 4


def test_flush_ends_a_window_and_numbers_go_on() -> None:
    packer = StreamingPacker(10, 100)
    packer.add([4, 5])
    assert plain(packer.flush()) == [([0, 1], [9])]
    assert packer.flush() == []
    packer.add([1, 9])
    assert plain(packer.flush()) == [([2, 3], [10])]
    assert (packer.num_items, packer.num_bins, packer.num_waiting) == (4, 2, 0)
    assert packer.fill.tolist() == [0.95]


def test_one_item_may_come_as_a_number_or_as_a_vector() -> None:
    one, two = StreamingPacker(10, 5), StreamingPacker([10, 3], 5)
    one.add(4)
    one.add([])
    two.add([4, 1])
    two.add([[6, 2]])
    two.add([])
    assert plain(one.flush()) == [([0], [4])]
    assert plain(two.flush()) == [([0, 1], [10, 3])]
    assert StreamingPacker(10, 5).fill.tolist() == [0.0]


def test_a_failing_call_takes_nothing_in() -> None:
    packer = StreamingPacker([10, 4], 3)
    packer.add([[1, 1], [2, 2]])
    before = packer.state()
    with pytest.raises(ItemTooLargeError) as too_large:
        packer.add([[1, 1], [1, 5]])
    assert (too_large.value.index, too_large.value.size, too_large.value.capacity, too_large.value.column) == (
        3,
        5,
        4,
        1,
    )
    with pytest.raises(NegativeSizeError, match=r"sizes\[1\] is -1 in column 0"):
        packer.add([[1, 1], [-1, 1]])
    with pytest.raises(PackingError, match="3 columns but capacity has 2 entries"):
        packer.add([[1, 2, 3]])
    with pytest.raises(PackingError, match="type float64"):
        packer.add([[1.5, 2.0]])
    with pytest.raises(SizeOverflowError):
        packer.add([[2**62, 1], [2**62, 1]])
    assert packer.state() == before


@pytest.mark.parametrize(
    ("capacity", "lookahead", "most", "error", "text"),
    [
        (0, 5, None, CapacityError, "must lie in 1"),
        ([], 5, None, CapacityError, "give one positive integer"),
        ([1] * 65, 5, None, CapacityError, "65 entries"),
        (10, 0, None, PackingError, "lookahead is 0"),
        (10, True, None, PackingError, "lookahead is True"),
        (10, MAX_LOOKAHEAD + 1, None, PackingError, "at most 1048576"),
        (10, 5, 0, PackingError, "max_items_per_bin is 0"),
    ],
)
def test_malformed_options_are_refused(
    capacity: Any, lookahead: Any, most: Any, error: type[PackingError], text: str
) -> None:
    with pytest.raises(error, match=text):
        StreamingPacker(capacity, lookahead, max_items_per_bin=most)


def nested(depth: int) -> list[Any]:
    """[[[...]]], deeper than a recursive `repr` goes."""
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def good_state() -> dict[str, Any]:
    packer = StreamingPacker([10, 4], 3, max_items_per_bin=2)
    packer.add([[9, 1], [2, 2], [5, 0], [3, 1], [4, 4]])
    state: dict[str, Any] = json.loads(json.dumps(packer.state()))
    assert state["ready"]
    assert state["waiting"]["items"]
    return state


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        (["version"], 2, "version 2; this is version 1"),
        (["version"], None, "version None"),
        (["version"], True, "version True"),
        (["version"], 1.0, r"version 1\.0"),
        (["version"], nested(10**5), r"version \[\[\["),
        pytest.param(["version"], 10**5000, "version of type int", id="too long to print"),
        (["options", "lookahead"], nested(10**5), r"lookahead of the state is \[\["),
        (["options", "max_items_per_bin"], True, "max_items_per_bin of the state is True"),
        (["num_items"], nested(10**5), r"num_items of the state is \[\["),
        (["waiting", "sizes", 0], nested(10**5), r"sizes of the state hold \[\["),
        (["waiting", "sizes", 0], [nested(10**5), 0], r"sizes of the state hold \[\["),
        (["ready", 0, "items", 0], nested(10**5), r"items of a ready bin of the state is \[\["),
        (["used"], [0, 0], "used of the state is 0, but its ready bins hold"),
        (["options"], {}, "lacks 'capacity'"),
        (["options"], None, "lacks 'capacity'"),
        (["options", "capacity"], [], "give one positive integer"),
        (["options", "capacity"], [10.0, 4], "must be an integer"),
        (["options", "capacity"], [True, 4], "must be an integer"),
        (["options", "capacity"], [2**70, 4], "must be an integer"),
        (["options", "lookahead"], "3", "lookahead of the state is '3'"),
        (["options", "lookahead"], 2**40, "at most"),
        (["options", "lookahead"], 1, "at most 1 may wait"),
        (["num_items"], -1, "num_items of the state is -1"),
        (["num_items"], 2, "below num_items"),
        (["num_items"], 2**63, "num_items of the state"),
        (["num_bins"], 0, "num_bins is 0"),
        (["num_bins"], 6, "num_bins of the state is 6"),
        (["used"], [1], "list of 2"),
        (["used"], [10**6, 0], "used of the state is 1000000"),
        (["waiting"], [], "lacks 'items'"),
        (["waiting", "items"], 7, "not a list"),
        (["waiting", "items", 0], 10**6, "not ascending"),
        (["waiting", "items", 0], -1, "must be an integer"),
        (["waiting", "items", 0], 1.0, "must be an integer"),
        (["waiting", "sizes"], [], "one a waiting item"),
        (["waiting", "sizes", 0], [1], "each row has 2"),
        (["waiting", "sizes", 0], [1, "1"], "sizes are integers"),
        (["waiting", "sizes", 0], [1, 5], "above the capacity of 4"),
        (["waiting", "sizes", 0], [-1, 0], "at least 0"),
        (["waiting", "sizes", 0], [2**80, 0], "above the capacity of 10"),
        (["ready"], None, "not a list"),
        (["ready", 0], {"items": [], "load": [0, 0]}, "has 0 items"),
        (["ready", 0], {"items": [0, 1, 2], "load": [0, 0]}, "has 3 items"),
        (["ready", 0, "items"], [1, 0], "not ascending"),
        (["ready", 0, "load"], [11, 0], "holds 11"),
    ],
)
def test_a_hostile_state_is_refused(path: list[Any], value: Any, text: str) -> None:
    state = good_state()
    place = state
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(PackingError, match=text):
        StreamingPacker.from_state(state)


def test_a_state_with_an_item_twice_is_refused() -> None:
    state = good_state()
    state["ready"][0]["items"] = state["waiting"]["items"][:1]
    with pytest.raises(PackingError, match="an item twice"):
        StreamingPacker.from_state(state)
    for key in ("version", "options", "num_items", "num_bins", "used", "waiting", "ready"):
        state = good_state()
        del state[key]
        with pytest.raises(PackingError, match=f"lacks '{key}'"):
            StreamingPacker.from_state(state)


@pytest.mark.parametrize("state", [None, [], "{}", nested(10**5)])
def test_a_state_that_is_no_mapping_is_refused(state: Any) -> None:
    for take in (StreamingPacker.from_state, StreamingPacker([10, 4], 3, max_items_per_bin=2).load_state):
        with pytest.raises(PackingError, match="give the mapping that state"):
            take(state)


def test_a_state_with_tuples_is_that_with_lists() -> None:
    state = good_state()
    state["options"]["capacity"] = tuple(state["options"]["capacity"])
    state["used"] = tuple(state["used"])
    packer = StreamingPacker([10, 4], 3, max_items_per_bin=2)
    packer.load_state(state)
    assert packer.state() == StreamingPacker.from_state(state).state() == good_state()


def test_a_total_above_the_largest_integer_is_restored() -> None:
    capacity = 2**61
    packer = StreamingPacker(capacity, 2)
    for _ in range(9):
        packer.add(capacity)
        packer.pop()
    restored = StreamingPacker.from_state(json.loads(json.dumps(packer.state())))
    assert restored.state() == packer.state()
    assert restored.state()["used"] == [7 * capacity]
    assert restored.lower_bound == 9


def test_many_ready_bins_are_restored_each_as_it_was() -> None:
    packer = StreamingPacker([10, 7], 3, max_items_per_bin=3)
    packer.add(np.random.default_rng(2).integers(0, 8, (20_000, 2)))
    restored = StreamingPacker.from_state(packer.state())
    assert restored.num_ready > 5000
    assert plain(restored.flush()) == plain(packer.flush())


@quick
@given(case=streams(), cut=st.integers(0, 60))
def test_the_lower_bound_counts_what_is_finished_and_what_waits(
    case: tuple[Rows, list[int], int, int | None], cut: int
) -> None:
    rows, capacity, lookahead, most = case

    def bound(items: Rows) -> int:
        totals = [*np.array(items, np.int64).reshape(-1, len(capacity)).sum(axis=0).tolist(), len(items)]
        return max(-(-total // limit) for total, limit in zip(totals, [*capacity, most or 10**9], strict=True))

    packer = StreamingPacker(capacity, lookahead, max_items_per_bin=most)
    packer.add(np.array(rows[:cut], np.int64).reshape(-1, len(capacity)))
    assert packer.lower_bound == bound(rows[:cut])
    restored = StreamingPacker.from_state(packer.state())
    assert (restored.lower_bound, restored.gap) == (packer.lower_bound, packer.gap)
    finished = [rows[item] for one in restored._ready for item in one.items]
    assert packer.gap == (packer.num_bins / bound(finished) - 1 if finished else 0)
    packer.flush()
    assert packer.num_bins >= packer.lower_bound == bound(rows[:cut])
    assert packer.gap == (packer.num_bins / packer.lower_bound - 1 if rows[:cut] else 0)


def test_a_packer_is_shown_with_its_options_and_where_it_stands() -> None:
    packer = StreamingPacker([10, 4], 3, max_items_per_bin=5)
    packer.add([[5, 1], [5, 1], [5, 1], [5, 1]])
    assert repr(packer) == (
        "StreamingPacker(capacity=[10, 4], lookahead=3, max_items_per_bin=5; "
        "num_items=4, num_bins=1, num_waiting=2, fill=[1.000, 0.500])"
    )
    assert (packer.lower_bound, packer.gap) == (2, 0.0)


def test_a_stream_is_checked_at_the_call() -> None:
    with pytest.raises(PackingError, match="lookahead is 0"):
        pack_stream([1], capacity=5, lookahead=0)
    with pytest.raises(PackingError, match="stream has type int; give an iterable"):
        pack_stream(7, capacity=5, lookahead=1)  # type: ignore[arg-type]


def test_a_state_of_other_options_is_refused_and_changes_nothing() -> None:
    packer = StreamingPacker([10, 4], 4, max_items_per_bin=2)
    packer.add([[1, 1]])
    before = packer.state()
    with pytest.raises(PackingError, match="state has options"):
        packer.load_state(good_state())
    assert packer.state() == before


def test_the_state_is_bounded_by_the_lookahead() -> None:
    packer, sizes = StreamingPacker(4096, 50), lengths(5000)
    longest = 0
    for start in range(0, 5000, 500):
        packer.add(sizes[start : start + 500])
        while packer.pop() is not None:
            pass
        state = packer.state()
        assert len(state["waiting"]["items"]) <= 50
        longest = max(longest, len(json.dumps(state)))
    assert longest < 50 * 20 + 300


def test_a_generator_yields_each_bin_as_soon_as_it_is_finished() -> None:
    sizes = lengths(400)
    seen: list[int] = []

    def stream() -> Any:
        for size in sizes:
            seen.append(len(seen))
            yield size

    bins = pack_stream(stream(), capacity=4096, lookahead=30)
    first = next(bins)
    assert len(seen) == 31  # it has asked for no more than one item above the look-ahead
    assert plain([first, *bins]) == packed([[int(size)] for size in sizes], [4096], 30, None)


def test_packing_a_table_says_the_bin_of_every_item() -> None:
    sizes = lengths(500)
    bin_of, num_bins = pack_windowed(sizes, capacity=4096, lookahead=64)
    assert bin_of.dtype == np.int32
    assert (np.bincount(bin_of, minlength=num_bins) > 0).all()
    assert np.bincount(bin_of, weights=sizes).max() <= 4096
    assert pack_windowed([], capacity=5, lookahead=3)[1] == 0


def test_bins_cannot_be_changed() -> None:
    packer = StreamingPacker(10, 1)
    packer.add([5, 5])
    one = packer.pop()
    assert one is not None
    with pytest.raises(ValueError, match="read-only"):
        one.items[0] = 7
    with pytest.raises(ValueError, match="read-only"):
        one.load[0] = 7
