"""Speed and quality of packing and partitioning beside public systems: `python -m tools.benchmarks.packing`.

    workloads --> sections --> rows --> targets --> packing.json, packing.md, summary.md, packing.svg
                  pack, vector, bounds     bins under one, two and three capacities; what column generation says of them
                  partition, grid          samples on ranks, and on ranks x micro-batches
                  streaming                bounded look-ahead
                  startup, memory          fresh processes

Every method of a row runs in the same process on the same input, in turn, by CPU time (see `measuring`). Run it on a
machine that does nothing else, in an environment with the packages of `peers`, and give --data for the real tables.
A full run takes the better part of an hour, --quick half a minute; --join puts the files of runs of some sections
together.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from tools.benchmarks.bound_rows import bound_rows
from tools.benchmarks.grid_rows import grid_rows
from tools.benchmarks.measuring import Row, environment
from tools.benchmarks.options import NUM_ITEMS, SCALE_ITEMS, Options
from tools.benchmarks.packing_rows import pack_rows
from tools.benchmarks.packing_svg import speed_against_excess
from tools.benchmarks.partition_rows import partition_rows
from tools.benchmarks.peers import installed_versions, missing_packages
from tools.benchmarks.rendering import markdown
from tools.benchmarks.startup_rows import memory_rows, startup_rows
from tools.benchmarks.streaming_rows import streaming_rows
from tools.benchmarks.summary import summary
from tools.benchmarks.targets import targets
from tools.benchmarks.vector_rows import vector_rows

QUICK_ITEMS = 2_000
QUICK_SCALE = 1_000
QUICK_WORKLOADS = ("text", "vlm")
QUICK_SAMPLES = 60

NOTES = (
    "CPU time of the process, median over the runs of a method; a method stops being repeated after its time budget.",
    "Samples above a capacity are clipped to it, for every method alike.",
    "Ours returns arrays; rows marked `lists` include building Python lists of item indices, as most others do.",
    "Rows with a system in parentheses are that system's algorithm written anew in the same kind of code, or, where "
    "the system is an installed package, the package itself.",
    "`broken` lists what a result breaks: items in no bin, bins above a capacity (and the worst load over it), unequal "
    "counts, slots beyond those asked for.",
)


def _sections(options: Options) -> dict[str, Callable[[], Iterator[Row]]]:
    few = QUICK_SAMPLES if options.quick else None
    return {
        "pack": lambda: pack_rows(options),
        "vector": lambda: vector_rows(options),
        "bounds": lambda: bound_rows(options, num_items=few) if few else bound_rows(options),
        "partition": lambda: partition_rows(options),
        "grid": lambda: grid_rows(options),
        "streaming": lambda: streaming_rows(options),
        "startup": startup_rows,
        "memory": lambda: memory_rows(options, num_items=options.num_items) if few else memory_rows(options),
    }


def _options(arguments: argparse.Namespace) -> Options:
    if not arguments.quick:
        return Options(
            num_items=arguments.items or NUM_ITEMS,
            scale=SCALE_ITEMS if arguments.scale is None else tuple(arguments.scale),
            repeats=arguments.repeats,
            workloads=tuple(arguments.workloads or ()),
            data=arguments.data,
            with_peers=not arguments.no_packages,
        )
    return Options(
        num_items=arguments.items or QUICK_ITEMS,
        capacities=(4_096, 8_192),
        scale=(QUICK_SCALE,),
        repeats=2,
        budget_s=0.2,
        workloads=tuple(arguments.workloads or QUICK_WORKLOADS),
        data=arguments.data,
        with_peers=not arguments.no_packages,
        quick=True,
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Run the sections; tables go to stdout, files to --output."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.benchmarks.packing",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="few samples: shows that it runs, measures little")
    parser.add_argument("--only", help="sections, separated by commas")
    parser.add_argument("--data", type=Path, help="folder with the real tables (see tools/benchmarks/real_tables.py)")
    parser.add_argument("--output", type=Path, help="folder for packing.json, packing.md, summary.md and packing.svg")
    parser.add_argument("--workloads", nargs="+", help="names; default: what each section is made for")
    parser.add_argument("--items", type=int, help="samples of most rows; default 100,000, or 2,000 with --quick")
    parser.add_argument("--scale", type=int, nargs="*", help="further n of section pack; default 1e3, 1e4, 1e6, 1e7")
    parser.add_argument("--repeats", type=int, default=5, help="runs of a method")
    parser.add_argument("--join", type=Path, nargs="+", help="packing.json files of earlier runs, instead of measuring")
    parser.add_argument("--no-packages", action="store_true", help="leave out installed packages")
    arguments = parser.parse_args(argv)
    if arguments.join:
        sys.stdout.write(report([row for file in arguments.join for row in _read(file)], arguments.output))
        return
    options = _options(arguments)
    sections = _sections(options)
    wanted = arguments.only.split(",") if arguments.only else list(sections)
    if unknown := [name for name in wanted if name not in sections]:
        parser.error(f"unknown sections {', '.join(unknown)}; available: {', '.join(sections)}")
    rows: list[Row] = []
    tables = ""
    for name in wanted:
        rows += sections[name]()
        tables = report(rows, arguments.output)  # after every section, so that a stopped run leaves what it has
    sys.stdout.write(tables)


def report(rows: Sequence[Row], output: Path | None) -> str:
    """Tables of the rows; with `output` also written there, with the numbers and the picture."""
    checked = targets(rows)
    notes = [*NOTES]
    if missing := missing_packages():
        notes.append(f"Not installed, so without rows: {', '.join(missing)}.")
    tables = markdown(rows, checked, notes)
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        document = {
            "environment": environment(installed_versions()),
            "targets": [{**asdict(target), "verdict": target.verdict} for target in checked],
            "notes": notes,
            "rows": [row.as_json() for row in rows],
        }
        _write(output / "packing.json", json.dumps(_without_nan(document), indent=1, allow_nan=False) + "\n")
        _write(output / "packing.md", tables)
        _write(output / "summary.md", summary(rows))
        _write(output / "packing.svg", speed_against_excess(rows))
    return tables


def _read(file: Path) -> list[Row]:
    return [Row.from_json(row) for row in json.loads(file.read_text(encoding="utf-8"))["rows"]]


def _write(file: Path, text: str) -> None:
    file.write_text(text, encoding="utf-8")


def _without_nan(value: object) -> object:
    """JSON has no NaN: null stands for what was not measured."""
    if isinstance(value, dict):
        return {name: _without_nan(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_without_nan(entry) for entry in value]
    return None if isinstance(value, float) and value != value else value  # noqa: PLR0124


if __name__ == "__main__":
    main()
