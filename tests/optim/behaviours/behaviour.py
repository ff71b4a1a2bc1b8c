"""How a behaviour is written: one body, which runs on every rank, noted with the numbers of ranks to try it on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from tests.optim.subject import Subject
from tests.optim.training import weights
from thinwire.comm import Communicator

Body = Callable[[Communicator, Subject], Any]

SIZES: dict[Body, tuple[int, ...]] = {}
"""Every behaviour, with the numbers of ranks that it is tried on."""

WARNS: dict[Body, str] = {}
"""What a behaviour must warn of, once for each call of it on all ranks; nothing else may warn."""


def behaviour(*sizes: int, warns: str | None = None) -> Callable[[Body], Body]:
    """Try a body on these numbers of ranks."""

    def note(body: Body) -> Body:
        SIZES[body] = sizes
        if warns is not None:
            WARNS[body] = warns
        return body

    return note


def alike(comm: Communicator, model: nn.Module) -> bool:
    """Whether every rank has the same bits of the weights. Collective."""
    return len(set(comm.all_gather_bytes(weights(model).numpy().tobytes()))) == 1
