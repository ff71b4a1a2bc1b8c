"""A kernel backend that runs csrc/ on the CPU: the same sources and launch geometry as on a GPU, compiled by g++."""

import ctypes
import functools
import secrets
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from tests.compiled import compiled
from thinwire.compress.kernels.cuda.backend import CudaBackend
from thinwire.compress.kernels.cuda.launch import Argument, Launch, compile_options, source_folder
from thinwire.compress.packet_layout import CODE_BITS

COMPILER = shutil.which("g++")
FUNCTIONS = {
    codec: [f"{kernel}_{codec}" for kernel in ("encode", "encode_rounded", "decode", "decode_mean")]
    for codec in CODE_BITS
}
FUNCTIONS |= {
    f"bucket_{codec}": [
        *(f"encode_payload_{form}_{codec}" for form in ("plain", "divided", "masked")),
        *(f"decode_and_move_{form}_{codec}" for form in ("plain", "divided")),
        f"average_and_encode_{codec}",
    ]
    for codec in CODE_BITS
}
FUNCTIONS["packed_payload"] = [f"encode_packed_payload_{dtype}" for dtype in ("float32", "bfloat16")]
FUNCTIONS["packed_moves"] = [f"move_packed_{dtype}" for dtype in ("float32", "bfloat16", "float16")]
FUNCTIONS["adam"] = [
    f"adam_{name}"
    for name in (
        "moments",
        "moments_denominators",
        "moments_weights",
        "variances",
        "variances_denominators",
        "denominators",
    )
]
FUNCTIONS["headers"] = ["write_headers"]
FUNCTIONS["rounding"] = [f"store_rounded_{dtype}" for dtype in ("float32", "bfloat16", "float16")]
_HEADER = Path(__file__).with_name("cuda_emulation.h")


def compile_source(source: Path, functions: Sequence[str], definitions: Sequence[str]) -> ctypes.CDLL:
    """Library of the kernels in `source`, without optimisation: compiling is what takes the time."""
    assert COMPILER
    options = ["-std=c++20", "-O0", "-ffp-contract=off", "-fPIC", "-shared", *definitions]
    options += ["-fsanitize=alignment", "-fsanitize-undefined-trap-on-error"]  # as a GPU does
    emulated = "".join(f"EMULATE({function})\n" for function in functions)

    def compile_to(path: Path) -> None:
        command = [COMPILER, *options, "-include", str(_HEADER), "-x", "c++", "-", "-o", str(path)]
        result = subprocess.run(command, input=f'#include "{source}"\n{emulated}', capture_output=True, text=True)
        assert result.returncode == 0, result.stderr

    # Not by where they lie: the same sources in another clone make the same library.
    read = [source, _HEADER, *sorted(path for path in source_folder().rglob("*") if path.is_file())]
    made_of = [
        " ".join(options).encode(),
        emulated.encode(),
        _compiler_version(),
        *(path.read_bytes() for path in read),
    ]
    return ctypes.CDLL(str(compiled(source.stem, made_of, compile_to)))


@functools.cache
def _compiler_version() -> bytes:
    return subprocess.run([str(COMPILER), "--version"], check=True, capture_output=True).stdout


def launch(
    library: ctypes.CDLL,
    function: str,
    grid: tuple[int, int],
    threads: int,
    arguments: Sequence[Argument],
    flush: bool = False,
) -> int:
    """Run a kernel, its threads in a random order; 0 on success, 1 if they wait for each other for ever.

    `flush`: with subnormals as zeros, which no GPU is told to do: to see what it would change.
    """
    sizes = argument_sizes(library, function)
    assert sizes == [len(argument) for argument in arguments], "arguments of the types that the kernel takes"
    memory = [ctypes.create_string_buffer(argument, len(argument)) for argument in arguments]
    places = (ctypes.c_void_p * len(sizes))(*map(ctypes.addressof, memory))
    return launch_at(library, function, grid, threads, places, flush)


def launch_at(
    library: ctypes.CDLL, function: str, grid: tuple[int, int], threads: int, places: ctypes.Array, flush: bool = False
) -> int:
    """The same, given where each argument lies, as a driver is."""
    kernel = ctypes.cast(library[f"emulated_{function}"], ctypes.c_void_p)
    return int(library.emulate(kernel, *grid, threads, places, secrets.randbits(32), int(flush)))


def argument_sizes(library: ctypes.CDLL, function: str) -> list[int]:
    """Bytes of each argument that a kernel takes."""
    sizes = (ctypes.c_int * 16)()
    count = library[f"sizes_of_{function}"](sizes)
    return sizes[:count]


def run(planned: Launch, flush: bool = False) -> None:
    """One planned launch."""
    library = library_of(planned.source, planned.block_size, planned.threads)
    status = launch(library, planned.function, planned.grid, planned.threads, planned.arguments, flush)
    assert status == 0, f"the threads of {planned.function} wait for each other for ever"


@functools.cache
def library_of(source: str, block_size: int, threads: int) -> ctypes.CDLL:
    """Every kernel of one of the sources, compiled once."""
    definitions = [option for option in compile_options(block_size, threads) if option.startswith("-D")]
    return compile_source(source_folder() / f"{source}.cu", FUNCTIONS[source], definitions)


BACKEND = CudaBackend(lambda launch, device: run(launch) if 0 not in launch.grid else None)
