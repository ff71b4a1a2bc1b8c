"""Parameters that will have no gradient on any rank, known before the backward, as those of dropped layers are: once
the ranks have agreed on them, nobody waits for them, and buckets of nothing else are not sent."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from thinwire.comm import Communicator
from thinwire.comm.agreement import raise_together
from thinwire.zero.gradient_seal import gradient_of

__all__ = ["NothingToSend", "agree_to_leave_out", "has_gradient"]


class NothingToSend:
    """The legs of a bucket that no rank sends."""

    def advance(self) -> None:
        """There was no leg 1."""

    def wait(self) -> None:
        """There was no leg 2."""


def agree_to_leave_out(
    comm: Communicator, parameters: Sequence[Tensor], chosen: Iterable[Tensor], error: Exception | None
) -> frozenset[int]:
    """The numbers, in `parameters`, of those `chosen`; others are left to whom they belong. Collective.

    Raises `error`, or ValueError where a chosen parameter has a gradient already, on every rank; and ValueError where
    ranks chose differently.
    """
    number_of = {id(parameter): number for number, parameter in enumerate(parameters)}
    numbers = sorted(number_of[id(one)] for one in {id(one): one for one in chosen}.values() if id(one) in number_of)
    for number in numbers:
        if error is None and has_gradient(parameters[number]):
            error = ValueError(
                f"parameter {number}, of shape {tuple(parameters[number].shape)}, is to be left out but has a gradient "
                "from an earlier backward(): leave out what no backward() of the step reaches"
            )
    mine = json.dumps({"failed": error is not None, "numbers": numbers}).encode()
    of_rank = comm.all_gather_bytes(mine, "leave parameters out")
    if any(json.loads(other)["failed"] for other in of_rank):
        raise_together(comm, error, "leave parameters out")
    for rank, other in enumerate(of_rank):
        if other != of_rank[0]:
            theirs = set(json.loads(other)["numbers"]) ^ set(json.loads(of_rank[0])["numbers"])
            raise ValueError(
                f"rank {rank} and rank 0 disagree on leaving out parameter {min(theirs)}: every rank must leave out "
                "the same. Layers are dropped alike where all ranks have the same seed, step and number of forwards"
            )
    return frozenset(numbers)


def has_gradient(parameter: Tensor) -> bool:
    """Whether there is one that is not all zeros, as DDP and `zero_grad(set_to_none=False)` leave behind."""
    gradient = gradient_of(parameter)
    return gradient is not None and bool(torch.count_nonzero(gradient))
