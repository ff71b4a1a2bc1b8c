"""Adam's frozen preconditioner 1 / (√v + ε) in 8 bits an element, so that every worker can hold all of it although
the variance is sharded."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["LEVELS", "quantize", "table"]

LEVELS = 256
"""Code 0 stands for 0, a coordinate that does not move; codes 1 to 255 are evenly spaced logarithms."""


def table(low: Tensor, high: Tensor) -> Tensor:
    """The values of all codes for each row's range: fp32 [rows, 256] from `low` and `high`, [rows], both above 0.

    The relative step is (high/low)^(1/254): 3.7% for a range of ten thousand, so that a value is off by 1.9% at most.
    """
    low, high = low.double(), high.double()
    fraction = torch.arange(LEVELS - 1, dtype=torch.float64, device=low.device) / (LEVELS - 2)
    logarithms = low.log()[:, None] + fraction * (high / low).log()[:, None]
    return torch.cat([torch.zeros_like(low)[:, None], logarithms.exp()], dim=1).float()


def quantize(values: Tensor, low: float, high: float) -> Tensor:
    """The codes, uint8, of `values`, fp32, which are 0 or lie from `low` to `high`; the nearest logarithm."""
    scale = (LEVELS - 2) / max(torch.tensor(high / low, dtype=torch.float64).log().item(), 1e-12)
    steps = (values / low).clamp_(min=1e-30).log_().mul_(scale).round_().clamp_(0, LEVELS - 2)
    return torch.where(values > 0, steps + 1, 0.0).to(torch.uint8)
