"""What the kernel is called with by which a change of a bucket's gradients is noticed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from thinwire.compress.kernels.bucket_calls import check_runs
from thinwire.compress.kernels.segments import Segments

__all__ = ["DIGESTED", "DigestGradients", "digest_count"]

DIGESTED = 8192
"""Elements of a bucket that share a digest."""

_FLOAT_TYPES = (torch.float32, torch.bfloat16, torch.float16)


def digest_count(segments: Segments) -> int:
    """Digests of a bucket."""
    return -(-segments.end // DIGESTED)


@dataclass(eq=False)
class DigestGradients:
    """Arguments of `digest_gradients`."""

    kernel: ClassVar = "digest_gradients"

    segments: Segments
    gradients: Sequence[Tensor | None]
    digests: Tensor

    def check(self) -> None:
        """Raise TypeError or ValueError unless the arguments fit together."""
        if self.digests.dtype != torch.int32 or self.digests.shape != (digest_count(self.segments),):
            raise ValueError(
                f"digests must be torch.int32 [{digest_count(self.segments)}], got {self.digests.dtype} "
                f"{tuple(self.digests.shape)}"
            )
        check_runs("gradients", self.gradients, self.segments, self.digests, _FLOAT_TYPES)
