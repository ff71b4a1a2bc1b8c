"""SparseSelfAttention: its mask modes, its limits and its dropout."""

from __future__ import annotations

import pytest
import torch

from tests.sparse_attn.cases import qkv
from thinwire.sparse_attn import BigBird, Dense, SparseSelfAttention, block_sparse_attention


def test_modes_say_the_same_in_their_own_numbers() -> None:
    q, k, v = qkv(50, 8)
    attends = torch.rand(50, 50) < 0.7
    padding = torch.rand(2, 50) < 0.7
    expected = block_sparse_attention(q, k, v, BigBird(2), key_padding_mask=padding, attn_mask=attends)
    added = torch.zeros(2, 50).masked_fill(~padding, -torch.inf)
    users = SparseSelfAttention(BigBird(2))
    assert torch.equal(users(q, k, v, key_padding_mask=added, attn_mask=attends.float()), expected)
    assert torch.equal(users(q, k, v, key_padding_mask=added[:, None, None], attn_mask=attends.long()), expected)
    swapped = SparseSelfAttention(BigBird(2), "mul", "add")
    added = torch.zeros(50, 50).masked_fill(~attends, -torch.inf)
    assert torch.equal(swapped(q, k, v, key_padding_mask=padding.long(), attn_mask=added), expected)
    assert torch.equal(swapped(q, k, v, key_padding_mask=padding, attn_mask=attends), expected)


def test_rpe_is_added_and_learned() -> None:
    q, k, v = qkv(50, 8)
    rpe = torch.randn(2, 50, 50, requires_grad=True)
    out = SparseSelfAttention(Dense(2))(q, k, v, rpe=rpe)
    torch.testing.assert_close(out, torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=rpe))
    out.square().sum().backward()
    assert rpe.grad is not None
    assert rpe.grad.any()


def test_dropout_in_training_alone() -> None:
    q, k, v = qkv(50, 8)
    layer = SparseSelfAttention(Dense(2), dropout=0.5)
    assert not torch.equal(layer(q, k, v), layer(q, k, v))
    layer.eval()
    assert torch.equal(layer(q, k, v), layer(q, k, v))


def test_refusals() -> None:
    with pytest.raises(ValueError, match="attn_mask_mode is 'or'"):
        SparseSelfAttention(Dense(2), attn_mask_mode="or")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="dropout is 1"):
        SparseSelfAttention(Dense(2), dropout=1)
    with pytest.raises(ValueError, match="50 tokens, max_seq_length is 49"):
        SparseSelfAttention(Dense(2), max_seq_length=49)(*qkv(50, 8))
