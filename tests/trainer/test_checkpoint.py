"""CK-01, CK-02, CK-04: a checkpoint exists only when complete, fits any layout, and is strict about weights only."""

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

import trainer.checkpoint as checkpoint_module  # noqa: E402
from trainer.checkpoint import latest_complete, load_checkpoint, save_checkpoint  # noqa: E402
from trainer.comm import single_process  # noqa: E402
from trainer.config import FitConfig  # noqa: E402
from trainer.errors import CheckpointError  # noqa: E402
from trainer.optim import build_optimizer, optimizer_tensors  # noqa: E402

COMM = single_process(torch.device("cpu"))
ROOT = str(Path(checkpoint_module.__file__).parents[1])


def model(seed: int = 0, *, scale: int = 1) -> "dict[str, torch.nn.Parameter]":
    generator = torch.Generator().manual_seed(seed)
    shapes = {"visual.patch.weight": (3, 2), "llm.layers.0.weight": (2 * scale, 2), "llm.norm.weight": (2,)}
    return {name: torch.nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in shapes.items()}


def train(named: "dict[str, torch.nn.Parameter]", optimizer: "torch.optim.AdamW", *, only: str = "") -> None:
    for name, parameter in named.items():
        # Draws from the global generator, so that a resume shows whether it was restored.
        gradient = torch.rand(parameter.shape)
        parameter.grad = gradient if name.startswith(only) else None
    optimizer.step()


def save(folder: Path, step: int, named: "dict[str, torch.nn.Parameter]", **options: object) -> Path:
    optimizer = options.pop("optimizer", None)
    keep_last = options.pop("keep_last", None)
    return save_checkpoint(
        folder,
        step,
        model=named,
        optimizer=optimizer,
        progress={"step": step, **options},
        comm=COMM,
        keep_last=keep_last,  # type: ignore[arg-type]
    )


def test_a_resume_goes_on_bit_for_bit(tmp_path: Path) -> None:
    torch.manual_seed(3)
    named, other = model(), model(seed=1)
    optimizer = build_optimizer(named, FitConfig())
    train(named, optimizer)
    path = save(tmp_path, 1, named, optimizer=optimizer, replaced=4)
    train(named, optimizer)
    torch.manual_seed(99)
    restored = build_optimizer(other, FitConfig())
    loaded = load_checkpoint(path, model=other, optimizer=restored, comm=COMM)
    assert (loaded.step, loaded.progress, loaded.rng_restored) == (1, {"step": 1, "replaced": 4}, True)
    assert loaded.without_state == ()
    train(other, restored)
    assert all(torch.equal(named[name], other[name]) for name in named)
    first, second = optimizer_tensors(optimizer), optimizer_tensors(restored)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_weights_alone_can_be_loaded_without_touching_the_generators(tmp_path: Path) -> None:
    named, other = model(), model(seed=1)
    path = save(tmp_path, 1, named, optimizer=build_optimizer(named, FitConfig()))
    state = torch.manual_seed(5).get_state()
    loaded = load_checkpoint(path, model=other, comm=COMM, restore_rng=False)
    assert not loaded.rng_restored
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(named[name], other[name]) for name in named)


def test_ck01_state_that_never_was_is_listed_and_starts_from_zero(tmp_path: Path) -> None:
    """Text-only steps give the vision tower no state; a resume with images must work all the same."""
    named, other = model(), model(seed=1)
    optimizer = build_optimizer(named, FitConfig())
    train(named, optimizer, only="llm.")
    path = save(tmp_path, 1, named, optimizer=optimizer)
    restored = build_optimizer(other, FitConfig())
    assert load_checkpoint(path, model=other, optimizer=restored, comm=COMM).without_state == ("visual.patch.weight",)
    torch.manual_seed(0)
    train(named, optimizer)
    torch.manual_seed(0)
    train(other, restored)
    assert all(torch.equal(named[name], other[name]) for name in named)


def test_ck01_a_missing_weight_still_fails(tmp_path: Path) -> None:
    named = model()
    path = save(tmp_path, 1, named)
    more = {**model(), "llm.layers.1.weight": torch.nn.Parameter(torch.zeros(2, 2))}
    with pytest.raises(CheckpointError, match=r"does not fit the model: it lacks model.llm.layers.1.weight"):
        load_checkpoint(path, model=more, comm=COMM)


def test_weights_that_the_model_lacks_fail(tmp_path: Path) -> None:
    path = save(tmp_path, 1, model())
    fewer = {name: tensor for name, tensor in model().items() if name.startswith("llm.")}
    with pytest.raises(CheckpointError, match=r"it holds weights that the model lacks: visual.patch.weight"):
        load_checkpoint(path, model=fewer, comm=COMM)


def test_another_shape_or_dtype_is_named(tmp_path: Path) -> None:
    path = save(tmp_path, 1, model())
    with pytest.raises(
        CheckpointError, match=r"model.llm.layers.0.weight is torch.float32\[2, 2\] there and .*\[4, 2\]"
    ):
        load_checkpoint(path, model=model(scale=2), comm=COMM)
    doubles = {name: tensor.detach().double() for name, tensor in model().items()}
    with pytest.raises(CheckpointError, match=r"torch.float64"):
        load_checkpoint(path, model=doubles, comm=COMM)


def test_the_latest_is_the_one_with_most_steps(tmp_path: Path) -> None:
    assert latest_complete(tmp_path / "nowhere") is None
    assert latest_complete(tmp_path) is None
    for step in (9, 10, 1_000_000, 11):
        save(tmp_path, step, model())
    assert latest_complete(tmp_path) == tmp_path / "step_1000000"


def test_only_the_last_ones_are_kept(tmp_path: Path) -> None:
    for step in range(1, 6):
        save(tmp_path, step, model(), keep_last=2)
    assert sorted(os.listdir(tmp_path)) == ["step_000004", "step_000005"]
    save(tmp_path, 6, model(), keep_last=0)
    assert os.listdir(tmp_path) == ["step_000006"], "the newest always stays"


def test_a_step_that_is_reached_again_replaces_its_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 1, model(seed=0))
    path = save(tmp_path, 1, model(seed=1))
    other = model(seed=2)
    load_checkpoint(path, model=other, comm=COMM)
    assert all(torch.equal(other[name], tensor) for name, tensor in model(seed=1).items())
    assert os.listdir(tmp_path) == ["step_000001"]


@pytest.mark.parametrize("damage", ["no meta", "broken meta", "truncated", "missing file", "other version"])
def test_ck04_a_damaged_checkpoint_is_passed_over_and_refused(damage: str, tmp_path: Path) -> None:
    good, bad = save(tmp_path, 1, model()), save(tmp_path, 2, model())
    meta, data = bad / "meta.json", bad / "__0_0.distcp"
    match damage:
        case "no meta":
            meta.unlink()
        case "broken meta":
            meta.write_text("{")
        case "truncated":
            os.truncate(data, data.stat().st_size - 1)
        case "missing file":
            data.unlink()
        case "other version":
            meta.write_text(json.dumps({**json.loads(meta.read_text()), "format_version": 2}))
    assert latest_complete(tmp_path) == good
    with pytest.raises(CheckpointError, match="step_000002"):
        load_checkpoint(bad, model=model(), comm=COMM)


def test_content_that_is_no_metadata_is_an_error_and_no_crash(tmp_path: Path) -> None:
    path = save(tmp_path, 1, model())
    (path / ".metadata").write_bytes(b"\x00" * (path / ".metadata").stat().st_size)
    with pytest.raises(CheckpointError, match="cannot be loaded"):
        load_checkpoint(path, model=model(), comm=COMM)


def test_control_c_while_saving_stays_control_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoint_module.dcp.FileSystemWriter, "write_data", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 1, model())
    assert latest_complete(tmp_path) is None


def test_a_failed_save_says_so_and_leaves_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path, 1, model())

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "fsync", full)
        with pytest.raises(CheckpointError, match=r"step_000002 could not be written: .*No space left on device"):
            save(tmp_path, 2, model())
    assert latest_complete(tmp_path) == tmp_path / "step_000001"
    save(tmp_path, 3, model())
    assert sorted(os.listdir(tmp_path)) == ["step_000001", "step_000003"], "the draft is cleared away"


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="could not be started"):
        save(tmp_path / "file", 1, model())


def run_script(text: str, *arguments: str, launcher: tuple[str, ...] = ()) -> str:
    path = Path(arguments[0]) / "script.py"
    path.write_text(textwrap.dedent(text))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ROOT}
    done = subprocess.run(
        [sys.executable, *launcher, str(path), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


KILLED_SAVES = """
    import os, shutil, signal, sys
    from pathlib import Path
    import torch
    from trainer.checkpoint import latest_complete, load_checkpoint, save_checkpoint
    from trainer.comm import single_process

    folder, comm = Path(sys.argv[1]) / "checkpoints", single_process(torch.device("cpu"))

    def save(step):
        weights = {"a": torch.full((50,), float(step)), "b": torch.full((5,), float(step))}
        save_checkpoint(folder, step, model=weights, optimizer=None, progress={}, comm=comm, keep_last=1)

    def kill_at(call):
        # Every moment at which the disk changes for good: syncs, renames, removals.
        left = [call]
        for module, name in ((os, "fsync"), (os, "rename"), (os, "open"), (shutil, "rmtree"), (os, "unlink")):
            def wrapped(*args, original=getattr(module, name), **kwargs):
                left[0] -= 1
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return original(*args, **kwargs)
            setattr(module, name, wrapped)

    save(1)
    newest, killed, finished = 1, 0, 0
    for call in range(1, 31):
        step = newest + 1
        child = os.fork()
        if child == 0:
            kill_at(call)
            save(step)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        killed, finished = killed + os.WIFSIGNALED(status), finished + os.WIFEXITED(status)
        path = latest_complete(folder)
        weights = {"a": torch.zeros(50), "b": torch.zeros(5)}
        loaded = load_checkpoint(path, model=weights, comm=comm)
        assert loaded.step in (newest, step), (loaded.step, newest, step)
        assert weights["a"].eq(loaded.step).all() and weights["b"].eq(loaded.step).all()
        newest = loaded.step
    print(killed, finished)
"""


def test_ck04_a_kill_at_any_moment_leaves_a_valid_checkpoint(tmp_path: Path) -> None:
    killed, finished = map(int, run_script(KILLED_SAVES, str(tmp_path)).split())
    assert killed >= 8, "the kills must have come in the middle of saves"
    assert killed + finished == 30


TWO_RANKS = """
    import os
    import sys
    import warnings
    from pathlib import Path
    import torch
    from trainer.checkpoint import latest_complete, load_checkpoint, save_checkpoint
    from balancer.layout import Layout
    from trainer.comm import _connect, communicator
    from trainer.config import FitConfig
    from trainer.errors import CheckpointError
    from trainer.optim import build_optimizer

    warnings.simplefilter("error")
    folder = Path(sys.argv[1])

    def parameters(prefix, seed):
        generator = torch.Generator().manual_seed(seed)
        return {f"{prefix}.{i}.weight": torch.nn.Parameter(torch.randn(4, 3, generator=generator)) for i in range(3)}

    def check(comm, pp_size, folder):
        own = {**parameters("visual", 1), **parameters("llm", 2)}
        if pp_size == 2:
            own = {name: tensor for name, tensor in own.items() if name.startswith(("visual", "llm")[comm.pp_rank])}
        optimizer = build_optimizer(own, FitConfig())
        for parameter in own.values():
            parameter.grad = parameter.detach().clone()
        optimizer.step()
        torch.manual_seed(100 + comm.rank)
        options = dict(optimizer=optimizer, progress={"pp": pp_size}, comm=comm)
        path = save_checkpoint(folder, 7, model=own, **options)
        drawn = torch.rand(1)
        torch.manual_seed(0)
        loaded = load_checkpoint(path, model=own, optimizer=optimizer, comm=comm)
        assert loaded.rng_restored and torch.equal(torch.rand(1), drawn), "each rank has its own generator"

        # A weight that only rank 1 lacks stops both ranks with the same text.
        odd = {**own, "llm.9.weight": torch.zeros(1)} if comm.rank == 1 else own
        try:
            load_checkpoint(path, model=odd, comm=comm)
        except CheckpointError as error:
            texts = comm.gather(str(error))
        assert texts[0] == texts[1] and "(rank 1): it lacks model.llm.9.weight" in texts[0], texts

        # A rank that cannot write stops both; what was complete stays the latest.
        if comm.rank == 1:
            def full(descriptor):
                raise OSError(28, "No space left on device")
            sync, os.fsync = os.fsync, full
        try:
            save_checkpoint(folder, 8, model=own, **options)
        except CheckpointError as error:
            texts = comm.gather(str(error))
        assert texts[0] == texts[1] and "No space left on device" in texts[0], texts
        assert latest_complete(folder) == path
        if comm.rank == 1:
            os.fsync = sync
        comm.barrier()
        print("done")

    # One world for both layouts: a second one in the same processes may find the first one's addresses in the store.
    with communicator(timeout_s=60, device=torch.device("cpu")) as world:
        for pp_size in (1, 2):
            comm = _connect(Layout.for_world(2, pp_size=pp_size), world.rank, world.device)
            check(comm, pp_size, folder / f"pp{pp_size}")
"""


def stepped(parameters: "dict[str, torch.nn.Parameter]") -> "torch.optim.AdamW":
    """An optimizer after one step with the parameters themselves as gradients, as in the script."""
    optimizer = build_optimizer(parameters, FitConfig())
    for parameter in parameters.values():
        parameter.grad = parameter.detach().clone()
    optimizer.step()
    return optimizer


@pytest.mark.multirank
def test_ck02_what_two_ranks_save_one_process_loads(tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    assert run_script(TWO_RANKS, str(tmp_path), launcher=launcher).count("done") == 4
    whole = {}
    for prefix, seed in (("visual", 1), ("llm", 2)):
        generator = torch.Generator().manual_seed(seed)
        for i in range(3):
            whole[f"{prefix}.{i}.weight"] = torch.nn.Parameter(torch.randn(4, 3, generator=generator))
    state = optimizer_tensors(stepped(whole))
    stored_bytes = []
    for pp_size in (1, 2):
        path = latest_complete(tmp_path / f"pp{pp_size}")
        assert path is not None
        other = {name: torch.nn.Parameter(torch.zeros(4, 3)) for name in whole}
        optimizer = build_optimizer(other, FitConfig())
        loaded = load_checkpoint(path, model=other, optimizer=optimizer, comm=COMM)
        assert (loaded.step, loaded.progress, loaded.without_state) == (7, {"pp": pp_size}, ())
        assert all(torch.equal(other[name], parameter) for name, parameter in whole.items())
        again = optimizer_tensors(optimizer)
        assert again.keys() == state.keys()
        assert all(torch.equal(state[key], again[key]) for key in state)
        sizes = json.loads((path / "meta.json").read_text())["files"]
        assert sorted(sizes) == [".metadata", "__0_0.distcp", "__1_0.distcp"]
        stored_bytes.append(sum(sizes.values()))
    # Replicas' copies are stored once: two replicas take the room of two stages.
    assert stored_bytes[0] == pytest.approx(stored_bytes[1], rel=0.05)
