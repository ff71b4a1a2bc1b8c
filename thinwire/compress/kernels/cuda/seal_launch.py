"""What the launch consists of by which a change of a bucket's gradients is noticed; nothing here needs a GPU."""

from __future__ import annotations

from torch import Tensor

from thinwire.compress.kernels.cuda.arguments import aligned, integer
from thinwire.compress.kernels.cuda.launch import Launch
from thinwire.compress.kernels.seal_calls import DigestGradients

__all__ = ["digest_gradients_launch"]

_THREADS = 256
_NO_BLOCKS = 64  # the block size of a source that knows no blocks


def digest_gradients_launch(call: DigestGradients, runs: Tensor) -> Launch:
    """Launch of a thread block for each digest; `runs`: the gradients' table, as bytes on the device."""
    segments = call.segments
    arguments = (
        aligned("runs", runs),
        integer(len(segments)),
        aligned("digests", call.digests),
        integer(segments.end),
    )
    return Launch("seal", "digest_gradients", _NO_BLOCKS, (call.digests.numel(), 1), _THREADS, arguments)
