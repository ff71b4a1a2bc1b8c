"""The floors of experiments, as a test: common, tasks and training below, and claims above that know no other claim."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PACKAGE = REPOSITORY / "experiments"

FLOORS = {"common": 0, "tasks": 1, "training": 2}
CLAIM = 3
"""The floor of every other folder: what reproduces a claim."""
ABOVE = {"redraw.py": 4}
"""What serves all claims."""
WITHIN = {("ethernet", "cluster"): 0, ("ethernet", "race"): 1}
"""The folders inside a claim, from below."""

MOST_LINES = 400
MOST_LINES_OF_A_FUNCTION = 60
MOST_ARGUMENTS = 12

FILES = sorted(PACKAGE.rglob("*.py"))
MODULES = {".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__") for path in FILES}
CLAIMS = sorted(
    path.name for path in PACKAGE.iterdir() if (path / "__init__.py").exists() and FLOORS.get(path.name, CLAIM) == CLAIM
)


def name_of(path: Path) -> str:
    return str(path.relative_to(PACKAGE))


def imported_modules(path: Path) -> set[str]:
    """Modules of experiments/ that a file imports, inside functions and for type checking too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                names.add(submodule if submodule in MODULES else node.module)
    return {name for name in names if name.split(".")[0] == "experiments"}


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def test_imports_only_from_floors_below() -> None:
    for path, module in ((one, module) for one in FILES for module in imported_modules(one)):
        own = path.relative_to(PACKAGE).parts
        assert module in MODULES, f"{name_of(path)} imports {module}, which does not exist"
        other = tuple(module.split(".")[1:])
        if own[0] != other[0]:
            floor, below = (FLOORS | ABOVE).get(own[0], CLAIM), FLOORS.get(other[0], CLAIM)
            assert below < floor, f"{name_of(path)} must not import {module}"
        elif own[:2] in WITHIN and other[:2] != own[:2]:
            assert other[:2] in WITHIN, f"{name_of(path)} must not import {module}"
            assert WITHIN[other[:2]] < WITHIN[own[:2]], f"{name_of(path)} must not import {module}"


def test_there_are_no_circles() -> None:
    graph = {
        ".".join(path.relative_to(REPOSITORY).with_suffix("").parts).removesuffix(".__init__"): imported_modules(path)
        for path in FILES
    }
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " -> ".join((*trail, module))
        if module not in done:
            for target in graph[module]:
                visit(target, (*trail, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def test_files_and_functions_fit_in_the_head() -> None:
    for path in FILES:
        source, where = path.read_text(), name_of(path)
        tree = ast.parse(source)
        assert source.count("\n") <= MOST_LINES, where
        assert ast.get_docstring(tree), f"{where}: a module says why it exists"
        assert not any(isinstance(node, ast.ImportFrom) and node.level for node in ast.walk(tree)), f"{where}: absolute"
        for function in functions(path):
            assert function.end_lineno is not None
            lines = function.end_lineno - function.lineno + 1
            assert lines <= MOST_LINES_OF_A_FUNCTION, f"{where}: {function.name} has {lines} lines"
            given = function.args
            arguments = len(given.posonlyargs) + len(given.args) + len(given.kwonlyargs)
            assert function.name == "__init__" or arguments <= MOST_ARGUMENTS, f"{where}: {function.name}: {arguments}"


@pytest.mark.parametrize("claim", CLAIMS)
def test_a_claim_says_what_it_shows_and_stands_in_the_index(claim: str) -> None:
    assert (PACKAGE / claim / "README.md").read_text().startswith("# ")
    assert f"({claim}/README.md)" in (PACKAGE / "README.md").read_text()


def test_make_runs_every_claim_and_nothing_that_is_not_there() -> None:
    commands = re.findall(r"-m (experiments\.[\w.]+)", (REPOSITORY / "Makefile").read_text())
    assert {command.split(".")[1] for command in commands} == {*CLAIMS, "redraw"}
    for command in commands:
        assert command in MODULES
        module = PACKAGE.joinpath(*command.split(".")[1:])
        runnable = module / "__main__.py" if module.is_dir() else module.with_suffix(".py")
        assert 'if __name__ == "__main__":' in runnable.read_text()
