"""One outcome for all ranks: an error that only some of them can see is raised by every one, so that none goes on
alone into a collective that the others never join."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from thinwire.comm.communicator import Communicator

__all__ = ["on_every_rank", "raise_together"]

Result = TypeVar("Result")


def raise_together(comm: Communicator, error: Exception | None, doing: str) -> None:
    """Raise `error` where there is one, and on other ranks a ValueError that says which rank had which. Collective.

    `doing` completes "rank 3 could not ...".
    """
    mine = "" if error is None else f"{type(error).__name__}: {error}"
    # Names that it quotes, of files above all, may hold what is no text.
    messages = comm.all_gather_bytes(mine.encode(errors="backslashreplace"), doing)
    if error is not None:
        raise error
    for rank, message in enumerate(messages):
        if message:
            raise ValueError(f"rank {rank} could not {doing}: {message.decode()}")


def on_every_rank(
    comm: Communicator, action: Callable[[], Result], doing: str, errors: tuple[type[Exception], ...]
) -> Result:
    """Call `action()` on every rank; where it raises one of `errors` on some rank, raise on all. Collective."""
    try:
        result = action()
    except errors as error:
        raise_together(comm, error, doing)
        raise
    raise_together(comm, None, doing)
    return result
