"""Peak memory of one attention call, forward and training: beside q, k and v, in a process of its own."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.common.peak_memory import PeakMemory, measure_alone
from experiments.long_sequences.systems import RUNS, SLOW_IMPORTS, SYSTEMS, Mode, inputs

__all__ = ["measure_peaks"]

_WARMUP_LENGTH = 512


def measure_peaks(name: str, length: int, modes: Sequence[Mode]) -> dict[Mode, int]:
    """Bytes by mode, that a call of this system needs at most beyond q, k and v; output and gradients count."""
    return measure_alone(_measure_here, name, length, modes, imported_before=SLOW_IMPORTS)


def _measure_here(name: str, length: int, modes: Sequence[Mode]) -> dict[Mode, int]:
    system = SYSTEMS[name]
    # What is loaded or compiled at the first call is not the call's; what is kept for a length is.
    warm_length = length if system.compiled else min(_WARMUP_LENGTH, length)
    attend = system.build(warm_length)
    for mode in modes:
        RUNS[mode](attend, *inputs(warm_length, gradients=mode == "training"))
    attend = attend if system.compiled else system.build(length)
    extra = {}
    for mode in modes:
        q, k, v = inputs(length, gradients=mode == "training")
        with PeakMemory() as peak:
            RUNS[mode](attend, q, k, v)
        extra[mode] = peak.extra
    return extra
