"""Floor 7, the optimizers where Lightning owns the training loop. Importing it registers the strategy "thinwire" with
`lightning.pytorch`, with the standalone `pytorch_lightning`, or with both: whichever the process has imported, else
whichever is installed. `pip install thinwire[lightning]` brings the first."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from thinwire.lightning.registration import newest_strategy, register

__all__ = ["ThinwireStrategy"]

if TYPE_CHECKING:
    from thinwire.lightning.strategy import ThinwireStrategy

register()


def __getattr__(name: str) -> Any:
    if name == "ThinwireStrategy":
        return newest_strategy()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
