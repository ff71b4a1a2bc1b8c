"""Gradients as they come from autograd and once they have left for the other ranks: the hooks that announce them, how
an edit in between is noticed, and what stands in `.grad` for one whose memory was given back."""

from __future__ import annotations

import functools
import importlib
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, Self

import torch
from torch import Tensor

__all__ = [
    "GradientHook",
    "GradientSeal",
    "SentGradient",
    "SharedDigest",
    "at_backward_end",
    "digest_of",
    "forget_before_accumulation",
    "gradient_of",
    "refuse_edit",
    "seal_anew",
    "seal_written",
]


_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def digest_of(tensor: Tensor) -> Tensor | int:
    """The sum of its words, to compare with those of tensors alike in form and device; from an accelerator on it.

    On a CPU by compiled code, where there is a compiler: calling torch's operators costs more than small gradients do.
    """
    word_sum = _compiled() if tensor.device.type == "cpu" and tensor.is_contiguous() else None
    return _sum_of_words(tensor) if word_sum is None else word_sum(tensor.data_ptr(), tensor.nbytes)


def _sum_of_words(tensor: Tensor) -> Tensor:
    """Words of 64 bits where the memory allows, which the processor adds as fast as it reads them."""
    size = tensor.element_size()
    per_word = 8 // size
    flat = tensor.detach() if tensor.requires_grad else tensor
    if flat.dim() and flat.is_contiguous() and not (flat.shape[-1] % per_word or flat.storage_offset() % per_word):
        return flat.view(torch.int64).sum()
    if not flat.is_contiguous() or flat.numel() < 2 * per_word:
        return flat.view(_WORDS[size]).sum(dtype=torch.int64)
    flat = flat.view(-1)
    first = -flat.storage_offset() % per_word
    last = first + (flat.numel() - first) // per_word * per_word
    total = flat[first:last].view(torch.int64).sum()
    for edge in (flat[:first], flat[last:]):
        if edge.numel():
            total += edge.view(_WORDS[size]).sum(dtype=torch.int64)
    return total


@functools.cache
def _compiled() -> Callable[[int, int], int] | None:
    try:
        found: Callable[[int, int], int] = importlib.import_module("thinwire.simd.memory").word_sum
    except ImportError:  # of which the kernels' backend has warned
        return None
    return found


class SharedDigest:
    """The values of several gradients, looked at together; which of them has changed it does not tell."""

    def __init__(self, digest: Callable[[], Tensor]) -> None:
        """`digest`: numbers that differ, but for chance, where a bit of a gradient does."""
        self._digest = digest
        self._before = digest()

    def holds(self) -> bool:
        """Whether no gradient has changed."""
        return torch.equal(self._before, self._digest())


class GradientSeal:
    """A parameter's gradient as it was taken. Writing the values that are there already breaks no seal.

    `shared`: what the values are known by; None where by a digest of their own, if at all.
    """

    __slots__ = ("_digest", "_form", "_gradient", "_open", "_version", "shared")

    def __init__(self, parameter: Tensor, digests: bool = True) -> None:
        """`digests`: whether to look at the values."""
        self.shared: SharedDigest | None = None
        gradient = parameter.grad
        self._gradient = gradient
        self._version = _version(gradient)
        self._form = _form(gradient)
        self._digest = _digest(gradient) if digests else None
        self._open = False

    @property
    def has_values(self) -> bool:
        """Whether there is a gradient whose values are here."""
        return self._version >= 0

    def open(self) -> None:
        """Let the values change, from now on, but through nobody's writing to `.grad`."""
        self._open = True

    def holds(self, parameter: Tensor) -> bool:
        """Whether the gradient is what it was, as far as its count of versions tells."""
        return self.is_untouched(parameter) or self.has_same_values(parameter)

    def has_same_values(self, parameter: Tensor) -> bool:
        """Whether the gradient is what it was, by its values."""
        gradient = parameter.grad
        if self._open:
            return self.is_untouched(parameter)
        if _form(gradient) != self._form:
            return False
        if self.shared is not None:
            return self.shared.holds()
        if self._digest is None or gradient is None or isinstance(gradient, SentGradient):
            return self.is_of(parameter)
        return bool(self._digest == digest_of(gradient))

    def is_of(self, parameter: Tensor) -> bool:
        """Whether it is the same tensor, whatever was written into it."""
        return parameter.grad is self._gradient

    def is_untouched(self, parameter: Tensor) -> bool:
        """Whether nobody has written to the gradient, or replaced it."""
        gradient = parameter.grad
        if gradient is not self._gradient or _version(gradient) != self._version:
            return False
        return _form(gradient) == self._form  # `.data` of another shape or dtype counts as no new version


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
            return _for_ddp(args, kwargs)
        name = _name_of_first((args, kwargs))
        raise RuntimeError(
            f"the gradient of {name} has left for its owner during backward() and is not here any more: to clip, "
            "pass max_norm= to the optimizer; its norm is last_step.grad_norm after step(). Under transformers' "
            "Trainer use thinwire.hugging_face.TrainerMixin"
        )


def seal_anew(seals: dict[int, GradientSeal], parameters: Sequence[Tensor], numbers: Iterable[int]) -> None:
    """Take the gradients of parameters `numbers`, of those that have seals, as they are by now; and so those that share
    a digest with them, unless somebody has written to them."""
    written = [number for number in numbers if number in seals]
    shared = {seals[number].shared for number in written} - {None}
    for number, seal in seals.items() if shared else ():
        if seal.shared in shared and seal.is_untouched(parameters[number]):
            seals[number] = GradientSeal(parameters[number])
    for number in written:
        seals[number] = GradientSeal(parameters[number])


def seal_written(seals: dict[int, GradientSeal], parameters: Sequence[Tensor]) -> None:
    """Take those gradients as they are by now that somebody has written to."""
    seal_anew(seals, parameters, [one for one, seal in seals.items() if not seal.is_untouched(parameters[one])])


def gradient_of(parameter: Tensor) -> Tensor | None:
    """A parameter's gradient where its values are here."""
    return None if isinstance(parameter.grad, SentGradient) else parameter.grad


def refuse_edit(name: str) -> NoReturn:
    """Raise RuntimeError: the gradient of `name` was changed after it had left."""
    raise RuntimeError(
        f"the gradient of {name} was changed or dropped between backward() and step(), after it had left for the other "
        "ranks, so the change would be ignored. To clip, pass max_norm= to the optimizer (under transformers' Trainer: "
        "thinwire.hugging_face.TrainerMixin does, with max_grad_norm); remove other edits of .grad"
    )


_HARMLESS = {
    torch.ops.aten.detach.default,
    torch.ops.aten.zero_.default,
    torch.ops.aten._foreach_zero_.default,
    # GradScaler's look for infinities, after which the optimizer itself refuses a scaler that it cannot serve.
    torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default,
}


def _name_of_first(arguments: Any) -> str:
    for one in torch.utils._pytree.tree_leaves(arguments):
        if isinstance(one, SentGradient):
            return one._name
    raise AssertionError("an operation was dispatched to a gradient that it does not take")


def _for_ddp(args: Any, kwargs: Any) -> Any:
    """Within a backward DDP copies gradients into its buckets, and back: there is nothing to copy."""
    target = (kwargs or {}).get("out", args[0])
    return target if isinstance(target, SentGradient) else target.zero_()


def _version(gradient: Tensor | None) -> int:
    return -1 if gradient is None or isinstance(gradient, SentGradient) else gradient._version


def _form(gradient: Tensor | None) -> tuple[torch.Size, torch.dtype, torch.layout] | None:
    return None if gradient is None else (gradient.shape, gradient.dtype, gradient.layout)


def _digest(gradient: Tensor | None) -> Tensor | int | None:
    return None if gradient is None or isinstance(gradient, SentGradient) else digest_of(gradient)


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
