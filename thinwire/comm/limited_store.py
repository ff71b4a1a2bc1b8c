"""A torch store that is never waited for without a limit."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from torch.distributed import Store  # type: ignore[attr-defined]

from thinwire.comm.elastic import MembershipError
from thinwire.comm.store_roll_call import within

__all__ = ["LimitedStore"]

Result = TypeVar("Result")


class LimitedStore:
    """What workers write and read at their meeting place, `address`.

    Every call raises MembershipError where the store is lost, or does not answer for `seconds`.
    """

    def __init__(self, store: Store, address: str, seconds: float) -> None:
        self._store = store
        self._address = address
        self._seconds = seconds

    def read(self, key: str) -> str | None:
        """A value, None where there is none yet."""
        return self._ask(lambda: self._store.get(key).decode() if self._store.check([key]) else "") or None

    def write(self, key: str, value: str) -> None:
        """Set a value, which is not empty."""
        self._ask(partial(self._store.set, key, value))

    def add(self, key: str, amount: int) -> int:
        """Add to a number that starts at 0; the sum."""
        return self._ask(lambda: self._store.add(key, amount))

    def propose(self, key: str, value: str) -> str:
        """Set a value where there is none yet; the value that is there then."""
        return self._ask(lambda: self._store.compare_set(key, "", value).decode())

    def _ask(self, question: Callable[[], Result]) -> Result:
        try:
            answer = within(self._seconds, lambda: (question(),))
        except RuntimeError as error:
            raise MembershipError(f"{self._lost}: {error}") from error
        if answer is None:
            raise MembershipError(f"{self._lost} for {self._seconds:g} s")
        return answer[0]

    @property
    def _lost(self) -> str:
        return (
            f"the meeting place {self._address} does not answer, and without it nobody can tell who is in the job. "
            "This worker ends; start the job again, from a checkpoint where there is one"
        )
