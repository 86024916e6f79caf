"""Tokens of the short texts that processors write between visual tokens: timestamps, separators.

    "<12.3 seconds>"  ->  < 1 2 . 3 _seconds >  ->  7

With the `tokenizer.json` of the model folder they are counted as they stand between special tokens. Where there is
none, by a rule: a word with the space before it, a digit, a run of punctuation with the space before it, a run of line
breaks are one token each. That is how the pre-tokenizers of the Qwen and Llama 3 vocabularies split ASCII text, with
single digits as in Qwen; words that the vocabulary lacks are split further there. Counts made so are marked "rough".
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from dataloaders.hf_tokenizer import TOKENIZER_NAME, TokenizerFile, read_tokenizer

ROUGH = "a rough rule"  # what estimators say of such counts
_PIECE = re.compile(r"[^\r\n\w]?[^\W\d_]+|\d| ?[^\s\w]+[\r\n]*|_+|\s*[\r\n]+|\s+(?!\S)|\s+")


def count_text_roughly(text: str) -> int:
    """Tokens of `text` by the rule above."""
    return len(_PIECE.findall(text))


def count_text_of(folder: str | Path) -> tuple[Callable[[str], int], str] | None:
    """(count of a text, what it counts by) of the tokenizer in a model folder; None: the folder has none.

    The file is digested here, and read when the first text is counted.

    Raises:
        DataError: files that are too large or damaged.
    """
    if not (Path(folder) / TOKENIZER_NAME).is_file():
        return None
    file = read_tokenizer(folder)
    return FolderTextCounter(file), f"{TOKENIZER_NAME} {file.identity[:16]}"


@dataclass(frozen=True, slots=True)
class FolderTextCounter:
    """Counts with the tokenizer of a model folder; travels to workers as a path and a digest."""

    file: TokenizerFile

    def __call__(self, text: str) -> int:
        """Tokens of `text` between two special tokens."""
        return self.file.load().count_between_specials(text)
