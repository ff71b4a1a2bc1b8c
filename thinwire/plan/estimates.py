"""Seconds of forward and backward where nobody measured them: operations of a transformer over a device's speed."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.plan.devices import EFFICIENCY, Device
from thinwire.plan.errors import require_whole
from thinwire.plan.workload import Transformer

__all__ = ["Batch", "Estimate", "batch_for", "estimate"]

_SEQUENCE = 512
_SEQUENCES = 8


@dataclass(frozen=True)
class Batch:
    """What one rank computes at once: `sequences` of `length` tokens."""

    sequences: int
    length: int

    def __post_init__(self) -> None:
        require_whole("the micro-batch", self.sequences)
        require_whole("a sequence's length", self.length)

    @property
    def tokens(self) -> int:
        """Of all sequences."""
        return self.sequences * self.length


@dataclass(frozen=True)
class Estimate:
    """Seconds of one micro-batch, and `assumed`, what they were computed from, in words."""

    forward: float
    backward: float
    assumed: str


def batch_for(model: Transformer, sequences: int | None, length: int | None) -> Batch:
    """What was given, else 8 sequences as long as the model is usually trained on, or 512."""
    usual = _SEQUENCE if model.blocks is None else model.blocks.sequence
    return Batch(_SEQUENCES if sequences is None else sequences, usual if length is None else length)


def estimate(model: Transformer, batch: Batch, device: Device) -> Estimate:
    """Two operations a parameter and token forward, and those of attention, 4 · layers · width · length a token where
    layers are known; twice as many backward (Kaplan et al. 2020, arXiv 2001.08361, §2.1)."""
    a_token = 2.0 * model.parameters
    if model.blocks is not None:
        a_token += 4.0 * model.blocks.layers * model.blocks.hidden * batch.length
    forward = a_token * batch.tokens / device.sustained_flops
    assumed = (
        f"{batch.sequences} sequence{'s' if batch.sequences > 1 else ''} of {batch.length} tokens a rank, "
        f"{device.name} at {EFFICIENCY:.0%} of its peak"
    )
    return Estimate(forward, 2 * forward, assumed)
