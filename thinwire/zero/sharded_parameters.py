"""A model's parameters in flat buckets, their master weights divided among the ranks, and the numbers, names and groups
that buckets, checkpoints and error messages refer to: what every sharded optimizer stands on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from thinwire.comm import Communicator
from thinwire.comm.agreement import raise_together
from thinwire.zero.bucket_layout import LARGEST_BUCKET_BYTES, BucketLayout, partition, partition_whole
from thinwire.zero.gradient_seal import Seal
from thinwire.zero.gradients import PLAIN_AVERAGING, Averaging, BucketGradients
from thinwire.zero.master_weights import FlatBucket, MasterWeights, WeightGate
from thinwire.zero.rank_checks import broadcast_from_rank_0, check_parameters, check_same_on_every_rank
from thinwire.zero.saved_state import SavedSlice, SliceSource, read_weight

__all__ = ["Placement", "ShardedParameters", "Sharding"]


class Placement:
    """The parameters of some groups that require gradients, numbered in the groups' order.

    `parameters`, `names`, `group_of`: by number. `order`: their numbers in reverse order of use, which is about the
    order in which backward completes their gradients.

    Raises ValueError where nothing requires a gradient, or where `named` lacks a parameter.
    """

    def __init__(self, groups: Sequence[Mapping[str, Any]], named: Iterable[tuple[str, Tensor]] | None) -> None:
        every = [(parameter, number) for number, group in enumerate(groups) for parameter in group["params"]]
        held = [(parameter, number) for parameter, number in every if parameter.requires_grad]
        if not held:
            raise ValueError("no parameter requires a gradient: there is nothing to optimize")
        self._frozen = [parameter for parameter, _ in every if not parameter.requires_grad]
        self.parameters: list[Tensor] = [parameter for parameter, _ in held]
        self.group_of = [number for _, number in held]
        name_of = _names(groups, named)
        unnamed = sum(id(parameter) not in name_of for parameter in self.parameters)
        if unnamed:
            raise ValueError(
                f"{unnamed} of {len(held)} parameters are not in named_parameters: give all of "
                "model.named_parameters(), or leave it out"
            )
        self.names = [name_of[id(parameter)] for parameter in self.parameters]
        self._called: dict[int, str] = {}
        place = {name: position for position, name in enumerate(name_of.values())}
        self.order = sorted(range(len(held)), key=lambda number: -place[self.names[number]])

    def check_none_unfrozen(self) -> None:
        """Raise RuntimeError where a parameter requires a gradient now that did not when buckets were laid out."""
        unfrozen = sum(parameter.requires_grad for parameter in self._frozen) if self._frozen else 0
        if unfrozen:
            raise RuntimeError(
                f"{unfrozen} parameters require gradients now but did not when the optimizer was built, so nobody "
                "would step them: set requires_grad before building it, or build a new one and load the old one's state"
            )

    def partition(self, world_size: int, sharding: Sharding) -> list[tuple[BucketLayout, torch.dtype]]:
        """Buckets of one dtype each, in the order in which backward completes them."""
        wanted = sharding.param_dtype
        dtypes = [wanted or one.dtype if one.dtype == torch.float32 else one.dtype for one in self.parameters]
        numels = [parameter.numel() for parameter in self.parameters]
        cut = partition_whole if sharding.whole_parameters else partition
        layouts: list[tuple[BucketLayout, torch.dtype]] = [
            (layout, dtype)
            for dtype in sorted(set(dtypes), key=str)
            for layout in cut(
                numels,
                [number for number in self.order if dtypes[number] == dtype],
                world_size=world_size,
                block_size=sharding.block_size,
                bucket_numel=max(1, sharding.bucket_bytes // dtype.itemsize),
            )
        ]
        completed = {number: position for position, number in enumerate(self.order)}
        return sorted(layouts, key=lambda one: completed[one[0].slots[-1].parameter])

    def name(self, names: Mapping[int, str]) -> None:
        """Call parameters, by id, as `names` does, in error messages; checkpoints keep the names they had."""
        self._called = {number: names.get(id(one), self.names[number]) for number, one in enumerate(self.parameters)}

    def describe(self, number: int) -> str:
        """How an error message calls a parameter."""
        called = self._called.get(number, self.names[number])
        return f"parameter {called!r}, shape {tuple(self.parameters[number].shape)},"


def _names(groups: Sequence[Mapping[str, Any]], named: Iterable[tuple[str, Tensor]] | None) -> dict[int, str]:
    """Parameter id -> name, in order of use."""
    if named is not None:
        names: dict[int, str] = {}
        for name, parameter in named:
            names.setdefault(id(parameter), name)
        if len(set(names.values())) < len(names):
            twice = next(name for name in names.values() if list(names.values()).count(name) > 1)
            raise ValueError(
                f"two parameters are named {twice!r} in named_parameters: a checkpoint could hold one only"
            )
        return names
    return {
        id(parameter): group["param_names"][index] if "param_names" in group else f"group{number}.{index}"
        for number, group in enumerate(groups)
        for index, parameter in enumerate(group["params"])
    }


@dataclass(frozen=True)
class Sharding:
    """How a model is laid out: see ShardedOptimizer for each of them; `whole_parameters` have one owner each.

    `check` raises ValueError or TypeError for what cannot work.
    """

    stage: int = 1
    param_dtype: torch.dtype | None = None
    bucket_bytes: int = LARGEST_BUCKET_BYTES
    block_size: int = 2048
    max_norm: float = 0.0
    offload: bool = False
    pin_memory: bool = True
    averaging: Averaging = PLAIN_AVERAGING
    whole_parameters: bool = False

    def check(self) -> None:
        """Raise ValueError or TypeError for what cannot work."""
        if self.stage not in (0, 1, 2):
            raise ValueError(
                f"stage must be 0, 1 or 2, got {self.stage!r}: stage 3 shards the model itself, which "
                "thinwire.initialize does with torch's fully_shard"
            )
        if self.param_dtype not in (None, torch.float32, torch.bfloat16, torch.float16):
            raise TypeError(f"param_dtype must be torch.bfloat16, torch.float16 or None, got {self.param_dtype!r}")
        if not self.bucket_bytes >= 4:
            raise ValueError(f"bucket_bytes must be at least 4, one element, got {self.bucket_bytes}")
        if not isinstance(self.max_norm, int | float) or not self.max_norm >= 0:
            raise ValueError(
                f"max_norm must be a number of at least 0, which does not clip, or None, got {self.max_norm!r}"
            )
        if isinstance(self.block_size, bool) or not self.block_size >= 1:
            raise ValueError(f"block_size must be at least 1, got {self.block_size!r}")
        self.averaging.check()

    def compared(self) -> dict[str, Any]:
        """What has to be the same on every rank, as JSON can hold it."""
        return {**asdict(self), "param_dtype": str(self.param_dtype), "averaging": self.averaging.compared()}


class ShardedParameters:
    """Parameters as views of flat buckets, with this rank's master weights; the same on every rank but for these.

    `comm`: of the caller. `exchange_comm`: a copy of it, for all that is sent. `order`: numbers, names and groups.

    Raises ValueError or TypeError, on every rank, for parameters that cannot be sharded, or that differ between ranks;
    `settings` are compared too.
    """

    def __init__(
        self,
        comm: Communicator,
        groups: Sequence[Mapping[str, Any]],
        named_parameters: Iterable[tuple[str, Tensor]] | None,
        sharding: Sharding,
        *,
        optimizer: str,
        settings: Mapping[str, Any],
    ) -> None:
        self.comm = comm
        self.groups = groups
        self.sharding = sharding
        error: Exception | None = None
        try:
            self.order = Placement(groups, named_parameters)
            check_parameters(self.order.parameters, optimizer)
            sharding.averaging.check_parameters(self.order.parameters, sharding.param_dtype)
        except (ValueError, TypeError) as raised:
            error = raised
        raise_together(comm, error, "build its optimizer")
        compared = {**sharding.compared(), "names": self.names, **settings}
        check_same_on_every_rank(comm, self.order.parameters, groups, compared)
        broadcast_from_rank_0(comm, self.order.parameters)
        self.exchange_comm = comm.duplicate()
        self.buckets: list[FlatBucket] = []
        self.masters: list[MasterWeights] = []
        self._gate: WeightGate | None = None
        self._gated: set[int] = set()
        whole = sharding.stage == 0
        extent: Literal["whole", "shard"] = "whole" if whole else "shard"
        for index, (layout, dtype) in enumerate(self.order.partition(comm.size, sharding)):
            keep = None if dtype == torch.float32 else extent
            bucket = FlatBucket(self.exchange_comm, index, layout, self.order.parameters, dtype, keep)
            self.buckets.append(bucket)
            self.masters.append(
                MasterWeights(bucket, whole=whole, offload=sharding.offload, pin_memory=sharding.pin_memory)
            )

    @property
    def names(self) -> list[str]:
        """Of the parameters, by number."""
        return self.order.names

    @property
    def device(self) -> torch.device:
        """Of the parameters."""
        return self.buckets[0].flat.device

    @property
    def gradient_bytes(self) -> int:
        """Of an element of the gradients that add up."""
        return self.sharding.averaging.accumulated(self.buckets[0].dtype).itemsize

    def averaging_gradients(self, seal: Seal) -> list[BucketGradients]:
        """What averages every bucket's gradients exactly, each rank keeping what the stage keeps."""
        stage, averaging = self.sharding.stage, self.sharding.averaging
        return [BucketGradients(bucket, self.exchange_comm, stage, averaging, seal) for bucket in self.buckets]

    def group(self, number: int) -> Mapping[str, Any]:
        """The parameter group that a parameter is in."""
        return self.groups[self.order.group_of[number]]

    def agree_on_absent(self, missing: Sequence[int]) -> frozenset[int]:
        """The parameters that are `missing` on every rank. Collective."""
        mask = bytearray(len(self.order.parameters))
        for number in missing:
            mask[number] = 1
        of_rank = self.exchange_comm.all_gather_bytes(bytes(mask), "find the step's missing gradients")
        return frozenset(number for number in range(len(mask)) if all(other[number] for other in of_rank))

    # New weights on their way

    def gather_during_forward(self, module: nn.Module) -> None:
        """Let new weights arrive while `module`'s next forward runs: see ShardedOptimizer."""
        if self._gate is not None:
            raise RuntimeError(
                "gather_during_forward() was called before: pass it the one module that holds all others"
            )
        within = {id(parameter) for parameter in module.parameters()}
        bucket_of = {id(parameter): bucket.index for bucket in self.buckets for parameter in bucket.parameters}
        self._gated = {
            bucket.index for bucket in self.buckets if all(id(parameter) in within for parameter in bucket.parameters)
        }
        self._gate = WeightGate(module, bucket_of)

    def wait_for_weights(self) -> None:
        """Wait until this rank has the last step's weights."""
        if self._gate is not None:
            self._gate.open()

    def move_and_publish(self, buckets: Iterable[int], move: Callable[[int], None]) -> None:
        """Call `move` with the number of each of `buckets`, which moves its master weights; give them to all ranks.

        The buckets that forward uses first come last in backward: their weights leave first.
        """
        waits = []
        for number in reversed(list(buckets)):
            move(number)
            waits.append((number, self.masters[number].publish()))
        for number, wait in waits:
            if self._gate is None or number not in self._gated:
                wait()
            else:
                self._gate.close(number, wait)

    @torch.no_grad()
    def take_over_written(self) -> None:
        """Take over into master weights what was written into parameters, alike on every rank."""
        for masters in self.masters:
            if written := masters.bucket.take_written():
                masters.take_over({slot.parameter for slot in written})

    def accept_written(self) -> None:
        """Leave master weights as they are, whatever somebody has written into parameters so far."""
        for bucket in self.buckets:
            bucket.take_written()

    # Checkpoints

    def saved_slices(self) -> list[SavedSlice]:
        """Weights and master weights of this rank's shards."""
        self.wait_for_weights()
        self.take_over_written()
        return [saved_slice for masters in self.masters for saved_slice in masters.saved_slices(self.names)]

    @torch.no_grad()
    def load_weights(self, source: SliceSource) -> None:
        """Take over the weights, whatever optimizer they were trained with. Raises KeyError for one not saved."""
        self.wait_for_weights()
        for bucket in self.buckets:
            for slot in bucket.layout.slots:
                values = read_weight(source, bucket.dtype, self.names[slot.parameter], 0, slot.numel)
                view = bucket.view(bucket.flat, slot)
                view.copy_(values.view(view.shape))
        for masters in self.masters:
            masters.load(source, self.names)
        self.accept_written()
