"""PS-01, PS-02, PS-05: any sizes, absent edges and wrong ones, on toy pieces whose gradients are known."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from balancer.batch import MicroBatch, collate  # noqa: E402
from balancer.layout import Layout  # noqa: E402
from balancer.schedule import Schedule, build_schedule  # noqa: E402
from dataloaders.sample import LoadedSample  # noqa: E402
from trainer.comm import single_process  # noqa: E402
from trainer.errors import TrainerError  # noqa: E402
from trainer.executor import LOSS, RECEIVE_AHEAD, Edge, Executor, Piece, StepOutcome  # noqa: E402

WIDTH = 3
COMM = single_process(torch.device("cpu"))


def batch(number: int, rows: int) -> MicroBatch:
    """A micro-batch of one sample; `rows` of its tokens feed the toy encoder."""
    length = rows + 2
    sample = LoadedSample(
        sample_id=number,
        place="toy",
        tokens=np.arange(length, dtype=np.int32) + number,
        labels=np.full(length, -100, dtype=np.int32),
        position_ids=np.zeros((3, length), dtype=np.int64),
        visual_index=np.arange(rows),
        patches=np.random.Generator(np.random.Philox(number)).random((rows, WIDTH), dtype=np.float32),
        grids=np.zeros((0, 3), dtype=np.int64),
    )
    return collate([sample], microbatch_index=number)


class Toy:
    """Stage 0: patches @ a. Stage 1: sum of squares of (tokens + its input) * b."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.a = torch.randn(WIDTH, WIDTH, generator=generator, requires_grad=True)
        self.b = torch.randn(WIDTH, generator=generator, requires_grad=True)
        self.seen: list[tuple[str, int, tuple[int, ...]]] = []

    def encode(self, microbatch: MicroBatch, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        self.seen.append(("encode", microbatch.microbatch_index, tuple(microbatch.patches.shape)))
        return {"visual": microbatch.patches @ self.a}

    def decode(self, microbatch: MicroBatch, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        hidden = microbatch.tokens.float()[:, None] * self.b
        if "visual" in inputs:
            hidden = hidden.index_add(0, microbatch.visual_index, inputs["visual"])
        self.seen.append(("decode", microbatch.microbatch_index, tuple(hidden.shape)))
        return {LOSS: hidden.square().sum().double(), "hidden": hidden}

    def pieces(self) -> dict[int, Piece]:
        return {0: self.encode, 1: self.decode}

    def plain_loss(self, batches: Sequence[MicroBatch | None]) -> torch.Tensor:
        """The same without executor: one graph."""
        losses = [self.decode(one, self.encode(one, {}) if one.patches.numel() else {})[LOSS] for one in batches if one]
        return torch.stack(losses).sum()


def edges(rows: Sequence[int], width: int = WIDTH) -> list[Edge]:
    return [Edge(name="visual", source=0, target=1, rows=rows, width=width, dtype=torch.float32)]


def schedule(rows: Sequence[int], *, empty: Sequence[int] = ()) -> Schedule:
    absent = {(0, m) for m, count in enumerate(rows) if not count} | {(s, m) for m in empty for s in (0, 1)}
    return build_schedule("1f1b", stage_ranks=[0, 0], num_microbatches=len(rows)).without(absent)


def run(
    toy: Toy, rows: Sequence[int], *, loss_scale: float = 1.0, empty: Sequence[int] = (), forward_only: bool = False
) -> StepOutcome:
    batches = [None if m in empty else batch(m, count) for m, count in enumerate(rows)]
    plan = schedule(rows, empty=empty)
    executor = Executor(pieces=toy.pieces(), edges=edges(rows), comm=COMM)
    return executor.run(plan.forward_only() if forward_only else plan, batches, loss_scale=loss_scale)


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param([5, 17, 1], id="three lengths in one step"),
        pytest.param([4, 0, 3], id="image, text, image"),
        pytest.param([0, 0], id="text only"),
        pytest.param([0, 2, 0, 2, 0, 0], id="mostly absent"),
        pytest.param([3], id="one micro-batch"),
    ],
)
def test_losses_and_gradients_equal_one_graph_for_any_sizes_and_any_pattern_of_presence(rows: list[int]) -> None:
    toy, plain = Toy(), Toy()
    outcome = run(toy, rows, loss_scale=0.25)
    expected = plain.plain_loss([batch(m, count) for m, count in enumerate(rows)])
    (expected * 0.25).backward()
    assert float(outcome.loss_sum) == pytest.approx(expected.item(), rel=1e-12)
    for got, want in ((toy.a, plain.a), (toy.b, plain.b)):
        assert (got.grad is None) == (want.grad is None)
        if want.grad is not None:
            torch.testing.assert_close(got.grad, want.grad, rtol=1e-6, atol=1e-6)
    assert [entry for entry in toy.seen if entry[0] == "encode"] == [
        ("encode", m, (count, WIDTH)) for m, count in enumerate(rows) if count
    ]


def test_an_empty_cell_runs_nothing_and_adds_nothing() -> None:
    toy, other = Toy(), Toy()
    outcome = run(toy, [4, 2, 3], empty=[1])
    same = run(other, [4, 0, 3], empty=[1])
    assert outcome.loss_sum == same.loss_sum
    assert toy.a.grad is not None
    assert torch.equal(toy.a.grad, other.a.grad)
    assert {act.microbatch for act in outcome.actions} == {0, 2}


def test_actions_are_in_program_order_and_never_overlap() -> None:
    rows = [2, 0, 3]
    outcome = run(Toy(), rows)
    assert [f"{a.stage}{a.op}{a.microbatch}" for a in outcome.actions] == [str(act) for act in schedule(rows).ranks[0]]
    ends = [0.0]
    for action in outcome.actions:
        assert ends[-1] <= action.start_ms <= action.end_ms
        ends.append(action.end_ms)


def test_forward_only_keeps_the_last_stage_outputs_and_makes_no_gradient() -> None:
    toy = Toy()
    outcome = run(toy, [2, 0], forward_only=True)
    assert {action.op for action in outcome.actions} == {"F"}
    assert set(outcome.outputs) == {0, 1}
    assert set(outcome.outputs[0]) == {"hidden"}
    assert outcome.outputs[1]["hidden"].shape == (2, WIDTH)
    assert toy.a.grad is None
    assert float(outcome.loss_sum) == pytest.approx(run(Toy(), [2, 0]).loss_sum.item())


def test_training_keeps_no_outputs_alive() -> None:
    assert run(Toy(), [2, 1]).outputs == {}


@pytest.mark.parametrize(
    ("planned", "message"),
    [
        ([6, 2], r"edge visual of micro-batch 0 is \(5, 3\), but the plan says \(6, 3\)"),
        ([5, 1], r"edge visual of micro-batch 1 is \(2, 3\), but the plan says \(1, 3\)"),
    ],
)
def test_an_edge_of_another_size_than_planned_raises_before_anything_is_sent(planned: list[int], message: str) -> None:
    executor = Executor(pieces=Toy().pieces(), edges=edges(planned), comm=COMM)
    with pytest.raises(TrainerError, match=message):
        executor.run(schedule([5, 2]), [batch(0, 5), batch(1, 2)])


def test_an_edge_of_another_width_raises() -> None:
    executor = Executor(pieces=Toy().pieces(), edges=edges([5], width=4), comm=COMM)
    with pytest.raises(TrainerError, match=r"is \(5, 3\), but the plan says \(5, 4\)"):
        executor.run(schedule([5]), [batch(0, 5)])


def test_halves_of_backwards_are_refused_before_anything_runs() -> None:
    toy = Toy()
    executor = Executor(pieces=toy.pieces(), edges=edges([1]), comm=COMM)
    with pytest.raises(TrainerError, match=r"schedule zb-h1 splits backwards into I and W; .* use 1f1b"):
        executor.run(build_schedule("zb-h1", stage_ranks=[0, 0], num_microbatches=1), [batch(0, 1)])
    assert toy.seen == []


def test_a_schedule_that_asks_for_what_the_rank_lacks_names_the_act() -> None:
    executor = Executor(pieces={1: Toy().decode}, edges=edges([0]), comm=COMM)
    with pytest.raises(TrainerError, match="runs 0F0 on rank 0, which has no such piece"):
        executor.run(schedule([1]), [batch(0, 1)])
    whole = Executor(pieces=Toy().pieces(), edges=edges([1]), comm=COMM)
    with pytest.raises(TrainerError, match="runs 0F0 on rank 0, which has no such micro-batch"):
        whole.run(schedule([1]), [None])


@dataclass
class DoneWork:
    """A message that has arrived."""

    on_wait: Callable[[], None] = lambda: None

    def wait(self) -> bool:
        self.on_wait()
        return True


@dataclass
class SecondRank:
    """A fake `Comm` of pipeline rank 1 of 2: every receive arrives at once, filled with its number."""

    layout: Layout = field(default_factory=lambda: Layout(pp_size=2))
    rank: int = 1
    dp_rank: int = 0
    pp_rank: int = 1
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    received: list[tuple[int, ...]] = field(default_factory=list)
    sent: list[torch.Tensor] = field(default_factory=list)
    outstanding: int = 0
    most_outstanding: int = 0

    def receive(self, tensor: torch.Tensor, source: int, direction: str) -> DoneWork:
        assert (source, direction) == (0, "forward")
        tensor.fill_(len(self.received))
        self.received.append(tuple(tensor.shape))
        self.outstanding += 1
        self.most_outstanding = max(self.most_outstanding, self.outstanding)
        return DoneWork(self._arrived)

    def send(self, tensor: torch.Tensor, destination: int, direction: str) -> DoneWork:
        assert (destination, direction) == (0, "backward")
        self.sent.append(tensor)
        return DoneWork()

    def _arrived(self) -> None:
        self.outstanding -= 1


def second_rank(grid: str, rows: Sequence[int]) -> SecondRank:
    comm = SecondRank()
    plan = Schedule.from_grid(grid, stage_ranks=[0, 1], num_microbatches=len(rows))
    executor = Executor(pieces={1: Toy().decode}, edges=edges(rows), comm=comm)  # type: ignore[arg-type]
    executor.run(plan, [batch(m, count) for m, count in enumerate(rows)])
    return comm


def test_receives_have_the_planned_sizes_in_the_senders_order_and_few_are_posted_ahead() -> None:
    rows = [4, 1, 0, 3, 2]
    forward = ",".join(f"0F{m}" for m, count in enumerate(rows) if count)
    backward = ",".join(f"0B{m}" for m, count in enumerate(rows) if count)
    second = ",".join(f"1F{m},1B{m}" for m in range(len(rows)))
    comm = second_rank(f"{forward},{backward}\n{second}", rows)
    assert comm.received == [(4, WIDTH), (1, WIDTH), (3, WIDTH), (2, WIDTH)]
    assert comm.most_outstanding == RECEIVE_AHEAD
    assert comm.outstanding == 0
    assert [tuple(tensor.shape) for tensor in comm.sent] == comm.received


def test_a_schedule_that_reorders_a_channel_is_named_instead_of_mixing_up_tensors() -> None:
    with pytest.raises(
        TrainerError, match=r"needs edge visual of micro-batch 1, but rank 0 sends visual of micro-batch 0"
    ):
        second_rank("0F0,0F1,0B0,0B1\n1F1,1B1,1F0,1B0", [2, 2])
