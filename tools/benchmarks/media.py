"""Speed of header probing and indexing beside public packages: `python -m tools.benchmarks.media --output FOLDER`.

    corpus (tar shards) --> images, mp4, mkv: one medium by range reads   --> media.json, media.md
                        --> index: a whole pass over the shards
                        --> size: a large index on disk, see `index_size`
                        --> agreement: token rules against the oracle of --data, one row a family

Methods of a section run in turn in one process, by CPU time (of children as well: some start workers). Run it on a
machine that does nothing else, in an environment with the packages of `media_methods`.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from tools.benchmarks.agreement import Agreement, agreement_rows
from tools.benchmarks.index_size import SizeRow, size_row
from tools.benchmarks.measuring import cpu_with_children_s, environment, measure
from tools.benchmarks.media_corpus import write_clips, write_images
from tools.benchmarks.media_methods import header_methods, index_methods, installed_versions, members

NUM_IMAGES, NUM_CLIPS, NUM_ROWS = 1_000, 100, 1_000_000
BUDGET_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaRow:
    """One method over one corpus.

    Attributes:
        section: images, mp4, mkv or index. method: what ran.
        num_media, num_understood: media of the corpus, and how many the method returned something for.
        runs_us: CPU microseconds per medium of every run.
    """

    section: str
    method: str
    num_media: int
    num_understood: int
    runs_us: tuple[float, ...]

    @property
    def median_us(self) -> float:
        """Median over the runs."""
        return statistics.median(self.runs_us)


def media_rows(images: Sequence[Path], clips: Sequence[Path], *, repeats: int) -> list[MediaRow]:
    """Rows of the sections images, mp4, mkv and index."""
    rows: list[MediaRow] = []
    num_images = 0
    for section, shards, extension in (("images", images, ".jpg"), ("mp4", clips, ".mp4"), ("mkv", clips, ".mkv")):
        found = members(shards, (extension,))
        rows += _section(section, header_methods(found, section), len(found), repeats)
        num_images = num_images or len(found)
    return rows + _section("index", index_methods(images), num_images, repeats)


def _section(name: str, methods: Mapping[str, Callable[[], int]], num_media: int, repeats: int) -> list[MediaRow]:
    for method in methods.values():
        method()  # imports, and the page cache
    timings, understood = measure(methods, repeats=repeats, budget_s=BUDGET_S, clock_s=cpu_with_children_s)
    return [
        MediaRow(
            section=name,
            method=method,
            num_media=num_media,
            num_understood=understood[method],
            runs_us=tuple(1e3 * run / num_media for run in timing.runs_ms),
        )
        for method, timing in timings.items()
    ]


def markdown(rows: Sequence[MediaRow], sizes: Sequence[SizeRow], agreements: Sequence[Agreement]) -> str:
    """A table a section; the ratio is to our first row of the section."""
    lines: list[str] = []
    for section in dict.fromkeys(row.section for row in rows):
        chosen = [row for row in rows if row.section == section]
        ours = next(row.median_us for row in chosen if row.method.startswith("ours"))
        lines += _table(
            section,
            ["method", "media", "CPU us each, median (min to max)", "x ours"],
            [
                [
                    row.method,
                    f"{row.num_understood:,} of {row.num_media:,}",
                    f"{row.median_us:,.1f} ({min(row.runs_us):,.1f} to {max(row.runs_us):,.1f})",
                    f"{row.median_us / ours:.1f}",
                ]
                for row in chosen
            ],
        )
    lines += _table(
        "size",
        ["rows of", "samples", "MB", "CPU ms to open and sum two columns, median (min to max)"],
        [
            [
                size.name,
                f"{size.num_samples:,}",
                f"{size.size_bytes / 1e6:.1f}",
                f"{statistics.median(size.open_ms):.1f} ({min(size.open_ms):.1f} to {max(size.open_ms):.1f})",
            ]
            for size in sizes
        ],
    )
    if agreements:
        lines += _table(
            "agreement",
            ["family of the oracle", "rows", "equal", "both refuse", "other texts", "differ", "why"],
            [
                [a.family, *(f"{n:,}" for n in (a.rows, a.equal, a.refused, a.texts, a.differ)), a.note]
                for a in agreements
            ],
        )
    return "\n".join(lines)


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [f"## {title}", "", f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    return [*lines, *(f"| {' | '.join(row)} |" for row in rows), ""]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; see the module."""
    parser = argparse.ArgumentParser(prog="tools.benchmarks.media", description=__doc__.partition("\n")[0])
    parser.add_argument("--output", type=Path, required=True, help="folder for media.json and media.md")
    parser.add_argument("--data", type=Path, help="folder with token_oracle.parquet and token_oracle_params.json")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--quick", action="store_true", help="a small corpus, to try the command")
    arguments = parser.parse_args(argv)
    with TemporaryDirectory() as folder:
        num_images, num_clips = (40, 10) if arguments.quick else (NUM_IMAGES, NUM_CLIPS)
        images, clips = write_images(Path(folder), num_images), write_clips(Path(folder), num_clips)
        rows = media_rows(images, clips, repeats=1 if arguments.quick else arguments.repeats)
        num_rows = 2_000 if arguments.quick else NUM_ROWS
        sizes = [
            size_row(name, shards, Path(folder, name), num_samples=num_rows)
            for name, shards in (("images", images), ("clips", clips))
        ]
    agreements = agreement_rows(arguments.data) if arguments.data else []
    arguments.output.mkdir(parents=True, exist_ok=True)
    text = markdown(rows, sizes, agreements)
    (arguments.output / "media.md").write_text(text, encoding="utf-8")
    content = {
        "environment": environment(installed_versions()),
        "rows": [{**asdict(row), "median_us": row.median_us} for row in rows],
        "sizes": [asdict(row) for row in sizes],
        "agreement": [asdict(row) for row in agreements],
    }
    (arguments.output / "media.json").write_text(json.dumps(content, indent=1), encoding="utf-8")
    sys.stdout.write(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
