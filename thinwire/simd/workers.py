"""Threads for kernels that run without the GIL: they share the parts of one call, the caller's among them.

They are Python's, not numba's, whose pool would come on top of torch's and of which one layer allows one caller only.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from thinwire.simd.cores import Cores

__all__ = ["Workers"]


class Workers:
    """A pool of threads. Nothing on it waits for another, so that any number of Python threads may call at once."""

    def __init__(self, cores: Cores | None = None) -> None:
        self._cores = Cores() if cores is None else cores
        self._start()
        os.register_at_fork(after_in_child=self._start)  # threads do not survive a fork

    def _start(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=os.cpu_count(), thread_name_prefix="thinwire-kernel")

    def threads(self) -> int:
        """How many threads a call should use now: torch's number, but no more than this process may run at once."""
        wanted = torch.get_num_threads()
        return wanted if wanted == 1 else min(wanted, self._cores.usable())

    def each(self, work: Callable[[int], None], parts: int, threads: int) -> None:
        """Run work(part) for every part, on at most `threads` threads; whoever is free takes the next one.

        They all run on cores on which the caller may run: on its own NUMA node, if it is bound to one.
        """
        following = itertools.count()

        def take() -> None:
            while (part := next(following)) < parts:
                work(part)

        helpers = min(threads, parts) - 1
        help_out = _on_cores_of_caller(take) if helpers > 0 else take
        futures = [self._pool.submit(help_out) for _ in range(helpers)]
        try:
            take()
        finally:
            for future in futures:
                future.result()


def _on_cores_of_caller(take: Callable[[], None]) -> Callable[[], None]:
    if not hasattr(os, "sched_getaffinity"):
        return take
    allowed = os.sched_getaffinity(0)

    def bind_and_take() -> None:
        if os.sched_getaffinity(0) != allowed:
            os.sched_setaffinity(0, allowed)
        take()

    return bind_and_take
