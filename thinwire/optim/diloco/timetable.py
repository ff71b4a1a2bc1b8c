"""When which fragment leaves and comes back: arithmetic on step numbers, the same on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Timetable"]


@dataclass(frozen=True)
class Timetable:
    """Each fragment leaves once in `every` steps and comes back `overlap` steps later (Streaming DiLoCo, arXiv
    2501.18512, Algorithm 2). Fragments are spread evenly over the steps between; the last one leaves at multiples of
    `every`, and so does a single one.
    """

    every: int
    overlap: int
    fragments: int

    def leaving(self, step: int) -> Sequence[int]:
        """The fragments that leave after this step; steps count from 1."""
        return [one for one in range(self.fragments) if (step - self._offset(one)) % self.every == 0]

    def count(self, step: int) -> int:
        """How many times a fragment has left by the end of this step. Number n, from 0 up, is fragment n modulo
        `fragments`."""
        return sum(max(0, step - self._offset(one) + self.every) // self.every for one in range(self.fragments))

    def arrival(self, left_at: int) -> int:
        """The step after which a fragment that left after step `left_at` is taken in."""
        return left_at + self.overlap

    def _offset(self, fragment: int) -> int:
        # Rounded up, so that no fragment leaves before the first step.
        return -(-(fragment + 1) * self.every // self.fragments)
