"""Adam's step on lists of tensors, in one pass over memory: the moments, what they divide by, and the weights.

A plain function and not a torch operator, as those over whole buckets (`buckets`). What no kernel takes, tensors that
are not contiguous or not fp32, plain torch does, with the same bits: `plain_adam_step` is the specification."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.compress.kernels.adam_reference import AdamFactors, AdamStep, plain_adam_step
from thinwire.compress.kernels.loading import compiled_backend

__all__ = ["AdamFactors", "adam_step"]


def adam_step(
    factors: AdamFactors,
    *,
    gradients: Sequence[Tensor] | None,
    momenta: Sequence[Tensor] | None,
    variances: Sequence[Tensor],
    weights: Sequence[Tensor] | None = None,
    denominators: Sequence[Tensor] | None = None,
) -> None:
    """Do, in place, what of these there are tensors for, element by element, each operation rounded by itself:

        m = m + gain · (g - m)                     gradients and momenta; for gain ≥ ½: g - (1 - gain) · (g - m)
        v = beta2 · v + (square_gain · g) · g      gradients
        d = √v / correction + eps                  or √(v / correction + eps) with `eps_inside_root`
        d = ∞ where v = 0                          with `holds_zero`
        w = decay · w + (-rate · m) / d            weights, or else d is written to the denominators

    Weights are moved with gradients and momenta; without gradients denominators are all that is written.

    Lists of one length, or None; tensors at one place have as many elements and one device. Denominators may be the
    gradients or the variances themselves; nothing else may share memory. Equal elements get equal bits, wherever they
    lie, on every device. Raises ValueError for arguments that do not fit together.
    """
    call = AdamStep(factors, gradients, momenta, variances, weights, denominators)
    call.check()
    if not variances:
        return
    backend = _backend(variances[0].device)
    served = [] if backend is None else call.served()
    if backend is None or len(served) < len(variances):
        left = set(range(len(variances))) - set(served)
        plain_adam_step(call.only(sorted(left)))
    if backend is not None and served:
        of_kernel = call if len(served) == len(variances) else call.only(served)
        backend.adam_step(of_kernel)
        torch.autograd.graph.increment_version(of_kernel.written)


def _backend(device: torch.device) -> Any | None:
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return None  # the host writes a table for every launch, which replays of a graph would not see
    backend = compiled_backend(device.type)
    return backend if hasattr(backend, "adam_step") else None
