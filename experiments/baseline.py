"""The baseline: torch's AdamW on exactly averaged gradients, as any data-parallel training does it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from thinwire.comm import Communicator

__all__ = ["AveragedAdamW"]


class AveragedAdamW(torch.optim.AdamW):
    """AdamW that averages the gradients over all ranks in one fp32 all-reduce before each step.

    Like DDP, it begins by giving every rank the weights of rank 0.
    """

    def __init__(self, params: Iterable[Any], comm: Communicator, **options: Any) -> None:
        """Takes what `torch.optim.AdamW` takes, and the communicator to average over."""
        super().__init__(params, **options)
        # Its own message space, so that its counters hold the gradients' bytes and nothing else.
        self.comm = comm.duplicate()
        self.register_step_pre_hook(self._average)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.comm.broadcast(parameter.data)

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent for gradients."""
        return self.comm.traffic.bytes_sent

    def _average(self, *_: object) -> None:
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        flat = torch.cat([parameter.grad.reshape(-1) for parameter in parameters])
        self.comm.all_reduce(flat, "mean")
        pieces = torch.split(flat, [parameter.numel() for parameter in parameters])
        for parameter, piece in zip(parameters, pieces, strict=True):
            parameter.grad.copy_(piece.view_as(parameter))
