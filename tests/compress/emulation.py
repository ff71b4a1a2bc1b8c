"""A kernel backend that runs csrc/ on the CPU: the same sources and launch geometry as on a GPU, compiled by g++."""

from __future__ import annotations

import ctypes
import functools
import itertools
import shutil
import subprocess
import tempfile
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
_seeds = itertools.count()


def encode(codec: str, payload: Tensor, residual: Tensor | None, packets: Tensor, numel: int, block_size: int) -> None:
    _run(encode_launch(codec, payload, residual, packets, numel, block_size))


def decode(codec: str, packets: Tensor, output: Tensor, numel: int, block_size: int) -> None:
    _run(decode_launch(codec, packets, output, numel, block_size, groups=packets.size(0)))


def decode_mean(codec: str, packets: Tensor, output: Tensor, numel: int, block_size: int) -> None:
    _run(decode_launch(codec, packets, output, numel, block_size, groups=1))


def _run(launch: Launch) -> None:
    library = _library(launch.codec, launch.block_size)
    kernel = ctypes.cast(getattr(library, launch.function), ctypes.c_void_p)
    arguments = (ctypes.c_longlong * len(launch.arguments))(*launch.arguments)
    seed = next(_seeds)
    status = library.emulate(kernel, ctypes.c_longlong(launch.grid), launch.threads, arguments, seed)
    assert status == 0, f"the threads of {launch.function} wait for each other for ever"


@functools.cache
def _library(codec: str, block_size: int) -> ctypes.CDLL:
    assert COMPILER
    definitions = [option for option in compile_options(block_size) if option.startswith("-D")]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernels.so"
        command = [COMPILER, "-std=c++20", "-O0", "-ffp-contract=off", "-fPIC", "-shared", *definitions]
        command += ["-include", str(_HEADER), "-x", "c++", str(source_folder() / f"{codec}.cu"), "-o", str(path)]
        subprocess.run(command, check=True, capture_output=True, text=True)
        return ctypes.CDLL(str(path))
