"""The search for a method's best learning rate: a grid, and beyond its ends where the best lies there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import inf, isfinite

from experiments.common.errors import InputError

__all__ = ["best_rate", "methods_beside", "sweep"]

_MOST_BEYOND = 4
"""Rates to try beyond the grid, on both sides together."""


def sweep(train: Callable[[float], float], rates: Sequence[float]) -> dict[float, float]:
    """Final losses by learning rate, ascending.

    As long as the best rate is the lowest or the highest, the next one on that side is tried, at the grid's own
    distance: a best rate at an end may not be the best.

    Args:
        train: gives the final loss at a rate; it need not be finite.
        rates: at least two, ascending.
    """
    losses = {rate: train(rate) for rate in rates}
    factor = rates[1] / rates[0]
    for _ in range(_MOST_BEYOND):
        lowest, highest, best = min(losses), max(losses), best_rate(losses)
        if best not in (lowest, highest):
            break
        beyond = lowest / factor if best == lowest else highest * factor
        # Rates are names in the results: without digits that only rounding makes.
        beyond = float(f"{beyond:.6g}")
        losses[beyond] = train(beyond)
    return dict(sorted(losses.items()))


def methods_beside(baseline: str, chosen: Sequence[str]) -> list[str]:
    """The methods that `--methods` named, each once. Raises `InputError` for too few to compare with `baseline`."""
    methods = list(dict.fromkeys(chosen))
    if baseline not in methods or len(methods) < 2:
        raise InputError(f"--methods must name {baseline}, and something to compare with it")
    return methods


def best_rate(losses: Mapping[float, float]) -> float:
    """The rate with the lowest loss; what is not finite comes last."""
    return min(losses, key=lambda rate: losses[rate] if isfinite(losses[rate]) else inf)
