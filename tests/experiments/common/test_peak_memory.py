"""Peak memory is counted exactly."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from experiments.common.peak_memory import PeakMemory, measure_alone

linux = pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")


def peaks_of(megabytes: int) -> tuple[int, int]:
    with PeakMemory() as peak:
        np.ones(megabytes * 2**20, dtype=np.uint8)
    with PeakMemory() as nothing:
        pass
    return peak.extra, nothing.extra


@linux
def test_the_peak_counts_what_is_freed_again() -> None:
    megabytes = 64
    # Alone: in this process, memory that earlier tests have left would hide the peak.
    peak, nothing = measure_alone(peaks_of, megabytes)
    assert peak == pytest.approx(megabytes * 2**20, rel=0.1)
    assert nothing < megabytes * 2**20 / 8
