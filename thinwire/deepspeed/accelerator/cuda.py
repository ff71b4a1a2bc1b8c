"""CUDA as an accelerator."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from thinwire.deepspeed.accelerator.shared import Accelerator

__all__ = ["CudaAccelerator"]


class CudaAccelerator(Accelerator):
    """The GPUs that torch sees; what is not here is asked of torch.cuda."""

    _name = "cuda"
    _communication_backend = "nccl"

    Stream = torch.cuda.Stream
    Event = torch.cuda.Event

    @staticmethod
    def found() -> bool:
        """Whether there is one."""
        return torch.cuda.is_available()

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)

    def device_count(self) -> int:
        """GPUs that this process sees."""
        return torch.cuda.device_count()

    def set_device(self, device_index: int) -> None:
        """Make it the current one."""
        torch.cuda.set_device(device_index)

    def current_device(self) -> int:
        """The number of the current one."""
        return torch.cuda.current_device()

    def current_device_name(self) -> str:
        """torch's name of the current one."""
        return f"cuda:{torch.cuda.current_device()}"

    def synchronize(self, device_index: int | None = None) -> None:
        """Wait until its work is done."""
        torch.cuda.synchronize(device_index)

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Bytes of tensors."""
        return torch.cuda.memory_allocated(device_index)

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        """The most there were."""
        return torch.cuda.max_memory_allocated(device_index)

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        """Forget the most there were."""
        torch.cuda.reset_peak_memory_stats(device_index)

    def empty_cache(self) -> None:
        """Give memory that no tensor holds back."""
        torch.cuda.empty_cache()

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

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        """What is called inside runs on `stream`."""
        return torch.cuda.stream(stream)

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
