"""Our five packages have plain names, so check that they really are ours before any of them is used.

A user's own `packing.py` or `trainer.py` beside a script, or another distribution's `tools`, would otherwise be
imported in place of ours without a word.
"""

import importlib.util
from collections.abc import Sequence
from pathlib import Path

from balancer.errors import InstallationError

IMPORTED_BY_BALANCER = ("packing", "dataloaders")
ALL_SIBLINGS = (*IMPORTED_BY_BALANCER, "trainer", "tools")


def verify_siblings(names: Sequence[str] = IMPORTED_BY_BALANCER) -> None:
    """Check that each package of `names` lies beside this one.

    Raises:
        InstallationError: names the foreign file, or the package that is missing.
    """
    home = Path(__file__).resolve().parent.parent
    for name in names:
        spec = importlib.util.find_spec(name)
        origin = None if spec is None else spec.origin
        if origin is None:
            raise InstallationError(
                f"package {name!r} of mllm-balancer is missing beside {home / 'balancer'}. Reinstall mllm-balancer."
            )
        if Path(origin).resolve().parent != home / name:
            raise InstallationError(
                f"import name {name!r} belongs to {origin}, not to mllm-balancer in {home}. Rename or uninstall that "
                f"one, or start Python where it does not come first on the module path."
            )
