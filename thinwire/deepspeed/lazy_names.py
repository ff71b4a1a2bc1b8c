"""How the modules of this room are doors: submodules are imported when they are first asked for, and a name that
thinwire has no counterpart of can be imported, and says at its first use what to do instead."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

__all__ = ["NotOfferedError", "lazy_names", "not_offered"]

_ROOM = "thinwire.deepspeed"
_GUIDE = "docs/guides/coming_from_deepspeed.md"


class NotOfferedError(NotImplementedError):
    """Something of DeepSpeed's that thinwire does not have was used; the message says what to do instead."""


class _NotOffered:
    """What stands for a name that thinwire has no counterpart of: it can be imported and subclassed, and not called."""

    name = ""
    instead = ""

    def __new__(cls, *_args: Any, **_options: Any) -> NoReturn:
        raise NotOfferedError(f"thinwire has no counterpart of deepspeed.{cls.name}: {cls.instead}")


def not_offered(name: str, instead: str) -> type[Any]:
    """A class for deepspeed.`name` that raises NotOfferedError with `instead`, what to do, when it is called.

    Scripts import names that they use in some runs only, so that importing is no error.
    """
    return type(name.rpartition(".")[2], (_NotOffered,), {"name": name, "instead": instead, "__doc__": instead})


def lazy_names(
    package: str, modules: Sequence[str], names: Mapping[str, Sequence[str]] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` (PEP 562) of `package`.

    `modules`: of the package, imported when first asked for. `names`: those that a module defines, by the module's path
    in this room.
    """
    homes = {name: home for home, offered in (names or {}).items() for name in offered}

    def get(name: str) -> Any:
        if name in homes:
            return getattr(importlib.import_module(f"{_ROOM}.{homes[name]}"), name)
        if name in modules:
            return importlib.import_module(f"{package}.{name}")
        raise AttributeError(
            f"module {package!r} has no attribute {name!r}; {_GUIDE} lists what thinwire has of DeepSpeed's names"
        )

    def offered() -> list[str]:
        return sorted({*vars(importlib.import_module(package)), *modules, *homes})

    return get, offered
