"""The kernels as torch operators: one schema each, with a fake kernel and a backend a device.

Operators, not bare functions, so that `torch.compile` traces them and `opcheck` can test them.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import warnings
from collections.abc import Callable
from typing import Any, Protocol, cast

import torch

from thinwire.compress.kernels.calls import (
    CODEC_OPERATIONS,
    OPERATIONS,
    ApplySigns,
    Decode,
    Encode,
    MomentumPayload,
    Operation,
    StoreRounded,
)
from thinwire.compress.kernels.headers import CheckHeaders, WriteHeaders
from thinwire.compress.packet_layout import CODE_BITS

__all__ = ["Backend", "backends", "prepare"]


class Backend(Protocol):
    """One implementation of the kernels that `thinwire.compress.kernels` describes; calls are already checked."""

    def encode(self, call: Encode) -> None:
        """`encode` and `encode_rounded`."""

    def decode(self, call: Decode) -> None:
        """`decode` and `decode_mean`."""

    def momentum_payload(self, call: MomentumPayload) -> None:
        """The payload of leg 1."""

    def apply_signs(self, call: ApplySigns) -> None:
        """The update of the weights."""

    def store_rounded(self, call: StoreRounded) -> None:
        """Rounding at random."""

    def write_headers(self, call: WriteHeaders) -> None:
        """Headers of packets to be sent."""

    def check_headers(self, call: CheckHeaders) -> None:
        """Headers of packets that came."""


def backends() -> dict[str, Backend]:
    """Backends that can run here: "reference" always, "cpu" with numba, "cuda" with a GPU and a compiler for it."""
    present = {"reference": _load("reference")}
    if importlib.util.find_spec("numba"):
        present["cpu"] = _load("cpu.backend")
    if torch.cuda.is_available() and (cuda := _cuda_backend()) is not present["reference"]:
        present["cuda"] = cuda
    return present


def prepare(device: torch.device | str) -> None:
    """Find the backend that serves `device` now, so that a missing compiler is told when training starts: a
    RuntimeWarning then says that plain torch is used instead, and what to install."""
    if (backend := _DEVICES.get(torch.device(device).type)) is not None:
        backend()


def _load(name: str) -> Backend:
    return cast("Backend", importlib.import_module(f"thinwire.compress.kernels.{name}"))


@functools.cache
def _cpu_backend() -> Backend:
    try:
        return _load("cpu.backend")
    except ImportError as error:
        return _plain_torch("the CPU kernels need numba, which cannot be imported", error, "numba")


@functools.cache
def _cuda_backend() -> Backend:
    try:
        backend = importlib.import_module("thinwire.compress.kernels.cuda.backend")
        return cast("Backend", backend.make_backend())
    except ImportError as error:
        return _plain_torch(
            "the CUDA kernels need NVIDIA's compiler NVRTC, through cuda.bindings or cupy, which cannot be had",
            error,
            "'thinwire[cuda]'",
        )


def _plain_torch(need: str, error: ImportError, package: str) -> Backend:
    warnings.warn(
        f"{need} ({error}): plain torch is used instead, several times slower; pip install {package}",
        RuntimeWarning,
        stacklevel=4,
    )
    return _load("reference")


_DEVICES = {"cpu": _cpu_backend, "cuda": _cuda_backend}


def _register(name: str, operation: Operation, *codec: str) -> None:
    """Define thinwire::`name`, whose calls are given the codec, if any, before the arguments."""

    def check(*args: Any, **kwargs: Any) -> None:
        operation.call(*codec, *args, **kwargs).check()

    def implementation(backend: Callable[[], Backend]) -> Callable[..., None]:
        def run(*args: Any, **kwargs: Any) -> None:
            call = operation.call(*codec, *args, **kwargs)
            call.check()
            getattr(backend(), call.kernel)(call)

        return run

    torch.library.define(f"thinwire::{name}", operation.schema, tags=torch.Tag.pt2_compliant_tag)
    torch.library.register_fake(f"thinwire::{name}", check)
    for device, backend in _DEVICES.items():
        torch.library.impl(f"thinwire::{name}", device, implementation(backend))


for _codec in CODE_BITS:
    for _name, _operation in CODEC_OPERATIONS.items():
        _register(f"{_codec}_{_name}", _operation, _codec)
for _name, _operation in OPERATIONS.items():
    _register(_name, _operation)
