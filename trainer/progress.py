"""Progress bars on rank 0 for the long steps before training (demo corpus, index); silent elsewhere."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from trainer.data import Progress as Callback


@contextmanager
def progress_bars() -> Iterator[Callback]:
    """A callback (name, done, total) that draws one bar per name on stderr."""
    quiet = os.environ.get("RANK", "0") != "0"
    console = Console(file=sys.stderr, quiet=quiet)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    tasks: dict[str, TaskID] = {}
    with Progress(*columns, console=console, disable=quiet) as progress:

        def update(name: str, done: int, total: int) -> None:
            if name not in tasks:
                tasks[name] = progress.add_task(name, total=total)
            progress.update(tasks[name], completed=done, total=total)

        yield update
