"""What a user installs: a pure-Python wheel with the CUDA sources inside. Optimizers need torch, numpy and pydantic."""

import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import thinwire
from tests.test_doors import run

REPOSITORY = Path(__file__).parents[1]

pytestmark = pytest.mark.programs

OPTIMIZERS = """
import importlib.abc, sys
import numpy, torch

class Refuse(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"numba", "llvmlite", "mpi4py", "cupy", "scipy", "transformers", "matplotlib", "rich"}:
            raise ImportError(f"{name} is not needed by an optimizer")

sys.meta_path.insert(0, Refuse())
before = set(sys.modules)
import thinwire
thinwire.OneBitAdam, thinwire.OneBitLamb, thinwire.ZeroOneAdam, thinwire.ShardedOptimizer
thinwire.comm.init, thinwire.compress.ddp_hook
new = {name.split(".")[0] for name in set(sys.modules) - before} - sys.stdlib_module_names
new -= {name for name in new if name.startswith("_sysconfigdata")}  # the standard library's too, by platform
print(sorted(new))
"""

WITHOUT_NUMBA = """
import sys, warnings
sys.modules["numba"] = None
import torch, thinwire
weight = torch.nn.Parameter(torch.ones(1000))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    optimizer = thinwire.OneBitAdam([weight], freeze_step=1)
    for _ in range(4):
        weight.grad = torch.randn(1000)
        optimizer.step()
print(optimizer.frozen, [str(one.message) for one in caught if "numba" in str(one.message)])
"""


def test_an_optimizer_needs_only_torch_numpy_and_pydantic() -> None:
    imported = eval(run(OPTIMIZERS))
    pydantic = {"pydantic", "pydantic_core", "annotated_types", "typing_inspection"}
    assert set(imported) <= {"thinwire", "torch", "numpy"} | pydantic


def test_without_numba_the_reference_serves_and_says_so_once() -> None:
    output = run(WITHOUT_NUMBA)
    assert output.startswith("True ['the CPU kernels need numba")
    assert output.count("need numba") == 1


def test_the_wheel_of_the_sdist_trains_and_is_pure_python_and_holds_the_cuda_sources(tmp_path) -> None:
    build = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(tmp_path), str(REPOSITORY)]
    subprocess.run(build, check=True, capture_output=True)  # the wheel is made from the sdist
    assert [path.name for path in tmp_path.glob("*.tar.gz")] == [f"thinwire-{thinwire.__version__}.tar.gz"]
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        metadata = archive.read(next(name for name in names if name.endswith("METADATA"))).decode()
        archive.extractall(tmp_path / "installed")
    train = f"import sys; sys.path.insert(0, {str(tmp_path / 'installed')!r}){WITHOUT_NUMBA}print(thinwire.__file__)"
    trained = subprocess.run([sys.executable, "-c", train], cwd=tmp_path, check=True, capture_output=True, text=True)
    assert trained.stdout.splitlines()[-2].startswith("True")
    assert trained.stdout.splitlines()[-1].startswith(str(tmp_path))
    sources = {f"thinwire/{path.relative_to(REPOSITORY / 'thinwire')}" for path in REPOSITORY.glob("thinwire/**/*.py")}
    cuda = {f"thinwire/csrc/{path.name}" for path in REPOSITORY.glob("csrc/*.cu*")}
    assert cuda
    assert sources | cuda | {"thinwire/py.typed"} <= names
    assert not {name for name in names if name.split("/")[0] in ("tests", "experiments")}
    for extra in ("mpi", "cuda", "hf", "experiments", "dev"):
        assert f"Provides-Extra: {extra}" in metadata


def test_the_newest_release_is_the_version_wherever_it_is_said() -> None:
    changes = (REPOSITORY / "CHANGELOG.md").read_text()
    headings = re.findall(r"^## \[(.+?)\](?: - (\d{4}-\d\d-\d\d))?$", changes, re.MULTILINE)
    assert [name for name, _ in headings[:2]] == ["Unreleased", thinwire.__version__]
    citation = (REPOSITORY / "CITATION.cff").read_text().splitlines()
    assert {f"version: {thinwire.__version__}", f"date-released: {headings[1][1]}"} <= set(citation)
