"""A loss scale as scripts written for DeepSpeed read it."""

from __future__ import annotations

from thinwire.engine.loss_scale import DynamicLossScale, LossScale
from thinwire.engine.optimizers import EngineOptimizer

__all__ = ["LossScaleConfig"]


class LossScaleConfig:
    """`optimizer.loss_scale_config` and `.loss_scaler` of an engine: its loss scale as it is now, read only. Without
    fp16 it is always 1.

    What only a dynamic scale has is an AttributeError of others.
    """

    def __init__(self, loss_scale: LossScale | None) -> None:
        self._loss_scale = loss_scale

    def show_on(self, optimizer: EngineOptimizer) -> None:
        """Have an engine's optimizer answer for its loss scale."""
        optimizer.loss_scale_config = optimizer.loss_scaler = self
        optimizer.dynamic_loss_scale = self.dynamic_loss_scale

    @property
    def dynamic_loss_scale(self) -> bool:
        """Whether it follows from overflows."""
        return isinstance(self._loss_scale, DynamicLossScale)

    @property
    def cur_scale(self) -> float:
        """The scale of the step to come."""
        return 1.0 if self._loss_scale is None else self._loss_scale.value

    @property
    def loss_scale(self) -> float:
        """`cur_scale`, by its other name."""
        return self.cur_scale

    @property
    def cur_iter(self) -> int:
        """Steps that were noted, skipped ones included; 0 without fp16."""
        return 0 if self._loss_scale is None else self._loss_scale.iterations

    @property
    def scale_factor(self) -> float:
        """What it is multiplied and divided by."""
        self._dynamic("scale_factor")
        return 2.0

    @property
    def scale_window(self) -> int:
        """Steps without an overflow after which it grows."""
        return self._dynamic("scale_window").window

    @property
    def min_loss_scale(self) -> float:
        """What it does not fall below."""
        return self._dynamic("min_loss_scale").minimum

    def _dynamic(self, name: str) -> DynamicLossScale:
        if not isinstance(self._loss_scale, DynamicLossScale):
            raise AttributeError(f"a loss scale that is not dynamic has no {name}")
        return self._loss_scale
