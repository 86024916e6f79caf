"""A column that is no single array but reads like one: joined from several files, or with some rows replaced.

column[5], column[2:9], column[[7, 1]]   --rows, slices, lists of rows-->   only what is asked for
column + 1, np.sum(column), column.max() --anything else-->                 the whole column, made for that moment
"""

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin
from numpy.typing import DTypeLike, NDArray

from dataloaders.index_format import Column


class DuckColumn(NDArrayOperatorsMixin):
    """A read-only array [length] by NumPy's protocols; what is not answered by rows works on a whole that is not kept.

    Args:
        dtype: of the values.
        length: their number.
    """

    # Not in `__getattr__`: it is asked for by every conversion.
    ndim = 1

    def __init__(self, dtype: DTypeLike, length: int) -> None:
        self.dtype, self._length = np.dtype(dtype), length

    @abstractmethod
    def _row(self, row: int) -> Any:
        """The value of a row in [0, length)."""

    @abstractmethod
    def _slice(self, start: int, stop: int) -> Column:
        """Rows [start, stop), within the column."""

    @abstractmethod
    def _gather(self, rows: NDArray[np.int64]) -> Column:
        """The values of rows in [0, length), int64 [k] -> [k]."""

    def __len__(self) -> int:
        return self._length

    @property
    def shape(self) -> tuple[int]:
        """(length,)."""
        return (self._length,)

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> Column:
        if copy is False:
            raise ValueError("this column cannot be had without a copy: it does not lie in one piece")
        return self._whole().astype(dtype or self.dtype, copy=False)

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        plain = (np.asarray(value) if isinstance(value, DuckColumn) else value for value in inputs)
        return getattr(ufunc, method)(*plain, **options)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # also while it is unpickled, when there is nothing yet
            raise AttributeError(f"a column has no attribute {name!r}")
        return getattr(self._whole(), name)

    def __iter__(self) -> Iterator[Any]:
        yield from self._whole()

    def __getitem__(self, rows: Any) -> Any:
        if isinstance(rows, (int, np.integer)):
            at = int(rows) + self._length if rows < 0 else int(rows)
            if not 0 <= at < self._length:
                raise IndexError(f"row {rows} of a column of {self._length}")
            return self._row(at)
        if isinstance(rows, slice) and rows.step in (None, 1):
            start, stop, _ = rows.indices(self._length)
            return self._slice(start, max(start, stop))
        wanted = np.asarray(rows) if isinstance(rows, (np.ndarray, list)) else None
        if wanted is not None and wanted.ndim == 1 and wanted.dtype.kind in "iu":
            return self._gather(self._within(wanted.astype(np.int64)))
        return self._whole()[rows]

    def _within(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        at = np.where(rows < 0, rows + self._length, rows)
        if len(at) and (int(at.min()) < 0 or int(at.max()) >= self._length):
            raise IndexError(f"rows {rows.min()} to {rows.max()} of a column of {self._length}")
        return at

    def _whole(self) -> Column:
        return self._slice(0, self._length)
