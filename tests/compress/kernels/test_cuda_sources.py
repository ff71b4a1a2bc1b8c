"""csrc/ compiles for every GPU generation that is promised, on machines that have no GPU."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from experiments.benchmarks.machine_code import Compiler
from tests.compress.kernels import emulation
from tests.compress.kernels.body import CODECS
from thinwire.compress.kernels.calls import Encode
from thinwire.compress.kernels.cuda.launch import (
    STRUCTURES,
    block_threads,
    compile_options,
    division,
    encode_launch,
    exact_inverse,
    source_text,
)
from thinwire.compress.packet_layout import packet_bytes

SOURCES = tuple(emulation.FUNCTIONS)
# One of them stands for all but in `make kernels`.
COMPILED = [pytest.param(source, marks=[] if source == "sign1" else [pytest.mark.kernels]) for source in SOURCES]


def threads_of(source: str, block_size: int) -> int:
    return block_threads(block_size) if source in CODECS else 256


@pytest.fixture(scope="module")
def nvrtc() -> Compiler:
    try:
        return Compiler()
    except FileNotFoundError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("source", COMPILED)
def test_nvrtc_compiles(nvrtc: Compiler, source: str) -> None:
    """For the oldest GPUs, and blocks that thread blocks do not divide; tests/experiments has the others."""
    if 70 not in nvrtc.architectures:
        pytest.skip("this NVRTC does not know sm_70")
    code, log = nvrtc.compile(source_text(source), (*compile_options(192, threads_of(source, 192)), "-arch=sm_70"))
    assert code, log
    assert "kernels.cu" not in log, log  # no warning about the source


@pytest.mark.parametrize("source", COMPILED)
def test_subnormals_are_not_flushed(nvrtc: Compiler, source: str) -> None:
    """In none of the instructions; with the option that cupy appends they are, in most."""
    options = (*compile_options(64, threads_of(source, 64)), "-arch=compute_80")
    assert b".ftz" not in nvrtc.compile(source_text(source), options)[0]
    if source in CODECS:
        flushing = [option for option in options if option != "--ftz=false"]
        assert b".ftz" in nvrtc.compile(source_text(source), (*flushing, "-ftz=true"))[0]


def test_nvrtc_refuses_a_block_size_that_is_no_multiple_of_64(nvrtc: Compiler) -> None:
    code, log = nvrtc.compile(source_text("sign1"), (*compile_options(100, 32), "-arch=sm_80"))
    assert not code
    assert "multiple of 64" in log


@pytest.mark.parametrize("name", STRUCTURES)
def test_structures_have_the_members_that_are_packed(name: str) -> None:
    """In this order, of these types; that nothing lies between them the sources assert by their size."""
    source = "".join(map(source_text, SOURCES))
    declared = re.search(rf"struct {name} {{(.*?)}};", source, re.DOTALL)
    assert declared
    types = {"long long": np.int64, "float": np.float32, "unsigned": np.uint32, "int": np.int32}
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
    assert emulation.launch(library, "stuck", grid=(1, 1), threads=32, arguments=()) != 0


@pytest.mark.parametrize("divisor", [*range(1, 70), 1000, 2**20 - 1, 2**30, 2**31 - 1])
def test_kernels_divide_whole_numbers_by_a_factor(divisor: int) -> None:
    factor, shift = division(divisor)
    assert factor < 2**32
    for times in (0, 1, 2, 3, 1000, 2**31 // divisor):
        for number in (times * divisor - 1, times * divisor, times * divisor + divisor // 2):
            if 0 <= number < 2**31:
                assert (2 * number * factor >> 32 >> shift) == number // divisor


def test_products_replace_divisions_where_they_are_exact() -> None:
    for exponent in range(-126, 128):
        assert np.float32(exact_inverse(2.0**exponent)) * np.float32(2.0**exponent) == 1
    assert [exact_inverse(value) for value in (3.0, 0.1, 1.5, 65535.0, 2.0**127 * 1.5)] == [0.0] * 5
