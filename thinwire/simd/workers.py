"""Threads for kernels that run without the GIL: they share the parts of one call, the caller's among them."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

__all__ = ["Workers"]


class Workers:
    """A pool of threads. Nothing on it waits for another, so that any number of Python threads may call at once."""

    def __init__(self) -> None:
        self._start()
        os.register_at_fork(after_in_child=self._start)  # threads do not survive a fork

    def _start(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=os.cpu_count(), thread_name_prefix="thinwire-kernel")

    def each(self, work: Callable[[int], None], parts: int, threads: int) -> None:
        """Run work(part) for every part, on at most `threads` threads; whoever is free takes the next one."""
        following = itertools.count()

        def take() -> None:
            while (part := next(following)) < parts:
                work(part)

        futures = [self._pool.submit(take) for _ in range(min(threads, parts) - 1)]
        try:
            take()
        finally:
            for future in futures:
                future.result()
