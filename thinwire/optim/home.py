"""The base of both homes of algorithms, and the errors that both raise."""

from __future__ import annotations

from abc import abstractmethod

from thinwire.optim.algorithm import Algorithm, Clock, LocalSteps
from thinwire.zero.home import Home

__all__ = ["AlgorithmHome", "check_averages", "check_in_sync", "check_may_leave_out", "check_may_write", "check_plain"]


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
    if isinstance(algorithm, LocalSteps):
        raise RuntimeError(
            "an optimizer with local steps leaves no parameters out of a step: to agree on what to leave out takes a "
            "message, and local steps send none. Without a gradient on any rank they count as zero by themselves"
        )


def check_plain(algorithm: Algorithm, clock: Clock, kind: str) -> None:
    """Raise RuntimeError where state of this kind has another meaning, or other values on every rank, by now."""
    if clock.frozen and algorithm.frozen_state:
        raise RuntimeError(
            f"the optimizer has been frozen since step {clock.frozen_at}: what it keeps instead of {kind!r} is what "
            "compressed steps send and move by, no moment of the gradients. Read and set optimizer state before the "
            "freeze"
        )


def check_may_write(algorithm: Algorithm, clock: Clock, kind: str) -> None:
    """Raise RuntimeError where state of this kind cannot be written without other state that follows from it."""
    check_plain(algorithm, clock, kind)
    if isinstance(algorithm, LocalSteps) and algorithm.published:
        raise RuntimeError(
            f"{kind!r} of this optimizer cannot be set: it keeps {', '.join(algorithm.published)} beside it, found at "
            "an earlier step, which would not follow. Set weights, or load a checkpoint"
        )


def check_averages(exact: bool) -> None:
    """Raise RuntimeError unless the step in flight averages gradients."""
    if not exact:
        raise RuntimeError(
            "there is no averaged gradient: the optimizer's steps are compressed by now, and ranks send momenta "
            "instead of gradients. `.grad` holds this rank's own"
        )


def check_in_sync(in_sync: bool) -> None:
    """Raise RuntimeError where ranks hold different weights."""
    if not in_sync:
        raise RuntimeError(
            "ranks hold different weights between two syncs: call optimizer.synchronize_weights() on every rank before "
            "you read or set them"
        )
