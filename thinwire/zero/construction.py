"""Hears when a module has been constructed, whatever class it is of and whoever constructs it."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from thinwire.zero.live_objects import with_subclasses

__all__ = ["Constructions"]

Apply = Callable[[nn.Module, Callable[[nn.Module], None]], nn.Module]


class Constructions:
    """While entered, calls `finished` with every module that this thread constructs, once its `__init__` has returned.

    A class's own `__init__` and those of its bases are one construction. Classes are changed for as long, those defined
    inside too, since torch has no hook for this; the last one that was entered is the first to be left.
    `nn.Module.apply` is `apply` meanwhile, and modules that get memory by `to_empty`, torch.nn.utils.skip_init's above
    all, are constructed then; the memory holds zeros, and not what others have left in it.
    """

    def __init__(self, finished: Callable[[nn.Module], None], apply: Apply) -> None:
        self._finished = finished
        self._apply = apply
        self._originals: list[tuple[type, str, Any]] = []
        self._under_way: set[int] = set()
        self._thread = 0

    def __enter__(self) -> None:
        self._thread = threading.get_ident()
        for kind in with_subclasses([nn.Module]):
            self._watch(kind)
        self._replace(nn.Module, "apply", self._apply)
        self._watch_memory()
        before = vars(nn.Module).get("__init_subclass__")

        def defined(kind: Any, /, **arguments: Any) -> None:
            if before is None:
                super(nn.Module, kind).__init_subclass__(**arguments)  # type: ignore[misc]
            else:
                before.__get__(None, kind)(**arguments)
            self._watch(kind)

        self._replace(nn.Module, "__init_subclass__", classmethod(defined))

    def __exit__(self, *_: object) -> None:
        while self._originals:
            kind, name, original = self._originals.pop()
            if original is None:
                delattr(kind, name)
            else:
                setattr(kind, name, original)

    def _watch_memory(self) -> None:
        original = nn.Module.to_empty

        @functools.wraps(original)
        def emptied(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
            original(module, *args, **kwargs)
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.zero_()
            for one in module.modules() if threading.get_ident() == self._thread else ():
                if id(one) not in self._under_way:
                    self._finished(one)
            return module

        self._replace(nn.Module, "to_empty", emptied)

    def _watch(self, kind: type) -> None:
        init = vars(kind).get("__init__")
        if init is None:
            return

        @functools.wraps(init)
        def watched(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            if id(module) in self._under_way or threading.get_ident() != self._thread:
                init(module, *args, **kwargs)
                return
            self._under_way.add(id(module))
            try:
                init(module, *args, **kwargs)
            finally:
                self._under_way.discard(id(module))
            self._finished(module)

        self._replace(kind, "__init__", watched)

    def _replace(self, kind: type, name: str, new: Any) -> None:
        self._originals.append((kind, name, vars(kind).get(name)))
        setattr(kind, name, new)
