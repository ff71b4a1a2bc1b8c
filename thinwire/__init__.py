"""thinwire trains big models over thin wires: error-compensated 1-bit optimizers over MPI, NCCL and Gloo, on a
ZeRO-sharded engine, with block-sparse attention and progressive layer drop. Start with `thinwire.OneBitAdam`, or with
`thinwire.initialize` and a configuration file."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from thinwire import comm, compress, optim, zero
from thinwire.optim import OneBitAdam, OneBitLamb, OneBitLion, ZeroOneAdam
from thinwire.zero import ShardedOptimizer

if TYPE_CHECKING:
    from thinwire import engine, plan, pld, sparse_attn
    from thinwire.engine import initialize

__all__ = [
    "OneBitAdam",
    "OneBitLamb",
    "OneBitLion",
    "ShardedOptimizer",
    "ZeroOneAdam",
    "__version__",
    "comm",
    "compress",
    "engine",
    "initialize",
    "optim",
    "plan",
    "pld",
    "sparse_attn",
    "zero",
]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    # Engine and plan need pydantic and safetensors, which a swap of the optimizer class does not.
    if name in ("engine", "plan", "pld", "sparse_attn"):
        return importlib.import_module(f"thinwire.{name}")
    if name == "initialize":
        return importlib.import_module("thinwire.engine").initialize
    raise AttributeError(f"module 'thinwire' has no attribute {name!r}")
