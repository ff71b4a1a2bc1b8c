"""Training that knows of the quantised layers it is for: their rounding forward, as if there were none backward."""

from __future__ import annotations

from typing import Any, TypeVar, get_args

import torch
from torch import Tensor, nn

from thinwire.inference.preparation import Prepared, Quantize, prepare
from thinwire.inference.quantized import levels_of_groups, levels_of_rows, quantizable, weight_of

_Model = TypeVar("_Model", bound=nn.Module)

_PLUG = "_thinwire_rounding"


def prepare_qat(model: _Model, quantize: Quantize) -> _Model:
    """Have the linear layers that `prepare(model, quantize=...)` would quantise round as they would then; returns it.

    Changes `model`: weights, and the inputs of "int8-dynamic", are rounded to their levels in each forward, and
    gradients pass as if they were not. Parameters, `state_dict` and `save_pretrained` stay. Train on, and `convert`.
    The output matrix that `thinwire.transformers.accelerate` multiplies in chunks is exact in training.

    Raises ValueError for another name, a model that rounds already, or one without a linear layer to quantise.
    """
    if quantize not in get_args(Quantize):
        raise ValueError(f"quantize is {quantize!r}, expected {', '.join(map(repr, get_args(Quantize)))}")
    if _PLUG in vars(model):
        raise ValueError(f"{type(model).__name__} rounds to {vars(model)[_PLUG][0]} already: convert it first")
    layers = [layer for *_, layer in quantizable(model, quantize)]
    if not layers:
        raise ValueError(f"{type(model).__name__} has no linear layer that {quantize} takes")
    for layer in layers:
        layer.forward = _RoundedLinear(layer, quantize)
    setattr(model, _PLUG, (quantize, layers))
    return model


def undo_qat(model: _Model) -> _Model:
    """Have `model` compute exactly again, if it rounds; returns it."""
    for layer in vars(model).pop(_PLUG, ("", []))[1]:
        del layer.forward
    return model


def convert(model: nn.Module) -> Prepared:
    """Prepare a copy of a model of `prepare_qat`, quantised as it was trained for, in the dtype that this takes.

    Raises ValueError for another model, or one that is not on a CPU.
    """
    if _PLUG not in vars(model):
        raise ValueError(f"{type(model).__name__} does not round: give what prepare_qat returned")
    how = vars(model)[_PLUG][0]
    try:
        return prepare(undo_qat(model), torch.float32 if how == "int8-dynamic" else torch.bfloat16, how)
    finally:
        prepare_qat(model, how)


class _RoundedLinear:
    """The forward of a linear layer that rounds. An object, so that a copied model rounds its own weights."""

    def __init__(self, layer: Any, how: Quantize) -> None:
        self._layer, self._how = layer, how

    def __call__(self, inputs: Tensor) -> Tensor:
        weight = weight_of(self._layer)
        with torch.no_grad():
            change = _rounded(weight, self._how).to(weight.dtype) - weight
        if self._how == "int8-dynamic" and inputs.numel():
            # As FBGEMM chooses them, in 7 bits; torch's own rounding passes gradients within the range.
            scale, zero = torch._choose_qparams_per_tensor(inputs.detach(), True)
            inputs = torch.fake_quantize_per_tensor_affine(inputs, scale, zero, 0, 127)
        return nn.functional.linear(inputs, weight + change, self._layer.bias)


def _rounded(weight: Tensor, how: Quantize) -> Tensor:
    """What the levels of a matrix stand for, in fp32; the layers of weights alone begin with what bf16 has."""
    if how == "int8-dynamic":
        levels, scales = levels_of_rows(weight.float())
        return levels * scales[:, None]
    exact = weight.bfloat16().float()
    if how == "int8":
        levels, scales = levels_of_rows(exact)
        return levels * scales.bfloat16().float()[:, None]
    levels, scales, middles = levels_of_groups(exact)
    return ((levels - 8) * scales.bfloat16().float() + middles.bfloat16().float()).view(weight.shape)
