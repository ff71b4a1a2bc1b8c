"""Where a step stands between its micro-batches: which calls may come next, and whether gradients leave."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

from thinwire.engine.errors import CallError

__all__ = ["Accumulation"]


class Accumulation:
    """Counts the micro-batches of a step, of which there are `steps` unless the user has set the boundary.

    While a backward would only add to the gradients it is inside of `hold`, the optimizer's no_sync: so that a backward
    that nobody announces, a loss's own, leaves alone what has to stay on this rank.

    `micro_batches`: ended since the last boundary. `at_boundary`: whether the current one is the step's last.
    `takes_more`: whether a backward can add to gradients that have left already.
    """

    def __init__(
        self, steps: int, hold: Callable[[], AbstractContextManager[None]], *, takes_more: bool = False
    ) -> None:
        self._steps = steps
        self._takes_more = takes_more
        self._hold = hold
        self._held = ExitStack()
        self._holds = False
        self._boundary: bool | None = None
        self.micro_batches = 0
        self.inside_no_sync = False
        self.ready = False  # whether a backward outside of no_sync has run since the last micro-batch ended
        self._left = False  # and whether its gradients have left
        self._follow()

    @property
    def at_boundary(self) -> bool:
        """Whether the current micro-batch is the step's last."""
        if self._boundary is not None:
            return self._boundary
        return self.micro_batches + 1 >= self._steps

    @property
    def only_adds_up(self) -> bool:
        """Whether a backward only adds to the gradients, which stay on this rank."""
        return self.inside_no_sync or not self.at_boundary

    @property
    def under_way(self) -> bool:
        """Whether a micro-batch of this step has begun, outside of no_sync."""
        return self.ready or self.micro_batches > 0

    def set_steps(self, steps: int) -> None:
        """Have `steps` micro-batches in a step from now on."""
        self._steps = steps
        self._follow()

    def set_boundary(self, boundary: bool | None) -> None:
        """Say whether the current micro-batch is the step's last; None leaves it to the count.

        Raises CallError where its gradients have left already.
        """
        if self._left and boundary is not True:
            raise CallError(
                "set_gradient_accumulation_boundary() was called between the last backward() of a step and its "
                "step(): the gradients have left already. Call it before that backward(), or after step()"
            )
        self._boundary = boundary
        self._follow()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside only add up, and end no micro-batch. Raises CallError where gradients have left already."""
        if self._left:
            raise CallError(
                "no_sync() was entered between the last backward() of a step and its step(): the gradients have left "
                "already. Call step() first, or put that backward() inside of no_sync() too"
            )
        before, self.inside_no_sync = self.inside_no_sync, True
        self._follow()
        try:
            yield
        finally:
            self.inside_no_sync = before
            self._follow()

    def check_backward(self) -> None:
        """Raise CallError where the step's gradients have left, and another backward could not add to them."""
        if self._left and not self._takes_more:
            raise CallError(
                "backward() was called twice without step(), and the gradients of this step left in the first: call "
                "step() after every backward(), it moves the weights at accumulation boundaries only. With several "
                "losses call backward() on their sum, or put all backwards but the last inside `with engine.no_sync():`"
            )
        self._follow()

    def end_backward(self) -> None:
        """Note that a backward has run."""
        self.ready = self.ready or not self.inside_no_sync
        self._left = not self.only_adds_up

    def end_micro_batch(self) -> bool:
        """Count a micro-batch; whether it was the step's last. Raises CallError where none can end."""
        if self.inside_no_sync:
            raise CallError(
                "It is illegal to call Engine.step() inside no_sync context manager: gradients only add up there. Call "
                "it after the block"
            )
        if not self.ready:
            raise CallError("step() was called without backward(): call engine.backward(loss) first")
        last = self.at_boundary
        self.ready = self._left = False
        self.micro_batches += 1
        if not last:
            self._follow()
        return last

    def drop(self) -> None:
        """Forget the micro-batches of the step under way; where the optimizer still has its gradients, it may."""
        self.ready = self._left = False
        self.micro_batches = 0

    def begin_step(self) -> None:
        """Forget the micro-batches of the step before, or of the one under way, as the optimizer has."""
        self.drop()
        self._follow()

    def _follow(self) -> None:
        """Hold the optimizer back, or let it go."""
        if self.only_adds_up == self._holds:
            return
        if self._holds:
            self._held.close()
        else:
            self._held.enter_context(self._hold())
        self._holds = not self._holds
