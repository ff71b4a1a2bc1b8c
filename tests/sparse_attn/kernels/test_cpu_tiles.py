"""The exponential of the CPU kernels: as exact as float32 allows, and right at its ends."""

from __future__ import annotations

import math

import numpy as np
import pytest

pytest.importorskip("numba")

from thinwire.simd import floats
from thinwire.simd.compiling import kernel
from thinwire.sparse_attn.kernels.cpu.tiles import power_of_two


@kernel
def powers(exponents, results) -> None:
    for at in range(0, exponents.size, 16):
        floats.store(results, at, power_of_two(floats.load(exponents, at)))


def evaluate(exponents: np.ndarray) -> np.ndarray:
    padded = np.zeros(-(-exponents.size // 16) * 16, np.float32)
    padded[: exponents.size] = exponents
    results = np.empty_like(padded)
    powers(padded, results)
    return results[: exponents.size]


def test_powers_are_exact_to_the_last_bits() -> None:
    exponents = np.random.default_rng(0).uniform(-125, 20, 100_000).astype(np.float32)
    expected = np.exp2(exponents.astype(np.float64))
    assert np.abs(evaluate(exponents) / expected - 1).max() < 2e-7


def test_the_ends() -> None:
    found = evaluate(np.array([-math.inf, -3e38, -127.0, -126.0, 0.0, 1.0, 127.0, math.nan], np.float32))
    assert found[:7].tolist() == [0.0, 0.0, 0.0, 2.0**-126, 1.0, 2.0, 2.0**127]
    assert math.isnan(found[7])
