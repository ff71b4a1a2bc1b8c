"""What the ranks find out together about parameters: the order in which gradients arrive, which had none anywhere, and
on which ranks they overflowed."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from thinwire.comm import Communicator
from thinwire.optim.home_options import HomeOptions
from thinwire.optim.replicated.parameters import ParameterTable
from thinwire.zero import BucketLayout, bucket_numel, partition

__all__ = ["agree_on_absent", "agree_on_order", "cut_into_buckets", "find_overflowing"]

_FP32_BYTES = 4


def agree_on_order(
    comm: Communicator, table: ParameterTable, unplaced: Sequence[int], arrived: Sequence[int]
) -> list[int]:
    """Rank 0's order of arrival of the parameters that lie in no bucket yet and require a gradient. Collective.

    Raises ValueError, on every rank, where ranks disagree on which those are.
    """
    trainable = [index for index in unplaced if table.parameters[index].requires_grad]
    first = [index for index in arrived if index in set(trainable)]
    order = first + [index for index in reversed(trainable) if index not in set(first)]
    raw = comm.all_gather_bytes(torch.tensor(order, dtype=torch.int64).numpy().tobytes())
    orders = [torch.frombuffer(bytearray(one), dtype=torch.int64).tolist() if one else [] for one in raw]
    for rank, other in enumerate(orders):
        differing = sorted(set(other) ^ set(orders[0]))
        if differing:
            raise ValueError(
                f"rank {rank} and rank 0 disagree on whether {table.describe(differing[0])} requires a gradient: set "
                "requires_grad alike on every rank"
            )
    return orders[0]


def cut_into_buckets(
    parameters: Sequence[Tensor], order: Sequence[int], ranks: int, options: HomeOptions, *, whole: bool = False
) -> list[BucketLayout]:
    """Buckets of the parameters `order`, of `options.bucket_bytes`; one of all of them where they stay `whole`."""
    numels = [parameter.numel() for parameter in parameters]
    numel = sum(numels[parameter] for parameter in order)
    return partition(
        numels,
        order,
        world_size=ranks,
        block_size=options.block_size,
        bucket_numel=numel + 1 if whole else bucket_numel(options.bucket_bytes, numel, _FP32_BYTES),
    )


def agree_on_absent(comm: Communicator, table: ParameterTable, arrived: Collection[int]) -> frozenset[int]:
    """The parameters without a gradient on any rank; raises ValueError, on every rank, for one with it on some only.

    Collective.
    """
    of_rank = comm.all_gather_bytes(bytes(index in arrived for index in range(len(table))))
    for index in range(len(table)):
        having = [rank for rank, mask in enumerate(of_rank) if mask[index]]
        if having and len(having) < comm.size:
            lacking = sorted(set(range(comm.size)) - set(having))
            raise ValueError(
                f"{table.describe(index)} got a gradient on ranks {having} but none on ranks {lacking}: every rank must "
                "use the same parameters in a step. Nothing was applied"
            )
    return frozenset(index for index in range(len(table)) if not of_rank[0][index])


def find_overflowing(comm: Communicator, parameters: Sequence[Tensor]) -> tuple[int, ...]:
    """The ranks on which a gradient is not finite. Collective."""
    mine = any(one.grad is not None and not bool(torch.isfinite(one.grad).all()) for one in parameters)
    return tuple(rank for rank, answer in enumerate(comm.all_gather_bytes(bytes([mine]))) if answer[0])
