"""Fits seconds to bytes so that one disturbed measurement among many does not move the line."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from math import log, sqrt
from statistics import median

__all__ = ["fit_line"]


def fit_line(amounts: Sequence[float], seconds: Sequence[float]) -> tuple[float, float, float]:
    """Intercept ≥ 0, slope > 0 and error of the line seconds = intercept + slope · amount.

    Among the lines through two of the points, or through one and the origin, takes the one with the least sum of
    amount^¼ · |log(line / seconds)|: relative, as amounts span orders of magnitude; large ones count more, as they are
    what training sends, and small ones may pass a shaper's burst unhindered. The error is the median of
    |line / seconds - 1|.

    Raises ValueError for fewer than two different amounts, or amounts and seconds that are not positive.
    """
    points = list(zip(amounts, seconds, strict=True))
    if len(set(amounts)) < 2 or any(amount <= 0 or second <= 0 for amount, second in points):
        raise ValueError(f"a line needs two different amounts or more, all above 0, got {points}")
    lines = [(0.0, second / amount) for amount, second in points]
    for (x1, y1), (x2, y2) in combinations(points, 2):
        if x1 != x2:
            slope = (y2 - y1) / (x2 - x1)
            intercept = y1 - slope * x1
            if slope > 0 and intercept >= 0:
                lines.append((intercept, slope))

    def badness(line: tuple[float, float]) -> float:
        return sum(sqrt(sqrt(amount)) * abs(log((line[0] + line[1] * amount) / second)) for amount, second in points)

    intercept, slope = min(lines, key=badness)
    error = median(abs((intercept + slope * amount) / second - 1) for amount, second in points)
    return intercept, slope, error
