"""Where everything sits inside a packet row, and the checks every kernel call passes first.

One place knows the byte offsets and the rules, so that no backend has to repeat or re-check them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "BLOCK_MULTIPLE",
    "CODE_BITS",
    "HEADER_BYTES",
    "MAX_BLOCK_SIZE",
    "SCALE_BYTES",
    "check_apply_signs",
    "check_decode",
    "check_decode_mean",
    "check_encode",
    "check_encode_rounded",
    "check_momentum_payload",
    "codes_offset",
    "packet_bytes",
    "runs",
    "scales",
    "span",
]

HEADER_BYTES = 16
SCALE_BYTES = 4
BLOCK_MULTIPLE = 64
MAX_BLOCK_SIZE = 65536
CODE_BITS = {"sign1": 1, "int8": 8}

_FLOAT_TYPES = (torch.float32, torch.bfloat16, torch.float16)
_TABLE_ENTRIES = 256
_SINGLE = torch.finfo(torch.float32)


def scales(codec: str, packets: Tensor, block_size: int) -> Tensor:
    """The scales in `packets`, uint8 [rows, packet_bytes]: fp32 [rows, blocks], a view."""
    block_bytes = SCALE_BYTES + block_size * CODE_BITS[codec] // 8
    blocks = (packets.shape[1] - HEADER_BYTES) // block_bytes
    return packets[:, HEADER_BYTES : HEADER_BYTES + SCALE_BYTES * blocks].view(torch.float32)


def span(vector: Tensor) -> int:
    """Elements from the first of a vector, or of [rows, shard], to its last, what lies between rows included."""
    if vector.dim() < 2 or not vector.numel():
        return vector.numel()
    return (vector.size(0) - 1) * vector.stride(0) + vector.size(1)


def runs(packets: Tensor, numel: int, vector: Tensor, *others: Tensor | None) -> Iterator[tuple[Any, ...]]:
    """What lies in one piece: everything, or one row after the other, where the rows of floats lie apart.

    Yields the packets, how many of their elements are valid, and `vector` and `others` about these, flat.
    """
    vectors = (vector, *others)
    if vector.is_contiguous():
        yield packets, numel, *(None if one is None else one.view(-1) for one in vectors)
        return
    rows, shard = vector.shape
    for row in range(rows):
        valid = min(max(numel - row * vector.stride(0), 0), shard)
        yield packets[row : row + 1], valid, *(None if one is None else one[row] for one in vectors)


def codes_offset(shard: int, block_size: int) -> int:
    """Offset in bytes of the codes inside a packet row: after the header and one fp32 scale a block."""
    return HEADER_BYTES + SCALE_BYTES * (shard // block_size)


def packet_bytes(codec: str, shard: int, block_size: int) -> int:
    """Length in bytes of one packet row that carries `shard` elements.

    Raises ValueError for an unknown codec, a block size that is not a multiple of 64 between 64 and
    65536, or a shard that is not whole blocks.
    """
    _check_block_size(block_size)
    if shard < 0 or shard % block_size:
        raise ValueError(
            f"a shard of {shard} elements is not a whole number of blocks of {block_size}: "
            f"pad it to a multiple of block_size"
        )
    return codes_offset(shard, block_size) + shard * _code_bits(codec) // 8


def check_encode(
    codec: str, payload: Tensor, residual: Tensor | None, packets: Tensor, numel: int, block_size: int
) -> None:
    """Raise TypeError or ValueError unless the arguments of `encode` fit together."""
    _check_packets(codec, packets)
    _check_run("payload", payload, packets, torch.float32)
    if residual is not None:
        _check_laid_out_like("residual", residual, torch.float32, payload, packets)
    _check_rows(codec, "payload", payload.numel(), packets.size(0), packets, block_size)
    _check_numel(numel, "payload", span(payload))


def check_encode_rounded(
    codec: str,
    payload: Tensor,
    residual: Tensor | None,
    new_residual: Tensor,
    packets: Tensor,
    numel: int,
    block_size: int,
) -> None:
    """Raise TypeError or ValueError unless the arguments of `encode_rounded` fit together."""
    _check_packets(codec, packets)
    _check_run("payload", payload, packets, torch.float32)
    if residual is not None:
        _check_laid_out_like("residual", residual, torch.bfloat16, payload, packets)
    _check_laid_out_like("new_residual", new_residual, torch.bfloat16, payload, packets)
    _check_rows(codec, "payload", payload.numel(), packets.size(0), packets, block_size)
    _check_numel(numel, "payload", span(payload))


def check_decode(codec: str, packets: Tensor, output: Tensor, numel: int, block_size: int) -> None:
    """Raise TypeError or ValueError unless the arguments of `decode` fit together."""
    _check_packets(codec, packets)
    _check_run("output", output, packets, torch.float32)
    _check_rows(codec, "output", output.numel(), packets.size(0), packets, block_size)
    _check_numel(numel, "output", span(output))


def check_decode_mean(codec: str, packets: Tensor, output: Tensor, numel: int, block_size: int) -> None:
    """Raise TypeError or ValueError unless the arguments of `decode_mean` fit together."""
    _check_packets(codec, packets)
    _check_vector("output", output, packets)
    _check_rows(codec, "output", output.numel(), 1, packets, block_size)
    _check_numel(numel, "output", output.numel())


def check_momentum_payload(
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
    """Raise TypeError or ValueError unless the arguments of `momentum_payload` fit together."""
    _check_packets("sign1", packets)
    _check_vector("payload", payload, packets)
    _check_like("codes", codes, (torch.uint8,), "payload", payload, packets)
    if gradient is not None:
        _check_like("gradient", gradient, _FLOAT_TYPES, "payload", payload, packets)
    _check_vector("table", table, packets)
    if table.numel() != _TABLE_ENTRIES:
        raise ValueError(f"table has {table.numel()} entries: give one for each of the {_TABLE_ENTRIES} codes")
    _check_range(first, payload.numel(), shard, packets, block_size)
    if not 0.0 <= beta1 <= 1.0:
        raise ValueError(f"beta1 is {beta1}: it must lie between 0 and 1")
    if not _SINGLE.tiny <= loss_scale <= _SINGLE.max:
        raise ValueError(f"loss_scale is {loss_scale}: it must be positive and finite, in float32")


def check_apply_signs(
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
    """Raise TypeError or ValueError unless the arguments of `apply_signs` fit together."""
    _check_packets("sign1", packets)
    _check_vector("weights", weights, packets, _FLOAT_TYPES)
    _check_like("codes", codes, (torch.uint8,), "weights", weights, packets)
    _check_range(first, weights.numel(), shard, packets, block_size)
    for name, factor in (("lr", lr), ("decay", decay)):
        if not -_SINGLE.max <= factor <= _SINGLE.max:
            raise ValueError(f"{name} is {factor}: it must be finite, in float32")


def _code_bits(codec: str) -> int:
    if codec not in CODE_BITS:
        raise ValueError(f"no kernels for codec {codec!r}: choose one of {', '.join(CODE_BITS)}")
    return CODE_BITS[codec]


def _check_block_size(block_size: int) -> None:
    if block_size < BLOCK_MULTIPLE or block_size > MAX_BLOCK_SIZE or block_size % BLOCK_MULTIPLE:
        raise ValueError(
            f"block_size is {block_size}: it must be a multiple of {BLOCK_MULTIPLE} "
            f"from {BLOCK_MULTIPLE} to {MAX_BLOCK_SIZE}"
        )


def _check_packets(codec: str, packets: Tensor) -> None:
    _code_bits(codec)
    if packets.dtype != torch.uint8:
        raise TypeError(f"packets must be torch.uint8, got {packets.dtype}")
    if packets.dim() != 2 or packets.size(0) < 1:
        raise ValueError(
            f"packets must have the shape [rows, packet_bytes] with at least one row, got {tuple(packets.shape)}"
        )
    if not packets.is_contiguous():
        raise ValueError("packets must be contiguous: call .contiguous() first")


def _check_vector(
    name: str, vector: Tensor, packets: Tensor, dtypes: tuple[torch.dtype, ...] = (torch.float32,)
) -> None:
    if vector.dtype not in dtypes:
        raise TypeError(f"{name} must be {' or '.join(map(str, dtypes))}, got {vector.dtype}: convert it first")
    if vector.dim() != 1 or not vector.is_contiguous():
        raise ValueError(
            f"{name} must be a contiguous vector, got shape {tuple(vector.shape)} "
            f"with strides {vector.stride()}: flatten it first"
        )
    if vector.device != packets.device:
        raise ValueError(f"{name} is on {vector.device} and packets on {packets.device}: use one device")


def _check_run(name: str, vector: Tensor, packets: Tensor, dtype: torch.dtype) -> None:
    """A vector, or rows of floats that may lie apart, one for each packet."""
    if vector.dim() != 2:
        _check_vector(name, vector, packets, (dtype,))
        return
    rows, shard = vector.shape
    if rows != packets.size(0) or vector.stride(1) != 1 or (rows > 1 and vector.stride(0) < shard):
        raise ValueError(
            f"{name} must be a contiguous vector, or have a row without gaps for each of the {packets.size(0)} rows of "
            f"packets, got shape {tuple(vector.shape)} with strides {vector.stride()}"
        )
    _check_vector(name, vector[0], packets, (dtype,))


def _check_laid_out_like(name: str, vector: Tensor, dtype: torch.dtype, payload: Tensor, packets: Tensor) -> None:
    """A second vector or rows of floats, laid out in memory as the payload is."""
    _check_run(name, vector, packets, dtype)
    if vector.numel() != payload.numel():
        raise ValueError(f"{name} has {vector.numel()} elements and payload {payload.numel()}: give both the same")
    if vector.dim() != payload.dim() or (vector.dim() == 2 and vector.stride() != payload.stride()):
        raise ValueError(f"{name} has strides {vector.stride()} and payload {payload.stride()}: lay both out alike")


def _check_like(
    name: str, vector: Tensor, dtypes: tuple[torch.dtype, ...], other_name: str, other: Tensor, packets: Tensor
) -> None:
    _check_vector(name, vector, packets, dtypes)
    if vector.numel() != other.numel():
        raise ValueError(f"{name} has {vector.numel()} elements and {other_name} {other.numel()}: give both the same")


def _check_range(first: int, numel: int, shard: int, packets: Tensor, block_size: int) -> None:
    rows = packets.size(0)
    _check_row_bytes("sign1", shard, packets, block_size)
    if first < 0 or first + numel > rows * shard:
        raise ValueError(
            f"{numel} elements from number {first} on do not lie in the {rows} rows of {shard} elements that "
            f"packets has: count from the start of the bucket"
        )


def _check_rows(codec: str, name: str, numel: int, rows: int, packets: Tensor, block_size: int) -> None:
    if numel % rows:
        raise ValueError(f"{name} has {numel} elements, not a multiple of the {rows} rows of packets")
    _check_row_bytes(codec, numel // rows, packets, block_size)


def _check_row_bytes(codec: str, shard: int, packets: Tensor, block_size: int) -> None:
    expected = packet_bytes(codec, shard, block_size)
    if packets.size(1) != expected:
        raise ValueError(
            f"packets has rows of {packets.size(1)} bytes, but a {codec} row of {shard} elements in "
            f"blocks of {block_size} takes {expected}: size it with packet_bytes()"
        )


def _check_numel(numel: int, name: str, capacity: int) -> None:
    if numel < 0 or numel > capacity:
        raise ValueError(f"numel is {numel}: it must lie between 0 and the {capacity} elements of {name}")
