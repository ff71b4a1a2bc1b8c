"""How an edit of a gradient that has left for the other ranks is noticed, and what stands in `.grad` for one whose
memory was given back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

import torch
from torch import Tensor

from thinwire.zero.digests import digest_of

__all__ = ["GradientSeal", "SentGradient", "SharedDigest", "gradient_of", "seal_anew", "seal_written"]


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
