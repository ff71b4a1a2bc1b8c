"""What cannot be planned, and the checks that every input shares, so that all refusals read alike."""

from __future__ import annotations

import math

__all__ = ["PlanError", "require_positive", "require_whole"]


class PlanError(ValueError):
    """A model, cluster, method or file that no plan can be made for: what was given, what was expected."""


def require_whole(name: str, value: object) -> None:
    """Raise PlanError unless `value` is a whole number, at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise PlanError(f"{name} must be a whole number, at least 1, got {value!r}")


def require_positive(name: str, value: float) -> None:
    """Raise PlanError unless `value` is a finite number above 0."""
    if not 0 < value < math.inf:
        raise PlanError(f"{name} must be a number above 0, got {value!r}")
