"""What both homes of algorithms tell of them."""

from __future__ import annotations

from abc import abstractmethod

from thinwire.optim.algorithm import Algorithm
from thinwire.zero.home import Home

__all__ = ["AlgorithmHome", "check_may_leave_out"]


class AlgorithmHome(Home):
    """A Home in which an algorithm lives."""

    @property
    @abstractmethod
    def algorithms(self) -> list[Algorithm]:
        """One for each freeze group."""

    @property
    @abstractmethod
    def frozen(self) -> bool:
        """Whether all parameters' steps are compressed."""

    @property
    def left_out_steps(self) -> int:
        """Local steps to which this rank added nothing, as its gradient was not finite."""
        return 0


def check_may_leave_out(algorithm: Algorithm) -> None:
    """Raise RuntimeError where a step cannot leave parameters out."""
    if algorithm.local_steps:
        raise RuntimeError(
            "an optimizer with local steps leaves no parameters out of a step: to agree on what to leave out takes a "
            "message, and local steps send none. Without a gradient on any rank they count as zero by themselves"
        )
