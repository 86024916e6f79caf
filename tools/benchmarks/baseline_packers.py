"""Packers of public systems: `Items` -> bins. See `baselines` for what is kept and what is spared.

Properties, worst first: next-fit wastes what the next item does not fit into; first-fit in input order and random
restarts leave holes that no small item is left to fill; the sorted ones leave almost none where small items exist.
"""

from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Sequence

import numpy as np

from packing._jit import jit
from tools.benchmarks.baseline_types import IntArray, Items

AXOLOTL_GROUP = 100_000
AXOLOTL_MAX_PER_BIN = 200
LLAMA_FACTORY_BATCH = 1_000
OMNIBAL_ITERATIONS = 10
OMNIBAL_SEED = 1024
OMNIBAL_THRESHOLD = 4050 / 4096
INTERNVL_BUFFER = 100
SHUFFLE_SEED = 0


def axolotl_first_fit(items: Items) -> IntArray:
    """axolotl `MultipackBatchSampler`: groups of 100,000 items, each packed by first-fit *in input order*.

    The original calls it first-fit-decreasing but does not sort. At most 200 items a bin. numba, as the original;
    groups one after another, where the original may give each to a process."""
    lengths = np.ascontiguousarray(items.sizes[:, 0])
    bin_of = np.zeros(len(lengths), np.int64)
    num_bins = 0
    for start in range(0, len(lengths), AXOLOTL_GROUP):
        group = slice(start, start + AXOLOTL_GROUP)
        num_bins += _first_fit(lengths[group], int(items.capacity[0]), AXOLOTL_MAX_PER_BIN, bin_of[group])
        bin_of[start + AXOLOTL_GROUP :] = num_bins
    return bin_of


@jit
def _first_fit(lengths: IntArray, capacity: int, max_items: int, bin_of: IntArray) -> int:
    """Adds the bin of each item to what `bin_of` holds; a bin with all its items has room -1."""
    room = np.full(lengths.shape[0], capacity, np.int64)
    count = np.zeros(lengths.shape[0], np.int64)
    num_bins = 0
    for item in range(lengths.shape[0]):
        size = lengths[item]
        place = 0
        while room[place] < size:
            place += 1
        num_bins = max(num_bins, place + 1)
        count[place] += 1
        room[place] = room[place] - size if count[place] < max_items else -1
        bin_of[item] += place
    return num_bins


def axolotl_sequential(items: Items) -> IntArray:
    """axolotl with `sequential`: next-fit in input order. numba, as the original."""
    lengths = np.ascontiguousarray(items.sizes[:, 0])
    bin_of = np.empty(len(lengths), np.int64)
    _next_fit(lengths, int(items.capacity[0]), bin_of)
    return bin_of


@jit
def _next_fit(lengths: IntArray, capacity: int, bin_of: IntArray) -> None:
    current = 0
    room = capacity
    for item in range(lengths.shape[0]):
        if lengths[item] > room:
            current += 1
            room = capacity
        room -= lengths[item]
        bin_of[item] = current


def megatron_next_fit(items: Items) -> list[list[int]]:
    """Megatron-LM `DpBalancedScheduler` (`dp_balanced`): next-fit in input order, no cost. Python loop.

    The original has one capacity; here any number of them, which is also what a collator with several limits does."""
    return [group for group, _ in _next_fit_groups(range(len(items.rows)), items)]


def _greedy_knapsack(lengths: list[int], capacity: int) -> list[list[int]]:
    """Fill one bin at a time with the largest item that still fits: bisect in a sorted list and remove from it."""
    remaining = sorted(lengths)
    bins = []
    while remaining:
        room, current = capacity, list[int]()
        while (place := bisect_right(remaining, room)) > 0:
            size = remaining.pop(place - 1)
            room -= size
            current.append(size)
        bins.append(current)
    return bins


def _lengths_to_items(bins: list[list[int]], lengths: list[int], offset: int) -> list[list[int]]:
    """Replace lengths by items that have them."""
    waiting: dict[int, list[int]] = defaultdict(list)
    for item, length in enumerate(lengths):
        waiting[length].append(offset + item)
    return [[waiting[length].pop() for length in current] for current in bins]


def llama_factory_knapsack(items: Items) -> list[list[int]]:
    """LLaMA-Factory `greedy_knapsack` over batches of 1,000 samples, its default when it maps a data set. bisect."""
    bins = []
    for start in range(0, len(items.lengths), LLAMA_FACTORY_BATCH):
        lengths = items.lengths[start : start + LLAMA_FACTORY_BATCH]
        bins += _lengths_to_items(_greedy_knapsack(lengths, items.limits[0]), lengths, start)
    return bins


def llama_factory_knapsack_global(items: Items) -> list[list[int]]:
    """The same over all samples at once."""
    return _lengths_to_items(_greedy_knapsack(items.lengths, items.limits[0]), items.lengths, 0)


def energon_knapsack(items: Items) -> list[list[int]]:
    """Megatron-Energon's example of `select_samples_to_pack`: the greedy knapsack, moving samples along. bisect."""
    order = sorted(range(len(items.lengths)), key=items.lengths.__getitem__)
    remaining = [items.lengths[item] for item in order]
    bins = []
    while remaining:
        room, current = items.limits[0], list[int]()
        while (place := bisect_right(remaining, room)) > 0:
            room -= remaining.pop(place - 1)
            current.append(order.pop(place - 1))
        bins.append(current)
    return bins


def nemo_first_fit_shuffle(items: Items) -> list[list[int]]:
    """NeMo / Megatron-Bridge `first_fit_shuffle`: first-fit over a random order. Python, segment tree over the bins."""
    order = list(range(len(items.lengths)))
    np.random.Generator(np.random.Philox(SHUFFLE_SEED)).shuffle(order)
    return _first_fit_tree(order, items.lengths, items.limits[0])


def nemo_first_fit_decreasing(items: Items) -> list[list[int]]:
    """NeMo / Megatron-Bridge `first_fit_decreasing`: the same over decreasing lengths."""
    order = sorted(range(len(items.lengths)), key=items.lengths.__getitem__, reverse=True)
    return _first_fit_tree(order, items.lengths, items.limits[0])


def _first_fit_tree(order: list[int], lengths: list[int], capacity: int) -> list[list[int]]:
    """First-fit; leaf i of the tree holds the room of bin i, unopened bins have all of it."""
    num_leaves = 1 << max(len(order) - 1, 0).bit_length()
    tree = [capacity] * (2 * num_leaves)
    bins: list[list[int]] = []
    for item in order:
        size, node = lengths[item], 1
        while node < num_leaves:
            node *= 2
            if tree[node] < size:
                node += 1
        place = node - num_leaves
        if place == len(bins):
            bins.append([])
        bins[place].append(item)
        tree[node] -= size
        while node > 1:
            node //= 2
            left, right = tree[2 * node], tree[2 * node + 1]
            tree[node] = left if left >= right else right
    return bins


def trl_best_fit_decreasing(items: Items) -> list[list[int]]:
    """TRL `bfd`, without its Arrow tables: decreasing, into the fullest bin with room. Python, segment tree over rooms.

    `trl_bfd` of `peers` is the whole function of the package."""
    capacity = items.limits[0]
    num_leaves = 1 << capacity.bit_length()
    tree = [-1] * (2 * num_leaves)  # leaf r holds r when a bin of room r is open, else -1; inner nodes the maximum
    open_bins: dict[int, deque[int]] = defaultdict(deque)
    bins: list[list[int]] = []
    for item in sorted(range(len(items.lengths)), key=items.lengths.__getitem__, reverse=True):
        size = items.lengths[item]
        room = _least_at_least(tree, num_leaves, size) if tree[1] >= size else capacity
        if tree[1] >= size:
            place = open_bins[room].popleft()
            if not open_bins[room]:
                _set_leaf(tree, num_leaves, room, -1)
        else:
            place = len(bins)
            bins.append([])
        bins[place].append(item)
        if not open_bins[room - size]:
            _set_leaf(tree, num_leaves, room - size, room - size)
        open_bins[room - size].append(place)
    return bins


def _least_at_least(tree: list[int], num_leaves: int, size: int) -> int:
    """The smallest open room >= size; the tree must hold one. Rooms ascend, so the left child wins when it reaches."""
    node = 1
    while node < num_leaves:
        node *= 2
        if tree[node] < size:
            node += 1
    return node - num_leaves


def _set_leaf(tree: list[int], num_leaves: int, room: int, value: int) -> None:
    node = num_leaves + room
    tree[node] = value
    while node > 1:
        node //= 2
        left, right = tree[2 * node], tree[2 * node + 1]
        tree[node] = left if left >= right else right


def omnibal(items: Items) -> list[list[int]]:
    """OmniBal's iterative sampling and filtering: next-fit over a random order, ten times over what is not yet full.

    A bin is kept when its tokens reach 4,050 / 4,096 of the capacity or another column is exactly full; the rest is
    shuffled again. The first column stands for tokens, the others for images. Python, as the original (it has an
    optional C++ version of the same); without its dropping of samples above a capacity, as none is."""
    enough = int(OMNIBAL_THRESHOLD * items.limits[0])
    waiting = list(range(len(items.rows)))
    kept: list[list[int]] = []
    for iteration in range(OMNIBAL_ITERATIONS):
        np.random.RandomState(OMNIBAL_SEED + iteration).shuffle(waiting)
        groups = _next_fit_groups(waiting, items)
        if iteration == OMNIBAL_ITERATIONS - 1:
            return kept + [group for group, _ in groups]
        waiting = []
        for group, used in groups:
            if used[0] >= enough or any(a == b for a, b in zip(used[1:], items.limits[1:], strict=True)):
                kept.append(group)
            else:
                waiting += group
    return kept


def _next_fit_groups(order: Sequence[int], items: Items) -> list[tuple[list[int], list[int]]]:
    """Next-fit over `order`: (items, used capacity) of each bin. One and two capacities have loops of their own, as
    the originals are written for one number of them."""
    if len(items.limits) == 1:
        return _groups_of_one(order, items.lengths, items.limits[0])
    if len(items.limits) == 2:
        return _groups_of_two(order, items.rows, items.limits)
    rows, limits = items.rows, items.limits
    groups: list[tuple[list[int], list[int]]] = []
    current: list[int] = []
    used = [0] * len(limits)
    for item in order:
        total = [load + size for load, size in zip(used, rows[item], strict=True)]
        if current and any(load > limit for load, limit in zip(total, limits, strict=True)):
            groups.append((current, used))
            current, total = [], rows[item]
        current.append(item)
        used = total
    return [*groups, (current, used)] if current else groups


def _groups_of_one(order: Sequence[int], lengths: list[int], limit: int) -> list[tuple[list[int], list[int]]]:
    groups: list[tuple[list[int], list[int]]] = []
    current: list[int] = []
    used = 0
    for item in order:
        used += lengths[item]
        if used > limit:
            groups.append((current, [used - lengths[item]]))
            current, used = [item], lengths[item]
        else:
            current.append(item)
    return [*groups, (current, [used])] if current else groups


def _groups_of_two(order: Sequence[int], rows: list[list[int]], limits: list[int]) -> list[tuple[list[int], list[int]]]:
    first_limit, second_limit = limits
    groups: list[tuple[list[int], list[int]]] = []
    current: list[int] = []
    used, second_used = 0, 0
    for item in order:
        size, second = rows[item]
        used += size
        second_used += second
        if used > first_limit or second_used > second_limit:
            groups.append((current, [used - size, second_used - second]))
            current, used, second_used = [item], size, second
        else:
            current.append(item)
    return [*groups, (current, [used, second_used])] if current else groups


def internvl_buffer(items: Items) -> list[list[int]]:
    """InternVL `PackedDataset`: samples in input order join the first of at most 100 open bins that has room.

    Open bins are sorted by images, most first; a bin leaves when its images or tokens are full, and the first one
    leaves when the buffer is too long. First column tokens, second column images; cutting of samples
    (`allow_overflow`) is off. Python on counts, where the original moves tensors too."""
    max_tokens, max_images = items.limits[:2]
    bins: list[list[int]] = []
    buffer: list[tuple[int, int, list[int]]] = []  # images, tokens, items
    for item, row in enumerate(items.rows):
        tokens, images, members = row[0], row[1], [item]
        for place, (held_images, held_tokens, held) in enumerate(buffer):
            if held_images + images <= max_images and held_tokens + tokens <= max_tokens:
                images, tokens, members = held_images + images, held_tokens + tokens, [*held, item]
                del buffer[place]
                break
        if tokens >= max_tokens:
            bins.append(members)
            continue
        place = next((index for index, held in enumerate(buffer) if held[0] < images), len(buffer))
        buffer.insert(place, (images, tokens, members))
        while buffer and (buffer[0][0] == max_images or len(buffer) > INTERNVL_BUFFER):
            bins.append(buffer.pop(0)[2])
    return bins + [members for _, _, members in buffer]
