"""Doors that cost nothing to open: a package names what it offers, and imports it at its first use."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Callable
from typing import Any

PROVIDERS: dict[str, str] = {}
"""Modules that others below them use if they are there, by what for; the door of the package names them."""


def lazy_exports(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of `package` (PEP 562), which offers what its source imports for type checkers.

    No name may be that of another module of the package, which importing it would put in its place.
    """
    module = sys.modules[package]
    source = module.__spec__.loader.get_source(package)  # type: ignore[union-attr]
    offered: dict[str, str] = {}
    for branch in ast.parse(source).body:
        for line in branch.body if isinstance(branch, ast.If) else ():
            assert isinstance(line, ast.ImportFrom)
            offered |= dict.fromkeys((alias.name for alias in line.names), str(line.module))

    def get(name: str) -> Any:
        if name not in offered:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if offered[name] == package:
            return importlib.import_module(f"{package}.{name}")
        return getattr(importlib.import_module(offered[name]), name)

    return get, lambda: sorted({*vars(module), *offered})


def provided(purpose: str) -> Any:
    """The module that an upper room offers for `purpose`, imported when first asked for; None if there is none."""
    return importlib.import_module(PROVIDERS[purpose]) if purpose in PROVIDERS else None
