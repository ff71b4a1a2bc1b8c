"""What a step hears of its exchanges, and of the norm that a sketch has found, with one wait for an accelerator."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from thinwire.compress.exchange import Exchange, bring_headers
from thinwire.optim.step_under_way import StepUnderWay
from thinwire.zero.sharded_home import clip_of_norm

__all__ = ["clip_by_sketch", "hear"]


def clip_by_sketch(step: StepUnderWay, max_norm: float, loss_scale: float) -> None:
    """Between the legs: clip `step` by the averaged gradient's norm. Collective; on an accelerator nobody waits."""
    assert step.sketch is not None
    step.sketched = step.sketch.norm()
    step.clip = clip_of_norm(max_norm, step.sketched / loss_scale)


def hear(step: StepUnderWay, exchanges: Iterable[Exchange]) -> float | None:
    """Bring the headers of `exchanges` to the host, and `step`'s clip; return the norm, times the loss scale, that it
    was clipped by, once. None where there is none that was not returned."""
    sketched = [] if step.sketched is None else [step.sketched, torch.as_tensor(step.clip, dtype=torch.float64)]
    found = bring_headers(exchanges, sketched)
    if not found:
        return None
    norm, step.clip = map(float, found)
    step.sketched = None
    return norm
