"""What the buckets of sharded state are sent over."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from thinwire.comm import Communicator
from thinwire.compress.codecs import CodecName, make_codec
from thinwire.compress.exact_exchange import make_exact_exchange
from thinwire.compress.exchange import Exchange
from thinwire.compress.low_memory_exchange import LowMemoryExchange
from thinwire.zero import BucketLayout
from thinwire.zero.flat_bucket import FlatBucket

__all__ = ["LowMemoryWire"]


class LowMemoryWire:
    """Exchanges of buckets, with residuals in bf16 for parameters in 16 bits; exact averages go through `exact`."""

    def __init__(self, comm: Communicator, buckets: Sequence[FlatBucket], block_size: int, exact: CodecName) -> None:
        self.ranks = comm.size
        self._comm = comm
        self._buckets = buckets
        self._codec = make_codec("sign1", block_size)
        self._exact = make_codec(exact, block_size)

    def exact(self, layout: BucketLayout, index: int, device: torch.device) -> Exchange:
        """See Exchanges."""
        return make_exact_exchange(self._comm, layout.numel, self._exact, bucket=index, device=device)

    def compressed(self, layout: BucketLayout, index: int, device: torch.device) -> Exchange:
        """See Exchanges."""
        fp32 = self._buckets[index].dtype == torch.float32
        return LowMemoryExchange(
            self._comm,
            layout.numel,
            self._codec,
            bucket=index,
            device=device,
            residual_dtype=torch.float32 if fp32 else torch.bfloat16,
            reversible=True,
        )
