"""How many bytes a rank holds of a model's state, measured beside what the formulas of ZeRO say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from thinwire.zero.live_tensors import CATEGORIES

__all__ = ["MemoryReport", "model_state_formula"]

_SIZES = {torch.float32: 4, torch.bfloat16: 2, torch.float16: 2}


def model_state_formula(
    stage: int,
    parameters: int,
    world_size: int,
    *,
    dtype: torch.dtype = torch.bfloat16,
    state_bytes: float = 8,
) -> dict[str, float]:
    """Bytes a rank should hold, by category; their sum is the published figure.

    With Ψ parameters on N ranks, bf16 or fp16 with fp32 masters and Adam (Rajbhandari et al. 2020, arXiv 1910.02054,
    §5): stage 0 16Ψ, 1 4Ψ + 12Ψ/N, 2 2Ψ + 14Ψ/N, 3 16Ψ/N. fp32 parameters, their own
    master weights, have 4 + 4 + 8.

    Args:
        stage: 0 to 3.
        parameters: Ψ, trained ones.
        world_size: N.
        dtype: of the parameters as the model sees them.
        state_bytes: of the optimizer a parameter: Adam 8, SGD with momentum 4, without 0.

    Raises ValueError for a stage, dtype or combination that there is no formula for.
    """
    if stage not in (0, 1, 2, 3) or dtype not in _SIZES:
        raise ValueError(
            f"there is no formula for stage {stage} with {dtype}: stages are 0 to 3, in fp32, bf16 or fp16"
        )
    size = _SIZES[dtype]
    masters = 0 if size == 4 else 4
    shared = 1 / world_size
    each = {
        "weights": size * (shared if stage == 3 else 1),
        "masters": masters * (shared if stage >= 1 else 1),
        "gradients": size * (shared if stage >= 2 else 1),
        "optimizer state": state_bytes * (shared if stage >= 1 else 1),
    }
    return {category: parameters * factor for category, factor in each.items()}


@dataclass(frozen=True)
class MemoryReport:
    """Bytes that a rank holds, `held` as `live_tensor_bytes` counts them, beside `formula`, by category."""

    held: Mapping[tuple[str, str], int]
    formula: Mapping[str, float]

    @property
    def measured(self) -> int:
        """Bytes of everything the formula speaks of: all but buffers and what is in no category."""
        return sum(nbytes for (category, _), nbytes in self.held.items() if category not in ("buffers", "other"))

    @property
    def expected(self) -> float:
        """What the formula says `measured` should be."""
        return sum(self.formula.values())

    def table(self) -> str:
        """Rows of categories, columns of devices and the formula, in MB of 10⁶ bytes, and how far apart they are."""
        devices = sorted({device for _, device in self.held})
        lines = [_row("MB", [*devices, "formula"])]
        for category in CATEGORIES:
            held = [self.held.get((category, device), 0) for device in devices]
            if any(held) or self.formula.get(category):
                formula = self.formula.get(category)
                lines.append(_row(category, [*map(_megabytes, held), "" if formula is None else _megabytes(formula)]))
        by_device = [sum(nbytes for (_, where), nbytes in self.held.items() if where == device) for device in devices]
        lines.append(_row("total", [*map(_megabytes, by_device), _megabytes(self.expected)]))
        if self.expected:
            apart = 100 * (self.measured / self.expected - 1)
            lines.append(f"model state {_megabytes(self.measured)} MB, {apart:+.1f}% of the formula")
        return "\n".join(lines)


def _row(name: str, cells: list[str]) -> str:
    return f"{name:<16}" + "".join(f"{cell:>14}" for cell in cells)


def _megabytes(nbytes: float) -> str:
    return f"{nbytes / 1e6:.3f}"
