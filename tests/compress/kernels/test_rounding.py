"""Rounding to 16 bits: at random with the bits of the reference, and in loops for CPUs to the nearest as torch does."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.compress.kernels import emulation
from tests.compress.kernels.body import BACKENDS
from thinwire.compress.kernels import reference
from thinwire.compress.kernels.calls import StoreRounded
from thinwire.compress.kernels.loading import execute

SUBJECTS = {name: one.backend for name, one in BACKENDS.items() if name != "cuda"}
if emulation.COMPILER:
    SUBJECTS["emulated cuda"] = emulation.BACKEND
DTYPES = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize("subject", SUBJECTS)
@pytest.mark.parametrize("numel", [0, 1, 15, 16, 17, 1000, 4096, 300_001])
@pytest.mark.parametrize("dtype", [torch.float32, *DTYPES])
def test_the_bits_of_the_reference(subject: str, dtype: torch.dtype, numel: int) -> None:
    if subject == "emulated cuda" and numel > 4096:
        numel = 4097  # a third thread block, of one element
    generator = torch.Generator().manual_seed(numel)
    values = torch.randn(numel, generator=generator) * 10 ** (6 * torch.rand(numel, generator=generator) - 5)
    values[::7] = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e-40, 3e38]).repeat(numel)[
        : len(values[::7])
    ]
    mine, expected = torch.empty(numel, dtype=dtype), torch.empty(numel, dtype=dtype)
    SUBJECTS[subject].store_rounded(StoreRounded(mine, values, 1234567 << 40))
    reference.store_rounded(StoreRounded(expected, values, 1234567 << 40))
    torch.testing.assert_close(mine, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(mine.signbit() | mine.isnan(), expected.signbit() | expected.isnan())


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_mean_is_kept_and_other_seeds_round_otherwise(dtype: torch.dtype) -> None:
    step = torch.finfo(dtype).eps
    values = torch.full((100_000,), 1 + 0.3 * step)
    first, second = torch.empty(100_000, dtype=dtype), torch.empty(100_000, dtype=dtype)
    execute(StoreRounded(first, values, seed=1))
    execute(StoreRounded(second, values, seed=2))
    assert set(first.float().unique().tolist()) == {1.0, 1 + step}
    # 5 standard deviations of a fraction of 0.3 among 100,000.
    assert float((first.double() - 1).mean() / step) == pytest.approx(0.3, abs=0.0073)
    assert 0.3 < float((first != second).double().mean()) < 0.55  # 0.42 where independent


def test_what_does_not_fit_is_refused() -> None:
    values = torch.zeros(4)
    with pytest.raises(TypeError, match="values must be fp32"):
        execute(StoreRounded(torch.zeros(4), torch.zeros(4, dtype=torch.float64), 0))
    with pytest.raises(ValueError, match="vectors of one size"):
        execute(StoreRounded(torch.zeros(5, dtype=torch.bfloat16), values, 0))
    with pytest.raises(ValueError, match="contiguous"):
        execute(StoreRounded(torch.zeros(8, dtype=torch.bfloat16)[::2], values, 0))


def neighbours() -> torch.Tensor:
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


@pytest.mark.parametrize("dtype", DTYPES)
def test_to_the_nearest_and_made_wide_as_torch_does(dtype: torch.dtype) -> None:
    numba = pytest.importorskip("numba")
    from thinwire.compress.kernels.cpu.small_floats import FORMATS, nearest_bits, widen_at
    from thinwire.simd import memory

    @numba.njit
    def convert(values: int, rounded: int, again: int, kind: int, numel: int) -> None:
        for i in range(0, numel, 16):
            memory.store_shorts(rounded + 2 * i, nearest_bits(memory.load_floats(values + 4 * i), kind))
            memory.store_floats(again + 4 * i, widen_at(rounded + 2 * i, kind))

    values = neighbours()  # which round to every value of the format
    assert values.numel() % 16 == 0
    rounded, again, wanted = torch.empty_like(values, dtype=dtype), torch.empty_like(values), values.to(dtype)
    convert(values.data_ptr(), rounded.data_ptr(), again.data_ptr(), FORMATS[dtype], values.numel())
    for found, expected, bits in ((rounded, wanted, torch.int16), (again, wanted.float(), torch.int32)):
        assert bool(((found.view(bits) == expected.view(bits)) | (found.isnan() & expected.isnan())).all())
