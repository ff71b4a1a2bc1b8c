"""The layout of replicated state: which parameters lie in which bucket of which freeze group, and over what, through
which codecs, a bucket is sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from thinwire.comm import Communicator
from thinwire.comm.agreement import NodeLinks
from thinwire.compress.codecs import Codec
from thinwire.compress.exchange import Exchange
from thinwire.compress.hierarchical_exchange import make_exchange
from thinwire.compress.light_exchanges import make_exact_exchange
from thinwire.optim.algorithm import Algorithm, Clock, Send, next_send
from thinwire.optim.bucket import AlgorithmBucket
from thinwire.optim.freeze_group import FreezeGroup
from thinwire.optim.freeze_rule import FreezeRule
from thinwire.optim.options import HomeOptions
from thinwire.optim.replicated.parameters import ParameterTable, RankZeros, ReplicatedWeights
from thinwire.optim.step import StepUnderWay
from thinwire.zero import BucketLayout, bucket_numel, partition, shard_numel

__all__ = ["FreezeGroups", "Wire"]


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


_FP32_BYTES = 4


class FreezeGroups:
    """`groups`, in the order in which they entered, and `unplaced`: the parameters that lie in no bucket yet.

    `under_way`: what the buckets of a step share.
    """

    def __init__(
        self,
        comm: Communicator,
        table: ParameterTable,
        wire: Wire,
        options: HomeOptions,
        make_algorithm: Callable[[], Algorithm],
        make_rule: Callable[[], FreezeRule | None],
    ) -> None:
        self.groups: list[FreezeGroup] = []
        self.unplaced: list[int] = []
        self.under_way = StepUnderWay(table.groups(), lambda: bool(self.trainable_unplaced))
        self.under_way.divide_first = options.averaging.divide_first
        self.comm = comm
        self._table = table
        self._wire = wire
        self._options = options
        self._make_algorithm = make_algorithm
        self._make_rule = make_rule

    @property
    def buckets(self) -> list[AlgorithmBucket]:
        """Of all freeze groups, in the order in which they leave."""
        return [bucket for group in self.groups for bucket in group.buckets]

    @property
    def trainable_unplaced(self) -> list[int]:
        """The parameters that lie in no bucket yet and require a gradient."""
        return [index for index in self.unplaced if self._parameters[index].requires_grad]

    def sends_of_unplaced(self) -> set[Send]:
        """What the first step sends of the parameters that lie in no bucket yet."""
        algorithm = self._make_algorithm()
        return {next_send(algorithm, _new_clock(algorithm))} if self.trainable_unplaced else set()

    def place(self, order: Sequence[int]) -> FreezeGroup:
        """Add a freeze group of the parameters `order`, in buckets of `bucket_bytes`."""
        self.unplaced = [index for index in self.unplaced if index not in set(order)]
        return self._add(self._cut(order))

    def restore(self, freeze_groups: Sequence[Sequence[Sequence[int]]]) -> None:
        """Lay parameters out anew: for each freeze group, each bucket's parameters; others wait for a gradient."""
        placed = {index for group in freeze_groups for order in group for index in order}
        self.unplaced = [index for index in range(len(self._table)) if index not in placed]
        self.groups.clear()
        for buckets in freeze_groups:
            self._add([self._cut(order, whole=True)[0] for order in buckets])

    def all_trainable(self) -> list[list[int]]:
        """Buckets of all trainable parameters, last ones first, as backward is likely to bring them."""
        order = [index for index in reversed(range(len(self._table))) if self._parameters[index].requires_grad]
        return [[slot.parameter for slot in layout.slots] for layout in self._cut(order)]

    @property
    def _parameters(self) -> Sequence[Tensor]:
        return self._table.parameters

    def _cut(self, order: Sequence[int], *, whole: bool = False) -> list[BucketLayout]:
        """Buckets of the parameters `order`; one of all of them where they stay `whole`."""
        numels = [parameter.numel() for parameter in self._parameters]
        numel = sum(numels[parameter] for parameter in order)
        return partition(
            numels,
            order,
            world_size=self.comm.size,
            block_size=self._options.block_size,
            bucket_numel=numel + 1 if whole else bucket_numel(self._options.bucket_bytes, numel, _FP32_BYTES),
        )

    def _add(self, layouts: Sequence[BucketLayout]) -> FreezeGroup:
        algorithm = self._make_algorithm()
        clock = _new_clock(algorithm)
        made = [
            AlgorithmBucket(
                index,
                layout,
                self._table,
                self._wire,
                algorithm,
                clock,
                self.under_way,
                new_state=partial(self._wire.new_state, self._parameters[0].device),
                shards_state=False,
            )
            for index, layout in enumerate(layouts, len(self.buckets))
        ]
        weights = ReplicatedWeights(self._table, made)
        numels = [parameter.numel() for parameter in self._parameters]
        group = FreezeGroup(
            self.comm,
            self._table,
            algorithm,
            self._make_rule(),
            clock,
            made,
            weights,
            agreement=partial(RankZeros, self.comm, numels, device=self._parameters[0].device),
            rates=lambda: [float(one["lr"]) for one in self._table.groups()],
            changed=lambda: weights.show_state(algorithm),
        )
        self.groups.append(group)
        return group


def _new_clock(algorithm: Algorithm) -> Clock:
    return Clock(frozen_at=None if algorithm.freezes else 0)
