"""The CPU backend: shares the blocks of a call out to a few threads that run compiled loops without the GIL."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from thinwire.compress.kernels.adam import AdamStep
from thinwire.compress.kernels.buckets import (
    AverageAndEncode,
    EncodePackedPayload,
    MovePacked,
    PackedState,
    Segments,
    keys,
)
from thinwire.compress.kernels.calls import Decode, DecodeAndMove, Encode, EncodePayload, StoreRounded
from thinwire.compress.kernels.cpu import adam, moving, payload, small_floats
from thinwire.compress.kernels.cpu import decode as decoding
from thinwire.compress.kernels.cpu import encode as encoding
from thinwire.compress.kernels.cpu.blocks import END, FIRST, Layout, Range, form_of
from thinwire.compress.kernels.cpu.small_floats import FORMATS, NO_VALUES, Values
from thinwire.compress.kernels.reference import write_headers as write_headers
from thinwire.compress.packet_layout import HEADER_BYTES
from thinwire.simd import compiling
from thinwire.simd.workers import Workers

_BLOCK = 4096
"""Elements that threads share out where there are no blocks of a packet."""

_NO_FLOATS = np.empty(0, dtype=np.float32)
_NO_BYTES = np.empty(0, dtype=np.uint8)

# Below this many elements a thread, handing work over takes longer than doing it.
_ELEMENTS_PER_THREAD = 1 << 17

# Outputs that the caches cannot hold are written past them: a store through the cache first reads the line.
_STREAM_ELEMENTS = 1 << 22
_STREAM_ALIGNMENT = 64


def encode(call: Encode) -> None:
    """Encode payload + residual."""
    packets = _array(call.packets).reshape(-1)
    if call.new_residual is None:
        residual = _NO_FLOATS if call.residual is None else _array(call.residual)
        _over_part(encoding.encode, (_array(call.payload), residual, packets), call)
        return
    residual = _NO_BYTES if call.residual is None else _bytes(call.residual)
    arguments = _array(call.payload), residual, _bytes(call.new_residual), packets
    _over_part(encoding.encode_rounded, arguments, call)


def decode(call: Decode) -> None:
    """Decode every row, or average the rows."""
    streaming = call.output.numel() >= _STREAM_ELEMENTS and call.output.data_ptr() % _STREAM_ALIGNMENT == 0
    averaged = call.packets.size(0) // call.rows
    arguments = _array(call.packets).reshape(-1), _array(call.output), averaged, streaming
    _over_part(decoding.decode, arguments, call, call.rows)


def store_rounded(call: StoreRounded) -> None:
    """Round at random."""
    first_key, second_key = map(np.uint32, keys(call.seed))
    work = partial(small_floats.store_rounded, _values(call.weights), _array(call.values), first_key, second_key)
    _share_elements(work, call.values.numel())


def adam_step(call: AdamStep) -> None:
    """Step of Adam over many tensors."""
    ends = np.cumsum([one.numel() for one in call.variances])
    runs = np.zeros((len(ends), adam.COLUMNS), dtype=np.int64)
    runs[1:, FIRST], runs[:, END] = ends[:-1], ends
    output = call.denominators if call.weights is None else call.weights
    for column, tensors in enumerate((call.gradients, call.momenta, call.variances, output), adam.GRADIENT):
        if tensors is not None:
            runs[:, column] = [one.data_ptr() for one in tensors]
    given, tracks = call.factors, call.gradients is not None
    form = adam.StepForm(
        tracks,
        tracks and call.momenta is not None,
        given.from_momentum,
        call.weights is not None,
        call.denominators is not None,
        given.eps_inside_root,
        given.holds_zero,
    )
    factors = adam.Factors(given.weight, *map(np.float32, given.others))
    _share_elements(partial(adam.adam_step, runs, factors, form), int(ends[-1]))


_FORMS = {"plain": payload.PLAIN, "divided": payload.DIVIDED, "masked": payload.MASKED}


def encode_payload(call: EncodePayload) -> None:
    """Make a part of the payload and encode it."""
    arguments = (
        _runs(call.segments, call.gradients),
        _contributing(call),
        _FORMS[call.form],
        payload.Vectors(call.momentum.data_ptr(), _address(call.denominators), _address(call.residual)),
        _array(call.lost),
        _array(call.packets).reshape(-1),
    )
    _over_part(payload.encode_payload, arguments, call)


def decode_and_move(call: DecodeAndMove) -> None:
    """Decode a part of what came back and move weights by it."""
    arguments = (
        _runs(call.segments, call.weights, call.replicas),
        np.array([np.negative(call.rates), call.decays], dtype=np.float32).T.copy(),
        _FORMS[call.form],
        call.holds,
        _array(call.packets).reshape(-1),
        _array(call.output),
        _address(call.denominators),
    )
    _over_part(moving.decode_and_move, arguments, call)


def average_and_encode(call: AverageAndEncode) -> None:
    """Average what an owner got and encode that."""
    shard = call.lost.numel()
    arguments = (
        _array(call.received).reshape(-1),
        call.received.size(0),
        _NO_BYTES if call.mask is None else _array(call.mask),
        _NO_FLOATS if call.residual is None else _array(call.residual),
        _array(call.lost),
        _array(call.packets).reshape(-1),
    )
    blocks, row_bytes = shard // call.block_size, call.packets.size(1)
    layout = Layout(form_of(call.codec), call.block_size, blocks, row_bytes, 0, shard, call.numel)
    _share(partial(payload.average_and_encode, *arguments, layout), blocks, call.block_size)


def encode_packed_payload(call: EncodePackedPayload) -> None:
    """Make a part of the payload from packed state and encode it."""
    arguments = (
        _runs(call.segments, call.gradients),
        _contributing(call),
        _array(call.tables),
        _array(call.state.packets).reshape(-1),
        _whole(call.state),
        _array(call.state.codes),
        _values(call.residual),
        _values(call.lost),
        _array(call.packets).reshape(-1),
    )
    _over_part(payload.encode_packed_payload, arguments, call)


def move_packed(call: MovePacked) -> None:
    """Move the weights of a bucket by packed momentum."""
    state, numel = call.state, call.weights.numel()
    if not numel:
        return
    runs = np.zeros((len(call.segments.places), 4), dtype=np.int64)
    runs[:, :2] = call.segments.table
    runs[:, 2] = call.moves
    first_key, second_key = map(np.uint32, keys(call.seed))
    arguments = (
        runs,
        np.array([call.rates, call.decays], dtype=np.float32).T.copy(),
        _array(state.packets).reshape(-1),
        _whole(state),
        _array(state.codes),
        _values(call.weights),
        call.first,
        first_key,
        second_key,
    )
    begin, end = call.first // state.block_size, -(-(call.first + numel) // state.block_size)
    _share(partial(moving.move_packed, *arguments), end - begin, state.block_size, begin)


_OfPart = Encode | Decode | EncodePayload | DecodeAndMove | EncodePackedPayload


def _over_part(kernel: Callable[..., None], arguments: tuple[Any, ...], call: _OfPart, rows: int | None = None) -> None:
    """Run the kernel over all blocks of a call's part, of as many `rows` as there are packets, and write the header, if
    there is one, of these."""
    part, packets, form = call.part, call.packets, form_of(call.codec)
    row_blocks = (part.last - part.first) // part.block_size
    layout = Layout(form, part.block_size, row_blocks, packets.size(1), part.first, part.shard, part.numel)
    blocks = row_blocks * (packets.size(0) if rows is None else rows)
    _share(partial(kernel, *arguments, layout), blocks, part.block_size)
    if part.header is not None:
        packets.numpy()[:, :HEADER_BYTES] = np.frombuffer(part.header, dtype=np.uint8)


def _whole(state: PackedState) -> Layout:
    row_blocks, row_bytes = state.shard // state.block_size, state.packets.size(1)
    return Layout(form_of("sign1"), state.block_size, row_blocks, row_bytes, 0, state.shard, state.numel)


def _runs(segments: Segments, *tensors: Sequence[Tensor | None]) -> NDArray[np.int64]:
    """The table of `runs`; a tensor that is missing lies nowhere and has no values."""
    runs = np.empty((len(segments.places), 2 + 2 * len(tensors)), dtype=np.int64)
    runs[:, :2] = segments.table
    for number, of_run in enumerate(tensors):
        runs[:, 2 + 2 * number] = [0 if one is None else one.data_ptr() for one in of_run]
        runs[:, 3 + 2 * number] = [NO_VALUES if one is None else FORMATS[one.dtype] for one in of_run]
    return runs


def _contributing(call: EncodePayload | EncodePackedPayload) -> NDArray[np.float32]:
    """β₁, the gradient's gain and its divisor, of each run."""
    return np.array([call.beta1, np.subtract(1.0, call.beta1), call.divisors], dtype=np.float32).T.copy()


def _values(tensor: Tensor) -> Values:
    """A contiguous tensor of floats of any width, as the loops take it."""
    return Values(_bytes(tensor), FORMATS[tensor.dtype])


def _bytes(tensor: Tensor) -> NDArray[Any]:
    return _array(tensor.detach().view(torch.uint8))


def _array(tensor: Tensor) -> NDArray[Any]:
    return tensor.detach().numpy() if tensor.requires_grad else tensor.numpy()


def _address(vector: Tensor | None) -> int:
    return 0 if vector is None else vector.data_ptr()


_workers = Workers()


def _share(work: Callable[[Range], None], blocks: int, block_size: int, begin: int = 0) -> None:
    """Do `work` in ranges that cover `blocks` from number `begin` on, one a thread."""
    most = blocks * block_size // _ELEMENTS_PER_THREAD
    threads = min(_workers.threads(), most) if most > 1 else 1
    if threads == 1:
        work(Range(begin, begin + blocks))
        return
    edges = [begin + blocks * part // threads for part in range(threads + 1)]
    _workers.each(lambda part: work(Range(edges[part], edges[part + 1])), threads, threads)


def _share_elements(work: Callable[[Range], None], numel: int) -> None:
    """Do `work` in ranges that cover `numel` elements, whole blocks of them but for the last."""
    _share(
        lambda blocks: work(Range(blocks.first * _BLOCK, min(blocks.last * _BLOCK, numel))), -(-numel // _BLOCK), _BLOCK
    )


# Before they are called

_FORM = form_of("sign1")
_RUNS, _FACTORS = np.empty((0, 4), dtype=np.int64), np.empty((0, 2), dtype=np.float32)
_LAYOUT, _RANGE = Layout(_FORM, 0, 0, 0, 0, 0, 0), Range(0, 0)
_VALUES, _KEY = small_floats.Values(_NO_BYTES, 0), np.uint32(0)

KERNELS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "adam_step": (adam.adam_step, (_RUNS, adam.Factors(*[np.float32(0)] * 7), adam.StepForm(*[False] * 7), _RANGE)),
    "encode": (encoding.encode, (_NO_FLOATS, _NO_FLOATS, _NO_BYTES, _LAYOUT, _RANGE)),
    "encode_rounded": (encoding.encode_rounded, (_NO_FLOATS, _NO_BYTES, _NO_BYTES, _NO_BYTES, _LAYOUT, _RANGE)),
    "decode": (decoding.decode, (_NO_BYTES, _NO_FLOATS, 1, False, _LAYOUT, _RANGE)),
    "store_rounded": (small_floats.store_rounded, (_VALUES, _NO_FLOATS, _KEY, _KEY, _RANGE)),
    "encode_payload": (
        payload.encode_payload,
        (_RUNS, _FACTORS, 0, payload.Vectors(0, 0, 0), _NO_FLOATS, _NO_BYTES, _LAYOUT, _RANGE),
    ),
    "average_and_encode": (
        payload.average_and_encode,
        (_NO_BYTES, 1, _NO_BYTES, _NO_FLOATS, _NO_FLOATS, _NO_BYTES, _LAYOUT, _RANGE),
    ),
    "decode_and_move": (
        moving.decode_and_move,
        (_RUNS, _FACTORS, 0, False, _NO_BYTES, _NO_FLOATS, 0, _LAYOUT, _RANGE),
    ),
    "encode_packed_payload": (
        payload.encode_packed_payload,
        (_RUNS, _FACTORS, _FACTORS, _NO_BYTES, _LAYOUT, _NO_BYTES, _VALUES, _VALUES, _NO_BYTES, _LAYOUT, _RANGE),
    ),
    "move_packed": (
        moving.move_packed,
        (_RUNS, _FACTORS, _NO_BYTES, _LAYOUT, _NO_BYTES, _VALUES, 0, _KEY, _KEY, _RANGE),
    ),
}
"""Every kernel, with arguments of the types that the backend calls it with: of one type each."""


def prepare(names: Sequence[str]) -> None:
    """Have kernels of these names compiled beside what follows, for all ranks of this host, if they are not on disk."""
    compiling.prepare(tuple(names), KERNELS, __name__)


wait = compiling.wait


def compile_kernels(names: Sequence[str] = tuple(KERNELS)) -> None:
    """Compile these kernels, or read their machine code if it is there."""
    for name in names:
        kernel, arguments = KERNELS[name]
        kernel.compile(compiling.types_of(arguments))


if __name__ == "__main__":
    compile_kernels(sys.argv[1:])
