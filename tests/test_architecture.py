"""The house as tests: a room imports only from floors below it, nothing imports in circles, and every file and function
fits in the head.

What still breaks a rule stands in `KNOWN`, rule by rule. A test fails at what breaks a rule and is not listed, and at
what is listed and breaks no rule any more, so that the lists can only shrink.
"""

import ast
from collections.abc import Iterable, Iterator, Mapping, Set
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "thinwire"
FILES = sorted(PACKAGE.rglob("*.py"))

# The floors of docs/internals/map.md. Rooms that stand apart use the ground floor only; inference, the
# engine and rooms above may use them.
# The modules of thinwire/ itself are doors: they import from every room, and no room imports from them.
FLOORS = {
    "simd": 0,
    "comm": 1,
    "compress": 2,
    "zero": 3,
    "optim": 4,
    "parallel": 4,
    "plan": 5,
    "inference": 5,
    "engine": 6,
    "deepspeed": 7,
    "hugging_face": 7,
    "lightning": 7,
}
APART = {"sparse_attn", "pld", "transformers"}
# What is no room and no door, and imports nothing of thinwire, so that every room may use it.
GROUND = {"lazy_imports", "version"}

MOST_LINES = 400
MOST_LINES_OF_A_FUNCTION = 60
MOST_ARGUMENTS = 12

# Decorators behind which stands no Python.
COMPILED = {"triton.jit"}

# Imports inside functions hide who needs whom. They count as others do for floors and circles, and stand in doors (an
# __init__.py that imports on first use, the modules of thinwire/ itself) and in these files only.
LAZY_LOADERS = {
    "comm/launch.py": "importing mpi4py starts MPI",
    "engine/command_line.py": "--help needs no torch",
    "engine/config/rules.py": "layouts import what torch.compile needs, and most files have none",
    "inference/preparation.py": "torch.compile takes seconds to import",
    "optim/registry.py": "it names optimizers to those that need no torch",
    "plan/commands.py": "a probe takes torch and pydantic, which plans do without",
    "plan/request.py": "a calibration takes pydantic, and most plans are without one",
    "compress/kernels/loading.py": "a backend is imported where a bucket lies on its device",
    "sparse_attn/operator.py": "a backend is imported where a tensor lies on its device",
}

# rule -> what breaks it -> why it still does
KNOWN: dict[str, dict[str, str]] = {
    "arguments": {"deepspeed/initialization.py: initialize": "DeepSpeed's call: scripts pass some by position"}
}


def test_every_room_has_a_floor() -> None:
    rooms = {room_of(path) for path in FILES} - {None}
    assert rooms <= FLOORS.keys() | APART


def test_floors() -> None:
    """Imports go down: those inside functions and for type checking too."""
    found = {}
    for path in FILES:
        room = room_of(path)
        if room is None and path.stem not in GROUND:
            continue
        for target in sorted(imports(path)):
            other = [*target.split("."), ""][1]
            if other != room and not is_below(other, room):
                found[f"{relative(path)} imports {target}"] = ""
    compare("floors", found)


def test_circles() -> None:
    """No two modules need each other, not even for type checking or inside a function."""
    graph = {module_name(path): set(imports(path)) for path in FILES}
    compare("circles", {" ".join(circle): "" for circle in circles(graph)})


def test_circles_of_folders() -> None:
    """Nor do two folders of one room; what stands in the room itself may be above or below them."""
    graph: dict[str, set[str]] = {folder: set() for folder in PACKAGES}
    for path in FILES:
        folder = folder_of(module_name(path))
        for needed in map(folder_of, imports(path)):
            if not f"{folder}.".startswith(f"{needed}.") and not f"{needed}.".startswith(f"{folder}."):
                graph[folder].add(needed)
    compare("circles of folders", {" ".join(circle): "" for circle in circles(graph)})


def test_nobody_inside_comes_in_by_the_door() -> None:
    """A module imports its own room's modules, not the room: its __init__.py imports the module first."""
    found = {}
    for path in FILES:
        name = module_name(path)
        for target in imports(path) - function_imports(path):
            if name.startswith(f"{target}."):
                found[f"{relative(path)} imports {target}"] = ""
    compare("own door", found)


def test_imports_inside_functions() -> None:
    lazy = {relative(path) for path in FILES if function_imports(path) and not is_door(path)}
    assert lazy == LAZY_LOADERS.keys()


def test_type_filters() -> None:
    """`[x for x in xs if isinstance(x, Y)]` drops what is of a wrong class without a word."""
    found = {}
    for path in FILES:
        for node in nodes_of(path):
            if isinstance(node, ast.ListComp | ast.SetComp | ast.GeneratorExp):
                kept = ast.unparse(node.elt)
                for condition in (condition for one in node.generators for condition in one.ifs):
                    if isinstance(condition, ast.Call) and ast.unparse(condition).startswith(f"isinstance({kept}, "):
                        found[f"{relative(path)}: {ast.unparse(condition)}"] = ""
    compare("type filters", found)


def test_lines_of_a_file() -> None:
    lines = {relative(path): path.read_text().count("\n") for path in FILES}
    compare("lines of a file", {name: f"{count}" for name, count in lines.items() if count > MOST_LINES})


def test_lines_of_a_function() -> None:
    lines = {name: node.end_lineno - node.lineno + 1 for name, _, node, _ in functions() if node.end_lineno}
    too_long = {name: f"{count}" for name, count in lines.items() if count > MOST_LINES_OF_A_FUNCTION}
    compare("lines of a function", too_long)


def test_arguments() -> None:
    """Of all functions but public constructors and what is compiled."""
    found = {}
    for name, path, node, owner in functions():
        public = node.name == "__init__" and owner in exported(path)
        if not public and not decorators(node) & COMPILED and count_arguments(node) > MOST_ARGUMENTS:
            found[name] = f"{count_arguments(node)}"
    compare("arguments", found)


def test_form_of_a_module() -> None:
    relative_imports = {
        relative(path): ""
        for path in FILES
        if any(isinstance(node, ast.ImportFrom) and node.level for node in nodes_of(path))
    }
    compare("absolute imports only", relative_imports)
    compare(
        "a module says why it exists", {relative(path): "" for path in FILES if not ast.get_docstring(tree_of(path))}
    )


# What is read from the sources


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree_of(path)))


def relative(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def module_name(path: Path, root: Path = PACKAGE.parent) -> str:
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def room_of(path: Path) -> str | None:
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else None


def folder_of(module: str) -> str:
    return module if module in PACKAGES else module.rpartition(".")[0]


def is_door(path: Path) -> bool:
    return path.name == "__init__.py" or room_of(path) is None


def is_below(other: str, room: str | None) -> bool:
    if other in GROUND:
        return True
    if room is None or other not in FLOORS.keys() | APART:
        return False
    floor = 1 if room in APART else FLOORS[room]
    return (FLOORS["inference"] - 1 if other in APART else FLOORS[other]) < floor


def exported(path: Path) -> set[str]:
    """Names in `__all__`; of a module without one, classes that begin with no underscore."""
    for node in tree_of(path).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    return {node.name for node in tree_of(path).body if isinstance(node, ast.ClassDef) and node.name[0] != "_"}


@cache
def imports(path: Path) -> frozenset[str]:
    """Modules of thinwire that a module names in an import, wherever it stands."""
    return frozenset(imported(nodes_of(path)) - {module_name(path)})


@cache
def function_imports(path: Path) -> frozenset[str]:
    """Those that stand inside functions."""
    inside = (node for _, function, _ in defined(tree_of(path)) for node in ast.walk(function))
    return frozenset(imported(inside))


def imported(nodes: Iterable[ast.AST], modules: Set[str] | None = None) -> set[str]:
    """Modules that imports name, of `modules`: by default the library's."""
    modules = MODULES if modules is None else modules
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                submodule = f"{node.module}.{alias.name}"
                names.add(submodule if submodule in modules else node.module)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            names |= matching(node.args[0])
    return names & modules


def matching(name: ast.expr) -> set[str]:
    """The modules that an argument of import_module can name: an f-string names all that begin as it does."""
    if isinstance(name, ast.Constant):
        return {str(name.value)}
    if isinstance(name, ast.JoinedStr) and isinstance(name.values[0], ast.Constant):
        beginning = str(name.values[0].value)
        return {module for module in MODULES if beginning.startswith("thinwire.") and module.startswith(beginning)}
    return set()


@cache
def functions() -> tuple[tuple[str, Path, ast.FunctionDef | ast.AsyncFunctionDef, str], ...]:
    """(its name in lists, file, definition, name of the class it stands in) of every function."""
    return tuple(
        (f"{relative(path)}: {where}", path, node, owner)
        for path in FILES
        for where, node, owner in defined(tree_of(path))
    )


def defined(
    node: ast.AST, owner: str = "", before: str = ""
) -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef, str]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield before + child.name, child, owner
            yield from defined(child, "", f"{before}{child.name}.")
        elif isinstance(child, ast.ClassDef):
            yield from defined(child, child.name, f"{before}{child.name}.")
        else:
            yield from defined(child, owner, before)


def count_arguments(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    taken = node.args
    named = [*taken.posonlyargs, *taken.args, *taken.kwonlyargs]
    itself = bool(named) and named[0].arg in ("self", "cls")
    return len(named) - itself + (taken.vararg is not None) + (taken.kwarg is not None)


def decorators(node: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
    return {ast.unparse(one.func if isinstance(one, ast.Call) else one) for one in node.decorator_list}


def circles(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Groups of nodes that reach one another, each sorted: Tarjan's strongly connected components of several nodes."""
    found: list[list[str]] = []
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []

    def visit(node: str) -> None:
        number[node] = lowest[node] = len(number)
        stack.append(node)
        for target in sorted(graph[node] & graph.keys()):
            if target not in number:
                visit(target)
                lowest[node] = min(lowest[node], lowest[target])
            elif target in stack:
                lowest[node] = min(lowest[node], number[target])
        if lowest[node] == number[node]:
            at = stack.index(node)
            if len(stack) - at > 1:
                found.append(sorted(stack[at:]))
            del stack[at:]

    for node in sorted(graph):
        if node not in number:
            visit(node)
    return found


def compare(rule: str, found: Mapping[str, str]) -> None:
    known = KNOWN.get(rule, {})
    new = [f"{name} {found[name]}" for name in sorted(found.keys() - known.keys())]
    assert not new, f"{rule}: these break the rule:\n" + "\n".join(new)
    gone = sorted(known.keys() - found.keys())
    assert not gone, f"{rule}: no longer needed in KNOWN, remove them:\n" + "\n".join(gone)


MODULES = {module_name(path) for path in FILES}
PACKAGES = {module_name(path) for path in FILES if path.name == "__init__.py"}
