"""Lightning comes as two packages with the same modules and a registry each, whose classes do not mix: here each gets a
strategy of its own."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from functools import cache
from typing import Any

from thinwire.lightning.strategy import NAME, ThinwireStrategy

__all__ = ["newest_strategy", "register"]

_TWINS = ("lightning.pytorch", "pytorch_lightning")


def register() -> list[str]:
    """Make `Trainer(strategy="thinwire")` known; returns the packages in which it is.

    Raises ImportError where neither package is installed.
    """
    for package in (twins := _present()):
        registry = importlib.import_module(f"{package}.strategies").StrategyRegistry
        if NAME not in registry:
            registry.register(NAME, strategy_of(package), description="gradients leave through a thinwire optimizer")
    return twins


def newest_strategy() -> type[ThinwireStrategy]:
    """The strategy for the Trainer that this process has imported."""
    return strategy_of(register()[0])


@cache
def strategy_of(package: str) -> type[ThinwireStrategy]:
    """ThinwireStrategy on top of this package's DDPStrategy."""
    base: Any = importlib.import_module(f"{package}.strategies").DDPStrategy
    made: type[ThinwireStrategy] = type(
        ThinwireStrategy.__name__,
        (ThinwireStrategy, base),
        {"__module__": "thinwire.lightning", "__doc__": ThinwireStrategy.__doc__},
    )
    return made


def _present() -> list[str]:
    """The twins that are imported; where none is yet, the one to import."""
    if imported := [package for package in _TWINS if package in sys.modules]:
        return imported
    for package in _TWINS:
        if importlib.util.find_spec(package.partition(".")[0]) is not None:
            return [package]
    raise ImportError("thinwire.lightning needs Lightning: pip install 'thinwire[lightning]'")
