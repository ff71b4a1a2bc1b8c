"""How autograd says that gradients are there: one hook a parameter, and a call at the end of a backward.
The only place that touches torch's private autograd surface."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["GradientHook", "at_backward_end", "forget_before_accumulation"]


def at_backward_end(callback: Callable[[], None]) -> None:
    """Call `callback` once when the running backward has ended, after what others have queued up to now."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def forget_before_accumulation(parameter: Tensor, kind: type[Tensor]) -> None:
    """Have every backward drop a gradient of this `kind` before it adds its own to `.grad`."""
    of_parameter = weakref.ref(parameter)

    def forget(gradient: Tensor) -> None:
        one = of_parameter()
        if one is not None and isinstance(one.grad, kind):
            one.grad = None

    parameter.register_hook(forget)  # type: ignore[no-untyped-call]


class GradientHook:
    """Calls a method with `index` whenever a parameter's gradient is complete, while the method's object lives.

    A parameter has one such hook at most: the optimizer built last over a parameter is the one that sends its gradient.
    A parameter that is in the graph and gets no gradient, as a dropped layer's, is not heard of.
    """

    def __init__(self, on_gradient: Callable[[int], None], index: int) -> None:
        self._on_gradient = weakref.WeakMethod(on_gradient)
        self._index = index

    def register(self, parameter: Any) -> None:  # torch's hook registry is untyped
        """Take the place of an earlier hook of this kind on `parameter`, if there is one."""
        hooks = parameter._post_accumulate_grad_hooks or {}
        for key in [key for key, hook in hooks.items() if isinstance(hook, GradientHook)]:
            del hooks[key]
        parameter.register_post_accumulate_grad_hook(self)

    def __call__(self, parameter: Tensor) -> None:
        """What autograd calls."""
        on_gradient = self._on_gradient()
        if on_gradient is not None and parameter.grad is not None:
            on_gradient(self._index)
