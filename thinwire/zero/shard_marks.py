"""What is noted on the parameters of a model that stage 3 has sharded: who shares them, and with what they are
gathered."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, TypeGuard

from torch import Tensor, nn

from thinwire.comm import Communicator

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = ["communicator_of", "is_sharded", "layer_of", "mark"]

_ATTRIBUTE = "_thinwire_mark"


class _Mark:
    """It keeps nothing alive, and is not saved with its parameter."""

    def __init__(self, comm: Communicator, layer: nn.Module | None) -> None:
        self.comm = weakref.ref(comm)
        self.layer = None if layer is None else weakref.ref(layer)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def is_sharded(parameter: Tensor) -> TypeGuard[DTensor]:
    """Whether a rank has a part of it only."""
    return hasattr(parameter, "device_mesh")


def mark(parameter: Tensor, comm: Communicator, layer: nn.Module | None) -> None:
    """Note the ranks, and the layer with which it is gathered; None for the model."""
    setattr(parameter, _ATTRIBUTE, _Mark(comm, layer))


def communicator_of(parameter: Tensor) -> Communicator | None:
    """The ranks that share it; None where no engine has sharded it, or that is gone."""
    found: _Mark | None = getattr(parameter, _ATTRIBUTE, None)
    return None if found is None else found.comm()


def layer_of(parameter: Tensor) -> nn.Module | None:
    """The layer that it is gathered with; None for the whole model."""
    found: _Mark | None = getattr(parameter, _ATTRIBUTE, None)
    return None if found is None or found.layer is None else found.layer()
