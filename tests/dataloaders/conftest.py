"""A build of an index that is ended while its workers scan."""

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

_SCRIPT = """
import multiprocessing, os, signal, sys
from dataloaders.estimators import Qwen25VLEstimator

def act(state):
    if state.shards == 2 and not done:
        done.append(1)
        children = multiprocessing.active_children()
        print(*(child.pid for child in children), flush=True)
        if sys.argv[3] == "worker":
            for child in children:
                os.kill(child.pid, signal.SIGKILL)
        else:
            os.kill(os.getpid(), getattr(signal, sys.argv[3]))

done = []
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs start with it ignored
"""


def _gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.fixture
def end_build() -> Callable[[str, str, Path, str], None]:
    """`end_build(build, urls, folder, signal_name)`: end a build after two pieces, and see that it leaves nothing.

    Args:
        build: code that builds from `sys.argv[1]` to `sys.argv[2]` by two workers, with `progress=act`.
        signal_name: sent to the process that builds; `worker`: SIGKILL to its workers.
    """

    def run(build: str, urls: str, folder: Path, signal_name: str) -> None:
        command = [sys.executable, "-c", _SCRIPT + build, urls, str(folder), signal_name]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        expected = {"SIGKILL": "", "SIGINT": "KeyboardInterrupt", "worker": "SourceError: a scanning process was lost"}
        assert done.returncode != 0
        assert expected[signal_name] in done.stderr
        workers = [int(pid) for pid in done.stdout.split()]
        assert len(workers) == 2
        deadline = time.monotonic() + 20
        while not all(map(_gone, workers)):
            assert time.monotonic() < deadline, "workers outlive the build"
            time.sleep(0.05)
        assert not folder.exists()

    return run
