"""Where the loader stands, kept in a Trainer's checkpoint, and a Trainer that goes on from there.

    checkpoint-N/balanced_loader.json    `BalancedDataLoader.state_dict()` behind step N, the same on every rank
    resume: load_state_dict              the next batch is the one that the unstopped run would have had

The Trainer itself would load all batches of the epoch so far and drop them. A loader of ours stands behind them
already, so while an epoch runs `transformers.trainer.skip_first_batches` is one that leaves our loaders alone, and
others to the function that was there.

Price: steps must hold as many samples as before, on any number of ranks, because the Trainer counts in steps.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import transformers.trainer as trainer_module

from balancer.errors import LoaderStateError
from balancer.loader import BalancedDataLoader

STATE_NAME = "balanced_loader.json"


def save_position(folder: Path, state: Mapping[str, Any]) -> None:
    """Write the state of a loader into a checkpoint, which is made if need be."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / STATE_NAME).write_text(json.dumps(state), encoding="utf-8")


def go_on(loader: BalancedDataLoader[Any], folder: Path) -> tuple[int, int]:
    """(epoch, finished steps of it) behind which the loader goes on.

    Raises:
        LoaderStateError: no position was saved; or steps had another size, so that the Trainer's count of steps would
            mean something else; or the loader cannot go on from it.
    """
    path = folder / STATE_NAME
    if not path.is_file():
        raise LoaderStateError(
            f"{path} is missing: the checkpoint was saved without BalancedTrainerMixin, whose order of samples is "
            f"another one. Pass ignore_data_skip=True to begin with the epoch of the checkpoint from its start"
        )
    state = json.loads(path.read_text(encoding="utf-8"))
    then, now = state.get("global_batch_size"), loader.balanced.options.global_batch_size
    if then != now:
        raise LoaderStateError(
            f"steps of {path} have {then} samples, those of this run {now}: the Trainer's count of steps, and its "
            f"learning rate, would no longer fit. Keep per_device_train_batch_size x gradient_accumulation_steps x "
            f"ranks at {then}"
        )
    loader.load_state_dict(state)
    position = loader.state_dict()
    epoch, step = int(position["epoch"]), int(position["step"])
    return (epoch + 1, 0) if step == loader.steps_per_epoch else (epoch, step)


@contextmanager
def nothing_skipped() -> Iterator[None]:
    """The Trainer skips no batches of our loaders in here."""
    module = vars(trainer_module)
    plain = module["skip_first_batches"]

    def skip(dataloader: Any, num_batches: int = 0) -> Any:
        return dataloader if isinstance(dataloader, BalancedDataLoader) else plain(dataloader, num_batches)

    module["skip_first_batches"] = skip
    try:
        yield
    finally:
        module["skip_first_batches"] = plain
