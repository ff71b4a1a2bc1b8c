"""Finds the layers of a model, and refuses those whose class or parts say that they cannot be dropped."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

__all__ = ["check_layers", "find_layers"]

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
