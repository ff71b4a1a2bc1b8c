"""The CUDA backend: compiles csrc/ at run time through cupy and launches on torch's current stream."""

from __future__ import annotations

import functools
from typing import Any

import cupy
import numpy as np
import torch
from torch import Tensor

from thinwire.compress.kernels.cuda.launch import (
    Launch,
    apply_signs_launch,
    compile_options,
    decode_launch,
    encode_launch,
    encode_rounded_launch,
    momentum_payload_launch,
    source_text,
)
from thinwire.compress.kernels.packet_layout import runs

__all__ = ["apply_signs", "decode", "decode_mean", "encode", "encode_rounded", "momentum_payload"]

_FLOAT_ALIGNMENT = 16
_HALF_ALIGNMENT = 8
_PACKET_ALIGNMENT = 4


def encode(codec: str, payload: Tensor, residual: Tensor | None, packets: Tensor, numel: int, block_size: int) -> None:
    """Encode payload + residual; see `thinwire.compress.kernels.encode`."""
    for of_run, valid, values, before in runs(packets, numel, payload, residual):
        _check_alignment("payload", values, _FLOAT_ALIGNMENT)
        if before is not None:
            _check_alignment("residual", before, _FLOAT_ALIGNMENT)
        _check_alignment("packets", of_run, _PACKET_ALIGNMENT)
        _run(encode_launch(codec, values, before, of_run, valid, block_size), payload.device)


def encode_rounded(
    codec: str,
    payload: Tensor,
    residual: Tensor | None,
    new_residual: Tensor,
    packets: Tensor,
    numel: int,
    block_size: int,
) -> None:
    """Encode with bf16 residuals; see `thinwire.compress.kernels.encode_rounded`."""
    for of_run, valid, values, before, after in runs(packets, numel, payload, residual, new_residual):
        _check_alignment("payload", values, _FLOAT_ALIGNMENT)
        if before is not None:
            _check_alignment("residual", before, _HALF_ALIGNMENT)
        _check_alignment("new_residual", after, _HALF_ALIGNMENT)
        _check_alignment("packets", of_run, _PACKET_ALIGNMENT)
        _run(encode_rounded_launch(codec, values, before, after, of_run, valid, block_size), payload.device)


def decode(codec: str, packets: Tensor, output: Tensor, numel: int, block_size: int) -> None:
    """Decode every row; see `thinwire.compress.kernels.decode`."""
    for of_run, valid, values in runs(packets, numel, output):
        _decode(codec, of_run, values, valid, block_size, groups=of_run.size(0))


def decode_mean(codec: str, packets: Tensor, output: Tensor, numel: int, block_size: int) -> None:
    """Average the rows; see `thinwire.compress.kernels.decode_mean`."""
    _decode(codec, packets, output, numel, block_size, groups=1)


def _decode(codec: str, packets: Tensor, output: Tensor, numel: int, block_size: int, groups: int) -> None:
    _check_alignment("packets", packets, _PACKET_ALIGNMENT)
    _check_alignment("output", output, _FLOAT_ALIGNMENT)
    _run(decode_launch(codec, packets, output, numel, block_size, groups), output.device)


def momentum_payload(
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
    _check_alignment("packets", packets, _PACKET_ALIGNMENT)
    launch = momentum_payload_launch(
        packets, gradient, codes, table, payload, first, shard, block_size, beta1, loss_scale
    )
    _run(launch, payload.device)


def apply_signs(
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
    _check_alignment("packets", packets, _PACKET_ALIGNMENT)
    _run(apply_signs_launch(weights, packets, codes, first, shard, block_size, lr, decay, seed), weights.device)


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
        function = _function(launch.source, launch.function, launch.block_size, launch.threads, device.index)
        function((launch.grid,), (launch.threads,), tuple(map(np.int64, launch.arguments)))


@functools.cache
def _function(source: str, name: str, block_size: int, threads: int, device_index: int) -> Any:
    """Compiled kernel, loaded on the current device, which is the given one; cupy keeps the compilation on disk."""
    del device_index  # a part of the cache's key: a loaded module belongs to one device
    options = compile_options(block_size, threads)
    module = cupy.RawModule(code=source_text(source), options=options, backend="nvrtc")
    return module.get_function(name)
