"""1-bit Adam on sharded state, with a warmup so short that a test sees it frozen."""

from __future__ import annotations

from torch import nn

import thinwire
from thinwire.comm import Communicator

FREEZE = 15


def build(comm: Communicator, model: nn.Module, stage: int, **options) -> thinwire.OneBitAdam:
    options = {
        "lr": 3e-3,
        "freeze_step": FREEZE,
        "bucket_bytes": 1000,
        "block_size": 64,
        "on_drift": "raise",
        "resync_interval": 7,
    } | options
    return thinwire.OneBitAdam(
        model.parameters(), stage=stage, comm=comm, named_parameters=model.named_parameters(), **options
    )
