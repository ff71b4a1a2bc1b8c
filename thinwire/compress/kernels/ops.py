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
from torch import Tensor

from thinwire.compress.kernels.layout import CODE_BITS, check_decode, check_decode_mean, check_encode

__all__ = ["Backend", "backends"]


class Backend(Protocol):
    """One implementation of the kernels; its arguments are already checked."""

    def encode(
        self,
        codec: str,
        payload: Tensor,
        residual: Tensor | None,
        packets: Tensor,
        numel: int,
        block_size: int,
    ) -> None:
        """Encode payload + residual; see `thinwire.compress.kernels.encode`."""

    def decode(self, codec: str, packets: Tensor, output: Tensor, numel: int, block_size: int) -> None:
        """Decode every row; see `thinwire.compress.kernels.decode`."""

    def decode_mean(self, codec: str, packets: Tensor, output: Tensor, numel: int, block_size: int) -> None:
        """Average the rows; see `thinwire.compress.kernels.decode_mean`."""


def backends() -> dict[str, Backend]:
    """Backends that can run here: "reference" always, "cpu" with numba, "cuda" with cupy and a GPU."""
    present = {"reference": _load("reference")}
    if importlib.util.find_spec("numba"):
        present["cpu"] = _load("cpu")
    if importlib.util.find_spec("cupy") and torch.cuda.is_available():
        present["cuda"] = _load("cuda")
    return present


def _load(name: str) -> Backend:
    return cast("Backend", importlib.import_module(f"thinwire.compress.kernels.{name}"))


@functools.cache
def _cpu_backend() -> Backend:
    try:
        return _load("cpu")
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
        return _load("cuda")
    except ImportError as error:
        raise RuntimeError(
            f"the CUDA kernels need cupy, which cannot be imported ({error}): pip install 'thinwire[cuda]'"
        ) from error


_SCHEMAS = {
    "encode": "(Tensor(a!) payload, Tensor? residual, Tensor(b!) packets, int numel, int block_size) -> ()",
    "decode": "(Tensor packets, Tensor(a!) output, int numel, int block_size) -> ()",
    "decode_mean": "(Tensor packets, Tensor(a!) output, int numel, int block_size) -> ()",
}
_CHECKS: dict[str, Callable[..., None]] = {
    "encode": check_encode,
    "decode": check_decode,
    "decode_mean": check_decode_mean,
}
_DEVICES = {"cpu": _cpu_backend, "cuda": _cuda_backend}


def _register(codec: str, operation: str) -> None:
    name = f"thinwire::{codec}_{operation}"
    check = functools.partial(_CHECKS[operation], codec)

    def implementation(backend: Callable[[], Backend]) -> Callable[..., None]:
        def run(*args: Any, **kwargs: Any) -> None:
            check(*args, **kwargs)
            getattr(backend(), operation)(codec, *args, **kwargs)

        return run

    torch.library.define(name, _SCHEMAS[operation], tags=torch.Tag.pt2_compliant_tag)
    torch.library.register_fake(name, check)
    for device, backend in _DEVICES.items():
        torch.library.impl(name, device, implementation(backend))


for _codec in CODE_BITS:
    for _operation in _SCHEMAS:
        _register(_codec, _operation)
