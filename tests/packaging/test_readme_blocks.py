"""The parser by which .ci/run finds the README's commands: it finds exactly what is marked, or says what is wrong."""

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SAMPLE = """\
# Title

<!-- ci: test -->
```bash
pip install -c constraints.txt ".[all,test]" && (cd tests && python -m pytest)
```

<!-- run -->

```python
text = '''
<!-- ci: train -->
'''
```

<!-- run -->
Words between a mark and a block belong to neither.

~~~sh
echo "```"
~~~
"""


def test_a_block_has_its_language_mark_code_and_line(readme_blocks: ModuleType) -> None:
    first, second, third = readme_blocks.blocks(SAMPLE)
    assert (first.language, first.mark, first.line) == ("bash", "ci: test", 4)
    assert first.code == 'pip install -c constraints.txt ".[all,test]" && (cd tests && python -m pytest)\n'
    assert (second.language, second.mark) == ("python", "run")
    assert (third.language, third.code) == ("sh", 'echo "```"\n')


def test_a_mark_counts_only_directly_before_its_block(readme_blocks: ModuleType) -> None:
    assert readme_blocks.blocks(SAMPLE)[2].mark == ""


def test_a_comment_inside_a_block_is_code(readme_blocks: ModuleType) -> None:
    assert "<!-- ci: train -->" in readme_blocks.blocks(SAMPLE)[1].code
    with pytest.raises(ValueError, match="lines of those found: none"):
        readme_blocks.marked(SAMPLE, "ci: train")


def test_two_blocks_with_the_mark_are_refused(readme_blocks: ModuleType) -> None:
    with pytest.raises(ValueError, match=r"lines of those found: 4, 24"):
        readme_blocks.marked(SAMPLE + "\n<!-- ci: test -->\n```bash\ntrue\n```\n", "ci: test")


def test_an_empty_block_is_refused(readme_blocks: ModuleType) -> None:
    with pytest.raises(ValueError, match="not empty"):
        readme_blocks.marked("<!-- ci: test -->\n```bash\n\n```\n", "ci: test")


def test_a_fence_that_is_never_closed_is_refused(readme_blocks: ModuleType) -> None:
    with pytest.raises(ValueError, match="line 2 is never closed"):
        readme_blocks.blocks("<!-- run -->\n```bash\necho\n")


def test_a_comment_that_shows_output_is_held_against_it(readme_blocks: ModuleType) -> None:
    code = "print(a)  # -> [1 2 ... 9]\nprint(b)  # no output\n    print(c)  # -> ... late\n"
    assert readme_blocks.missing(code, "[ 1  2\n 3 9]\nmore, later") == []
    assert readme_blocks.missing(code, "[1 2 3 8]\nlate") == ["9]"]
    assert readme_blocks.missing(code, "late\n[1 2 9]") == ["late"]
    assert readme_blocks.missing("print(1)  # 2", "1") == []


def _call(path: Path, mark: str) -> subprocess.CompletedProcess[str]:
    script = Path(__file__).with_name("readme_blocks.py")
    command = [sys.executable, "-I", str(script), str(path), mark]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_script_prints_the_marked_block_alone(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text(SAMPLE, encoding="utf-8")
    done = _call(readme, "ci: test")
    assert done.returncode == 0
    assert done.stdout == 'pip install -c constraints.txt ".[all,test]" && (cd tests && python -m pytest)\n'


@pytest.mark.parametrize("content", ["# no block\n", None], ids=["no such block", "no README"])
def test_the_script_fails_where_the_command_is_missing(content: str | None, tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    if content is not None:
        readme.write_text(content, encoding="utf-8")
    done = _call(readme, "ci: test")
    assert done.returncode == 1
    assert done.stdout == ""
    assert "error: " in done.stderr
    assert "README.md" in done.stderr
