"""What the launch of a step of Adam consists of: a table of its tensors, which has to lie on the device, and the launch
that is given where; nothing here needs a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from thinwire.compress.kernels.adam_calls import AdamStep
from thinwire.compress.kernels.cuda.arguments import STRUCTURES, Argument, aligned, integer, structure
from thinwire.compress.kernels.cuda.bucket_launches import Runs
from thinwire.compress.kernels.cuda.launch import ELEMENTS_PER_THREAD, MOMENTUM_THREADS, NO_BLOCKS, Launch

__all__ = ["adam_runs", "adam_step_launch"]

_BLOCK_ELEMENTS = MOMENTUM_THREADS * ELEMENTS_PER_THREAD


def adam_runs(call: AdamStep) -> Runs:
    """Which thread blocks are about which tensor, and where it lies."""
    runs = np.zeros(len(call.variances), dtype=STRUCTURES["AdamRun"])
    runs["numel"] = [one.numel() for one in call.variances]
    runs["end"] = np.cumsum(-(-runs["numel"] // _BLOCK_ELEMENTS))
    runs["first"][1:] = runs["end"][:-1]
    output = call.denominators if call.weights is None else call.weights
    named = {"gradient": call.gradients, "momentum": call.momenta, "variance": call.variances, "output": output}
    for name, tensors in named.items():
        if tensors is not None:
            runs[name] = _addresses(tensors)
    return runs


def adam_step_launch(call: AdamStep, runs: Tensor) -> Launch:
    """Launch that does the step; `runs`: its table, as bytes on the device."""
    blocks = sum(-(-one.numel() // _BLOCK_ELEMENTS) for one in call.variances)
    arguments = (aligned("runs", runs), integer(len(call.variances)), _factors(call))
    return Launch("adam", _name(call), NO_BLOCKS, (blocks, 1), MOMENTUM_THREADS, arguments)


def _factors(call: AdamStep) -> Argument:
    given = call.factors
    ways = (given.from_momentum, given.eps_inside_root, given.holds_zero)
    return structure("AdamFactors", float(given.weight), *given.others, *ways)


def _name(call: AdamStep) -> str:
    parts = ["adam"]
    if call.gradients is not None:
        parts.append("variances" if call.momenta is None else "moments")
    if call.denominators is not None:
        parts.append("denominators")
    if call.weights is not None:
        parts.append("weights")
    return "_".join(parts)


def _addresses(tensors: Sequence[Tensor]) -> list[int]:
    return [one.data_ptr() for one in tensors]
