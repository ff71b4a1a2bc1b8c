"""The floors of experiments, as a test: common, tasks and training below, and claims above that know no other claim."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from tests.test_architecture import (
    MOST_ARGUMENTS,
    MOST_LINES,
    MOST_LINES_OF_A_FUNCTION,
    circles,
    count_arguments,
    defined,
    imported,
    module_name,
    nodes_of,
    tree_of,
)

REPOSITORY = Path(__file__).parents[2]
PACKAGE = REPOSITORY / "experiments"
FLOORS = {"common": 0, "tasks": 1, "training": 2}
CLAIM = 3
"""The floor of every other folder: what reproduces a claim."""
ABOVE = {"redraw.py": 4}
"""What serves all claims."""
WITHIN = {("ethernet", "cluster"): 0, ("ethernet", "race"): 1}
"""The folders inside a claim, from below."""
FILES = sorted(PACKAGE.rglob("*.py"))
NAMES = {path: module_name(path, REPOSITORY) for path in FILES}
imports_of = cache(lambda path: imported(nodes_of(path), {*NAMES.values()}))
CLAIMS = sorted(path.parent.name for path in PACKAGE.glob("*/__init__.py") if path.parent.name not in FLOORS)


def test_imports_only_from_floors_below() -> None:
    for path, module in ((one, module) for one in FILES for module in imports_of(one)):
        own, other = path.relative_to(PACKAGE).parts, tuple(module.split(".")[1:])
        if other and own[0] != other[0]:
            floor, below = (FLOORS | ABOVE).get(own[0], CLAIM), FLOORS.get(other[0], CLAIM)
            assert below < floor, f"{path} must not import {module}"
        elif own[:2] in WITHIN and other[:2] != own[:2]:
            assert other[:2] in WITHIN, f"{path} must not import {module}"
            assert WITHIN[other[:2]] < WITHIN[own[:2]], f"{path} must not import {module}"


def test_there_are_no_circles() -> None:
    assert circles({NAMES[path]: imports_of(path) for path in FILES}) == []


def test_files_and_functions_fit_in_the_head() -> None:
    for path in FILES:
        assert path.read_text().count("\n") <= MOST_LINES, path
        assert ast.get_docstring(tree_of(path)), f"{path}: a module says why it exists"
        assert not any(isinstance(node, ast.ImportFrom) and node.level for node in nodes_of(path)), f"{path}: absolute"
        for name, function, _ in defined(tree_of(path)):
            assert function.end_lineno - function.lineno < MOST_LINES_OF_A_FUNCTION, f"{path}: {name}"
            assert function.name == "__init__" or count_arguments(function) <= MOST_ARGUMENTS, f"{path}: {name}"


@pytest.mark.parametrize("claim", CLAIMS)
def test_a_claim_says_what_it_shows_and_stands_in_the_index(claim: str) -> None:
    assert (PACKAGE / claim / "README.md").read_text().startswith("# ")
    assert f"({claim}/README.md)" in (PACKAGE / "README.md").read_text()


def test_make_runs_every_claim_and_nothing_that_is_not_there() -> None:
    commands = re.findall(r"-m (experiments\.[\w.]+)", (REPOSITORY / "Makefile").read_text())
    assert {command.split(".")[1] for command in commands} == {*CLAIMS, "redraw"}
    for command in commands:
        module = PACKAGE.joinpath(*command.split(".")[1:])
        runnable = module / "__main__.py" if module.is_dir() else module.with_suffix(".py")
        assert 'if __name__ == "__main__":' in runnable.read_text()
