"""A device for tests that torch takes for an accelerator, over the host's memory and the CPU's kernels: it has one
thread for its backwards, as a GPU has, and counts launches and the moments at which the host waits."""

import functools
import os
import shutil
import subprocess
import types
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch.utils import cpp_extension

from tests.compiled import compiled
from tests.fake_device.graphs import FakeGraphs, HostBuckets, serve_buckets
from thinwire.optim import captured_step

__all__ = ["NAME", "Counts", "build", "compiler", "counting", "load"]

NAME = "fake"
"""Of the device: tensors are on "fake"."""

_SOURCE = Path(__file__).with_name("device.cpp")


@dataclass
class Counts:
    """What the host asked of the device. `launches`: by operator. `waits`: by what the host waited for."""

    launches: Counter[str] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)


def compiler() -> str | None:
    """The C++ compiler that builds it, if this machine has one."""
    return shutil.which(os.environ.get("CXX", "g++"))


def build() -> Path:
    """The library, compiled where no run before did so for this source and torch, which takes tens of seconds.

    It does not say where torch's libraries lie, as they are loaded already.
    """
    includes = [f"-I{path}" for path in cpp_extension.include_paths()]
    links = [f"-L{Path(torch.__file__).parent / 'lib'}", "-lc10", "-ltorch_cpu"]
    options = ["-std=c++20", "-O1", "-fPIC", "-shared"]

    def compile_to(path: Path) -> None:
        command = [str(compiler()), *options, *includes, str(_SOURCE), "-o", str(path), *links]
        subprocess.run(command, check=True, capture_output=True, text=True)

    made_of = (_SOURCE.read_bytes(), torch.__version__.encode(), " ".join(options).encode())
    return compiled("fake_device", made_of, compile_to)


@functools.cache
def load() -> None:
    """Make the device known to this process, for good: for a process of its own, as others' code asks torch for an
    accelerator."""
    torch.utils.rename_privateuse1_backend(NAME)
    torch.ops.load_library(str(build()))
    module = types.ModuleType(f"torch.{NAME}")
    module.__dict__.update(
        is_available=lambda: True,
        device_count=lambda: 1,
        current_device=lambda: 0,
        manual_seed_all=lambda seed: None,
        _is_in_bad_fork=lambda: False,
    )
    torch._register_device_module(NAME, module)
    serve_buckets(HostBuckets())
    captured_step._GRAPHS[NAME] = FakeGraphs


@contextmanager
def counting(*, refuse_waits: bool = False) -> Iterator[Counts]:
    """Counts what happens inside, on every thread. With `refuse_waits` a wait raises RuntimeError where it is."""
    counts = Counts()
    torch.ops.fake_device.reset(refuse_waits)
    try:
        yield counts
    finally:
        counts.launches.update(_parsed(torch.ops.fake_device.launches()))
        counts.waits.update(_parsed(torch.ops.fake_device.waits()))
        torch.ops.fake_device.reset(False)


def _parsed(lines: list[str]) -> dict[str, int]:
    return {name: int(count) for name, count in (line.rsplit(" ", 1) for line in lines)}
