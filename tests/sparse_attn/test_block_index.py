"""The compact index: both directions say the same, in order, for any blocks."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from thinwire.sparse_attn.block_index import BlockIndex


@given(
    heads=st.integers(1, 3),
    rows=st.integers(1, 9),
    columns=st.integers(1, 9),
    density=st.sampled_from([0.0, 0.3, 1.0]),
    seed=st.integers(0, 2**20),
)
@settings(max_examples=60, deadline=None)
def test_both_directions_hold_the_mask(heads, rows, columns, density, seed) -> None:
    generator = torch.Generator().manual_seed(seed)
    mask = torch.rand(heads, rows, columns, generator=generator) < density
    pairs = [one.nonzero(as_tuple=True) for one in mask]
    shuffled = [(r.repeat(2), c.repeat(2)) for r, c in pairs]  # each twice: an index holds it once
    index = BlockIndex.from_pairs(16, rows, columns, shuffled)
    alike = all(torch.equal(one, mask[0]) for one in mask)
    assert index.num_heads == (1 if alike else heads)
    assert torch.equal(index.dense(), mask[: index.num_heads])
    assert index.density() == mask[: index.num_heads].float().mean()
    expected = mask[: index.num_heads].mT.nonzero()
    counts = index.column_offsets.diff().long()
    owners = torch.repeat_interleave(torch.arange(index.num_heads * columns), counts)
    assert torch.equal(torch.stack([owners // columns, owners % columns, index.rows.long()], 1), expected)
    assert {index.row_offsets.dtype, index.columns.dtype, index.column_offsets.dtype, index.rows.dtype} == {torch.int32}


def test_nothing() -> None:
    nothing = torch.zeros(0, dtype=torch.int64)
    index = BlockIndex.from_pairs(16, 0, 0, [(nothing, nothing)])
    assert index.density() == 0
    assert index.dense().shape == (1, 0, 0)
