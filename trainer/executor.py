"""Run one step's schedule on this rank: pieces, edges, exact sizes, no handshake.

    schedule (data)      per pipeline rank: F0 F1 B1 B0 ...                balancer.schedule
    piece                a stage's module: (micro-batch, inputs) -> outputs
    edge                 a named tensor between two stages, [rows(micro-batch), width]; absent where rows = 0
        stage 0 encoder --visual [V, d]--> stage 1 LLM --hidden [T, d]--> stage 2 LLM ... --> loss

Sends and receives are derived from the schedule, never written into it. Every directed channel is FIFO: its message
order is the sender's program order, which every rank knows, and shapes come from the plan, so no size is exchanged.
The receiver posts up to `RECEIVE_AHEAD` messages early; sends never block the program. A step can then only block
if program order plus data edges form a cycle, and the simulator refuses such a schedule before it runs.

Between two stages of one rank a tensor is detached all the same: every piece has its own autograd graph, so one
rank, two ranks or more run the same arithmetic.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.distributed as dist

from balancer.batch import MicroBatch
from balancer.records import ActionRecord
from balancer.schedule import Act, Schedule
from balancer.schedules.program import BACKWARD
from trainer.comm import Comm
from trainer.errors import TrainerError

RECEIVE_AHEAD = 2
LOSS = "loss_sum"


class Piece(Protocol):
    """One stage of the model on this rank."""

    def __call__(self, microbatch: MicroBatch, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Outputs by edge name; the last stage returns `loss_sum`, a scalar."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Edge:
    """A tensor from one stage to a later one.

    Attributes:
        name: key in the pieces' inputs and outputs.
        source, target: stages.
        rows: rows of the tensor per micro-batch [M]; 0 means the edge is absent there.
        width: columns.
        dtype: element type on the wire.
    """

    name: str
    source: int
    target: int
    rows: Sequence[int]
    width: int
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """What one run of a schedule left on this rank.

    Attributes:
        loss_sum: sum(w * ce) over this rank's micro-batches, float64; 0 on ranks without the last stage.
        actions: timings relative to `start`, in program order.
        outputs: what the last stage returned beside the loss, per micro-batch (evaluation only).
    """

    loss_sum: torch.Tensor
    actions: tuple[ActionRecord, ...]
    outputs: Mapping[int, Mapping[str, torch.Tensor]]


@dataclass(slots=True)
class _Tape:
    """Tensors of one step that are alive between actions, keyed by (stage, micro-batch) or (edge, micro-batch)."""

    inputs: dict[tuple[int, int], dict[str, torch.Tensor]] = field(default_factory=dict)
    outputs: dict[tuple[int, int], dict[str, torch.Tensor]] = field(default_factory=dict)
    values: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)
    gradients: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)


class Executor:
    """Executes schedules on one rank of a replica.

    Args:
        pieces: stage -> piece, those of this rank only.
        edges: all edges of the model for this step.
        comm: groups and channels.
        timer: seconds that acts on a CPU are timed with; CUDA events time a device.
    """

    def __init__(
        self,
        *,
        pieces: Mapping[int, Piece],
        edges: Sequence[Edge],
        comm: Comm,
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._pieces, self._edges, self._comm, self._timer = pieces, edges, comm, timer

    def run(
        self,
        schedule: Schedule,
        microbatches: Sequence[MicroBatch | None],
        *,
        loss_scale: float = 1.0,
        start: float | None = None,
    ) -> StepOutcome:
        """Run this rank's program.

        Args:
            schedule: complete and free of deadlock (checked by the caller through `simulate`).
            microbatches: [M]; None where the plan has an empty cell.
            loss_scale: multiplies the loss before the backward; gradients are scaled by it.
            start: time of the timer that action times are relative to (default: now).

        Raises:
            TrainerError: the schedule asks for a piece or a micro-batch this rank does not have, or splits backwards.
        """
        if (schedule.op > BACKWARD).any():
            raise TrainerError(
                f"schedule {schedule.name} splits backwards into I and W; the executor runs whole ones: use 1f1b"
            )
        tape, sends = _Tape(), []
        mail = _Mail(schedule, self._edges, self._comm)
        clock = _Clock(self._comm.device, self._timer, self._timer() if start is None else start)
        loss_sum = torch.zeros((), dtype=torch.float64, device=self._comm.device)
        kept: dict[int, Mapping[str, torch.Tensor]] = {}
        backward_follows = any(act.op == "B" for act in schedule.ranks[self._comm.pp_rank])
        for act in schedule.ranks[self._comm.pp_rank]:
            batch = microbatches[act.microbatch]
            piece = self._pieces.get(act.stage)
            if batch is None or piece is None:
                what = "micro-batch" if batch is None else "piece"
                raise TrainerError(
                    f"schedule {schedule.name} runs {act} on rank {self._comm.rank}, which has no such {what}"
                )
            if act.op == "F":
                inputs = self._inputs(act, tape, mail, requires_grad=backward_follows)
                with clock.measure(act):
                    outputs = piece(batch, inputs)
                if LOSS in outputs:
                    loss_sum += outputs[LOSS].detach().double()
                    if not backward_follows:
                        kept[act.microbatch] = {name: value for name, value in outputs.items() if name != LOSS}
                self._hand_on(act, outputs, tape, sends)
                if backward_follows:
                    tape.inputs[act.stage, act.microbatch] = inputs
                    tape.outputs[act.stage, act.microbatch] = outputs
            else:
                gradients = self._output_gradients(act, tape, mail)
                with clock.measure(act):
                    self._backward(act, tape, gradients, loss_scale)
                self._hand_back(act, tape, sends)
        for work, _ in sends:
            work.wait()
        return StepOutcome(loss_sum=loss_sum, actions=clock.actions(self._comm), outputs=kept)

    def _in_edges(self, stage: int, microbatch: int) -> list[Edge]:
        return [edge for edge in self._edges if edge.target == stage and edge.rows[microbatch]]

    def _out_edges(self, stage: int, microbatch: int) -> list[Edge]:
        return [edge for edge in self._edges if edge.source == stage and edge.rows[microbatch]]

    def _inputs(self, act: Act, tape: _Tape, mail: "_Mail", *, requires_grad: bool) -> dict[str, torch.Tensor]:
        inputs = {}
        for edge in self._in_edges(act.stage, act.microbatch):
            if edge.source in self._pieces:
                value = tape.values.pop((edge.name, act.microbatch))
            else:
                value = mail.take(edge, act.microbatch, "forward")
            inputs[edge.name] = value.detach().requires_grad_(requires_grad)
        return inputs

    def _hand_on(
        self, act: Act, outputs: dict[str, torch.Tensor], tape: _Tape, sends: list[tuple[dist.Work, torch.Tensor]]
    ) -> None:
        """Give each output to its consumer: on this rank by reference, elsewhere by a send that does not block."""
        for edge in self._out_edges(act.stage, act.microbatch):
            value = outputs[edge.name]
            expected = (edge.rows[act.microbatch], edge.width)
            if tuple(value.shape) != expected:
                raise TrainerError(
                    f"edge {edge.name} of micro-batch {act.microbatch} is {tuple(value.shape)}, but the plan says "
                    f"{expected}: the batch does not match its plan"
                )
            if edge.target in self._pieces:
                tape.values[edge.name, act.microbatch] = value
            else:
                wire = value.detach().to(edge.dtype).contiguous()
                sends.append((self._comm.send(wire, self._rank_of(edge.target), "forward"), wire))

    def _output_gradients(self, act: Act, tape: _Tape, mail: "_Mail") -> dict[str, torch.Tensor]:
        gradients = {}
        for edge in self._out_edges(act.stage, act.microbatch):
            if edge.target in self._pieces:
                gradients[edge.name] = tape.gradients.pop((edge.name, act.microbatch))
            else:
                gradients[edge.name] = mail.take(edge, act.microbatch, "backward")
        return gradients

    def _backward(self, act: Act, tape: _Tape, gradients: dict[str, torch.Tensor], loss_scale: float) -> None:
        outputs = tape.outputs.pop((act.stage, act.microbatch))
        if LOSS in outputs:
            (outputs[LOSS] * loss_scale).backward()
            return
        names = [name for name in gradients if outputs[name].requires_grad]
        torch.autograd.backward([outputs[name] for name in names], [gradients[name] for name in names])

    def _hand_back(self, act: Act, tape: _Tape, sends: list[tuple[dist.Work, torch.Tensor]]) -> None:
        inputs = tape.inputs.pop((act.stage, act.microbatch))
        for edge in self._in_edges(act.stage, act.microbatch):
            leaf = inputs[edge.name]
            gradient = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
            if edge.source in self._pieces:
                tape.gradients[edge.name, act.microbatch] = gradient
            else:
                wire = gradient.to(edge.dtype).contiguous()
                sends.append((self._comm.send(wire, self._rank_of(edge.source), "backward"), wire))

    def _rank_of(self, stage: int) -> int:
        return self._comm.layout.rank(self._comm.dp_rank, self._comm.layout.stage_ranks()[stage])


class _Mail:
    """Receives of one step: per channel the sender's order, posted a little ahead of their use."""

    def __init__(self, schedule: Schedule, edges: Sequence[Edge], comm: Comm) -> None:
        self._comm = comm
        self._waiting: dict[tuple[int, str], deque[tuple[Edge, int]]] = {}
        self._posted: dict[tuple[int, str], deque[tuple[Edge, int, dist.Work, torch.Tensor]]] = {}
        stage_ranks = comm.layout.stage_ranks()
        for pp_rank, program in enumerate(schedule.ranks):
            if pp_rank == comm.pp_rank:
                continue
            for act in program:
                direction = "forward" if act.op == "F" else "backward"
                for edge in edges:
                    here, there = (edge.source, edge.target) if act.op == "F" else (edge.target, edge.source)
                    if here == act.stage and edge.rows[act.microbatch] and stage_ranks[there] == comm.pp_rank:
                        source = comm.layout.rank(comm.dp_rank, pp_rank)
                        self._waiting.setdefault((source, direction), deque()).append((edge, act.microbatch))
        for channel in self._waiting:
            self._posted[channel] = deque()
            self._post(channel)

    def _post(self, channel: tuple[int, str]) -> None:
        waiting, posted = self._waiting[channel], self._posted[channel]
        while waiting and len(posted) < RECEIVE_AHEAD:
            edge, microbatch = waiting.popleft()
            buffer = torch.empty(edge.rows[microbatch], edge.width, dtype=edge.dtype, device=self._comm.device)
            posted.append((edge, microbatch, self._comm.receive(buffer, *channel), buffer))

    def take(self, edge: Edge, microbatch: int, direction: str) -> torch.Tensor:
        """Wait for the tensor of (edge, micro-batch); consumers read a channel in the sender's order."""
        peer = edge.source if direction == "forward" else edge.target
        source = self._comm.layout.rank(self._comm.dp_rank, self._comm.layout.stage_ranks()[peer])
        channel = (source, direction)
        posted_edge, posted_microbatch, work, buffer = self._posted[channel].popleft()
        if (posted_edge.name, posted_microbatch) != (edge.name, microbatch):
            raise TrainerError(
                f"rank {self._comm.rank} needs edge {edge.name} of micro-batch {microbatch}, but rank {source} sends "
                f"{posted_edge.name} of micro-batch {posted_microbatch} first: the schedule reorders a channel"
            )
        work.wait()
        self._post(channel)
        return buffer


class _Clock:
    """Times actions: wall clock on the CPU, events on a CUDA device (read once, after the step)."""

    def __init__(self, device: torch.device, timer: Callable[[], float], start: float) -> None:
        self._cuda, self._timer, self._start = device.type == "cuda", timer, start
        self._spans: list[tuple[Act, float, float]] = []
        self._events: list[tuple[Act, torch.cuda.Event, torch.cuda.Event]] = []
        if self._cuda:
            self._origin = torch.cuda.Event(enable_timing=True)
            self._origin.record()

    @contextmanager
    def measure(self, act: Act) -> Iterator[None]:
        with torch.autograd.profiler.record_function(str(act)):
            if self._cuda:
                first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                first.record()
                yield
                last.record()
                self._events.append((act, first, last))
            else:
                begin = (self._timer() - self._start) * 1e3
                yield
                self._spans.append((act, begin, (self._timer() - self._start) * 1e3))

    def actions(self, comm: Comm) -> tuple[ActionRecord, ...]:
        if self._cuda:
            torch.cuda.synchronize()
            elapsed = self._origin.elapsed_time
            self._spans = [(act, elapsed(first), elapsed(last)) for act, first, last in self._events]
        return tuple(
            ActionRecord(
                rank=comm.rank,
                dp_rank=comm.dp_rank,
                stage=act.stage,
                op=act.op,
                microbatch=act.microbatch,
                start_ms=round(first, 4),
                end_ms=round(last, 4),
            )
            for act, first, last in self._spans
        )
