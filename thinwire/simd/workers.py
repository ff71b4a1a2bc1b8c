"""Threads for kernels that run without the GIL: they share the parts of one call, the caller's among them; as many as
this process can run at once, by its affinity mask and by the quota of its control groups.

They are Python's, not numba's, whose pool would come on top of torch's and of which one layer allows one caller only.
torch looks at the quota never: a container of 2 cores on a host of 64 gets 64 threads.
"""

from __future__ import annotations

import itertools
import math
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

_QUOTA_SECONDS = 1.0
"""For how long a quota that was read is believed: reading it takes longer than a small kernel."""


class Cores:
    """The cores that the calling thread may use now. ``membership`` and ``mount`` are where Linux tells quotas."""

    def __init__(self, membership: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")) -> None:
        self._membership = membership
        self._mount = mount
        self._quota: float | None = None
        self._believed_until = -math.inf

    def usable(self) -> int:
        """At least 1: the size of the affinity mask, or the quota, rounded up, where that is less."""
        now = time.monotonic()
        if now >= self._believed_until:
            self._quota = self._read_quota()
            self._believed_until = now + _QUOTA_SECONDS
        affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return affinity if self._quota is None else max(1, min(affinity, math.ceil(self._quota)))

    def _read_quota(self) -> float | None:
        """Cores' worth of time that the tightest of this process's control groups grants; None for no limit."""
        try:
            groups = [line.split(":", 2) for line in self._membership.read_text().splitlines()]
        except OSError:
            return None
        quotas = []
        for _, controllers, path in groups:
            if not controllers:
                quotas += [_version_2_quota(folder) for folder in _upwards(self._mount, path)]
            elif "cpu" in controllers.split(","):
                quotas += [_version_1_quota(folder) for folder in _upwards(self._mount / controllers, path)]
        return min((quota for quota in quotas if quota is not None), default=None)


def _upwards(mount: Path, path: str) -> list[Path]:
    """The folder of a control group and of all around it. In a container only some of them, or the mount, exist."""
    inside = Path(path.lstrip("/"))
    return [mount / folder for folder in (inside, *inside.parents)]


def _version_2_quota(folder: Path) -> float | None:
    try:
        quota, period = (folder / "cpu.max").read_text().split()
    except OSError:
        return None
    return None if quota == "max" else int(quota) / int(period)


def _version_1_quota(folder: Path) -> float | None:
    try:
        quota = int((folder / "cpu.cfs_quota_us").read_text())
        period = int((folder / "cpu.cfs_period_us").read_text())
    except OSError:
        return None
    return None if quota < 0 else quota / period


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
