"""A kernel backend that runs csrc/ on the CPU: the same sources and launch geometry as on a GPU, compiled by g++."""

from __future__ import annotations

import ctypes
import functools
import secrets
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from thinwire.compress.kernels.cuda_launch import (
    Launch,
    compile_options,
    decode_launch,
    encode_launch,
    source_folder,
)

COMPILER = shutil.which("g++")
_HEADER = Path(__file__).with_name("cuda_emulation.h")


def encode(codec: str, payload: Tensor, residual: Tensor | None, packets: Tensor, numel: int, block_size: int) -> None:
    _run(encode_launch(codec, payload, residual, packets, numel, block_size))


def decode(codec: str, packets: Tensor, output: Tensor, numel: int, block_size: int) -> None:
    _run(decode_launch(codec, packets, output, numel, block_size, groups=packets.size(0)))


def decode_mean(codec: str, packets: Tensor, output: Tensor, numel: int, block_size: int) -> None:
    _run(decode_launch(codec, packets, output, numel, block_size, groups=1))


def compile_source(source: Path, definitions: Sequence[str]) -> ctypes.CDLL:
    """Library of the kernels in `source`, without optimisation: compiling is what takes the time."""
    assert COMPILER
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernels.so"
        command = [COMPILER, "-std=c++20", "-O0", "-ffp-contract=off", "-fPIC", "-shared", *definitions]
        command += ["-include", str(_HEADER), "-x", "c++", str(source), "-o", str(path)]
        result = subprocess.run(command, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        return ctypes.CDLL(str(path))


def launch(library: ctypes.CDLL, function: str, grid: int, threads: int, arguments: Sequence[int]) -> int:
    """Run a kernel, its threads in a random order; 0 on success, 1 if they wait for each other for ever."""
    kernel = ctypes.cast(getattr(library, function), ctypes.c_void_p)
    values = (ctypes.c_longlong * len(arguments))(*arguments)
    return int(library.emulate(kernel, ctypes.c_longlong(grid), threads, values, secrets.randbits(32)))


def _run(planned: Launch) -> None:
    library = _library(planned.codec, planned.block_size)
    status = launch(library, planned.function, planned.grid, planned.threads, planned.arguments)
    assert status == 0, f"the threads of {planned.function} wait for each other for ever"


@functools.cache
def _library(codec: str, block_size: int) -> ctypes.CDLL:
    definitions = [option for option in compile_options(block_size) if option.startswith("-D")]
    return compile_source(source_folder() / f"{codec}.cu", definitions)
