"""The one decorator that compiles kernels: cached where a cache can be written, uncached otherwise, same results.

Kernels are lazy (compiled at the first call), release the GIL, and never use parallel=True: they run inside forked
loader workers, where a thread pool started by the parent would abort. With NUMBA_DISABLE_JIT=1 they are plain Python.
"""

import logging
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

_log = logging.getLogger("packing")
_Function = TypeVar("_Function", bound=Callable[..., Any])
_warned = False


def jit(function: _Function) -> _Function:
    """Compile `function` with numba (nogil; cached on disk when possible).

    A read-only installation without a writable home has no place for a cache. Then kernels compile anew in every
    process, and one warning says how to avoid that.
    """
    try:
        return cast(_Function, numba.njit(cache=True, nogil=True, error_model="numpy")(function))
    except RuntimeError as error:  # numba's "cannot cache function: no locator available"
        if "cache" not in str(error):
            raise
        _warn_once(error)
        return cast(_Function, numba.njit(nogil=True, error_model="numpy")(function))


def jit_inner(function: _Function) -> _Function:
    """Compile a function that only other kernels call: no wrapper and no cache file of its own, so it compiles faster.

    It belongs in the file of its caller, whose cache is renewed when that file changes.
    """
    options: dict[str, Any] = {
        "nogil": True,
        "error_model": "numpy",
        "no_cpython_wrapper": True,
        "no_cfunc_wrapper": True,
    }
    return cast(_Function, numba.njit(**options)(function))


def _warn_once(error: RuntimeError) -> None:
    global _warned  # noqa: PLW0603  one warning for all kernels of the process
    if not _warned:
        _warned = True
        _log.warning(
            "no writable cache for compiled kernels, so each process compiles them anew (%s). "
            "Set NUMBA_CACHE_DIR to a writable folder.",
            error,
        )
