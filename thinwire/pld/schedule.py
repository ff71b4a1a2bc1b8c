"""Probabilities to keep each layer, step by step: everything at first, then less, and less of the upper layers; and the
draws, decided by a hash of where training is.

Plain float64 arithmetic on the step alone, so that every rank and every resumed run has the same numbers: there is no
generator that ranks could advance differently, nothing to save but the step, and no message between ranks."""

from __future__ import annotations

import hashlib
import math
import struct
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np


class ProgressiveLayerDrop:
    """The schedule θ(t) = (1 - theta)·exp(-gamma·t) + theta (arXiv 2010.13369, section 4).

    Args:
        theta: what θ falls to from 1, in [0, 1]. θ is the probability that the last layer is kept.
        gamma: how fast it falls, a step; "auto" is 100 / total_steps, the paper's.
        total_steps: of the whole training, for gamma="auto" only.

    Raises ValueError or TypeError for values that cannot work.
    """

    def __init__(
        self, theta: float = 0.5, gamma: float | Literal["auto"] = 0.001, *, total_steps: int | None = None
    ) -> None:
        self.theta = _number("theta", theta)
        if not 0 <= self.theta <= 1:
            raise ValueError(f"theta is {theta}, but it is a probability: give a number in [0, 1]")
        self.gamma = _resolve_gamma(gamma, total_steps)
        self._step = 0
        self._begun = False

    @property
    def begun(self) -> bool:
        """Whether it was told the step in flight."""
        return self._begun

    @property
    def step(self) -> int:
        """The step in flight."""
        return self._step

    def update_state(self, global_step: int) -> None:
        """Begin step `global_step`, counted from 0. Repeating the step in flight changes nothing.

        Raises ValueError where the schedule would go backwards, whose layers have been drawn already.
        """
        step = _step(global_step)
        if step < self._step:
            raise ValueError(
                f"the schedule is at step {self._step} and was given step {step}: it only goes forwards. To resume "
                "from an earlier step call load_state_dict()"
            )
        self._step = step
        self._begun = True

    def get_theta(self) -> float:
        """θ in the step in flight, in numpy's double precision."""
        return float((1.0 - self.theta) * np.exp(-self.gamma * self._step) + self.theta)

    def get_state(self) -> dict[str, Any]:
        """The forward's keyword arguments of models that drop layers by themselves."""
        return {"progressive_layer_drop": True, "pld_theta": self.get_theta()}

    def state_dict(self) -> dict[str, int]:
        """The step in flight, for a checkpoint."""
        return {"step": self._step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on from a checkpoint, earlier or later. Raises ValueError or TypeError for another state."""
        self._step = _step(check_saved_keys(state, "step")["step"])
        self._begun = True


def check_saved_keys(state: Any, *keys: str) -> Any:
    """A saved state that has these keys and no others; raises ValueError for another."""
    if not isinstance(state, Mapping) or set(state) != set(keys):
        raise ValueError(f"a state of layer drop has {' and '.join(keys)}, got {str(state)[:200]}: load what was saved")
    return state


def keep_probability(layer: int, num_layers: int, theta: float) -> float:
    """The probability that `layer`, counted from 1, of `num_layers` is kept: 1 - (i/L)(1 - θ)."""
    return 1.0 - layer / num_layers * (1.0 - theta)


def _resolve_gamma(gamma: float | Literal["auto"], total_steps: int | None) -> float:
    if gamma == "auto":
        if total_steps is None:
            raise ValueError('gamma="auto" is 100 / total_steps: give total_steps, or gamma as a number')
        if isinstance(total_steps, bool) or not isinstance(total_steps, int) or total_steps < 1:
            raise ValueError(f"total_steps is {total_steps!r}: give the number of training steps, at least 1")
        return 100.0 / total_steps
    if total_steps is not None:
        raise ValueError(f'total_steps is for gamma="auto" only, and gamma is {gamma!r}: leave one of them out')
    rate = _number("gamma", gamma)
    if not 0 <= rate < math.inf:
        raise ValueError(f"gamma is {gamma}: give a finite number that is not negative, so that theta(t) falls")
    return rate


def _number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} is {value!r}: give a number")
    return float(value)


def _step(step: object) -> int:
    if isinstance(step, bool) or not isinstance(step, int):
        raise TypeError(f"a step is a whole number, not {step!r}")
    if step < 0:
        raise ValueError(f"steps are counted from 0, not {step}")
    return step


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
