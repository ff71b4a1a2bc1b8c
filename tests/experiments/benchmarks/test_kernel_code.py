"""What the compiler makes of the CUDA kernels, for GPUs that are not here: no spills, and few instructions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from experiments.benchmarks.kernel_code import ARCHITECTURES, BLOCK_SIZES, COUNTED, compile_kernels
from experiments.benchmarks.machine_code import Compiler, Program, disassemble, find_tool, resources
from tests.compiled import compiled

# Instructions an element on sm_90: half of what the kernels took that divided element by element.
LIMITS = {
    "decode_sign1": 18.5,
    "decode_mean_sign1": 29.5,
    "encode_sign1": 30,
    "decode_and_move_plain_sign1": 36,
    "average_and_encode_sign1": 50,
}


class Remarked(Exception):  # noqa: N818 - no error: what a compiler may do
    """Code that came with a log."""


class KeepingCompiler(Compiler):
    """Keeps code that came without a log: a minute of compiling, which unchanged sources need once."""

    def compile(self, source: str, options: Sequence[str]) -> tuple[bytes, str]:
        """See Compiler."""
        compile_now = super().compile

        def compile_to(path: Path) -> None:
            code, log = compile_now(source, options)
            if log:
                raise Remarked(code, log)
            path.write_bytes(code)

        made_of = [one.encode() for one in (self.version, source, *options)]
        try:
            return compiled("kernels", made_of, compile_to, suffix=".cubin").read_bytes(), ""
        except Remarked as remarked:
            code, log = remarked.args
            return code, log


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    if not all(map(find_tool, ("cuobjdump", "nvdisasm"))):
        pytest.skip("cuobjdump and nvdisasm, of the CUDA toolkit or Triton, are not installed")
    try:
        return KeepingCompiler()
    except FileNotFoundError as error:
        pytest.skip(str(error))


@pytest.mark.kernels
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_no_kernel_spills(compiler: Compiler, architecture: int) -> None:
    if architecture not in compiler.architectures:
        pytest.skip(f"this NVRTC does not know sm_{architecture}")
    programs: dict[str, Program] = {}
    for _, code in compile_kernels(compiler, architecture, BLOCK_SIZES[:1]):
        used = resources(code)
        assert used
        assert {name: taken for name, taken in used.items() if taken.spilled_bytes or taken.registers > 64} == {}
        if architecture == 90 and used.keys() & LIMITS.keys():
            programs |= disassemble(code)
    for name, limit in LIMITS.items() if architecture == 90 else ():
        counted = COUNTED[name]
        assert programs[name].fewest_issued(counted.stored, counted.loads, counted.fused) / counted.elements <= limit, (
            name
        )


LOOP = Program(
    [
        "MOV R0, 0x4",
        "@P0 BRA `(.rare)",
        "LDG.E R2, desc[UR4][R2.64]",  # 2: the loop
        "IADD3 R0, R0, -0x1, RZ",
        "@P1 BRA `(.loop)",
        "STG.E.128 desc[UR4][R2.64], R4",
        "EXIT",
        "STG.E.U16 desc[UR4][R2.64], R4",  # 7: rare
        "@P2 EXIT",
        "BRA `(.loop)",
    ],
    {".loop": 2, ".rare": 7},
)


@pytest.mark.parametrize(
    ("stored", "loads", "issued"), [(16, 1, 7), (16, 4, 7 + 3 * 3), (18, 1, 10), (2, 0, 4), (0, 0, 4)]
)
def test_the_shortest_way_is_counted(stored: int, loads: int, issued: int) -> None:
    assert LOOP.fewest_issued(stored, loads) == issued


def test_what_no_way_stores_is_refused() -> None:
    with pytest.raises(ValueError, match="stores 100 bytes"):
        LOOP.fewest_issued(100, 0)
