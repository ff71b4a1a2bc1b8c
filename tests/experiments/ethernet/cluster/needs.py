"""What tests on an emulated cluster need; elsewhere they are skipped, saying why."""

from __future__ import annotations

import pytest

from experiments.ethernet.cluster.commands import missing

__all__ = ["needs_cluster"]

_LACK = missing()
needs_cluster = pytest.mark.skipif(_LACK is not None, reason=f"no emulated cluster: {_LACK}")
