"""Dropout of fp32 on CPUs whose mask is never stored: backward computes it again. A hash of a seed and the element's
number decides, which costs a fraction of drawing numbers one after another."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from typing_extensions import override

from thinwire.simd import floats, integers, memory
from thinwire.simd.building import LANES
from thinwire.simd.compiling import kernel
from thinwire.simd.workers import Workers

_PART = 1 << 16  # elements, a multiple of LANES, that one thread takes at a time
_WORDS = 1 << 32
_ZERO = np.float32(0.0)

_workers = Workers()


class SeededDropout(nn.Dropout):
    """Dropout whose seed is drawn from torch's generator, and whose mask is not. A layer becomes one by its class."""

    @override
    def forward(self, input: Tensor) -> Tensor:
        drops = self.training and 0 < self.p < 1 and not self.inplace
        if not drops or input.dtype != torch.float32 or input.device.type != "cpu" or torch.compiler.is_compiling():
            return super().forward(input)
        seed = int(torch.randint(1 << 62, (), device="cpu"))
        dropped: Tensor = _Drop.apply(input, self.p, seed)  # type: ignore[no-untyped-call]
        return dropped


class _Drop(torch.autograd.Function):
    """Linear in its input: the backward of its backward is itself."""

    @staticmethod
    @override
    def forward(ctx: Any, inputs: Tensor, p: float, seed: int) -> Tensor:
        ctx.p, ctx.seed = p, seed
        return drop(inputs, p, seed)

    @staticmethod
    @override
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _Drop.apply(gradients[0], ctx.p, ctx.seed), None, None  # type: ignore[no-untyped-call]


def drop(values: Tensor, p: float, seed: int) -> Tensor:
    """`values`, fp32, of which a share `p` is 0 and the rest divided by 1 - p; the same ones for the same seed."""
    source = values.contiguous()
    result = torch.empty_like(source)
    addresses, numel = (source.data_ptr(), result.data_ptr()), source.numel()
    keys = np.uint32(seed % _WORDS), np.uint32(seed // _WORDS)
    chance = np.uint32(round(p * (_WORDS - 1))), np.float32(1 / (1 - p))

    def work(part: int) -> None:
        _drop(*addresses, part * _PART, min(numel, (part + 1) * _PART), *keys, *chance)

    _workers.each(work, -(-numel // _PART), _workers.threads())
    return result


@kernel
def _drop(source: int, result: int, first: int, last: int, low: Any, high: Any, threshold: Any, kept: Any) -> None:
    """Elements `first` to `last` of what lies at `source`, to `result`."""
    for start in range(first, last, LANES):
        count = min(LANES, last - start)
        words = integers.mix(integers.bit_xor(integers.lanes(np.uint32(start)), integers.broadcast(low)))
        words = integers.mix(integers.bit_xor(words, integers.broadcast(high)))
        dropped = integers.below(words, integers.broadcast(threshold))
        factors = floats.select(dropped, floats.broadcast(_ZERO), floats.broadcast(kept))
        values = floats.multiply(memory.load_some_floats(source + 4 * start, count), factors)
        memory.store_some_floats(result + 4 * start, values, count)
