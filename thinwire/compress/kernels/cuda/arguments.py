"""How what kernels are given lies in memory: numbers, addresses of what is aligned as they need it, and structures."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

__all__ = [
    "MAX_ROWS",
    "STRUCTURES",
    "TYPE_NAMES",
    "Argument",
    "address",
    "aligned",
    "aligned_rows",
    "in_fours",
    "integer",
    "structure",
]

MAX_ROWS = 65535
"""Thread blocks in the second dimension of a grid."""

TYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
# The structures of csrc/, member by member, as kernels take them by value.
STRUCTURES = {
    "Layout": np.dtype([("numel", np.int64), ("row_blocks", np.int64), ("row_bytes", np.int64)]),
    "Factors": np.dtype(
        [("beta1", np.float32), ("gain", np.float32), ("loss_scale", np.float32), ("inverse", np.float32)]
    ),
    "Range": np.dtype([("first", np.int64), *((name, np.uint32) for name in ("octet", "factor", "shift", "aligned"))]),
    "Rows": np.dtype([("count", np.int32), ("exact", np.int32), ("inverse", np.float32)]),
    "Step": np.dtype([("lr", np.float32), ("decay", np.float32), ("first_key", np.uint32), ("second_key", np.uint32)]),
    "Keys": np.dtype([("first", np.uint32), ("second", np.uint32)]),
    "Part": np.dtype([(name, np.int64) for name in ("numel", "row_blocks", "row_bytes", "shard", "first")]),
    "PayloadRun": np.dtype(
        [
            *((name, np.int64) for name in ("first", "end", "gradient")),
            ("kind", np.int32),
            *((name, np.float32) for name in ("beta1", "gain", "weight", "divisor", "inverse")),
        ]
    ),
    "MovedRun": np.dtype(
        [
            *((name, np.int64) for name in ("first", "end", "weights", "replica")),
            *((name, np.int32) for name in ("kind", "moves")),
            *((name, np.float32) for name in ("rate", "decay")),
        ]
    ),
    "AdamRun": np.dtype(
        [(name, np.int64) for name in ("first", "end", "numel", "gradient", "momentum", "variance", "output")]
    ),
    "AdamFactors": np.dtype(
        [
            *((name, np.float32) for name in ("weight", "beta2", "square_gain", "correction", "eps", "decay", "rate")),
            *((name, np.int32) for name in ("from_momentum", "eps_inside_root", "holds_zero")),
        ]
    ),
    "Header": np.dtype([("first", np.int64), ("second", np.int64)]),
    "HeaderRows": np.dtype([("rows", np.int64), ("row_bytes", np.int64), ("scales", np.int64), ("flag", np.int64)]),
}

Argument = bytes
"""An address, a number or a structure, as a kernel finds it in memory."""

_FORMATS = {
    np.dtype(kind): form for kind, form in ((np.int64, "q"), (np.uint32, "I"), (np.int32, "i"), (np.float32, "f"))
}
_PACKERS = {
    name: struct.Struct("<" + "".join(_FORMATS[kind.fields[member][0]] for member in kind.names or ()))
    for name, kind in STRUCTURES.items()
    if kind.fields is not None
}
_INTEGER = struct.Struct("<q")


def structure(name: str, *members: float) -> Argument:
    """One of `STRUCTURES`, by its members in order."""
    return _PACKERS[name].pack(*members)


def aligned(name: str, tensor: Tensor | None) -> Argument:
    """Address of what a kernel reads or writes four elements at a time."""
    if tensor is not None and tensor.data_ptr() % (4 * tensor.element_size()):
        raise ValueError(
            f"{name} starts at an address that is not a multiple of {4 * tensor.element_size()} bytes: "
            "take slices at multiples of 4 elements, or clone it"
        )
    return address(tensor)


def aligned_rows(name: str, rows: Tensor) -> Argument:
    """Address of rows of bytes that a kernel reads or writes as words."""
    if rows.stride(0) % 4:
        raise ValueError(f"{name} has rows of {rows.stride(0)} bytes: make them a multiple of 4")
    return aligned(name, rows)


def address(tensor: Tensor | None) -> Argument:
    """Where a tensor lies; 0 where there is none."""
    return integer(0 if tensor is None else tensor.data_ptr())


def integer(value: int) -> Argument:
    """64 bits."""
    return _INTEGER.pack(value)


def in_fours(first: int, vectors: Sequence[Tensor | None]) -> bool:
    """Whether in vectors that begin at element `first` of a bucket each element whose number is a multiple of four lies
    at a multiple of four times its size."""
    return all(
        (one.data_ptr() - first * one.element_size()) % (4 * one.element_size()) == 0
        for one in vectors
        if one is not None
    )
