"""Compiled kernels on disk, checked: a process start loads machine code in milliseconds instead of compiling it.

    file = sha256 of the rest | stamp of the sources | pickle of the machine code
    name = kernel, Python version, hash of (signature, CPU)

Stale code never runs: the stamp covers the module of the kernel and every module of this package that it imports,
directly or not, where numba's own cache looks at one file. Damaged code never runs: the checksum covers every byte;
such a file is replaced after one warning. Any number of processes may start at once: one file for each kernel,
replaced as a whole. Loading skips numba's compiler tables (0.2-0.3 s), which a process that compiles nothing can spare.

Folders: `NUMBA_CACHE_DIR` alone where it is set, else `__pycache__` of this package, then `numba` in the user's cache
folder. Both are read; what had to be compiled goes to the first that can be written. So a cache made when an image is
built serves its read-only installation too.

Security: a cache file is code. Folders and files that anybody may write, or that belong to neither this user, root,
nor the owner of the installation, are not read.
"""

import hashlib
import importlib.resources
import logging
import os
import pickle
import re
import stat
import sys
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from importlib import import_module
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

import numba

# Insides of numba, untyped. `add_cache` and the cache survive a numba in which they have changed.
_numba: Any = numba
_llvm: Any = import_module("llvmlite.binding")

_log = logging.getLogger("packing")
_PACKAGE = Path(__file__).parent
_IMPORT = re.compile(rb"^\s*(?:from|import)\s+(\w+(?:\.\w+)*)", re.MULTILINE)
_DIGEST_SIZE = hashlib.sha256().digest_size
_warned: set[str] = set()

counts: Counter[str] = Counter()  # kernels "loaded" and "compiled" by this process


def warn_once(kind: str, text: str, *values: object, level: int = logging.WARNING) -> None:
    """Log a message, but only the first of its kind in this process."""
    if kind not in _warned:
        _warned.add(kind)
        _log.log(level, text, *values)


def add_cache(kernel: Any, function: Callable[..., Any]) -> None:
    """Let a kernel (numba's dispatcher of `function`) load and save its machine code.

    Where that is impossible (a changed numba, no source files), kernels compile in every process, after one warning.
    """
    if function.__closure__:
        raise TypeError(f"kernel {function.__qualname__} has a closure, which the cache cannot tell apart")
    try:
        if not hasattr(kernel, "_cache"):
            raise TypeError(f"numba {numba.__version__} differs from those this cache was written for")
        kernel._cache = KernelCache(function)
    except Exception as error:  # whatever it is, kernels work without a cache
        warn_once("add", "compiled kernels are not cached, so each process compiles them anew: %s", _describe(error))


def _describe(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


class KernelCache:
    """The cache of one kernel, in the shape that numba's dispatcher calls; no failure in here is ever raised."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._stamp = _stamp(function)
        self._flushed = False

    @property
    def cache_path(self) -> str:
        """Where numba's statistics say the cache is."""
        return str(next(_folders()))

    def flush(self) -> None:
        """Load nothing any more: `Dispatcher.recompile` asks for fresh code."""
        self._flushed = True

    def load_overload(self, signature: Any, target_context: Any) -> Any:
        """The compiled kernel, or None when it has to be compiled."""
        try:
            name = self._file_name(signature, target_context.codegen())
            for folder in () if self._flushed else _folders():
                payload = _read(folder / name, self._stamp)
                if payload is not None:
                    compiled = _rebuild(payload, target_context)
                    counts["loaded"] += 1
                    return compiled
        except Exception as error:  # whatever it is, compiling anew is right
            warn_once("load", "cannot load a kernel from its cache, so it is compiled anew: %s", _describe(error))
        if not counts:  # the first kernel of this process: several seconds that would look like a hang
            warn_once("begin", "compiling kernels, once per installation", level=logging.INFO)
        return None

    def save_overload(self, signature: Any, compiled: Any) -> None:
        """Keep a kernel that was just compiled."""
        counts["compiled"] += 1
        try:
            if compiled.lifted or compiled.library.has_dynamic_globals:
                raise TypeError(f"{self._function.__qualname__} refers to objects of this process")
            data = self._stamp + _numba.core.serialize.dumps((_externals(compiled.library), compiled._reduce()))
            _write(self._file_name(signature, compiled.codegen), hashlib.sha256(data).digest() + data)
        except Exception as error:  # the kernel itself is fine
            warn_once("save", "cannot cache a compiled kernel, so each process compiles it anew: %s", _describe(error))

    def _file_name(self, signature: Any, codegen: Any) -> str:
        key = repr((signature, codegen.magic_tuple()))
        kernel = f"{self._function.__module__}.{self._function.__qualname__}".replace("<", "").replace(">", "")
        version = f"{sys.implementation.cache_tag}{getattr(sys, 'abiflags', '')}"
        return f"{kernel}.{version}.{hashlib.sha256(key.encode()).hexdigest()[:16]}.nbc"


def _folders() -> Iterator[Path]:
    installation = f"packing_{hashlib.sha256(str(_PACKAGE).encode()).hexdigest()[:16]}"
    if _numba.config.CACHE_DIR:
        yield Path(_numba.config.CACHE_DIR, installation)
        return
    yield _PACKAGE / "__pycache__"
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if os.path.isabs(home):
        yield Path(home, "numba", installation)


def _distrust(path: Path, status: os.stat_result) -> str | None:
    """Why code from `path`, of that status, must not run, or None."""
    if status.st_mode & stat.S_IWOTH:
        return f"anybody may write {path}"
    if status.st_uid not in {os.geteuid(), 0, _owner()}:
        return f"{path} belongs to user {status.st_uid}"
    return None


@cache
def _owner() -> int:
    return next((folder.stat().st_uid for folder in (_PACKAGE, *_PACKAGE.parents) if folder.exists()), 0)


def _read(path: Path, stamp: bytes) -> bytes | None:
    """The payload of a cache file that is whole, of these sources, and written by someone we trust.

    A link is followed: who may write the folder decides what it holds, and the file it names is checked as well.
    """
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            status = os.fstat(file.fileno())  # of what is read, whatever the name points to by now
            if not stat.S_ISREG(status.st_mode):
                raise IsADirectoryError  # or a pipe, or a device
            reason = _distrust(path.parent, path.parent.stat()) or _distrust(path, status)
            if reason:
                warn_once("trust", "the cache of compiled kernels is not used: %s", reason)
                return None
            data = file.read()
    except IsADirectoryError:
        warn_once("kind", "%s is not a regular file, so this kernel is compiled anew; remove it", path)
        return None
    except OSError:
        return None
    if hashlib.sha256(data[_DIGEST_SIZE:]).digest() != data[:_DIGEST_SIZE]:
        warn_once("damage", "%s is damaged, so this kernel is compiled anew", path)
        return None
    if data[_DIGEST_SIZE : 2 * _DIGEST_SIZE] != stamp:
        return None
    return data[2 * _DIGEST_SIZE :]


def _open_at_once(path: str, flags: int) -> int:
    """Without O_NONBLOCK, opening a pipe waits for somebody who writes to it."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def _write(name: str, data: bytes) -> None:
    failures = []
    for folder in _folders():
        temporary = folder / f"{name}.{uuid.uuid4().hex}.tmp"
        try:
            folder.mkdir(mode=0o755, parents=True, exist_ok=True)
            reason = _distrust(folder, folder.stat())
            if reason:
                raise PermissionError(reason)
            with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644), "wb") as file:
                file.write(data)
            temporary.replace(folder / name)
            return
        except IsADirectoryError:  # `_read` has warned of a folder of this name
            continue
        except OSError as error:
            failures.append(str(error))
        finally:  # also when the user interrupts
            with suppress(OSError):
                temporary.unlink()
    if failures:
        warn_once(
            "write",
            "no writable cache for compiled kernels, so each process compiles them anew (%s). "
            "Set NUMBA_CACHE_DIR to a writable folder.",
            "; ".join(failures),
        )


def _externals(library: Any) -> tuple[str, ...]:
    """Symbols that machine code takes from the process: loading it without them would end the process."""
    module = library._final_module
    symbols = (*module.functions, *module.global_variables)
    return tuple(symbol.name for symbol in symbols if symbol.is_declaration and not symbol.name.startswith("llvm."))


def _rebuild(payload: bytes, target_context: Any) -> Any:
    externals, reduced = pickle.loads(payload)
    _numba.core.runtime.rtsys.initialize(target_context)
    if not all(_llvm.address_of_symbol(symbol) for symbol in externals):
        target_context.refresh()  # loads all of numba's compiler, and with it all symbols
    return _numba.core.compiler.CompileResult._rebuild(target_context, *reduced)


def _stamp(function: Callable[..., Any]) -> bytes:
    """Hash of what the machine code of a kernel is made from: compiler, its module, and what that imports from here.

    Followed are imports of this package and of the kernel's own, which may be another one above it.
    """
    code = function.__code__
    own: bytes = function.__globals__["__loader__"].get_data(code.co_filename)
    followed = frozenset({_PACKAGE.name, function.__module__.split(".")[0]})
    texts, pending = {"": own}, set(_imports(own, followed))
    while pending:
        module = pending.pop()
        if module not in texts:
            texts[module] = _text(module)
            pending |= _imports(texts[module], followed)
    hasher = hashlib.sha256(f"{numba.__version__} {_llvm.llvm_version_info} {code.co_firstlineno}".encode())
    for module in sorted(texts):
        hasher.update(hashlib.sha256(texts[module]).digest())
    return hasher.digest()


@cache
def _imports(text: bytes, packages: frozenset[str]) -> frozenset[str]:
    names = (name.decode() for name in _IMPORT.findall(text))
    return frozenset(name for name in names if name.split(".")[0] in packages)


@cache
def _text(module: str) -> bytes:
    """Source of a module, or of everything in a subpackage (its members may be what is imported)."""
    package, *rest = module.split(".")
    *folders, last = ("", *rest)
    folder = importlib.resources.files(package).joinpath(*folders[1:])
    if last and folder.joinpath(f"{last}.py").is_file():
        return folder.joinpath(f"{last}.py").read_bytes()
    return _all_text(folder.joinpath(last) if last else folder)


def _all_text(folder: Traversable) -> bytes:
    texts = []
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.name.endswith(".py"):
            texts.append(entry.read_bytes())
        elif entry.is_dir() and entry.name != "__pycache__":
            texts.append(_all_text(entry))
    return b"".join(texts)
