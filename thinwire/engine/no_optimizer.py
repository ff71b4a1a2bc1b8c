"""What stands in an optimizer's place where a model is only evaluated."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from thinwire.comm import Traffic
from thinwire.engine.errors import CallError
from thinwire.zero.home import NOT_STEPPED
from thinwire.zero.saved_state import SavedSlice, SliceSource

__all__ = ["NoOptimizer", "check_trains"]


class NoOptimizer:
    """An optimizer's surface, as far as engine and checkpoints reach it without a step: it holds no parameter, so that
    all of a model's weights are among those that no optimizer holds.

    `traffic`: of a model that gathers its own weights.
    """

    last_step = NOT_STEPPED

    def __init__(self, traffic: Traffic | None) -> None:
        self.param_groups: list[dict[str, Any]] = []
        self.loss_scale = 1.0
        self._traffic = traffic

    @property
    def bytes_sent(self) -> int:
        """Bytes this rank has sent to gather parameters."""
        return 0 if self._traffic is None else self._traffic.bytes_sent

    def model_state_bytes(self) -> dict[str, float]:
        """Nothing: there are no gradients, master weights or moments."""
        return {}

    def step(self) -> None:
        """Raise CallError."""
        check_trains(self, "step")

    def end_backward(self) -> None:
        """Raise CallError."""
        check_trains(self, "end_backward")

    def leave_out(self, parameters: Iterable[Tensor]) -> None:
        """Nothing: no gradient leaves."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Nothing leaves inside, nor outside."""
        yield

    def zero_grad(self) -> None:
        """Nothing."""

    def synchronize_weights(self) -> None:
        """Nothing: no rank's weights move."""

    def wait_for_weights(self) -> None:
        """Nothing to wait for."""

    def close(self) -> None:
        """Nothing to release."""

    # Checkpoints

    def saved_slices(self) -> list[SavedSlice]:
        """None."""
        return []

    def rank_tensors(self) -> dict[str, Any]:
        """None."""
        return {}

    def counters(self) -> dict[str, Any]:
        """As those of an optimizer without parameters."""
        return {"optimizer": "none", "groups": []}

    def load(self, source: SliceSource) -> None:
        """Leave the optimizer's state where it is."""

    def load_weights(self, source: SliceSource) -> None:
        """Nothing."""

    def reset_state(self) -> None:
        """Nothing."""


def check_trains(optimizer: object, call: str) -> None:
    """Raise CallError where there is no optimizer to call anything on."""
    if isinstance(optimizer, NoOptimizer):
        raise CallError(
            f"{call}() was called on an engine without an optimizer, which evaluates only: to train, pass one to "
            'thinwire.initialize, or give the configuration an "optimizer" section, for example {"type": "AdamW", '
            '"params": {"lr": 1e-4}}'
        )
