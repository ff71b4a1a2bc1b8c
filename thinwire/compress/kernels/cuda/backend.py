"""The CUDA backend: compiles csrc/ at run time through cupy and launches on torch's current stream."""

from __future__ import annotations

import functools
from typing import Any

import cupy
import torch

from thinwire.compress.kernels.calls import ApplySigns, Decode, Encode, MomentumPayload
from thinwire.compress.kernels.cuda.launch import (
    Launch,
    apply_signs_launch,
    compile_options,
    decode_launch,
    encode_launch,
    momentum_payload_launch,
    source_text,
)

__all__ = ["apply_signs", "decode", "encode", "momentum_payload"]


def encode(call: Encode) -> None:
    """Encode payload + residual; see `thinwire.compress.kernels.encode` and `encode_rounded`."""
    for run in call.runs():
        _run(encode_launch(run), call.packets.device)


def decode(call: Decode) -> None:
    """Decode every row, or average the rows; see `thinwire.compress.kernels.decode` and `decode_mean`."""
    for run in call.runs():
        _run(decode_launch(run), call.packets.device)


def momentum_payload(call: MomentumPayload) -> None:
    """The payload of leg 1; see `thinwire.compress.kernels.momentum_payload`."""
    _run(momentum_payload_launch(call), call.packets.device)


def apply_signs(call: ApplySigns) -> None:
    """The update of the weights; see `thinwire.compress.kernels.apply_signs`."""
    _run(apply_signs_launch(call), call.packets.device)


def _run(launch: Launch, device: torch.device) -> None:
    if not launch.grid:
        return
    stream = torch.cuda.current_stream(device)
    with cupy.cuda.Device(device.index), cupy.cuda.ExternalStream(stream.cuda_stream, device.index):
        function = _function(launch.source, launch.function, launch.block_size, launch.threads, device.index)
        function((launch.grid,), (launch.threads,), launch.arguments)


@functools.cache
def _function(source: str, name: str, block_size: int, threads: int, device_index: int) -> Any:
    """Compiled kernel, loaded on the current device, which is the given one; cupy keeps the compilation on disk."""
    del device_index  # a part of the cache's key: a loaded module belongs to one device
    options = compile_options(block_size, threads)
    module = cupy.RawModule(code=source_text(source), options=options, backend="nvrtc")
    return module.get_function(name)
