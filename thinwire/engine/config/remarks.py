"""What a user should hear once of a configuration that works: which of its keys have no effect, and what it leaves to
a default that other libraries choose otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["OWN_PEAK", "UNCLIPPED", "Remarks"]

UNCLIPPED = (
    '"gradient_clipping" is not set, so gradients are not clipped (DeepSpeed has clipped them at 1.0 by default since '
    "June 2026, never before)"
)
OWN_PEAK = (
    '"scheduler.params.warmup_max_lr" is not set, so the rate rises to that of each parameter group (DeepSpeed\'s '
    "rises to 0.001)"
)


@dataclass(frozen=True)
class Remarks:
    """`without_effect`: what happens whatever the value is, by the path of each key that changes nothing.
    `unclipped`: whether nothing is said of clipping. `own_peak`: whether a warmup does not say where it ends."""

    without_effect: Mapping[str, str] = field(default_factory=dict)
    unclipped: bool = False
    own_peak: bool = False

    def line(self) -> str:
        """All of it in one line; empty where there is nothing to say."""
        parts = []
        if self.without_effect:
            parts.append(
                f"without effect on the result are {', '.join(self.without_effect)} (`thinwire config check` says why)"
            )
        if self.unclipped:
            parts.append(UNCLIPPED)
        if self.own_peak:
            parts.append(OWN_PEAK)
        return "configuration: " + "; ".join(parts) if parts else ""
