"""The inner loop of the CPU backend that rounds fp32 to 16 bits at random, sixteen elements at a time."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from thinwire.compress.kernels.cpu.halves import ELEMENT_BYTES, round_and_store
from thinwire.compress.kernels.cpu.noise import random_bits
from thinwire.simd import floats
from thinwire.simd.compiling import kernel
from thinwire.simd.floats import LANES

__all__ = ["store_rounded"]


@kernel
def store_rounded(
    weights: NDArray[np.uint8],
    kind: int,
    values: NDArray[np.float32],
    first: int,
    last: int,
    first_key: np.uint32,
    second_key: np.uint32,
) -> None:
    """Elements from `first`, a multiple of sixteen, up to `last`; see `rounding.store_rounded`."""
    behind = last // LANES * LANES
    for i in range(first, behind, LANES):
        round_and_store(weights, i, kind, floats.load(values, i), random_bits(i, first_key, second_key))
    if behind < last:
        size = ELEMENT_BYTES[kind]
        some_values = np.zeros(LANES, dtype=np.float32)
        some_weights = np.zeros(4 * LANES, dtype=np.uint8)
        for i in range(last - behind):
            some_values[i] = values[behind + i]
        random = random_bits(behind, first_key, second_key)
        round_and_store(some_weights, 0, kind, floats.load(some_values, 0), random)
        for i in range((last - behind) * size):
            weights[behind * size + i] = some_weights[i]
