"""Training on data that can only be read from front to back: read ahead, plan together, exchange encoded bytes, decode.

    this rank's lanes --thread: read, scan--> rows [k, C], payloads            window w+1, while window w trains
        | gather (gloo)                       rows of all ranks [n, C], errors, cursors
        | plan_window, on every rank alike    StepPlans; digests compared
        | send_bytes                          payloads go to the ranks that run them, sizes known on both sides
        v threads: decode, pack               cells of the next steps
    StepBatches                               as from `PlanLoader`: what the trainer runs

Every rank yields the same number of steps, whichever lanes run dry first. An error of one rank (storage, a bad record
under bad_records=error, a fault) is raised on all of them at the boundary of a window. `state` after a step says where
to go on: a few integers, the same on all ranks, for any number of ranks.

Price: at the boundary of a window training waits for the gather, the plan and the exchange (`data_wait_ms` of its first
step); decoding is done by threads of the training process (decoders release the interpreter's lock, Python between them
does not). Layouts are data-parallel only: pp_size is 1, and a rank is a replica. Going on inside a window reads that
window again, and what lies before it in its shards; the steps that are done are neither exchanged nor decoded.
"""

import json
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

import torch.distributed as dist

from balancer.batch import MicroBatch
from balancer.counts import Int64Array
from balancer.errors import BalancerError, PlanError
from balancer.exchange import ROUND_BYTES, Blob, ExchangeCounters, RankGroup
from balancer.layout import Layout
from balancer.plan import StepPlan, digest_fields, require_same
from balancer.plan_loader import StepBatches
from balancer.sample_reader import SampleReader
from balancer.stream_plan import (
    StreamDropped,
    StreamState,
    WindowOptions,
    WindowPlan,
    check_dropped,
    plan_window,
)
from balancer.stream_window import LaneReaders, RankWindow, WindowScanner
from balancer.warm_up import warm_up_once
from balancer.weights import planned_weight_sum
from dataloaders.estimators import TokenEstimator
from dataloaders.sample import check_loadable
from dataloaders.scan_rows import ScanOptions
from dataloaders.stream_source import StreamSource

_FAILED, _NUM_ROWS, _SAME_START = range(3)
_NOT_MINE = -2  # cursor of a lane that another rank reads
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Window:
    """A window as all ranks know it: for records, and to plan it again.

    Attributes:
        plan: its steps, table and digests.
        dropped: samples that no step holds, of all ranks, by id.
        cursors: of every lane, behind the window.
    """

    plan: WindowPlan
    dropped: tuple[StreamDropped, ...]
    cursors: tuple[int, ...]


class StreamLoader:
    """Micro-batches of this rank, step by step, from a stream.

    Args:
        source: the same on every rank.
        estimator: token rule of a model that can be loaded.
        options: of windows and plans.
        group: gloo process group of the ranks, for this loader alone; None: one process.
        scan: how samples are counted, as for an index.
        reader_options: further arguments of `SampleReader` (`loss_reduction`, `with_pixels`, `video_decoder`, ...).
        epochs: passes over the stream; None: without end.
        state: where to go on; None: at the start.
        read_threads: lanes that this rank reads at once. decode_threads, steps_ahead: of decoding; a window's first
            step is not decoded ahead.
        round_bytes: bound on one round of the exchange.
        on_window: called with every window, when it is planned, on every rank; it must not raise.

    Raises:
        DataError: samples of this model can be costed, but not loaded.
        PlanError: a state of another run, or options out of range.
    """

    def __init__(
        self,
        source: StreamSource,
        estimator: TokenEstimator,
        options: WindowOptions,
        *,
        group: dist.ProcessGroup | None = None,
        scan: ScanOptions | None = None,
        reader_options: Mapping[str, Any] | None = None,
        epochs: int | None = 1,
        state: StreamState | None = None,
        read_threads: int = 4,
        decode_threads: int = 2,
        steps_ahead: int = 2,
        round_bytes: int = ROUND_BYTES,
        on_window: Callable[[Window], None] | None = None,
    ) -> None:
        check_loadable(estimator)
        if min(read_threads, decode_threads, steps_ahead, round_bytes) < 1 or (epochs is not None and epochs < 1):
            raise PlanError(
                f"read_threads={read_threads}, decode_threads={decode_threads}, steps_ahead={steps_ahead}, "
                f"round_bytes={round_bytes}, epochs={epochs}: at least 1 each"
            )
        self._group = RankGroup(group)
        self._layout = Layout(dp_size=self._group.size)
        self._source, self._options, self._epochs = source, options, epochs
        self._scanner = WindowScanner(
            lanes=source.lanes,
            source=source.fingerprint,
            estimator=estimator,
            scan=scan or ScanOptions(),
            options=options,
        )
        self._reader_options = dict(reader_options or {})
        self._threads, self._steps_ahead = (read_threads, decode_threads), steps_ahead
        self._round_bytes, self._on_window = round_bytes, on_window
        self._state = self._checked(state)
        self._window: Window | None = None
        self.num_dropped: Counter[str] = Counter()
        warm_up_once()  # here rather than in the first window, where other ranks would wait for this one

    @property
    def state(self) -> StreamState:
        """Where to go on after the step that was yielded last; the same on all ranks."""
        return self._state

    @property
    def counters(self) -> ExchangeCounters:
        """Bytes of samples that this rank has sent, received and kept."""
        return self._group.counters

    def planned_weight(self, plan: StepPlan, loss_reduction: str = "token_mean") -> float:
        """Loss weight of a whole step of the current window, as `PlanSequence.weight_sum` gives it."""
        if self._window is None or not 0 <= plan.cursor < len(self._window.plan.steps):
            raise PlanError(f"step {plan.step} is not one of the window that is being worked on")
        return planned_weight_sum(self._window.plan.label_tokens(plan.cursor), loss_reduction)

    def __iter__(self) -> Iterator[StepBatches]:
        """Steps from `state` on, until the epochs are done.

        Raises:
            RankError: reading or planning a window failed on some rank; on all ranks.
            PlanMismatchError: the ranks have other states, options, data or versions.
        """
        with ExitStack() as stack:
            readers = LaneReaders(self._source, self._own_lanes(), threads=self._threads[0])
            stack.callback(readers.close)
            ahead = ThreadPoolExecutor(1, thread_name_prefix="stream-window")
            stack.callback(ahead.shutdown, wait=True, cancel_futures=True)
            stack.callback(readers.stop)  # the first to be called: it lets the threads end
            decoding = ThreadPoolExecutor(self._threads[1], thread_name_prefix="stream-decode")
            stack.callback(decoding.shutdown, wait=True, cancel_futures=True)
            yield from self._windows(readers, ahead, decoding)

    def _windows(
        self, readers: LaneReaders, ahead: ThreadPoolExecutor, decoding: ThreadPoolExecutor
    ) -> Iterator[StepBatches]:
        # Once, by numbers that are as many on every rank: other calls would break off where lanes differ.
        require_same([(_hex(row), "") for row in self._group.gather_numbers(_words(self._agreed_digest()))])
        # An epoch that was begun elsewhere may have nothing left.
        steps_of_epoch = 0 if set(self._state.cursors) == {0} else 1
        reading = ahead.submit(self._read, readers, self._state.cursors)
        while self._epochs is None or self._state.epoch < self._epochs:
            begun, start = time.perf_counter(), self._state
            own, cursors, rows, dropped = self._gather(reading)
            following = start.after_window(0, cursors)
            if self._epochs is None or following.epoch < self._epochs:
                reading = ahead.submit(self._read, readers, following.cursors)
            plan = self._plan(rows, dropped)
            window = Window(plan=plan, dropped=dropped, cursors=cursors)
            self._window = window
            self.num_dropped.update(drop.reason.partition(":")[0] for drop in dropped)
            if self._on_window is not None:
                self._on_window(window)
            arrived = self._exchange(plan, own, start.step_in_window)
            del own
            yield from self._steps(window, arrived, decoding, begun)
            steps_of_epoch += len(plan.steps)
            self._state = plan.start.after_window(len(plan.steps), cursors)
            if self._state.epoch > start.epoch:
                if not steps_of_epoch:
                    raise PlanError(
                        f"epoch {start.epoch} of the stream has no sample to train on: it is empty, or every sample "
                        f"was dropped ({dict(self.num_dropped)})"
                    )
                steps_of_epoch = 0

    def _read(self, readers: LaneReaders, cursors: tuple[int, ...]) -> RankWindow:
        """In the thread that reads ahead: this rank's part of the window from `cursors` on."""
        options = self._options
        takes = readers.take(cursors, samples=options.samples_per_lane, max_bytes=options.bytes_per_lane)
        return self._scanner.rows(takes)

    def _gather(
        self, reading: "Future[RankWindow]"
    ) -> tuple[RankWindow, tuple[int, ...], list[Int64Array], tuple[StreamDropped, ...]]:
        """(own part, cursors behind the window, rows of all ranks, dropped samples of all ranks)."""
        read, error = _outcome(reading)
        own = read or RankWindow.empty()
        head = [int(error is not None), len(own.rows), *_words(self._agreed_digest())]
        behind = [own.cursors.get(lane, _NOT_MINE) for lane in range(self._source.lanes)]
        heads = self._group.gather_numbers([*head, *behind])
        self._group.raise_together(
            heads[:, _FAILED].tolist(), error, f"reading window {self._state.window} of the stream"
        )
        require_same([(_hex(row[_SAME_START : len(head)]), "") for row in heads])
        cursors = tuple(int(cursor) for cursor in heads[:, len(head) :].max(axis=0))
        rows = self._group.gather_rows(own.rows, heads[:, _NUM_ROWS].tolist())
        texts = self._group.gather_texts(json.dumps([asdict(drop) for drop in own.dropped]))
        listed = [StreamDropped(**entry) for text in texts for entry in json.loads(text)]
        return own, cursors, rows, tuple(sorted(listed, key=lambda drop: drop.sample_id))

    def _plan(self, rows: list[Int64Array], dropped: tuple[StreamDropped, ...]) -> WindowPlan:
        """The window's plan, made on every rank and compared before anything is sent."""
        plan, error = None, None
        try:
            check_dropped(dropped, self._options)
            plan = plan_window(rows, self._state, self._options, self._layout, lanes=self._source.lanes)
        except Exception as failure:  # the same on every rank, unless one of them is broken
            error = failure
        steps = () if plan is None else plan.steps
        inputs = digest_fields({f"step{k}": step.inputs_digest for k, step in enumerate(steps)})
        digest = digest_fields({}) if plan is None else plan.digest
        told = self._group.gather_numbers([int(error is not None), *_words(inputs), *_words(digest)])
        failed = told[:, 0].tolist()
        if error is not None and all(failed):
            raise error  # found by every rank for itself: no need to say where
        self._group.raise_together(failed, error, f"planning window {self._state.window} of the stream")
        require_same([(_hex(row[1:5]), _hex(row[5:9])) for row in told])
        if plan is None:
            raise BalancerError("a window without a plan and without an error: a fault of this version")
        return plan

    def _exchange(self, plan: WindowPlan, own: RankWindow, from_step: int) -> "_Arrived":
        """Payloads of the cells that this rank runs, from a step of the window on."""
        rank, ranks = self._group.rank, range(self._group.size)
        payloads = dict(zip(map(tuple, own.rows[:, :2].tolist()), own.payloads, strict=True))
        places = plan.table[:, :2].tolist()
        outgoing = [
            [payloads[tuple(places[row])] for row in plan.route(rank, other, from_step=from_step)] for other in ranks
        ]
        sizes = plan.column("payload_bytes")
        received = self._group.send_bytes(
            outgoing, plan.bytes_between(from_step=from_step), round_bytes=self._round_bytes
        )
        arrived: dict[int, Blob] = {}
        for other in ranks:
            rows, at = plan.route(other, rank, from_step=from_step).tolist(), 0
            if other == rank:
                arrived.update(zip(rows, outgoing[rank], strict=True))
                continue
            for row in rows:
                size = int(sizes[row])
                arrived[row] = received[other][at : at + size]
                at += size
        return _Arrived(payloads=arrived, from_step=from_step)

    def _steps(
        self, window: Window, arrived: "_Arrived", decoding: ThreadPoolExecutor, begun: float
    ) -> Iterator[StepBatches]:
        """The steps of a window, decoded a few ahead; `begun`: when the wait for the window began."""
        plan, rank = window.plan, self._group.rank
        pending: deque[list[Future[MicroBatch] | None]] = deque()
        following = iter(range(arrived.from_step, len(plan.steps)))
        for number in range(arrived.from_step, len(plan.steps)):
            while len(pending) <= self._steps_ahead and (ahead := next(following, None)) is not None:
                pending.append(self._begin(plan, ahead, rank, arrived, decoding))
            microbatches: list[MicroBatch | None] = []
            error: Exception | None = None
            for cell in pending.popleft():
                loaded, failure = (None, None) if cell is None else _outcome(cell)
                microbatches.append(loaded)
                error = error or failure
            done = number + 1
            last = done == len(plan.steps)
            start = plan.start
            self._state = start.after_window(done, window.cursors) if last else start.within(done, plan.window_digest)
            yield StepBatches(
                plan=plan.steps[number],
                microbatches=tuple(microbatches),
                error=error,
                data_wait_ms=(time.perf_counter() - begun) * 1e3,
            )
            begun = time.perf_counter()

    def _begin(
        self, plan: WindowPlan, number: int, rank: int, arrived: "_Arrived", decoding: ThreadPoolExecutor
    ) -> "list[Future[MicroBatch] | None]":
        """Start decoding the cells of a step; None for empty ones. Its payloads are handed over and forgotten here."""
        step, rows = plan.steps[number], plan.step_rows[number]
        cells: list[Future[MicroBatch] | None] = []
        for microbatch in range(step.num_microbatches):
            chosen = rows[step.positions(rank, microbatch)].tolist()
            ids = [int(plan.sample_ids[row]) for row in chosen]
            payloads = [arrived.payloads.pop(row) for row in chosen]
            cells.append(decoding.submit(self._decode, payloads, ids, step.step, microbatch) if chosen else None)
        return cells

    def _decode(self, payloads: list[Blob], ids: list[int], step: int, microbatch: int) -> MicroBatch:
        """One cell, decoded and packed; its samples carry their ids in the stream."""
        source, index = self._scanner.unpack(payloads)
        scan = self._scanner.scan
        reader = SampleReader(
            source=source,
            index=index,
            estimator=self._scanner.estimator,
            train_on=scan.encoder.train_on,
            encoder=scan.encoder,
            apply_orientation=scan.apply_orientation,
            limits=scan.limits,
            **self._reader_options,
        )
        samples = [replace(reader.load(i), sample_id=sample_id) for i, sample_id in enumerate(ids)]
        return MicroBatch.of(reader.pack(samples, step=step, microbatch_index=microbatch))

    def _own_lanes(self) -> range:
        """Lanes are dealt to the ranks in turn."""
        return range(self._group.rank, self._source.lanes, self._group.size)

    def _checked(self, state: StreamState | None) -> StreamState:
        fingerprint = self._scanner.fingerprint
        if state is None:
            return StreamState(fingerprint=fingerprint, cursors=(0,) * self._source.lanes)
        if state.fingerprint != fingerprint or len(state.cursors) != self._source.lanes:
            raise PlanError(
                "the state is of another stream or of other options (source, number of lanes, quotas, batch size, "
                "seed, capacities, token rule): give those of the run that saved it, or start anew without a state"
            )
        return state

    def _agreed_digest(self) -> str:
        """Of what every rank must have alike before a window is gathered."""
        return digest_fields({"state": self._state.to_json(), "epochs": self._epochs or 0, "rounds": self._round_bytes})


@dataclass(slots=True, kw_only=True)
class _Arrived:
    """Payloads by row of the window's table; each is taken once."""

    payloads: dict[int, Blob]
    from_step: int


def _outcome(future: Future[Result]) -> tuple[Result, None] | tuple[None, Exception]:
    """The result, or the error: carried to the boundary of a window or step, where every rank raises it."""
    try:
        return future.result(), None
    except Exception as error:
        return None, error


def _words(digest: str) -> list[int]:
    """A sha256 in hex as four int64."""
    return [int(digest[k : k + 16], 16) - 2**63 for k in range(0, 64, 16)]


def _hex(words: Int64Array) -> str:
    """The inverse of `_words`."""
    return "".join(f"{int(word) + 2**63:016x}" for word in words)
