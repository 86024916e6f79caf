"""Text from data, made safe to show: names and messages may hold terminal escapes, or bytes that are not UTF-8.

    "a\\x1b[2J.jpg"  -->  a\\x1b[2J.jpg, spelled out in plain letters

Names stand in one line, so line breaks are spelled out too; `balancer.printable` is for texts of several lines, which
keep theirs, and where a mark is enough.

Price: two names that differ may read alike, so this is for messages and labels, never for look-ups.
"""


def printable(name: str) -> str:
    """`name` with control characters, and bytes that are not UTF-8, spelled out."""
    if name.isprintable():
        return name
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape", "surrogatepass").decode("ascii") for char in name
    )
