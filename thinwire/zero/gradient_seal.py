"""Gradients as they come from autograd and once they have left for the other ranks: the hooks that announce them, the
trip-wire for edits in between, and what stands in `.grad` for one whose memory was given back.

Whether somebody has written to a gradient its version tells, a number that torch counts, and the address of its memory.
A write of the values that are there already is no edit, as `clip_grad_norm_` makes to measure a norm: a gradient that
was written to is compared with a sample of the values that left, all of a small gradient and up to 64 evenly spaced of
a larger one. An edit of a few elements of a large gradient can pass unseen.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NoReturn, Self

import torch
from torch import Tensor

__all__ = [
    "GradientHook",
    "Samples",
    "SentGradient",
    "Taken",
    "at_backward_end",
    "edited",
    "forget_before_accumulation",
    "gradient_of",
    "refuse_edit",
    "refuse_kind",
    "taken",
]

_SAMPLED = 64
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}

# Hooks: the only place that touches torch's private autograd surface


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


# Edits


Taken = tuple[Tensor | None, int, int]
"""A parameter's `.grad` as it was taken: the tensor, its version and the address of its memory; of one that has left
-1 and its number of elements."""


def taken(gradient: Tensor | None) -> Taken:
    """A gradient as it is now."""
    if gradient is None or type(gradient) is SentGradient:
        return gradient, -1, 0 if gradient is None else gradient.numel()
    return gradient, gradient._version, gradient.data_ptr()


def edited(arrived: Mapping[int, Taken], parameters: Sequence[Tensor]) -> list[int]:
    """The numbers of those whose `.grad` was written to, or replaced, since it was taken."""
    found = []
    for number, (was, version, place) in arrived.items():
        gradient = parameters[number].grad
        if same := gradient is was and gradient is not None:
            sent = type(gradient) is SentGradient
            same = gradient.numel() == place if sent else gradient._version == version and gradient.data_ptr() == place
        if not same:
            found.append(number)
    return found


class Samples:
    """Some values of gradients, by the parameters' numbers; on an accelerator they stay there."""

    def __init__(self) -> None:
        self._found: dict[int, tuple[Tensor, slice]] = {}
        self._expected: set[int] = set()

    def __contains__(self, number: int) -> bool:
        return number in self._found

    def knows(self, number: int) -> bool:
        """Whether a write to this parameter's gradient can be told: by its sample, or as none may happen now."""
        return number in self._found or number in self._expected

    def expect(self, numbers: Collection[int]) -> None:
        """Averages may take the place of these parameters' gradients at any time: no value is known until then."""
        self._expected.update(numbers)
        for number in numbers:
            self._found.pop(number, None)

    def take(self, numbers: Iterable[int], parameters: Sequence[Tensor], *, averages: bool = False) -> None:
        """Take those of the gradients of these parameters as they are now, with one launch a dtype.

        Those whose averages are expected are left out; `averages`: these are there now.
        """
        if averages:
            self._expected.difference_update(numbers := list(numbers))
        by_dtype: dict[torch.dtype, tuple[list[int], list[Tensor]]] = {}
        for number in numbers:
            gradient = parameters[number].grad
            if gradient is not None and type(gradient) is not SentGradient and number not in self._expected:
                of_dtype = by_dtype.setdefault(gradient.dtype, ([], []))
                of_dtype[0].append(number)
                of_dtype[1].append(_some_of(gradient))
        for of_dtype in by_dtype.values():
            values, first = torch.cat(of_dtype[1]), 0
            for number, one in zip(*of_dtype, strict=True):
                self._found[number] = (values, slice(first, first + len(one)))
                first += len(one)

    def clear(self) -> None:
        """Forget all."""
        self._found.clear()
        self._expected.clear()

    def first_that_differs(self, numbers: Sequence[int], parameters: Sequence[Tensor]) -> int | None:
        """The first of these whose gradient is not what it was, by the samples. Waits for an accelerator."""
        now, before = [], []
        for number in numbers:
            gradient, held = parameters[number].grad, self._found.get(number)
            if held is None or gradient is None or gradient.layout is not torch.strided:
                return number
            if gradient.shape != parameters[number].shape or gradient.dtype != held[0].dtype:
                return number
            now.append(_some_of(gradient))
            before.append(held[0][held[1]])
        if not numbers or _same(torch.cat(now), torch.cat(before)):
            return None
        return next(number for number, one, other in zip(numbers, now, before, strict=True) if not _same(one, other))


def _some_of(gradient: Tensor) -> Tensor:
    numel = gradient.numel()
    stride = -(-numel // _SAMPLED) or 1
    flat = gradient if gradient.is_contiguous() else gradient.reshape(-1)
    return flat.as_strided((-(-numel // stride),), (stride,)).detach()


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether they have the same bits: a NaN is what it was."""
    bits = _BITS[one.element_size()]
    return torch.equal(one.contiguous().view(bits), other.contiguous().view(bits))


def refuse_kind(parameter: Tensor, dtype: torch.dtype, device: torch.device, name: str) -> NoReturn:
    """Raise TypeError for a parameter of another dtype or device than these, else ValueError for a sparse gradient."""
    if parameter.dtype != dtype or parameter.device != device:
        raise TypeError(
            f"{name} is {parameter.dtype} on {parameter.device}, and was {dtype} on {device} when the optimizer was "
            "built: convert and move the model first, then build the optimizer"
        )
    raise ValueError(
        f"{name} has a sparse gradient, which cannot be sent: build the embedding with sparse=False, or leave it to "
        "torch.optim.SparseAdam in a second optimizer"
    )


def refuse_edit(name: str) -> NoReturn:
    """Raise RuntimeError: the gradient of `name` was changed after it had left."""
    raise RuntimeError(
        f"the gradient of {name} was changed or dropped between backward() and step(), after it had left for the other "
        "ranks, so the change would be ignored. To clip, pass max_norm= to the optimizer. A Trainer of transformers "
        "clips to max_grad_norm, 1.0 by default: train with thinwire.hugging_face.TrainerMixin, which has the average "
        "clipped, or set max_grad_norm=0. One of Lightning clips to gradient_clip_val: train with "
        'strategy="thinwire", the ThinwireStrategy of thinwire.lightning. Remove other edits of .grad'
    )


class SentGradient(Tensor):
    """What `.grad` shows of a gradient that has left and is no longer here: its shape, dtype and device.

    Reading or writing its values raises RuntimeError, where a `.grad` of None would pass for a parameter without a
    gradient, and clip_grad_norm_ would find a norm of 0.
    """

    @staticmethod
    def __new__(cls, parameter: Tensor, name: str) -> Self:
        """`name`: how error messages call the parameter."""
        dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype
        made: Self = Tensor._make_wrapper_subclass(cls, parameter.shape, dtype=dtype, device=parameter.device)
        return made

    def __init__(self, parameter: Tensor, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:  # type: ignore[override]
        return f"SentGradient({self._name})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func in _HARMLESS:
            return args[0] if func._schema.returns else None
        if torch._C._current_graph_task_id() != -1:
            # Within a backward DDP copies gradients into its buckets, and back: there is nothing to copy.
            target = (kwargs or {}).get("out", args[0])
            return target if isinstance(target, SentGradient) else target.zero_()
        sent = next(one for one in torch.utils._pytree.tree_leaves((args, kwargs)) if type(one) is SentGradient)
        raise RuntimeError(
            f"the gradient of {sent._name} has left for its owner during backward() and is not here any more: to clip, "
            "pass max_norm= to the optimizer; its norm is last_step.grad_norm after step(). Under transformers' "
            "Trainer use thinwire.hugging_face.TrainerMixin"
        )


def gradient_of(parameter: Tensor) -> Tensor | None:
    """A parameter's gradient where its values are here."""
    return None if isinstance(parameter.grad, SentGradient) else parameter.grad


_HARMLESS = {
    torch.ops.aten.detach.default,
    torch.ops.aten.zero_.default,
    torch.ops.aten._foreach_zero_.default,
    # GradScaler's look for infinities, after which the optimizer itself refuses a scaler that it cannot serve.
    torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default,
}
