"""How DiLoCo's outer steps are spread over its local ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import get_args

from thinwire.compress.packet_layout import CodecName
from thinwire.plan.errors import PlanError, require_whole

__all__ = ["CODECS", "OuterSchedule"]

CODECS: tuple[CodecName, ...] = get_args(CodecName)
"""What outer gradients can go through."""

_LAYERS_A_FRAGMENT = 3


@dataclass(frozen=True)
class OuterSchedule:
    """As thinwire.DiLoCo takes them.

    Args:
        every: steps between two outer steps of a fragment.
        fragments: into how many the model is cut; None: one for every three layers.
        overlap: steps that a fragment is under way while training goes on.
        codec: what it goes through.
    """

    every: int = 30
    fragments: int | None = None
    overlap: int = 1
    codec: CodecName = "int4"

    def __post_init__(self) -> None:
        require_whole("every", self.every)
        if self.fragments is not None:
            require_whole("fragments", self.fragments)
        if isinstance(self.overlap, bool) or not isinstance(self.overlap, int) or not 0 <= self.overlap < self.every:
            raise PlanError(f"overlap must be a number of steps from 0 up to every={self.every}, got {self.overlap!r}")
        if self.codec not in CODECS:
            raise PlanError(f"codec {self.codec!r} is not one of {', '.join(CODECS)}")

    def fragments_of(self, layers: int | None) -> int:
        """Into how many a model of so many layers is cut."""
        if self.fragments is not None:
            return self.fragments
        return max(1, (layers or 1) // _LAYERS_A_FRAGMENT)
