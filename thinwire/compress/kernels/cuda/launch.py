"""CUDA launches: source text, compiler options, grid and arguments, as they lie in memory; nothing here needs a GPU.

Apart from the backend that launches, so that compilers and an emulation can check all of it on any machine."""

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

from thinwire.compress.kernels.buckets import Part, keys
from thinwire.compress.kernels.calls import Decode, Encode, StoreRounded, WriteHeaders

MAX_ROWS = 65535
"""Thread blocks in the second dimension of a grid."""

TYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
# The structures of csrc/, member by member, as kernels take them by value.
STRUCTURES = {
    "Range": np.dtype([("first", np.int64), *((name, np.uint32) for name in ("octet", "factor", "shift", "aligned"))]),
    "Rows": np.dtype([("count", np.int32), ("exact", np.int32), ("inverse", np.float32)]),
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
    "Header": np.dtype([("first", np.int64), ("second", np.int64)]),  # as its bytes lie in memory
    "HeaderRows": np.dtype([("row_bytes", np.int64), ("scales", np.int64), ("flag", np.int64)]),
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


_WARP = 32
_MAX_THREADS = 1024
_MAX_BUCKET = 1 << 35
MOMENTUM_THREADS = 256
"""Of a thread block of the kernels that take elements in eights."""
_HEADER_THREADS = 128
NO_BLOCKS = 64
"""The block size of sources that know no blocks."""
ELEMENTS_PER_THREAD = 8
"""In the kernels that know no blocks, and those of packed momenta."""
_ELEMENTS_OF_BLOCK = 16


@dataclass(frozen=True)
class Launch:
    """One kernel launch."""

    source: str
    function: str
    block_size: int
    grid: tuple[int, int]
    threads: int
    arguments: tuple[Argument, ...]
    keeps: Tensor | None = None  # memory of which the launch reads, until it is made


def encode_launch(call: Encode) -> Launch:
    """Launch that encodes."""
    addresses = [aligned("payload", call.payload), aligned("residual", call.residual)]
    function = f"encode_{call.codec}"
    if call.new_residual is not None:
        addresses.append(aligned("new_residual", call.new_residual))
        function = f"encode_rounded_{call.codec}"
    arguments = (*addresses, aligned("packets", call.packets), part_argument(call.part, call.packets))
    return part_launch(call.codec, function, call.part, call.packets, arguments)


def decode_launch(call: Decode) -> Launch:
    """Launch that decodes, or averages the rows."""
    arguments: tuple[Argument, ...] = (aligned("packets", call.packets), aligned("output", call.output))
    arguments += (part_argument(call.part, call.packets),)
    if not call.mean:
        return part_launch(call.codec, f"decode_{call.codec}", call.part, call.packets, arguments)
    arguments += (averaged_rows(call.packets.size(0)),)
    return part_launch(call.codec, f"decode_mean_{call.codec}", call.part, call.packets, arguments, rows=1)


def store_rounded_launch(call: StoreRounded) -> Launch:
    """Launch that rounds values at random into weights."""
    numel = call.weights.numel()
    addresses = (address(call.weights), address(call.values))
    arguments = (*addresses, integer(numel), structure("Keys", *keys(call.seed)))
    function = f"store_rounded_{TYPE_NAMES[call.weights.dtype]}"
    grid = -(-numel // (MOMENTUM_THREADS * ELEMENTS_PER_THREAD))
    return Launch("rounding", function, NO_BLOCKS, (grid, 1), MOMENTUM_THREADS, arguments)


def write_headers_launch(call: WriteHeaders) -> Launch:
    """Launch of a thread block for each row, which writes its header."""
    packets = call.packets
    if packets.stride(0) % 4:
        raise ValueError(f"packets has rows of {packets.stride(0)} bytes: make them a multiple of 4")
    place = structure("HeaderRows", packets.stride(0), call.scales, call.flag)
    arguments = (aligned("packets", packets), address(call.condition), call.header, place)
    return Launch("headers", "write_headers", NO_BLOCKS, (packets.size(0), 1), _HEADER_THREADS, arguments)


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
    sizes = {"BLOCK_SIZE": block_size, "THREADS": threads, "ELEMENTS_PER_THREAD": ELEMENTS_PER_THREAD}
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
    so that what a thread finds out once is spread over many, and many loads are in flight."""
    warps = -(-block_size // (_ELEMENTS_OF_BLOCK * _WARP))
    return min(warps * _WARP, _MAX_THREADS)


def part_argument(part: Part, packets: Tensor) -> Argument:
    """A part of a vector, as packets carry it."""
    row_blocks = (part.last - part.first) // part.block_size
    return structure("Part", part.numel, row_blocks, packets.size(1), part.shard, part.first)


def part_launch(
    source: str,
    function: str,
    part: Part,
    packets: Tensor,
    arguments: Sequence[Argument],
    rows: int | None = None,
) -> Launch:
    """Launch of one thread block for each block of a part, a row of them for each packet, or of as many `rows`; of an
    empty part's packets of what writes their header, if there is one."""
    grid = ((part.last - part.first) // part.block_size, packets.size(0) if rows is None else rows)
    if grid[1] > MAX_ROWS:
        raise ValueError(f"{grid[1]} packets at once: a GPU takes {MAX_ROWS} at most")
    if not grid[0] and part.header is not None:
        return write_headers_launch(WriteHeaders(packets, part.header))
    return Launch(source, function, part.block_size, grid, block_threads(part.block_size), tuple(arguments))


def octets(
    first: int, numel: int, shard: int, block_size: int, vectors: Sequence[Tensor | None]
) -> tuple[tuple[int, int], Argument]:
    """The grid over the groups of eight, counted from element 0 of a bucket, in which `numel` elements from `first` on
    lie, of `MOMENTUM_THREADS` threads each; and the range that its kernels take. `vectors`: all that hold them."""
    groups = -(-(first + numel) // ELEMENTS_PER_THREAD) - first // ELEMENTS_PER_THREAD if numel else 0
    if first + numel > _MAX_BUCKET:
        raise ValueError(f"a bucket of {first + numel} elements: a GPU's kernels number {_MAX_BUCKET} at most")
    dividing = division(max(shard // block_size, 1))
    given = structure("Range", first, first // ELEMENTS_PER_THREAD, *dividing, in_fours(first, vectors))
    return (-(-groups // MOMENTUM_THREADS), 1), given


def averaged_rows(rows: int) -> Argument:
    """How a kernel averages so many packets."""
    exact = rows & (rows - 1) == 0
    return structure("Rows", rows, exact, float(np.float32(1) / np.float32(rows)))
