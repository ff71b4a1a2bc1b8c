"""Layouts written into a configuration and read again."""

from __future__ import annotations

import json

import pytest
import torch

from thinwire.sparse_attn import (
    BigBird,
    BSLongformer,
    Custom,
    Dense,
    Fixed,
    Layout,
    LocalSlidingWindow,
    Variable,
    layout_from_config,
    layout_to_config,
)


@pytest.mark.parametrize(
    "layout",
    [
        Dense(3),
        Fixed(8, 32, True, num_local_blocks=8, num_different_global_patterns=4),
        Variable(2, local_window_blocks=(1, 5), global_block_indices=(2, 4), global_block_end_indices=(3, 9), seed=7),
        BigBird(4, 64, attention="unidirectional", num_random_blocks=2, seed=5),
        BSLongformer(4, global_block_indices=(1, 3)),
        LocalSlidingWindow(1, num_sliding_window_blocks=5, attention="bidirectional"),
    ],
    ids=lambda layout: type(layout).__name__,
)
def test_it_comes_back(layout: Layout) -> None:
    section = json.loads(json.dumps(layout_to_config(layout)))
    assert layout_from_config(section, layout.num_heads) == layout


def test_a_mask_of_blocks_belongs_to_no_configuration() -> None:
    with pytest.raises(ValueError, match="a Custom layout cannot be written"):
        layout_to_config(Custom(torch.ones(2, 2, dtype=torch.bool)))
