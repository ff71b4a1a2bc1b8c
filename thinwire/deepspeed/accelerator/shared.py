"""What DeepSpeed's scripts ask of an accelerator, where CPU and CUDA answer alike."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

__all__ = ["Accelerator"]


class Accelerator(ABC):
    """A device, by DeepSpeed's names. `index` is the number of one of several of its kind, by default the current."""

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
        """Always: it is the one that was found."""
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
        """What they were seeded with."""
        return torch.initial_seed()

    def random(self) -> Any:
        """torch.random."""
        return torch.random

    def lazy_call(self, callback: Callable[[], Any]) -> Any:
        """Call it now."""
        return callback()

    def range_push(self, msg: str) -> None:
        """Nothing: torch.profiler names what runs."""

    def range_pop(self) -> None:
        """Nothing."""

    def pin_memory(self, tensor: Tensor, align_bytes: int = 1) -> Tensor:
        """The tensor in memory that a GPU can read, where there is one."""
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

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """Forget the most that was held, where that is counted."""

    def empty_cache(self) -> None:
        """Give memory that no tensor holds back."""

    @abstractmethod
    def device_count(self) -> int:
        """Devices of its kind that this process sees."""

    @abstractmethod
    def set_device(self, device_index: int) -> None:
        """Make it the current one."""

    @abstractmethod
    def current_device(self) -> int:
        """The number of the current one."""

    @abstractmethod
    def current_device_name(self) -> str:
        """torch's name of the current one."""

    @abstractmethod
    def synchronize(self, device_index: int | None = None) -> None:
        """Wait until its work is done."""

    @abstractmethod
    def memory_allocated(self, device_index: int | None = None) -> int:
        """Bytes held: by tensors on a GPU, by the process on a CPU."""

    @abstractmethod
    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """The most bytes held."""

    @abstractmethod
    def total_memory(self, device_index: int | None = None) -> int:
        """Bytes there are."""

    @abstractmethod
    def get_rng_state(self, device_index: int | None = None) -> Tensor:
        """The state of its random numbers."""

    @abstractmethod
    def set_rng_state(self, new_state: Tensor, device_index: int | None = None) -> None:
        """Go on from such a state."""

    @abstractmethod
    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        """What is called inside runs on `stream`."""
