"""Tokens of the short texts that processors write between visual tokens, where no tokenizer is at hand.

    "<12.3 seconds>"  ->  < 1 2 . 3 _seconds >  ->  7

The rule: a word with the space before it, a digit, a run of punctuation with the space before it, a run of line
breaks are one token each. That is how the pre-tokenizers of the Qwen and Llama 3 vocabularies split ASCII text, with
single digits as in Qwen; words that the vocabulary lacks are split further there. Counts made so are marked "rough".
"""

import re

_PIECE = re.compile(r"[^\r\n\w]?[^\W\d_]+|\d| ?[^\s\w]+[\r\n]*|_+|\s*[\r\n]+|\s+(?!\S)|\s+")


def count_text_roughly(text: str) -> int:
    """Tokens of `text` by the rule above."""
    return len(_PIECE.findall(text))
