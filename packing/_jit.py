"""The decorators that compile kernels.

Kernels are lazy (compiled or loaded from packing/_kernel_cache.py at the first call), release the GIL, and never use
parallel=True: they run inside forked loader workers, where a thread pool started by the parent would abort. With
NUMBA_DISABLE_JIT=1 they are plain Python.

A fork waits until no other thread compiles or loads a kernel (seconds at worst): the child would inherit numba's lock
from a thread that does not exist in it, and its first kernel would wait for ever. The lock of a module that such a
thread imports is inherited likewise, so nothing may be imported at a call outside numba's lock: see `numpy.ma` below.
"""

import os
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, TypeVar, cast

import numba
import numpy.ma  # noqa: F401  numba asks for it at the first call of a kernel with an array

from packing._kernel_cache import add_cache

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _guard_forks() -> None:
    try:
        lock: Any = import_module("numba.core.compiler_lock").global_compiler_lock
        acquire, release = lock.acquire, lock.release
    except (ImportError, AttributeError):  # another numba: kernels work, only such a fork may hang
        return
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=acquire, after_in_parent=release, after_in_child=release)


_guard_forks()


def jit(function: _Function) -> _Function:
    """Compile a kernel: a function that Python calls, always with the same types of arguments."""
    kernel = _compile(function)
    if kernel is not function:
        add_cache(kernel, function)
    return kernel


def jit_inner(function: _Function) -> _Function:
    """Compile a function that only kernels call: no entry for Python and no cache file of its own, so it costs less.

    It may live in another file than its callers: their cache is renewed when either file changes.
    """
    inner = _compile(function, no_cpython_wrapper=True)
    if inner is not function:
        _widen_literals(inner)
    return inner


def jit_inline(function: _Function) -> _Function:
    """Copy a function into its only caller: many array arguments are not counted at every call then."""
    njit: Any = numba.njit
    return cast(_Function, njit(nogil=True, error_model="numpy", inline="always")(function))


def _compile(function: _Function, **options: bool) -> _Function:
    njit: Any = numba.njit  # its types leave out some options
    return cast(_Function, njit(nogil=True, error_model="numpy", no_cfunc_wrapper=True, **options)(function))


def _widen_literals(inner: Any) -> None:
    """Compile `f(x, 0)`, `f(x, -1)` and `f(x, y)` once: numba gives each literal its own type and code."""
    resolve, plain = inner.get_call_template, cast(Any, numba.types).unliteral

    def widened(args: Sequence[Any], keywords: dict[str, Any]) -> Any:
        return resolve(tuple(map(plain, args)), {name: plain(value) for name, value in keywords.items()})

    inner.get_call_template = widened
