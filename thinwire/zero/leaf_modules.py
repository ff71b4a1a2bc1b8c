"""Modules that stage 3 gathers whole, though ranks may each use other parts of them, as with a mixture of experts."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

__all__ = ["complete_gradients", "is_leaf_module", "mark_leaf_module"]

_ATTRIBUTE = "_z3_leaf"  # where scripts of DeepSpeed's look


def mark_leaf_module(module: nn.Module, flag: bool) -> None:
    """Say, before `initialize`, whether stage 3 takes the module as one, and cuts nothing inside of it apart."""
    setattr(module, _ATTRIBUTE, flag)


def is_leaf_module(module: nn.Module) -> bool:
    """Whether the module is marked so."""
    return bool(getattr(module, _ATTRIBUTE, False))


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
            f"no input of the leaf module {name} requires a gradient, so that nobody would learn which of its "
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
