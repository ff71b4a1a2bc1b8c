"""Backends of plain functions, as those over whole buckets: imported where a tensor first lies on their device."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["Loader", "loaded", "loaders"]

Loader = Callable[[], Any]


def loaders(module: str) -> dict[str, Loader]:
    """What imports the backend that the module of this name, among the CPU's and among CUDA's, offers, by device."""

    def cpu() -> Any:
        return importlib.import_module(f"thinwire.compress.kernels.cpu.{module}")

    def cuda() -> Any:
        return importlib.import_module(f"thinwire.compress.kernels.cuda.{module}").make_backend()

    return {"cpu": cpu, "cuda": cuda}


def loaded(devices: Mapping[str, Loader], device: str) -> Any | None:
    """The backend for a device; None where there is none, or no compiler for it."""
    try:
        return devices[device]()
    except (ImportError, KeyError):  # of the former the backend for single tensors has warned
        return None
