"""The losses of one step: where backward starts from, what is logged, and whose loss was not finite, at no cost to
steps in which nothing goes wrong."""

from __future__ import annotations

import math
import warnings
import weakref

import torch
from torch import Tensor

from thinwire.comm import Communicator
from thinwire.comm.errors import name_ranks
from thinwire.engine.errors import NonFiniteError

__all__ = ["StepLosses"]

_LOOKS_EVERY = 10  # steps on a GPU, where to look is to wait


class StepLosses:
    """The losses that this rank has called backward on since the last step. Nothing here waits for the device."""

    def __init__(self) -> None:
        self._last: weakref.ref[Tensor] | None = None
        self._unseen: Tensor | None = None
        self._unseen_steps = 0
        self._warned = False
        self.clear()

    def clear(self) -> None:
        """Start another step."""
        self._sum: Tensor | None = None
        self._count = 0
        self._summed = False

    @property
    def empty(self) -> bool:
        """Whether no backward was called since the last step."""
        return self._sum is None

    @property
    def count(self) -> int:
        """Backwards since the last step."""
        return self._count

    def check(self, loss: Tensor) -> None:
        """Raise TypeError or ValueError for what backward cannot start from."""
        if not isinstance(loss, Tensor):
            raise TypeError(f"backward() takes the loss that the model returned, a tensor, got {type(loss).__name__}")
        if loss.numel() != 1 or not loss.is_floating_point():
            raise ValueError(
                f"backward() takes a loss of one floating-point value, got {loss.dtype} of shape {tuple(loss.shape)}: "
                "reduce it with .mean()"
            )
        if not loss.requires_grad:
            raise ValueError(
                "the loss has no graph: it was computed under torch.no_grad(), detached, or depends on no parameter "
                "that requires a gradient"
            )
        if self._last is not None and self._last() is loss:
            raise RuntimeError("backward() was called with this loss before: run the model again for a new one")

    def start(self, loss: Tensor, scale: float, parts: int | None, again: bool = False) -> Tensor:
        """Note a loss, and give the gradient that its backward starts from: `scale` / `parts`.

        `parts`: losses whose mean is the step's; None where that is their sum. `again`: its graph is kept, so that it
        may come again.

        NaN for a loss that is not finite, whose gradients might be: with them every rank's average is not finite
        either, so that all of them skip the step without having to ask each other. A loss in fp16 is infinite above
        65504 already, with gradients that are good: there only they decide.
        """
        self._last = None if again else weakref.ref(loss)
        detached = loss.detach()
        value = detached.reshape(()).float()
        self._sum = value if self._sum is None else self._sum + value
        self._count += 1
        self._summed = parts is None
        start = torch.full_like(detached, scale / (parts or 1))
        good = detached.isnan().logical_not_() if detached.dtype == torch.float16 else detached.isfinite()
        return torch.where(good, start, torch.full_like(detached, math.nan))

    def note_applied(self) -> None:
        """Note that the step of these losses was taken in fp16, and warn the first time that one of them was infinite:
        at once on a CPU, where every tenth step is looked at together with those before it on a GPU."""
        if self._warned or self._sum is None:
            return
        self._unseen = self._sum if self._unseen is None else self._unseen + self._sum
        self._unseen_steps += 1
        if self._unseen.device.type == "cpu" or self._unseen_steps == _LOOKS_EVERY:
            self.look_at_applied()

    def look_at_applied(self) -> None:
        """Look at the losses that were noted and not looked at yet."""
        if self._unseen is None:
            return
        loss, steps = float(self._unseen), self._unseen_steps
        self._unseen, self._unseen_steps = None, 0
        if not math.isfinite(loss):
            self._warned = True
            of_steps = "of this step" if steps == 1 else f"of one of the last {steps} steps"
            warnings.warn(
                f"the loss {of_steps} is {loss} in fp16, which ends at 65504, and its gradients are finite: such steps "
                "are taken, and what is logged as the loss means nothing. Return the loss in fp32, its mean instead of "
                "its sum, or train in bf16. This is said once",
                RuntimeWarning,
                stacklevel=5,  # of a step()
            )

    def mean(self, comm: Communicator) -> float | None:
        """The mean over micro-batches and ranks; None where nobody told of a loss. Collective."""
        if self._sum is None:
            return None
        mean = (self._sum if self._summed else self._sum / self._count).reshape(1)
        comm.all_reduce(mean, op="mean")
        return float(mean)

    def not_finite(self, comm: Communicator, step: int) -> NonFiniteError:
        """The error of a step that was not finite, which names the ranks whose loss was not. Collective."""
        unknown = self._sum is None
        mine = b"\1" if self._sum is None or bool(self._sum.isfinite()) else b"\0"
        ranks = [
            rank for rank, finite in enumerate(comm.all_gather_bytes(mine, "find infinite losses")) if finite == b"\0"
        ]
        if ranks:
            where = f"the loss was not finite on {name_ranks(ranks)}"
        elif unknown:
            where = "the averaged gradient is not finite"
        else:
            where = "every rank's loss was finite, but the averaged gradient is not"
        return NonFiniteError(
            f"step {step}: {where}. No weight has moved. Look at the data of this step and at the learning rate; "
            "training can go on with the next batch, or from a checkpoint"
        )
