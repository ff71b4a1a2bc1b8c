"""Makes text from files and folders fit for a terminal, which takes escape characters in it for commands."""

from __future__ import annotations

__all__ = ["printable"]


def printable(text: str) -> str:
    """`text` with everything but printable characters and line ends spelled out."""
    return "".join(one if one.isprintable() or one == "\n" else ascii(one)[1:-1] for one in text)
