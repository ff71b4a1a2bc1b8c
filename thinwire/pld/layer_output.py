"""What a layer returns: its hidden states, alone or first in a tuple, so that a dropped layer can return the like."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["LayerOutput"]


@dataclass(frozen=True)
class LayerOutput:
    """Hidden states, and what follows them where the layer returns a tuple; `rest` is None where it does not."""

    hidden: Tensor
    rest: tuple[None, ...] | None

    @classmethod
    def of(cls, layer: nn.Module, returned: Any, given: Tensor) -> LayerOutput:
        """Take apart what `layer` returned for the hidden states `given`.

        Raises TypeError for what is neither a tensor nor a tuple that begins with one, ValueError where the shape
        changed or where the tuple holds what a dropped layer could not return.
        """
        in_tuple = isinstance(returned, tuple) and bool(returned)
        first, rest = (returned[0], returned[1:]) if in_tuple else (returned, None)
        name = type(layer).__name__
        if not isinstance(first, Tensor):
            raise TypeError(
                f"{name} returned {type(first).__name__}, but a layer that can be dropped returns its hidden states, "
                "or a tuple that begins with them"
            )
        if first.shape != given.shape:
            raise ValueError(
                f"{name} turned hidden states of shape {tuple(given.shape)} into {tuple(first.shape)}: a layer that "
                "changes the shape cannot be left out. Pass drop_layers() the layers that keep it"
            )
        extra = [type(value).__name__ for value in rest or () if value is not None]
        if extra:
            raise ValueError(
                f"{name} returned more than hidden states ({', '.join(extra)}), "
                "which it would not have if it were dropped: train with output_attentions=False and use_cache=False; "
                "layers that compute something for the others, such as T5's position bias, cannot be dropped"
            )
        return cls(first, rest)

    def whole(self) -> Any:
        """What the layer returns."""
        return self.hidden if self.rest is None else (self.hidden, *self.rest)

    def scaled(self, given: Tensor, keep: float) -> LayerOutput:
        """With the hidden states given + (hidden - given) / keep."""
        if keep == 1.0:
            return self
        # One pass, nothing saved for backward, and computed from the layer's own output: hidden + (hidden - given)·s.
        return LayerOutput(torch.lerp(given.to(self.hidden.dtype), self.hidden, 1.0 / keep), self.rest)
