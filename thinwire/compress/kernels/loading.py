"""Backends of the kernels, one a kind of device: compiled, or plain torch where there is no compiler for it."""

from __future__ import annotations

import functools
import importlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.compress.kernels import bucket_reference
from thinwire.compress.kernels.adam import AdamStep, plain_adam_step
from thinwire.compress.kernels.buckets import KernelCall


def _cpu() -> Any:
    return importlib.import_module("thinwire.compress.kernels.cpu.backend")


def _cuda() -> Any:
    return importlib.import_module("thinwire.compress.kernels.cuda.backend").make_backend()


_LOADERS: dict[str, Callable[[], Any]] = {"cpu": _cpu, "cuda": _cuda}
_NEEDS = {
    "cpu": ("the CPU kernels need numba, which cannot be imported", "numba"),
    "cuda": (
        "the CUDA kernels need NVIDIA's compiler NVRTC, through cuda.bindings or cupy, which cannot be had",
        "'thinwire[cuda]'",
    ),
}


@functools.cache
def compiled_backend(device: str) -> Any | None:
    """The compiled backend for a kind of device; None where there is none, or no compiler for it: a RuntimeWarning then
    says once that plain torch is used instead, and what to install."""
    if device not in _LOADERS:
        return None
    try:
        return _LOADERS[device]()
    except ImportError as error:
        need, package = _NEEDS[device]
        warnings.warn(
            f"{need} ({error}): plain torch is used instead, several times slower; pip install {package}",
            RuntimeWarning,
            stacklevel=3,
        )
        return None


def prepare_kernels(device: str, names: Sequence[str]) -> None:
    """Have kernels that a run will call compiled beside its first steps, where that takes long enough to be seen."""
    if device == "cpu" and (backend := compiled_backend(device)) is not None:
        backend.prepare(names)


def wait_for_kernels(device: str) -> None:
    """Wait for what `prepare_kernels` has begun."""
    if device == "cpu" and (backend := compiled_backend(device)) is not None:
        backend.wait()


def execute(call: KernelCall, written: Sequence[Tensor | None] = ()) -> None:
    """Check a kernel's arguments and execute it: compiled, or on a device without compiled kernels in plain torch.

    `written`: tensors of a user's that it changes, whose versions are counted up. Raises TypeError or ValueError for
    arguments that do not fit together.
    """
    call.check()
    getattr(compiled_backend(call.device.type) or bucket_reference, call.kernel)(call)
    changed = []
    for one in written:
        if one is not None:
            changed.append(one)
    if changed:
        torch.autograd.graph.increment_version(changed)


def execute_adam_step(call: AdamStep) -> None:
    """Execute a step of Adam, in plain torch what no kernel takes. Raises ValueError for arguments that do not fit."""
    call.check()
    if not call.variances:
        return
    backend = compiled_backend(call.device.type)
    if call.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        backend = None  # the host writes a table for every launch, which replays of a graph would not see
    served = call.served() if hasattr(backend, "adam_step") else []
    if len(served) < len(call.variances):
        plain_adam_step(call.only(sorted(set(range(len(call.variances))) - set(served))))
    if backend is not None and served:
        of_kernel = call if len(served) == len(call.variances) else call.only(served)
        backend.adam_step(of_kernel)
        torch.autograd.graph.increment_version(of_kernel.written)
