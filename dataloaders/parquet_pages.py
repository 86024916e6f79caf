"""What a column chunk of a Parquet file may become when it is decoded, found out before it is.

    row 0 of a list column:  [d, d, d, d, ...]  20,000 times one dictionary value of 1 MiB   1 KB on disk, 20 GB decoded

Rows of plain columns are decoded a few at a time, so such a thing is noticed early; one row cannot be cut. So for lists
the worst case is bounded by the number of values and the size of the dictionary page, which stands in front of the
chunk; where that is too much, indices are decoded in place of values, and the values they stand for are counted.

Price: 64 bytes read per list column and row group. Only lists of thousands of values beside a dictionary of megabytes
are decoded twice.
"""

from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from dataloaders.storage import StoredFile

LEAST_BYTES_PER_VALUE = 8  # offsets and levels of a value, if it is a null
_HEAD_BYTES, _DICTIONARY_PAGE = 64, 2


def decoded_bytes(chunk: Any) -> int:
    """Bytes of a column chunk after decompression, as the footer says; nulls take some, too."""
    return max(int(chunk.total_uncompressed_size), LEAST_BYTES_PER_VALUE * int(chunk.num_values))


def bombs(file: StoredFile, schema: Any, chunks: Sequence[Any], max_bytes: int) -> list[Any]:
    """Those of `chunks` whose values lie in lists and might decode to more than `max_bytes`.

    Args:
        schema: Parquet schema of the file.
    """
    leaves = [schema.column(k) for k in range(len(schema))]
    listed = {leaf.path for leaf in leaves if leaf.max_repetition_level and leaf.physical_type == "BYTE_ARRAY"}
    return [
        chunk
        for chunk in chunks
        if chunk.path_in_schema in listed and int(chunk.num_values) * _largest(file, chunk) > max_bytes
    ]


def logical_bytes(array: pa.Array) -> int:
    """Bytes of an array if every index into a dictionary were its value."""
    if pa.types.is_dictionary(array.type):
        lengths = pc.take(pc.binary_length(array.dictionary), array.indices)
        return int(pc.sum(pc.cast(lengths, pa.int64())).as_py() or 0)
    if pa.types.is_struct(array.type):
        return sum(map(logical_bytes, array.flatten()))
    if pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
        return LEAST_BYTES_PER_VALUE * len(array) + logical_bytes(array.flatten())
    return int(array.nbytes)


def _largest(file: StoredFile, chunk: Any) -> int:
    """Bytes that one value of a chunk may take while the chunk holds it once; 0 where every value is stored."""
    if "DELTA_BYTE_ARRAY" in map(str, chunk.encodings):  # values share what they begin with
        return int(chunk.total_uncompressed_size)
    start = int(chunk.data_page_offset)
    if chunk.has_dictionary_page and 0 < int(chunk.dictionary_page_offset) < start:
        start = int(chunk.dictionary_page_offset)
    if not 0 <= start < file.size:
        return 0  # does not decode
    return _dictionary_bytes(file.read(start, min(_HEAD_BYTES, file.size - start)))


def _dictionary_bytes(head: bytes) -> int:
    """Bytes of a dictionary page by its header (Thrift's compact protocol: type, size decoded); 0 for another page."""
    kind, at = _integer(head, 0)
    size, _ = _integer(head, at)
    return size if kind == _DICTIONARY_PAGE else 0


def _integer(head: bytes, at: int) -> tuple[int, int]:
    """(value, end) of an i32 field that follows the field before it; (-1, at) where there is none."""
    if head[at : at + 1] != b"\x15":
        return -1, at
    value = shift = 0
    for end, byte in enumerate(head[at + 1 : at + 6], start=at + 2):
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return (value >> 1) ^ -(value & 1), end
    return -1, at
