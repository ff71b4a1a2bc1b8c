"""The kernels' checks in Triton's interpreter, which has to be chosen before Triton is imported.

Prints of every group of checks that is named that it held, or a traceback and that it failed.
"""

import contextlib
import math
import os
import sys
import traceback
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"

import triton
from triton.runtime import interpreter

from tests.sparse_attn.cases import attend, check, check_empty, check_leaks, check_products, check_softmax, masks
from tests.sparse_attn.cases import check_rows_that_attend_nothing as check_idle_rows
from thinwire.sparse_attn.kernels.triton import launch as triton_attention
from thinwire.sparse_attn.kernels.triton import packed
from thinwire.sparse_attn.kernels.triton.launch import Shape
from thinwire.sparse_attn.layouts.named import BigBird, Custom, Dense, Fixed, LocalSlidingWindow


def joined_and_split_blocks() -> None:
    """Blocks smaller and larger than a tile, odd lengths and widths."""
    for heads, block in ((2, 16), (1, 32), (1, 64)):
        check(triton_attention, BigBird(heads, block), (block * 3 + 7,) * 2, 24, batch=1)
    check(triton_attention, LocalSlidingWindow(1, 128), (300, 300), 16, batch=1)
    check(triton_attention, BigBird(2, 16, different_layout_per_head=True), (130, 130), 65, batch=1)
    check(triton_attention, Dense(1, 128), (150, 150), 130, batch=1)
    in_16_bits = {"dtype": torch.float16, "tolerance": 5e-4}
    check(triton_attention, LocalSlidingWindow(1, 128), (384, 384), 16, batch=1, **in_16_bits)


def masks_and_dropout() -> None:
    """Every mask there is."""
    check(triton_attention, BigBird(2, 16, attention="unidirectional"), (85, 85), 16, dropout_p=0.3)
    check(triton_attention, Dense(2, 32), (70, 70), 16, causal=True, with_key_bias=True, bias_heads=(1, 2))
    check(triton_attention, Fixed(2, 16), (61, 61), 16, with_key_bias=True, bias_heads=(2, 1), dropout_p=0.2)
    mask = torch.rand(2, 3, 5) > 0.4
    check(triton_attention, Custom(mask, 32), (85, 160), 16, with_key_bias=True, bias_heads=(1, 1))


def long_rows() -> None:
    """Rows and columns that several programs share."""
    mask = torch.eye(132, dtype=torch.bool) & (torch.arange(132) < 20)
    mask[0], mask[:, 0] = True, True
    check(triton_attention, Custom(mask, 16), (2112, 2112), 16, batch=1)


def nothing_leaks() -> None:
    """Rows that attend nothing, tensors without elements, NaN in what is masked."""
    check_idle_rows(triton_attention)
    for shape in ((0, 2, 32, 16), (1, 2, 0, 16)):
        check_empty(triton_attention, shape)
    check_leaks(triton_attention, math.nan)


def packed_blocks() -> None:
    """Products and softmaxes of packed blocks: odd widths, narrow and wide, in all dtypes."""
    check_products(packed, 16, 24, torch.float32, 1e-6)
    check_products(packed, 32, 70, torch.float16, 1e-3)
    check_products(packed, 128, 7, torch.float32, 1e-6)
    bias, key_bias = masks(16)
    check_softmax(packed, 16, torch.float32, 1e-6)
    check_softmax(packed, 16, torch.float16, 1e-3, bias=bias, key_bias=key_bias)
    check_softmax(packed, 64, torch.float32, 1e-6, key_bias=masks(64)[1])


def tensor_cores_in_float32() -> None:
    """The products of float32 as tensor cores make them, with three of tf32, along long rows too."""
    with _as_tensor_cores():
        check(triton_attention, Dense(1, 64), (130, 130), 64, batch=1, dropout_p=0.1, tolerance=1e-5)
        mask = torch.eye(20, dtype=torch.bool)
        mask[0], mask[:, 0] = True, True
        check(triton_attention, Custom(mask, 16), (320, 320), 16, batch=1, tolerance=1e-5)
        check_products(packed, 16, 40, torch.float32, 1e-5)


def tiles_of_every_gpu() -> None:
    """Tiles that are taken whole, as on sm_90, and of 128 tokens."""
    chosen = triton_attention.shape
    for shape in (Shape(64, 64, 4), Shape(128, 128, 8), Shape(128, 32, 8)):
        triton_attention.shape = lambda *_, shape=shape: shape
        try:
            check(triton_attention, BigBird(1, 32), (200, 200), 16, batch=1, with_key_bias=True)
        finally:
            triton_attention.shape = chosen


def offsets_beyond_2_to_the_31() -> None:
    """Heads so far apart that the third begins at element 2**31; memory between them is never touched."""
    apart, rows, width = 2**30, 48, 16
    memory = torch.empty(2 * apart + 4 * rows * width, dtype=torch.float16)
    near = torch.randn(4, 1, 3, rows, width).half()
    strides = (0, apart, width, 1)
    far = [memory.as_strided((1, 3, rows, width), strides, number * rows * width) for number in range(4)]
    for one, values in zip(far, near, strict=True):
        one.copy_(values)
    layout = BigBird(3, 16)
    expected = attend(triton_attention, *near, layout)
    for found, wanted in zip(attend(triton_attention, *far, layout), expected, strict=True):
        assert torch.equal(found, wanted)


@contextlib.contextmanager
def _as_tensor_cores() -> Iterator[None]:
    """Products of float32 by tf32x3, eight terms at a time, each sum cut to float32 as the least exact of them do.

    The interpreter itself multiplies exactly, whatever precision was asked for.
    """
    exact = interpreter.InterpreterBuilder.create_dot

    def create_dot(builder: Any, a: Any, b: Any, d: Any, precision: Any, *rest: Any) -> Any:
        if a.data.dtype != np.float32:
            return exact(builder, a, b, d, precision, *rest)
        assert "TF32x3" in str(precision)
        left, right = _split(a.data), _split(b.data)
        total = d.data
        for one, other in ((1, 0), (0, 1), (0, 0)):
            for first in range(0, a.data.shape[1], 8):
                terms = left[one][:, first : first + 8].astype(np.float64) @ right[other][first : first + 8]
                if one or other:
                    terms = np.nan_to_num(terms, nan=0.0)
                total = _cut(total + terms)
        return interpreter.TensorHandle(total, d.dtype)

    interpreter.InterpreterBuilder.create_dot = create_dot
    try:
        yield
    finally:
        interpreter.InterpreterBuilder.create_dot = exact


def _split(values: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """What tf32 keeps of values, rounded to 10 bits of mantissa, and what it keeps of the rest."""
    big = _tf32(values)
    return big, _tf32(values - big)


def _tf32(values: NDArray[np.float32]) -> NDArray[np.float32]:
    return ((values.view(np.uint32) + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)


def _cut(values: NDArray[np.float64]) -> NDArray[np.float32]:
    """Rounded towards zero."""
    nearest = values.astype(np.float32)
    return np.where(np.abs(nearest) > np.abs(values), np.nextafter(nearest, np.float32(0)), nearest)


def _index_with_numpy_2_5() -> None:
    """Before 3.7, Triton's interpreter makes an int of an array of one element, which numpy 2.5 refuses."""
    original = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor: Any, *scope: Any) -> None:
        original(tensor, *scope)
        tensor.__index__ = lambda self: self.handle.data.item()

    interpreter._patch_lang_tensor = patch_lang_tensor


if __name__ == "__main__":
    if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7):
        _index_with_numpy_2_5()
    for name in sys.argv[1:]:
        try:
            globals()[name]()
            print(f"{name} held", flush=True)
        except Exception:
            traceback.print_exc(file=sys.stdout)
            print(f"{name} failed", flush=True)
