"""Where optimizer state lies at stage 3; what lies apart from its shards is tested in the program of stage 3."""

from __future__ import annotations

import pytest
import torch

from thinwire.engine.config.models import OffloadConfig, ZeroConfig
from thinwire.engine.optimizers import _stepped_on

NONE, CPU = OffloadConfig(), OffloadConfig(device="cpu")


@pytest.mark.parametrize(
    ("state", "shards", "expected"), [(NONE, NONE, None), (CPU, CPU, None), (CPU, NONE, "cpu"), (NONE, CPU, "cuda:0")]
)
def test_state_lies_apart_where_one_of_the_two_is_offloaded(
    state: OffloadConfig, shards: OffloadConfig, expected: str | None
) -> None:
    zero = ZeroConfig(stage=3, offload_optimizer=state, offload_param=shards)
    found = _stepped_on(zero, torch.device("cuda", 0))
    assert found == (None if expected is None else torch.device(expected))
    assert _stepped_on(zero, torch.device("cpu")) is None
