"""Which steps of 0/1 Adam send what: the intervals between exact averages, and between two syncs, as functions of how
far training is, so that ranks cannot disagree about them."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.optim.algorithm import Send
from thinwire.optim.options import check_count

__all__ = ["ZeroOneSchedule"]


@dataclass(frozen=True)
class ZeroOneSchedule:
    """The policies T_v and T_u of 0/1 Adam (Lu et al. 2022, arXiv 2202.06009), with DeepSpeed's names.

    The variance is updated at steps divisible by an interval that begins at 1 and doubles every `var_update_scaler`
    updates. Once it is frozen, ranks meet at steps divisible by an interval that begins at 1, doubles every
    `local_step_scaler` steps, and stays at or below `local_step_clipper`.

    Raises ValueError where one of them is not a whole number of at least 1.
    """

    var_update_scaler: int
    local_step_scaler: int
    local_step_clipper: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            check_count(name, value)

    def variance_interval(self, updates: int) -> int:
        """Steps between two updates of the variance, after `updates` of them."""
        return 1 << (updates // self.var_update_scaler)

    def local_interval(self, frozen_steps: int) -> int:
        """Steps between two syncs, after `frozen_steps` steps with a frozen variance."""
        doublings = min(frozen_steps // self.local_step_scaler, self.local_step_clipper.bit_length())
        return min(1 << doublings, self.local_step_clipper)

    def send(self, step: int, variance_updates: int, frozen_at: int | None) -> Send:
        """What step `step`, from 1 on, sends; `frozen_at` is the last step before the variance was frozen."""
        if frozen_at is None:
            exact = step % self.variance_interval(variance_updates) == 0
            return Send.EXACT if exact else Send.COMPRESSED
        sync = step % self.local_interval(step - 1 - frozen_at) == 0
        return Send.SYNC if sync else Send.LOCAL
