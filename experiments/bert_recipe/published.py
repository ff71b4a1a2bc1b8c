"""The published run: BERT-large in 44 minutes on 1024 V100 GPUs (DeepSpeed, May 2020: its tutorial of pretraining)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["PHASES", "PUBLISHED", "published_days"]


@dataclass(frozen=True)
class _Phase:
    """Training with sequences of one length.

    Attributes:
        length: tokens a sequence.
        batch, steps, rate: sequences a step, steps and the peak learning rate, in parts of the first phase's.
        micro_batch: sequences of a rank at once.
        samples: sequences of the published run.
        v100_rate: sequences a second of one V100, as published.
    """

    length: int
    batch: float
    steps: float
    rate: float
    micro_batch: int
    samples: float
    v100_rate: int


PHASES = (
    _Phase(128, batch=1.0, steps=1.0, rate=1.0, micro_batch=32, samples=403e6, v100_rate=272),
    # Half of 64 K sequences a step, 2e-3 beside 11e-3, and 20 million sequences.
    _Phase(512, batch=0.5, steps=0.1, rate=2 / 11, micro_batch=8, samples=20e6, v100_rate=52),
)

PUBLISHED = {16: 33 + 13 / 60, 64: 8 + 41 / 60, 256: 2.4, 1024: 44 / 60}
"""Hours by number of V100 GPUs."""


def published_days(rates: Sequence[float]) -> float:
    """How long both phases' sequences take at so many a second of each."""
    return sum(phase.samples / rate for phase, rate in zip(PHASES, rates, strict=True)) / 86400
