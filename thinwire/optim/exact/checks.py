"""What hyperparameters can be."""

from __future__ import annotations

__all__ = ["check_betas", "check_not_negative"]


def check_not_negative(**values: float) -> None:
    """Raise ValueError for a value below 0, or NaN."""
    for name, value in values.items():
        if not value >= 0:
            raise ValueError(f"{name} must be at least 0, got {value}")


def check_betas(betas: tuple[float, float]) -> None:
    """Raise ValueError unless both are from 0 up to, and without, 1."""
    if len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
        raise ValueError(f"betas must be two numbers from 0 to below 1, got {betas}")
