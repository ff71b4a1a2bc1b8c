"""Fewer cases than a full product has, for parameters that hardly depend on each other."""

import itertools
from collections.abc import Sequence
from typing import Any

__all__ = ["each_once", "pairwise"]


def pairwise(*choices: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Cases in which any two values of two parameters meet at least once, the same in every run."""
    numbered = [range(len(values)) for values in choices]
    left = {
        (one, first, other, second)
        for one, other in itertools.combinations(range(len(choices)), 2)
        for first in numbered[one]
        for second in numbered[other]
    }
    cases = []
    while left:
        case = max(itertools.product(*numbered), key=lambda case: len(left & _pairs(case)))
        left -= _pairs(case)
        cases.append(tuple(values[number] for values, number in zip(choices, case, strict=True)))
    return cases


def _pairs(case: Sequence[int]) -> set[tuple[int, int, int, int]]:
    return {(one, case[one], other, case[other]) for one, other in itertools.combinations(range(len(case)), 2)}


def each_once(*choices: Sequence[Any]) -> list[tuple[Any, ...]]:
    """As many cases as the longest of the parameters has values, so that each value occurs."""
    count = max(map(len, choices))
    return [tuple(values[number % len(values)] for values in choices) for number in range(count)]
