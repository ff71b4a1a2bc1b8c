"""Products held in registers, against numpy, for every layout of operands that kernels use."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("numba")

from thinwire.simd.compiling import kernel
from thinwire.simd.floats import LANES
from thinwire.simd.products import ROWS, Matrix, product, product_where_nonzero


@kernel
def multiply(left, left_row, left_step, right, right_row, result, rows, columns, depth, accumulate) -> None:
    operands = Matrix(left, left_row, left_step), Matrix(right, right_row, 1)
    product(operands[0], operands[1], Matrix(result, columns, 1), rows, columns, depth, accumulate)


@kernel
def multiply_where_nonzero(left, right, result, rows, columns, depth, by_left) -> None:
    operands = Matrix(left, depth, 1), Matrix(right, columns, 1)
    product_where_nonzero(
        operands[0], operands[1], Matrix(result, columns, 1), rows, columns, depth, False, by_left, False
    )


@given(
    rows=st.integers(1, 5).map(lambda number: number * ROWS),
    columns=st.integers(1, 7).map(lambda number: number * LANES),
    depth=st.integers(0, 70),
    transposed=st.booleans(),
    accumulate=st.booleans(),
    seed=st.integers(0, 2**20),
)
@settings(max_examples=60, deadline=None)
def test_any_shape(rows, columns, depth, transposed, accumulate, seed) -> None:
    generator = np.random.default_rng(seed)
    left = generator.standard_normal((rows, depth), dtype=np.float32)
    right = generator.standard_normal((depth, columns + 3), dtype=np.float32)
    result = generator.standard_normal((rows, columns), dtype=np.float32)
    expected = left.astype(np.float64) @ right[:, :columns] + (result if accumulate else 0)
    stored = np.ascontiguousarray(left.T) if transposed else left
    strides = (1, rows) if transposed else (depth, 1)
    multiply(stored.ravel(), *strides, right.ravel(), columns + 3, result.ravel(), rows, columns, depth, accumulate)
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("by_left", [True, False])
def test_a_zero_silences_nan(by_left) -> None:
    left, right = np.ones((2, 3), np.float32), np.ones((3, 4), np.float32)
    coefficients, others = (left, right) if by_left else (right, left)
    if by_left:
        coefficients[0, 1] = 0
        others[1] = math.nan
    else:
        coefficients[1, 0] = 0
        others[:, 1] = math.nan
    result = np.empty((2, 4), np.float32)
    multiply_where_nonzero(left.ravel(), right.ravel(), result.ravel(), 2, 4, 3, by_left)
    clean = result[0] if by_left else result[:, 0]
    poisoned = result[1] if by_left else result[:, 1:]
    assert (clean == 2).all()
    assert np.isnan(poisoned).all()
