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
from typing import Any

from torch import Tensor

from thinwire.compress.kernels.cuda.launch import (
    Launch,
    apply_signs_launch,
    compile_options,
    decode_launch,
    encode_launch,
    encode_rounded_launch,
    momentum_payload_launch,
    source_folder,
)

COMPILER = shutil.which("g++")
MAX_ARGUMENTS = 12
_HEADER = Path(__file__).with_name("cuda_emulation.h")


def encode(*arguments: Any) -> None:
    _run(encode_launch(*arguments))


def encode_rounded(*arguments: Any) -> None:
    _run(encode_rounded_launch(*arguments))


def decode(codec: str, packets: Tensor, output: Tensor, numel: int, block_size: int) -> None:
    _run(decode_launch(codec, packets, output, numel, block_size, groups=packets.size(0)))


def decode_mean(codec: str, packets: Tensor, output: Tensor, numel: int, block_size: int) -> None:
    _run(decode_launch(codec, packets, output, numel, block_size, groups=1))


def momentum_payload(*arguments: Any) -> None:
    _run(momentum_payload_launch(*arguments))


def apply_signs(*arguments: Any) -> None:
    _run(apply_signs_launch(*arguments))


def compile_source(source: Path, definitions: Sequence[str]) -> ctypes.CDLL:
    """Library of the kernels in `source`, without optimisation: compiling is what takes the time."""
    assert COMPILER
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernels.so"
        command = [COMPILER, "-std=c++20", "-O0", "-ffp-contract=off", "-fPIC", "-shared", *definitions]
        command += ["-fsanitize=alignment", "-fsanitize-undefined-trap-on-error"]  # as a GPU does
        command += ["-include", str(_HEADER), "-x", "c++", str(source), "-o", str(path)]
        result = subprocess.run(command, capture_output=True, text=True)
        assert result.returncode == 0, result.stderr
        return ctypes.CDLL(str(path))


def launch(library: ctypes.CDLL, function: str, grid: int, threads: int, arguments: Sequence[int]) -> int:
    """Run a kernel, its threads in a random order; 0 on success, 1 if they wait for each other for ever."""
    kernel = ctypes.cast(getattr(library, function), ctypes.c_void_p)
    values = (ctypes.c_longlong * MAX_ARGUMENTS)(*arguments)
    return int(library.emulate(kernel, ctypes.c_longlong(grid), threads, values, secrets.randbits(32)))


def _run(planned: Launch) -> None:
    library = _library(planned.source, planned.block_size, planned.threads)
    status = launch(library, planned.function, planned.grid, planned.threads, planned.arguments)
    assert status == 0, f"the threads of {planned.function} wait for each other for ever"


@functools.cache
def _library(source: str, block_size: int, threads: int) -> ctypes.CDLL:
    definitions = [option for option in compile_options(block_size, threads) if option.startswith("-D")]
    return compile_source(source_folder() / f"{source}.cu", definitions)
