"""Machine code on disk is used again by a process whose sources are those it was made of, and by no other."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("numba")

from thinwire.simd import compiling

REPOSITORY = Path(__file__).parents[2]
LOOP = """
from thinwire.simd.compiling import kernel
from tiny.constants import {imported}

@kernel
def fill(values):
    values[0] = {value}
"""
PROGRAM = """
import numpy
from tiny.loops import module, name, renamed
for loops in (module, name, renamed):
    values = numpy.zeros(1)
    loops.fill(values)
    print(values[0], sum(loops.fill.stats.cache_hits.values()))
"""
WAYS = {"module": ("numbers", "numbers.VALUE"), "name": ("VALUE", "VALUE"), "renamed": ("numbers as it", "it.VALUE")}


def run(folder: Path, **extra: str) -> subprocess.CompletedProcess[str]:
    """Runs the loops of `folder`, whose machine code is kept there."""
    paths = {"PYTHONPATH": os.pathsep.join((str(folder), str(REPOSITORY))), "NUMBA_CACHE_DIR": str(folder)}
    command = [sys.executable, "-B", "-c", PROGRAM]  # -B: what is written twice in a second is read twice
    return subprocess.run(command, env=os.environ | paths | extra, check=True, capture_output=True, text=True)


@pytest.mark.programs
def test_a_constant_of_another_folder_is_what_it_is_now(tmp_path: Path) -> None:
    """Whichever way it is imported; one process runs the loops of all ways."""
    package = tmp_path / "tiny"
    constants = package / "constants" / "numbers.py"
    for folder in (package, package / "loops", package / "constants"):
        folder.mkdir()
        (folder / "__init__.py").touch()
    (package / "constants" / "__init__.py").write_text("from .numbers import VALUE\n")
    for way, (imported, value) in WAYS.items():
        (package / "loops" / f"{way}.py").write_text(LOOP.format(imported=imported, value=value))

    def found(announced: int, **extra: str) -> list[list[float]]:
        """Of each way: the constant that its machine code has, and how often that came from disk."""
        done = run(tmp_path, **extra)
        assert done.stderr.count("thinwire: compiling kernels") == announced, done.stderr
        return [[float(word) for word in line.split()] for line in done.stdout.splitlines()]

    constants.write_text("VALUE = 1.0\n")
    assert found(announced=1) == [[1.0, 0.0]] * len(WAYS)
    assert found(announced=0) == [[1.0, 1.0]] * len(WAYS)
    constants.write_text("VALUE = 2.0\n")
    assert found(announced=0, RANK="1") == [[2.0, 0.0]] * len(WAYS)


@pytest.mark.parametrize(
    ("module", "elsewhere"),
    [
        ("thinwire.compress.kernels.cpu.encode", {"thinwire.compress.packet_layout"}),
        (
            "thinwire.compress.kernels.cpu.moving",
            {"thinwire.compress.packet_layout", "thinwire.compress.kernels.cpu.small_floats"},
        ),
        ("thinwire.sparse_attn.kernels.cpu.attention", {"thinwire.simd.products"}),
    ],
)
def test_kernels_depend_on_what_they_import(module: str, elsewhere: set[str]) -> None:
    __import__(module)
    files = compiling.source_files(module)
    assert {module, "thinwire.simd.compiling", "thinwire.simd.floats", "thinwire.simd.building"} <= files.keys()
    assert elsewhere <= files.keys()
    for name, file in files.items():
        assert file.relative_to(REPOSITORY).with_suffix("").parts[: name.count(".") + 1] == tuple(name.split("."))
    assert "thinwire.compress" not in files, "only what is imported, so that other changes compile nothing again"
