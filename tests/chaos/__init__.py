"""Chaos: thousands of seeded faults, each of which must end in the right result or in an error that says what to do.

A harness is one module with `run(count, seed) -> Outcome`, named in `HARNESSES` with how much `make chaos` does of it,
and how much the tests.
"""

from __future__ import annotations

from typing import NamedTuple


class Counts(NamedTuple):
    """How many trials the whole is, and how many a slice; 0 for what has a test of its own. Kills and drift are for
    each form of training, drift counts iterations, and many_parameters parameters."""

    whole: int
    slice: int


HARNESSES = {
    "damage": Counts(1000, 20),
    "manifests": Counts(400, 20),
    "folders": Counts(600, 20),
    "packets": Counts(12_000, 300),
    "configs": Counts(2000, 200),
    "mismatches": Counts(750, 12),
    "gradients": Counts(400, 14),
    "drift": Counts(5000, 25),
    "kills": Counts(40, 0),
    "launched": Counts(40, 0),
    "elastic": Counts(50, 0),
    "many_parameters": Counts(10_000, 40),
}
