"""DeepSpeed's accelerator, the device that ranks compute on, CPU or CUDA, asked by its names; and the builders of its
operations."""

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

    manual_seed = manual_seed_all = staticmethod(torch.manual_seed)
    initial_seed = staticmethod(torch.initial_seed)
    is_pinned = staticmethod(Tensor.is_pinned)

    def communication_backend_name(self) -> str:
        return self._communication_backend

    def _yes(self) -> bool:
        return True

    is_available = is_bf16_supported = is_fp16_supported = _yes

    def is_triton_supported(self) -> bool:
        return self._name == "cuda"

    def is_synchronized_device(self) -> bool:
        return self._name == "cpu"

    def supported_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.float16, torch.bfloat16]

    def on_accelerator(self, tensor: Tensor) -> bool:
        return tensor.device.type == self._name

    def random(self) -> Any:
        return torch.random

    def lazy_call(self, callback: Callable[[], Any]) -> Any:
        return callback()

    def _nothing(self, *_: Any) -> None:
        """Do nothing: torch.profiler names what runs, and a CPU has nothing to choose, to wait for or to give back."""

    range_push = range_pop = _nothing

    def pin_memory(self, tensor: Tensor, align_bytes: int = 1) -> Tensor:
        return tensor.pin_memory() if torch.cuda.is_available() else tensor

    def visible_devices_envs(self) -> list[str]:
        return ["CUDA_VISIBLE_DEVICES"]

    def device_name(self, device_index: int | None = None) -> str:
        return self._name if device_index is None or self._name == "cpu" else f"{self._name}:{device_index}"


class _Cpu(_Accelerator):
    """One device, whatever the number of cores; as many ranks share it as were started here."""

    _name = "cpu"
    _communication_backend = "gloo"

    Stream = Event = None

    def device_count(self) -> int:
        for name in ("LOCAL_SIZE", "LOCAL_WORLD_SIZE"):
            if name in os.environ:
                return int(os.environ[name])
        return os.cpu_count() or 1

    def current_device(self) -> int:
        return int(os.environ.get("LOCAL_RANK", "0"))

    def current_device_name(self) -> str:
        return "cpu"

    device = set_device = synchronize = current_stream = default_stream = _Accelerator._nothing
    reset_peak_memory_stats = empty_cache = _Accelerator._nothing

    def memory_allocated(self, device_index: int | None = None) -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIB

    memory_reserved = memory_cached = memory_allocated
    max_memory_reserved = max_memory_cached = max_memory_allocated

    def total_memory(self, device_index: int | None = None) -> int:
        return os.sysconf("SC_PHYS_PAGES") * _PAGE

    def available_memory(self, device_index: int | None = None) -> int:
        return os.sysconf("SC_AVPHYS_PAGES") * _PAGE

    def get_rng_state(self, device_index: int | None = None) -> Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, new_state: Tensor, device_index: int | None = None) -> None:
        torch.set_rng_state(new_state)

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        return nullcontext()


class _Cuda(_Accelerator):
    """The GPUs that torch sees; what is not here is asked of torch.cuda."""

    _name = "cuda"
    _communication_backend = "nccl"

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)

    def current_device_name(self) -> str:
        return f"cuda:{torch.cuda.current_device()}"

    def total_memory(self, device_index: int | None = None) -> int:
        return torch.cuda.mem_get_info(device_index)[1]

    def available_memory(self, device_index: int | None = None) -> int:
        return torch.cuda.mem_get_info(device_index)[0]

    def get_rng_state(self, device_index: int | None = None) -> Tensor:
        return torch.cuda.get_rng_state(self._device(device_index))

    def set_rng_state(self, new_state: Tensor, device_index: int | None = None) -> None:
        torch.cuda.set_rng_state(new_state, self._device(device_index))

    is_bf16_supported = staticmethod(torch.cuda.is_bf16_supported)
    range_push, range_pop = staticmethod(torch.cuda.nvtx.range_push), staticmethod(torch.cuda.nvtx.range_pop)

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


# Builders, which only say what there is: kernels are compiled when they are first used

git_hash = git_branch = None
installed_ops: dict[str, bool] = {}
_OPERATIONS = {
    "FusedAdamBuilder": ("fused_adam", True),
    "CPUAdamBuilder": ("cpu_adam", True),
    "CPUAdagradBuilder": ("cpu_adagrad", True),
    "FusedLambBuilder": ("fused_lamb", True),
    "FusedLionBuilder": ("fused_lion", True),
    "CPULionBuilder": ("cpu_lion", True),
    "SparseAttnBuilder": ("sparse_attn", True),
    "AsyncIOBuilder": ("async_io", False),  # for swapping to NVMe, which here needs no extension
    "QuantizerBuilder": ("quantizer", False),
    "FPQuantizerBuilder": ("fp_quantizer", False),
    "TransformerBuilder": ("transformer", False),
    "InferenceBuilder": ("transformer_inference", False),
    "EvoformerAttnBuilder": ("evoformer_attn", False),
}
compatible_ops = dict(_OPERATIONS.values())

torch_info = {
    "version": ".".join(torch.__version__.split(".")[:2]),
    "cuda_version": torch.version.cuda or "0.0",
    "nccl_version": "0.0",
    "hip_version": torch.version.hip or "0.0",
}


class OpBuilder:
    """The name of an operation, and whether it works here."""

    NAME = ""

    def is_compatible(self, verbose: bool = False) -> bool:
        """Whether it is among those that thinwire has."""
        return compatible_ops.get(self.NAME, True)

    @staticmethod
    def installed_rocm_version() -> tuple[int, int]:
        """(0, 0): thinwire does not build for ROCm."""
        return 0, 0


def __getattr__(name: str) -> type[OpBuilder]:
    """A builder, by its class's name."""
    if name not in _OPERATIONS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    builder = type(name, (OpBuilder,), {"NAME": _OPERATIONS[name][0], "__module__": __name__})
    globals()[name] = builder
    return builder
