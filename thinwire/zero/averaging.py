"""How gradients that are averaged exactly add up over a step's backwards, and travel."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

__all__ = ["PLAIN_AVERAGING", "Averaging"]

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Averaging:
    """What is done to gradients between backward and the step, in steps that average them exactly.

    Args:
        wire_dtype: in which they travel, torch.float32, bfloat16 or float16; None is that in which they add up.
        divide_first: what every rank divides its own by before they leave; their sum is multiplied by as much over the
            number of ranks. With that number nothing is left to do after it.
        accumulate_dtype: in which the backwards of a step add up, torch.float32 or the parameters' own; None is the
            latter. Steps that compress are made of these sums too.
        op: "mean", or "sum" for a gradient that is the sum over the ranks, in every kind of step: as many times the
            mean as there are ranks. Norms and clipping are the sum's too.

    The sum over the ranks itself is always in fp32, at stages 0 to 2.
    """

    wire_dtype: torch.dtype | None = None
    divide_first: float = 1.0
    accumulate_dtype: torch.dtype | None = None
    op: Literal["mean", "sum"] = "mean"

    def check(self) -> None:
        """Raise ValueError or TypeError for what cannot work."""
        for name, dtype in (("wire_dtype", self.wire_dtype), ("accumulate_dtype", self.accumulate_dtype)):
            if dtype not in (None, *_FLOATS):
                raise TypeError(f"{name} must be torch.float32, torch.bfloat16, torch.float16 or None, got {dtype!r}")
        number = isinstance(self.divide_first, int | float) and math.isfinite(self.divide_first)
        if not number or not self.divide_first > 0:
            raise ValueError(f"divide_first must be a number above 0, got {self.divide_first!r}")
        if self.op not in ("mean", "sum"):
            raise ValueError(f"op must be 'mean' or 'sum', got {self.op!r}")

    def accumulated(self, dtype: torch.dtype) -> torch.dtype:
        """In what gradients of parameters of this dtype add up."""
        return dtype if self.accumulate_dtype is None else self.accumulate_dtype

    def times_mean(self, ranks: int) -> float:
        """How many times the mean over the ranks the wanted gradient is."""
        return float(ranks) if self.op == "sum" else 1.0

    def check_parameters(self, parameters: Iterable[Tensor], param_dtype: torch.dtype | None = None) -> None:
        """Raise ValueError where backwards could not add up as asked; fp32 parameters will be in `param_dtype`."""
        for parameter in parameters:
            dtype = param_dtype if param_dtype and parameter.dtype == torch.float32 else parameter.dtype
            if self.accumulated(dtype) not in (torch.float32, dtype):
                raise ValueError(
                    f"gradients of {dtype} parameters add up in torch.float32 or their own dtype, got accumulate_dtype "
                    f"{self.accumulate_dtype}: pass torch.float32, or None"
                )

    def prepare(self, parameters: Iterable[Tensor]) -> None:
        """Have autograd add up the gradients of these as asked; those that are there are kept."""
        for parameter in parameters:
            wanted = self.accumulated(parameter.dtype)
            one: Any = parameter  # `grad_dtype` has no stub
            if parameter.is_leaf and one.grad_dtype != wanted:
                gradient, parameter.grad = parameter.grad, None
                one.grad_dtype = wanted
                parameter.grad = None if gradient is None else gradient.to(wanted)

    def compared(self) -> dict[str, Any]:
        """What has to be the same on every rank, as JSON can hold it."""
        return {
            "wire_dtype": str(self.wire_dtype),
            "divide_first": self.divide_first,
            "accumulate_dtype": str(self.accumulate_dtype),
            "op": self.op,
        }


PLAIN_AVERAGING = Averaging()
"""Gradients add up and travel in the parameters' dtype, and are averaged after they are summed."""
