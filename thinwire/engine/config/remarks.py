"""What a user should hear once of a configuration that works: which of its keys have no effect, and what it leaves to
a default that other libraries choose otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

__all__ = ["UNCLIPPED", "Remarks"]

UNCLIPPED = (
    '"gradient_clipping" is not set, so gradients are not clipped (DeepSpeed has clipped them at 1.0 by default since '
    "June 2026, never before)"
)


@dataclass(frozen=True)
class Remarks:
    """`without_effect`: what happens whatever the value is, by the path of each key that changes nothing.
    `unclipped`: whether nothing is said of clipping."""

    without_effect: Mapping[str, str] = field(default_factory=dict)
    unclipped: bool = False

    def line(self) -> str:
        """All of it in one line; empty where there is nothing to say."""
        parts = []
        if self.without_effect:
            parts.append(
                f"without effect on the result are {', '.join(self.without_effect)} (`thinwire config check` says why)"
            )
        if self.unclipped:
            parts.append(UNCLIPPED)
        return "configuration: " + "; ".join(parts) if parts else ""
