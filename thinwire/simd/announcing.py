"""One line when kernels begin to be compiled: it takes seconds, in which a training would seem to hang."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

from numba.core import event

__all__ = ["announce_compiling"]

# Of torchrun, Open MPI, other MPIs and Slurm: any of them tells a later rank, which says nothing.
_RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")


def announce_compiling(kernel: Callable[..., object]) -> None:
    """Say so when `kernel`, or another that was announced, is the first to be compiled and not read from disk.

    The first rank says it, through `logging`, whose handlers and levels apply.
    """
    _first_compilation().kernels.add(kernel)


@functools.cache
def _first_compilation() -> _FirstCompilation:
    found = _FirstCompilation()
    event.register("numba:compile", found)  # type: ignore[no-untyped-call]
    return found


class _FirstCompilation(event.Listener):
    """Hears of all that numba compiles in this process, of which much is the user's own."""

    def __init__(self) -> None:
        self.kernels: WeakSet[Callable[..., object]] = WeakSet()
        self._silent = any(os.environ.get(name, "0") != "0" for name in _RANK_VARIABLES)

    def on_start(self, event: Any) -> None:
        if not self._silent and event.data["dispatcher"].py_func in self.kernels:
            self._silent = True
            logging.getLogger(__name__).warning(
                "thinwire: compiling kernels for this processor, which takes seconds; the machine code is kept"
            )

    def on_end(self, event: Any) -> None:
        """Nothing: what was waited for goes on."""
