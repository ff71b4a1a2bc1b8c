"""The CPU backend: shares the blocks of a call out to a few threads that run compiled loops without the GIL."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thinwire.compress.kernels.adam import AdamStep
from thinwire.compress.kernels.buckets import (
    AverageAndEncode,
    DecodeAndMove,
    EncodePayload,
    Part,
    Segments,
)
from thinwire.compress.kernels.calls import Decode, Encode, PacketCall, StoreRounded
from thinwire.compress.kernels.cpu import adam, moving, payload, small_floats
from thinwire.compress.kernels.cpu import decode as decoding
from thinwire.compress.kernels.cpu import encode as encoding
from thinwire.compress.kernels.cpu.blocks import Layout, PartLayout, Range, form_of
from thinwire.compress.kernels.cpu.small_floats import FORMATS, NO_VALUES, Values
from thinwire.compress.kernels.noise import keys
from thinwire.compress.kernels.packed import EncodePackedPayload, MovePacked, PackedState
from thinwire.compress.kernels.reference import check_headers, write_headers
from thinwire.compress.packet_layout import HEADER_BYTES
from thinwire.simd.workers import Workers

__all__ = [
    "adam_step",
    "array",
    "average_and_encode",
    "check_headers",
    "decode",
    "decode_and_move",
    "encode",
    "encode_packed_payload",
    "encode_payload",
    "move_packed",
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
    """Encode payload + residual."""
    kernel = encoding.encode if call.new_residual is None else encoding.encode_rounded
    arguments = [(array(run.payload), *_residuals(run), *_packets(run, run.numel)) for run in call.runs()]
    _over_runs(kernel, arguments, call.payload.numel(), call.block_size)


def _residuals(run: Encode) -> tuple[NDArray[Any], ...]:
    if run.new_residual is None:
        return (_NO_FLOATS if run.residual is None else array(run.residual),)
    return _NO_BYTES if run.residual is None else _byte_array(run.residual), _byte_array(run.new_residual)


def decode(call: Decode) -> None:
    """Decode every row, or average the rows."""
    runs, numel = list(call.runs()), call.output.numel()
    streaming = numel >= _STREAM_ELEMENTS and all(run.output.data_ptr() % _STREAM_ALIGNMENT == 0 for run in runs)
    arguments = [(*_packets(run, run.numel), array(run.output), run.averaged, streaming) for run in runs]
    _over_runs(decoding.decode, arguments, numel, call.block_size)


def store_rounded(call: StoreRounded) -> None:
    """Round at random."""
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


def share_blocks(work: Callable[[int, int], None], blocks: int, block_size: int) -> None:
    """Run work(first, last) over ranges that cover `blocks`, one a thread."""
    most = blocks * block_size // _ELEMENTS_PER_THREAD
    threads = min(_workers.threads(), most) if most > 1 else 1
    if threads == 1:
        work(0, blocks)
        return
    edges = [blocks * part // threads for part in range(threads + 1)]
    _workers.each(lambda part: work(edges[part], edges[part + 1]), threads, threads)


_workers = Workers()


_FORMS = {"plain": payload.PLAIN, "divided": payload.DIVIDED, "masked": payload.MASKED}


def encode_payload(call: EncodePayload) -> None:
    """Make a part of the payload and encode it."""
    arguments = (
        _runs(call.segments, call.gradients),
        _contributing(call.beta1, call.divisors),
        _FORMS[call.form],
        payload.Vectors(call.momentum.data_ptr(), _address(call.denominators), _address(call.residual)),
        array(call.lost),
        array(call.packets).reshape(-1),
        _part_layout(call.codec, call.part, call.packets),
    )
    _over_part(payload.encode_payload, arguments, call.part, call.packets)
    _write_header(call)


def decode_and_move(call: DecodeAndMove) -> None:
    """Decode a part of what came back and move weights by it."""
    arguments = (
        _runs(call.segments, call.weights, call.replicas),
        np.array([[-rate for rate in call.rates], call.decays], dtype=np.float32).T.copy(),
        _FORMS[call.form],
        call.holds,
        array(call.packets).reshape(-1),
        array(call.output),
        _address(call.denominators),
        _part_layout(call.codec, call.part, call.packets),
    )
    _over_part(moving.decode_and_move, arguments, call.part, call.packets)


def average_and_encode(call: AverageAndEncode) -> None:
    """Average what an owner got and encode that."""
    blocks = call.lost.numel() // call.block_size
    form = form_of(call.codec)
    arguments = (
        array(call.received).reshape(-1),
        call.received.size(0),
        Layout(form, call.block_size, blocks, call.received.size(1), call.numel),
        _floats(call.residual),
        array(call.lost),
        array(call.packets).reshape(-1),
        Layout(form, call.block_size, blocks, call.packets.size(1), call.numel),
    )
    share_blocks(
        lambda first, last: payload.average_and_encode(*arguments, Range(first, last)), blocks, call.block_size
    )


def encode_packed_payload(call: EncodePackedPayload) -> None:
    """Make a part of the payload from packed state and encode it."""
    arguments = (
        _runs(call.segments, call.gradients),
        _contributing(call.beta1, call.divisors),
        array(call.tables),
        array(call.state.packets).reshape(-1),
        _whole(call.state),
        array(call.state.codes),
        values(call.residual),
        values(call.lost),
        array(call.packets).reshape(-1),
        _part_layout("sign1", call.part, call.packets),
    )
    _over_part(payload.encode_packed_payload, arguments, call.part, call.packets)
    _write_header(call)


def move_packed(call: MovePacked) -> None:
    """Move the weights of a bucket by packed momentum."""
    state, numel = call.state, call.weights.numel()
    if not numel:
        return
    runs = np.zeros((len(call.segments), 4), dtype=np.int64)
    runs[:, :2] = call.segments.table
    runs[:, 2] = call.moves
    first_key, second_key = keys(call.seed)
    arguments = (
        runs,
        np.array([call.rates, call.decays], dtype=np.float32).T.copy(),
        array(state.packets).reshape(-1),
        _whole(state),
        array(state.codes),
        values(call.weights),
        call.first,
        np.uint32(first_key),
        np.uint32(second_key),
    )
    begin, end = call.first // state.block_size, -(-(call.first + numel) // state.block_size)

    def work(first: int, last: int) -> None:
        moving.move_packed(*arguments, Range(begin + first, begin + last))

    share_blocks(work, end - begin, state.block_size)


def _write_header(call: EncodePayload | EncodePackedPayload) -> None:
    if call.part.header is not None:
        array(call.packets)[:, :HEADER_BYTES] = np.frombuffer(call.part.header, dtype=np.uint8)


def _over_part(kernel: Any, arguments: tuple[Any, ...], part: Part, packets: Tensor) -> None:
    blocks = packets.size(0) * (part.last - part.first) // part.block_size
    share_blocks(lambda first, last: kernel(*arguments, Range(first, last)), blocks, part.block_size)


def _part_layout(codec: str, part: Part, packets: Tensor) -> PartLayout:
    row_blocks = (part.last - part.first) // part.block_size
    return PartLayout(form_of(codec), part.block_size, row_blocks, packets.size(1), part.first, part.shard, part.numel)


def _whole(state: PackedState) -> Layout:
    return Layout(
        form_of("sign1"), state.block_size, state.shard // state.block_size, state.packets.size(1), state.numel
    )


def _runs(segments: Segments, *tensors: Sequence[Tensor | None]) -> NDArray[np.int64]:
    """The table of `runs`; a tensor that is missing lies nowhere and has no values."""
    runs = np.empty((len(segments), 2 + 2 * len(tensors)), dtype=np.int64)
    runs[:, :2] = segments.table
    for number, of_run in enumerate(tensors):
        runs[:, 2 + 2 * number] = [0 if one is None else one.data_ptr() for one in of_run]
        runs[:, 3 + 2 * number] = [NO_VALUES if one is None else FORMATS[one.dtype] for one in of_run]
    return runs


def _contributing(beta1: Sequence[float], divisors: Sequence[float]) -> NDArray[np.float32]:
    """β₁, the gradient's gain and its divisor, of each run."""
    return np.array([beta1, [1.0 - one for one in beta1], divisors], dtype=np.float32).T.copy()


def _address(vector: Tensor | None) -> int:
    return 0 if vector is None else vector.data_ptr()


def _floats(vector: Tensor | None) -> NDArray[np.float32]:
    return _NO_FLOATS if vector is None else array(vector)


_BLOCK = 4096


def adam_step(call: AdamStep) -> None:
    """Step of Adam over many tensors."""
    ends = np.cumsum([one.numel() for one in call.variances])
    numel = int(ends[-1])
    runs = np.zeros((len(ends), adam.COLUMNS), dtype=np.int64)
    runs[1:, adam.FIRST], runs[:, adam.END] = ends[:-1], ends
    output = call.denominators if call.weights is None else call.weights
    for column, tensors in enumerate((call.gradients, call.momenta, call.variances, output), adam.GRADIENT):
        if tensors is not None:
            runs[:, column] = _addresses(tensors)
    factors = adam.Factors(call.factors.weight, *map(np.float32, call.factors.others))
    form = _form(call)

    def work(first: int, last: int) -> None:
        adam.adam_step(runs, factors, form, Range(first * _BLOCK, min(last * _BLOCK, numel)))

    share_blocks(work, -(-numel // _BLOCK), _BLOCK)


def _form(call: AdamStep) -> adam.StepForm:
    tracks = call.gradients is not None
    given = call.factors
    return adam.StepForm(
        tracks,
        tracks and call.momenta is not None,
        given.from_momentum,
        call.weights is not None,
        call.denominators is not None,
        given.eps_inside_root,
        given.holds_zero,
    )


def _addresses(tensors: Sequence[Tensor]) -> list[int]:
    return [one.data_ptr() for one in tensors]
