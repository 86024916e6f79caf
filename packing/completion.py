"""The fullest completion of a bin from a stock of sizes: a bounded depth-first search, for kernels.

    sizes 5 4 3 (two of each), room 7   ->   4 3      (5 leaves 2, which nothing fills; then 4 and 3 fill it exactly)

Largest size first and as many of it as fit; the search stops at the first exact fill, so bins with large items are
served by the largest items that fit and small ones are kept for later. A bin that many small sizes can fill is found
at once; price: with few sizes, none of which fits, all `max_nodes` ends are tried. The idea is that of the minimum bin
slack heuristic (Gupta and Ho, 1999); over sizes with counts instead of items, and with a limit on the work.
"""

from packing._jit import jit_inner
from packing.inputs import IntArray, PartArray

RANK, NUMBER = 0, 1  # columns of a list of picks: which size, how many of it


@jit_inner
def first_fitting(values: IntArray, table: IntArray, room: int) -> int:
    """Least rank whose value is at most the room: from the table, or by bisection where it is empty."""
    if table.shape[0] > 0:
        return int(table[room])
    low, high = 0, values.shape[0]
    while low < high:
        middle = (low + high) // 2
        if values[middle] > room:
            low = middle + 1
        else:
            high = middle
    return low


@jit_inner
def first_left(left: IntArray, skip: IntArray, rank: int) -> int:
    """Least rank from `rank` on of which items are left, k when there is none.

    left has k + 1 entries, the last one not 0; skip[r] > r leads over ranks that are used up for good.
    """
    start = rank
    while left[rank] == 0:
        rank = skip[rank]
    while start < rank:
        following = skip[start]
        skip[start] = rank
        start = following
    return rank


@jit_inner
def complete(  # noqa: PLR0917  kernels take flat arguments
    values: IntArray,
    left: IntArray,
    skip: IntArray,
    table: IntArray,
    first: int,
    room: int,
    max_nodes: int,
    picks: IntArray,
    trial: IntArray,
) -> tuple[int, int, int]:
    """Fill `room` with sizes of rank `first` and above; (number of picks, room that stays free, nodes used).

    Args:
        values: sizes above zero, descending [k].
        left: stock of each [k + 1]; left[k] is not 0. Unchanged by the search.
        skip: [k + 1], see `first_left`; begins as 1, 2, ..., and anew whenever the stock of a size grows from 0.
        table: [capacity + 1], number of values above a room; or empty, which costs a bisection for each pick.
        max_nodes: ends of the search that are looked at, at least 1.
        picks: result [k, 2]: rows (rank, number), ranks ascending.
        trial: work space like picks.
    """
    num_sizes = values.shape[0]
    best_room, num_picks, depth, nodes = room, 0, 0, 0
    rank = first
    while True:
        while room > 0:
            rank = first_left(left, skip, max(rank, first_fitting(values, table, room)))
            if rank == num_sizes:
                break
            number = min(left[rank], room // values[rank])
            trial[depth, RANK], trial[depth, NUMBER] = rank, number
            depth += 1
            room -= number * values[rank]
            rank += 1
        nodes += 1
        if room < best_room:
            best_room, num_picks = room, depth
            for turn in range(depth):
                picks[turn, RANK], picks[turn, NUMBER] = trial[turn, RANK], trial[turn, NUMBER]
        if best_room == 0 or depth == 0 or nodes >= max_nodes:
            return num_picks, best_room, nodes
        # One of the smallest size less, and go on with smaller ones.
        rank = trial[depth - 1, RANK]
        room += values[rank]
        trial[depth - 1, NUMBER] -= 1
        if trial[depth - 1, NUMBER] == 0:
            depth -= 1
        rank += 1


@jit_inner
def take(  # noqa: PLR0917  kernels take flat arguments
    picks: IntArray, num_picks: int, times: int, first_bin: int, left: IntArray, cursor: IntArray, bin_at: PartArray
) -> None:
    """Fill the bins first_bin, first_bin + 1, ... (`times` of them) with the picks each.

    cursor [k] is the place in `bin_at` of the next item of each size.
    """
    for turn in range(num_picks):
        rank, number = picks[turn, RANK], picks[turn, NUMBER]
        left[rank] -= number * times
        position = cursor[rank]
        for index in range(first_bin, first_bin + times):
            for _ in range(number):
                bin_at[position] = index
                position += 1
        cursor[rank] = position


@jit_inner
def repeats(picks: IntArray, num_picks: int, left: IntArray, most: int) -> int:
    """How often the stock allows the picks, at most `most`."""
    times = most
    for turn in range(num_picks):
        times = min(times, left[picks[turn, RANK]] // picks[turn, NUMBER])
    return int(times)
