"""Linear layers in 8 bits on CPUs: weights once, a scale a row; inputs as they come, a scale and a zero point a call.

The products are FBGEMM's, which torch's CPU builds bring along: of torch's int8 products the one that beats fp32 on
processors without VNNI too. It takes 7 bits of the inputs, so that no sum saturates.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

_READ_WEIGHTS = (nn.MultiheadAttention, nn.TransformerEncoderLayer)  # of their layers, for one fused call
_LEAST_ELEMENTS = 1 << 12  # smaller matrices cost more to quantise inputs for than their products take


class Int8Linear(nn.Module):
    """x Wᵀ + b with W [out, in] in int8 and x [..., in] in fp32. For inference: it has no gradient."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        exact = weight.detach().float()
        scales = (exact.abs().amax(dim=1) / 127).clamp_min(torch.finfo(torch.float32).tiny)
        levels = (exact / scales[:, None]).round_().to(torch.int8)
        zeros = torch.zeros(len(scales), dtype=torch.int64)
        with warnings.catch_warnings():  # torch means to part from such tensors; 2.15 has them
            warnings.filterwarnings("ignore", message="torch.quantize_per_tensor")
            quantized = torch._make_per_channel_quantized_tensor(levels, scales.double(), zeros, 0)
        added = None if bias is None else bias.detach().float().contiguous()
        self._packed: Any = torch.ops.quantized.linear_prepack(quantized, added)

    @override
    def forward(self, inputs: Tensor) -> Tensor:
        rows = inputs.reshape(-1, self.in_features)
        found: Tensor = torch.ops.quantized.linear_dynamic(rows, self._packed, True)
        return found.view(*inputs.shape[:-1], self.out_features)

    @override
    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


def quantize_linears(model: nn.Module) -> int:
    """Put `Int8Linear` in place of every linear layer of `model` that is large enough; how many there were.

    Transformers' Conv1D, linear with its matrix transposed, is one. Layers whose weights torch's own attention reads
    past them stay.
    """
    found: list[tuple[nn.Module, str, Any]] = [
        (parent, name, layer)
        for parent in model.modules()
        for name, layer in parent.named_children()
        if _is_linear(layer) and not isinstance(parent, _READ_WEIGHTS)
    ]
    for parent, name, layer in found:
        weight = layer.weight if isinstance(layer, nn.Linear) else layer.weight.T
        setattr(parent, name, Int8Linear(weight, layer.bias))
    return len(found)


def _is_linear(layer: Any) -> bool:
    return (
        isinstance(layer, nn.Linear) or type(layer).__name__ == "Conv1D"
    ) and layer.weight.numel() >= _LEAST_ELEMENTS
