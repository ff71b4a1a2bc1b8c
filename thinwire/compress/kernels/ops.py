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
)
from thinwire.compress.packet_layout import CODE_BITS

__all__ = ["Backend", "backends"]


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


def backends() -> dict[str, Backend]:
    """Backends that can run here: "reference" always, "cpu" with numba, "cuda" with cupy and a GPU."""
    present = {"reference": _load("reference")}
    if importlib.util.find_spec("numba"):
        present["cpu"] = _load("cpu.backend")
    if importlib.util.find_spec("cupy") and torch.cuda.is_available():
        present["cuda"] = _load("cuda.backend")
    return present


def _load(name: str) -> Backend:
    return cast("Backend", importlib.import_module(f"thinwire.compress.kernels.{name}"))


@functools.cache
def _cpu_backend() -> Backend:
    try:
        return _load("cpu.backend")
    except ImportError as error:
        warnings.warn(
            f"the CPU kernels need numba, which cannot be imported ({error}): plain torch is used instead, "
            f"several times slower; pip install numba",
            RuntimeWarning,
            stacklevel=2,
        )
        return _load("reference")


@functools.cache
def _cuda_backend() -> Backend:
    try:
        return _load("cuda.backend")
    except ImportError as error:
        raise RuntimeError(
            f"the CUDA kernels need cupy, which cannot be imported ({error}): pip install 'thinwire[cuda]'"
        ) from error


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
