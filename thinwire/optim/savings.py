"""What a user hears of the bytes that an optimizer sends: a line when it is built, at the freeze, and at the end."""

from __future__ import annotations

import sys
import weakref

import torch

from thinwire.comm import Communicator

__all__ = ["SavingsReport"]

_STEPS_OF_A_MEAN = 16
"""Frozen steps over which the bytes of one are averaged: those with local steps send nothing in most."""

_NOTHING_SAVED = 0.9
"""Of the bytes uncompressed."""


class SavingsReport:
    """Rank 0's, on stderr, where `comm.init()` has said there what it found: silent after `init(quiet=True)`.

    Args:
        optimizer: whose end, or the process's, is the end of the run.
        comm: its ranks.
        freezes: what says when it freezes, as in `freeze_step=1000`; empty where it compresses from the first step on.
        uncompressed: bytes that a ring all-reduce of its gradients sends in a step.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, comm: Communicator, *, freezes: str, uncompressed: int
    ) -> None:
        self._name = type(optimizer).__name__
        self._freezes = freezes
        self._uncompressed_step = uncompressed
        self._steps = self._sent = self._uncompressed = 0
        self._frozen_at: int | None = None
        self._first_frozen: tuple[int, int] | None = None
        self._speaks = comm.speaks and comm.size > 1
        when = f"it freezes by {freezes}" if freezes else "it compresses from the first step on"
        self._say(f"{self._name} on {comm.size} ranks: {_amount(uncompressed)} a step uncompressed; {when}")
        self.end = weakref.finalize(optimizer, self._end)
        """Say what the run has saved; only once, at the latest when the process ends."""

    def note(self, steps: int, frozen_at: int | None, sent: int, uncompressed: int) -> None:
        """Hear of a step: the counts of all steps so far."""
        self._steps, self._frozen_at, self._sent, self._uncompressed = steps, frozen_at, sent, uncompressed
        if frozen_at is None or not self._freezes:
            return
        if self._first_frozen is None and steps > frozen_at:
            self._first_frozen = (steps, sent)
        elif self._first_frozen is not None and steps == self._first_frozen[0] + _STEPS_OF_A_MEAN:
            mean = (sent - self._first_frozen[1]) / _STEPS_OF_A_MEAN
            self._say(
                f"{self._name} froze after step {frozen_at}: {_amount(mean)} a step from now on instead of "
                f"{_amount(self._uncompressed_step)}"
            )

    def _end(self) -> None:
        if not self._steps:
            return
        if self._freezes and self._frozen_at is None and self._sent > _NOTHING_SAVED * self._uncompressed:
            self._say(
                f"{self._name} never froze in {self._steps:,} steps, so that it saved nothing to speak of: "
                f"{self._freezes} should come after about a fifth of the steps"
            )
            return
        self._say(
            f"{self._name} sent {_amount(self._sent)} in {self._steps:,} steps, "
            f"{_amount(max(0, self._uncompressed - self._sent))} less than gradients that nobody compresses"
        )

    def _say(self, line: str) -> None:
        if self._speaks:
            print(f"thinwire: {line}", file=sys.stderr, flush=True)


def _amount(count: float) -> str:
    """Bytes in the unit that fits: `64 kB`, `0.13 MB`, `41 GB`."""
    size, unit = (1e9, "GB") if count >= 1e9 else (1e6, "MB") if count >= 1e5 else (1e3, "kB")
    value = count / size
    return f"{value:.2f} {unit}" if value < 10 else f"{value:.0f} {unit}"
