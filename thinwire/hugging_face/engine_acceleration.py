"""An accelerator, an optimizer and a schedule as a Trainer calls them, that leave the work to the engine."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor

from thinwire.engine import Engine
from thinwire.hugging_face.acceleration import never_wrap_models
from thinwire.hugging_face.checks import refuse_clipping_by_value
from thinwire.hugging_face.engine_training import EngineTraining

__all__ = ["EngineSchedule", "EngineStep", "adapt_accelerator_to_engine"]


def adapt_accelerator_to_engine(accelerator: Accelerator, training: EngineTraining) -> None:
    """Replace what an accelerator does with models and gradients."""
    plug = _Plug(accelerator, training)
    # Precision is the engine's.
    accelerator.native_amp = False
    accelerator.scaler = None
    never_wrap_models(accelerator)
    accelerator.backward = plug.backward
    accelerator.no_sync = lambda model: nullcontext()
    accelerator.clip_grad_norm_ = plug.clip_grad_norm_
    accelerator.clip_grad_value_ = refuse_clipping_by_value


class _Plug:
    """The methods that take the place of an accelerator's own."""

    def __init__(self, accelerator: Accelerator, training: EngineTraining) -> None:
        self._accelerator = accelerator
        self._training = training

    def backward(self, loss: Tensor) -> None:
        """One micro-batch's; the Trainer has divided its loss, and says whether it is the step's last."""
        self._training.backward(loss, last=self._accelerator.sync_gradients)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        """Leave it to the engine, whose step clips the averaged gradient; NaN, as the norm is not known yet.

        Raises ValueError for another norm than the configuration's.
        """
        del parameters
        clipping = self._training.running.settings.gradient_clipping
        if (max_norm != math.inf and max_norm != clipping) or norm_type != 2:
            raise ValueError(
                f"clip_grad_norm_(max_norm={max_norm}, norm_type={norm_type}) was called, and the engine clips the "
                f'averaged gradient to a 2-norm of {clipping}: set "gradient_clipping" and max_grad_norm'
            )
        return torch.tensor(math.nan)


class EngineStep(AcceleratedOptimizer):  # type: ignore[misc]
    """What a Trainer takes for its optimizer: its step is the engine's. `rate`: of the first group, in the last step
    that was taken, or in the first to come."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine.optimizer, device_placement=False, scaler=None)
        self._engine = engine
        self.rate = engine.get_lr()[0]

    def step(self, closure: None = None) -> None:
        """End the micro-batch and with it the step; raises what `Engine.step` raises. Collective."""
        if closure is not None:
            raise TypeError("the engine's step takes no closure: call backward() before it")
        if self.gradient_state.sync_gradients:
            self.rate = self._engine.get_lr()[0]
            self._engine.step()

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Nothing is left to reset: a step forgets its gradients."""

    def train(self) -> None:
        """Nothing: see `eval`."""

    def eval(self) -> None:
        """Nothing: the engine gives all ranks the same weights when its model is evaluated."""

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last step was not applied."""
        return not self._engine.was_step_applied()


class EngineSchedule:
    """What a Trainer takes for its schedule, which the engine steps. Other attributes are the schedule's own."""

    def __init__(self, training: EngineTraining) -> None:
        self._schedule = training.schedule

    def step(self) -> None:
        """Nothing: the engine has stepped it."""

    def __getattr__(self, name: str) -> Any:
        if name == "_schedule":  # not there yet: do not look for it in itself
            raise AttributeError(name)
        return getattr(self._schedule, name)
