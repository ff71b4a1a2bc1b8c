"""The specification itself, against torch's own attention where the two must agree, and its dropout."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sparse_attn.cases import doubles, layouts, qkv
from thinwire.sparse_attn import Dense, reference_attention
from thinwire.sparse_attn.reference import keep_mask, token_mask


def test_it_is_torchs_attention_under_the_same_mask() -> None:
    inputs = doubles(qkv(77, 8))
    for layout in layouts(16).values():
        mask = token_mask(layout.index(77), 77, 77, causal=layout.causal)
        expected = torch.nn.functional.scaled_dot_product_attention(*inputs, attn_mask=mask)
        out = reference_attention(*inputs, layout)
        torch.testing.assert_close(out, expected.nan_to_num(), atol=1e-12, rtol=0)
        actual = torch.autograd.grad(out.square().sum(), inputs)
        wanted = torch.autograd.grad(expected.nan_to_num().square().sum(), inputs)
        for one, other in zip(actual, wanted, strict=True):
            torch.testing.assert_close(one, other.nan_to_num(), atol=1e-10, rtol=0)


def test_gradients_with_a_masked_nan_stay_finite() -> None:
    q, k, v = (x.detach() for x in doubles(qkv(40, 8)))
    k[:, :, 39] = v[:, :, 38] = math.nan
    inputs = [x.requires_grad_() for x in (q, k, v)]
    padding = torch.arange(40).expand(2, 40) < 38
    out = reference_attention(*inputs, Dense(2), key_padding_mask=padding)
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), inputs))


def test_the_same_seed_of_torch_drops_the_same() -> None:
    inputs = qkv(33, 8)
    outs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        outs.append(reference_attention(*inputs, Dense(2), dropout_p=0.5))
    assert torch.equal(outs[0], outs[1])
    assert not torch.equal(outs[0], outs[2])


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**63 - 1), p=st.floats(0.05, 0.95))
def test_dropout_keeps_its_share_in_every_head_row_and_column(seed: int, p: float) -> None:
    keep = keep_mask(torch.tensor([seed]), 2, 2, 200, 300, p).double()
    for dims, count in (((2, 3), 60_000), ((0, 1, 3), 1200), ((0, 1, 2), 800)):
        sigma = math.sqrt(p * (1 - p) / count)
        assert ((keep.mean(dims) - (1 - p)).abs() < 6 * sigma).all()
    # Neighbouring rows, and heads, are drawn apart.
    assert not torch.equal(keep[0, 0], keep[0, 1])
    assert not torch.equal(keep[..., :-1, :], keep[..., 1:, :])


def test_dropout_follows_the_written_hash() -> None:
    def mix(x: int) -> int:
        x ^= x >> 16
        x = x * 0x7FEB352D % 2**32
        x ^= x >> 15
        x = x * 0x846CA68B % 2**32
        return x ^ x >> 16

    seed, p = 0x1234_5678_9ABC_DEF0, 0.4
    keep = keep_mask(torch.tensor([seed]), 2, 3, 5, 7, p)
    for b, h, i, j in ((0, 0, 0, 0), (1, 2, 4, 6), (1, 0, 3, 5), (0, 1, 2, 3)):
        head_key = mix(seed % 2**32 ^ mix(((seed >> 32) + (b * 3 + h) * 0x9E3779B9) % 2**32))
        row_key = mix((head_key + i) % 2**32)
        assert bool(keep[b, h, i, j]) == (mix(row_key ^ j * 0x9E3779B9 % 2**32) >= round(p * 2**32))
