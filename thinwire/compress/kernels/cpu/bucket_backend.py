"""The CPU backend of the kernels over a whole bucket: what `bucket_reference` describes, shared out to threads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from thinwire.compress.kernels.bucket_calls import AverageAndEncode, DecodeAndMove, EncodePayload, Part, Segments
from thinwire.compress.kernels.cpu import moving, payload
from thinwire.compress.kernels.cpu.backend import array, share_blocks, values
from thinwire.compress.kernels.cpu.blocks import Layout, PartLayout, Range, form_of
from thinwire.compress.kernels.cpu.small_floats import FORMATS, NO_VALUES
from thinwire.compress.kernels.noise import keys
from thinwire.compress.kernels.packed_calls import EncodePackedPayload, MovePacked, PackedState
from thinwire.compress.packet_layout import HEADER_BYTES

__all__ = ["average_and_encode", "decode_and_move", "encode_packed_payload", "encode_payload", "move_packed"]

_FORMS = {"plain": payload.PLAIN, "divided": payload.DIVIDED, "masked": payload.MASKED}
_NO_FLOATS = np.empty(0, dtype=np.float32)


def encode_payload(call: EncodePayload) -> None:
    """See `thinwire.compress.kernels.buckets.encode_payload`."""
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
    """See `thinwire.compress.kernels.buckets.decode_and_move`."""
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
    """See `thinwire.compress.kernels.buckets.average_and_encode`."""
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
    """See `thinwire.compress.kernels.buckets.encode_packed_payload`."""
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
    """See `thinwire.compress.kernels.buckets.move_packed`."""
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
