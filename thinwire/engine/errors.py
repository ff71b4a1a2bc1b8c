"""Errors of the engine's commands and checkpoints, and text for a terminal, for those that need no torch."""

from __future__ import annotations


class CheckpointError(RuntimeError):
    """A checkpoint cannot be used; the message names the file or parameter, what is wrong with it and what to do."""


class UsageError(Exception):
    """What the command line asked for is not there, or cannot be done; exit code 2."""


def printable(text: str) -> str:
    """`text` with everything but printable characters and line ends spelled out."""
    return "".join(one if one.isprintable() or one == "\n" else ascii(one)[1:-1] for one in text)
