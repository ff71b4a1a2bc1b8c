"""FSDP2's collectives, which no Communicator carries: what they send is counted, so that stage 3 can be compared with
the other stages, and gradients are divided before they are summed where that is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinwire.comm.traffic import Traffic, sent_bytes

__all__ = ["count_traffic"]

# torch 2.13 renamed both and warns at the old names.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def count_traffic(model: nn.Module, divide_first: float = 1.0) -> Traffic:
    """The bytes that this rank will send for `model`, whose parts `fully_shard` has been applied to.

    Gradients are averaged; with a `divide_first` other than 1 they are divided by it before they leave, and their sum
    is multiplied by as much over the number of ranks.
    """
    from torch.distributed.fsdp import FSDPModule  # half a second that only stage 3 should cost

    traffic = Traffic()
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_custom_all_gather(_AllGather(traffic))  # type: ignore[arg-type]
            module.set_custom_reduce_scatter(_ReduceScatter(traffic, divide_first))  # type: ignore[arg-type]
            if divide_first != 1.0:
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
    return traffic


class _Collective:
    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)


class _AllGather(_Collective):
    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        self._traffic.add("all_gather", sent_bytes("all_gather", input_tensor.nbytes, group.size()))
        return _all_gather(output_tensor, input_tensor, group=group, async_op=async_op)


class _ReduceScatter(_Collective):
    def __init__(self, traffic: Traffic, divide_first: float) -> None:
        super().__init__(traffic)
        self._divide_first = divide_first

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> Any:
        # As an all-to-all: every rank sends the others their parts.
        self._traffic.add("reduce_scatter", sent_bytes("all_to_all", input_tensor.nbytes, group.size()))
        if self._divide_first == 1.0:
            return _reduce_scatter(output_tensor, input_tensor, group=group, op=op, async_op=async_op)
        assert not async_op, "FSDP2 waits for its streams, not for this work"
        input_tensor.div_(self._divide_first)
        work = _reduce_scatter(output_tensor, input_tensor, group=group, op=op)
        output_tensor.mul_(self._divide_first / group.size())
        return work
