"""A model on its way into stage 3 and after it: placeholders are read one at a time, so that no rank ever holds the
whole model, and parameters then say of themselves what DeepSpeed's do. `PREPARED` tells the engine."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from typing_extensions import override

from thinwire.comm import Communicator
from thinwire.deepspeed.parameters.marks import (
    ZeroParamStatus,
    complete_gradients,
    describe,
    external_parameters,
    mark,
    set_status,
    shard_of,
    shards_in,
    z3_leaf_module,
)
from thinwire.zero.fsdp import Preparation, is_sharded, local_run

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_OURS = ("ds_", "_thinwire_")


class _Prepared(Preparation):
    """Models of zero.Init, leaf modules and registered external parameters."""

    @override
    @torch.no_grad()
    def gather(self, model: Any) -> None:
        for parameter, shard in list(shards_in(model)):
            if parameter.ds_status is ZeroParamStatus.NOT_AVAILABLE:  # type: ignore[attr-defined]
                shard.gather(parameter)
            shard.forget(parameter)

    @override
    @torch.no_grad()
    def show_shapes(self, model: nn.Module) -> None:
        for parameter, shard in shards_in(model):
            shard.show_shape(parameter)

    @override
    @torch.no_grad()
    def hide_shapes(self, model: nn.Module) -> None:
        for parameter, shard in shards_in(model):
            if parameter.ds_status is ZeroParamStatus.NOT_AVAILABLE:  # type: ignore[attr-defined]
                shard.release(parameter)

    @override
    def is_placeholder(self, parameter: Tensor) -> bool:
        return shard_of(parameter) is not None

    @override
    def stand_ins(self, model: nn.Module) -> Mapping[str, Callable[[Tensor], Tensor]]:
        # New ones are fp32 if they train, as those of any model at stage 3, and tied where the old ones were.
        found = {name: one for name, one in model.named_parameters() if shard_of(one) is not None}
        new: dict[int, nn.Parameter] = {}
        for one in found.values():
            shard = shard_of(one)
            assert shard is not None
            dtype = torch.float32 if one.requires_grad else one.dtype
            values = torch.empty(shard.shape, dtype=dtype, device="meta")
            new[id(one)] = nn.Parameter(values, requires_grad=one.requires_grad)
        for module, name, parameter in list(_places(model)):
            if id(parameter) in new:
                module._parameters[name] = new[id(parameter)]
        return {name: partial(_take_values, placeholder) for name, placeholder in found.items()}

    @override
    def is_unit(self, module: nn.Module) -> bool:
        return z3_leaf_module(module)

    @override
    def external_parameters(self, module: nn.Module) -> Iterable[Tensor]:
        return external_parameters(module)

    @override
    def describe(self, model: nn.Module, comm: Communicator, before: Mapping[str, weakref.ref[Tensor]]) -> None:
        # Parameters get `ds_id`, `ds_shape`, `ds_numel`, `ds_status` and `ds_tensor`, this rank's elements, flat.
        from torch.distributed.fsdp import FSDPModule  # half a second that only stage 3 should cost

        for module in filter(z3_leaf_module, model.modules()):
            complete_gradients(module)
        held = {id(one): before[name]() for name, one in model.named_parameters()}
        for module in model.modules():  # outer ones first
            layer = module if isinstance(module, FSDPModule) and module is not model else None
            if module is model or layer is not None:
                for parameter in module.parameters():
                    describe(parameter, parameter.shape, local_run(parameter)[1])
                    mark(parameter, comm, layer, held[id(parameter)])
                _describe_gathered(module, list(_places(module)))
        _compare_shards()


PREPARED = _Prepared()


@torch.no_grad()
def _take_values(placeholder: nn.Parameter, wanted: Tensor) -> Tensor:
    """All values, in the dtype of `wanted`; the placeholder lets go of its own. Collective."""
    shard = shard_of(placeholder)
    assert shard is not None
    values = shard.whole(placeholder, wanted.dtype)
    shard.forget(placeholder)
    placeholder.data = values.new_empty(0)
    return values


def _describe_gathered(layer: nn.Module, sharded: Sequence[tuple[nn.Module, str, Tensor]]) -> None:
    """Have the whole parameters that a layer's first forward finds in the model's place say the same. torch keeps
    these objects, and gathers into them again."""

    def describe_once(*_: object) -> None:
        for module, name, parameter in sharded:
            shown = module._parameters.get(name)
            if shown is not None and shown is not parameter:
                shown.__dict__.update({key: value for key, value in vars(parameter).items() if key.startswith(_OURS)})
                set_status(shown, ZeroParamStatus.AVAILABLE)
        hook.remove()

    hook = layer.register_forward_pre_hook(describe_once)


def _places(layer: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """(module, name, parameter) of every parameter's place."""
    for module in layer.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield module, name, parameter


# torch.allclose of sharded parameters, which DTensor has no rule for: as torch.equal, which it has one for.


def _compare_shards() -> None:
    """Have torch.allclose take two DTensors that are sharded alike, from now on in this process. It is collective then.

    A torch that has a rule of its own, or nowhere to put one, is left as it is.
    """
    from torch.distributed.tensor import DTensor  # half a second that only stage 3 should cost

    handlers = getattr(getattr(DTensor, "_op_dispatcher", None), "_custom_op_handlers", None)
    if isinstance(handlers, dict):
        handlers.setdefault(torch.ops.aten.allclose.default, _allclose)


def _allclose(_operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether every rank's shards are. `args` and `kwargs` are torch.allclose's.

    Raises ValueError unless both are sharded alike.
    """
    first, second, *tolerances = args
    if not (is_sharded(first) and is_sharded(second)) or _cut(first) != _cut(second):
        raise ValueError(
            "torch.allclose compares parameters that the same ranks share alike, and one of these is whole or cut "
            "otherwise: gather both first, with full_tensor() or zero.GatheredParameters"
        )
    mine, theirs = first.to_local(), second.to_local()
    close = torch.tensor(int(torch.allclose(mine, theirs, *tolerances, **kwargs)), device=mine.device)
    for group in first.device_mesh.get_all_groups():
        dist.all_reduce(close, dist.ReduceOp.MIN, group)
    return bool(close)


def _cut(parameter: DTensor) -> tuple[Any, ...]:
    """The ranks that share it, and how."""
    return parameter.shape, parameter.device_mesh, parameter.placements
