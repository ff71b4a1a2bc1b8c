"""Floor 4, who sends what when: algorithms, the two homes of their state, and the public class of each."""

from __future__ import annotations

from typing import TYPE_CHECKING

from thinwire.lazy_imports import lazy_exports

__all__ = [
    "CapturedStep",
    "DiLoCo",
    "ElasticBatchSampler",
    "ElasticSampler",
    "Lamb",
    "Lion",
    "Muon",
    "OneBitAdam",
    "OneBitLamb",
    "OneBitLion",
    "OneBitMuon",
    "QHAdamW",
    "ZeroOneAdam",
]

# The registry is read where there is no torch yet.
if TYPE_CHECKING:
    from thinwire.optim.adam import OneBitAdam
    from thinwire.optim.captured_step import CapturedStep
    from thinwire.optim.diloco.optimizer import DiLoCo
    from thinwire.optim.elastic_sampler import ElasticBatchSampler, ElasticSampler
    from thinwire.optim.exact import Lamb, Lion, QHAdamW
    from thinwire.optim.lamb import OneBitLamb
    from thinwire.optim.lion import OneBitLion
    from thinwire.optim.muon import Muon, OneBitMuon
    from thinwire.optim.zero_one import ZeroOneAdam
else:
    __getattr__, __dir__ = lazy_exports(__name__)
