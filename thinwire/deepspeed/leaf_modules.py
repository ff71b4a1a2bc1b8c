"""Modules that stage 3 takes as one."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from thinwire.deepspeed.errors import DeepSpeedUsageError
from thinwire.zero.leaf_modules import is_leaf_module, mark_leaf_module

__all__ = [
    "get_z3_leaf_modules",
    "set_z3_leaf_module",
    "set_z3_leaf_modules",
    "unset_z3_leaf_modules",
    "z3_leaf_module",
]

set_z3_leaf_module = mark_leaf_module
z3_leaf_module = is_leaf_module


def get_z3_leaf_modules(model: nn.Module) -> list[nn.Module]:
    """The leaf modules of a model, itself among them."""
    return [module for module in model.modules() if is_leaf_module(module)]


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
        mark_leaf_module(module, flag)
    return found


def _is_a(module: nn.Module, wanted: type[nn.Module] | str) -> bool:
    kind = type(module)
    named = wanted in (kind.__name__, f"{kind.__module__}.{kind.__qualname__}")
    return named if isinstance(wanted, str) else isinstance(module, wanted)
