"""The fenced code blocks of a Markdown file, each with the HTML comment before it that says who runs it.

    <!-- run -->            executed by test_readme.py, from an empty folder
    <!-- run: torch -->     the same, where torch is installed
    <!-- ci: NAME -->       executed by .ci/run (NAME is `test` or `train`)
    <!-- not run: WHY -->   shown only

In a block that runs, a comment `# -> TEXT` is what it prints: every piece of TEXT between `...` occurs in the output,
in this order; white space does not count.

Standard library only: `.ci/run` calls this file before anything is installed:
`python readme_blocks.py README.md "ci: test"` prints the one block with that mark.
"""

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_FENCE = re.compile(r"^ {0,3}(`{3,}|~{3,})[ \t]*([\w+-]*)")
_SHOWN = re.compile(r"# -> (.*)$", re.MULTILINE)
_COMMENT = re.compile(r"^\s*<!--\s*(.*?)\s*-->\s*$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One fenced block: its language, its mark ("" without one), its code and the line it starts at."""

    language: str
    mark: str
    code: str
    line: int


def blocks(text: str) -> list[Block]:
    """All fenced blocks in order.

    Raises:
        ValueError: a fence that is never closed.
    """
    return list(_blocks(text.splitlines()))


def _blocks(lines: list[str]) -> Iterator[Block]:
    mark, fence, language, start = "", "", "", 0
    code: list[str] = []
    for number, line in enumerate(lines, start=1):
        opening = _FENCE.match(line)
        if fence:
            if opening and opening[1].startswith(fence) and not line.strip().strip(fence[0]):
                yield Block(language=language, mark=mark, code="\n".join(code) + "\n", line=start)
                mark, fence, code = "", "", []
            else:
                code.append(line)
        elif opening:
            fence, language, start = opening[1], opening[2].lower(), number
        elif comment := _COMMENT.match(line):
            mark = comment[1]
        elif line.strip():
            mark = ""  # a mark belongs to the block that follows it directly
    if fence:
        raise ValueError(f"the code block of line {start} is never closed")


def missing(code: str, output: str) -> list[str]:
    """Pieces of the comments `# -> TEXT` of a block that its output does not have, or not in this order."""
    printed, place, found = "".join(output.split()), 0, []
    for piece in (piece for shown in _SHOWN.findall(code) for piece in shown.split("...")):
        wanted = "".join(piece.split())
        at = printed.find(wanted, place)
        if at < 0:
            found.append(piece.strip())
        else:
            place = at + len(wanted)
    return found


def marked(text: str, mark: str) -> Block:
    """The one block that carries `mark`.

    Raises:
        ValueError: none does, or several do.
    """
    found = [block for block in blocks(text) if block.mark == mark]
    if len(found) != 1 or not found[0].code.strip():
        lines = ", ".join(str(block.line) for block in found) or "none"
        raise ValueError(
            f"exactly one code block that is not empty must follow <!-- {mark} -->; lines of those found: {lines}"
        )
    return found[0]


def main(argv: list[str]) -> int:
    """Print the block of a file that carries a mark; 1 and a message where there is none."""
    path, mark = argv
    try:
        code = marked(Path(path).read_text(encoding="utf-8"), mark).code
    except (OSError, ValueError) as error:
        sys.stderr.write(f"error: {path}: {error}\n")
        return 1
    sys.stdout.write(code)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
