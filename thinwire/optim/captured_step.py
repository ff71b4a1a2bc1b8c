"""Training steps that are captured as CUDA graphs once the optimizer is frozen, and replayed from then on."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Generic, TypeVar

import torch
from torch import Tensor

from thinwire.optim.optimizer import CompressedOptimizer
from thinwire.optim.replicated.capture import CudaGraphs
from thinwire.optim.replicated.home import ReplicatedHome

Result = TypeVar("Result")

_GRAPHS: dict[str, Callable[[torch.device], CudaGraphs]] = {"cuda": CudaGraphs}
_WARM_UP = 3
"""Frozen steps before the first is captured, in which kernels are compiled and communicators connect."""


class CapturedStep(Generic[Result]):
    """Steps of a `OneBitAdam` at stage 0 on CUDA devices, each a replay of CUDA graphs as soon as that is possible.

        step = CapturedStep(optimizer, forward_and_backward)
        for inputs, targets in batches:
            loss = step(inputs, targets)

    `work(*inputs)`: forward and backward of one batch, given tensors; it must be fit to be captured (see
    `torch.cuda.graph`): static shapes, nothing that waits for the GPU, no `step()` and no `.item()`. Gradients leave in
    the graph too, while backward goes on. What it returns is returned; of a replay that is memory which the next one
    writes.

    The warmup runs eagerly, and so do the first frozen steps, batches of other shapes, and whatever a step cannot be
    replayed for; the weights are the same bits either way, and ranks need not do alike. The host waits once a step,
    for the headers of all buckets. Learning rates and other hyperparameters may change from step to step. Where weights
    or state come to lie elsewhere, as after `load_state_dict`, steps are captured anew.

    `replays`: steps that were replayed.

    Raises TypeError for an optimizer that this cannot serve, and ValueError for a communicator whose collectives no
    graph can hold: over NCCL, or on one rank alone, all can.
    """

    def __init__(self, optimizer: CompressedOptimizer, work: Callable[..., Result]) -> None:
        self.replays = 0
        self._optimizer = optimizer
        self._work = work
        home = getattr(optimizer, "_home", None)
        if not isinstance(home, ReplicatedHome):
            raise TypeError(
                f"CapturedStep takes a OneBitAdam at stage 0, got {_described(optimizer)}: what other optimizers and "
                "stages do in a step is not the same launches every time"
            )
        self._home = home
        self._device = home.parameters[0].device
        if self._device.type not in _GRAPHS:
            raise TypeError(f"CapturedStep needs parameters on a CUDA device, they are on {self._device}")
        self._graphs = _GRAPHS[self._device.type](self._device)
        self._capture = home.capture(self._graphs)
        self._inputs: list[Tensor] = []
        self._warm = 0

    def __call__(self, *inputs: Tensor) -> Result:
        """Forward, backward and the optimizer's step of one batch; raises what they raise."""
        if not self._inputs:
            self._inputs = [one.detach().to(self._device, copy=True) for one in inputs]
        replays = self._warm >= _WARM_UP and self._takes(inputs) and self._optimizer.in_training
        if not replays or not self._capture.possible:
            return self._eagerly(inputs)
        for held, given in zip(self._inputs, inputs, strict=True):
            if held is not given:
                held.copy_(given, non_blocking=True)
        result, replayed = self._capture.exchange(lambda: self._work(*self._inputs))
        self._home.mover = self._capture.move
        try:
            self._optimizer.step()
        finally:
            self._home.mover = operator.call
        self.replays += replayed
        return result  # type: ignore[no-any-return]

    def _eagerly(self, inputs: tuple[Tensor, ...]) -> Result:
        self._warm += self._capture.possible
        with self._graphs.aside():
            self._optimizer.zero_grad()
            result = self._work(*inputs)
            self._optimizer.step()
        return result

    def _takes(self, inputs: tuple[Tensor, ...]) -> bool:
        """Whether the graphs can be given these: inputs like the first ones."""
        alike = len(inputs) == len(self._inputs)
        return alike and all(
            one.shape == held.shape and one.dtype == held.dtype for one, held in zip(inputs, self._inputs, strict=True)
        )


def _described(optimizer: object) -> str:
    stage = getattr(optimizer, "stage", None)
    return type(optimizer).__name__ + ("" if stage is None else f" at stage {stage}")
