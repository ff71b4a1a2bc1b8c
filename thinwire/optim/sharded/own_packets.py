"""What moves master weights in CPU memory, brought there from the accelerator that the parameters are on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.compress.codecs import Codec

__all__ = ["OwnPackets"]


class OwnPackets:
    """The owner's own packets of every step, on the host, and the preconditioner's codes, which never change.

    `codes`: uint8 [shard].
    """

    def __init__(self, codes: Tensor) -> None:
        self.codes = codes.cpu()
        self._parts: list[Tensor] = []

    def bring(self, parts: Sequence[Tensor]) -> None:
        """Start copying the own packets of each part, uint8 [1, bytes], into page-locked memory.

        They are there when the host has waited for anything that the device does later, as for the step's headers.
        """
        self._copy(parts, non_blocking=True)

    def take(self, parts: Sequence[Tensor]) -> None:
        """Copy them, and wait until they are there."""
        self._copy(parts, non_blocking=False)

    def packets(self, codec: Codec) -> Tensor:
        """What was brought, uint8 [1, packet_bytes]."""
        return self._parts[0] if len(self._parts) == 1 else codec.join(self._parts)

    def _copy(self, parts: Sequence[Tensor], *, non_blocking: bool) -> None:
        if [one.shape for one in parts] != [one.shape for one in self._parts]:
            self._parts = [torch.empty(one.shape, dtype=one.dtype, pin_memory=True) for one in parts]
        for held, part in zip(self._parts, parts, strict=True):
            held.copy_(part, non_blocking=non_blocking)
