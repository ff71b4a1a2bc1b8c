"""What the ranks find out together about gradients: the order in which they arrive, which parameters had none anywhere,
and on which ranks they overflowed."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from thinwire.comm import Communicator
from thinwire.zero.gradient_seal import gradient_of

__all__ = ["agree_on_absent", "agree_on_order", "find_overflowing"]


def agree_on_order(
    comm: Communicator, trainable: Sequence[int], arrived: Sequence[int], describe: Callable[[int], str]
) -> list[int]:
    """Rank 0's order of arrival of `trainable` parameters; those that had no gradient come last, last ones first.

    Collective. Raises ValueError, on every rank, where ranks disagree on which those are.
    """
    wanted, here = set(trainable), set(arrived)
    order = [index for index in arrived if index in wanted]
    order += [index for index in reversed(trainable) if index not in here]
    raw = comm.all_gather_bytes(torch.tensor(order, dtype=torch.int64).numpy().tobytes(), "order the parameters")
    orders = [torch.frombuffer(bytearray(one), dtype=torch.int64).tolist() if one else [] for one in raw]
    for rank, other in enumerate(orders):
        differing = sorted(set(other) ^ set(orders[0]))
        if differing:
            raise ValueError(
                f"rank {rank} and rank 0 disagree on whether {describe(differing[0])} requires a gradient: set "
                "requires_grad alike on every rank"
            )
    return orders[0]


def agree_on_absent(
    comm: Communicator, count: int, arrived: Collection[int], describe: Callable[[int], str]
) -> frozenset[int]:
    """Those of `count` parameters without a gradient on any rank. Collective.

    Raises ValueError, on every rank, for one with a gradient on some ranks only.
    """
    of_rank = comm.all_gather_bytes(
        bytes(index in arrived for index in range(count)), "find parameters without gradients"
    )
    for index in range(count):
        having = [rank for rank, mask in enumerate(of_rank) if mask[index]]
        if having and len(having) < comm.size:
            lacking = sorted(set(range(comm.size)) - set(having))
            raise ValueError(
                f"{describe(index)} got a gradient on ranks {having} but none on ranks {lacking}: every rank must use "
                "the same parameters in a step. Nothing was applied"
            )
    return frozenset(index for index in range(count) if not of_rank[0][index])


def find_overflowing(comm: Communicator, parameters: Sequence[Tensor]) -> tuple[int, ...]:
    """The ranks on which a gradient is not finite. Collective."""
    mine = any(one is not None and not bool(torch.isfinite(one).all()) for one in map(gradient_of, parameters))
    of_rank = comm.all_gather_bytes(bytes([mine]), "find overflows")
    return tuple(rank for rank, answer in enumerate(of_rank) if answer[0])
