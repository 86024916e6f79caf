"""Text from data, made safe to show: names, captions and keys may hold terminal escapes.

Texts of several lines keep their line breaks and tabs; a name in a message, whose letters matter, is for
`dataloaders.printable`, which spells out what this replaces.
"""

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


def printable(text: str) -> str:
    """`text` with every control and other unprintable character replaced; line breaks and tabs stay."""
    return "".join(char if char.isprintable() or char in "\n\t" else REPLACEMENT for char in text)
