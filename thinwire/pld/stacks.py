"""Finds the layers of a model, and refuses those that cannot be dropped: by their class or parts, or found by trying,
where a layer is not residual, x + f(norm(x)); only then is leaving it out the same as f = 0. A layer returns its hidden
states, alone or first in a tuple, and a dropped one returns the like."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

# What Hugging Face, torch and timm call their stacks.
STACK_NAMES = ("layers", "layer", "h", "blocks", "block")


def find_layers(model: nn.Module | Iterable[nn.Module]) -> list[nn.Module]:
    """The layers of the one stack in `model`, from the bottom up; or `model` itself, where it is a list of layers.

    Raises ValueError where there is none, or more than one; TypeError for what is not a module.
    """
    if not isinstance(model, nn.Module) or isinstance(model, (nn.ModuleList, nn.Sequential)):
        layers = list(model)
        strange = next((layer for layer in layers if not isinstance(layer, nn.Module)), None)
        if strange is not None:
            raise TypeError(f"a layer is a module, not {type(strange).__name__}: pass a model or a list of its layers")
        if not layers:
            raise ValueError("the list of layers is empty: pass a model, or its residual layers")
        return layers
    stacks = _outermost_stacks(model)
    if not stacks:
        raise ValueError(
            f"no layers were found in {type(model).__name__}: looked for an nn.ModuleList called "
            f"{', '.join(map(repr, STACK_NAMES))}. Pass drop_layers() the layers themselves, as a list"
        )
    if len(stacks) > 1:
        raise ValueError(
            f"{type(model).__name__} has several stacks of layers: {', '.join(stacks)}. Call drop_layers() once for "
            f"each one to be dropped, as in drop_layers(model.{next(iter(stacks))}, ...)"
        )
    return list(next(iter(stacks.values())))


def check_layers(layers: Iterable[nn.Module]) -> None:
    """Raise ValueError for a layer that stands in the stack twice, or is known to be post-LN."""
    seen: set[nn.Module] = set()
    for number, layer in enumerate(layers, start=1):
        if layer in seen:
            raise ValueError(
                f"layer {number} is the same module as an earlier one: shared layers cannot be dropped apart"
            )
        seen.add(layer)
        reason = _post_ln(layer)
        if reason:
            raise ValueError(
                f"layer {number}, {type(layer).__name__}, is post-LN: {reason}. It normalises the sum of its input and "
                "its branch, so what comes out is not its input plus something, and leaving it out changes the scale "
                "that the layers above expect. Use a pre-LN model: RobertaPreLayerNorm, GPT-2, Llama, or "
                "nn.TransformerEncoderLayer(norm_first=True)"
            )


def _outermost_stacks(model: nn.Module) -> dict[str, nn.ModuleList]:
    stacks: dict[str, nn.ModuleList] = {}
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in stacks)
        if isinstance(module, nn.ModuleList) and len(module) and name.rpartition(".")[2] in STACK_NAMES and not inside:
            stacks[name] = module
    return stacks


def _post_ln(layer: nn.Module) -> str | None:
    if isinstance(layer, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)) and not layer.norm_first:
        return "it was built with norm_first=False"
    parts = dict(layer.named_modules())
    for name in ("output.LayerNorm", "output_layer_norm"):  # BERT and its kin; DistilBERT
        if isinstance(parts.get(name), nn.LayerNorm):
            return f"its {name} comes after the residual sum"
    return None


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
