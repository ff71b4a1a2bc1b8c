"""Backends of the kernels, one a kind of device: compiled, or plain torch where there is no compiler for it."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import warnings
from collections.abc import Callable
from typing import Any, Protocol, cast

import torch

from thinwire.compress.kernels import reference
from thinwire.compress.kernels.calls import Decode, Encode, StoreRounded
from thinwire.compress.kernels.headers import CheckHeaders, WriteHeaders

__all__ = ["Backend", "backend_of", "backends", "compiled_backend", "prepare"]


class Backend(Protocol):
    """One implementation of the kernels that `thinwire.compress.kernels` describes; calls are already checked.

    A compiled one also has those over whole buckets (`buckets`) and the step of Adam (`adam`).
    """

    def encode(self, call: Encode) -> None:
        """`encode` and `encode_rounded`."""

    def decode(self, call: Decode) -> None:
        """`decode` and `decode_mean`."""

    def store_rounded(self, call: StoreRounded) -> None:
        """Rounding at random."""

    def write_headers(self, call: WriteHeaders) -> None:
        """Headers of packets to be sent."""

    def check_headers(self, call: CheckHeaders) -> None:
        """Headers of packets that came."""


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


def backend_of(device: str) -> Backend:
    """The backend that serves a kind of device: compiled, or the specification."""
    return cast("Backend", compiled_backend(device) or reference)


def backends() -> dict[str, Backend]:
    """Backends that can run here: "reference" always, "cpu" with numba, "cuda" with a GPU and a compiler for it."""
    present = {"reference": cast("Backend", reference)}
    if importlib.util.find_spec("numba"):
        present["cpu"] = backend_of("cpu")
    if torch.cuda.is_available() and (cuda := compiled_backend("cuda")) is not None:
        present["cuda"] = cast("Backend", cuda)
    return present


def prepare(device: torch.device | str) -> None:
    """Find the backend that serves `device` now, so that a missing compiler is told when training starts."""
    compiled_backend(torch.device(device).type)
