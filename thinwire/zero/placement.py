"""The layout of a model over ranks: which parameters, under which numbers, names and groups; what a user says of it
and of the averaging of gradients; and what waits for new weights that are on their way."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from thinwire.comm.agreement import Nodes, check_nodes
from thinwire.compress.codecs import make_codec
from thinwire.compress.packet_layout import CODE_BITS, CodecName, scale_block
from thinwire.zero.bucket_layout import LARGEST_BUCKET_BYTES, BucketLayout, partition, partition_whole
from thinwire.zero.rank_checks import check_parameters
from thinwire.zero.replica import LocalPart, is_cut, kind_of, local_part
from thinwire.zero.saved_state import SliceSource

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Averaging:
    """What is done to gradients between backward and the step, in steps that average them exactly.

    Args:
        wire_dtype: in which they travel, torch.float32, bfloat16 or float16; None is that in which they add up.
        divide_first: what every rank divides its own by before they leave; their sum is multiplied by as much over the
            number of ranks. With that number nothing is left to do after it.
        accumulate_dtype: in which the backwards of a step add up, torch.float32 or the parameters' own; None is the
            latter. Steps that compress are made of these sums too.
        op: "mean", or "sum" for a gradient that is the sum over the ranks, in every kind of step: as many times the
            mean as there are ranks. Norms and clipping are the sum's too.

    The sum over the ranks itself is always in fp32, at stages 0 to 2.
    """

    wire_dtype: torch.dtype | None = None
    divide_first: float = 1.0
    accumulate_dtype: torch.dtype | None = None
    op: Literal["mean", "sum"] = "mean"

    def check(self) -> None:
        """Raise ValueError or TypeError for what cannot work."""
        for name, dtype in (("wire_dtype", self.wire_dtype), ("accumulate_dtype", self.accumulate_dtype)):
            if dtype not in (None, *_FLOATS):
                raise TypeError(f"{name} must be torch.float32, torch.bfloat16, torch.float16 or None, got {dtype!r}")
        number = isinstance(self.divide_first, int | float) and math.isfinite(self.divide_first)
        if not number or not self.divide_first > 0:
            raise ValueError(f"divide_first must be a number above 0, got {self.divide_first!r}")
        if self.op not in ("mean", "sum"):
            raise ValueError(f"op must be 'mean' or 'sum', got {self.op!r}")

    def accumulated(self, dtype: torch.dtype) -> torch.dtype:
        """In what gradients of parameters of this dtype add up."""
        return dtype if self.accumulate_dtype is None else self.accumulate_dtype

    def times_mean(self, ranks: int) -> float:
        """How many times the mean over the ranks the wanted gradient is."""
        return float(ranks) if self.op == "sum" else 1.0

    def check_parameters(self, parameters: Iterable[Tensor], param_dtype: torch.dtype | None = None) -> None:
        """Raise ValueError where backwards could not add up as asked; fp32 parameters will be in `param_dtype`."""
        for parameter in parameters:
            dtype = param_dtype if param_dtype and parameter.dtype == torch.float32 else parameter.dtype
            if dtype != parameter.dtype and isinstance(parameter, LocalPart):
                raise ValueError(f"param_dtype={dtype} cannot convert DTensors: model.to({dtype}) before it is cut")
            if self.accumulated(dtype) not in (torch.float32, dtype):
                raise ValueError(
                    f"gradients of {dtype} parameters add up in torch.float32 or their own dtype, got accumulate_dtype "
                    f"{self.accumulate_dtype}: pass torch.float32, or None"
                )

    def prepare(self, parameters: Iterable[Tensor]) -> None:
        """Have autograd add up the gradients of these as asked; those that are there are kept."""
        for parameter in parameters:
            wanted = self.accumulated(parameter.dtype)
            one: Any = parameter  # `grad_dtype` has no stub
            if parameter.is_leaf and one.grad_dtype != wanted:
                gradient, parameter.grad = parameter.grad, None
                one.grad_dtype = wanted
                parameter.grad = None if gradient is None else gradient.to(wanted)

    def compared(self) -> dict[str, Any]:
        """What has to be the same on every rank, as JSON can hold it."""
        return {
            "wire_dtype": str(self.wire_dtype),
            "divide_first": self.divide_first,
            "accumulate_dtype": str(self.accumulate_dtype),
            "op": self.op,
        }


PLAIN_AVERAGING = Averaging()
"""Gradients add up and travel in the parameters' dtype, and are averaged after they are summed."""


class Placement:
    """The parameters of an optimizer that require gradients, numbered in its groups' order.

    `parameters`, `names`, `group_of`: by number. `frozen`: those that require none. `order`: numbers in reverse order
    of use, which is about the order in which backward completes gradients.

    Raises ValueError where nothing requires a gradient, or where `named` lacks a parameter, and it or TypeError for
    parameters that the optimizer cannot take, laid out as `sharding` says.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, named: Iterable[tuple[str, Tensor]] | None, sharding: Sharding
    ) -> None:
        self._groups = groups = optimizer.param_groups
        every = [(parameter, number) for number, group in enumerate(groups) for parameter in group["params"]]
        held = [(parameter, number) for parameter, number in every if parameter.requires_grad]
        if not held:
            raise ValueError("no parameter requires a gradient: there is nothing to optimize")
        self.frozen: list[Tensor] = [parameter for parameter, _ in every if not parameter.requires_grad]
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
        name = type(optimizer).__name__
        check_parameters(self.parameters, name)
        sharding.averaging.check_parameters(self.parameters, sharding.param_dtype)
        for number, parameter in enumerate(self.parameters):
            if is_cut(parameter) and sharding.whole_parameters(groups[self.group_of[number]]):
                raise TypeError(
                    f"{self.describe(number)} is a part of a matrix that tensor parallelism has cut, and {name} "
                    "steps whole matrices, whose parts cannot be orthogonalised, nor measured, alone. Use OneBitAdam, "
                    "OneBitLamb or ShardedOptimizer with an elementwise class, or leave the matrix whole"
                )

    def partition(self, world_size: int, sharding: Sharding) -> list[tuple[BucketLayout, torch.dtype]]:
        """Buckets of one dtype and kind each, in the order in which backward completes them."""
        wanted = sharding.param_dtype
        dtypes = [wanted or one.dtype if one.dtype == torch.float32 else one.dtype for one in self.parameters]
        whole = [sharding.whole_parameters(self._groups[number]) for number in self.group_of]
        kinds = list(zip(dtypes, whole, map(kind_of, self.parameters), strict=True))
        numels = [parameter.numel() for parameter in self.parameters]
        layouts: list[tuple[BucketLayout, torch.dtype]] = [
            (layout, dtype)
            for dtype, owned, kind in sorted(set(kinds), key=str)
            for layout in (partition_whole if owned else partition)(
                numels,
                [number for number in self.order if kinds[number] == (dtype, owned, kind)],
                world_size=world_size,
                block_size=sharding.shard_block,
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
            names.setdefault(id(local_part(parameter)), name)
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
    """How a model is laid out: see ShardedOptimizer for each of them. `whole_parameters`: of a group, whether its
    parameters have one owner each; `rest_codecs`: where some have, those of the others; `low_rank`: of gradients whose
    matrices have one owner, the directions that `LeadingDirections` carries; `disk`: where state rests between steps.

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
    whole_parameters: Callable[[Mapping[str, Any]], bool] = lambda group: False
    nodes: Nodes = "flat"
    codecs: tuple[CodecName, CodecName] | None = None  # of gradients, and of what comes back; None sends both exactly
    rest_codecs: tuple[CodecName, CodecName] | None = None
    low_rank: int = 0
    disk: Path | None = None

    def check(self) -> None:
        """Raise ValueError or TypeError for what cannot work."""
        if isinstance(self.stage, bool) or self.stage not in (0, 1, 2):
            raise ValueError(
                f"stage must be 0, 1 or 2, got {self.stage!r}: stage 3 shards the model itself, which "
                "thinwire.initialize does with torch's fully_shard"
            )
        check_nodes(self.nodes)
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
        if not isinstance(self.offload, bool):
            raise TypeError(
                f"offload must be true or false, or for ShardedOptimizer a folder's name, got {self.offload!r}"
            )
        if self.disk is not None and self.codecs is not None:
            raise ValueError(
                f"offload={os.fspath(self.disk)!r} does not go with codec=, which sends differences to master weights "
                "and so needs them in memory: leave one of them out"
            )
        self.averaging.check()
        if isinstance(self.low_rank, bool) or not isinstance(self.low_rank, int) or self.low_rank < 0:
            raise ValueError(f"low_rank must be a whole number of directions, 0 for none, got {self.low_rank!r}")
        some_have_one_owner = self.whole_parameters is not Sharding.whole_parameters
        if self.low_rank and (self.codecs is None or self.stage == 0 or not some_have_one_owner):
            raise ValueError(
                f"low_rank={self.low_rank} needs codec=, stage 1 or 2, and an optimizer that takes matrices whole, as "
                "thinwire.optim.Muon does: elsewhere there is nothing beside which directions could go"
            )
        if self.rest_codecs is not None and self.codecs is None:
            raise ValueError(f"rest_codec={self.rest_codecs[0]!r} needs codec=, beside which it goes")
        for name, pair in (("codec", self.codecs), ("rest_codec", self.rest_codecs)):
            if pair is not None:
                self._check_codecs(name, pair)

    @property
    def shard_block(self) -> int:
        """Elements of which shards are whole multiples: with codecs those that share scales, as padding is sent."""
        named = [name for pair in (self.codecs, self.rest_codecs) if pair is not None for name in pair]
        return max((scale_block(name, self.block_size) for name in named), default=self.block_size)

    def codecs_of(self, layout: BucketLayout) -> tuple[CodecName, CodecName] | None:
        """What a bucket's gradients, and what comes back, go through."""
        return self.codecs if self.rest_codecs is None or layout.whole else self.rest_codecs

    def _check_codecs(self, option: str, pair: tuple[CodecName, CodecName]) -> None:
        if not isinstance(pair, tuple | list) or len(pair) != 2 or not set(pair) <= CODE_BITS.keys():
            raise ValueError(
                f"{option} must be one of {', '.join(CODE_BITS)}, or a pair of them for gradients and for what comes "
                f"back, got {pair!r}. To send 16 bits, use averaging=Averaging(wire_dtype=...)"
            )
        there, back = pair
        make_codec(there, self.block_size)
        make_codec(back, self.block_size)
        if self.stage == 0 and there != back:
            raise ValueError(
                f"stage 0 sends averages back as it sends gradients, got codec={(there, back)!r}: give one codec, or "
                "use stage 1 or 2, where differences of weights come back"
            )
        if self.averaging.wire_dtype is not None or self.averaging.divide_first != 1.0:
            raise ValueError(
                f"codec={there!r} says how gradients travel: averaging can have neither wire_dtype nor divide_first, "
                f"got {self.averaging!r}"
            )

    def compared(self) -> dict[str, Any]:
        """What has to be the same on every rank, as JSON can hold it."""
        told = {"param_dtype": str(self.param_dtype), "averaging": self.averaging.compared(), "whole_parameters": ""}
        return {**asdict(self), **told, "disk": self.disk is not None}  # each rank may have one of its own


class MovedOut(Protocol):
    """What keeps the fp32 weights of a bucket's parameters, by number, in place of its MasterWeights."""

    def load_weights(self, source: SliceSource, names: Sequence[str]) -> None:
        """Take them over."""

    def take_over(self, parameters: Collection[int]) -> None:
        """Have the values that these parameters show."""


class WeightGate:
    """Holds what waits for each bucket's weights, and calls it when a parameter of the bucket is read.

    Reading is `module.weight`, whatever module's code does it, `module.parameters()` or `state_dict()`. Code that has
    kept parameters from before must call `open` first. Modules that keep references of their own, as recurrent ones
    do, wait before their forward.
    """

    def __init__(self, module: nn.Module, bucket_of: Mapping[int, int]) -> None:
        self._pending: dict[int, Callable[[], None]] = {}
        self._bucket_of = bucket_of
        for part in module.modules():
            own = part._parameters
            needed = sorted({bucket_of[id(one)] for one in own.values() if id(one) in bucket_of})
            if needed:
                part._parameters = _WaitingParameters(own, self)
                part.register_forward_pre_hook(self._before_forward(needed))

    def close(self, bucket: int, wait: Callable[[], None]) -> None:
        """Note what waits for a bucket's weights."""
        self._pending[bucket] = wait

    def open(self) -> None:
        """Wait for all of them."""
        for bucket in list(self._pending):
            self._wait(bucket)

    def open_for(self, parameter: Tensor | None) -> None:
        """Wait for one parameter."""
        if self._pending and parameter is not None:
            self._wait(self._bucket_of.get(id(parameter), -1))

    def _wait(self, bucket: int) -> None:
        wait = self._pending.pop(bucket, None)
        if wait is not None:
            wait()

    def _before_forward(self, needed: list[int]) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: Any) -> None:
            del module, arguments
            for bucket in needed:
                self._wait(bucket)

        return hook


class _WaitingParameters(dict[str, nn.Parameter | None]):
    """A module's own parameters, which `nn.Module` looks up by name; a copy, as of a module, is a plain dict."""

    def __init__(self, parameters: Mapping[str, nn.Parameter | None], gate: WeightGate) -> None:
        super().__init__(parameters)
        self._gate = gate

    def __getitem__(self, name: str) -> nn.Parameter | None:
        parameter = super().__getitem__(name)
        self._gate.open_for(parameter)
        return parameter

    def get(self, name: str, default: Any = None) -> Any:
        parameter = super().get(name, default)
        self._gate.open_for(parameter)
        return parameter

    def items(self) -> Any:
        self._open()
        return super().items()

    def values(self) -> Any:
        self._open()
        return super().values()

    def __reduce__(self) -> tuple[Any, ...]:
        self._open()
        return dict, (dict(super().items()),)

    def _open(self) -> None:
        for parameter in super().values():
            self._gate.open_for(parameter)
