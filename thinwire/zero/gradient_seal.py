"""Gradients once they have arrived: the seal by which edits are noticed from then on, and what stands in `.grad` for
one whose memory was given back.

Whether a gradient was written to its version tells, a number that torch counts, and the address of its memory.
A write of the values that are there already is no edit, as `clip_grad_norm_` makes to measure a norm; the first one is
warned of, since before it clips it looks the same. One through
`.data` or numpy leaves no version: so gradients, on an accelerator only those written to, are compared with a sample of
the values that left, all of a small one and up to 64 evenly spaced of a larger one. An edit of a few elements of a
large gradient can pass unseen, and so can one without a version that is made within the backward.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Sequence
from typing import Any, NoReturn, Self

import torch
from torch import Tensor

_SAMPLED = 64
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Seal:
    """Gradients as they were when a backward had ended, by the parameters' numbers, not to be changed until the step.

    `taken`: them. `used`: those of the last step, if what it left in `.grad` cannot be added to; empty once they are
    zeroed. `samples_values`: else versions alone tell of edits. Samples on an accelerator stay there. `written_back`:
    a DistributedDataParallel writes gradients back during backward, after they have arrived here. `warns`: of the first
    write that changes nothing.
    """

    def __init__(self, parameters: Sequence[Tensor], describe: Callable[[int], str]) -> None:
        """`describe`: how an error message calls a parameter."""
        self.samples_values, self.written_back, self.warns = True, False, False
        self._parameters = parameters
        self._describe = describe
        self.used: dict[int, tuple[Any, int, int]] = {}
        self.clear()

    def clear(self) -> None:
        """Forget all gradients."""
        # `.grad`, its version and the address of its memory; of one that has left -1 and its number of elements.
        self.taken: dict[int, tuple[Any, int, int]] = {}
        # A sample of a gradient's memory, None where only a copy can be had, and what it held.
        self._values: dict[int, tuple[Tensor | None, Tensor]] = {}
        self._averaging: set[int] = set()

    def take(self, numbers: Collection[int]) -> None:
        """Take the gradients of these parameters as they are now, and sample their values with one launch a dtype."""
        by_dtype: dict[torch.dtype, tuple[list[int], list[Tensor], list[int]]] = {}
        for number in numbers:
            gradient = self._parameters[number].grad
            if gradient is None or type(gradient) is SentGradient:
                self.taken[number] = gradient, -1, 0 if gradient is None else gradient.numel()
                continue
            self.taken[number] = gradient, gradient._version, gradient.data_ptr()
            if self.samples_values and number not in self._averaging:
                members, samples, lengths = by_dtype.setdefault(gradient.dtype, ([], [], []))
                members.append(number)
                samples.append(_some_of(gradient))
                lengths.append(samples[-1].numel())
        for members, samples, lengths in by_dtype.values():
            for number, sample, held in zip(members, samples, torch.split(torch.cat(samples), lengths), strict=True):
                self._values[number] = sample if self.taken[number][0].is_contiguous() else None, held

    def take_again(self) -> None:
        """Take all but those that were edited as they are now: averages may have taken their places."""
        edited = set(self._edited())
        self.take([number for number in self.taken if number not in edited])

    def expect_averages(self, numbers: Collection[int]) -> None:
        """Averages may take the place of these gradients at any time: no value is known until `averages_are_there`."""
        self._averaging.update(numbers)
        for number in numbers:
            self._values.pop(number, None)

    def averages_are_there(self, numbers: Collection[int]) -> None:
        """Let the values of these be known from the next `take` on, but of those that were edited meanwhile."""
        self._averaging.difference_update(set(numbers).difference(self._edited()))

    def check(self, *, may_write: bool = False) -> bool:
        """Raise RuntimeError if a `.grad` was changed, or dropped, after it had been taken; say if one was written to.

        With `may_write` only if it was replaced or dropped: what is written into it takes effect.

        Edits through `.grad.data` leave no version: on CPUs every sample is compared with what it was.
        """
        edited = self._edited()
        now: dict[int, Tensor] = {}
        for number in edited:
            gradient = self._parameters[number].grad
            replaced = gradient is not self.taken[number][0] or type(gradient) is SentGradient
            if may_write and (replaced or gradient is None or gradient.data_ptr() != self.taken[number][2]):
                self.refuse(number)
            # Of one that was not sampled, as in a capture, it is not known what it was.
            if may_write or not (replaced or number in self._values or number in self._averaging):
                continue
            if number not in self._values or gradient is None or gradient.layout is not torch.strided:
                self.refuse(number)
            if gradient.shape != self._parameters[number].shape or gradient.dtype != self._values[number][1].dtype:
                self.refuse(number)
            now[number] = _some_of(gradient)
        for number, (sample, held) in self._values.items():
            if held.is_cpu and number not in now:
                now[number] = _some_of(self.taken[number][0]) if sample is None else sample
        before = []
        for number in now:
            before.append(self._values[number][1])
        written = bool(edited)
        if now and not (may_write and written):
            one, other = torch.cat(list(now.values())), torch.cat(before)
            bits = _BITS[one.element_size()]  # a NaN is what it was
            written = not torch.equal(one.view(bits), other.view(bits))
            if written and not may_write:
                same = torch.split(one.view(bits) == other.view(bits), [len(sample) for sample in now.values()])
                self.refuse(next(number for number, here in zip(now, same, strict=True) if not here.all()))
        if self.warns and not (may_write or self.written_back) and self._values.keys() & edited:
            self.warns = False
            warnings.warn(
                "gradients were written to between backward() and step(), with the values that they had, as "
                "torch.nn.utils.clip_grad_norm_ does in a step that it does not clip. The first step that it clips "
                "will be an error, as gradients have left by then: pass max_norm= to the optimizer, and remove the "
                "call. To measure the norm, read optimizer.last_step.grad_norm",
                RuntimeWarning,
                stacklevel=7,
            )
        return written

    def _edited(self) -> list[int]:
        """The numbers of those whose `.grad` was written to, or replaced, since it was taken."""
        found = []
        for number, (was, version, place) in self.taken.items():
            gradient = self._parameters[number].grad
            if same := gradient is was and gradient is not None:
                if type(gradient) is SentGradient:
                    same = gradient.numel() == place and not gradient.written
                else:
                    same = gradient._version == version and gradient.data_ptr() == place
            if not same:
                found.append(number)
        return found

    def refuse_used(self, number: int, writes: int) -> None:
        """Raise RuntimeError for a gradient that a step has used, and nothing has zeroed: of `writes` since at most."""
        gradient = self._parameters[number].grad
        was, version, _ = self.used.pop(number, (None, 0, 0))
        if type(gradient) is SentGradient:
            used = gradient.spent and not gradient.written
        else:
            used = gradient is not None and gradient is was and gradient._version <= version + writes
        if used:
            refuse_used(self._describe(number))

    def refuse(self, number: int) -> NoReturn:
        """Raise RuntimeError for a gradient that was edited after it had been taken."""
        raise RuntimeError(
            f"the gradient of {self._describe(number)} was changed or dropped between backward() and step(), after it "
            "had left for the other ranks, so the change would be ignored. To clip, pass max_norm= to the optimizer. A "
            "Trainer of transformers clips to max_grad_norm, 1.0 by default: train with "
            "thinwire.hugging_face.TrainerMixin, which has the average clipped, or set max_grad_norm=0. One of "
            'Lightning clips to gradient_clip_val: train with strategy="thinwire", the ThinwireStrategy of '
            "thinwire.lightning. Remove other edits of .grad"
        )


def _some_of(gradient: Tensor) -> Tensor:
    numel = gradient.numel()
    stride = -(-numel // _SAMPLED) or 1
    flat = gradient if gradient.is_contiguous() else gradient.reshape(-1)
    some = flat.as_strided((-(-numel // stride),), (stride,))
    return some.detach() if some.requires_grad else some


def whole_of(parameter: Tensor) -> Tensor:
    """What autograd knows a parameter as: the DTensor that it is a rank's part of, else itself."""
    whole: Tensor = getattr(parameter, "whole", parameter)
    return whole


def replace_hook(parameter: Any, hook: object) -> None:  # torch's hook registry is untyped
    """Register a hook for when the gradient has accumulated, in the place of one of its class: the optimizer built last
    over a parameter is the one that sends its gradient."""
    parameter = whole_of(parameter)
    hooks = parameter._post_accumulate_grad_hooks or {}
    for key in [key for key, one in hooks.items() if type(one) is type(hook)]:
        del hooks[key]
    parameter.register_post_accumulate_grad_hook(hook)


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


def refuse_used(name: str) -> NoReturn:
    """Raise RuntimeError for a gradient of the last step that was left where the next one would be added to it."""
    raise RuntimeError(
        f"the gradient of {name} is still that of the last step, and what was averaged or has left cannot be added to: "
        "call zero_grad() between two steps, or use stage 0, where gradients add up"
    )


def refuse_second_backward(name: str, *, late: bool) -> NoReturn:
    """Raise RuntimeError for a gradient that came when those of the step had left, with it or, if `late`, without."""
    if late:
        raise RuntimeError(
            f"{name} got its gradient in a backward() of its own, after the step's gradients had left without it, as "
            "in the step before. Put every backward() but the last inside `with no_sync():`"
        )
    raise RuntimeError(
        f"a second backward() before step() reached {name} whose gradient has left already. To accumulate gradients, "
        "put every backward() but the last inside `with no_sync():`; to drop the first one, call zero_grad()"
    )


def refuse_dropped_gradient(name: str) -> NoReturn:
    """Raise RuntimeError for a gradient that went between its backward and its bucket."""
    raise RuntimeError(
        f"the gradient of {name} was dropped while backward() was bringing it: another thread, or a hook, has set "
        ".grad to None. Train in one thread, and zero gradients before backward() or after step()"
    )


def refuse_late_no_sync() -> NoReturn:
    """Raise RuntimeError where gradients may only add up, and have left."""
    raise RuntimeError(
        "no_sync() was entered between a synchronised backward() and its step(): the gradients have left already. Call "
        "step() first, or put the earlier backward() inside no_sync() too"
    )


class SentGradient(Tensor):
    """What `.grad` shows of a gradient that has left and is no longer here: its shape, dtype and device.

    Reading or writing its values raises RuntimeError, where a `.grad` of None would pass for a parameter without a
    gradient, and clip_grad_norm_ would find a norm of 0. It stays after the step, until `zero_grad()` or whoever drops
    or zeroes gradients: else it would be one that the next backward cannot add to.

    `in_place`: it has been put into `.grad` in this step. `spent`: its step is over. `written`: it was zeroed since.
    """

    in_place = spent = written = False
    adder: Any = None  # what adds gradients to the parameter's; its hooks live as long as it does

    @staticmethod
    def __new__(cls, parameter: Tensor, name: str) -> Self:
        """`name`: how error messages call the parameter."""
        dtype = getattr(parameter, "grad_dtype", None) or parameter.dtype
        made: Self = Tensor._make_wrapper_subclass(cls, parameter.shape, dtype=dtype, device=parameter.device)
        return made

    def __init__(self, parameter: Tensor, name: str) -> None:
        self._name = name

    def make_way(self, parameter: Tensor) -> None:
        """Leave `.grad` to a backward; raises RuntimeError if it cannot add to what was sent."""
        if self.spent and not self.written:
            refuse_used(self._name)
        if (parameter.grad is not self or self.written) and not self.spent:
            raise RuntimeError(
                f"the gradient of {self._name} was dropped or zeroed between two backward() of a step, after it had "
                "left for its owner, where the next one adds to it: call the optimizer's zero_grad() to drop a step"
            )
        parameter.grad, self.in_place = None, False

    def __repr__(self) -> str:  # type: ignore[override]
        return f"SentGradient({self._name})"

    def _refuse(self, **options: Any) -> NoReturn:
        raise RuntimeError(
            f"the gradient of {self._name} has left for its owner during backward() and is not here any more: to clip, "
            "pass max_norm= to the optimizer; its norm is last_step.grad_norm after step(). Under transformers' "
            "Trainer use thinwire.hugging_face.TrainerMixin"
        )

    @property
    def data(self) -> Tensor:
        """As of every tensor; it may be set where a model is moved after the step."""
        found: Tensor = Tensor.data.__get__(self)  # type: ignore[attr-defined]
        return found

    @data.setter
    def data(self, values: Tensor) -> None:
        if not self.spent:
            self._refuse()
        Tensor.data.__set__(self, values)  # type: ignore[attr-defined]

    share_memory_ = __dlpack__ = _refuse  # there is no memory, for which both would ask in C++

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        within_backward = torch._C._current_graph_task_id() != -1
        gradients = [one for one in torch.utils._pytree.tree_leaves((args, kwargs)) if type(one) is SentGradient]
        for one in gradients if func in _ZEROES else ():
            if within_backward and not one.spent:
                one._refuse()
            one.written = True
        if func is _LOOK_FOR_INFINITIES and (here := [one for one in args[0] if type(one) is not SentGradient]):
            func(here, *args[1:])
        if func in _HARMLESS or func in _ZEROES:
            return args[0] if func._schema.returns else None
        if within_backward and func in _COPIES:
            target = (kwargs or {}).get("out", args[0])
            return target if isinstance(target, SentGradient) else target.zero_()
        if func is torch.ops.aten._to_copy.default and gradients[0].spent:
            given = {"dtype": gradients[0].dtype, "device": gradients[0].device} | (kwargs or {})
            return torch.zeros(gradients[0].shape, dtype=given["dtype"], device=given["device"])  # a model is moved
        return gradients[0]._refuse()


def gradient_of(parameter: Tensor) -> Tensor | None:
    """A parameter's gradient where its values are here."""
    return None if isinstance(parameter.grad, SentGradient) else parameter.grad


# Within a backward DDP copies gradients into its buckets, and back: there is nothing to copy.
_COPIES = {torch.ops.aten.copy_.default, torch.ops.aten.mul.out}
_ZEROES = {torch.ops.aten.zero_.default, torch.ops.aten._foreach_zero_.default}
# GradScaler's, at all gradients of a device and dtype: of these one that is here tells of them all. Where none is, the
# optimizer itself refuses the scaler.
_LOOK_FOR_INFINITIES = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
_HARMLESS = {torch.ops.aten.detach.default, _LOOK_FOR_INFINITIES}
