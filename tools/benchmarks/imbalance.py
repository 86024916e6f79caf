"""A benchmark of imbalance in multimodal training, for any balancer: `python -m tools.benchmarks.imbalance`.

    workloads x R x M x layout x meeting rule  -->  every balancer places the same steps  -->  one simulator judges
                                               -->  targets, gains, exact optimum, planning time: markdown and JSON

What is simulated: the pipeline schedule of each layout with the modelled time of every sample, transfers and launches
free, nothing measured on an accelerator. Planning times are measured, as CPU time. `--quick` takes a minute, a full
run some minutes with `--processes 2`. `--balancer module:function` adds your own (docs/imbalance.md).
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from balancer.policies import policy_names
from tools.benchmarks.imbalance_cases import LAYOUTS, MAIN_LAYOUTS
from tools.benchmarks.imbalance_ours import UserBalancerError, our_policies, users_balancer
from tools.benchmarks.imbalance_own_terms import own_terms
from tools.benchmarks.imbalance_run import QUICK_STEPS, RunOptions, default_workloads, run
from tools.benchmarks.imbalance_small import optima
from tools.benchmarks.imbalance_tables import Results, markdown
from tools.benchmarks.imbalance_targets import imbalance_targets
from tools.benchmarks.imbalance_timing import planning_times
from tools.benchmarks.measuring import environment
from tools.benchmarks.real_tables import REAL_TABLES
from tools.benchmarks.workloads import WORKLOADS, available

QUICK_MICROBATCHES = (1, 4)
NOTES = (
    "Everything but planning time is simulated: modelled times of a 7B model (closed form, no constants), free "
    "transfers, free collectives, free launches, for every method alike.",
    "`fine`: no sample above a quarter of the mean micro-batch. `coarse`: samples up to 32,768 tokens. One token "
    "capacity a micro-batch: 10 % above the mean, and at least the largest sample.",
    "The lower bound is the planner's certificate, for the M asked for; a method that takes more micro-batches may be "
    "below it on a pipeline.",
    "A best baseline keeps every sample and the capacity in all steps of the setting, and encodes samples where they "
    "run. Those that exchange encoder data are listed, with a free exchange.",
    "Baselines are the public systems' rules written anew; where one needs a cost, it gets ours.",
)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark; tables go to stdout and to --output, numbers to --json."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    options = _options(arguments, parser)
    policy = (options.policies or our_policies())[-1]
    try:
        rows = run(options)
    except UserBalancerError as error:
        parser.exit(1, f"error: --balancer {error}\n")
    times = [] if arguments.no_times else planning_times(options, policy, quick=arguments.quick)
    small = optima(options, policy, quick=arguments.quick)
    results = Results(
        policy=policy,
        rows=rows,
        targets=imbalance_targets(rows, times, small, policy),
        times=times,
        optima=small,
        own_terms=own_terms(options, policy, quick=arguments.quick),
    )
    notes = [*NOTES, _what_ran(options)]
    notes.append("Environment: " + ", ".join(f"{name} {value}" for name, value in environment({}).items()) + ".")
    tables = markdown(results, notes)
    if arguments.output is not None:
        _write(arguments.output, tables)
    if arguments.json is not None:
        _write(arguments.json, _json(results, notes))
    sys.stdout.write(tables)


def _what_ran(options: RunOptions) -> str:
    steps = ", ".join(f"R = {ranks:,}: {count} steps" for ranks, count in options.num_steps)
    microbatches = ", ".join(map(str, options.num_microbatches))
    return f"This run: {steps} a setting; M = {microbatches}; workloads {', '.join(options.workloads)}."


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tools.benchmarks.imbalance",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="one minute: R = 8, M = 1 and 4, two steps")
    parser.add_argument("--data", type=Path, help="folder with the real tables (see tools/benchmarks/real_tables.py)")
    generated, real = ", ".join(WORKLOADS), ", ".join(REAL_TABLES)
    parser.add_argument(
        "--workloads",
        nargs="+",
        metavar="NAME",
        help=f"generated: {generated}; with --data: {real}; default: four generated ones, real ones with --data",
    )
    keys = ", ".join(layout.key for layout in LAYOUTS)
    parser.add_argument("--layouts", nargs="+", metavar="NAME", help=f"{keys}, or all; default: the first four")
    policies = ", ".join(policy_names())
    parser.add_argument(
        "--policies", nargs="+", metavar="NAME", help=f"{policies}; the last one named is what targets are about"
    )
    parser.add_argument("--ranks", nargs="+", type=_positive, metavar="R", help="default 8, 64, 1024")
    parser.add_argument("--microbatches", nargs="+", type=_positive, metavar="M", help="default 1, 4, 16")
    parser.add_argument("--balancer", default="", metavar="MODULE:FUNCTION", help="your own, beside the others")
    parser.add_argument("--processes", type=_positive, default=1, help="settings at the same time")
    parser.add_argument("--no-times", action="store_true", help="do not measure planning time")
    parser.add_argument("--output", type=Path, help="file for the tables")
    parser.add_argument("--json", type=Path, help="file for all numbers")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise ValueError
    return value


_positive.__name__ = "number above 0"  # argparse says "invalid number above 0 value: '0'"


def _check_names(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """A usage error for the first name that does not exist, with those that do."""
    known = available(arguments.data)
    for name in arguments.workloads or ():
        if name not in known and name in REAL_TABLES:
            parser.error(f"--workloads {name}: a real table, give the folder that holds it with --data")
        if name not in known:
            parser.error(f"--workloads {name}: there is no such workload; available: {', '.join(known)}")
    for name in arguments.layouts or ():
        if name != "all" and not any(name in (layout.key, layout.name) for layout in LAYOUTS):
            parser.error(
                f"--layouts {name}: there is no such layout; "
                f"available: {', '.join(layout.key for layout in LAYOUTS)}, all"
            )
    for name in arguments.policies or ():
        if name not in policy_names():
            parser.error(f"--policies {name}: there is no such policy; available: {', '.join(policy_names())}")


def _options(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> RunOptions:
    _check_names(arguments, parser)
    options = RunOptions(
        workloads=tuple(arguments.workloads or default_workloads(arguments.data)),
        layouts=MAIN_LAYOUTS,
        policies=tuple(arguments.policies or ()),
        data=arguments.data,
        balancer=arguments.balancer,
        processes=arguments.processes,
    )
    if arguments.quick:
        options = replace(options, num_steps=QUICK_STEPS, num_microbatches=QUICK_MICROBATCHES)
    if arguments.layouts:
        asked = set(arguments.layouts)
        chosen = [layout.name for layout in LAYOUTS if asked & {layout.key, layout.name, "all"}]
        options = replace(options, layouts=tuple(chosen))
    if arguments.ranks:
        known = dict(options.num_steps)
        steps = tuple((ranks, known.get(ranks, max(1, min(8, 256 // ranks)))) for ranks in arguments.ranks)
        options = replace(options, num_steps=steps)
    if arguments.microbatches:
        options = replace(options, num_microbatches=tuple(arguments.microbatches))
    if options.balancer:
        try:
            users_balancer(options.balancer)
        except ValueError as error:
            parser.error(str(error))
    return options


def _json(results: Results, notes: Sequence[str]) -> str:
    document = {
        "environment": environment({}),
        "policy": results.policy,
        "targets": [{**asdict(target), "verdict": target.verdict} for target in results.targets],
        "rows": [row.as_json() for row in results.rows],
        "planning": [{**asdict(line), "median_ms": line.median_ms} for line in results.times],
        "optima": [asdict(line) for line in results.optima],
        "own_terms": [asdict(line) for line in results.own_terms],
        "notes": list(notes),
    }
    return json.dumps(_finite(document), indent=1, allow_nan=False) + "\n"


def _finite(value: object) -> object:
    """JSON has no NaN and no infinity: null stands for both."""
    if isinstance(value, dict):
        return {name: _finite(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not abs(value) < float("inf") else value


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
