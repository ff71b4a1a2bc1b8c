"""Optimizers that are built to hear what their class says of its values, and never step."""

from __future__ import annotations

import inspect
from typing import TypeVar

import torch

__all__ = ["trial_class"]

Kind = TypeVar("Kind", bound=torch.optim.Optimizer)


class _WithoutCompiler(torch.optim.Optimizer):
    # torch imports all of torch.compile to keep it out of this method: two seconds in which nothing is checked.
    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)


def trial_class(kind: type[Kind]) -> type[Kind]:
    """`kind`, to be built without importing torch.compile's machinery."""
    return type(kind.__name__, (kind, _WithoutCompiler), {})
