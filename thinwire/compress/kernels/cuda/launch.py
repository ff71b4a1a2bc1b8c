"""What a CUDA launch consists of: source text, compiler options, grid and arguments; nothing here needs a GPU.

Apart from the backend that launches, so that compilers and an emulation can check all of it on any machine.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from thinwire.compress.kernels.calls import ApplySigns, Decode, Encode, MomentumPayload, PacketCall, StoreRounded
from thinwire.compress.kernels.header_calls import CheckHeaders, WriteHeaders
from thinwire.compress.kernels.noise import keys

__all__ = [
    "STRUCTURES",
    "Argument",
    "Launch",
    "apply_signs_launch",
    "architecture_option",
    "block_threads",
    "check_headers_launch",
    "compile_options",
    "decode_launch",
    "division",
    "encode_launch",
    "exact_inverse",
    "momentum_payload_launch",
    "source_folder",
    "source_text",
    "store_rounded_launch",
    "write_headers_launch",
]

_WARP = 32
_MAX_THREADS = 1024
_MAX_ROWS = 65535
_MAX_BUCKET = 1 << 35
_MOMENTUM_THREADS = 256
_HEADER_THREADS = 128
_NO_BLOCKS = 64  # the block size of sources that know no blocks
_ELEMENTS_PER_THREAD = 8
_ELEMENTS_OF_BLOCK = 16
_TYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}

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


@dataclass(frozen=True)
class Launch:
    """One kernel launch."""

    source: str
    function: str
    block_size: int
    grid: tuple[int, int]
    threads: int
    arguments: tuple[Argument, ...]


def encode_launch(run: Encode) -> Launch:
    """Launch that encodes one of a call's runs."""
    addresses = [_aligned("payload", run.payload), _aligned("residual", run.residual)]
    function = f"encode_{run.codec}"
    if run.new_residual is not None:
        addresses.append(_aligned("new_residual", run.new_residual))
        function = f"encode_rounded_{run.codec}"
    arguments = (*addresses, _aligned("packets", run.packets), _layout(run, run.numel))
    return _block_launch(run, function, run.payload, arguments)


def decode_launch(run: Decode) -> Launch:
    """Launch that decodes one of a call's runs, or averages its rows."""
    arguments: tuple[Argument, ...] = (_aligned("packets", run.packets), _aligned("output", run.output))
    arguments += (_layout(run, run.numel),)
    if not run.mean:
        return _block_launch(run, f"decode_{run.codec}", run.output, arguments)
    rows = run.averaged
    exact = rows & (rows - 1) == 0
    arguments += (_structure("Rows", rows, exact, float(np.float32(1) / np.float32(rows))),)
    return _block_launch(run, f"decode_mean_{run.codec}", run.output, arguments)


def momentum_payload_launch(call: MomentumPayload) -> Launch:
    """Launch that writes the payload of leg 1."""
    name = _TYPE_NAMES[torch.float32 if call.gradient is None else call.gradient.dtype]
    vectors = (call.gradient, call.codes, call.payload)
    addresses = (_aligned("packets", call.packets), *map(_address, (*vectors[:2], call.table, call.payload)))
    factors = _structure("Factors", call.beta1, 1.0 - call.beta1, call.loss_scale, exact_inverse(call.loss_scale))
    return _momentum_launch(call, f"momentum_payload_{name}", vectors, addresses, factors)


def apply_signs_launch(call: ApplySigns) -> Launch:
    """Launch that updates the weights."""
    name = _TYPE_NAMES[call.weights.dtype]
    addresses = (_address(call.weights), _aligned("packets", call.packets), _address(call.codes))
    step = _structure("Step", call.lr, call.decay, *keys(call.seed))
    return _momentum_launch(call, f"apply_signs_{name}", (call.weights, call.codes), addresses, step)


def store_rounded_launch(call: StoreRounded) -> Launch:
    """Launch that rounds values at random into weights."""
    numel = call.weights.numel()
    addresses = (_address(call.weights), _address(call.values))
    arguments = (*addresses, _INTEGER.pack(numel), _structure("Keys", *keys(call.seed)))
    function = f"store_rounded_{_TYPE_NAMES[call.weights.dtype]}"
    grid = -(-numel // (_MOMENTUM_THREADS * _ELEMENTS_PER_THREAD))
    return Launch("rounding", function, _NO_BLOCKS, (grid, 1), _MOMENTUM_THREADS, arguments)


def write_headers_launch(call: WriteHeaders) -> Launch:
    """Launch of a thread block for each row, which writes its header."""
    rows = call.packets.size(0)
    header = _structure("Header", call.first, call.second)
    place = _structure("HeaderRows", rows, call.packets.stride(0), call.scales, call.flag)
    arguments = (_aligned_rows("packets", call.packets), _address(call.condition), header, place)
    return Launch("headers", "write_headers", _NO_BLOCKS, (rows, 1), _HEADER_THREADS, arguments)


def check_headers_launch(call: CheckHeaders) -> Launch:
    """Launch of one thread block that looks at all rows."""
    expected = _structure("Header", call.first, call.second)
    place = _structure("HeaderRows", call.headers.size(0), call.headers.stride(0), 0, call.known)
    arguments = (_aligned_rows("headers", call.headers), _address(call.report), expected, place)
    return Launch("headers", "check_headers", _NO_BLOCKS, (1, 1), _HEADER_THREADS, arguments)


def source_folder() -> Path:
    """Folder of the CUDA sources: beside the package in a checkout, inside it in a wheel."""
    package = Path(__file__).resolve().parents[3]
    candidates = [package.parent / "csrc", package / "csrc"]
    for folder in candidates:
        if (folder / "block.cuh").is_file():
            return folder
    raise FileNotFoundError(
        f"no CUDA sources in {' or '.join(map(str, candidates))}: the installation is incomplete, reinstall thinwire"
    )


def source_text(source: str) -> str:
    """CUDA C++ of the kernels in `source`, its headers pasted in: caches of compiled code look at this text only."""
    folder = source_folder()

    def read(name: str) -> str:
        return re.sub(r'#include "(.*)"', lambda include: read(include[1]), (folder / name).read_text())

    return read(f"{source}.cu")


def compile_options(block_size: int, threads: int) -> tuple[str, ...]:
    """Options for NVRTC, architecture apart. Backends agree to the bit: no contraction to fused multiply-adds,
    subnormals as they are, division and root rounded as IEEE 754 says."""
    sizes = {"BLOCK_SIZE": block_size, "THREADS": threads, "ELEMENTS_PER_THREAD": _ELEMENTS_PER_THREAD}
    exact = ("--fmad=false", "--ftz=false", "--prec-div=true", "--prec-sqrt=true")
    return ("-std=c++17", *exact, *(f"-D{name}={value}" for name, value in sizes.items()))


def architecture_option(capability: tuple[int, int], known: Sequence[int]) -> str:
    """The option that names what to compile for, by a GPU's compute capability and the architectures that the compiler
    knows: its machine code, or that of an elder sister, or PTX, which the driver compiles for GPUs to come."""
    wanted = capability[0] * 10 + capability[1]
    if family := [one for one in known if one // 10 == capability[0] and one <= wanted]:
        return f"-arch=sm_{max(family)}"
    if older := [one for one in known if one <= wanted]:
        return f"-arch=compute_{max(older)}"
    raise RuntimeError(f"this compiler knows no GPU as old as sm_{wanted}: it begins at sm_{min(known)}")


def division(divisor: int) -> tuple[int, int]:
    """Factor and shift by which a kernel divides: n // divisor = 2n · factor >> 32 >> shift, for 0 ≤ n < 2^31."""
    shift = (divisor - 1).bit_length()
    return -((-1 << 31 + shift) // divisor), shift


def exact_inverse(value: float) -> float:
    """1 / value where both are float32's, as with powers of two; else 0."""
    mantissa, exponent = math.frexp(value)
    return 1.0 / value if mantissa == 0.5 and -148 <= 1 - exponent <= 127 else 0.0


def block_threads(block_size: int) -> int:
    """Threads of a thread block that serves a block: whole warps, sixteen elements a thread where the limit allows it,
    so that what a thread finds out once is spread over many, and many loads are under way."""
    warps = -(-block_size // (_ELEMENTS_OF_BLOCK * _WARP))
    return min(warps * _WARP, _MAX_THREADS)


def _block_launch(run: Encode | Decode, function: str, vector: Tensor, arguments: tuple[Argument, ...]) -> Launch:
    """Launch of one thread block for each block of `vector`: a row of them for each packet that is read or written."""
    row_blocks = run.shard // run.block_size
    grid = (row_blocks, vector.numel() // run.block_size // row_blocks if row_blocks else 0)
    if grid[1] > _MAX_ROWS:
        raise ValueError(f"{grid[1]} packets at once: a GPU takes {_MAX_ROWS} at most")
    return Launch(run.codec, function, run.block_size, grid, block_threads(run.block_size), arguments)


def _momentum_launch(
    call: MomentumPayload | ApplySigns,
    function: str,
    vectors: Sequence[Tensor | None],
    addresses: tuple[Argument, ...],
    factors: Argument,
) -> Launch:
    """Launch over the groups of eight, counted from element 0 of the bucket, in which elements of `vectors` lie."""
    first, numel = call.first, call.codes.numel()
    groups = -(-(first + numel) // _ELEMENTS_PER_THREAD) - first // _ELEMENTS_PER_THREAD if numel else 0
    grid = -(-groups // _MOMENTUM_THREADS)
    if first + numel > _MAX_BUCKET:
        raise ValueError(f"a bucket of {first + numel} elements: a GPU's kernels number {_MAX_BUCKET} at most")
    dividing = division(max(call.shard // call.block_size, 1))
    arguments = (
        *addresses,
        _layout(call, numel),
        _structure("Range", first, first // _ELEMENTS_PER_THREAD, *dividing, 0),
        factors,
    )
    return Launch("momentum", function, call.block_size, (grid, 1), _MOMENTUM_THREADS, arguments)


def _in_fours(first: int, vectors: Sequence[Tensor | None]) -> bool:
    """Whether in vectors that begin at element `first` of a bucket each element whose number is a multiple of four lies
    at a multiple of four times its size."""
    return all(
        (one.data_ptr() - first * one.element_size()) % (4 * one.element_size()) == 0
        for one in vectors
        if one is not None
    )


def _layout(call: PacketCall, numel: int) -> Argument:
    return _structure("Layout", numel, call.shard // call.block_size, call.packets.size(1))


def _structure(name: str, *members: float) -> Argument:
    return _PACKERS[name].pack(*members)


def _aligned(name: str, tensor: Tensor | None) -> Argument:
    """Address of what a kernel reads or writes four elements at a time."""
    if tensor is not None and tensor.data_ptr() % (4 * tensor.element_size()):
        raise ValueError(
            f"{name} starts at an address that is not a multiple of {4 * tensor.element_size()} bytes: "
            "take slices at multiples of 4 elements, or clone it"
        )
    return _address(tensor)


def _aligned_rows(name: str, rows: Tensor) -> Argument:
    """Address of rows of bytes that a kernel reads or writes as words."""
    if rows.stride(0) % 4:
        raise ValueError(f"{name} has rows of {rows.stride(0)} bytes: make them a multiple of 4")
    return _aligned(name, rows)


def _address(tensor: Tensor | None) -> Argument:
    return _INTEGER.pack(0 if tensor is None else tensor.data_ptr())
