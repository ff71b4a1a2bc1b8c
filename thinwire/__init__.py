"""thinwire trains big models over thin wires: error-compensated 1-bit optimizers over MPI, NCCL and Gloo, on a
ZeRO-sharded engine. Start with `thinwire.OneBitAdam`, or with `thinwire.initialize` and a configuration file."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from thinwire import comm, compress, zero
from thinwire.compress import OneBitAdam, ShardedOneBitAdam
from thinwire.zero import ShardedOptimizer

if TYPE_CHECKING:
    from thinwire import engine
    from thinwire.engine import initialize

__all__ = [
    "OneBitAdam",
    "ShardedOneBitAdam",
    "ShardedOptimizer",
    "__version__",
    "comm",
    "compress",
    "engine",
    "initialize",
    "zero",
]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # The engine needs pydantic and safetensors, which a swap of the optimizer class does not.
    if name == "engine":
        return importlib.import_module("thinwire.engine")
    if name == "initialize":
        return importlib.import_module("thinwire.engine").initialize
    raise AttributeError(f"module 'thinwire' has no attribute {name!r}")
