"""Float32 rounded to the nearest of 16 bits inside the loops for CPUs: the bits of torch's own conversion."""

from __future__ import annotations

import numpy as np
import pytest
import torch

numba = pytest.importorskip("numba")

from thinwire.compress.kernels.cpu.small_floats import FORMATS, nearest_bits, widen_at  # noqa: E402
from thinwire.simd import memory  # noqa: E402


@numba.njit
def _round(values: int, out: int, kind: int, numel: int) -> None:
    for i in range(0, numel, 16):
        memory.store_shorts(out + 2 * i, nearest_bits(memory.load_floats(values + 4 * i), kind))


@numba.njit
def _widen(values: int, out: int, kind: int, numel: int) -> None:
    for i in range(0, numel, 16):
        memory.store_floats(out + 4 * i, widen_at(values + 2 * i, kind))


def _neighbours() -> torch.Tensor:
    """Every float16 and bfloat16, the float32 just beside them and half way to the next, and random bits."""
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    wide = torch.cat([every.view(torch.float16).float(), every.view(torch.bfloat16).float()])
    bits = wide.view(torch.int32)
    half = [bits + offset for offset in (-1, 0, 1, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001)]
    # Half way between subnormal float16.
    between = (torch.arange(0, 2048) + 0.5) * 2.0**-24
    tips = [between, torch.nextafter(between, torch.zeros(2048)), torch.nextafter(between, torch.ones(2048))]
    random = torch.from_numpy(np.random.default_rng(0).integers(-(2**31), 2**31, 1 << 16, dtype=np.int32))
    return torch.cat([*(one.view(torch.float32) for one in (*half, random)), *tips, *(-one for one in tips)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_to_the_nearest(dtype: torch.dtype) -> None:
    values = _neighbours()
    out = torch.empty_like(values, dtype=dtype)
    assert values.numel() % 16 == 0
    _round(values.data_ptr(), out.data_ptr(), FORMATS[dtype], values.numel())
    expected = values.to(dtype)
    same = out.view(torch.int16) == expected.view(torch.int16)
    assert bool((same | (out.isnan() & expected.isnan())).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_made_wide(dtype: torch.dtype) -> None:
    values = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    out = torch.empty(values.numel())
    _widen(values.data_ptr(), out.data_ptr(), FORMATS[dtype], values.numel())
    expected = values.float()
    assert bool(((out.view(torch.int32) == expected.view(torch.int32)) | (out.isnan() & expected.isnan())).all())
