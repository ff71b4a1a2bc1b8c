"""The house's floors, as a test: a room imports only from floors below it, and files stay small."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "thinwire"

# The floors of docs/design.md. Rooms that stand apart use the ground floor only; the engine may use them.
FLOORS = {"simd": 0, "comm": 1, "zero": 2, "compress": 3, "optim": 4, "plan": 5, "engine": 6}
APART = {"sparse_attn", "pld"}
MOST_LINES = 400

FILES = sorted(PACKAGE.rglob("*.py"))


def room_of(path: Path) -> str | None:
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else None


def imported_rooms(tree: ast.AST) -> set[str]:
    """Rooms of thinwire that a module imports, inside functions and for type checking too."""
    rooms = set()
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        rooms |= {name.split(".")[1] for name in names if name.startswith("thinwire.")}
    return rooms


def test_every_room_has_a_floor() -> None:
    rooms = {room_of(path) for path in FILES} - {None}
    assert rooms <= FLOORS.keys() | APART


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_imports_only_from_floors_below(path: Path) -> None:
    room = room_of(path)
    if room is None:
        return
    for other in imported_rooms(ast.parse(path.read_text())) - {room}:
        floor = 1 if room in APART else FLOORS[room]
        below = FLOORS["engine"] - 1 if other in APART else FLOORS[other]
        assert below < floor, f"{path.name}: {room} must not import {other}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_relative_imports_and_a_file_fits_in_the_head(path: Path) -> None:
    source = path.read_text()
    assert not any(isinstance(node, ast.ImportFrom) and node.level for node in ast.walk(ast.parse(source)))
    assert source.count("\n") <= MOST_LINES
    assert ast.get_docstring(ast.parse(source)), "a module says why it exists"


def test_there_are_no_circles() -> None:
    modules = {module_name(path) for path in FILES}
    graph = {module_name(path): module_level_imports(path, modules) for path in FILES}
    done: set[str] = set()

    def visit(module: str, trail: tuple[str, ...]) -> None:
        assert module not in trail, " -> ".join((*trail, module))
        if module not in done:
            for target in graph[module]:
                visit(target, (*trail, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")


def module_level_imports(path: Path, modules: set[str]) -> set[str]:
    """Modules of thinwire that importing this file needs; what stands under `if TYPE_CHECKING` it does not."""
    names: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                names.add(submodule if submodule in modules else node.module)
    return (names & modules) - {module_name(path)}
