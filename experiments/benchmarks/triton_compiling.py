"""Triton kernels compiled for GPUs that are not here: what launches would run, with its registers, spills, memory."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from thinwire.sparse_attn.kernels.triton import launch

__all__ = ["Resources", "compiling_for", "resources"]

_PROGRAMS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


@dataclass(frozen=True)
class Resources:
    """Registers of a thread; 32-bit words of it that are spilled to memory; bytes of shared memory of a program."""

    registers: int
    spills: int
    shared: int


@contextmanager
def compiling_for(major: int, minor: int = 0) -> Iterator[dict[str, list[Any]]]:
    """Launches compile for this capability and run nothing; yields what they have compiled so far by kernels' names."""
    kernels: dict[str, list[Any]] = {}
    run, capability = JITFunction.run, vars(launch)["capability"]

    def compile_only(function: Any, *arguments: Any, grid: Any, warmup: bool, **settings: Any) -> Any:
        kernel = run(function, *arguments, grid=grid, warmup=True, **settings)
        kernels.setdefault(function.__name__, []).append(kernel)
        return kernel

    number = 10 * major + minor
    target = SimpleNamespace(
        get_current_device=lambda: -number,  # Triton keeps what it compiled by device: no real one must get this
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", number, 32),
    )
    driver.set_active(target)
    JITFunction.run = compile_only
    vars(launch)["capability"] = lambda tensor: (major, minor)
    try:
        yield kernels
    finally:
        JITFunction.run = run
        vars(launch)["capability"] = capability
        driver.set_active(None)  # whoever comes next finds the machine's own


def resources(kernel: Any) -> Resources:
    """Of a compiled kernel, as `cuobjdump`, which comes with Triton, reads them from its code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [str(_PROGRAMS / "cuobjdump"), "-res-usage", file.name]
        printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", printed)
    if found is None:
        raise RuntimeError(f"cuobjdump says nothing of registers: {printed[:200]!r}")
    return Resources(int(found[1]), int(found[2]) // 4, int(kernel.metadata.shared))
