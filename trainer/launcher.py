"""The launcher of a rank: torchrun starts the ranks in sessions of their own, so that its death does not end them.

A rank whose launcher was killed would train on, beside the run that is resumed in its place. Its parent is then another
process, which each rank sees at the next step: one raises, and the others lose contact with it.
"""

import os
from collections.abc import Mapping

from trainer.errors import LostRankError


class Launcher:
    """The process that started this rank under torchrun; without torchrun there is none to watch."""

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._pid = os.getppid() if "TORCHELASTIC_RUN_ID" in environment else None

    def check(self) -> None:
        """Raise LostRankError when the launcher is gone."""
        if self._pid is not None and os.getppid() != self._pid:
            raise LostRankError(
                f"the launcher (process {self._pid}) is gone, so this rank ends. Start it again with --resume."
            )
