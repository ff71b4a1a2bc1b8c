"""The exchanges that buckets of an algorithm go through, where every rank holds all state and where it is sharded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from thinwire.comm import Communicator
from thinwire.comm.agreement import NodeLinks
from thinwire.compress.codecs import Codec
from thinwire.compress.exchange import Exchange
from thinwire.compress.hierarchical_exchange import make_exchange
from thinwire.compress.light_exchanges import LowMemoryExchange, make_exact_exchange
from thinwire.zero import BucketLayout, shard_numel
from thinwire.zero.master_weights import FlatBucket

__all__ = ["Exchanges", "LowMemoryWire", "Wire"]


class Exchanges(Protocol):
    """Makes what a bucket goes through."""

    ranks: int

    def exact(self, layout: BucketLayout, index: int, device: torch.device) -> Exchange:
        """An exact average."""

    def compressed(self, layout: BucketLayout, index: int, device: torch.device) -> Exchange:
        """One through the codec, with error feedback."""


class Wire:
    """Exchanges over the ranks of `comm`, or by node where there are `links`."""

    def __init__(self, comm: Communicator, links: NodeLinks | None, codec: Codec, warmup_codec: Codec) -> None:
        self.comm = comm
        self.ranks = comm.size
        self._links = links
        self._codec = codec
        self._warmup_codec = warmup_codec

    def padded_numel(self, layout: BucketLayout) -> int:
        """Elements of what an exchange of this bucket takes: a layout by nodes is padded otherwise than one by
        ranks."""
        shards = self.ranks if self._links is None else self._links.lanes * self._links.num_nodes
        return shards * shard_numel(layout.numel, shards, layout.block_size)

    def new_state(self, device: torch.device, name: str, layout: BucketLayout) -> Tensor:
        """A state, zeros, as an exchange of this bucket pads it."""
        return torch.zeros(self.padded_numel(layout), device=device)

    def exact(self, layout: BucketLayout, index: int, device: torch.device) -> Exchange:
        """See Exchanges."""
        codec = self._warmup_codec
        if self._links is None:
            return make_exact_exchange(self.comm, layout.numel, codec, bucket=index, device=device)
        return self._make(layout, index, device, codec, False)

    def compressed(self, layout: BucketLayout, index: int, device: torch.device) -> Exchange:
        """See Exchanges."""
        return self._make(layout, index, device, self._codec, True)

    def _make(
        self, layout: BucketLayout, index: int, device: torch.device, codec: Codec, error_feedback: bool
    ) -> Exchange:
        return make_exchange(
            self.comm, self._links, layout.numel, codec, bucket=index, error_feedback=error_feedback, device=device
        )


class LowMemoryWire:
    """Exchanges of buckets, with residuals in bf16 for parameters in 16 bits; exact averages go through `exact`."""

    def __init__(self, comm: Communicator, buckets: Sequence[FlatBucket], codec: Codec, warmup_codec: Codec) -> None:
        self.ranks = comm.size
        self._comm = comm
        self._buckets = buckets
        self._codec = codec
        self._exact = warmup_codec

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
