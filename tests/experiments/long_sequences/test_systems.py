"""The systems compute attention, all on the same inputs."""

from __future__ import annotations

import pytest
import torch

from experiments.long_sequences.systems import BLOCK, DENSE, LAYOUTS, SYSTEMS, input_bytes, inputs
from experiments.tasks.attention_peers import materialised_attention
from thinwire.sparse_attn import reference_attention


@pytest.mark.parametrize("name", [DENSE, *LAYOUTS])
def test_systems_compute_attention_on_their_own_inputs(name: str) -> None:
    length = 4 * BLOCK
    q, k, v = inputs(length, gradients=False)
    found = SYSTEMS[name].build(length)(q, k, v)
    expected = materialised_attention(q, k, v) if name == DENSE else reference_attention(q, k, v, LAYOUTS[name])
    torch.testing.assert_close(found, expected)
    assert input_bytes(length) == sum(x.nbytes for x in (q, k, v))
