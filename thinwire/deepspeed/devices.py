"""DeepSpeed's accelerator: the device that ranks compute on, CPU or CUDA, asked by its names."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = ["get_accelerator", "is_current_accelerator_supported"]

_PAGE = os.sysconf("SC_PAGE_SIZE")
_KIB = 1024


class _Accelerator:
    """What CPU and CUDA answer alike. `device_index` is the number of one of several of its kind, by default the
    current."""

    _name: str
    _communication_backend: str

    BFloat16Tensor = torch.BFloat16Tensor
    DoubleTensor = torch.DoubleTensor
    FloatTensor = torch.FloatTensor
    HalfTensor = torch.HalfTensor
    LongTensor = torch.LongTensor

    def communication_backend_name(self) -> str:
        """The backend of torch.distributed for tensors on it."""
        return self._communication_backend

    def is_available(self) -> bool:
        """Return True: it is the one that was found."""
        return True

    def is_bf16_supported(self) -> bool:
        """Whether it computes in bf16."""
        return True

    def is_fp16_supported(self) -> bool:
        """Whether it computes in fp16."""
        return True

    def is_triton_supported(self) -> bool:
        """Whether Triton compiles for it."""
        return self._name == "cuda"

    def is_synchronized_device(self) -> bool:
        """Whether a call returns only when its work is done."""
        return self._name == "cpu"

    def supported_dtypes(self) -> list[torch.dtype]:
        """Of weights and activations."""
        return [torch.float32, torch.float16, torch.bfloat16]

    def on_accelerator(self, tensor: Tensor) -> bool:
        """Whether `tensor` lies on it."""
        return tensor.device.type == self._name

    def manual_seed(self, seed: int) -> Any:
        """Seed torch's random numbers."""
        return torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def initial_seed(self) -> int:
        """Return what they were seeded with."""
        return torch.initial_seed()

    def random(self) -> Any:
        """torch.random."""
        return torch.random

    def lazy_call(self, callback: Callable[[], Any]) -> Any:
        """Call it now."""
        return callback()

    def range_push(self, msg: str) -> None:
        """Do nothing: torch.profiler names what runs."""

    def range_pop(self) -> None:
        """Do nothing."""

    def pin_memory(self, tensor: Tensor, align_bytes: int = 1) -> Tensor:
        """The tensor in memory that a GPU can read, if there is one."""
        return tensor.pin_memory() if torch.cuda.is_available() else tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether it lies there."""
        return tensor.is_pinned()

    def visible_devices_envs(self) -> list[str]:
        """Environment variables that say which devices a process sees."""
        return ["CUDA_VISIBLE_DEVICES"]

    def device_name(self, device_index: int | None = None) -> str:
        """torch's name of the device, or of its kind."""
        return self._name if device_index is None or self._name == "cpu" else f"{self._name}:{device_index}"


class _Cpu(_Accelerator):
    """One device, whatever the number of cores; as many ranks share it as were started here."""

    _name = "cpu"
    _communication_backend = "gloo"

    Stream = Event = None

    def device_count(self) -> int:
        """Ranks that were started on this host, or its cores if that is not known."""
        for name in ("LOCAL_SIZE", "LOCAL_WORLD_SIZE"):
            if name in os.environ:
                return int(os.environ[name])
        return os.cpu_count() or 1

    def current_device(self) -> int:
        """This rank's number on its host."""
        return int(os.environ.get("LOCAL_RANK", "0"))

    def current_device_name(self) -> str:
        """The CPU."""
        return "cpu"

    def _nothing(self, device_index: int | None = None) -> None:
        """There is nothing to choose, to wait for or to give back, and no stream."""

    device = set_device = synchronize = current_stream = default_stream = _nothing
    reset_peak_memory_stats = empty_cache = _nothing

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


class _Cuda(_Accelerator):
    """The GPUs that torch sees; what is not here is asked of torch.cuda."""

    _name = "cuda"
    _communication_backend = "nccl"

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)

    def current_device_name(self) -> str:
        """torch's name of the current one."""
        return f"cuda:{torch.cuda.current_device()}"

    def total_memory(self, device_index: int | None = None) -> int:
        """Bytes of the GPU."""
        return torch.cuda.mem_get_info(device_index)[1]

    def available_memory(self, device_index: int | None = None) -> int:
        """Bytes of it that are free."""
        return torch.cuda.mem_get_info(device_index)[0]

    def get_rng_state(self, device_index: int | None = None) -> Tensor:
        """The state of its random numbers."""
        return torch.cuda.get_rng_state(self._device(device_index))

    def set_rng_state(self, new_state: Tensor, device_index: int | None = None) -> None:
        """Go on from such a state."""
        torch.cuda.set_rng_state(new_state, self._device(device_index))

    def is_bf16_supported(self) -> bool:
        """Whether it computes in bf16."""
        return bool(torch.cuda.is_bf16_supported())

    def range_push(self, msg: str) -> None:
        """Name what follows for NVIDIA's profilers."""
        torch.cuda.nvtx.range_push(msg)  # type: ignore[no-untyped-call]

    def range_pop(self) -> None:
        """End the name that was pushed last."""
        torch.cuda.nvtx.range_pop()  # type: ignore[no-untyped-call]

    @staticmethod
    def _device(index: int | None) -> int:
        return torch.cuda.current_device() if index is None else index


@cache
def get_accelerator() -> _Cpu | _Cuda:
    """The device of this process: CUDA if torch finds one, else the CPU."""
    return _Cuda() if torch.cuda.is_available() else _Cpu()


def is_current_accelerator_supported() -> bool:
    """Return True: thinwire runs on both."""
    return True
