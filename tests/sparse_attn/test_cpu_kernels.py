"""The CPU kernels against the dense definition in float64: every block size, odd shapes, masks, dropout, memory; and
their exponential, as exact as float32 allows."""

import math
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

pytest.importorskip("numba")

from tests.sparse_attn.cases import attend, check, check_empty, check_leaks, check_rows_that_attend_nothing
from thinwire.simd import floats
from thinwire.simd.compiling import kernel
from thinwire.sparse_attn.kernels.cpu import launch as cpu
from thinwire.sparse_attn.kernels.cpu.tiles import power_of_two
from thinwire.sparse_attn.layouts.named import BigBird, Custom, Dense, Fixed, LocalSlidingWindow

BLOCKS = (16, 32, 64, 128)


@pytest.mark.parametrize("block", BLOCKS)
def test_odd_lengths_and_widths(block) -> None:
    check(cpu, BigBird(2, block), (block * 4 + 7,) * 2, 24)
    check(cpu, BigBird(2, block, different_layout_per_head=True), (block * 3,) * 2, 65, batch=1)
    check(cpu, LocalSlidingWindow(2, block), (block * 3 - 1,) * 2, 1)


@pytest.mark.parametrize("block", BLOCKS)
def test_causal_and_dropout(block) -> None:
    check(cpu, BigBird(2, block, attention="unidirectional"), (block * 3 + 5,) * 2, 16, dropout_p=0.3)
    check(cpu, Dense(2, block), (block * 2 + 3,) * 2, 32, causal=True)


@pytest.mark.parametrize("bias_heads", [(1, 1), (1, 2), (2, 1), (2, 2)])
@pytest.mark.parametrize("block", [16, 128])
def test_biases(block, bias_heads) -> None:
    check(cpu, Fixed(2, block), (block * 4 - 3,) * 2, 16, with_key_bias=True, bias_heads=bias_heads, dropout_p=0.2)


def test_queries_of_one_sequence_and_keys_of_another() -> None:
    mask = torch.rand(2, 3, 5) > 0.4
    check(cpu, Custom(mask, 32), (85, 160), 16, with_key_bias=True, bias_heads=(1, 2))


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 4e-3), (torch.float16, 5e-4)])
def test_16_bits(dtype, tolerance) -> None:
    check(cpu, BigBird(2, 32), (160, 160), 64, dtype=dtype, tolerance=tolerance, with_key_bias=True)


def test_a_row_longer_than_a_chunk() -> None:
    check(cpu, BigBird(2, 64), (1100, 1100), 16, batch=1)


@pytest.mark.parametrize(
    ("shape", "dtype", "counts"),
    # In 16 bits, whole heads and parts of heads.
    [((4, 2, 200, 3, 32), torch.float32, (1, 2, 5)), ((4, 1, 150, 3, 24), torch.bfloat16, (1, 2))],
)
def test_the_same_bits_for_any_number_of_threads_and_any_strides(shape, dtype, counts, monkeypatch) -> None:
    strided = [one.transpose(1, 2) for one in torch.randn(shape).to(dtype)]
    expected = attend(cpu, *(one.contiguous() for one in strided), BigBird(3, 16))
    for threads in counts:
        monkeypatch.setattr(cpu._workers, "threads", lambda threads=threads: threads)
        for one, other in zip(attend(cpu, *strided, BigBird(3, 16)), expected, strict=True):
            assert torch.equal(one, other)


def test_threads_of_python_may_call_at_once() -> None:
    tensors = torch.randn(4, 1, 4, 128, 16)
    expected = attend(cpu, *tensors, BigBird(4, 16))
    with ThreadPoolExecutor(4) as callers:
        for found in callers.map(lambda _: attend(cpu, *tensors, BigBird(4, 16)), range(4)):
            assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_rows_that_attend_nothing() -> None:
    check_rows_that_attend_nothing(cpu)


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_what_is_not_attended_does_not_leak(poison) -> None:
    check_leaks(cpu, poison)


def test_a_query_that_is_not_finite_reaches_only_the_keys_it_attends() -> None:
    layout = LocalSlidingWindow(1, 16)
    q, k, v, d_out = torch.randn(4, 1, 1, 96, 16)
    clean = attend(cpu, q, k, v, d_out, layout)
    q[:, :, 50] = math.nan
    dirty = attend(cpu, q, k, v, d_out, layout)
    far = [number for number in range(96) if number < 32 or number > 50]
    for before, after in zip(clean[3:], dirty[3:], strict=True):
        torch.testing.assert_close(after[:, :, far], before[:, :, far])


@pytest.mark.parametrize("shape", [(0, 2, 32, 16), (1, 0, 32, 16), (1, 2, 0, 16)])
def test_nothing(shape) -> None:
    check_empty(cpu, shape)


def test_no_python_memory_grows_with_the_square_of_the_length() -> None:
    layout = BigBird(2, 64)
    tensors = torch.randn(4, 1, 2, 4096, 16)
    layout.index(4096)
    tracemalloc.start()
    attend(cpu, *tensors, layout)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 4 * tensors.nbytes


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
