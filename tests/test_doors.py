"""The doors of rooms: all they name is there, whoever imports what first, and costs nothing before it is used."""

import ast
import importlib
import pickle
import pkgutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import thinwire

REPOSITORY = Path(__file__).parents[1]
LAZY = [path for path in sorted(REPOSITORY.glob("thinwire/**/__init__.py")) if "lazy_exports" in path.read_text()]
DOORS = [".".join(path.relative_to(REPOSITORY).parent.parts) for path in LAZY]

HELP = [
    "",
    "plan",
    "probe",
    "config",
    "config check",
    *(f"checkpoint {one}" for one in ("", "verify", "inspect", "export")),
]

RUN = """
import sys
sys.argv[0] = "thinwire"
from thinwire.command_line import main
try:
    main()
except SystemExit as ended:
    assert ended.code == 0, ended.code
heavy = {"torch", "numpy", "pydantic", "numba", "safetensors"} & set(sys.modules)
assert not heavy, heavy
"""


WAYS_IN = """
import os, sys, torch
for way in (
    "from thinwire import OneBitAdam, optim; assert optim.OneBitAdam is OneBitAdam",
    "import thinwire; thinwire.comm.threads.single(1.0)",
    "import thinwire.comm; assert thinwire.zero.ShardedOptimizer is thinwire.ShardedOptimizer",
    "from thinwire import *; assert callable(initialize) and plan.predict and OneBitLamb",
):
    assert not any(name.startswith("thinwire") for name in sys.modules)
    child = os.fork()
    if not child:
        exec(way, {})
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, way
"""


def run(code: str, *arguments: str) -> str:
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    return done.stdout


def imported(body: list[ast.stmt]) -> set[str]:
    found = [alias for node in body if isinstance(node, ast.ImportFrom) for alias in node.names]
    return {alias.asname or alias.name for alias in found}


def import_everything(door: str) -> None:
    package = importlib.import_module(door)
    for module in pkgutil.iter_modules(package.__path__, f"{door}."):
        # The one runs, the others start MPI.
        if not module.name.endswith("__main__") and not module.name.startswith("thinwire.comm.mpi_"):
            importlib.import_module(module.name)


@pytest.mark.parametrize("door", DOORS)
def test_runtime_type_checkers_and_all_know_the_same_names(door: str) -> None:
    package = importlib.import_module(door)
    body = ast.parse(Path(str(package.__file__)).read_text()).body
    branches = (node for node in body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    assert imported([line for branch in branches for line in branch.body]) == set(package.__all__) - imported(body)
    assert set(package.__all__) <= set(dir(package))
    with pytest.raises(AttributeError, match=f"module '{door}' has no attribute 'OneBitAdem'"):
        package.OneBitAdem  # noqa: B018


@pytest.mark.parametrize("door", DOORS)
def test_every_name_is_what_it_says_after_all_modules_are_imported(door: str) -> None:
    """Importing a module puts it into its package, in the place of what has the same name."""
    import_everything(door)
    package = importlib.import_module(door)
    for name in set(package.__all__) - {"__version__", "MPICommunicator"}:
        found = getattr(package, name)
        if isinstance(found, ModuleType):
            assert found.__name__ == f"{door}.{name}"
        elif isinstance(found, type) or callable(found):
            assert found.__name__ == name
            assert found.__module__.startswith(f"{door}.")


def test_import_thinwire_imports_nothing_else() -> None:
    run("import sys, thinwire; assert not {'torch', 'numpy'} & set(sys.modules)")


@pytest.mark.parametrize("command", HELP)
def test_help_needs_no_torch(command: str) -> None:
    assert run(RUN, *command.split(), "--help").startswith(f"usage: thinwire {command}".strip())


@pytest.mark.programs
def test_the_ways_in() -> None:
    """Each in a process that has nothing of thinwire: a fork of one that has imported torch once for all of them."""
    run(WAYS_IN)


def test_classes_are_pickled_by_where_they_are_defined() -> None:
    assert pickle.loads(pickle.dumps(thinwire.OneBitAdam)) is thinwire.OneBitAdam
