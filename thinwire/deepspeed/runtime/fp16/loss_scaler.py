"""deepspeed.runtime.fp16.loss_scaler: the keys of a dynamic loss scale, and fp16's two kinds of scale."""

from __future__ import annotations

from thinwire.engine.loss_scale import DynamicLossScale as DynamicLossScaler
from thinwire.engine.loss_scale import FixedLossScale as LossScaler

__all__ = ["DynamicLossScaler", "LossScaler"]

INITIAL_LOSS_SCALE = "init_scale"
SCALE_WINDOW = "scale_window"
DELAYED_SHIFT = "delayed_shift"
CONSECUTIVE_HYSTERESIS = "consecutive_hysteresis"
MIN_LOSS_SCALE = "min_scale"
