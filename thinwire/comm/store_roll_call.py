"""Roll calls through the key-value store that every torch job has.

The store may itself be lost or stopped with rank 0, so that nothing here waits for it without a limit.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TypeVar

from torch.distributed import Store  # type: ignore[attr-defined]

from thinwire.comm.failure import ROLL_CALL_SECONDS, Call, RollCall

__all__ = ["StoreRollCall", "within"]

Result = TypeVar("Result")

_POLL_SECONDS = 0.05
_STORE_SECONDS = 1.0


class StoreRollCall:
    """Roll calls of one communicator. ``host`` is the rank that serves the store, None if it is no rank."""

    def __init__(self, store: Store, rank: int, size: int, host: int | None) -> None:
        self._store = store
        self._rank = rank
        self._size = size
        self._host = host

    def alarmed(self) -> bool:
        """Whether a rank has opened the roll call, or the store is lost, which is a failure as well."""
        try:
            return bool(within(_STORE_SECONDS, lambda: self._store.check(["alarm"])))
        except RuntimeError:
            return True

    def hold(self, call: Call) -> RollCall:
        """Say where this rank stands and collect what the others say, for ``ROLL_CALL_SECONDS`` at most."""
        answers: dict[int, Call] = {}
        try:
            complete = within(ROLL_CALL_SECONDS + _STORE_SECONDS, lambda: self._collect(call, answers))
        except RuntimeError:
            complete = None
        if complete is None:
            return self._without_store()
        absent = [rank for rank in range(self._size) if rank not in answers]
        return RollCall(answers, tuple(absent))

    def _collect(self, call: Call, answers: dict[int, Call]) -> bool:
        deadline = time.monotonic() + ROLL_CALL_SECONDS
        self._store.set(f"at/{self._rank}", call.encode().decode())
        self._store.set("alarm", "1")
        while len(answers) < self._size and time.monotonic() < deadline:
            for rank in self._present("at", set(range(self._size)) - answers.keys()):
                answers[rank] = Call.decode(self._store.get(f"at/{rank}"))
            time.sleep(_POLL_SECONDS)
        self._store.set(f"left/{self._rank}", "1")
        # The store dies with its host: it stays until all who answered have read the answers.
        readers = set(answers) if self._rank == self._host else set()
        while readers and time.monotonic() < deadline:
            readers -= self._present("left", readers)
            time.sleep(_POLL_SECONDS)
        return True

    def _present(self, kind: str, ranks: set[int]) -> set[int]:
        return {rank for rank in ranks if self._store.check([f"{kind}/{rank}"])}

    def _without_store(self) -> RollCall:
        if self._host is None or self._host == self._rank:
            return RollCall({}, (), "the job's store does not answer either, so nobody can be named")
        return RollCall({}, (self._host,), "it serves the job's store, so the other ranks are unknown")


def within(seconds: float, ask: Callable[[], Result]) -> Result | None:
    """``ask()``, or None if it takes longer than ``seconds``; its exception if it raises one."""
    answer: list[Result] = []
    error: list[BaseException] = []

    def work() -> None:
        try:
            answer.append(ask())
        except Exception as raised:
            error.append(raised)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    if error:
        raise error[0]
    return answer[0] if answer else None
