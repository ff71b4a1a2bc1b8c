"""How the loops of the CPU backend become machine code, and when compiled code from an earlier run may be used."""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec, TypeVar, cast

import numba
from llvmlite import binding

__all__ = ["helper", "kernel"]

_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")


@functools.cache
def _cache_key(folder: Path) -> str:
    """Digest of the processor and of the sources that the machine code of kernels in `folder` depends on.

    numba names its cache files after the function and checks only the file that defines it. With this key in the
    name, a home folder shared by unlike machines, or an upgrade while other processes start, cannot hand out
    foreign or outdated machine code.
    """
    folders = (Path(__file__).parent, folder)
    sources = [path.read_bytes() for one in folders for path in sorted(one.glob("*.py"))]
    processor = binding.get_host_cpu_name() + binding.get_host_cpu_features().flatten()
    return hashlib.sha256(b"".join(sources) + processor.encode()).hexdigest()[:16]


def helper(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """Compile a function that only kernels call."""
    return cast("Callable[_Parameters, _Result]", numba.njit(nogil=True)(function))


def kernel(function: Callable[_Parameters, None]) -> Callable[_Parameters, None]:
    """Compile a kernel at its first call; keep the machine code on disk, where there is a folder to write to."""
    function.__qualname__ = f"{function.__name__}_{_cache_key(Path(inspect.getfile(function)).parent)}"
    try:
        compiled = numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:  # no such folder
        compiled = numba.njit(nogil=True)(function)
    return cast("Callable[_Parameters, None]", compiled)
