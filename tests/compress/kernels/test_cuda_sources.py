"""csrc/ compiles for every GPU generation that is promised, on machines that have no GPU."""

from __future__ import annotations

import ctypes
import importlib.util
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.compress.kernels import emulation
from thinwire.compress.kernels import packet_bytes
from thinwire.compress.kernels.calls import Encode
from thinwire.compress.kernels.cuda.launch import (
    STRUCTURES,
    block_threads,
    compile_options,
    encode_launch,
    source_folder,
    source_text,
)

ARCHITECTURES = (70, 80, 90)
BLOCK_SIZES = (192, 2048, 65536)
SOURCES = tuple(emulation.FUNCTIONS)


class Nvrtc:
    """The few calls of NVIDIA's run-time compiler that compiling takes."""

    def __init__(self, path: Path) -> None:
        self._library = ctypes.CDLL(str(path))
        count = ctypes.c_int()
        assert self._library.nvrtcGetNumSupportedArchs(ctypes.byref(count)) == 0
        architectures = (ctypes.c_int * count.value)()
        assert self._library.nvrtcGetSupportedArchs(architectures) == 0
        self.architectures = list(architectures)

    def compile(self, source: str, options: tuple[str, ...]) -> tuple[int, str]:
        """Status, 0 if all is well, and what the compiler had to say."""
        program = ctypes.c_void_p()
        self._check(
            self._library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"kernels.cu", 0, None, None)
        )
        encoded = [option.encode() for option in options]
        status = self._library.nvrtcCompileProgram(program, len(encoded), (ctypes.c_char_p * len(encoded))(*encoded))
        size = ctypes.c_size_t()
        self._check(self._library.nvrtcGetProgramLogSize(program, ctypes.byref(size)))
        log = ctypes.create_string_buffer(size.value)
        self._check(self._library.nvrtcGetProgramLog(program, log))
        self._check(self._library.nvrtcDestroyProgram(ctypes.byref(program)))
        return status, log.value.decode()

    @staticmethod
    def _check(status: int) -> None:
        assert status == 0, f"NVRTC failed with status {status}"


@pytest.fixture(scope="module")
def nvrtc() -> Nvrtc:
    try:
        package = importlib.util.find_spec("nvidia.cuda_nvrtc")
    except ModuleNotFoundError:
        package = None
    if package is None or not package.submodule_search_locations:
        pytest.skip("the package nvidia-cuda-nvrtc-cu12 is not installed")
    libraries = Path(package.submodule_search_locations[0], "lib").glob("libnvrtc.so.*")
    return Nvrtc(next(libraries))


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_nvrtc_compiles(nvrtc: Nvrtc, source: str, architecture: int, block_size: int) -> None:
    if architecture not in nvrtc.architectures:
        pytest.skip(f"this NVRTC does not know sm_{architecture}")
    options = (*compile_options(block_size, block_threads(block_size)), f"-arch=sm_{architecture}")
    status, log = nvrtc.compile(source_text(source), options)
    assert status == 0, log
    assert "kernels.cu" not in log, log  # no warning about the source


def test_nvrtc_refuses_a_block_size_that_is_no_multiple_of_64(nvrtc: Nvrtc) -> None:
    status, log = nvrtc.compile(source_text("sign1"), (*compile_options(100, 32), "-arch=sm_80"))
    assert status != 0
    assert "multiple of 64" in log


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_nvcc_compiles(source: str, architecture: int, tmp_path: Path) -> None:
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        pytest.skip("nvcc is not installed")
    known = subprocess.run([nvcc, "--list-gpu-arch"], check=True, capture_output=True, text=True).stdout
    if f"compute_{architecture}" not in known.split():
        pytest.skip(f"this nvcc does not know sm_{architecture}")
    command = [nvcc, *compile_options(2048, 256), f"-arch=sm_{architecture}", "-Werror=all-warnings", "-cubin"]
    command += ["-o", str(tmp_path / "kernels.cubin"), str(source_folder() / f"{source}.cu")]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("name", STRUCTURES)
def test_structures_have_the_members_that_are_packed(name: str) -> None:
    """In this order, of these types; that nothing lies between them the sources assert by their size."""
    source = "".join(map(source_text, SOURCES))
    declared = re.search(rf"struct {name} {{(.*?)}};", source, re.DOTALL)
    assert declared
    types = {"long long": np.int64, "float": np.float32, "unsigned": np.uint32}
    members = [member.strip().rpartition(" ") for member in declared[1].split(";") if member.strip()]
    assert np.dtype([(member, types[kind]) for kind, _, member in members]) == STRUCTURES[name]
    assert re.search(rf"sizeof\({name}\) == {STRUCTURES[name].itemsize}\b", source)


def test_unaligned_tensors_are_refused() -> None:
    packets = torch.zeros(1, packet_bytes("sign1", 64, 64), dtype=torch.uint8)
    with pytest.raises(ValueError, match="payload starts at an address that is not a multiple of 16 bytes"):
        encode_launch(Encode("sign1", torch.zeros(65)[1:], None, packets, 64, 64))
    rounded = Encode("sign1", torch.zeros(64), None, packets, 64, 64, torch.zeros(65, dtype=torch.bfloat16)[1:])
    with pytest.raises(ValueError, match="new_residual starts at an address that is not a multiple of 8 bytes"):
        encode_launch(rounded)


def test_the_source_handed_to_nvrtc_is_self_contained() -> None:
    for source in SOURCES:
        assert not re.search(r"^\s*#\s*include", source_text(source), re.MULTILINE)


@pytest.mark.skipif(not emulation.COMPILER, reason="g++ is not installed")
def test_the_emulation_notices_threads_that_wait_for_ever(tmp_path: Path) -> None:
    """The check of the checker: half the threads skip a barrier."""
    source = tmp_path / "stuck.cu"
    source.write_text('extern "C" __global__ void stuck() { if (threadIdx.x % 2) __syncthreads(); }')
    library = emulation.compile_source(source, ["stuck"], ("-DBLOCK_SIZE=64", "-DTHREADS=32"))
    assert emulation.launch(library, "stuck", grid=1, threads=32, arguments=()) != 0
