"""Compiles and launches CUDA kernels: NVRTC and the driver through `cuda.bindings`, which CUDA builds of torch bring,
or through cupy. All of CUDA that the backend calls stands behind these few methods. Machine code is kept on disk:
compiling takes a good part of a second, each rank, each start."""

from __future__ import annotations

import ctypes
import hashlib
import importlib
import os
import struct
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from thinwire.compress.kernels.cuda.launch import Argument

_PROGRAM = "thinwire.cu"


class KernelCompilerError(ImportError):
    """Neither cuda.bindings nor cupy can compile here."""


def find_toolkit() -> Toolkit:
    """cuda.bindings, else cupy; raises KernelCompilerError, saying why neither will do."""
    reasons = []
    for modules, toolkit in (
        (("cuda.bindings.nvrtc", "cuda.bindings.driver"), BindingsToolkit),
        (("cupy", "cupy.cuda.nvrtc", "cupy.cuda.function"), CupyToolkit),
    ):
        try:
            return toolkit(*map(importlib.import_module, modules))
        except (ImportError, RuntimeError, OSError) as error:  # the package is missing, or the libraries below it
            reasons.append(f"{modules[0]}: {error}")
    raise KernelCompilerError("; ".join(reasons))


class BindingsToolkit:
    """NVIDIA's own bindings, one way to NVRTC and the driver. Every call gives a status first.

    `compiler`: its name and version, on which it depends what the same source becomes.
    """

    def __init__(self, nvrtc: Any, driver: Any) -> None:
        """`nvrtc` and `driver`: the modules of cuda.bindings. Raises RuntimeError where NVRTC's library is missing."""
        self._nvrtc = nvrtc
        self._driver = driver
        self._contexts: dict[int, Any] = {}
        major, minor = self._checked(nvrtc.nvrtcVersion())
        self.compiler = f"NVRTC {major}.{minor}"

    @property
    def architectures(self) -> Sequence[int]:
        """The generations of GPUs that the compiler knows, as 90 for sm_90."""
        return tuple(self._checked(self._nvrtc.nvrtcGetSupportedArchs()))

    def compile(self, source: str, options: Sequence[str]) -> bytes:
        """Machine code of CUDA C++, or PTX where options name a virtual architecture, `compute_90`, for the driver to
        compile; RuntimeError with the compiler's words where it refuses."""
        nvrtc = self._nvrtc
        program = self._checked(nvrtc.nvrtcCreateProgram(source.encode(), _PROGRAM.encode(), 0, None, None))
        try:
            (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
            if int(status):
                log = bytearray(self._checked(nvrtc.nvrtcGetProgramLogSize(program)))
                self._checked(nvrtc.nvrtcGetProgramLog(program, log))
                words = bytes(log).rstrip(b"\0").decode()
                raise RuntimeError(f"{self.compiler} does not compile the kernels with {' '.join(options)}:\n{words}")
            code = bytearray(self._checked(nvrtc.nvrtcGetCUBINSize(program)))
            if code:
                self._checked(nvrtc.nvrtcGetCUBIN(program, code))
            else:
                code = bytearray(self._checked(nvrtc.nvrtcGetPTXSize(program)))
                self._checked(nvrtc.nvrtcGetPTX(program, code))
        finally:
            self._checked(nvrtc.nvrtcDestroyProgram(program))
        return bytes(code)

    def load(self, code: bytes, name: str, device: int) -> Any:
        """A kernel of that machine code, on a device."""
        switched = self._push(self._context(device))
        try:
            module = self._checked(self._driver.cuModuleLoadData(code))
            return self._checked(self._driver.cuModuleGetFunction(module, name.encode()))
        finally:
            if switched:
                self._checked(self._driver.cuCtxPopCurrent())

    def launch(
        self, kernel: Any, grid: tuple[int, int], threads: int, arguments: Sequence[Argument], device: int, stream: int
    ) -> None:
        """Launch a loaded kernel on one of its device's streams, whatever device and thread are current."""
        raw = b"".join(arguments)
        behind = -(-len(raw) // 8) * 8
        memory = bytearray(behind + 8 * len(arguments))
        memory[: len(raw)] = raw
        address = start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        places = []
        for argument in arguments:
            places.append(address)
            address += len(argument)
        struct.pack_into(f"={len(places)}Q", memory, behind, *places)
        switched = self._push(self._context(device))
        try:
            self._checked(self._driver.cuLaunchKernel(kernel, *grid, 1, threads, 1, 1, 0, stream, start + behind, 0))
        finally:
            if switched:
                self._checked(self._driver.cuCtxPopCurrent())

    def _context(self, device: int) -> Any:
        """A device's primary context, the one torch works in."""
        if device not in self._contexts:
            handle = self._checked(self._driver.cuDeviceGet(device))
            self._contexts[device] = self._checked(self._driver.cuDevicePrimaryCtxRetain(handle))
        return self._contexts[device]

    def _push(self, context: Any) -> bool:
        """Make it current, unless it is: threads begin without any. Whether it has to be popped."""
        if int(self._checked(self._driver.cuCtxGetCurrent())) == int(context):
            return False
        self._checked(self._driver.cuCtxPushCurrent(context))
        return True

    @staticmethod
    def _checked(answer: tuple[Any, ...]) -> Any:
        """What a call gives besides its status; RuntimeError where that is not success."""
        status, *values = answer
        if int(status):
            raise RuntimeError(f"CUDA answered {getattr(status, 'name', status)}")
        return values[0] if len(values) == 1 else values


class CupyToolkit:
    """The same by cupy's NVRTC, called directly: cupy's own way flushes subnormals to zero, whatever options say."""

    def __init__(self, cupy: Any, nvrtc: Any, function: Any) -> None:
        """`cupy` and its modules `cupy.cuda.nvrtc` and `cupy.cuda.function`."""
        self._cupy = cupy
        self._nvrtc = nvrtc
        self._modules = function
        self.compiler = "NVRTC " + ".".join(map(str, nvrtc.getVersion()))

    @property
    def architectures(self) -> Sequence[int]:
        """As those of BindingsToolkit, and so are the others."""
        return tuple(self._nvrtc.getSupportedArchs())

    def compile(self, source: str, options: Sequence[str]) -> bytes:
        """Machine code, or PTX for a virtual architecture."""
        nvrtc = self._nvrtc
        program = nvrtc.createProgram(source, _PROGRAM, (), ())
        try:
            nvrtc.compileProgram(program, tuple(options))
            virtual = any("compute_" in option for option in options)
            return bytes(nvrtc.getPTX(program) if virtual else nvrtc.getCUBIN(program))
        except nvrtc.NVRTCError as error:
            words = nvrtc.getProgramLog(program)
            raise RuntimeError(
                f"{self.compiler} does not compile the kernels with {' '.join(options)}:\n{words}"
            ) from error
        finally:
            nvrtc.destroyProgram(program)

    def load(self, code: bytes, name: str, device: int) -> Any:
        """A kernel on a device, and the module that holds it."""
        with self._cupy.cuda.Device(device):
            module = self._modules.Module()
            module.load(code)
            return module, module.get_function(name)  # a module that is not held is unloaded

    def launch(
        self, kernel: Any, grid: tuple[int, int], threads: int, arguments: Sequence[Argument], device: int, stream: int
    ) -> None:
        """Launch a loaded kernel."""
        _, function = kernel
        cuda = self._cupy.cuda
        with cuda.Device(device), cuda.ExternalStream(stream, device):
            function(grid, (threads,), tuple(map(_by_value, arguments)))


Toolkit = BindingsToolkit | CupyToolkit
"""A way to NVRTC and the driver."""


def _by_value(argument: Argument) -> NDArray[np.void]:
    """What cupy hands to a kernel as it is: an array of one element."""
    return np.frombuffer(argument, dtype=np.dtype((np.void, len(argument))))


def machine_code(toolkit: Toolkit, source: str, options: Sequence[str], folder: Path | None = None) -> bytes:
    """`source` compiled with `options`: from `folder`, by default `cache_folder()`, else compiled and left there.

    The key is everything it depends on: the text, headers pasted in, the options, architecture among them, and the
    compiler. Where the folder cannot be written to, nothing is kept.
    """
    key = hashlib.sha256("\0".join([toolkit.compiler, *options, source]).encode()).hexdigest()
    path = (cache_folder() if folder is None else folder) / f"{key}.cubin"
    with suppress(OSError):
        return path.read_bytes()
    code = toolkit.compile(source, options)
    with suppress(OSError):
        _write_whole(path, code)
    return code


def cache_folder() -> Path:
    """`thinwire/cuda` in XDG_CACHE_HOME, or in ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "thinwire" / "cuda"


def _write_whole(path: Path, code: bytes) -> None:
    """At once: other ranks may be reading."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, written = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(code)
        os.replace(written, path)
    except OSError:
        os.unlink(written)
        raise
