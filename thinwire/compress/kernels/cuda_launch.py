"""What a CUDA launch consists of: source text, compiler options, grid and arguments; nothing here needs a GPU.

Apart from the backend that launches, so that compilers and an emulation can check all of it on any machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

__all__ = ["Launch", "compile_options", "decode_launch", "encode_launch", "source_folder", "source_text"]

_WARP = 32
_MAX_THREADS = 1024
_ELEMENTS_PER_THREAD = 8


@dataclass(frozen=True)
class Launch:
    """One kernel launch: `arguments` are addresses and counts, all 64-bit integers."""

    codec: str
    function: str
    block_size: int
    grid: int
    threads: int
    arguments: tuple[int, ...]


def encode_launch(
    codec: str, payload: Tensor, residual: Tensor | None, packets: Tensor, numel: int, block_size: int
) -> Launch:
    """Launch that encodes; the arguments are those of `thinwire.compress.kernels.encode`."""
    rows, row_bytes = packets.shape
    blocks = payload.numel() // block_size
    lost = 0 if residual is None else residual.data_ptr()
    arguments = (payload.data_ptr(), lost, packets.data_ptr(), numel, blocks // rows, row_bytes)
    return Launch(codec, f"encode_{codec}", block_size, blocks, _threads(block_size), arguments)


def decode_launch(codec: str, packets: Tensor, output: Tensor, numel: int, block_size: int, groups: int) -> Launch:
    """Launch that fills `groups` equal parts of `output`, each with the mean of as many rows of `packets`."""
    rows, row_bytes = packets.shape
    blocks = output.numel() // block_size
    arguments = (packets.data_ptr(), output.data_ptr(), numel, blocks // groups, row_bytes, rows // groups)
    return Launch(codec, f"decode_{codec}", block_size, blocks, _threads(block_size), arguments)


def source_folder() -> Path:
    """Folder of the CUDA sources: beside the package in a checkout, inside it in a wheel."""
    package = Path(__file__).resolve().parents[2]
    candidates = [package.parent / "csrc", package / "csrc"]
    for folder in candidates:
        if (folder / "block.cuh").is_file():
            return folder
    raise FileNotFoundError(
        f"no CUDA sources in {' or '.join(map(str, candidates))}: the installation is incomplete, reinstall thinwire"
    )


def source_text(codec: str) -> str:
    """CUDA C++ of a codec's kernels, its one header pasted in: caches of compiled code look at this text only."""
    folder = source_folder()
    return (folder / f"{codec}.cu").read_text().replace('#include "block.cuh"', (folder / "block.cuh").read_text())


def compile_options(block_size: int) -> tuple[str, ...]:
    """Options for NVRTC, architecture apart. No contraction to fused multiply-adds: backends agree to the bit."""
    return ("-std=c++17", "--fmad=false", f"-DBLOCK_SIZE={block_size}", f"-DTHREADS={_threads(block_size)}")


def _threads(block_size: int) -> int:
    """Threads a thread block: whole warps, eight elements a thread where the limit allows it."""
    warps = -(-block_size // (_ELEMENTS_PER_THREAD * _WARP))
    return min(warps * _WARP, _MAX_THREADS)
