"""Compiles the loops of CPU backends, says so in one line, since it takes seconds in which a training would seem to
hang, and knows when machine code of an earlier run may be used."""

from __future__ import annotations

import ast
import atexit
import contextlib
import fcntl
import functools
import hashlib
import importlib.util
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar, cast
from weakref import WeakSet

import llvmlite
import numba
from llvmlite import binding
from numba.core import event

from thinwire.simd.workers import Cores

# Of torchrun, Open MPI, other MPIs and Slurm: any of them tells a later rank, which says nothing.
_RANK_VARIABLES = ("RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID")


def announce_compiling(kernel: Callable[..., object]) -> None:
    """Say so when `kernel`, or another that was announced, is the first to be compiled and not read from disk.

    The first rank says it, through `logging`, whose handlers and levels apply.
    """
    _first_compilation().kernels.add(kernel)


@functools.cache
def _first_compilation() -> _FirstCompilation:
    found = _FirstCompilation()
    event.register("numba:compile", found)  # type: ignore[no-untyped-call]
    return found


class _FirstCompilation(event.Listener):
    """Sees all that numba compiles in this process, of which much is the user's own."""

    def __init__(self) -> None:
        self.kernels: WeakSet[Callable[..., object]] = WeakSet()
        self._silent = any(os.environ.get(name, "0") != "0" for name in _RANK_VARIABLES)

    def on_start(self, event: Any) -> None:
        if not self._silent and event.data["dispatcher"].py_func in self.kernels:
            self._silent = True
            logging.getLogger(__name__).warning(
                "thinwire: compiling kernels for this processor, which takes seconds; the machine code is kept"
            )

    def on_end(self, event: Any) -> None:
        """Nothing: what was waited for goes on."""


_Parameters = ParamSpec("_Parameters")
_Result = TypeVar("_Result")

_PARSING = threading.Lock()
"""Python 3.11 may fail where two threads parse at once."""


def source_files(module: str) -> dict[str, Path]:
    """The file of a module and of all modules of its own package and of this one that it imports, by name.

    Imports inside functions are left out: compiled code takes nothing from them.
    """
    packages = {module.partition(".")[0], __name__.partition(".")[0]}
    found: dict[str, Path] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        file = getattr(sys.modules.get(name), "__file__", None)
        if name not in found and name.partition(".")[0] in packages and file:
            found[name] = Path(file)
            waiting += _imported(found[name], sys.modules[name].__package__)
    return found


@functools.cache
def _imported(file: Path, package: str | None) -> frozenset[str]:
    """Names of all that a file imports: of modules, and of what it takes from them, which may be modules, too."""
    names = set()
    with _PARSING:
        waiting: list[ast.AST] = [ast.parse(file.read_bytes())]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            origin = importlib.util.resolve_name("." * node.level + (node.module or ""), package)
            names |= {origin, *(f"{origin}.{alias.name}" for alias in node.names)}
        elif not isinstance(node, ast.FunctionDef | ast.expr):
            waiting += ast.iter_child_nodes(node)
    return frozenset(names)


@functools.cache
def _cache_key(module: str) -> str:
    """Digest of all that the machine code of kernels in `module` depends on: sources, compilers and the processor.

    numba names its cache files after the function and checks only the file that defines it. With this key in the
    name, a home folder shared by unlike machines, or an upgrade while other processes start, cannot hand out
    foreign or outdated machine code.
    """
    digest = hashlib.sha256(f"numba {numba.__version__} llvmlite {llvmlite.__version__}".encode())
    digest.update((binding.get_host_cpu_name() + binding.get_host_cpu_features().flatten()).encode())
    for name, path in sorted(source_files(module).items()):
        digest.update(name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


_njit: Any = numba.njit  # whose types do not have all options
# Wrappers, by which Python and C would call it, take two fifths of the time.
_FOR_KERNELS = {"nogil": True, "no_cpython_wrapper": True, "no_cfunc_wrapper": True}


def helper(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """Compile a function that only kernels call."""
    return cast("Callable[_Parameters, _Result]", _njit(**_FOR_KERNELS)(function))


def inner(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """Compile a function that stands in an inner loop, in whose place its code is put however long it is."""
    return cast("Callable[_Parameters, _Result]", _njit(forceinline=True, **_FOR_KERNELS)(function))


def kernel(function: Callable[_Parameters, _Result]) -> Callable[_Parameters, _Result]:
    """Compile a kernel at its first call; keep the machine code on disk, where there is a folder to write to."""
    announce_compiling(function)
    function.__qualname__ = f"{function.__name__}_{_cache_key(function.__module__)}"
    try:
        compiled = numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:  # no such folder
        compiled = numba.njit(nogil=True)(function)
    return cast("Callable[_Parameters, _Result]", compiled)


# Ahead of their calls

Kernels = Mapping[str, tuple[Any, tuple[Any, ...]]]
"""By name, with arguments of the types that they are called with."""


def types_of(arguments: Sequence[object]) -> tuple[Any, ...]:
    """The types of arguments, as the compiler sees them."""
    return tuple(map(numba.typeof, arguments))


class _Ahead:
    """Kernels that a run will call: read from disk if they are there, else compiled beside the run for all processes of
    this host, by others that hold a lock until they end."""

    def __init__(self, names: Sequence[str], kernels: Kernels, module: str) -> None:
        self._kernels = {name: kernels[name] for name in names}
        self._missing = self._load()
        cache = kernels[self._missing[0]][0].stats.cache_path if self._missing else None
        self._lock = Path(cache) / "compiling.lock" if cache else None
        self._children: list[subprocess.Popen[bytes]] = []
        if self._lock is None:  # nothing is missing, or nothing is kept
            return
        try:
            with self._lock.open("a") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._children = _compile_beside([sys.executable, "-m", module], self._missing, lock.fileno())
        except OSError:  # another process of this host compiles, or there is none to be had
            return

    def wait(self) -> None:
        """Wait until no process of this host compiles, and read what it has; what is missing then its call compiles."""
        for child in self._children:
            child.wait()
        if self._missing and self._lock is not None:
            with contextlib.suppress(OSError), self._lock.open() as lock:  # not every file system locks
                fcntl.flock(lock, fcntl.LOCK_SH)
        self._missing = self._load()

    def _load(self) -> list[str]:
        missing = []
        for name, (kernel, arguments) in self._kernels.items():
            types = types_of(arguments)
            if types in kernel.overloads:
                continue
            if kernel._cache.load_overload(types, kernel.targetctx) is None:
                missing.append(name)
            else:
                kernel.compile(types)
        return missing


_begun: dict[tuple[str, ...], _Ahead] = {}
_beginning = threading.Lock()


def prepare(names: tuple[str, ...], kernels: Kernels, module: str) -> None:
    """Have these of `kernels` compiled beside what follows, by `python -m module names`, if they are not on disk."""
    with _beginning:
        if names not in _begun and not numba.config.DISABLE_JIT:  # type: ignore[attr-defined]
            _begun[names] = _Ahead(names, kernels, module)


def wait() -> None:
    """Wait for what `prepare` has begun."""
    with _beginning:
        for one in _begun.values():
            one.wait()


def _compile_beside(command: Sequence[str], names: Sequence[str], lock: int) -> list[subprocess.Popen[bytes]]:
    """Compile in as many processes as there are cores; the lock is theirs, and free when they have ended. `names`: what
    takes longest first, which has fewest with it."""
    if os.environ.get("RANK", "0") == "0":
        logging.getLogger(__name__).warning(
            "thinwire: compiling %d kernels for this processor beside the first steps, which takes some seconds; the "
            "machine code is kept",
            len(names),
        )
    nothing, processes = subprocess.DEVNULL, min(len(names), Cores().usable())
    children = [
        subprocess.Popen(
            [*command, *names[number :: 2 * processes], *names[2 * processes - 1 - number :: 2 * processes]],
            stdin=nothing,
            stdout=nothing,
            stderr=nothing,
            pass_fds=[lock],
        )
        for number in range(processes)
    ]
    parent = os.getpid()

    def end() -> None:
        for child in children if os.getpid() == parent else ():  # which a fork leaves to its parent
            child.kill()
            child.wait()

    atexit.register(end)
    return children
