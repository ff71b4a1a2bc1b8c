"""Errors a user caused: one clear message on rank 0, exit code 2, the same decision on every rank.

A rank that fails alone would leave the others waiting in a collective; so ranks agree first.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TypeVar

from thinwire.comm import Communicator

__all__ = ["BAD_INPUT", "InputError", "on_every_rank", "refuse"]

BAD_INPUT = 2
"""The exit code where the user has to give something else."""

Result = TypeVar("Result")


class InputError(ValueError):
    """Something the user gave cannot be used; the message says what to do instead."""


def refuse(program: str, error: InputError) -> int:
    """Says on stderr what `program` cannot use; returns the exit code."""
    print(f"{program}: error: {error}", file=sys.stderr, flush=True)
    return BAD_INPUT


def on_every_rank(comm: Communicator, action: Callable[[], Result]) -> Result:
    """Runs `action` on every rank; if it fails on any, raises the same `InputError` on all of them.

    `action` must not communicate. `InputError` and `OSError` count as the user's to solve; anything else
    is a defect and propagates as it is.
    """
    outcome: list[Result] = []
    complaint = ""
    try:
        outcome.append(action())
    except (InputError, OSError) as error:
        complaint = str(error)
    complaints = [message.decode() for message in comm.all_gather_bytes(complaint.encode())]
    for rank, message in enumerate(complaints):
        if message:
            raise InputError(message if rank == 0 else f"{message} (first seen on rank {rank})")
    return outcome[0]
