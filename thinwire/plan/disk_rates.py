"""Rates of a disk, by the requests, past the page cache, by which optimizer state goes through it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from io import FileIO
from pathlib import Path

from thinwire.comm import Communicator
from thinwire.comm.agreement import on_every_rank
from thinwire.plan.calibration import DiskRates
from thinwire.plan.units import PlanError
from thinwire.zero.disk import IN_MEMORY, REQUEST_BYTES, THREADS, Buffer, file_system, transfer

_FILE_BYTES = 256 << 20
_REPETITIONS = 3

Typical = Callable[[Callable[[], object], int], float]
"""Seconds of what all ranks call at once, the middle of so many times."""


def disk_rates(comm: Communicator, typical: Typical, folder: Path, ranks_per_node: int) -> DiskRates:
    """Write and read a file of every rank in `folder`, all at once: bytes a second of a node. Collective.

    Raises PlanError where the folder cannot be used or is in memory, and ValueError on the other ranks.
    """
    with on_every_rank(comm, partial(_set_aside, folder), "measure its disk", (PlanError,)) as file:
        path, buffer = Path(f"/proc/self/fd/{file.fileno()}"), Buffer(REQUEST_BYTES * THREADS)
        buffer.values.random_()  # a disk may keep zeros, and what repeats, elsewhere

        def request(number: int, writes: bool) -> None:
            start = number % THREADS * REQUEST_BYTES
            view, call = buffer.view[start : start + REQUEST_BYTES], os.pwritev if writes else os.preadv
            transfer(call, path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC, view, number * REQUEST_BYTES)

        with ThreadPoolExecutor(THREADS) as pool:

            def move(kinds: Sequence[bool]) -> None:
                for _ in pool.map(request, range(count), kinds):
                    pass

            count = _FILE_BYTES // REQUEST_BYTES
            runs = [partial(move, kinds * (count // 2)) for kinds in ([True, True], [False, False], [True, False])]
            runs[0]()
            nbytes = ranks_per_node * _FILE_BYTES
            write, read, both = (nbytes / typical(run, _REPETITIONS) for run in runs)
    return DiskRates(read=read, write=write, both=both)


def _set_aside(folder: Path) -> FileIO:
    """A file without a name, read and written past the page cache."""
    if (kind := file_system(folder)) in IN_MEMORY:
        raise PlanError(f"{folder} is {kind}: memory, not a disk. Give a folder of the disk to be measured")
    try:
        file = FileIO(os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC, 0o600), "r+")
        os.posix_fallocate(file.fileno(), 0, _FILE_BYTES)
    except OSError as error:
        raise PlanError(f"the disk of {folder} cannot be measured past the page cache: {error.strerror}") from error
    return file
