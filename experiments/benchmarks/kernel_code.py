"""Registers, spills and instructions of every CUDA kernel, for GPUs that need not be at hand.

What a GPU can issue while its memory moves an element's bytes is the yardstick: a kernel that takes fewer is bound by
memory.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from experiments.benchmarks.machine_code import Compiler, disassemble, resources
from experiments.common.command_line import Parser
from experiments.common.errors import InputError, refuse
from experiments.common.results import OUTPUT, check_writable, write_json
from thinwire.compress.kernels.cuda.launch import block_threads, compile_options, source_text
from thinwire.compress.packet_layout import CODE_BITS

__all__ = ["ARCHITECTURES", "BLOCK_SIZES", "COUNTED", "Row", "compile_kernels", "main", "measure"]

ARCHITECTURES = (80, 90, 100)
BLOCK_SIZES = (2048, 65536)
_BY_BLOCK = (*CODE_BITS, *(f"bucket_{codec}" for codec in CODE_BITS), "packed_payload")
_THREADS = {
    "adam": 256,
    "packed_moves": 256,
    "rounding": 256,
    "headers": 128,
}  # of sources that know no blocks
_SOURCES: dict[str, int | None] = dict.fromkeys(_BY_BLOCK) | _THREADS
_OUTPUT = OUTPUT / "kernel_code.json"


class Counted(NamedTuple):
    """What one thread does where everything is whole and aligned, at blocks of 2048 elements; the least bytes that
    memory moves for an element; and the fused multiply-adds that tell the common way from shorter ones."""

    name: str
    elements: int
    stored: int
    loads: int
    bytes_per_element: float
    fused: int = 0


COUNTED = {
    "encode_sign1": Counted("encode", 16, 80, 8, 12.125),
    "encode_rounded_sign1": Counted("encode, bf16 residual", 16, 32, 8, 8.125),
    "decode_sign1": Counted("decode", 16, 64, 5, 4.125),
    "decode_mean_sign1": Counted("mean of 4", 16, 64, 20, 4.5),
    "encode_int8": Counted("int8 encode", 16, 80, 8, 13),
    "decode_int8": Counted("int8 decode", 16, 64, 5, 5),
    "decode_stat2": Counted("stat2 decode", 16, 64, 10, 4.25),
    "encode_int4": Counted("int4 encode", 16, 72, 8, 12.5),
    "decode_int4": Counted("int4 decode", 16, 64, 5, 4.5),
    "encode_fp8": Counted("fp8 encode", 16, 80, 8, 13),
    "decode_fp8": Counted("fp8 decode", 16, 64, 5, 5),
    "store_rounded_bfloat16": Counted("store rounded, bf16", 8, 16, 2, 6),
    "encode_payload_plain_sign1": Counted("bucket: payload", 16, 80, 16, 16.125, 16),
    "encode_payload_divided_sign1": Counted("bucket: payload, divided", 16, 80, 20, 20.125, 64),
    "average_and_encode_sign1": Counted("bucket: mean of 4, encoded", 16, 80, 24, 8.625),
    "decode_and_move_plain_sign1": Counted("bucket: decode and move", 16, 128, 13, 12.125),
    "decode_and_move_divided_sign1": Counted("bucket: decode and move, divided", 16, 128, 17, 16.125),
    "encode_packed_payload_bfloat16": Counted("bucket: packed payload, bf16", 16, 48, 23, 7.25),
    "move_packed_bfloat16": Counted("bucket: packed move, bf16", 8, 16, 11, 5.125),
}


class _Gpu(NamedTuple):
    """Of a GPU, by its data sheet."""

    name: str
    processors: int
    gigahertz: float
    terabytes_per_second: float

    def instructions(self, byte_count: float) -> float:
        """That every thread can issue, of each of four schedulers of 32 threads, while so many bytes a thread move."""
        return self.processors * 4 * 32 * self.gigahertz * 1e9 / (self.terabytes_per_second * 1e12) * byte_count


_GPUS = {80: _Gpu("A100 80 GB", 108, 1.41, 2.04), 90: _Gpu("H200", 132, 1.98, 4.8), 100: _Gpu("B200", 148, 1.97, 8.0)}


@dataclass(frozen=True)
class Row:
    """One kernel on one generation of GPUs. `instructions`: an element, of those that are counted; `allowed`: what the
    GPU of that generation could issue while its memory moves the element."""

    kernel: str
    architecture: int
    block_size: int
    registers: int
    spilled_bytes: int
    shared_bytes: int
    instructions: float | None
    allowed: float | None


def main(arguments: Sequence[str] | None = None) -> int:
    """Compiles, prints the tables of docs/measurements, writes JSON; the exit code."""
    try:
        output = _parse(sys.argv[1:] if arguments is None else arguments).output
        compiler = Compiler()
        rows = measure(compiler)
    except (InputError, FileNotFoundError) as error:
        return refuse("experiments.benchmarks.kernel_code", error)
    content = {
        "compiler": f"NVRTC {compiler.version}",
        "gpus": {architecture: gpu._asdict() for architecture, gpu in _GPUS.items()},
        "finding": f"{sum(row.spilled_bytes > 0 for row in rows)} of {len(rows)} kernels spill",
        "results": [asdict(row) for row in rows],
    }
    write_json(output, content)
    print("\n".join([*_resource_table(rows), "", *_instruction_table(rows)]))
    print(f"\n{content['finding']}\nWritten: {output}")
    return 0


def measure(compiler: Compiler) -> list[Row]:
    """Every kernel at every block size and architecture."""
    rows = []
    for architecture in ARCHITECTURES:
        for block_size, code in compile_kernels(compiler, architecture):
            programs = disassemble(code)
            for kernel, taken in resources(code).items():
                instructions = allowed = None
                if kernel in COUNTED and block_size == BLOCK_SIZES[0]:
                    counted = COUNTED[kernel]
                    issued = programs[kernel].fewest_issued(counted.stored, counted.loads, counted.fused)
                    instructions = round(issued / counted.elements, 1)
                    allowed = round(_GPUS[architecture].instructions(counted.bytes_per_element), 1)
                rows.append(Row(kernel, architecture, block_size, *asdict(taken).values(), instructions, allowed))
    return rows


def compile_kernels(
    compiler: Compiler, architecture: int, block_sizes: Sequence[int] = BLOCK_SIZES
) -> Iterator[tuple[int, bytes]]:
    """Block size and machine code of each source; sources without blocks once. Raises RuntimeError where the compiler
    refuses or warns."""
    for source, threads in _SOURCES.items():
        for block_size in block_sizes if threads is None else block_sizes[:1]:
            options = compile_options(block_size, threads or block_threads(block_size))
            code, log = compiler.compile(source_text(source), (*options, f"-arch=sm_{architecture}"))
            if not code or "kernels.cu" in log:
                raise RuntimeError(log)
            yield block_size, code


def _resource_table(rows: Sequence[Row]) -> list[str]:
    names = " | ".join(f"sm_{one}" for one in ARCHITECTURES)
    lines = [f"| kernel | block | {names} |", "| --- | --- |" + " --- |" * 3]
    for kernel, block_size in dict.fromkeys((row.kernel, row.block_size) for row in rows):
        same = [row for row in rows if (row.kernel, row.block_size) == (kernel, block_size)]
        cells = [str(row.registers) + (f", spills {row.spilled_bytes}" if row.spilled_bytes else "") for row in same]
        lines.append(f"| `{kernel}` | {block_size} | " + " | ".join(cells) + " |")
    return lines


def _instruction_table(rows: Sequence[Row]) -> list[str]:
    gpus = " | ".join(f"sm_{architecture}, {gpu.name}" for architecture, gpu in _GPUS.items())
    lines = [f"| kernel | bytes an element | {gpus} |", "| --- | --- |" + " --- |" * 3]
    for kernel, counted in COUNTED.items():
        same = [row for row in rows if row.kernel == kernel and row.instructions is not None]
        cells = [f"{row.instructions} of {row.allowed}" for row in same]
        lines.append(f"| {counted.name} | {counted.bytes_per_element:g} | " + " | ".join(cells) + " |")
    return lines


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Parser("experiments.benchmarks.kernel_code", "Compiles the CUDA kernels and counts what they take.")
    parser.add_argument("--output", type=Path, default=_OUTPUT, metavar="FILE.json", help="else in runs/results")
    options = parser.parse_args(arguments)
    check_writable(options.output.parent, "--output")
    return options


if __name__ == "__main__":
    sys.exit(main())
