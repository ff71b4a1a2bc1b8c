"""Which layers are kept, decided by a hash of where training is: no generator that ranks could advance differently,
nothing to save in a checkpoint but the step, and no message between ranks."""

from __future__ import annotations

import hashlib
import struct
import warnings
from dataclasses import dataclass, field

from thinwire.pld.schedule import ProgressiveLayerDrop, keep_probability

__all__ = ["Decision", "DropPlan", "uniform"]


@dataclass(frozen=True)
class Decision:
    """One layer's fate in one forward, and the probability of being kept that it was drawn, and is scaled, with."""

    kept: bool
    keep: float


@dataclass
class DropPlan:
    """What the gates of one stack share. `micro_step_again`: the forward that backward is running again, if known."""

    schedule: ProgressiveLayerDrop
    seed: int
    num_layers: int
    micro_step_again: int | None = None
    _warned: bool = field(default=False, init=False)

    def decide(self, layer: int, micro_step: int) -> Decision:
        """Draw for `layer`, counted from 1, in forward `micro_step` of the schedule's step."""
        if not self.schedule.begun and not self._warned:
            self._warned = True
            warnings.warn(
                "these layers are to be dropped by a schedule that stands still, so that none is: call "
                "schedule.update_state(step) as every step begins, before its first forward",
                RuntimeWarning,
                stacklevel=2,
            )
        keep = keep_probability(layer, self.num_layers, self.schedule.get_theta())
        return Decision(uniform(self.seed, self.schedule.step, micro_step, layer) < keep, keep)


def uniform(seed: int, step: int, micro_step: int, layer: int) -> float:
    """A number in [0, 1), of 53 random bits, that depends on the arguments alone."""
    key = struct.pack("<4q", seed, step, micro_step, layer)
    return (int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 11) * 2.0**-53
