"""Peak memory of some work, exact, from Linux's own count of a process's pages; and the tensors of a process.

Measure in a process of its own, started by `measure_alone`: what earlier work has left would hide the peak.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import TypeVar
from unittest.mock import patch

import torch
from torch import Tensor

from experiments.common.errors import InputError
from thinwire.zero.memory import live_tensor_bytes, with_subclasses

__all__ = ["RETURNING", "PeakMemory", "check_supported", "measure_alone", "process_tensor_bytes", "status_bytes"]

Measured = TypeVar("Measured")

_STATUS, _RESET = Path("/proc/self/status"), Path("/proc/self/clear_refs")
# The number that resets the peak, of proc(5).
_RESET_PEAK = "5"
RETURNING = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
"""Variables by which memory goes back to the system as soon as it is freed, so that only what is alive counts."""


class PeakMemory:
    """A context that finds how many bytes its body needed at most, beyond what was there before.

    Attributes:
        extra: those bytes, once the context is left.
    """

    extra = 0

    def __enter__(self) -> PeakMemory:
        """Takes what is there now as the start."""
        gc.collect()
        _RESET.write_text(_RESET_PEAK)
        self._before = status_bytes("VmRSS")
        return self

    def __exit__(self, *_: object) -> None:
        """Reads the peak."""
        self.extra = status_bytes("VmHWM") - self._before


def check_supported() -> None:
    """Raises `InputError` where a process cannot reset its own peak."""
    try:
        _RESET.write_text(_RESET_PEAK)
        status_bytes("VmHWM")
    except (OSError, StopIteration) as error:
        raise InputError("peak memory is read from Linux's /proc, which is not there: run this on Linux") from error


def measure_alone(work: Callable[..., Measured], *arguments: object, imported_before: Sequence[str] = ()) -> Measured:
    """What `work`, a function of a module, returns in a fresh process, on as many threads as this one uses.

    `imported_before` names modules that take long to import, for a server that forks all such processes.

    Raises:
        RuntimeError: the process was ended, for want of memory perhaps.
    """
    # The processes of a server that has imported all this start in no time, and it has never worked itself.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([work.__module__, *imported_before, *_main_module()])
    with (
        patch.dict(os.environ, RETURNING),
        ProcessPoolExecutor(1, context, initializer=_begin, initargs=(torch.get_num_threads(),)) as pool,
    ):
        try:
            return pool.submit(work, *arguments).result()
        except BrokenProcessPool as error:
            what = f"{work.__module__}.{work.__name__}{arguments}"
            raise RuntimeError(f"{what} was ended, for want of memory perhaps: measure shorter sequences") from error


def _main_module() -> list[str]:
    """What `python -m` runs, if it does: every process imports that, and all that it imports."""
    spec = sys.modules["__main__"].__spec__
    return [] if spec is None else [spec.name]


def _begin(threads: int) -> None:
    """Prepares a process to measure in."""
    torch.set_num_threads(threads)
    # What was imported stays: looking through millions of objects for garbage would take longer than most work.
    gc.freeze()


def status_bytes(name: str) -> int:
    """What /proc says of this process, as of its VmRSS."""
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return 1024 * int(line.split()[1])


def process_tensor_bytes() -> dict[str, int]:
    """Bytes of all tensors that Python knows in this process, by device, each storage once.

    Where ranks are threads this is all of them together. Tensors that only autograd or C++ holds are not seen. It takes
    some tens of milliseconds a million objects of the process.
    """
    # Goes by an object's type, as `isinstance` would run the code of proxies. A list of all objects to search would
    # break other threads: one that fills a tuple from a generator fails where another object refers to it meanwhile.
    kinds = with_subclasses([Tensor])
    everything = [one for one in gc.get_referrers(*kinds) if type(one) in kinds]
    total: dict[str, int] = {}
    for (_, device), nbytes in live_tensor_bytes(everything).items():
        total[device] = total.get(device, 0) + nbytes
    return total
