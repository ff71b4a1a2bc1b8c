"""The kernels as torch operators: one schema each, with a fake kernel and a backend a device.

Operators, not bare functions, so that `torch.compile` traces them and `opcheck` can test them.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from thinwire.compress.kernels.packet_layout import (
    CODE_BITS,
    check_apply_signs,
    check_decode,
    check_decode_mean,
    check_encode,
    check_encode_rounded,
    check_momentum_payload,
)

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

    def encode_rounded(
        self,
        codec: str,
        payload: Tensor,
        residual: Tensor | None,
        new_residual: Tensor,
        packets: Tensor,
        numel: int,
        block_size: int,
    ) -> None:
        """Encode with bf16 residuals; see `thinwire.compress.kernels.encode_rounded`."""

    def decode(self, codec: str, packets: Tensor, output: Tensor, numel: int, block_size: int) -> None:
        """Decode every row; see `thinwire.compress.kernels.decode`."""

    def decode_mean(self, codec: str, packets: Tensor, output: Tensor, numel: int, block_size: int) -> None:
        """Average the rows; see `thinwire.compress.kernels.decode_mean`."""

    def momentum_payload(
        self,
        packets: Tensor,
        gradient: Tensor | None,
        codes: Tensor,
        table: Tensor,
        payload: Tensor,
        first: int,
        shard: int,
        block_size: int,
        beta1: float,
        loss_scale: float,
    ) -> None:
        """The payload of leg 1; see `thinwire.compress.kernels.momentum_payload`."""

    def apply_signs(
        self,
        weights: Tensor,
        packets: Tensor,
        codes: Tensor,
        first: int,
        shard: int,
        block_size: int,
        lr: float,
        decay: float,
        seed: int,
    ) -> None:
        """The update of the weights; see `thinwire.compress.kernels.apply_signs`."""


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


@dataclass(frozen=True)
class _Operation:
    """Arguments, after the codec where there is one, and what refuses bad ones."""

    schema: str
    check: Callable[..., None]


_CODEC_OPERATIONS = {
    "encode": _Operation(
        "(Tensor(a!) payload, Tensor? residual, Tensor(b!) packets, int numel, int block_size) -> ()", check_encode
    ),
    "encode_rounded": _Operation(
        "(Tensor payload, Tensor? residual, Tensor(a!) new_residual, Tensor(b!) packets, int numel, int block_size) "
        "-> ()",
        check_encode_rounded,
    ),
    "decode": _Operation("(Tensor packets, Tensor(a!) output, int numel, int block_size) -> ()", check_decode),
    "decode_mean": _Operation(
        "(Tensor packets, Tensor(a!) output, int numel, int block_size) -> ()", check_decode_mean
    ),
}
_MOMENTUM_OPERATIONS = {
    "momentum_payload": _Operation(
        "(Tensor packets, Tensor? gradient, Tensor codes, Tensor table, Tensor(a!) payload, int first, int shard, "
        "int block_size, float beta1, float loss_scale) -> ()",
        check_momentum_payload,
    ),
    "apply_signs": _Operation(
        "(Tensor(a!) weights, Tensor packets, Tensor codes, int first, int shard, int block_size, float lr, "
        "float decay, int seed) -> ()",
        check_apply_signs,
    ),
}
_DEVICES = {"cpu": _cpu_backend, "cuda": _cuda_backend}


def _register(name: str, function: str, operation: _Operation, *codec: str) -> None:
    """Define thinwire::`name`: `function` of the device's backend, given the codec, if any, before the arguments."""
    check = functools.partial(operation.check, *codec)

    def implementation(backend: Callable[[], Backend]) -> Callable[..., None]:
        def run(*args: Any, **kwargs: Any) -> None:
            check(*args, **kwargs)
            getattr(backend(), function)(*codec, *args, **kwargs)

        return run

    torch.library.define(f"thinwire::{name}", operation.schema, tags=torch.Tag.pt2_compliant_tag)
    torch.library.register_fake(f"thinwire::{name}", check)
    for device, backend in _DEVICES.items():
        torch.library.impl(f"thinwire::{name}", device, implementation(backend))


for _codec in CODE_BITS:
    for _name, _operation in _CODEC_OPERATIONS.items():
        _register(f"{_codec}_{_name}", _name, _operation, _codec)
for _name, _operation in _MOMENTUM_OPERATIONS.items():
    _register(_name, _name, _operation)
