"""thinwire trains big models over thin wires: error-compensated 1-bit optimizers over MPI, NCCL and Gloo, on a
ZeRO-sharded engine, with block-sparse attention and progressive layer drop. Start with `thinwire.OneBitAdam`, or with
`thinwire.initialize` and a configuration file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from thinwire.lazy_imports import PROVIDERS, lazy_exports
from thinwire.version import __version__

__all__ = [
    "DiLoCo",
    "Elastic",
    "ElasticBatchSampler",
    "ElasticSampler",
    "OneBitAdam",
    "OneBitLamb",
    "OneBitLion",
    "OneBitMuon",
    "ShardedOptimizer",
    "ZeroOneAdam",
    "__version__",
    "comm",
    "compress",
    "deepspeed",
    "engine",
    "hugging_face",
    "inference",
    "initialize",
    "optim",
    "parallel",
    "plan",
    "pld",
    "sparse_attn",
    "transformers",
    "zero",
]

PROVIDERS["dialect of configurations"] = "thinwire.deepspeed.config.translation"
PROVIDERS["communicators of groups"] = "thinwire.comm.launch"
PROVIDERS["homes of elastic workers"] = "thinwire.optim.replicated.torch_homes"
PROVIDERS["engines"] = "thinwire.deepspeed.initialization"

# Torch alone takes a second to import, which `thinwire plan --help` need not wait for.
if TYPE_CHECKING:
    from thinwire import (
        comm,
        compress,
        deepspeed,
        engine,
        hugging_face,
        inference,
        optim,
        parallel,
        plan,
        pld,
        sparse_attn,
        transformers,
        zero,
    )
    from thinwire.comm import Elastic
    from thinwire.deepspeed.initialization import initialize
    from thinwire.optim import (
        DiLoCo,
        ElasticBatchSampler,
        ElasticSampler,
        OneBitAdam,
        OneBitLamb,
        OneBitLion,
        OneBitMuon,
        ZeroOneAdam,
    )
    from thinwire.zero import ShardedOptimizer
else:
    __getattr__, __dir__ = lazy_exports(__name__)
