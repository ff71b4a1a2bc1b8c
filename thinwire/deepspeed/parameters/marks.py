"""Notes on a model for stage 3: the ranks that share a parameter and the layer it is gathered with, parameters of other
modules that a forward uses, and modules that are gathered as one."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from thinwire.comm import Communicator
from thinwire.deepspeed.errors import DeepSpeedUsageError
from thinwire.zero.fsdp import is_sharded

_MARK = "_thinwire_mark"


class _Mark:
    """It keeps nothing alive, and is not saved with its parameter."""

    def __init__(self, comm: Communicator, layer: nn.Module | None) -> None:
        self.comm = weakref.ref(comm)
        self.layer = None if layer is None else weakref.ref(layer)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def mark(parameter: Tensor, comm: Communicator, layer: nn.Module | None) -> None:
    """Note the ranks, and the layer with which it is gathered; None for the model."""
    setattr(parameter, _MARK, _Mark(comm, layer))


def communicator_of(parameter: Tensor) -> Communicator | None:
    """The ranks that share it; None where no engine has sharded it, or that is gone."""
    found: _Mark | None = getattr(parameter, _MARK, None)
    return None if found is None else found.comm()


def layer_of(parameter: Tensor) -> nn.Module | None:
    """The layer that it is gathered with; None for the whole model."""
    found: _Mark | None = getattr(parameter, _MARK, None)
    return None if found is None or found.layer is None else found.layer()


# Parameters that a module uses although they are another module's: stage 3 has to gather them for both

_EXTERNAL = "_external_params"


def register_external_parameter(module: nn.Module, parameter: Tensor) -> None:
    """Say that `module`'s forward uses a parameter of another module, before the model is given to thinwire.initialize.

    Stage 3 gathers repeated layers one at a time and the rest of the model as a whole. A layer that has a parameter
    which is registered with a module outside of it is not gathered apart, but with the rest. What the rest has is there
    during all of forward and backward, for every module.

    Raises TypeError for what is no module and parameter, and RuntimeError where a layer is gathered apart already that
    has the parameter and not the module.
    """
    if not isinstance(module, nn.Module) or not isinstance(parameter, nn.Parameter):
        raise TypeError(
            "register_external_parameter takes a torch.nn.Module and a torch.nn.Parameter, got "
            f"{type(module).__name__} and {type(parameter).__name__}"
        )
    layer = layer_of(parameter)
    if is_sharded(parameter) and layer is not None and all(module is not one for one in layer.modules()):
        raise RuntimeError(
            f"the parameter of shape {tuple(parameter.shape)} belongs to a layer that stage 3 gathers apart, so that "
            f"this {type(module).__name__} would find its shards: register it before thinwire.initialize, in the "
            "module's __init__ say, or read it with GatheredParameters"
        )
    _of(module)[id(parameter)] = parameter


def unregister_external_parameter(module: nn.Module, parameter: Tensor) -> None:
    """Take it back, before the model is given to thinwire.initialize. Raises RuntimeError where there is none."""
    if id(parameter) not in _of(module):
        raise RuntimeError("unregister_external_parameter: the parameter is not registered with this module")
    del _of(module)[id(parameter)]


def external_parameters(module: nn.Module) -> Iterable[Tensor]:
    """Those that are registered with a module itself."""
    return _of(module).values()


def _of(module: nn.Module) -> dict[int, Tensor]:
    found: dict[int, Tensor] = module.__dict__.setdefault(_EXTERNAL, {})
    return found


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
