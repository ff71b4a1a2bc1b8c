"""The CPU as an accelerator."""

from __future__ import annotations

import os
import resource
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinwire.deepspeed.accelerator.shared import Accelerator

__all__ = ["CpuAccelerator"]

_PAGE = os.sysconf("SC_PAGE_SIZE")
_KIB = 1024


class CpuAccelerator(Accelerator):
    """One device, whatever the number of cores; as many ranks share it as were started here."""

    _name = "cpu"
    _communication_backend = "gloo"

    Stream = Event = None

    def device(self, device_index: int | None = None) -> None:
        """Nothing to choose."""

    def device_count(self) -> int:
        """Ranks that were started on this host, or its cores where that is not known."""
        for name in ("LOCAL_SIZE", "LOCAL_WORLD_SIZE"):
            if name in os.environ:
                return int(os.environ[name])
        return os.cpu_count() or 1

    def set_device(self, device_index: int) -> None:
        """Nothing to choose."""

    def current_device(self) -> int:
        """This rank's number on its host."""
        return int(os.environ.get("LOCAL_RANK", "0"))

    def current_device_name(self) -> str:
        """The CPU."""
        return "cpu"

    def synchronize(self, device_index: int | None = None) -> None:
        """Nothing to wait for."""

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Bytes of memory that this process holds."""
        return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """The most it has held."""
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIB

    memory_reserved = memory_cached = memory_allocated
    max_memory_reserved = max_memory_cached = max_memory_allocated

    def total_memory(self, device_index: int | None = None) -> int:
        """Bytes of this host."""
        return os.sysconf("SC_PHYS_PAGES") * _PAGE

    def available_memory(self, device_index: int | None = None) -> int:
        """Bytes of it that are free."""
        return os.sysconf("SC_AVPHYS_PAGES") * _PAGE

    def get_rng_state(self, device_index: int | None = None) -> Tensor:
        """The state of torch's random numbers."""
        return torch.get_rng_state()

    def set_rng_state(self, new_state: Tensor, device_index: int | None = None) -> None:
        """Go on from such a state."""
        torch.set_rng_state(new_state)

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        """There are none."""
        return nullcontext()

    def current_stream(self, device_index: int | None = None) -> None:
        """There is none."""

    default_stream = current_stream
