"""torch.allclose of sharded parameters, which DTensor has no rule for: as torch.equal, which it has one for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from thinwire.zero.shard_marks import is_sharded

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = ["compare_shards"]


def compare_shards() -> None:
    """Have torch.allclose take two DTensors that are sharded alike, from now on in this process. It is collective then.

    A torch that has a rule of its own, or nowhere to put one, is left as it is.
    """
    from torch.distributed.tensor import DTensor  # half a second that only stage 3 should cost

    handlers = getattr(getattr(DTensor, "_op_dispatcher", None), "_custom_op_handlers", None)
    if isinstance(handlers, dict):
        handlers.setdefault(torch.ops.aten.allclose.default, _allclose)


def _allclose(_operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether every rank's shards are. `args` and `kwargs` are torch.allclose's.

    Raises ValueError where not both are sharded alike.
    """
    first, second, *tolerances = args
    if not (is_sharded(first) and is_sharded(second)) or _cut(first) != _cut(second):
        raise ValueError(
            "torch.allclose compares parameters that the same ranks share alike, and one of these is whole or cut "
            "otherwise: gather both first, with full_tensor() or zero.GatheredParameters"
        )
    mine, theirs = first.to_local(), second.to_local()
    close = torch.tensor(int(torch.allclose(mine, theirs, *tolerances, **kwargs)), device=mine.device)
    for group in first.device_mesh.get_all_groups():
        dist.all_reduce(close, dist.ReduceOp.MIN, group)
    return bool(close)


def _cut(parameter: DTensor) -> tuple[Any, ...]:
    """Which ranks share it, and how."""
    return parameter.shape, parameter.device_mesh, parameter.placements
