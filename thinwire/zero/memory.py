"""How many bytes a rank holds of a model's state, measured, beside what `state_formula` says."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from thinwire.zero.live_tensors import CATEGORIES

__all__ = ["MemoryReport"]


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
