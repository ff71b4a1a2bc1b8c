"""Errors of communication. After a failure the ranks hold a roll call, in which each says at which call it stands: the
silent are to blame. And what a schema found wrong, in a line."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError


class CommunicationError(RuntimeError):
    """A collective failed: a rank died, raised, called something else, or the transport broke.

    ``ranks`` holds the ranks at fault (empty if no rank can tell) and ``collective`` the failed call.
    ``final``: workers that come and go gain nothing by doing it again.
    """

    final = False

    def __init__(self, message: str, *, ranks: tuple[int, ...] = (), collective: str = "") -> None:
        super().__init__(message)
        self.ranks = ranks
        self.collective = collective


class CommunicationTimeout(CommunicationError):  # noqa: N818 - like the built-in TimeoutError, a kind
    """A collective did not finish within the communicator's timeout."""


def fork_error(parent: int) -> CommunicationError:
    """Build the error of what belongs to process `parent` and was used in a fork of it."""
    return CommunicationError(
        f"this belongs to process {parent}, of which process {os.getpid()} is a fork, that has none of its threads and "
        "connections: train and communicate in the process that began to, or start others before that"
    )


ROLL_CALL_SECONDS = 3.0
"""How long survivors wait for one another's answer; several times what a waiting rank takes to notice."""


@dataclass(frozen=True)
class Call:
    """One collective call: its place in the communicator's order, and what must agree on all ranks."""

    sequence: int
    signature: str

    def __str__(self) -> str:
        return f"{self.signature} (call {self.sequence})"

    def encode(self) -> bytes:
        """Bytes to send in a roll call."""
        return f"{self.sequence}|{self.signature}".encode()

    @staticmethod
    def decode(message: bytes) -> Call:
        """The call that ``encode`` turned into ``message``."""
        sequence, signature = message.decode().split("|", 1)
        return Call(int(sequence), signature)


@dataclass(frozen=True)
class RollCall:
    """The outcome of a roll call: where each rank that answered stands, who did not, and a remark.

    `lost`: ranks by their numbers in the job, of this group or not, where it is known which have left it.
    """

    answers: Mapping[int, Call]
    absent: tuple[int, ...]
    remark: str = ""
    lost: tuple[int, ...] = ()


def name_ranks(ranks: Iterable[int]) -> str:
    """``rank 3`` or ``ranks 1, 2``."""
    names = [str(rank) for rank in ranks]
    return f"{'rank' if len(names) == 1 else 'ranks'} {', '.join(names)}"


def describe_failure(
    call: Call, rank: int, global_ranks: Sequence[int], roll_call: RollCall, timeout: float | None, cause: object
) -> CommunicationError:
    """Build the error that ``rank`` raises for ``call`` after ``roll_call``; it names ``global_ranks``.

    ``timeout`` is the seconds waited when the call timed out, None when it failed at once; ``cause`` is
    what the transport said, if anything.
    """
    blamed = roll_call.lost or tuple(global_ranks[other] for other in roll_call.absent)
    differing = {global_ranks[other]: one for other, one in sorted(roll_call.answers.items()) if one != call}
    if blamed:
        reason = f"{name_ranks(blamed)} did not answer: dead, stopped or busy elsewhere"
    elif differing:
        blamed = tuple(differing)
        where = "; ".join(f"rank {other} is at {answer}" for other, answer in differing.items())
        reason = f"ranks are not at the same call: {where}"
    else:
        reason = "no rank is missing: the timeout is too short, or the network failed"
    what = f"timed out after {timeout:g} s" if timeout is not None else "failed"
    details = "".join(f" [{detail}]" for detail in (roll_call.remark, cause) if detail)
    kind = CommunicationTimeout if timeout is not None else CommunicationError
    size = len(global_ranks)
    among = f"{size}" if list(global_ranks) == list(range(size)) else f"the group of {name_ranks(global_ranks)}"
    message = f"{call} {what} on rank {global_ranks[rank]} of {among}: {reason}{details}"
    return kind(message, ranks=blamed, collective=call.signature)


def differing_purposes(purposes: Mapping[int, str]) -> CommunicationError:
    """Build the error of ranks, by their global numbers, that are about to do different things."""
    first, purpose = next(iter(purposes.items()))
    others = [rank for rank, one in purposes.items() if one != purpose]
    return CommunicationError(
        f"ranks are not at the same call: rank {first} is about to {purpose}, rank {others[0]} to "
        f"{purposes[others[0]]}. Every rank must make the same calls in the same order",
        ranks=tuple(others),
        collective="all_gather_bytes",
    )


_LONGEST_PLACE = 200


def first_fault(error: ValidationError, whole: str = "", parts: Collection[str] | None = None) -> str | None:
    """The first thing that is wrong, and where in `whole` it is; among these `parts` of it, None if nothing is."""
    for detail in error.errors(include_input=False, include_url=False, include_context=False):
        if parts is None or (detail["loc"] and detail["loc"][0] in parts):
            # Keys come from the file too, and may hold anything.
            names = [part if isinstance(part, str) and part.isprintable() else repr(part) for part in detail["loc"]]
            return f"{'.'.join(part for part in (whole, *names) if part)[:_LONGEST_PLACE]}: {detail['msg']}"
    return None
