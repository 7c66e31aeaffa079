"""Text of engines, files and clients for a terminal or a log."""

from __future__ import annotations


def printable(text: str, keep: str = "") -> str:
    """Returns a text with escapes in place of unprintable characters, except those in ``keep``.

    Unprintable are control characters, which move the cursor of a terminal or set its colors, line
    ends, and invisible characters, which change the direction of a text.
    """
    if text.isprintable():
        return text
    return "".join(
        each if each.isprintable() or each in keep else each.encode("unicode_escape").decode()
        for each in text
    )
