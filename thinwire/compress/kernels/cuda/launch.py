"""What a CUDA launch consists of: source text, compiler options, grid and arguments; nothing here needs a GPU.

Apart from the backend that launches, so that compilers and an emulation can check all of it on any machine.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from thinwire.compress.kernels.noise import keys

__all__ = [
    "Launch",
    "apply_signs_launch",
    "block_threads",
    "compile_options",
    "decode_launch",
    "encode_launch",
    "encode_rounded_launch",
    "momentum_payload_launch",
    "source_folder",
    "source_text",
]

_WARP = 32
_MAX_THREADS = 1024
_MOMENTUM_THREADS = 256
_ELEMENTS_PER_THREAD = 8
_TYPE_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


@dataclass(frozen=True)
class Launch:
    """One kernel launch: `arguments` are addresses, counts and the bits of floats, all 64-bit integers."""

    source: str
    function: str
    block_size: int
    grid: int
    threads: int
    arguments: tuple[int, ...]


def encode_launch(
    codec: str, payload: Tensor, residual: Tensor | None, packets: Tensor, numel: int, block_size: int
) -> Launch:
    """Launch that encodes; the arguments are those of `thinwire.compress.kernels.encode`."""
    row_blocks, row_bytes = _row_sizes(payload, packets, block_size)
    arguments = (payload.data_ptr(), _address(residual), packets.data_ptr(), numel, row_blocks, row_bytes)
    return _block_launch(codec, f"encode_{codec}", payload, block_size, arguments)


def encode_rounded_launch(
    codec: str,
    payload: Tensor,
    residual: Tensor | None,
    new_residual: Tensor,
    packets: Tensor,
    numel: int,
    block_size: int,
) -> Launch:
    """Launch that encodes; the arguments are those of `thinwire.compress.kernels.encode_rounded`."""
    row_blocks, row_bytes = _row_sizes(payload, packets, block_size)
    addresses = (payload.data_ptr(), _address(residual), new_residual.data_ptr(), packets.data_ptr())
    arguments = (*addresses, numel, row_blocks, row_bytes)
    return _block_launch(codec, f"encode_rounded_{codec}", payload, block_size, arguments)


def decode_launch(codec: str, packets: Tensor, output: Tensor, numel: int, block_size: int, groups: int) -> Launch:
    """Launch that fills `groups` equal parts of `output`, each with the mean of as many rows of `packets`."""
    rows, row_bytes = packets.shape
    row_blocks = output.numel() // block_size // groups
    arguments = (packets.data_ptr(), output.data_ptr(), numel, row_blocks, row_bytes, rows // groups)
    return _block_launch(codec, f"decode_{codec}", output, block_size, arguments)


def momentum_payload_launch(
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
) -> Launch:
    """Launch with the arguments of `thinwire.compress.kernels.momentum_payload`."""
    name = _TYPE_NAMES[torch.float32 if gradient is None else gradient.dtype]
    addresses = (packets.data_ptr(), _address(gradient), codes.data_ptr(), table.data_ptr(), payload.data_ptr())
    counts = (payload.numel(), first, shard // block_size, packets.size(1))
    factors = (_float_bits(beta1), _float_bits(1.0 - beta1), _float_bits(loss_scale))
    return _momentum_launch(
        f"momentum_payload_{name}", first, payload.numel(), block_size, (*addresses, *counts, *factors)
    )


def apply_signs_launch(
    weights: Tensor,
    packets: Tensor,
    codes: Tensor,
    first: int,
    shard: int,
    block_size: int,
    lr: float,
    decay: float,
    seed: int,
) -> Launch:
    """Launch with the arguments of `thinwire.compress.kernels.apply_signs`."""
    addresses = (weights.data_ptr(), packets.data_ptr(), codes.data_ptr())
    counts = (weights.numel(), first, shard // block_size, packets.size(1))
    factors = (_float_bits(lr), _float_bits(decay), *keys(seed))
    name = f"apply_signs_{_TYPE_NAMES[weights.dtype]}"
    return _momentum_launch(name, first, weights.numel(), block_size, (*addresses, *counts, *factors))


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
    """Options for NVRTC, architecture apart. No contraction to fused multiply-adds: backends agree to the bit."""
    sizes = {"BLOCK_SIZE": block_size, "THREADS": threads, "ELEMENTS_PER_THREAD": _ELEMENTS_PER_THREAD}
    return ("-std=c++17", "--fmad=false", *(f"-D{name}={value}" for name, value in sizes.items()))


def block_threads(block_size: int) -> int:
    """Threads a thread block: whole warps, eight elements a thread where the limit allows it."""
    warps = -(-block_size // (_ELEMENTS_PER_THREAD * _WARP))
    return min(warps * _WARP, _MAX_THREADS)


def _block_launch(codec: str, function: str, vector: Tensor, block_size: int, arguments: tuple[int, ...]) -> Launch:
    """Launch of one thread block for each block of `vector`."""
    grid = vector.numel() // block_size
    return Launch(codec, function, block_size, grid, block_threads(block_size), arguments)


def _momentum_launch(function: str, first: int, numel: int, block_size: int, arguments: tuple[int, ...]) -> Launch:
    """Launch over the groups of four, counted from element 0, in which elements first to first + numel lie."""
    groups = -(-(first + numel) // 4) - first // 4 if numel else 0
    grid = -(-groups // (_MOMENTUM_THREADS * _ELEMENTS_PER_THREAD // 4))
    return Launch("momentum", function, block_size, grid, _MOMENTUM_THREADS, arguments)


def _row_sizes(vector: Tensor, packets: Tensor, block_size: int) -> tuple[int, int]:
    """Blocks and bytes of a row of `packets` that carries a part of `vector`."""
    rows, row_bytes = packets.shape
    return vector.numel() // block_size // rows, row_bytes


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _float_bits(value: float) -> int:
    """The bits of the float32 nearest to `value`."""
    return int(torch.tensor(value, dtype=torch.float32).view(torch.int32)) & 0xFFFFFFFF
