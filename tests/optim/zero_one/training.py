"""0/1 Adam with a schedule so short that a test sees every kind of step."""

from __future__ import annotations

import thinwire

SCHEDULE = {"var_freeze_step": 25, "var_update_scaler": 5, "local_step_scaler": 12, "local_step_clipper": 5}
"""Exact steps, then every 2nd and 4th; after the freeze, intervals of 1, 2, 4 and 5 steps."""


def make_zero_one(model, comm, **options) -> thinwire.ZeroOneAdam:
    options = {"lr": 3e-3, "block_size": 64} | SCHEDULE | options
    return thinwire.ZeroOneAdam(model.parameters(), comm=comm, **options)
