"""Kernels over whole buckets for the device: the CPU's on its memory, or the CUDA backend with all of its tables and
launches, which the emulated GPU runs."""

from __future__ import annotations

import dataclasses
import importlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tests.compress.kernels import emulation
from tests.fake_device.graphs import recording
from thinwire.compress.kernels import loading
from thinwire.compress.kernels.cuda.backend import CudaBackend
from thinwire.compress.kernels.cuda.launch import Launch

__all__ = ["HostBuckets", "on_an_emulated_gpu", "serve_buckets"]

_NAME = "fake"


class HostBuckets:
    """One launch a call, as on a GPU."""

    def __getattr__(self, kernel: str) -> Any:
        if kernel == "adam_step":  # plain torch's, whose launches are counted one by one
            raise AttributeError(kernel)
        backend = importlib.import_module("thinwire.compress.kernels.cpu.backend")

        def run(call: Any) -> None:
            torch.ops.fake_device.launched(f"buckets::{kernel}")
            getattr(backend, kernel)(_on_host(call))

        return run


_ONE_AT_A_TIME = threading.Lock()


def _launch(launch: Launch, device: torch.device) -> None:
    """Stands for `Runner.run`: counts each launch."""
    assert device.type == _NAME
    if 0 in launch.grid:
        return

    def run() -> None:
        torch.ops.fake_device.launched(f"cuda::{launch.function}")
        with _ONE_AT_A_TIME:
            emulation.run(launch)

    launches = recording()
    if launches is None:
        run()
    else:
        launches.append(run)


class _BucketsAlone(CudaBackend):
    """Leaves the step of Adam to plain torch."""

    def __getattr__(self, kernel: str) -> Any:
        if kernel == "adam_step":
            raise AttributeError(kernel)
        return super().__getattr__(kernel)


def serve_buckets(backend: Any) -> None:
    """Have calls for the device reach `backend`."""
    loading._LOADERS[_NAME] = lambda: backend
    loading.compiled_backend.cache_clear()


@contextmanager
def on_an_emulated_gpu() -> Iterator[None]:
    """Have them go the way of the CUDA backend."""
    serve_buckets(_BucketsAlone(_launch))
    try:
        yield
    finally:
        serve_buckets(HostBuckets())


def _on_host(value: Any) -> Any:
    """A call with host tensors over the memory of the device's."""
    if isinstance(value, Tensor):
        return torch.ops.fake_device.as_host(value.detach())
    if isinstance(value, (list, tuple)):
        return type(value)(map(_on_host, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **{name: _on_host(one) for name, one in fields.items()})
    return value
