"""Moments of gradients that DeepSpeed divided by a loss scale which it had not multiplied the loss by.

From 0.18.3 on, `engine.backward` at ZeRO stage 0 scales no loss, while the step of its 16-bit optimizers still divides
the gradients by the scale: Adam's first moments are too small by the scale, its second ones by the square of it. Adam's
own updates hide that, except for ε; gradients of the right size that follow on such moments do not. bf16 has no scale
there since 0.18.6.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from thinwire.engine.checkpoint.deepspeed.fields import Entry, number_of
from thinwire.engine.checkpoint.errors import CheckpointError

__all__ = ["MissingScale", "find_missing_scale"]

# Releases that do so. 0.19.8 is the last that was looked at.
_FIRST, _LAST, _LAST_IN_BF16 = (0, 18, 3), (0, 19, 8), (0, 18, 5)
_OF_SCALES = {"cur_scale": 1.0, "cur_iter": 0, "last_overflow_iter": -1, "scale_window": 1000}
# From here on second moments of gradients that eps does not drown have vanished in fp32, while the first ones have not.
_LARGEST = 2.0**31
# Kind of moment -> the power of the gradient in it, and where its group says how fast it forgets.
_POWERS = {
    "exp_avg": (1, "betas", 0),
    "exp_avg_sq": (2, "betas", 1),
    "max_exp_avg_sq": (2, "betas", 1),
    "momentum_buffer": (1, "momentum", 0),
}
# Doublings looked back on: gradients of before weigh nothing, and a float holds the square of so many.
_MOST_DOUBLINGS = 400


@dataclass(frozen=True)
class MissingScale:
    """What gradients were divided by: `scale` in the last of `done` steps. A dynamic one (`window` is not None) doubled
    after every `window` steps from `overflow` on, the last step that overflowed, or -1."""

    version: str
    scale: float
    done: int = 0
    overflow: int = -1
    window: int | None = None

    def restore(self, kind: str, moment: Tensor, settings: Mapping[str, Any]) -> Tensor:
        """A moment of the gradients themselves, of a parameter in a group of these `settings`.

        Exact for a scale that stayed the same. Where it doubled, as if gradients had been as large as each other all
        along. Moments of another kind are as they were.
        """
        if kind not in _POWERS:
            return moment
        power, name, place = _POWERS[kind]
        decay = settings.get(name, 0.0)
        if isinstance(decay, list | tuple):
            decay = decay[place] if len(decay) > place else 0.0
        decay = min(max(0.0, number_of(decay, f"{name} of a parameter group")), 1.0)
        return moment * (self.scale**power / self._relative(decay, power))

    def note(self) -> str:
        """What the import says of it."""
        return (
            f"{_fault(self.version, self.scale)}: the moments are multiplied up to those of the gradients themselves, "
            "and the loss scale begins as this job's configuration says. Steps may be larger than DeepSpeed's were, "
            "where its gradients had become as small as the optimizer's eps"
        )

    def _relative(self, decay: float, power: int) -> float:
        """The mean of (scale / the scale of a step)^power over all steps, each weighed as the moment remembers it."""
        total = weights = 0.0
        age = 0
        for steps, smaller in self._runs():
            weight = decay**age * (1 - decay**steps)
            total += weight * smaller**power
            weights += weight
            age += steps
        return total / weights if weights else 1.0

    def _runs(self) -> Iterator[tuple[int, float]]:
        """(steps, `scale` over theirs) of steps with the same scale, the last ones first."""
        if self.window is None:
            return
        doublings, rest = divmod(self.done - self.overflow - 2, self.window)
        yield rest + 1, 1.0
        for number in range(1, min(doublings, _MOST_DOUBLINGS) + 1):
            yield self.window, 2.0**number
        if self.overflow > 0 and doublings <= _MOST_DOUBLINGS:
            yield self.overflow, 2.0 ** (doublings - 1)


def find_missing_scale(version: Any, optimizer: Entry, dtype: torch.dtype) -> MissingScale | None:
    """The scale that is missing in a file of stage 0 by DeepSpeed's `version`, whose `optimizer` runs over copies of
    weights of this dtype; None where none is. Raises CheckpointError for a scale of which no moment is left."""
    numbers = re.match(r"\s*v?(\d{1,6})\.(\d{1,6})\.(\d{1,6})", version) if isinstance(version, str) else None
    if numbers is None or "cur_scale" not in optimizer.values:
        return None
    release = tuple(int(one) for one in numbers.groups())
    if not _FIRST <= release <= (_LAST if dtype == torch.float16 else _LAST_IN_BF16):
        return None
    name = ".".join(numbers.groups())
    scale, done, overflow, window = (
        number_of(optimizer.get(key, default), optimizer.where(key)) for key, default in _OF_SCALES.items()
    )
    if not 0 < scale < _LARGEST:
        raise CheckpointError(
            f"{_fault(name, scale)}: nothing can be made of the moments in {optimizer.path}. Import the weights alone, "
            "with --weights-only"
        )
    if scale == 1:
        return None
    if not optimizer.get("dynamic_loss_scale") or not -1 <= overflow < done - 1 or not window >= 1:
        return MissingScale(name, scale)
    return MissingScale(name, scale, int(done), int(overflow), int(window))


def _fault(version: str, scale: float) -> str:
    return (
        f"DeepSpeed {version} divided the gradients by the loss scale, {scale:g}, though at stage 0 it had not "
        "multiplied the loss by it"
    )
