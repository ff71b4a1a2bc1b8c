"""What NVIDIA's compiler makes of the kernels in csrc/, for generations of GPUs that need not be at hand: registers,
what spills out of them, and how many instructions a thread issues for an element."""

from __future__ import annotations

import ctypes
import importlib.util
import re
import shutil
import subprocess
import tempfile
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Compiler", "Program", "Resources", "disassemble", "find_tool", "resources"]

_WIDTHS = {"128": 16, "64": 8, "U16": 2, "U8": 1, "S8": 1, "S16": 2}


class Compiler:
    """NVRTC, called without a driver. Raises FileNotFoundError where its library is not installed."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(str(_nvrtc()))
        count = ctypes.c_int()
        self._check(self._library.nvrtcGetNumSupportedArchs(ctypes.byref(count)))
        architectures = (ctypes.c_int * count.value)()
        self._check(self._library.nvrtcGetSupportedArchs(architectures))
        self.architectures = list(architectures)
        major, minor = ctypes.c_int(), ctypes.c_int()
        self._check(self._library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
        self.version = f"{major.value}.{minor.value}"

    def compile(self, source: str, options: Sequence[str]) -> tuple[bytes, str]:
        """Machine code, empty where the source is refused, and what the compiler had to say."""
        library, program, size = self._library, ctypes.c_void_p(), ctypes.c_size_t()
        self._check(library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernels.cu", 0, None, None))
        encoded = [option.encode() for option in options]
        status = library.nvrtcCompileProgram(program, len(encoded), (ctypes.c_char_p * len(encoded))(*encoded))
        self._check(library.nvrtcGetProgramLogSize(program, ctypes.byref(size)))
        log = ctypes.create_string_buffer(size.value)
        self._check(library.nvrtcGetProgramLog(program, log))
        code = ctypes.create_string_buffer(0)
        if not status:
            virtual = any("compute_" in option for option in options)
            kind = "PTX" if virtual else "CUBIN"
            self._check(library[f"nvrtcGet{kind}Size"](program, ctypes.byref(size)))
            code = ctypes.create_string_buffer(size.value)
            self._check(library[f"nvrtcGet{kind}"](program, code))
        self._check(library.nvrtcDestroyProgram(ctypes.byref(program)))
        return code.raw, log.value.decode()

    @staticmethod
    def _check(status: int) -> None:
        if status:
            raise RuntimeError(f"NVRTC failed with status {status}")


def _nvrtc() -> Path:
    for package in ("nvidia.cuda_nvrtc", "nvidia.cu13"):
        try:
            found = importlib.util.find_spec(package)
        except ModuleNotFoundError:
            continue
        for folder in found.submodule_search_locations or () if found else ():
            for library in sorted(Path(folder, "lib").glob("libnvrtc.so.*")):
                return library
    raise FileNotFoundError("NVRTC is not installed: pip install nvidia-cuda-nvrtc-cu12")


def find_tool(name: str) -> str | None:
    """One of NVIDIA's command-line tools: on the path, or as Triton brings it."""
    if found := shutil.which(name):
        return found
    triton = importlib.util.find_spec("triton")
    for folder in triton.submodule_search_locations or () if triton else ():
        path = Path(folder, "backends", "nvidia", "bin", name)
        if path.is_file():
            return str(path)
    return None


@dataclass(frozen=True)
class Resources:
    """What one kernel takes: registers a thread, bytes of local memory a thread, which are spills, and of shared."""

    registers: int
    spilled_bytes: int
    shared_bytes: int


def resources(code: bytes) -> dict[str, Resources]:
    """Of each kernel in a cubin, by name."""
    text = _tool("cuobjdump", code, "-res-usage")
    found = re.findall(r"Function (\w+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+) LOCAL:(\d+)", text)
    return {
        name: Resources(int(registers), int(stack) + int(local), int(shared))
        for name, registers, stack, shared, local in found
    }


@dataclass
class Program:
    """The instructions of one kernel, in order, and what leads where."""

    instructions: list[str] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)

    def fewest_issued(self, stored: int, loads: int, fused: int = 0) -> int:
        """Instructions on the shortest way from the beginning to an end on which so many bytes are stored to, and at
        least so many loads made from, global memory, with at least so many fused multiply-adds: what a thread issues in
        the common case, its loops turned as often as the loads ask, where everything is whole and aligned and nothing
        needs the rare ways out.

        Raises ValueError where no way does.
        """
        start = (0, 0, 0, 0)
        steps, waiting = {start: 0}, deque([start])
        while waiting:
            state = waiting.popleft()
            place, wrote, read, added = state
            instruction = self.instructions[place]
            wrote, read = min(stored, wrote + _stored(instruction)), min(loads, read + _loads(instruction))
            added = min(fused, added + ("FFMA" in instruction))
            ended, following = self._next(place)
            if ended and (wrote, read, added) == (stored, loads, fused):
                return steps[state] + 1
            for other in ((target, wrote, read, added) for target in following):
                if other not in steps:
                    steps[other] = steps[state] + 1
                    waiting.append(other)
        raise ValueError(f"no way through the kernel stores {stored} bytes after {loads} loads")

    def _next(self, place: int) -> tuple[bool, Iterable[int]]:
        """Whether a thread may end here, and where it may go on."""
        instruction = self.instructions[place]
        conditional = instruction.startswith("@")
        if re.search(r"\bEXIT\b", instruction):
            return True, [place + 1] if conditional else []
        target = re.search(r"\bBRA(?:\.\w+)*\b.*`\(([^)]+)\)", instruction)
        if target is None:
            return False, [place + 1] if place + 1 < len(self.instructions) else []
        label = self.labels[target[1]]
        return False, [place + 1, label] if conditional or re.search(r"\bBRA(?:\.\w+)* !?U?P\d", instruction) else [
            label
        ]


def _stored(instruction: str) -> int:
    """Bytes that it stores to global memory."""
    found = re.search(r"\bSTG\.\S*", instruction)
    return next((_WIDTHS[part] for part in found[0].split(".") if part in _WIDTHS), 4) if found else 0


def _loads(instruction: str) -> int:
    return 1 if re.search(r"\bLDG\.", instruction) else 0


def disassemble(code: bytes) -> dict[str, Program]:
    """The program of each kernel in a cubin, by name."""
    programs: dict[str, Program] = {}
    current = Program()
    for line in _tool("nvdisasm", code, "-c").splitlines():
        if section := re.match(r"\.text\.(\w+):", line):
            current = programs[section[1]] = Program()
        elif line.startswith(".section"):
            current = Program()
        elif label := re.match(r"(\S+):\s*$", line):
            current.labels[label[1]] = len(current.instructions)
        elif instruction := re.match(r"\s+/\*[0-9a-f]+\*/\s+(.*?)\s*;", line):
            current.instructions.append(instruction[1])
    return programs


def _tool(name: str, code: bytes, *options: str) -> str:
    path = find_tool(name)
    if path is None:
        raise FileNotFoundError(f"{name} is not installed: the CUDA toolkit and Triton have it")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(code)
        file.flush()
        return subprocess.run([path, *options, file.name], check=True, capture_output=True, text=True).stdout
