"""The inner loop of the CPU backend that rounds fp32 to 16 bits at random, sixteen elements at a time."""

from __future__ import annotations

import numpy as np

from thinwire.compress.kernels.cpu.blocks import Floats, Range
from thinwire.compress.kernels.cpu.halves import ELEMENT_BYTES, Values, round_and_store
from thinwire.compress.kernels.cpu.noise import random_bits
from thinwire.simd import floats
from thinwire.simd.compiling import kernel
from thinwire.simd.floats import LANES

__all__ = ["store_rounded"]


@kernel
def store_rounded(
    weights: Values, values: Floats, first_key: np.uint32, second_key: np.uint32, elements: Range
) -> None:
    """Elements from `first`, a multiple of sixteen, up to `last`; see `rounding.store_rounded`."""
    memory, kind = weights
    behind = elements.last // LANES * LANES
    for i in range(elements.first, behind, LANES):
        round_and_store(memory, i, kind, floats.load(values, i), random_bits(i, first_key, second_key))
    left = elements.last - behind
    if left:
        size = ELEMENT_BYTES[kind]
        some_values = np.zeros(LANES, dtype=np.float32)
        some_weights = np.zeros(4 * LANES, dtype=np.uint8)
        some_values[:left] = values[behind : elements.last]
        random = random_bits(behind, first_key, second_key)
        round_and_store(some_weights, 0, kind, floats.load(some_values, 0), random)
        memory[behind * size : elements.last * size] = some_weights[: left * size]
