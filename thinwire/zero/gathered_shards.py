"""A stage 3 parameter that answers as the whole tensor for a while, although this rank has a shard of it: the object
that scripts hold stays the same, and so does what FSDP2 finds in it."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

__all__ = ["gathered", "show_shard", "show_whole"]

_WHOLE = "_thinwire_whole"

_tensor: Any = Tensor  # whose attributes are declared as their values' types, and are descriptors
_OF_THE_SHARD = frozenset(
    {
        _tensor.grad.__get__,
        _tensor.grad.__set__,
        _tensor.grad.__delete__,
        _tensor.requires_grad.__get__,
        _tensor.requires_grad.__set__,
        _tensor.requires_grad_,
        _tensor.is_leaf.__get__,
    }
)
"""What autograd and optimizers ask of the parameter itself."""


@cache
def _class() -> type[Tensor]:
    # Imported here: it takes half a second that only stage 3 should cost.
    from torch.distributed.tensor import DTensor

    class GatheredShards(DTensor):
        """A DTensor whose operations are those of the whole tensor that was gathered from it."""

        __slots__ = ()  # so that a DTensor can become one

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            with torch._C.DisableTorchFunctionSubclass():
                if func in _OF_THE_SHARD:
                    return func(*args, **(kwargs or {}))
                plain_args, plain_kwargs = tree_map_only(cls, gathered, (args, kwargs or {}))
                result = func(*plain_args, **plain_kwargs)
            # What writes to its first argument returns it.
            return args[0] if args and isinstance(args[0], cls) and result is plain_args[0] else result

        def __repr__(self) -> str:  # type: ignore[override]
            return f"GatheredShards({gathered(self)!r})"

    return GatheredShards


def show_whole(parameter: Tensor, whole: Tensor) -> None:
    """Have a sharded parameter answer as `whole`, which writes to it go to, until `show_shard`."""
    setattr(parameter, _WHOLE, whole)
    parameter.__class__ = _class()


def show_shard(parameter: Tensor) -> None:
    """Have it be the shards again, which have not changed meanwhile."""
    parameter.__class__ = _class().__bases__[0]
    delattr(parameter, _WHOLE)


def gathered(parameter: Tensor) -> Tensor | None:
    """The whole tensor that a sharded parameter answers as; None where it does not."""
    whole: Tensor | None = parameter.__dict__.get(_WHOLE)
    return whole
