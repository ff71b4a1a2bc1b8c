"""The CPU backend: shares the blocks of a call out to a few threads that run compiled loops without the GIL."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thinwire.compress.kernels.cpu import momentum as cpu_momentum
from thinwire.compress.kernels.cpu import rounding as cpu_rounding
from thinwire.compress.kernels.cpu.decode import DECODE
from thinwire.compress.kernels.cpu.encode import ENCODE, ENCODE_ROUNDED
from thinwire.compress.kernels.cpu.halves import FORMATS, NO_VALUES
from thinwire.compress.kernels.noise import keys
from thinwire.compress.kernels.packet_layout import runs
from thinwire.simd.workers import Workers

__all__ = ["apply_signs", "decode", "decode_mean", "encode", "encode_rounded", "momentum_payload", "store_rounded"]

_ROUNDED_BLOCK = 4096

_NO_RESIDUAL = np.empty(0, dtype=np.float32)
_NO_BYTES = np.empty(0, dtype=np.uint8)

# Below this many elements a thread, handing work over takes longer than doing it.
_ELEMENTS_PER_THREAD = 1 << 17

# Outputs that the caches cannot hold are written past them: a store through the cache first reads the line.
_STREAM_ELEMENTS = 1 << 22
_STREAM_ALIGNMENT = 64


def encode(codec: str, payload: Tensor, residual: Tensor | None, packets: Tensor, numel: int, block_size: int) -> None:
    """Encode payload + residual; see `thinwire.compress.kernels.encode`."""
    kernel = ENCODE[codec]
    rows, row_bytes = packets.shape
    row_blocks = payload.numel() // rows // block_size
    arrays = [
        (_array(values), _NO_RESIDUAL if before is None else _array(before), _array(of_run).reshape(-1), valid)
        for of_run, valid, values, before in runs(packets, numel, payload, residual)
    ]

    def work(run: int, first: int, last: int) -> None:
        payload_array, residual_array, flat, valid = arrays[run]
        kernel(payload_array, residual_array, flat, first, last, valid, block_size, row_blocks, row_bytes)

    _share_runs(work, len(arrays), row_blocks * rows, block_size)


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
    kernel = ENCODE_ROUNDED[codec]
    rows, row_bytes = packets.shape
    row_blocks = payload.numel() // rows // block_size
    arrays = [
        (
            _array(values),
            _NO_BYTES if before is None else _byte_array(before),
            _byte_array(after),
            _array(of_run).reshape(-1),
            valid,
        )
        for of_run, valid, values, before, after in runs(packets, numel, payload, residual, new_residual)
    ]

    def work(run: int, first: int, last: int) -> None:
        payload_array, residual_bytes, new_bytes, flat, valid = arrays[run]
        kernel(payload_array, residual_bytes, new_bytes, flat, first, last, valid, block_size, row_blocks, row_bytes)

    _share_runs(work, len(arrays), row_blocks * rows, block_size)


def decode(codec: str, packets: Tensor, output: Tensor, numel: int, block_size: int) -> None:
    """Decode every row; see `thinwire.compress.kernels.decode`."""
    _decode(codec, list(runs(packets, numel, output)), block_size, packets_a_group=1)


def decode_mean(codec: str, packets: Tensor, output: Tensor, numel: int, block_size: int) -> None:
    """Average the rows; see `thinwire.compress.kernels.decode_mean`."""
    _decode(codec, [(packets, numel, output)], block_size, packets_a_group=packets.size(0))


def _decode(codec: str, decoded: Sequence[tuple[Any, ...]], block_size: int, packets_a_group: int) -> None:
    """Fill the outputs of `decoded`, equal runs of packets, with the mean of every so many consecutive packets."""
    kernel = DECODE[codec]
    arrays = [(_array(packets).reshape(-1), _array(output), valid) for packets, valid, output in decoded]
    packets, _, output = decoded[0]
    row_bytes = packets.size(1)
    row_blocks = output.numel() // block_size // (packets.size(0) // packets_a_group)
    large = len(decoded) * output.numel() >= _STREAM_ELEMENTS
    streaming = large and all(output.data_ptr() % _STREAM_ALIGNMENT == 0 for _, _, output in decoded)

    def work(run: int, first: int, last: int) -> None:
        flat, output_array, valid = arrays[run]
        kernel(flat, output_array, first, last, valid, block_size, row_blocks, row_bytes, packets_a_group, streaming)

    _share_runs(work, len(arrays), len(arrays) * (output.numel() // block_size), block_size)


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
    gradient_bytes = _NO_BYTES if gradient is None else _byte_array(gradient)
    kind = NO_VALUES if gradient is None else FORMATS[gradient.dtype]
    flat, row_bytes = _array(packets).reshape(-1), packets.size(1)
    codes_array, table_array, payload_array = _array(codes), _array(table), _array(payload)
    # Groups of sixteen are counted from the start of the bucket: that is where the payload has to be aligned.
    aligned = (payload.data_ptr() - payload.element_size() * first) % _STREAM_ALIGNMENT == 0
    streaming = aligned and payload.numel() >= _STREAM_ELEMENTS
    factors = np.float32(beta1), np.float32(1.0 - beta1), np.float32(loss_scale)

    def work(first_block: int, last_block: int) -> None:
        cpu_momentum.momentum_payload(
            flat,
            gradient_bytes,
            kind,
            codes_array,
            table_array,
            payload_array,
            first_block,
            last_block,
            first,
            block_size,
            shard // block_size,
            row_bytes,
            *factors,
            streaming,
        )

    _share_elements(work, first, codes.numel(), block_size)


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
    weight_bytes, kind, codes_array = _byte_array(weights), FORMATS[weights.dtype], _array(codes)
    flat, row_bytes = _array(packets).reshape(-1), packets.size(1)
    first_key, second_key = map(np.uint32, keys(seed))
    step, factor = np.float32(lr), np.float32(decay)

    def work(first_block: int, last_block: int) -> None:
        cpu_momentum.apply_signs(
            weight_bytes,
            kind,
            flat,
            codes_array,
            first_block,
            last_block,
            first,
            block_size,
            shard // block_size,
            row_bytes,
            step,
            factor,
            first_key,
            second_key,
        )

    _share_elements(work, first, codes.numel(), block_size)


def store_rounded(weights: Tensor, values: Tensor, seed: int) -> None:
    """Rounding at random; see `thinwire.compress.kernels.rounding.store_rounded`."""
    weight_bytes, kind, values_array = _byte_array(weights), FORMATS[weights.dtype], _array(values)
    first_key, second_key = map(np.uint32, keys(seed))

    def work(first_block: int, last_block: int) -> None:
        first, last = first_block * _ROUNDED_BLOCK, min(last_block * _ROUNDED_BLOCK, values.numel())
        cpu_rounding.store_rounded(weight_bytes, kind, values_array, first, last, first_key, second_key)

    _share_elements(work, 0, values.numel(), _ROUNDED_BLOCK)


def _share_runs(work: Callable[[int, int, int], None], runs: int, blocks: int, block_size: int) -> None:
    """Run work(run, first, last) over ranges of the blocks of each of so many equal runs, `blocks` in all."""
    run_blocks = max(1, blocks // runs)

    def over_runs(first: int, last: int) -> None:
        for run in range(first // run_blocks, -(-last // run_blocks)):
            begin = run * run_blocks
            work(run, max(first - begin, 0), min(last - begin, run_blocks))

    _share(over_runs, blocks, block_size)


def _share_elements(work: Callable[[int, int], None], first: int, numel: int, block_size: int) -> None:
    """Run work(first_block, last_block) over ranges of the blocks in which elements first to first + numel lie."""
    if not numel:
        return
    begin, end = first // block_size, -(-(first + numel) // block_size)
    _share(lambda low, high: work(begin + low, begin + high), end - begin, block_size)


def _byte_array(tensor: Tensor) -> NDArray[Any]:
    return _array(tensor.detach().view(torch.uint8))


def _array(tensor: Tensor) -> NDArray[Any]:
    return tensor.detach().numpy()


def _share(work: Callable[[int, int], None], blocks: int, block_size: int) -> None:
    """Run work(first, last) over ranges that cover `blocks`, one a thread."""
    threads = max(1, min(_workers.threads(), blocks * block_size // _ELEMENTS_PER_THREAD))
    edges = [blocks * part // threads for part in range(threads + 1)]
    _workers.each(lambda part: work(edges[part], edges[part + 1]), threads, threads)


_workers = Workers()
