"""The scripts of docs/examples, run as a user runs them: every way to train gives the losses of a plain loop.

    one_process.py  ==  a loop without a balancer  ==  ddp.py, ddp_accumulate.py, fsdp2.py on two ranks (gloo)

All share model, data, seed and global batch, so their losses are the same numbers up to the order of sums.
"""

import os
import re
import runpy
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.torch, pytest.mark.slow]

import balancer  # noqa: E402
from balancer import BalancedDataLoader  # noqa: E402

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"
TOLERANCE = 1e-5
STEPS_PER_EPOCH = 8
WIDTHS_PX = (96, 160, 220)
Losses = Mapping[int, float]


def run(folder: Path, script: str, *args: object, ranks: int = 0) -> str:
    """What a script prints, run in a folder; `ranks` under torchrun, 0: without it."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks else []
    home = str(Path(balancer.__file__).parents[1])
    path = os.pathsep.join(part for part in (home, os.environ.get("PYTHONPATH")) if part)
    done = subprocess.run(
        [sys.executable, *launcher, str(EXAMPLES / script), *map(str, args)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return done.stdout


def losses(printed: str) -> dict[int, float]:
    """Loss by step; no step is printed twice."""
    found = re.findall(r"^step (\d+) loss (\d+\.\d+)", printed, re.MULTILINE)
    assert len({step for step, _ in found}) == len(found), printed
    return {int(step): float(loss) for step, loss in found}


def check_same(seen: Losses, expected: Losses, steps: range) -> None:
    assert list(seen) == list(steps)
    for step, loss in seen.items():
        assert loss == pytest.approx(expected[step], abs=TOLERANCE), f"step {step}"


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> dict[int, float]:
    """Losses of three epochs in one process."""
    return losses(run(tmp_path_factory.mktemp("one"), "one_process.py", 3))


@pytest.fixture(scope="module")
def under_ddp(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, float]]:
    """(folder with a checkpoint, losses) of two epochs of two ranks."""
    folder = tmp_path_factory.mktemp("ddp")
    return folder, losses(run(folder, "ddp.py", 2, ranks=2))


def plain_losses(script: Mapping[str, Any], num_steps: int) -> dict[int, float]:
    """The loop of one_process.py without a balancer: samples one by one, the mean over their tokens counted here."""
    data, cross_entropy = script["Stories"](), torch.nn.functional.cross_entropy
    drawn = BalancedDataLoader(data, 8, shuffle=True, collate_fn=list)  # which samples a step has, nothing else
    steps = [drawn.current.sample_ids.tolist() for _ in range(2) for _ in drawn if drawn.current is not None]
    torch.manual_seed(0)
    layers = [torch.nn.Embedding(47, 32), torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 47)]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    found = {}
    for step, ids in enumerate(steps[:num_steps]):
        rows = [data[i] for i in ids]
        sums = [cross_entropy(model(row[:-1]), row[1:], reduction="sum") for row in rows]
        loss = torch.stack(sums).sum() / sum(len(row) - 1 for row in rows)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found[step] = loss.item()
    return found


def test_one_process_equals_a_loop_without_a_balancer(one_process: Losses) -> None:
    """LN-01: the loss is the mean over the label tokens of the step."""
    script = runpy.run_path(str(EXAMPLES / "one_process.py"))
    check_same(plain_losses(script, 10), one_process, range(10))
    assert list(one_process) == list(range(3 * STEPS_PER_EPOCH))


def test_the_model_learns_and_the_comparison_could_fail(one_process: Losses) -> None:
    """Neighbouring steps differ by far more than the tolerance, so a step more or less would show."""
    assert one_process[15] < one_process[0] / 2
    assert min(abs(one_process[step + 1] - one_process[step]) for step in range(15)) > 100 * TOLERANCE


@pytest.mark.multirank
def test_ddp_trains_the_loss_of_one_process(under_ddp: tuple[Path, Losses], one_process: Losses) -> None:
    """Ranks hold unequal numbers of tokens, and DDP's mean over ranks is undone by the world size."""
    check_same(under_ddp[1], one_process, range(2 * STEPS_PER_EPOCH))


@pytest.mark.multirank
def test_one_process_goes_on_where_two_ranks_stopped(under_ddp: tuple[Path, Losses], one_process: Losses) -> None:
    """DR: the last checkpoint lies inside the second epoch; nothing is trained twice or left out after it."""
    check_same(losses(run(under_ddp[0], "one_process.py", 3)), one_process, range(15, 3 * STEPS_PER_EPOCH))


@pytest.mark.multirank
def test_accumulated_gradients_train_the_loss_of_one_process(tmp_path: Path, one_process: Losses) -> None:
    """Micro-batches without synchronisation, each divided by the tokens of the whole step; a short last step too."""
    printed = run(tmp_path, "ddp_accumulate.py", 1, ranks=2)
    check_same(losses(printed), one_process, range(STEPS_PER_EPOCH))


@pytest.mark.multirank
def test_fsdp2_trains_the_loss_of_one_process_and_resumes_on_one_rank(tmp_path: Path, one_process: Losses) -> None:
    check_same(losses(run(tmp_path, "fsdp2.py", 1, ranks=2)), one_process, range(STEPS_PER_EPOCH))
    check_same(losses(run(tmp_path, "fsdp2.py", 2, ranks=1)), one_process, range(5, 2 * STEPS_PER_EPOCH))


@pytest.fixture(scope="module")
def shard(
    tmp_path_factory: pytest.TempPathFactory,
    image_bytes: Callable[..., bytes],
    write_shard: Callable[..., Path],
    chat_json: Callable[..., bytes],
) -> Path:
    """Six samples, every other one text alone."""
    members = []
    for number in range(6):
        has_image = number % 2 == 1
        question = "<image>What is it?" if has_image else "What is it?"
        members.append((f"{number:03}.json", chat_json(question, "A red one. " * (1 + number))))
        if has_image:
            members.append((f"{number:03}.png", image_bytes(WIDTHS_PX[number // 2], 90, seed=number)))
    return write_shard(tmp_path_factory.mktemp("shard") / "mixed.tar", members)


@pytest.mark.multirank
def test_a_sharded_tower_with_a_text_only_rank_ends_and_trains_the_loss_of_one_rank(
    tmp_path: Path, shard: Path
) -> None:
    """DU-02: a rank without media runs the tower on zeros instead of leaving the others waiting."""
    one, two = (run(tmp_path, "fsdp2_multimodal.py", shard, ranks=ranks) for ranks in (1, 2))
    check_same(losses(two), losses(one), range(6))
    without = [int(count) for count in re.findall(r"ranks without media (\d+)", two)]
    assert 1 in without  # the case in question: one rank with media, one without


FAILING = """
import runpy, sys
import torch.distributed as dist

script = runpy.run_path(sys.argv[1])
loaded = script["Stories"].__getitem__

def broken(self, i):
    if i == 13:
        raise OSError("the disk is gone")
    return loaded(self, i)

script["Stories"].__getitem__ = broken
try:
    script["main"](1)
except Exception as error:
    with open(f"raised-{dist.get_rank()}.txt", "w") as file:
        file.write(f"{type(error).__name__}: {error}")
dist.barrier()
dist.destroy_process_group()
"""


@pytest.mark.multirank
def test_a_sample_that_fails_on_one_rank_ends_the_loop_on_both_with_the_same_text(tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text(FAILING, encoding="utf-8")
    run(tmp_path, str(tmp_path / "failing.py"), EXAMPLES / "ddp.py", ranks=2)
    texts = [(tmp_path / f"raised-{rank}.txt").read_text(encoding="utf-8") for rank in (0, 1)]
    assert texts[0] == texts[1]
    assert re.match(r"RankError: loading step \d of epoch 0 failed on 1 of 2 ranks:\nrank [01]: OSError: ", texts[0])
    assert "the disk is gone" in texts[0]


def test_every_example_is_run_here() -> None:
    here = Path(__file__).read_text(encoding="utf-8")
    assert [path.name for path in sorted(EXAMPLES.glob("*.py")) if f'"{path.name}"' not in here] == []


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_examples_say_how_they_are_started(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert re.search(rf"^    (?:python|torchrun --nproc-per-node 2) {path.name} ", text, re.MULTILINE)
    assert text.count("BalancedDataLoader(") == 1
