"""Linear layers in 8 or 4 bits on CPUs: weights once; inputs as they come, a scale and a zero point a call, or in bf16.

The products of 8 bits with 8 are FBGEMM's, which torch's CPU builds bring along: of torch's int8 products the one that
beats fp32 on processors without VNNI too. It takes 7 bits of the inputs, so that no sum saturates.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

_READ_WEIGHTS = (nn.MultiheadAttention, nn.TransformerEncoderLayer)  # of their layers, for one fused call
_GROUP = 64  # elements of a row that share a scale and a least value in 4 bits
_ROWS = 16  # of which the product with 4 bits takes a multiple
_LEAST_ELEMENTS = 1 << 12  # smaller matrices cost more to quantise inputs for than their products take


def levels_of_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Levels [out, in] of -127 to 127, and scales [out], of an fp32 matrix in 8 bits."""
    scales = (weight.abs().amax(dim=1) / 127).clamp_min(torch.finfo(torch.float32).tiny)
    return (weight / scales[:, None]).round_(), scales


def levels_of_groups(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Levels [out, groups, 64] of 0 to 15 of an fp32 matrix in 4 bits, and [out, groups, 1] scales and what level 8
    stands for, as the product takes it."""
    groups = weight.reshape(len(weight), -1, _GROUP)
    least, most = groups.aminmax(dim=2, keepdim=True)
    scales = ((most - least) / 15).clamp_min(torch.finfo(torch.float32).tiny)
    return ((groups - least) / scales).round_(), scales, least + 8 * scales


class Int8Linear(nn.Module):
    """x Wᵀ + b with W [out, in] in int8 and x [..., in] in fp32. For inference: it has no gradient."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        levels, scales = levels_of_rows(weight.detach().float())
        zeros = torch.zeros(len(scales), dtype=torch.int64)
        with warnings.catch_warnings():  # torch means to part from such tensors; 2.15 has them
            warnings.filterwarnings("ignore", message="torch.quantize_per_tensor")
            quantized = torch._make_per_channel_quantized_tensor(levels.to(torch.int8), scales.double(), zeros, 0)
        added = None if bias is None else bias.detach().float().contiguous()
        self._packed: Any = torch.ops.quantized.linear_prepack(quantized, added)

    @override
    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = torch.ops.quantized.linear_dynamic.default(inputs, self._packed, True)
        return found

    @override
    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


class WeightOnlyLinear(nn.Module):
    """x Wᵀ + b with W [out, in] in 8 bits, a scale a row, or in 4, a scale and a least value for 64 elements of a row;
    x [..., in] in bf16. For inference: it has no gradient."""

    def __init__(self, weight: Tensor, bias: Tensor | None, bits: int) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.bits, self._bias = bits, None if bias is None else bias.detach()
        if bits == 8:
            levels, scales = levels_of_rows(weight.detach().float())
            self._packed, self._scales = levels.to(torch.int8), scales.bfloat16()
        else:
            levels, scales, middles = levels_of_groups(weight.detach().float())
            self._packed = torch._convert_weight_to_int4pack_for_cpu(levels.to(torch.int32).view(weight.shape), 1)
            self._scales = torch.cat([scales, middles], dim=2).transpose(0, 1).contiguous().bfloat16()

    @override
    def forward(self, inputs: Tensor) -> Tensor:
        rows = inputs.reshape(-1, self.in_features)
        if self.bits == 8:
            found: Tensor = torch._weight_int8pack_mm(rows, self._packed, self._scales)
        else:
            found = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, self._packed, _GROUP, self._scales)
        found = found if self._bias is None else found + self._bias
        return found.view(*inputs.shape[:-1], self.out_features)

    @override
    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bits={self.bits}"


_MAKERS: dict[str, Callable[[Tensor, Tensor | None], nn.Module]] = {
    "int8-dynamic": Int8Linear,
    "int8": lambda weight, bias: WeightOnlyLinear(weight, bias, 8),
    "int4": lambda weight, bias: WeightOnlyLinear(weight, bias, 4),
}


def quantize_linears(model: nn.Module, how: str) -> int:
    """Put a quantised layer in place of every one of `quantizable`; how many there were."""
    found = quantizable(model, how)
    for parent, name, layer in found:
        setattr(parent, name, _MAKERS[how](weight_of(layer), layer.bias))
    return len(found)


def quantizable(model: nn.Module, how: str) -> list[tuple[nn.Module, str, Any]]:
    """Parent, name and layer of the linear layers of `model` that are large enough.

    Transformers' Conv1D, linear with its matrix transposed, is one. Layers whose weights torch's own attention reads
    past them are not, and those whose shapes the product with 4 bits does not take.
    """
    found = [
        (parent, name, layer)
        for parent in model.modules()
        for name, layer in parent.named_children()
        if _is_linear(layer) and not isinstance(parent, _READ_WEIGHTS)
    ]
    if how == "int4":
        shapes = [weight_of(layer).shape for *_, layer in found]
        fit = [rows % _ROWS == 0 and columns % _GROUP == 0 for rows, columns in shapes]
        found = [one for one, fits in zip(found, fit, strict=True) if fits]
    return found


def weight_of(layer: Any) -> Tensor:
    """[out, in]."""
    weight: Tensor = layer.weight if isinstance(layer, nn.Linear) else layer.weight.T
    return weight


def _is_linear(layer: Any) -> bool:
    return (
        isinstance(layer, nn.Linear) or type(layer).__name__ == "Conv1D"
    ) and layer.weight.numel() >= _LEAST_ELEMENTS
