"""Indices put one behind another: of shards into an index, of the parts of several machines into one.

    balancer-analyze index DATA --part 0/2 --output a        (shards 0, 2, 4, ...)
    balancer-analyze index DATA --part 1/2 --output b        (shards 1, 3, 5, ...)
    balancer-analyze merge b a --output whole                = balancer-analyze index DATA --output whole

The result depends on the shards and their order alone, so neither the number of parts nor the order in which they are
named changes a byte of a column.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
import pyarrow as pa

from dataloaders import index_format as form
from dataloaders.errors import IndexFormatError
from dataloaders.index import (
    ITEM_COLUMNS,
    SAMPLE_COLUMNS,
    BadSample,
    CostIndex,
    IndexKey,
    foreign,
    write_index,
)
from dataloaders.index_format import Column, Columns, PartOf
from dataloaders.tar_pass import source_fingerprint

MAX_LISTED = 20


def concatenate(pieces: Sequence[CostIndex], key: IndexKey, *, part: PartOf | None = None) -> CostIndex:
    """The samples of `pieces` in order as one index in memory, with the key of the whole.

    Args:
        pieces: of one estimator and the same options; their shards are kept.
    """
    reasons = _all_reasons(pieces)
    names = [piece.names for piece in pieces]
    empty = pa.table({"shard": pa.array([], pa.string()), "key": pa.array([], pa.string())})

    def samples(name: str) -> Column:
        columns = [piece.samples[name] for piece in pieces]
        if name == "reason":
            columns = [_renamed(piece, reasons) for piece in pieces]
        return _joined(columns, SAMPLE_COLUMNS[name])

    return CostIndex(
        key=key,
        samples=Columns(SAMPLE_COLUMNS, samples),
        items=Columns(ITEM_COLUMNS, lambda name: _joined([piece.items[name] for piece in pieces], ITEM_COLUMNS[name])),
        names=form.encode_names(
            pa.concat_tables([table.cast(empty.schema) for table in names]).combine_chunks() if names else empty
        ),
        bad=list(_all_bad(pieces)),
        reasons=reasons,
        rules=pieces[0].rules if pieces else {},
        shards=[shard for piece in pieces for shard in piece.shards],
        part=part,
    )


def merge_parts(folders: Sequence[str | Path], output: str | Path) -> CostIndex:
    """Write the index of a whole source, of which `folders` are all parts, to `output`.

    Raises:
        IndexFormatError: a folder that is no part, parts of different sources, rules or options, a part that is missing
            or there twice (named), or an `output` that holds something else.
    """
    parts = _checked([CostIndex.open(folder) for folder in folders])
    count = len(parts)
    by_part = [shard_pieces(index) for index in parts]
    # Shard k of the whole is shard k // count of part k % count.
    pieces = [by_part[k % count][k // count] for k in range(_part(parts[0]).num_shards)]
    source = source_fingerprint(piece.shards[0].fingerprint for piece in pieces)
    return write_index(output, concatenate(pieces, replace(parts[0].key, source=source)))


def shard_pieces(index: CostIndex) -> list[CostIndex]:
    """The shards of an index, each as an index of its own in memory.

    Raises:
        IndexFormatError: the shards do not add up to the index.
    """
    counts = [shard.num_samples for shard in index.shards]
    if sum(counts) != len(index) or min(counts, default=0) < 0:
        raise IndexFormatError(
            f"damaged: shards of {sum(counts)} samples in an index of {len(index)}",
            place=str(index.folder or "index"),
            remedy=form.AGAIN,
        )
    stops = np.cumsum(counts).tolist()
    return [
        index.rows(stop - shard.num_samples, stop, shards=[shard])
        for shard, stop in zip(index.shards, stops, strict=True)
    ]


def _checked(parts: Sequence[CostIndex]) -> list[CostIndex]:
    """The parts in order, if they are all parts of one source."""
    if not parts:
        raise IndexFormatError("no part is named", remedy="Name the folder of every part.")
    whole = next((index for index in parts if index.part is None), None)
    if whole is not None:
        raise IndexFormatError(
            "this index is no part: it was built without --part",
            place=str(whole.folder),
            remedy="Use it as it is. Several sources are mixed by a configuration over their indices.",
        )
    first = parts[0]
    for index in parts[1:]:
        differing = index.key.differences(first.key, but=("source",), rules=index.rules, expected_rules=first.rules)
        if _list_of(index) != _list_of(first):
            differing.append("it is a part of another list of shards")
        if _part(index).count != _part(first).count:
            differing.append(f"it is part {index.part}, while {first.folder} is part {first.part}")
        if differing:
            raise foreign(str(index.folder), differing, "Merge the parts of one source, built with the same options.")
    return _in_order(parts)


def _in_order(parts: Sequence[CostIndex]) -> list[CostIndex]:
    by_number: dict[int, list[CostIndex]] = {}
    for index in parts:
        by_number.setdefault(_part(index).number, []).append(index)
    count = _part(parts[0]).count
    twice = [
        f"part {number}/{count} is there {len(found)} times: {', '.join(str(index.folder) for index in found)}"
        for number, found in sorted(by_number.items())
        if len(found) > 1
    ]
    num_missing = count - len(by_number)
    gaps = islice((number for number in range(count) if number not in by_number), MAX_LISTED)
    missing = [f"part {number}/{count} is missing" for number in gaps]
    if num_missing > len(missing):
        missing.append(f"and {num_missing - len(missing)} more")
    if twice or missing:
        raise IndexFormatError("; ".join([*missing, *twice]), remedy="Name the folder of every part once.")
    parts = [by_number[number][0] for number in range(count)]
    for number, index in enumerate(parts):
        expected = len(range(number, _part(index).num_shards, count))
        if len(index.shards) != expected:
            raise IndexFormatError(
                f"damaged: {len(index.shards)} shards in a part of {expected}",
                place=str(index.folder),
                remedy=form.AGAIN,
            )
    return parts


def _part(index: CostIndex) -> PartOf:
    if index.part is None:
        raise IndexFormatError("this index is no part", place=str(index.folder))
    return index.part


def _list_of(index: CostIndex) -> tuple[int, str]:
    part = _part(index)
    return part.num_shards, part.shards


def _all_reasons(pieces: Sequence[CostIndex]) -> list[str]:
    """Reasons in the order in which samples have them first; "" before all."""
    return list(dict.fromkeys(["", *(bad.reason for piece in pieces for bad in piece.bad)]))


def _renamed(piece: CostIndex, reasons: Sequence[str]) -> Column:
    """The reason column of a piece, in rows of `reasons`."""
    new = {name: row for row, name in enumerate(reasons)}
    # A reason that no sample has (of a slice) is never looked up.
    table = np.array([new.get(name, 0) for name in piece.reasons], dtype=SAMPLE_COLUMNS["reason"])
    return np.asarray(table[piece.samples["reason"]])


def _all_bad(pieces: Sequence[CostIndex]) -> Iterator[BadSample]:
    start = 0
    for piece in pieces:
        for bad in piece.bad:
            yield replace(bad, sample_id=bad.sample_id + start)
        start += len(piece)


def _joined(columns: Sequence[Column], dtype: object) -> Column:
    return np.concatenate([np.zeros(0, dtype=dtype), *columns], dtype=dtype)  # type: ignore[call-overload,no-any-return]
