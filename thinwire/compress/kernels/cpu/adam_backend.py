"""The CPU backend of Adam's step: what `adam_reference` describes, over all tensors at once, shared out to threads."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from thinwire.compress.kernels.adam_calls import AdamStep
from thinwire.compress.kernels.cpu import adam
from thinwire.compress.kernels.cpu.backend import share_blocks
from thinwire.compress.kernels.cpu.blocks import Range

__all__ = ["adam_step"]

_BLOCK = 4096


def adam_step(call: AdamStep) -> None:
    """See `thinwire.compress.kernels.adam.adam_step`."""
    ends = np.cumsum([one.numel() for one in call.variances])
    numel = int(ends[-1])
    runs = np.zeros((len(ends), adam.COLUMNS), dtype=np.int64)
    runs[1:, adam.FIRST], runs[:, adam.END] = ends[:-1], ends
    output = call.denominators if call.weights is None else call.weights
    for column, tensors in enumerate((call.gradients, call.momenta, call.variances, output), adam.GRADIENT):
        if tensors is not None:
            runs[:, column] = _addresses(tensors)
    factors = adam.Factors(call.factors.weight, *map(np.float32, call.factors.others))
    form = _form(call)

    def work(first: int, last: int) -> None:
        adam.adam_step(runs, factors, form, Range(first * _BLOCK, min(last * _BLOCK, numel)))

    share_blocks(work, -(-numel // _BLOCK), _BLOCK)


def _form(call: AdamStep) -> adam.Form:
    tracks = call.gradients is not None
    given = call.factors
    return adam.Form(
        tracks,
        tracks and call.momenta is not None,
        given.from_momentum,
        call.weights is not None,
        call.denominators is not None,
        given.eps_inside_root,
        given.holds_zero,
    )


def _addresses(tensors: Sequence[Tensor]) -> list[int]:
    return [one.data_ptr() for one in tensors]
