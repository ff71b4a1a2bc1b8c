"""A model on its way into stage 3 and after it: modules are marked that are gathered as one, placeholders are read one
at a time, so that no rank ever holds the whole model, and parameters then say of themselves what DeepSpeed's do.
`PREPARED` tells the engine."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from typing_extensions import override

from thinwire.comm import Communicator
from thinwire.deepspeed.errors import DeepSpeedUsageError
from thinwire.deepspeed.parameters.gathering import all_gather, partition
from thinwire.deepspeed.parameters.marks import (
    ZeroParamStatus,
    describe,
    external_parameters,
    mark,
    set_status,
    shard_of,
    shards_in,
)
from thinwire.engine.config.models import LeafModuleConfig
from thinwire.zero.fsdp import Preparation, is_sharded, local_run

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_OURS = ("ds_", "_thinwire_")


# Modules that stage 3 gathers whole, though ranks may each use other parts of them, as with a mixture of experts

_LEAF = "_z3_leaf"  # where scripts of DeepSpeed's look


def set_z3_leaf_module(module: nn.Module, flag: bool) -> None:
    """Say, before `initialize`, whether stage 3 takes the module as one, and cuts nothing inside of it apart."""
    setattr(module, _LEAF, flag)


def z3_leaf_module(module: nn.Module) -> bool:
    """Whether the module is marked so."""
    return bool(getattr(module, _LEAF, False))


def complete_gradients(module: nn.Module) -> None:
    """Have each backward through a leaf module bring gradients of all its parameters, zeros where this rank has not
    used one, so that ranks average the same gradients. To be called once fully_shard has taken the module over.

    In training its forward raises RuntimeError where no input requires a gradient: backward would not pass by.
    """
    module.register_forward_pre_hook(_prepare, with_kwargs=True)


def _prepare(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    if not (torch.is_grad_enabled() and module.training and any(one.requires_grad for one in module.parameters())):
        return None
    values, structure = tree_flatten((args, kwargs))
    places = [place for place, one in enumerate(values) if isinstance(one, Tensor) and one.requires_grad]
    if not places:
        name = type(module).__name__.removeprefix("FSDP")  # which fully_shard has put before it
        raise RuntimeError(
            f"no input of the leaf module {name} requires a gradient, so that no rank would learn which of its "
            "parameters a backward has left out: call requires_grad_() on its input, or do not make it a leaf"
        )
    passed = _PassedLast.apply(lambda: _fill(module), *(values[place] for place in places))  # type: ignore[no-untyped-call]
    for place, one in zip(places, passed, strict=True):
        values[place] = one
    return tree_unflatten(values, structure)


@torch.no_grad()
def _fill(module: nn.Module) -> None:
    for one in module.parameters():
        if one.requires_grad and one.grad is None:
            one.grad = torch.zeros_like(one)


class _PassedLast(torch.autograd.Function):
    """Calls `then` when backward has left a module, before FSDP2 averages its gradients: its inputs come through here
    after they have come through FSDP2's own function of this kind."""

    @staticmethod
    def forward(ctx: Any, then: Callable[[], None], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.then = then
        return inputs

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        ctx.then()
        return (None, *gradients)


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """The leaf modules of a model, itself among them."""
    return [module for module in model.modules() if z3_leaf_module(module)]


def set_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Make all modules of these classes, or of classes of these names, leaf modules; returns them.

    Call it before `initialize`. Raises ValueError where there is none, unless `raise_if_not_found` is False.
    """
    return _mark(model, leaf_module_classes, True, raise_if_not_found)


def unset_z3_leaf_modules(
    model: nn.Module, leaf_module_classes: Sequence[type[nn.Module] | str], raise_if_not_found: bool = True
) -> list[nn.Module]:
    """Make modules of these classes ordinary ones again; returns them. Raises as `set_z3_leaf_modules`."""
    return _mark(model, leaf_module_classes, False, raise_if_not_found)


def set_z3_leaf_modules_by_name(
    model: nn.Module, module_names: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """Make the modules of these names in `model.named_modules()` leaf modules, or ordinary ones; returns them, and the
    names that no module has.

    Call it before `initialize`. Raises ValueError where there are such names, unless `raise_if_not_found` is False.
    """
    return _mark_named(model, module_names, str.__eq__, flag, raise_if_not_found)


def set_z3_leaf_modules_by_suffix(
    model: nn.Module, module_name_suffixes: Sequence[str], flag: bool = True, raise_if_not_found: bool = True
) -> tuple[list[nn.Module], list[str]]:
    """The same with modules whose names end so. Raises as `set_z3_leaf_modules_by_name`."""
    return _mark_named(model, module_name_suffixes, str.endswith, flag, raise_if_not_found)


def mark_configured(model: Any, section: LeafModuleConfig) -> None:
    """Make leaf modules of those that a configuration names, with a warning where it names none of the model's."""
    if not isinstance(model, nn.Module) or section == LeafModuleConfig():
        return
    found = set_z3_leaf_modules(model, section.classes, raise_if_not_found=False)
    found += set_z3_leaf_modules_by_name(model, section.names, raise_if_not_found=False)[0]
    found += set_z3_leaf_modules_by_suffix(model, section.name_suffixes, raise_if_not_found=False)[0]
    if not found:
        warnings.warn(
            f'"zero_optimization.leaf_module" names no module of {type(model).__name__}: look at model.named_modules()',
            RuntimeWarning,
            stacklevel=3,
        )


def _mark_named(
    model: nn.Module, wanted: Sequence[str], fits: Callable[[str, str], bool], flag: bool, needed: bool
) -> tuple[list[nn.Module], list[str]]:
    if isinstance(wanted, str):
        raise DeepSpeedUsageError(f"names are given as a list, got {wanted!r}")
    named = dict(model.named_modules())
    missing = [one for one in wanted if not any(fits(name, one) for name in named)]
    if needed and missing:
        raise ValueError(f"{type(model).__name__} has no module of {missing}: look at model.named_modules()")
    found = [module for name, module in named.items() if any(fits(name, one) for one in wanted)]
    for module in found:
        set_z3_leaf_module(module, flag)
    return found, missing


def _mark(model: nn.Module, classes: Sequence[type[nn.Module] | str], flag: bool, needed: bool) -> list[nn.Module]:
    if isinstance(classes, str | type) or not all(isinstance(one, str | type) for one in classes):
        raise DeepSpeedUsageError(f"leaf_module_classes is a list of classes, or of their names, got {classes!r}")
    found = [module for module in model.modules() if any(_is_a(module, one) for one in classes)]
    if needed and not found:
        raise ValueError(f"{type(model).__name__} has no module of {list(classes)}: look at model.modules()")
    for module in found:
        set_z3_leaf_module(module, flag)
    return found


def _is_a(module: nn.Module, wanted: type[nn.Module] | str) -> bool:
    kind = type(module)
    named = wanted in (kind.__name__, f"{kind.__module__}.{kind.__qualname__}")
    return named if isinstance(wanted, str) else isinstance(module, wanted)


# Models of zero.Init, and those that are sharded


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
        found = {name: (one, shard) for name, one in model.named_parameters() if (shard := shard_of(one)) is not None}
        new: dict[int, nn.Parameter] = {}
        for one, shard in found.values():
            dtype = torch.float32 if one.requires_grad else one.dtype
            values = torch.empty(shard.shape, dtype=dtype, device="meta")
            new[id(one)] = nn.Parameter(values, requires_grad=one.requires_grad)
        for module, name, parameter in list(_places(model)):
            if id(parameter) in new:
                module._parameters[name] = new[id(parameter)]
        return {name: partial(shard.hand_over, placeholder) for name, (placeholder, shard) in found.items()}

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
                    describe(parameter, parameter.shape, local_run(parameter)[1], all_gather, partition)
                    mark(parameter, comm, layer, held[id(parameter)])
                _describe_gathered(module, list(_places(module)))
        _compare_shards()


PREPARED = _Prepared()


def _describe_gathered(layer: nn.Module, sharded: Sequence[tuple[nn.Module, str, Tensor]]) -> None:
    """Have the whole parameters that a layer's first forward finds in the model's place say the same. torch keeps
    these objects, and gathers into them again."""

    @torch.compiler.disable  # type: ignore[untyped-decorator]
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
    """Have torch.allclose, collective then, take two DTensors that are sharded alike, from now on in this process."""
    from torch.distributed.tensor import DTensor  # half a second that only stage 3 should cost

    handlers = getattr(getattr(DTensor, "_op_dispatcher", None), "_custom_op_handlers", None)
    if isinstance(handlers, dict):
        handlers.setdefault(torch.ops.aten.allclose.default, _allclose)


def _allclose(_operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether every rank's shards are. `args` and `kwargs` are torch.allclose's."""
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
