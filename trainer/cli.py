"""`balancer-train`: hand a parsed command to the code that runs it, and turn errors into exit codes.

Exit codes: 0 done, 1 failure (data, numerics, a check that failed), 2 usage or configuration.
"""

import logging
import os
import sys
from collections.abc import Sequence

from trainer.cli_parse import parse
from trainer.config import CheckConfig, ExportConfig, FitConfig, PlanConfig
from trainer.errors import ConfigError
from trainer.profile_config import ProfileConfig

USAGE, FAILURE = 2, 1


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line (without the program name) and return its exit code."""
    # Read by OpenMP when torch is first loaded: threads that spin while they wait make a step several times slower as
    # soon as loader workers or anyone else needs a core.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    command = parse(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(level=logging.INFO if _rank() == 0 else logging.WARNING, format="%(message)s")
    try:
        return _run(command.config)
    except BrokenPipeError:  # whoever read our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes it once more
        return FAILURE
    except Exception as error:
        if not _is_ours(error):
            raise
        sys.stderr.write(_message(error))
        return USAGE if _is_usage(error) else FAILURE
    except KeyboardInterrupt:
        sys.stderr.write("interrupted; --resume continues a run from its newest checkpoint\n")
        return FAILURE


def _run(config: object) -> int:
    # Imported here so that --help and usage errors answer before torch is loaded.
    match config:
        case FitConfig():
            from trainer.fit_command import run_fit

            return run_fit(config)
        case CheckConfig():
            from trainer.check_command import run_check

            return run_check(config)
        case PlanConfig():
            from trainer.plan_command import run_plan

            return run_plan(config)
        case ExportConfig():
            from trainer.export import run_export

            return run_export(config)
        case ProfileConfig():
            from trainer.profile_command import run_profile

            return run_profile(config)
    raise ConfigError(f"no command takes a {type(config).__name__}")


def _is_ours(error: Exception) -> bool:
    """Whether the text of an error says enough: ours, and those of the system (a full disk, no permission)."""
    from balancer.errors import BalancerError
    from dataloaders.errors import DataError
    from packing.errors import PackingError
    from trainer.errors import TrainerError

    return isinstance(error, BalancerError | DataError | PackingError | TrainerError | OSError)


def _is_usage(error: Exception) -> bool:
    from balancer.errors import LayoutError

    return isinstance(error, ConfigError | LayoutError)


def _message(error: Exception) -> str:
    from balancer.printable import printable

    where = f" (rank {_rank()})" if _rank() else ""
    return printable(f"error{where}: {error}\n")  # the text may name members and keys, which are data


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))
