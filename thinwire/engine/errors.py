"""Errors of the engine's commands and checkpoints, and text for a terminal, for those that need no torch."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError

_LONGEST_PLACE = 200


class CheckpointError(RuntimeError):
    """A checkpoint cannot be used; the message names the file or parameter, what is wrong with it and what to do."""


class UsageError(Exception):
    """What the command line asked for is not there, or cannot be done; exit code 2."""


def printable(text: str) -> str:
    """`text` with everything but printable characters and line ends spelled out."""
    return "".join(one if one.isprintable() or one == "\n" else ascii(one)[1:-1] for one in text)


def first_fault(error: ValidationError, whole: str = "", parts: Collection[str] | None = None) -> str | None:
    """The first thing that is wrong, and where in `whole` it is; among these `parts` of it, None if nothing is."""
    for detail in error.errors(include_input=False, include_url=False, include_context=False):
        if parts is None or (detail["loc"] and detail["loc"][0] in parts):
            # Keys come from the file too, and may hold anything.
            names = [part if isinstance(part, str) and part.isprintable() else repr(part) for part in detail["loc"]]
            return f"{'.'.join(part for part in (whole, *names) if part)[:_LONGEST_PLACE]}: {detail['msg']}"
    return None
