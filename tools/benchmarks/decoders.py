"""Video decoders beside each other: `python -m tools.benchmarks.decoders --media FOLDER [--output FOLDER]`.

    files of --media --> each decoder that works here, in turn --> exact, refused, wrong, CPU, memory --> decoders.md

Truth is PyAV decoding every frame from the start; times are CPU time of this process relative to it. The rows are what
`AUTO_ORDER` of `dataloaders.video_decoders` rests on; docs/decoding.md shows a run. torchcodec takes part where it is
installed with the FFmpeg libraries that it needs.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from dataloaders.video_decoders import DECODERS, Health, measure_health, self_test
from dataloaders.video_decoders.base import VideoDecoder
from dataloaders.video_decoders.with_pyav import PyavDecoder
from tools.benchmarks.measuring import environment

_PACKAGES = {"pyav": "av", "decord": "decord", "torchcodec": "torchcodec"}
_EXTENSIONS = frozenset({".mp4", ".mov", ".mkv", ".webm", ".avi", ".flv", ".ts", ".gif", ".3gp", ".mpg"})


def usable_decoders() -> tuple[dict[str, VideoDecoder], dict[str, str]]:
    """(decoders by a name with their version, faults of the others)."""
    usable: dict[str, VideoDecoder] = {"pyav, from the start": PyavDecoder(skip_groups=False)}
    faults = {}
    for name, decoder in DECODERS.items():
        fault = self_test(decoder)
        if fault:
            faults[name] = fault
        else:
            usable[f"{name} {_version(name)}"] = decoder
    return usable, faults


def markdown(rows: Sequence[Health], faults: dict[str, str]) -> str:
    """The table, and what was refused and why."""
    lines = [
        "| decoder | files | exact | near | wrong | left to PyAV | CPU, median ratio | CPU, common files | growth |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        growth = f"{row.growth_bytes / 1024**2:.1f} MiB in {row.opens:,} opens"
        lines.append(
            f"| {row.decoder} | {row.files} | {row.exact} | {row.near} | {len(row.wrong)} | {len(row.refused)} "
            f"| {row.relative_cpu:.2f} | {row.cpu_ms:,.0f} ms of {row.num_common} | {growth} |"
        )
    notes = [f"- {name} does not work here: {fault}" for name, fault in faults.items()]
    for row in rows:
        notes += [f"- {row.decoder}, wrong: {', '.join(row.wrong)}"] if row.wrong else []
        notes += [f"- {row.decoder}, {file}: {why}" for file, why in sorted(row.refused.items())]
    return "\n".join([*lines, "", *dict.fromkeys(notes)]) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print the table and, with --output, write decoders.md and decoders.json."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--media", type=Path, required=True, help="folder with videos, searched with all below it")
    parser.add_argument("--output", type=Path, help="folder for decoders.md and decoders.json")
    parser.add_argument("--frames", type=int, default=16, help="frames taken of each file, evenly spread")
    parser.add_argument("--repeats", type=int, default=3, help="rounds over the decoders, per file")
    parser.add_argument("--opens", type=int, default=2_000, help="opens of a small clip for the growth of memory")
    options = parser.parse_args(arguments)
    files = sorted(path for path in options.media.rglob("*") if path.suffix.lower() in _EXTENSIONS)
    if not files:
        parser.error(f"no videos below {options.media}")
    decoders, faults = usable_decoders()
    rows = measure_health(files, decoders, num_frames=options.frames, repeats=options.repeats, opens=options.opens)
    table = markdown(rows, faults)
    print(table)
    if options.output:
        options.output.mkdir(parents=True, exist_ok=True)
        (options.output / "decoders.md").write_text(table)
        versions = {name: _version(name) for name in DECODERS}
        found = {"environment": environment(versions), "rows": [asdict(row) for row in rows], "faults": faults}
        (options.output / "decoders.json").write_text(json.dumps(found, indent=1))
    return 0


def _version(name: str) -> str:
    try:
        return version(_PACKAGES[name])
    except PackageNotFoundError:
        return ""


if __name__ == "__main__":
    sys.exit(main())
