"""Console entry points: check that the five packages belong together, then hand over to the command.

The commands live in layers above `balancer`; they are looked up by name here, and only when a command is run, so
that no import points upwards.
"""

import importlib
import sys

from balancer._installation import ALL_SIBLINGS, verify_siblings
from balancer.errors import InstallationError


def train() -> None:
    """`balancer-train`."""
    _run("trainer.cli")


def analyze() -> None:
    """`balancer-analyze`."""
    _run("tools.cli")


def _run(module: str) -> None:
    try:
        verify_siblings(ALL_SIBLINGS)
    except InstallationError as error:
        sys.stderr.write(f"error: {error}\n")
        sys.exit(2)
    try:
        code = importlib.import_module(module).main(sys.argv[1:])
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        sys.stderr.write("error: this command needs torch. Install it with: pip install 'mllm-balancer[train]'\n")
        code = 1
    sys.exit(code)
