"""Doors that cost nothing to open: a package names what it offers, and imports it at its first use."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

PROVIDERS: dict[str, str] = {}
"""Modules of upper rooms that lower ones use if they are there, by what for; the door of the package names them."""


def lazy_exports(
    package: str, offered: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of `package` (PEP 562), which offers names of its modules.

    `offered`: names by the module of `package` that defines them; under "" the names of modules that are offered as
    such. No name may be that of another module of the package, which importing it would put in its place.
    """
    modules = {name: module for module, names in offered.items() for name in names}

    def get(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if not modules[name]:
            return importlib.import_module(f"{package}.{name}")
        return getattr(importlib.import_module(f"{package}.{modules[name]}"), name)

    def names() -> list[str]:
        return sorted({*vars(importlib.import_module(package)), *modules})

    return get, names


def provided(purpose: str) -> Any:
    """The module that an upper room offers for `purpose`, imported when first asked for; None if there is none."""
    return importlib.import_module(PROVIDERS[purpose]) if purpose in PROVIDERS else None
