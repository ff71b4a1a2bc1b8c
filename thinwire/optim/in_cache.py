"""Lists of tensors cut into pieces that the caches of a CPU hold, for several operations in a row: each would otherwise
bring all of them from memory again, as what a GPU does in one launch a CPU does tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

__all__ = ["in_cache"]

_ELEMENTS = 1 << 17
"""Of each list, for each thread: four vectors are two mebibytes. With fewer, calls cost more than is saved."""


def in_cache(*lists: Sequence[Tensor]) -> Iterator[list[list[Tensor]]]:
    """The same part of each of `lists`, part by part, in order; all at once where they are not on a CPU.

    `lists`: equally many tensors, alike in shape and device. Contiguous ones larger than a part are cut, others are
    whole; operations elementwise and in place, on each part, have the bits that they have on the whole.
    """
    if any(one.device.type != "cpu" for one in lists[0]):
        yield [list(tensors) for tensors in lists]
        return
    most = _ELEMENTS * torch.get_num_threads()
    part: list[list[Tensor]] = [[] for _ in lists]
    elements = 0
    for alike in zip(*lists, strict=True):
        numel = alike[0].numel()
        if elements and elements + numel > most:
            yield part
            part, elements = [[] for _ in lists], 0
        if numel > most and all(one.is_contiguous() for one in alike):
            yield from (
                [[piece] for piece in pieces] for pieces in zip(*(_cut(one, most) for one in alike), strict=True)
            )
            continue
        for tensors, one in zip(part, alike, strict=True):
            tensors.append(one)
        elements += numel
    if part[0]:
        yield part


def _cut(tensor: Tensor, numel: int) -> tuple[Tensor, ...]:
    pieces: tuple[Tensor, ...] = torch.split(tensor.view(-1), numel)
    return pieces
