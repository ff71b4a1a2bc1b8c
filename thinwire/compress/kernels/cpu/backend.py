"""The CPU backend: shares the blocks of a call out to a few threads that run compiled loops without the GIL."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thinwire.compress.kernels.calls import ApplySigns, Decode, Encode, MomentumPayload, PacketCall, StoreRounded
from thinwire.compress.kernels.cpu import decode as decoding
from thinwire.compress.kernels.cpu import encode as encoding
from thinwire.compress.kernels.cpu import momentum, small_floats
from thinwire.compress.kernels.cpu.blocks import Layout, Range, form_of
from thinwire.compress.kernels.cpu.small_floats import FORMATS, NO_VALUES, Values
from thinwire.compress.kernels.noise import keys
from thinwire.compress.kernels.reference import check_headers, write_headers
from thinwire.simd.workers import Workers

__all__ = [
    "apply_signs",
    "array",
    "check_headers",
    "decode",
    "encode",
    "momentum_payload",
    "share_blocks",
    "store_rounded",
    "values",
    "write_headers",
]

_ROUNDED_BLOCK = 4096

_NO_FLOATS = np.empty(0, dtype=np.float32)
_NO_BYTES = np.empty(0, dtype=np.uint8)

# Below this many elements a thread, handing work over takes longer than doing it.
_ELEMENTS_PER_THREAD = 1 << 17

# Outputs that the caches cannot hold are written past them: a store through the cache first reads the line.
_STREAM_ELEMENTS = 1 << 22
_STREAM_ALIGNMENT = 64


def encode(call: Encode) -> None:
    """Encode payload + residual; see `thinwire.compress.kernels.encode` and `encode_rounded`."""
    kernel = encoding.encode if call.new_residual is None else encoding.encode_rounded
    arguments = [(array(run.payload), *_residuals(run), *_packets(run, run.numel)) for run in call.runs()]
    _over_runs(kernel, arguments, call.payload.numel(), call.block_size)


def _residuals(run: Encode) -> tuple[NDArray[Any], ...]:
    if run.new_residual is None:
        return (_NO_FLOATS if run.residual is None else array(run.residual),)
    return _NO_BYTES if run.residual is None else _byte_array(run.residual), _byte_array(run.new_residual)


def decode(call: Decode) -> None:
    """Decode every row, or average the rows; see `thinwire.compress.kernels.decode` and `decode_mean`."""
    runs, numel = list(call.runs()), call.output.numel()
    streaming = numel >= _STREAM_ELEMENTS and all(run.output.data_ptr() % _STREAM_ALIGNMENT == 0 for run in runs)
    arguments = [(*_packets(run, run.numel), array(run.output), run.averaged, streaming) for run in runs]
    _over_runs(decoding.decode, arguments, numel, call.block_size)


def momentum_payload(call: MomentumPayload) -> None:
    """The payload of leg 1; see `thinwire.compress.kernels.momentum_payload`."""
    payload, first = call.payload, call.first
    # Groups of sixteen are counted from the start of the bucket: that is where the payload has to be aligned.
    aligned = (payload.data_ptr() - payload.element_size() * first) % _STREAM_ALIGNMENT == 0
    arguments = (
        *_packets(call, call.payload.numel()),
        Values(_NO_BYTES, NO_VALUES) if call.gradient is None else values(call.gradient),
        momentum.Preconditioner(array(call.codes), array(call.table)),
        array(payload),
        momentum.Factors(np.float32(call.beta1), np.float32(1.0 - call.beta1), np.float32(call.loss_scale)),
        first,
        aligned and payload.numel() >= _STREAM_ELEMENTS,
    )
    _over_elements(momentum.momentum_payload, arguments, first, payload.numel(), call.block_size)


def apply_signs(call: ApplySigns) -> None:
    """The update of the weights; see `thinwire.compress.kernels.apply_signs`."""
    step = momentum.Step(np.float32(call.lr), np.float32(call.decay), *_keys(call.seed))
    packets = _packets(call, call.weights.numel())
    arguments = *packets, values(call.weights), array(call.codes), step, call.first
    _over_elements(momentum.apply_signs, arguments, call.first, call.weights.numel(), call.block_size)


def store_rounded(call: StoreRounded) -> None:
    """Rounding at random; see `thinwire.compress.kernels.rounding.store_rounded`."""
    arguments = values(call.weights), array(call.values), *_keys(call.seed)
    numel = call.values.numel()

    def work(first: int, last: int) -> None:
        elements = Range(first * _ROUNDED_BLOCK, min(last * _ROUNDED_BLOCK, numel))
        small_floats.store_rounded(*arguments, elements)

    share_blocks(work, -(-numel // _ROUNDED_BLOCK), _ROUNDED_BLOCK)


def _packets(call: PacketCall, numel: int) -> tuple[NDArray[Any], Layout]:
    row_blocks = call.shard // call.block_size
    layout = Layout(form_of(call.codec), call.block_size, row_blocks, call.packets.size(1), numel)
    return array(call.packets).reshape(-1), layout


def values(tensor: Tensor) -> Values:
    """A contiguous tensor of floats of any width, as the loops take it."""
    return Values(_byte_array(tensor), FORMATS[tensor.dtype])


def _keys(seed: int) -> tuple[np.uint32, np.uint32]:
    first, second = keys(seed)
    return np.uint32(first), np.uint32(second)


def _byte_array(tensor: Tensor) -> NDArray[Any]:
    return array(tensor.detach().view(torch.uint8))


def array(tensor: Tensor) -> NDArray[Any]:
    """The tensor's own memory."""
    return tensor.detach().numpy() if tensor.requires_grad else tensor.numpy()


def _over_runs(kernel: Callable[..., None], arguments: Sequence[tuple[Any, ...]], numel: int, block_size: int) -> None:
    """Run the kernel over all blocks of the vectors of `arguments`, which are equally long and have `numel` elements
    together."""
    run_blocks = max(1, numel // block_size // len(arguments))

    def work(first: int, last: int) -> None:
        for run in range(first // run_blocks, -(-last // run_blocks)):
            begin = run * run_blocks
            kernel(*arguments[run], Range(max(first - begin, 0), min(last - begin, run_blocks)))

    share_blocks(work, numel // block_size, block_size)


def _over_elements(
    kernel: Callable[..., None], arguments: tuple[Any, ...], first: int, numel: int, block_size: int
) -> None:
    """Run the kernel over all blocks in which elements first to first + numel of a bucket lie."""
    if not numel:
        return
    begin, end = first // block_size, -(-(first + numel) // block_size)
    share_blocks(lambda low, high: kernel(*arguments, Range(begin + low, begin + high)), end - begin, block_size)


def share_blocks(work: Callable[[int, int], None], blocks: int, block_size: int) -> None:
    """Run work(first, last) over ranges that cover `blocks`, one a thread."""
    threads = max(1, min(_workers.threads(), blocks * block_size // _ELEMENTS_PER_THREAD))
    if threads == 1:
        work(0, blocks)
        return
    edges = [blocks * part // threads for part in range(threads + 1)]
    _workers.each(lambda part: work(edges[part], edges[part + 1]), threads, threads)


_workers = Workers()
