"""Lets `with` blocks unwind when the process is asked to end, so that what they made is removed."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

__all__ = ["unwinding_on_signals"]

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def unwinding_on_signals() -> Iterator[None]:
    """Inside, SIGTERM and SIGHUP raise SystemExit in the main thread, as Ctrl-C raises KeyboardInterrupt."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, _leave) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave(number: int, _: FrameType | None) -> None:
    sys.exit(128 + number)
