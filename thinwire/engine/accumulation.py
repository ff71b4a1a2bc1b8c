"""Where a step stands between its micro-batches: which calls may come next, and whether gradients leave."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["Accumulation"]


class Accumulation:
    """Counts the micro-batches of a step, of which there are `steps` unless `boundary` says otherwise.

    `micro_batches`: ended since the last boundary. `boundary`: whether the current micro-batch is the step's last, as
    the user has set it; None leaves it to the count.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.micro_batches = 0
        self.boundary: bool | None = None
        self.inside_no_sync = False
        self._ready = False  # whether a backward outside of no_sync has run since the last micro-batch ended

    @property
    def at_boundary(self) -> bool:
        """Whether the current micro-batch is the step's last."""
        if self.boundary is not None:
            return self.boundary
        return self.micro_batches + 1 >= self.steps

    @property
    def only_adds_up(self) -> bool:
        """Whether a backward only adds to the gradients, which stay on this rank."""
        return self.inside_no_sync or not self.at_boundary

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside only add up, and end no micro-batch."""
        before, self.inside_no_sync = self.inside_no_sync, True
        try:
            yield
        finally:
            self.inside_no_sync = before

    def check_backward(self) -> None:
        """Raise RuntimeError where a backward has run and no micro-batch has ended since."""
        if self._ready:
            raise RuntimeError(
                "backward() was called twice without step(): call step() after every backward(), it moves the weights "
                "at accumulation boundaries only; or put the earlier backwards inside `with engine.no_sync():`"
            )

    def end_backward(self) -> None:
        """Note that a backward has run."""
        self._ready = not self.inside_no_sync

    def end_micro_batch(self) -> bool:
        """Count a micro-batch; whether it was the step's last. Raises RuntimeError where none can end."""
        if self.inside_no_sync:
            raise RuntimeError("step() was called inside no_sync(), where gradients only add up: call it after")
        if not self._ready:
            raise RuntimeError("step() was called without backward(): call engine.backward(loss) first")
        last = self.at_boundary
        self._ready = False
        self.micro_batches += 1
        return last

    def begin_step(self) -> None:
        """Forget the micro-batches of the step before, or of the one under way."""
        self._ready = False
        self.micro_batches = 0
