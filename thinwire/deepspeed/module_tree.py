"""Make DeepSpeed's module tree out of the table in `names`: `import thinwire.deepspeed.runtime.zero.config` finds a
module that has no file, and takes each name from where the table says when it is first asked for.

A package's `__path__` has an entry that a hook of `sys.path_hooks` answers for, so that Python's own import system,
`importlib` and `pkgutil` find these modules as they find files. Files come first.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.abc import Loader, MetaPathFinder, PathEntryFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

from thinwire.deepspeed.errors import NotOfferedError
from thinwire.deepspeed.names import ALL, NAMES, Instead

ENTRY = "thinwire.deepspeed.names:"  # and the path of a package: its place in a `__path__`
_ROOM = "thinwire.deepspeed"
_GUIDE = "docs/guides/coming_from_deepspeed.md"


class _NotOffered:
    """The base of what stands for a name without a counterpart: it can be imported and subclassed, and not called."""

    path = ""
    instead = ""

    def __new__(cls, *_args: Any, **_options: Any) -> NoReturn:
        raise NotOfferedError(f"thinwire has no counterpart of deepspeed.{cls.path}: {cls.instead}")


class _Module(ModuleType):
    """A module of DeepSpeed's that has no file."""

    def __getattr__(self, name: str) -> Any:
        value = find_name(_path_of(self.__name__), name)
        self.__dict__[name] = value
        return value

    def __dir__(self) -> list[str]:
        return sorted({*self.__dict__, *list_names(_path_of(self.__name__))})

    def __setattr__(self, name: str, value: Any) -> None:
        # The import system puts a module into its package; a name of the table that is spelled alike keeps its place.
        if not (isinstance(value, ModuleType) and name in _sources(_path_of(self.__name__))):
            super().__setattr__(name, value)


class _Modules(PathEntryFinder, Loader):
    """Finder and loader of the modules that the table has in one package."""

    def __init__(self, package: str) -> None:
        self._package = package

    def find_spec(self, fullname: str, target: ModuleType | None = None) -> ModuleSpec | None:
        path = _path_of(fullname)
        package, _, name = path.rpartition(".")
        if package != self._package or name not in _modules_in(package):
            return None
        is_package = bool(_modules_in(path))
        spec = ModuleSpec(fullname, self, origin=ENTRY + path, is_package=is_package)
        if is_package:
            spec.submodule_search_locations = [ENTRY + path]
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name, f"deepspeed.{_path_of(spec.name)}, over thinwire's names.")

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: names come as they are asked for."""

    def iter_modules(self, prefix: str = "") -> Iterator[tuple[str, bool]]:
        """(name, is it a package) of each module, as pkgutil asks."""
        for name in _modules_in(self._package):
            yield prefix + name, bool(_modules_in(f"{self._package}.{name}".lstrip(".")))


class _StandIn(MetaPathFinder, Loader):
    """Finder of `deepspeed` and all below it: the modules of this room themselves, each under both names."""

    def find_spec(self, fullname: str, path: object, target: ModuleType | None = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] != "deepspeed" or importlib.util.find_spec(_here(fullname)) is None:
            return None
        return ModuleSpec(fullname, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(_here(spec.name))
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give it back the specification that it was made by, in whose place the import system has put its own."""
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


def stand_in() -> None:
    """Have every `import deepspeed` in this process find this room from now on."""
    if not any(isinstance(finder, _StandIn) for finder in sys.meta_path):
        sys.meta_path.insert(0, _StandIn())
    sys.modules["deepspeed"] = importlib.import_module(_ROOM)


def install() -> None:
    """Have the import system know the entries that begin with `ENTRY`."""
    if _hook not in sys.path_hooks:
        sys.path_hooks.append(_hook)


def find_name(path: str, name: str) -> Any:
    """Import what the module `path` of DeepSpeed's has as `name`.

    Raises AttributeError if it is neither in the table nor a submodule.
    """
    source, original = _sources(path).get(name, ("", ""))
    if isinstance(source, Instead):
        return _not_offered(f"{path}.{name}".lstrip("."), source)
    if source:
        module = importlib.import_module(source)
        return getattr(module, original) if original else module
    if name in _modules_in(path):
        return importlib.import_module(".".join(filter(None, (_ROOM, path, name))))
    if name == "__all__":
        return sorted({*_sources(path), *_whole_names(path)})
    for module in () if name.startswith("_") else _whole_modules(path):
        if hasattr(module, name):
            return getattr(module, name)
    raise AttributeError(
        f"module {'.'.join(filter(None, (_ROOM, path)))!r} has no attribute {name!r}; {_GUIDE} lists what thinwire has "
        "of DeepSpeed's names"
    )


def list_names(path: str) -> set[str]:
    """Names and submodules of a module of DeepSpeed's."""
    return {*_sources(path), *_modules_in(path), *_whole_names(path)}


@cache
def _modules_in(path: str) -> Sequence[str]:
    """Submodules of `path`, by name."""
    start = f"{path}." if path else ""
    return sorted({one.removeprefix(start).partition(".")[0] for one in NAMES if one.startswith(start) and one != path})


@cache
def _sources(path: str) -> dict[str, tuple[str, str]]:
    """(module or what to do instead, its name there, none for the module itself) by the name in `path`."""
    found = {}
    for source, names in NAMES.get(path, {}).items():
        for pair in names.split():
            name, equals, original = pair.partition("=")
            if name != ALL:
                found[name] = (_full(source), original if equals else name)
    return found


def _whole_modules(path: str) -> list[ModuleType]:
    """Modules of ours all of whose names `path` has."""
    return [importlib.import_module(_full(source)) for source, names in NAMES.get(path, {}).items() if ALL in names]


def _whole_names(path: str) -> list[str]:
    """The public names that these modules define."""
    return [
        name
        for module in _whole_modules(path)
        for name, value in vars(module).items()
        if not name.startswith("_") and getattr(value, "__module__", None) == module.__name__
    ]


@cache
def _not_offered(path: str, instead: str) -> type[Any]:
    """A class that says `instead` when it is called: scripts import names that they use in some runs only."""
    return type(path.rpartition(".")[2], (_NotOffered,), {"path": path, "instead": instead, "__doc__": instead})


def _here(name: str) -> str:
    """The name in this room of `deepspeed` or a module below it."""
    return _ROOM + name.removeprefix("deepspeed")


def _path_of(fullname: str) -> str:
    return fullname.removeprefix(_ROOM).removeprefix(".")


def _full(source: str) -> str:
    return f"{_ROOM}{source}" if source.startswith(".") else source


def _hook(entry: str) -> _Modules:
    if not entry.startswith(ENTRY):
        raise ImportError(f"{entry} has no modules of DeepSpeed's")
    return _Modules(entry.removeprefix(ENTRY))
