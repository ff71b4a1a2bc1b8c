"""What every encoder's loop over a block does sixty-four elements at a time."""

from __future__ import annotations

from thinwire.compress.kernels.cpu.blocks import Floats
from thinwire.simd import floats, memory
from thinwire.simd.compiling import helper, inner
from thinwire.simd.floats import LANES

__all__ = ["STEP", "corrected_at", "store_step"]

STEP = 4 * LANES  # four sums side by side hide the latency of an addition; every block is a multiple


@helper
def corrected_at(payload: Floats, residual: Floats, at: int, correct: bool) -> floats.Vector:
    """Sixteen elements of the payload, and of the residual if `correct`."""
    value = floats.load(payload, at)
    return floats.add(value, floats.load(residual, at)) if correct else value


@inner
def store_step(
    at: int, value0: floats.Vector, value1: floats.Vector, value2: floats.Vector, value3: floats.Vector
) -> None:
    """Write `STEP` elements to an address."""
    memory.store_floats(at, value0)
    memory.store_floats(at + 4 * LANES, value1)
    memory.store_floats(at + 8 * LANES, value2)
    memory.store_floats(at + 12 * LANES, value3)
