"""The kernels' checks in Triton's interpreter, which has to be chosen before Triton is imported.

Prints the name of every group of checks that held, and the traceback of every other.
"""

from __future__ import annotations

import math
import os
import traceback

import torch

if __name__ == "__main__":
    os.environ["TRITON_INTERPRET"] = "1"

from tests.sparse_attn.kernels.body import attend, check
from tests.sparse_attn.packed.body import check_products, check_softmax, masks
from thinwire.sparse_attn.kernels.triton import launch as triton_attention
from thinwire.sparse_attn.kernels.triton import packed
from thinwire.sparse_attn.layouts.named import BigBird, Custom, Dense, Fixed, LocalSlidingWindow


def joined_and_split_blocks() -> None:
    """Blocks smaller and larger than a tile, odd lengths and widths."""
    for block in (16, 32, 64):
        check(triton_attention, BigBird(2, block), (block * 3 + 7,) * 2, 24, batch=1)
    check(triton_attention, LocalSlidingWindow(2, 128), (300, 300), 16, batch=1)
    check(triton_attention, BigBird(2, 16, different_layout_per_head=True), (130, 130), 65, batch=1)
    check(triton_attention, Dense(1, 128), (150, 150), 130, batch=1, heads=1)
    check(
        triton_attention,
        LocalSlidingWindow(1, 128),
        (384, 384),
        16,
        batch=1,
        heads=1,
        dtype=torch.float16,
        tolerance=5e-4,
    )


def masks_and_dropout() -> None:
    """Every mask there is."""
    check(triton_attention, BigBird(2, 16, attention="unidirectional"), (85, 85), 16, dropout_p=0.3)
    check(triton_attention, Dense(2, 32), (70, 70), 16, causal=True, with_key_bias=True, bias_heads=(1, 2))
    check(triton_attention, Fixed(2, 16), (61, 61), 16, with_key_bias=True, bias_heads=(2, 1), dropout_p=0.2)
    mask = torch.rand(2, 3, 5) > 0.4
    check(triton_attention, Custom(mask, 32), (85, 160), 16, with_key_bias=True, bias_heads=(1, 1))


def long_rows() -> None:
    """Rows and columns that several programs share."""
    mask = torch.eye(140, dtype=torch.bool)
    mask[0], mask[:, 0] = True, True
    check(triton_attention, Custom(mask, 16), (2240, 2240), 16, batch=1, heads=1)


def nothing_leaks() -> None:
    """Rows that attend nothing, tensors without elements, NaN in what is masked."""
    mask = torch.ones(1, 3, 3, dtype=torch.bool)
    mask[0, 1] = False
    out, lse, *gradients = attend(triton_attention, *torch.randn(4, 1, 2, 48, 16), Custom(mask, 16))
    assert (out[:, :, 16:32] == 0).all()
    assert (lse[:, :, 16:32] == math.inf).all()
    assert all(one.isfinite().all() for one in gradients)
    for shape in ((0, 2, 32, 16), (1, 2, 0, 16)):
        found = attend(triton_attention, *torch.randn(4, *shape), Dense(2, 16))
        assert [tuple(one.shape) for one in found] == [shape, shape[:3], shape, shape, shape]
    layout = BigBird(2, 16, num_random_blocks=0, num_global_blocks=0, attention="unidirectional")
    q, k, v, d_out = torch.randn(4, 1, 2, 96, 16)
    key_bias = torch.zeros(1, 96)
    key_bias[0, 5] = -math.inf
    clean = attend(triton_attention, q, k, v, d_out, layout, key_bias)
    for one in (k, v):
        one[:, :, 5] = math.nan
        one[:, :, 40] = math.nan
    dirty = attend(triton_attention, q, k, v, d_out, layout, key_bias)
    untouched = [number for number in range(96) if not 40 <= number < 64]
    for before, after in zip(clean[:3], dirty[:3], strict=True):
        torch.testing.assert_close(after[:, :, untouched], before[:, :, untouched])
    assert not dirty[0][:, :, 40:64].isfinite().all(-1).any()
    far = [number for number in range(96) if number < 16 or number >= 64]
    for before, after in zip(clean[3:], dirty[3:], strict=True):
        torch.testing.assert_close(after[:, :, far], before[:, :, far])


def packed_blocks() -> None:
    """Products and softmaxes of packed blocks: odd widths, narrow and wide, in all dtypes."""
    check_products(packed, 16, 24, torch.float32, 1e-6)
    check_products(packed, 32, 70, torch.float16, 1e-3)
    check_products(packed, 128, 7, torch.float32, 1e-6)
    bias, key_bias = masks(16)
    check_softmax(packed, 16, torch.float32, 1e-6)
    check_softmax(packed, 16, torch.float16, 1e-3, bias=bias, key_bias=key_bias)
    check_softmax(packed, 64, torch.float32, 1e-6, key_bias=masks(64)[1])


GROUPS = {
    one.__name__: one for one in (joined_and_split_blocks, masks_and_dropout, long_rows, nothing_leaks, packed_blocks)
}

if __name__ == "__main__":
    for name, group in GROUPS.items():
        try:
            group()
            print(f"{name} held", flush=True)
        except Exception:
            traceback.print_exc()
