"""One storage in several processes: after a fork, over pickle, at the end of the interpreter, and under Ctrl-C."""

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dataloaders.storage import Storage, StorageOptions
from tools.benchmarks.range_server import RangeServer

pytest.importorskip("aiohttp")
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning")

Serve = Callable[..., RangeServer]
Quick = Callable[..., StorageOptions]


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_child_processes_read_the_same_bytes(serve: Serve, quick: Quick, content: bytes, method: str) -> None:
    server = serve()
    wanted = [(server.url("a.bin"), offset, 100) for offset in range(0, 100_000, 5000)]
    expected = [content[offset : offset + 100] for _, offset, _ in wanted]
    with Storage(quick()) as storage:
        assert storage.read_many(wanted) == expected
        storage.prefetch([(server.url("b.bin"), 0, 1000)])
        with multiprocessing.get_context(method).Pool(2) as pool:
            assert pool.map(storage.read_many, [wanted] * 6) == [expected] * 6
        before = storage.counters.retries
        assert storage.read_many(wanted) == expected  # the parent's connections are undisturbed
        assert storage.counters.retries == before


def test_a_forked_child_that_ends_does_not_touch_the_parents_connections(
    serve: Serve, quick: Quick, content: bytes
) -> None:
    server = serve()
    with Storage(quick(max_tries=1)) as storage:
        file = storage.open(server.url("a.bin"))
        for _ in range(3):
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    code = 0 if file.size == 300_000 and storage.counters.requests == 0 else 2
                    storage.close()
                finally:
                    os._exit(code)
            assert os.waitpid(child, 0)[1] == 0
            assert file.read(1000, 50) == content[1000:1050]


def test_the_local_cache_serves_other_processes_and_later_runs(
    serve: Serve, quick: Quick, content: bytes, tmp_path: Path
) -> None:
    server = serve()
    wanted = [(server.url("a.bin"), offset, 1000) for offset in range(0, 100_000, 5000)]
    expected = [content[offset : offset + 1000] for _, offset, _ in wanted]
    options = quick(cache_dir=tmp_path / "cache")
    with Storage(options) as storage:
        (state,) = storage.states([wanted[0][0]])
        storage.prefetch(wanted[:5])
        assert storage.read_many(wanted) == expected
        assert storage.counters.cache_hits == 0
        assert storage.read_many([(url, offset + 10, 100) for url, offset, _ in wanted])[1] == content[5010:5110]
        assert storage.counters.cache_hits == len(wanted)
    requests = server.counts.requests
    with Storage(pickle.loads(pickle.dumps(options))) as storage:
        storage.open(state.url, state)
        storage.prefetch(wanted)
        assert storage.read_many(wanted) == expected
        assert (storage.counters.cache_hits, storage.counters.cache_bytes_read) == (len(wanted), 1000 * len(wanted))
    assert server.counts.requests == requests


READER = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from dataloaders.storage import Storage, StorageOptions
storage = Storage(StorageOptions(hedge_share=0.0))
url = sys.argv[1]
if sys.argv[2] == "end":
    storage.prefetch([(url, 0, 100_000)])
    print(len(storage.read_many([(url, 0, 10)])[0]), flush=True)
else:
    print("reading", flush=True)
    try:
        storage.read_many([(url, i * 3000, 10) for i in range(90)])
    except KeyboardInterrupt:
        print("stopped", flush=True)
"""


def test_the_interpreter_ends_without_a_word_while_requests_are_under_way(serve: Serve) -> None:
    server = serve()
    command = [sys.executable, "-X", "dev", "-W", "error", "-c", READER, server.url("a.bin"), "end"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "10\n", "")


def test_ctrl_c_ends_a_read_at_once(serve: Serve) -> None:
    server = serve(latency_s=25.0)
    command = [sys.executable, "-c", READER, server.url("a.bin"), "interrupt"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as reader:
        assert reader.stdout is not None
        assert reader.stderr is not None
        assert reader.stdout.readline() == "reading\n"
        while not server.counts.requests:
            time.sleep(0.01)
        reader.send_signal(signal.SIGINT)
        assert reader.stdout.readline() == "stopped\n"
        assert reader.wait(20) == 0  # the server would have taken longer
        assert reader.stderr.read() == ""


def test_the_range_server_runs_as_a_command(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"abcdef")
    command = [sys.executable, "-m", "tools.benchmarks.range_server", str(tmp_path), "--latency-s", "0.01"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as served:
        assert served.stdout is not None
        port = int(served.stdout.readline())
        with Storage() as storage:
            assert storage.read_many([(f"http://127.0.0.1:{port}/a.bin", 2, 3)]) == [b"cde"]
        served.kill()
