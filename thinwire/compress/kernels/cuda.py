"""The CUDA backend: compiles csrc/ at run time through cupy and launches on torch's current stream."""

from __future__ import annotations

import functools
from typing import Any

import cupy
import numpy as np
import torch
from torch import Tensor

from thinwire.compress.kernels.cuda_launch import (
    Launch,
    compile_options,
    decode_launch,
    encode_launch,
    source_text,
)

__all__ = ["decode", "decode_mean", "encode"]

_FLOAT_ALIGNMENT = 16
_PACKET_ALIGNMENT = 4


def encode(codec: str, payload: Tensor, residual: Tensor | None, packets: Tensor, numel: int, block_size: int) -> None:
    """Encode payload + residual; see `thinwire.compress.kernels.encode`."""
    _check_alignment("payload", payload, _FLOAT_ALIGNMENT)
    if residual is not None:
        _check_alignment("residual", residual, _FLOAT_ALIGNMENT)
    _check_alignment("packets", packets, _PACKET_ALIGNMENT)
    _run(encode_launch(codec, payload, residual, packets, numel, block_size), payload.device)


def decode(codec: str, packets: Tensor, output: Tensor, numel: int, block_size: int) -> None:
    """Decode every row; see `thinwire.compress.kernels.decode`."""
    _decode(codec, packets, output, numel, block_size, groups=packets.size(0))


def decode_mean(codec: str, packets: Tensor, output: Tensor, numel: int, block_size: int) -> None:
    """Average the rows; see `thinwire.compress.kernels.decode_mean`."""
    _decode(codec, packets, output, numel, block_size, groups=1)


def _decode(codec: str, packets: Tensor, output: Tensor, numel: int, block_size: int, groups: int) -> None:
    _check_alignment("packets", packets, _PACKET_ALIGNMENT)
    _check_alignment("output", output, _FLOAT_ALIGNMENT)
    _run(decode_launch(codec, packets, output, numel, block_size, groups), output.device)


def _check_alignment(name: str, tensor: Tensor, alignment: int) -> None:
    if tensor.data_ptr() % alignment:
        raise ValueError(
            f"{name} starts at an address that is not a multiple of {alignment} bytes: "
            f"take slices at multiples of {alignment // tensor.element_size()} elements, or clone it"
        )


def _run(launch: Launch, device: torch.device) -> None:
    if not launch.grid:
        return
    stream = torch.cuda.current_stream(device)
    with cupy.cuda.Device(device.index), cupy.cuda.ExternalStream(stream.cuda_stream, device.index):
        function = _function(launch.codec, launch.function, launch.block_size, device.index)
        function((launch.grid,), (launch.threads,), tuple(map(np.int64, launch.arguments)))


@functools.cache
def _function(codec: str, name: str, block_size: int, device_index: int) -> Any:
    """Compiled kernel, loaded on the current device, which is the given one; cupy keeps the compilation on disk."""
    del device_index  # a part of the cache's key: a loaded module belongs to one device
    module = cupy.RawModule(code=source_text(codec), options=compile_options(block_size), backend="nvrtc")
    return module.get_function(name)
