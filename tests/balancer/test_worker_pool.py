"""The pool of loader workers: order, replacement of workers that hang or die, and nothing left behind."""

import gc
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import balancer
from balancer import worker_channel
from balancer.errors import BalancerError, LostWorkerError
from balancer.worker_channel import Channel, Parcel, from_bytes, from_file
from balancer.worker_files import memory_file
from balancer.worker_memory import MemoryTrend, MemoryWatch, own_bytes
from balancer.worker_pool import Cell, Done, Failed, WorkerPool, WorkerTaskError
from balancer.worker_process import Slot

# A module of its own: workers find it through the search path of the process that starts them.
READER = '''
import os, signal, sys, threading, time
from pathlib import Path
import numpy as np

class Mute(Exception):
    """Does not survive pickling."""
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")

class Reader:
    """Sample i is an array of i. `acts` says what happens in its place: (what, argument)."""

    def __init__(self, folder, acts=None, size=4, room=0):
        self.folder, self.acts, self.size, self.room, self.kept = str(folder), dict(acts or {}), size, room, []

    def first_time(self, name):
        try:
            os.close(os.open(os.path.join(self.folder, name), os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return False
        return True

    def note(self, line):
        with open(os.path.join(self.folder, "log"), "a") as log:
            log.write(f"{os.getpid()} {line}\\n")

    def prefetch(self, sample_ids):
        self.note(f"prefetch {list(sample_ids)}")

    def room_bytes(self, sample_ids):
        return self.room * len(sample_ids)

    def load(self, sample_id, *, allocate):
        what, argument = self.acts.get(sample_id, ("", None))
        if what == "sleep":
            time.sleep(argument)
        elif what == "sleep once" and self.first_time(f"slept{sample_id}"):
            time.sleep(argument)
        elif what == "hang, stand-in slow":
            time.sleep(3600)
        elif what == "kill":
            os.kill(os.getpid(), argument)
        elif what == "kill once" and self.first_time(f"killed{sample_id}"):
            os.kill(os.getpid(), argument)
        elif what == "exit":
            os._exit(argument)
        elif what == "raise":
            raise argument
        elif what == "mute":
            raise Mute("left", "right")
        elif what == "leak":
            self.kept.append(np.ones(argument, dtype=np.uint8))
        elif what == "odd":
            return lambda: 0
        if self.room:
            made = allocate(1, self.size)
            made[...] = sample_id
            return made[0]
        return np.full(self.size, sample_id)

    def stand_in(self, sample_id, reason, *, allocate):
        what, argument = self.acts.get(sample_id, ("", None))
        if what == "hang, stand-in slow":
            time.sleep(argument)
        return reason

    def pack(self, samples, *, step, microbatch_index):
        return os.getpid(), step, microbatch_index, samples

    def place(self, sample_id):
        return f"shard a.tar, key {sample_id}"

class Broken(Reader):
    def __setstate__(self, state):
        raise RuntimeError("no such table")
'''


@pytest.fixture(scope="module")
def readers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    folder = tmp_path_factory.mktemp("readers")
    (folder / "readers_of_this_test.py").write_text(READER)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        import readers_of_this_test  # type: ignore[import-not-found]

        yield readers_of_this_test
        del sys.modules["readers_of_this_test"]


@pytest.fixture
def make(readers: Any, tmp_path: Path) -> Callable[..., Any]:
    return lambda acts=None, **options: readers.Reader(tmp_path, acts, **options)


def cells(count: int, size: int = 2) -> list[Cell]:
    return [
        Cell(step=n // 2, microbatch=n % 2, sample_ids=tuple(range(n * size, n * size + size))) for n in range(count)
    ]


def run(reader: Any, work: list[Cell], **options: Any) -> list[Done | Failed]:
    return list(WorkerPool(reader, **{"num_workers": 2, **options}).run(work))


def ids_of(results: list[Done | Failed]) -> list[Any]:
    """First entry of every sample, or the reason of its stand-in."""
    assert all(isinstance(result, Done) for result in results), results
    return [item if isinstance(item, str) else int(item[0]) for result in results for item in result.value[3]]


def children() -> list[int]:
    # Servers of multiprocessing, started by other tests.
    tracker = getattr(resource_tracker._resource_tracker, "_pid", None)
    server = getattr(forkserver._forkserver, "_forkserver_pid", None)
    found = [int(word) for word in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    return [pid for pid in found if pid not in (tracker, server)]


def open_files() -> list[str]:
    gc.collect()
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found.append(os.readlink(entry))
        except FileNotFoundError:
            continue
    return sorted(name for name in found if not name.startswith("/proc"))


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """After every test: no process, no zombie, no descriptor more than before."""
    before = open_files()
    yield
    assert children() == []
    assert [name for name in open_files() if "balancer" in name] == []
    assert len(open_files()) == len(before)


# --- order


@pytest.mark.parametrize("num_workers", [1, 3])
def test_results_come_in_the_order_of_the_cells_whoever_made_them(make: Callable[..., Any], num_workers: int) -> None:
    acts = {0: ("sleep", 0.3), 5: ("sleep", 0.1)}
    results = run(make(acts), cells(12), num_workers=num_workers)
    assert ids_of(results) == list(range(24))
    assert [result.number for result in results] == list(range(12))
    assert [result.value[1:3] for result in results if isinstance(result, Done)] == [(n // 2, n % 2) for n in range(12)]
    assert len({result.value[0] for result in results if isinstance(result, Done)}) == num_workers


def test_no_more_workers_are_started_than_there_is_work_for(make: Callable[..., Any]) -> None:
    results = run(make(), cells(2), num_workers=8)
    assert len({result.value[0] for result in results if isinstance(result, Done)}) <= 2
    assert run(make(), []) == []


def test_cells_are_taken_only_as_far_ahead_as_allowed(make: Callable[..., Any]) -> None:
    taken: list[int] = []

    def counted() -> Iterator[Cell]:
        for number, cell in enumerate(cells(50)):
            taken.append(number)
            yield cell

    results = WorkerPool(make(), num_workers=2, prefetch=3).run(counted())
    for number, _ in enumerate(results):
        assert len(taken) <= number + 1 + 2 * 3


def test_a_worker_hears_of_all_its_tasks_while_it_is_on_the_first(make: Callable[..., Any], tmp_path: Path) -> None:
    pool = WorkerPool(make({1: ("sleep once", 3600)}), num_workers=1, prefetch=3, sample_timeout_s=2.0)
    results = pool.run(cells(6))
    assert isinstance(next(results), Done)
    told = prefetched(tmp_path)
    assert told[:3] == ["[0, 1]", "[2, 3]", "[4, 5]"], "while sample 1 hangs, and no more than the worker was given"
    assert len(list(results)) == 5
    # The worker that hung is replaced, and its successor hears of what is left; sample 1 is not touched again.
    assert prefetched(tmp_path) == [*told[:3], "[0]", *[f"[{i}, {i + 1}]" for i in range(2, 12, 2)]]


def prefetched(folder: Path) -> list[str]:
    lines = (folder / "log").read_text().splitlines()
    return [line.split(" ", 2)[2] for line in lines if "prefetch" in line]


def test_a_worker_is_a_fresh_interpreter_without_torch(readers: Any, tmp_path: Path) -> None:
    class_of_main = "torch" in sys.modules
    probe = tmp_path / "probe_of_this_test.py"
    probe.write_text(
        "import sys\nfrom readers_of_this_test import Reader\nclass Probe(Reader):\n"
        "    def pack(self, samples, *, step, microbatch_index):\n"
        "        return [name for name in ('torch', 'numba') if name in sys.modules]\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(tmp_path)
        import probe_of_this_test  # type: ignore[import-not-found]

        (result,) = run(probe_of_this_test.Probe(tmp_path), cells(1))
    assert isinstance(result, Done)
    assert result.value == [], class_of_main


def test_arrays_made_in_the_room_of_a_task_arrive_whatever_becomes_of_workers_and_tasks(
    make: Callable[..., Any],
) -> None:
    acts = {5: ("kill once", signal.SIGKILL), 9: ("raise", OSError("gone")), 30: ("sleep", 3600), 43: ("odd", None)}
    reader = make(acts, size=3_000, room=12_000)
    held = run(reader, cells(16, size=4), num_workers=2, prefetch=2, sample_timeout_s=1.0)
    assert [result.number for result in held if isinstance(result, Failed)] == [2, 10]
    for result in held:
        if isinstance(result, Done):
            samples = dict(zip(range(4 * result.number, 4 * result.number + 4), result.value[3], strict=True))
            assert isinstance(samples.pop(30, ""), str)
            for sample_id, sample in samples.items():
                assert (sample == sample_id).all(), "no later task has written over it"
                assert not sample.flags.owndata


# --- workers that hang


def test_vd07_a_sample_that_stalls_is_replaced_and_named_with_its_place_and_worker(
    make: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        results = run(make({5: ("sleep", 3600)}), cells(8), sample_timeout_s=1.0)
    found = ids_of(results)
    assert [found[i] for i in range(16) if i != 5] == [i for i in range(16) if i != 5]
    assert found[5].startswith("timeout: not loaded within 1 s by loader worker ")
    assert "shard a.tar, key 5" in found[5]
    (line,) = [record.getMessage() for record in caplog.records if record.name == "balancer.worker_pool"]
    assert "loader worker" in line
    assert "sample 5 (shard a.tar, key 5) within 1 s" in line


def test_a_worker_that_stalls_without_letting_go_of_the_interpreter_is_replaced(
    make: Callable[..., Any],
) -> None:
    found = ids_of(run(make({1: ("kill", signal.SIGSTOP)}), cells(3), num_workers=1, sample_timeout_s=1.0))
    assert found[1].startswith("timeout: ")
    assert found[2:] == [2, 3, 4, 5]


def test_two_samples_of_a_task_that_stall_are_both_replaced(make: Callable[..., Any]) -> None:
    acts = {0: ("sleep", 3600), 2: ("sleep", 3600)}
    found = ids_of(run(make(acts), cells(2, size=3), sample_timeout_s=0.7))
    assert [str(item).partition(":")[0] for item in found] == ["timeout", "1", "timeout", "3", "4", "5"]


def test_a_stand_in_that_takes_longer_than_a_sample_may_is_waited_for(make: Callable[..., Any], tmp_path: Path) -> None:
    found = ids_of(run(make({0: ("hang, stand-in slow", 1.0)}), cells(1), num_workers=1, sample_timeout_s=0.3))
    assert found[0].startswith("timeout: not loaded within 0.3 s")
    assert found[1:] == [1]
    assert len({line.split()[0] for line in (tmp_path / "log").read_text().splitlines()}) == 2  # workers


def test_a_stand_in_that_hangs_ends_the_pool_with_a_cause(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("balancer.worker_pool._STAND_IN_S", 0.3)
    options = {"num_workers": 1, "sample_timeout_s": 0.3, "max_worker_deaths": 1}
    (failed,) = run(make({0: ("hang, stand-in slow", 3600.0)}), cells(1), **options)
    assert isinstance(failed, Failed)
    assert isinstance(failed.error, LostWorkerError)
    assert "was lost 2 times" in str(failed.error)
    assert "no stand-in within 0.3 s at sample 0" in str(failed.error)


def test_slow_samples_within_the_budget_stay(make: Callable[..., Any]) -> None:
    acts = dict.fromkeys(range(6), ("sleep", 0.2))
    assert ids_of(run(make(acts), cells(1, size=6), sample_timeout_s=3.0)) == list(range(6))


def test_time_between_two_calls_is_not_the_sample_s(make: Callable[..., Any]) -> None:
    results = WorkerPool(make(), num_workers=1, sample_timeout_s=1.0).run(cells(6))
    found = [next(results)]
    time.sleep(1.5)
    assert ids_of([*found, *results]) == list(range(12))


# --- workers that die


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSEGV])
def test_a_worker_that_dies_once_is_replaced_and_nothing_is_lost(
    make: Callable[..., Any], sign: signal.Signals, caplog: pytest.LogCaptureFixture
) -> None:
    assert ids_of(run(make({3: ("kill once", sign)}), cells(8))) == list(range(16))
    (line,) = [record.getMessage() for record in caplog.records if record.name == "balancer.worker_pool"]
    assert f"was lost: {sign.name} at sample 3 (shard a.tar, key 3); it is replaced" in line


def test_a_sample_that_kills_two_workers_becomes_a_stand_in(make: Callable[..., Any]) -> None:
    found = ids_of(run(make({3: ("exit", 7)}), cells(8)))
    assert found[3] == "lost_worker: worker died while loading it twice (exit code 7), shard a.tar, key 3"
    assert [found[i] for i in range(16) if i != 3] == [i for i in range(16) if i != 3]


def test_too_many_deaths_are_an_error_that_lists_the_places(make: Callable[..., Any]) -> None:
    acts = dict.fromkeys(range(6), ("kill once", signal.SIGKILL))
    results = run(make(acts), cells(6, size=1), num_workers=1, max_worker_deaths=3)
    failed = [result.error for result in results if isinstance(result, Failed)]
    assert len(results) == 6
    assert [type(error) for error in failed] == [LostWorkerError] * 3
    text = str(failed[0])
    assert text.startswith("a decoding process was lost 4 times: loader worker 0 (pid ")
    for sample in range(4):
        assert f"SIGKILL at sample {sample} (shard a.tar, key {sample})" in text
    assert text.endswith("lower --num-workers, or see the system's log")


def test_results_that_a_worker_sent_before_it_was_killed_are_not_made_again(
    make: Callable[..., Any], tmp_path: Path
) -> None:
    pool = WorkerPool(make({4: ("sleep once", 3600)}), num_workers=1, prefetch=4)
    results = pool.run(cells(4))
    first = next(results)
    while not (tmp_path / "slept4").exists():  # it is on sample 4
        time.sleep(0.02)
    os.kill(first.value[0] if isinstance(first, Done) else 0, signal.SIGKILL)
    assert ids_of([first, *results]) == list(range(8))
    told = [line.split()[2:] for line in (tmp_path / "log").read_text().splitlines()]
    assert told.count(["[2,", "3]"]) == 1


# --- errors


def test_an_error_is_the_result_of_its_own_task_and_carries_the_worker_s_traceback(make: Callable[..., Any]) -> None:
    results = run(make({2: ("raise", OSError(5, "the disk is gone")), 6: ("mute", None)}), cells(4))
    assert [type(result) for result in results] == [Done, Failed, Done, Failed]
    plain, mute = (result.error for result in results if isinstance(result, Failed))
    assert isinstance(plain, OSError)
    assert plain.errno == 5
    assert "in load\n" in plain.__notes__[0]
    assert isinstance(mute, WorkerTaskError)
    assert str(mute) == "Mute: left and right"
    assert "Traceback" in mute.__notes__[0]


def test_a_result_that_does_not_pickle_is_an_error_of_its_task(make: Callable[..., Any]) -> None:
    results = run(make({2: ("odd", None)}), cells(3))
    assert [type(result) for result in results] == [Done, Failed, Done]
    assert isinstance(results[1], Failed)
    assert "lambda" in str(results[1].error)


def test_a_reader_that_does_not_arrive_is_said_at_once(readers: Any, tmp_path: Path) -> None:
    results = run(readers.Broken(tmp_path), cells(3))
    assert {type(result) for result in results} == {Failed}
    assert isinstance(results[0], Failed)
    assert isinstance(results[0].error, LostWorkerError)
    assert str(results[0].error) == "a loader worker could not start: no such table"
    odd = readers.Reader(tmp_path, {0: ("", lambda: 0)})
    with pytest.raises(BalancerError, match=r"does not travel to loader workers: .*num_workers=0"):
        WorkerPool(odd, num_workers=1)


def test_a_process_that_cannot_be_started_is_an_error_of_every_task(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    results = run(make(), cells(3))
    assert [type(result) for result in results] == [Failed] * 3
    assert isinstance(results[0], Failed)
    assert "could not be started: [Errno 11] Resource temporarily unavailable" in str(results[0].error)


@pytest.mark.parametrize(
    "options", [{"num_workers": 0}, {"prefetch": 0}, {"recycle_after": 0}, {"sample_timeout_s": 0.0}]
)
def test_options_out_of_range_are_refused(make: Callable[..., Any], options: dict[str, Any]) -> None:
    ((name, value),) = options.items()
    with pytest.raises(BalancerError, match=f"{name}={value}"):
        WorkerPool(make(), **{"num_workers": 1, **options})


# --- ends


def test_an_iteration_given_up_half_way_ends_its_workers(make: Callable[..., Any]) -> None:
    results = WorkerPool(make({9: ("sleep", 3600)}), num_workers=2).run(cells(40))
    next(results)
    assert len(children()) == 2
    results.close()  # type: ignore[attr-defined]
    assert children() == []
    forgotten = WorkerPool(make(), num_workers=1).run(cells(40))
    next(forgotten)
    del forgotten
    gc.collect()
    assert children() == []


def test_a_closed_pool_says_so(make: Callable[..., Any]) -> None:
    with WorkerPool(make(), num_workers=1, prefetch=1) as pool:
        results = pool.run(cells(9))
        next(results)
    with pytest.raises(BalancerError, match="was closed while it was being iterated over"):
        list(results)


def test_recycled_workers_are_replaced_and_change_nothing(make: Callable[..., Any]) -> None:
    results = run(make(), cells(10), num_workers=1, recycle_after=3)
    assert ids_of(results) == list(range(20))
    pids = [result.value[0] for result in results if isinstance(result, Done)]
    assert [pids.count(pid) for pid in dict.fromkeys(pids)] == [3, 3, 3, 1]


SCRIPT = """
import os, sys, time
from readers_of_this_test import Reader
from balancer.worker_pool import Cell, WorkerPool

class Mine(Reader):
    "Lives in the script itself."

if __name__ == "__main__":
    acts = {5: ("sleep", 3600)} if sys.argv[2] == "hang" else {}
    pool = WorkerPool(Mine(sys.argv[1], acts), num_workers=2)
    results = pool.run([Cell(step=i, microbatch=0, sample_ids=(i,)) for i in range(40)])
    print(next(results).value[3][0][0], flush=True)
    print(*open(f"/proc/self/task/{os.getpid()}/children").read().split(), flush=True)
    if sys.argv[2] == "hang":
        for _ in results:
            pass
"""


@pytest.fixture
def started(tmp_path: Path, readers: Any) -> Callable[[str], "subprocess.Popen[str]"]:
    def start(mode: str) -> "subprocess.Popen[str]":
        script = tmp_path / "script_of_this_test.py"
        script.write_text(SCRIPT)
        home = str(Path(balancer.__file__).parents[1])
        path = os.pathsep.join([str(Path(readers.__file__).parent), home])
        return subprocess.Popen(
            [sys.executable, str(script), str(tmp_path), mode],
            env={**os.environ, "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            # A job that a shell started in the background ignores SIGINT.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
        )

    return start


def gone(pids: list[int]) -> bool:
    end = time.monotonic() + 20
    while any(Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids):
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def test_a_script_with_a_reader_of_its_own_ends_by_itself_without_closing(started: Callable[[str], Any]) -> None:
    with started("end") as process:
        out, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (0, "")
    first, pids = out.splitlines()
    assert first == "0"
    assert gone([int(pid) for pid in pids.split()])


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_workers_end_with_a_parent_that_is_ended_by_a_signal(
    started: Callable[[str], Any], sign: signal.Signals
) -> None:
    with started("hang") as process:
        assert process.stdout.readline() == "0\n"
        pids = [int(pid) for pid in process.stdout.readline().split()]
        assert len(pids) == 2
        process.send_signal(sign)
        _, err = process.communicate(timeout=60)
    assert process.returncode == -sign
    assert err.count("Traceback") == (1 if sign is signal.SIGINT else 0), err
    assert gone(pids)


# --- channels


@given(
    st.lists(
        hnp.arrays(
            st.sampled_from([np.dtype(name) for name in ("float32", "int64", "int32", "bool", "u1")]),
            hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=7),
        ),
        max_size=5,
    ),
    st.booleans(),
)
def test_what_is_sent_arrives_bit_for_bit_and_writable(arrays: list[np.ndarray], as_file: bool) -> None:
    parcel = Parcel({"arrays": arrays, "text": "é"})
    copy = from_file(parcel.to_file()) if as_file else from_bytes(parcel.to_bytes())
    assert copy["text"] == "é"
    for sent, got in zip(arrays, copy["arrays"], strict=True):
        assert (got.dtype, got.shape) == (sent.dtype, sent.shape)
        assert got.tobytes() == sent.tobytes()
        assert got.flags.writeable


def test_large_arrays_are_mapped_not_copied_and_writing_to_them_is_private() -> None:
    ours, theirs = Channel.pair()
    with theirs:
        other = Channel(theirs)
        sent = np.arange(1 << 18)
        ours.send(sent)
        got = other.receive()
        assert not got.flags.owndata
        assert got.ctypes.data % 64 == 0
        got[0] = 7
        assert sent[0] == 0
        assert np.array_equal(got[1:], sent[1:])
        ours.close()
        with pytest.raises(EOFError):
            other.receive()


def test_arrays_in_a_room_are_not_copied_by_their_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda file, data, at: written.append(len(data)) or real(file, data, at))
    ours, theirs = Channel.pair()
    other = Channel(theirs)
    for n in range(1, 40):
        room = ours.room(4 * 10_000 * n)
        inside, outside = room.allocate(n, 10_000), np.full(50_000, n)
        inside[...] = n
        assert ours.send_parcel(ours.parcel({"in": inside[:, ::1], "out": outside, "none": np.zeros(0)}, room))
        got = other.receive()
        assert sum(written) < outside.nbytes + 2_000
        assert (got["in"] == n).all()
        assert (got["out"] == n).all()
        got["in"][0, 0] = -1.0
        assert inside[0, 0] == n, "writing to what has arrived is private"
        del got
        written.clear()
        other.send("heard")
        ours.receive()
        if n % 5:  # now and then an array of an earlier room is kept
            del room, inside
    ours.close()
    other.close()


def test_a_room_that_is_not_used_or_not_sent_is_free_again() -> None:
    ours, theirs = Channel.pair()
    other = Channel(theirs)
    for value in ("small", np.arange(9_000)):
        for _ in range(30):
            room = ours.room(100_000)
            assert ours.send_parcel(ours.parcel(value, room))
            assert np.array_equal(other.receive(), value)
            other.send("heard")
            ours.receive()
    assert len([name for name in open_files() if "balancer-parcel" in name]) <= 4
    room = ours.room(40_000)
    row = room.allocate(1, 10_000)
    row[...] = 7.0
    sent = 0
    while ours.send_parcel(ours.parcel(row, room), wait=False):
        room = ours.room(40_000)
        row = room.allocate(1, 10_000)
        row[...] = sent = sent + 1
        assert sent < 5_000
    assert [float(other.receive()[0, 0]) for _ in range(sent)] == [7.0, *range(1, sent)]
    del room, row
    ours.close()
    other.close()


def test_memory_that_is_not_there_for_a_room_is_an_error_not_a_signal(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: int) -> None:
        raise OSError(28, "No space left on device")

    ours, theirs = Channel.pair()
    with theirs:
        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fallocate", refuse)
            with pytest.raises(OSError, match="No space left"):
                ours.room(1 << 20)
        room = ours.room(1 << 20)
        assert ours.send_parcel(ours.parcel(room.allocate(1 << 8, 1 << 10), room))
        del room
        ours.close()


def test_a_file_is_written_again_only_when_its_receiver_has_dropped_every_array() -> None:
    def numbers() -> set[int]:
        return {os.stat(f"/proc/self/fd/{n}").st_ino for n in memory_files()}

    def memory_files() -> list[str]:
        found = []
        for entry in Path("/proc/self/fd").iterdir():
            try:
                found += [entry.name] if "balancer-parcel" in os.readlink(entry) else []
            except FileNotFoundError:
                continue
        return found

    ours, theirs = Channel.pair()
    other = Channel(theirs)
    held, expected, most = [], [], 0
    for n in range(60):
        array = np.full(5_000 + 700 * (n % 7), n)
        ours.send(array)
        held.append(other.receive())
        expected.append(n)
        if n % 3 == 2:  # keep one of three for good, drop the oldest of the others
            held.pop(n // 3)
            expected.pop(n // 3)
        other.send("heard")
        assert ours.receive() == "heard"
        most = max(most, len(numbers()))
        for number, got in zip(expected, held, strict=True):
            assert (got == number).all()
    assert most < 60, "files are used again"
    held.clear()
    del got
    ours.close()
    other.close()
    gc.collect()
    assert memory_files() == []


def test_files_that_did_not_fit_do_not_confuse_which_are_free() -> None:
    ours, theirs = Channel.pair()
    other = Channel(theirs)
    sent, received = 0, []
    for _ in range(3):
        while ours.send(np.full(3_000, sent), wait=False):
            sent += 1
            assert sent < 5_000
        while len(received) < sent:
            received.append(other.receive())
        del received[: len(received) // 2]
        received = [None] * (sent - len(received)) + received
        other.send("heard")
        ours.receive()
    for number, got in enumerate(received):
        assert got is None or (got == number).all()
    received.clear()
    del got
    ours.close()
    other.close()


def test_messages_left_unread_do_not_hide_what_was_sent() -> None:
    ours, theirs = Channel.pair()
    other = Channel(theirs)
    ours.send("unread")
    other.send("said")
    other.close()
    assert ours.receive() == "said"
    with pytest.raises(EOFError):
        ours.receive()
    ours.close()


def test_a_full_channel_does_not_block_a_sender_who_does_not_wait() -> None:
    ours, theirs = Channel.pair()
    sent = 0
    while ours.send(bytes(10_000), wait=False):
        sent += 1
        assert sent < 1000
    other = Channel(theirs)
    assert [len(other.receive()) for _ in range(sent)] == [10_000] * sent
    ours.close()
    other.close()


def test_without_memory_files_and_with_many_mappings_results_arrive_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_channel, "_MAX_MAPPED", 0)
    monkeypatch.delattr(os, "memfd_create")
    file = memory_file("balancer-test")
    assert "memfd" not in os.readlink(f"/proc/self/fd/{file}")
    os.close(file)
    got = from_file(Parcel(np.arange(100_000)).to_file())
    assert np.array_equal(got, np.arange(100_000))
    assert got.flags.writeable


def test_a_slot_says_the_same_in_both_processes() -> None:
    slot, file = Slot.create()
    assert (slot.read().number, slot.read().position) == (-1, -1)
    other = Slot(file)
    other.write(7, 3)
    assert (slot.read().number, slot.read().position) == (7, 3)
    assert abs(slot.read().since_s - time.monotonic()) < 60
    slot.close()
    other.close()


# --- memory


def trend_of(per_sample: float, *, noise: float = 0.0, start: int = 100 << 20) -> tuple[MemoryTrend, list[bool]]:
    rng = np.random.Generator(np.random.Philox(3))
    trend = MemoryTrend(MemoryWatch())
    said = []
    for samples in range(0, 100_000, 256):
        now = int(start + per_sample * samples + noise * rng.random())
        trend.add(samples, now)
        said.append(trend.leaks(now))
    return trend, said


def test_vd05_a_steady_growth_raises_one_alarm_with_its_rate() -> None:
    trend, said = trend_of(20_000.0, noise=30e6)
    assert sum(said) == 1
    assert trend.slope_bytes == pytest.approx(20e6, rel=0.05)


def test_vd05_memory_that_only_moves_up_and_down_or_grows_slowly_raises_none() -> None:
    for per_sample, noise in ((0.0, 400e6), (1_000.0, 0.0), (-5_000.0, 0.0)):
        assert not any(trend_of(per_sample, noise=noise, start=1 << 30)[1])


def test_vd05_a_leaking_worker_is_named_with_its_growth(
    make: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    watch = MemoryWatch(every_samples=4, warmup_samples=8, min_growth_bytes=32 << 20, log_interval_s=0.0)
    acts = dict.fromkeys(range(80), ("leak", 1 << 20))
    with caplog.at_level(logging.INFO):
        run(make(acts), cells(20, size=4), num_workers=1, memory=watch)
    said = [record for record in caplog.records if record.name == "balancer.worker_pool"]
    (alarm,) = [record.getMessage() for record in said if record.levelno == logging.WARNING]
    assert alarm.startswith("loader worker 0 (pid ")
    growth = float(alarm.partition("growing by ")[2].partition(" MiB per 1000 samples")[0])
    assert growth == pytest.approx(1000, rel=0.4)
    assert any(record.levelno == logging.INFO for record in said)


def test_own_memory_is_that_of_the_process() -> None:
    before = own_bytes(os.getpid())
    held = np.ones(64 << 20, dtype=np.uint8)
    assert own_bytes(os.getpid()) - before > 48 << 20
    assert held[0] == 1
    assert own_bytes(2**22 + 1) == 0
