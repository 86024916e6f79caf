"""A folder of files and the local range server that serves them."""

import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from dataloaders.storage import StorageOptions
from tools.benchmarks.range_server import Behaviour, RangeServer

Serve = Callable[..., RangeServer]


@pytest.fixture(scope="session")
def content() -> bytes:
    """300,000 bytes, no two stretches of them alike."""
    return random.Random(0).randbytes(300_000)


@pytest.fixture
def folder(tmp_path: Path, content: bytes) -> Path:
    """A folder with three files, one of them empty."""
    served = tmp_path / "served"
    served.mkdir()
    (served / "a.bin").write_bytes(content)
    (served / "b.bin").write_bytes(content[::-1])
    (served / "empty.bin").write_bytes(b"")
    return served


@pytest.fixture
def serve(folder: Path) -> Iterator[Serve]:
    """`serve(latency_s=..., ...)`: a running server of `folder` that behaves so."""
    with ExitStack() as stack:
        yield lambda **behaviour: stack.enter_context(RangeServer(folder, Behaviour(**behaviour)))


@pytest.fixture
def quick() -> Callable[..., StorageOptions]:
    """`quick(**options)`: options with short waits, and no second requests where this machine is slow."""

    def make(**options: object) -> StorageOptions:
        return StorageOptions(**{"backoff_s": 0.01, "timeout_s": 5.0, "hedge_share": 0.0, **options})  # type: ignore[arg-type]

    return make
