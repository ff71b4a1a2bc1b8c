"""The baselines: exact optimizers on exactly averaged gradients, as any data-parallel training has them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from experiments.training.lamb import Lamb
from thinwire.comm import Communicator
from thinwire.optim import Lion, Muon

__all__ = ["Averaged", "AveragedAdamW", "AveragedLamb", "AveragedLion", "AveragedMuon"]


class Averaged(torch.optim.Optimizer):
    """Averages the gradients over all ranks in one fp32 all-reduce before each step.

    Like DDP, it begins by giving every rank the weights of rank 0.
    """

    comm: Communicator

    def average_over(self, comm: Communicator) -> None:
        """Begins; once, after construction."""
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
        means = torch.split(flat, [parameter.numel() for parameter in parameters])
        for parameter, mean in zip(parameters, means, strict=True):
            parameter.grad.copy_(mean.view_as(parameter))


class AveragedAdamW(torch.optim.AdamW, Averaged):
    """torch's AdamW on averaged gradients."""

    def __init__(self, params: Iterable[Any], comm: Communicator, **options: Any) -> None:
        """Takes what `torch.optim.AdamW` takes, and the communicator to average over."""
        super().__init__(params, **options)
        self.average_over(comm)


class AveragedLamb(Lamb, Averaged):
    """LAMB on averaged gradients."""

    def __init__(self, params: Iterable[Any], comm: Communicator, **options: Any) -> None:
        """Takes what `Lamb` takes, and the communicator to average over."""
        super().__init__(params, **options)
        self.average_over(comm)


class AveragedLion(Lion, Averaged):
    """Lion on averaged gradients."""

    def __init__(self, params: Iterable[Any], comm: Communicator, **options: Any) -> None:
        """Takes what `Lion` takes, and the communicator to average over."""
        super().__init__(params, **options)
        self.average_over(comm)


class AveragedMuon(Muon, Averaged):
    """Muon on averaged gradients, at rates that suit AdamW."""

    def __init__(self, params: Iterable[Any], comm: Communicator, **options: Any) -> None:
        """Takes what `thinwire.optim.Muon` takes, and the communicator to average over."""
        super().__init__(params, **{"adjust_lr_fn": "match_rms_adamw"} | options)
        self.average_over(comm)
