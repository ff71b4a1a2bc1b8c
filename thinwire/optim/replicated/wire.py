"""What the buckets of replicated state are sent over, and through which codecs."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from thinwire.comm import Communicator
from thinwire.comm.nodes import NodeLinks
from thinwire.compress.codecs import Codec
from thinwire.compress.exact_exchange import make_exact_exchange
from thinwire.compress.exchange import Exchange
from thinwire.compress.hierarchical_exchange import make_exchange
from thinwire.zero import BucketLayout, shard_numel

__all__ = ["Wire"]


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

    def new_state(self, fills: Mapping[str, float], device: torch.device, name: str, layout: BucketLayout) -> Tensor:
        """A state as an exchange of this bucket pads it."""
        values = torch.zeros(self.padded_numel(layout), device=device)
        values[: layout.numel].fill_(fills.get(name, 0.0))
        return values

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
