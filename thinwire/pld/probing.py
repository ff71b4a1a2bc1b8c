"""Finds out by trying whether a layer is residual, x + f(norm(x)), which its class does not say: only then is leaving
it out the same as f = 0."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.pld.layer_output import LayerOutput

__all__ = ["probe_layer"]

# Inputs of this root mean square drown what a normalised branch adds, and fit in fp16.
_LOUD = 256.0
_LEAST_CARRIED = 0.25


def probe_layer(
    layer: nn.Module,
    forward: Callable[..., Any],
    hidden_name: str,
    hidden: Tensor,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> tuple[None, ...] | None:
    """Run `forward(*args, **kwargs)` as in evaluation, with `hidden` once as it is and once much louder.

    Draws no random number and fills no cache of keys and values. Returns what follows the hidden states in what the
    layer returns: None where it returns no tuple.

    Raises ValueError for a layer that changes shape, that normalises what it returns (post-LN), or that does not
    return its input plus something.
    """
    rest = [_without_cache(value) for value in args[1:]]
    named = {name: _without_cache(value) for name, value in kwargs.items() if name != hidden_name}

    def run(given: Tensor) -> LayerOutput:
        returned = forward(given, *rest, **named) if args else forward(**{hidden_name: given}, **named)
        return LayerOutput.of(layer, returned, given)

    size = hidden.detach().float().square().mean().sqrt()
    with torch.no_grad(), _evaluating(layer):
        output = run(hidden)
        if hidden.numel() and bool(size > 0):
            loud = (hidden.float() * (_LOUD / size)).to(hidden.dtype)
            _check_residual(layer, (hidden, output.hidden), (loud, run(loud).hidden))
    return output.rest


def _check_residual(layer: nn.Module, as_it_is: tuple[Tensor, Tensor], loud: tuple[Tensor, Tensor]) -> None:
    if not all(bool(torch.isfinite(tensor).all()) for tensor in (*as_it_is, *loud)):
        return
    name = type(layer).__name__
    grown = float(loud[1].float().norm() / loud[0].float().norm())
    if grown < _LEAST_CARRIED:
        raise ValueError(
            f"{name} normalises what it returns (post-LN): an input {_LOUD:g} in size came out as {grown * _LOUD:.3g}. "
            "Layers above were trained on normalised inputs, and leaving this one out changes their scale. Use a "
            "pre-LN model"
        )
    carried = max(_carried(*as_it_is), _carried(*loud))
    if carried < _LEAST_CARRIED:
        raise ValueError(
            f"{name} is not residual: of its input only {carried:.2f} is in its output, where x + f(x) has about 1. "
            "Leaving it out would lose what it computes: pass drop_layers() the residual layers only"
        )


def _carried(hidden: Tensor, returned: Tensor) -> float:
    """The multiple of `hidden` that is in `returned`, by least squares."""
    flat = hidden.double().flatten()
    return float(flat.dot(returned.double().flatten()) / flat.dot(flat))


def _without_cache(value: Any) -> Any:
    return None if hasattr(value, "get_seq_length") else value


@contextmanager
def _evaluating(layer: nn.Module) -> Iterator[None]:
    training = [module for module in layer.modules() if module.training]
    layer.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
