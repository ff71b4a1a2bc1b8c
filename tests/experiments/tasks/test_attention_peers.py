"""The peers of block-sparse attention compute what it computes."""

from __future__ import annotations

import pytest
import torch

from experiments.tasks.attention_peers import flex_mask, gathered_attention
from thinwire.sparse_attn import BigBird, Custom, Fixed, reference_attention


@pytest.mark.parametrize("layout", [BigBird(2, block=16), Fixed(2, block=16), BigBird(1, 16, num_global_blocks=2)])
def test_gathered_attention_is_the_layouts(layout: BigBird | Fixed) -> None:
    q, k, v = (torch.randn(2, 2, 160, 8, requires_grad=True) for _ in range(3))
    d_out = torch.randn(2, 2, 160, 8)
    expected = reference_attention(q, k, v, layout)
    found = gathered_attention(layout.index(160))(q, k, v)
    torch.testing.assert_close(found, expected)
    for ours, theirs in zip(
        torch.autograd.grad(found, (q, k, v), d_out), torch.autograd.grad(expected, (q, k, v), d_out), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_gathered_attention_refuses_heads_that_differ() -> None:
    mask = torch.eye(3, dtype=torch.bool).repeat(2, 1, 1)
    mask[1, 0] = True
    with pytest.raises(ValueError, match="got 2 different"):
        gathered_attention(Custom(mask, 16).index(48))


@pytest.mark.parametrize("layout", [BigBird(2, 16), BigBird(2, 16, different_layout_per_head=True), Fixed(2, 16)])
def test_flex_has_the_same_blocks_both_ways(layout: BigBird | Fixed) -> None:
    index = layout.index(160)
    mask = flex_mask(index)
    assert torch.equal(mask.to_dense().bool()[0], index.dense())
    assert mask.kv_indices.device == index.columns.device
    columns = mask.full_q_num_blocks  # what a backward walks along
    assert columns is not None
    assert torch.equal(columns[0].flatten(), index.column_offsets.diff())
