"""Floor 7, the optimizers where Lightning owns the training loop. Importing it registers the strategy "thinwire" with
`lightning.pytorch`, with the standalone `pytorch_lightning`, or with both: whichever the process has imported, else
whichever is installed. `pip install thinwire[lightning]` brings the first.

The two have the same modules and a registry each, and their classes do not mix: each gets a strategy of its own.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from functools import cache
from typing import TYPE_CHECKING, Any

from thinwire.lightning import strategy

__all__ = ["ThinwireStrategy"]

if TYPE_CHECKING:
    from thinwire.lightning.strategy import ThinwireStrategy

_TWINS = ("lightning.pytorch", "pytorch_lightning")


def __getattr__(name: str) -> Any:
    if name == "ThinwireStrategy":
        return _strategy_of(register()[0])  # for the Trainer that this process has imported
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def register() -> list[str]:
    """Make `Trainer(strategy="thinwire")` known; returns the packages in which it is.

    Raises ImportError where neither package is installed.
    """
    for package in (twins := _present()):
        registry = importlib.import_module(f"{package}.strategies").StrategyRegistry
        if strategy.NAME not in registry:
            registry.register(
                strategy.NAME, _strategy_of(package), description="gradients leave through a thinwire optimizer"
            )
    return twins


@cache
def _strategy_of(package: str) -> type[strategy.ThinwireStrategy]:
    """ThinwireStrategy on top of this package's DDPStrategy."""
    base: Any = importlib.import_module(f"{package}.strategies").DDPStrategy
    made: type[strategy.ThinwireStrategy] = type(
        strategy.ThinwireStrategy.__name__,
        (strategy.ThinwireStrategy, base),
        {"__module__": "thinwire.lightning", "__doc__": strategy.ThinwireStrategy.__doc__},
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


register()
