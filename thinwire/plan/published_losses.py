"""What others have published of a method's loss that was not measured here: DiLoCo's, by model size and workers."""

from __future__ import annotations

import math
from bisect import bisect_right

__all__ = ["SMALLEST", "SOURCE", "local_updates_in_words", "local_updates_loss"]

SOURCE = "arXiv 2503.09799"
SMALLEST = 35_000_000
"""Parameters of the smallest model there: below it nothing is known but that it gets worse."""

_SIZES = (35e6, 90e6, 180e6, 335e6, 550e6, 1.3e9, 2.4e9)
# Losses of data parallel training and of 1, 2, 4 and 8 workers, C4, every = 30 (table 4).
_DATA_PARALLEL = (3.485, 3.167, 2.950, 2.784, 2.653, 2.460, 2.326)
_LOSSES = {
    1: (3.482, 3.162, 2.943, 2.777, 2.645, 2.451, 2.317),
    2: (3.508, 3.182, 2.957, 2.788, 2.657, 2.464, 2.323),
    4: (3.554, 3.213, 2.981, 2.808, 2.673, 2.472, 2.332),
    8: (3.621, 3.265, 3.019, 2.841, 2.698, 2.493, 2.351),
}
_WORKERS = tuple(_LOSSES)


def local_updates_loss(parameters: int, workers: int) -> float:
    """The final loss of DiLoCo above that of data parallel training on as many tokens, relative.

    Between published sizes and numbers of workers linear in their logarithms; beyond them as at the nearest.
    """
    sizes = [math.log(size) for size in _SIZES]
    by_workers = [_between(sizes, _relative(one), math.log(parameters)) for one in _WORKERS]
    return _between([math.log(one) for one in _WORKERS], by_workers, math.log(workers))


def local_updates_in_words(parameters: int, workers: int) -> str:
    """The same for one line, with what it does not know."""
    text = (
        f"{local_updates_loss(parameters, workers):+.1%} beside data parallel, published, not measured here ({SOURCE}"
    )
    beyond = []
    if parameters < SMALLEST:
        beyond.append(f"for {SMALLEST / 1e6:.0f}M parameters; below that it is worse")
    if workers > _WORKERS[-1]:
        beyond.append(f"for {_WORKERS[-1]} workers; with more it is worse")
    return "; ".join([text, *beyond]) + ")" if beyond else f"{text})"


def _relative(workers: int) -> list[float]:
    return [loss / exact - 1 for loss, exact in zip(_LOSSES[workers], _DATA_PARALLEL, strict=True)]


def _between(places: list[float], values: list[float], place: float) -> float:
    """What a line through the two nearest has at `place`; the first or the last value outside."""
    if place <= places[0] or place >= places[-1]:
        return values[0] if place <= places[0] else values[-1]
    right = bisect_right(places, place)
    part = (place - places[right - 1]) / (places[right] - places[right - 1])
    return values[right - 1] + part * (values[right] - values[right - 1])
