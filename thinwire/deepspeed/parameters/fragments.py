"""A parameter's fp32 weight, gradient and optimizer state, read and written whole, wherever its ZeRO stage has them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from thinwire.comm.agreement import on_every_rank
from thinwire.deepspeed.parameters.marks import current
from thinwire.deepspeed.sections import OffloadStateTypeEnum
from thinwire.zero.fsdp import is_sharded, local_run
from thinwire.zero.gradient_seal import gradient_of
from thinwire.zero.home import Held, ParameterState, find_state, local_values, whole_values

_BAD_INPUT = (TypeError, ValueError, RuntimeError)


# Whole values


@torch.no_grad()
def safe_get_full_fp32_param(param: Tensor) -> Tensor | None:
    """The parameter's fp32 weight, the master weight where it is 16 bits: a new tensor. Collective.

    None for a parameter that no optimizer steps, such as a frozen one.
    """
    found = find_state(current(param))
    if found is None:
        return None
    state, number = found
    return whole_values(state, number, state.weights(number))[0]


@torch.no_grad()
def safe_set_full_fp32_param(param: Tensor, value: Tensor) -> None:
    """Give the parameter these weights: the master weight to the last bit, the parameter rounded. Collective.

    Every rank gives the same `value`, of the parameter's shape. Raises ValueError or TypeError, on every rank, for
    another shape or a parameter that no optimizer steps.
    """
    state, number = _holder(param, "weight")
    written = _checked(state, number, value)
    held = state.weights(number)
    _write(held, written)
    state.after_writing_weights(number, written)


@torch.no_grad()
def safe_get_full_optimizer_state(param: Tensor, optim_state_key: str) -> Tensor | None:
    """The optimizer's state of a parameter, "exp_avg" say, under the name that its class gives it: a new fp32 tensor.

    Zeros where the parameter has not been stepped and others have, and of Adam's moments before the first step. None
    for a parameter that no optimizer steps. Collective. Raises ValueError, on every rank, where there is no such state,
    and RuntimeError where a frozen 1-bit optimizer keeps it in another form.
    """
    found = find_state(current(param))
    if found is None:
        return None
    state, number = found
    values, known = whole_values(state, number, state.state(number, optim_state_key))
    if not known:
        all_begin = torch.tensor([float(_begins_with_zeros(state, optim_state_key))], device=values.device)
        state.comm.all_reduce(all_begin, op="min")
        if not all_begin.item():
            raise _no_such_state(state, optim_state_key)
    return values


@torch.no_grad()
def safe_set_full_optimizer_state(param: Tensor, value: Tensor, optim_state_key: str) -> None:
    """Give a parameter this optimizer state; every rank gives the same `value`, of the parameter's shape. Collective.

    Raises as safe_set_full_fp32_param and safe_get_full_optimizer_state do, and RuntimeError where other state would
    have to follow.
    """
    state, number = _holder(param, "optimizer state")
    written = _checked(state, number, value)

    def place() -> Held:
        state.check_may_write_state(optim_state_key)
        held = state.state(number, optim_state_key)
        if not _has_its_share(state, number, held):
            raise _no_such_state(state, optim_state_key)
        return held

    _write(on_every_rank(state.comm, place, "set optimizer state", _BAD_INPUT), written)


@torch.no_grad()
def safe_get_full_grad(param: Tensor) -> Tensor | None:
    """The gradient of the step in flight, between backward() and step(): a new tensor. Collective.

    After a backward that was synchronised it is what step() takes, in fp32: the average over micro-batches and ranks,
    or with "gradient_allreduce_op" "sum" the sum over these; in fp16 times the loss scale of the backward. While
    gradients only add up, it is what this rank's `.grad` holds. None where there is none. Raises RuntimeError for a
    frozen 1-bit optimizer, which averages momenta and not gradients.
    """
    found = find_state(current(param))
    held = None if found is None else found[0].gradient(found[1])
    if found is None or held is None:
        own = gradient_of(current(param))
        return None if own is None else (own.full_tensor() if hasattr(own, "full_tensor") else own).clone()
    return _times(whole_values(*found, held)[0], found[0].taken)


@torch.no_grad()
def safe_set_full_grad(param: Tensor, value: Tensor) -> None:
    """Have the next step() take this gradient, which in fp16 is times the loss scale, for a parameter's. Collective.

    Every rank gives the same `value`. The step's norm, its clipping and the look for overflows count with it. Raises
    as safe_get_full_grad and safe_set_full_fp32_param do, and ValueError where there is no gradient.
    """
    state, number = _holder(param, "gradient")
    written = _checked(state, number, value)
    held = state.gradient(number)
    if held is not None:
        _write(held, _times(written, 1 / state.taken))
        state.after_writing_gradient(number)
        return
    own = gradient_of(current(param))
    if own is None:
        raise ValueError(_NO_GRADIENT)
    own.copy_(written)


@torch.no_grad()
def safe_update_full_grad_vectorized(
    param_list: Iterable[Tensor], update_func: Callable[[Tensor, Tensor], Tensor]
) -> None:
    """Have the next step() take `update_func(gradient, parameter)` in the place of each parameter's gradient.

    Gradients are as safe_get_full_grad gives them. Collective. Raises ValueError where a parameter has none, and as
    safe_set_full_grad does.
    """
    for one in param_list:
        gradient = safe_get_full_grad(one)
        if gradient is None:
            raise ValueError(_NO_GRADIENT)
        safe_set_full_grad(one, update_func(gradient, one))


# This rank's shard, at stage 3


@torch.no_grad()
def safe_get_local_fp32_param(param: Tensor) -> Tensor | None:
    """This rank's shard of a stage 3 parameter's weight, fp32, [elements]: a copy.

    None for a parameter that no optimizer steps. Raises ValueError below stage 3, where ranks have whole parameters.
    """
    found = _local(param)
    return None if found is None else _copied(found, found[0].weights(found[1]))


@torch.no_grad()
def safe_set_local_fp32_param(param: Tensor, value: Tensor) -> None:
    """Write this rank's shard of a stage 3 parameter's weight; `value` is like what safe_get_local_fp32_param returns.

    Every rank sets its own. Raises ValueError below stage 3 or for another shape.
    """
    state, number = _local_holder(param)
    _write_own(state.weights(number), value)
    state.after_writing_weights(number, None)


@torch.no_grad()
def safe_get_local_optimizer_state(param: Tensor, optim_state_key: str) -> Tensor | None:
    """This rank's shard of a stage 3 parameter's optimizer state, [elements]: a copy. See safe_get_local_fp32_param.

    Zeros of Adam's moments before the first step. Raises ValueError where there is no such state.
    """
    found = _local(param)
    if found is not None and _begins_with_zeros(found[0], optim_state_key):
        return torch.zeros_like(_copied(found, found[0].weights(found[1])))
    return None if found is None else _copied(found, _own_state(*found, optim_state_key))


@torch.no_grad()
def safe_set_local_optimizer_state(param: Tensor, value: Tensor, optim_state_key: str) -> None:
    """Write this rank's shard of a stage 3 parameter's optimizer state. Raises as safe_set_local_fp32_param does."""
    state, number = _local_holder(param)
    state.check_may_write_state(optim_state_key)
    _write_own(_own_state(state, number, optim_state_key), value)


@torch.no_grad()
def safe_get_local_grad(param: Tensor) -> Tensor | None:
    """This rank's shard of the gradient that safe_get_full_grad gives, [elements]: a copy; None where there is none."""
    found = _local(param)
    held = None if found is None else found[0].gradient(found[1])
    return None if found is None or held is None else _times(_copied(found, held), found[0].taken)


@torch.no_grad()
def safe_set_local_grad(param: Tensor, value: Tensor) -> None:
    """Write this rank's shard of a stage 3 parameter's gradient, which the next step() takes.

    Raises ValueError where there is no gradient, and as safe_set_local_fp32_param does.
    """
    state, number = _local_holder(param)
    held = state.gradient(number)
    if held is None:
        raise ValueError(_NO_GRADIENT)
    _write_own(held, value, 1 / state.taken)
    state.after_writing_gradient(number)


@torch.no_grad()
def get_state_devices(model: Any, state: OffloadStateTypeEnum) -> set[torch.device]:
    """The devices on which this rank has one kind of an engine's state: no buffer of gradients stays between steps."""
    if state == OffloadStateTypeEnum.lp_params:
        return {local_run(one)[1].device if is_sharded(one) else one.device for one in model.parameters()}
    found = [one for one in map(find_state, model.parameters()) if one is not None]
    kinds: list[Held | None] = []
    if state == OffloadStateTypeEnum.hp_params:
        kinds = [of.weights(number) for of, number in found]
    elif state == OffloadStateTypeEnum.lp_grads:
        kinds = [of.gradient(number) for of, number in found]
    elif state == OffloadStateTypeEnum.optim_states:
        kinds = [of.state(number, kind) for of, number in found for kind in of.kinds()]
    return {fragment.values.device for held in kinds if held is not None for fragment in held.fragments}


# Parts

_MOMENTS = ("exp_avg", "exp_avg_sq")

_NO_GRADIENT = (
    "the parameter has no gradient to set: call this between backward() and step(), for a parameter that backward() "
    "reaches"
)


def _holder(param: Tensor, what: str) -> tuple[ParameterState, int]:
    found = find_state(current(param))
    if found is None:
        raise ValueError(
            f"this parameter, shape {tuple(param.shape)}, has no {what} to set: no optimizer of thinwire's holds it. "
            "Call this after thinwire.initialize, with a trainable parameter of the engine's model"
        )
    return found


def _local(param: Tensor) -> tuple[ParameterState, int] | None:
    found = find_state(current(param))
    if (found is not None and not found[0].cuts_parameters) or (found is None and not hasattr(param, "ds_status")):
        raise ValueError(
            "the local forms are for parameters of stage 3, of which a rank has a shard, and this rank has all of this "
            "one: use safe_get_full_* and safe_set_full_*"
        )
    return found


def _local_holder(param: Tensor) -> tuple[ParameterState, int]:
    _local(param)
    return _holder(param, "shard")


def _own_state(state: ParameterState, number: int, kind: str) -> Held:
    held = state.state(number, kind)
    if not held.known and state.parameter(number).numel():
        raise _no_such_state(state, kind)
    return held


def _begins_with_zeros(state: ParameterState, kind: str) -> bool:
    """Whether it is a moment of an Adam that has not stepped: torch makes those at the first step, and fp16 may skip
    steps before."""
    return kind in _MOMENTS and not state.kinds()


def _checked(state: ParameterState, number: int, value: Any) -> Tensor:
    """`value` on the parameter's device, in fp32; an error on every rank where some rank's has another shape."""
    parameter = state.parameter(number)

    def check() -> Tensor:
        if not isinstance(value, Tensor):
            raise TypeError(f"the value to set must be a torch.Tensor, got {type(value).__name__}")
        if isinstance(value, DTensor):
            raise TypeError("the value to set is a DTensor: give value.full_tensor(), all of it on every rank")
        if value.shape != parameter.shape:
            raise ValueError(
                f"the value to set has shape {tuple(value.shape)}, and the parameter {tuple(parameter.shape)}: give "
                "all of it, in the parameter's shape"
            )
        return value.detach().to(device=parameter.device, dtype=torch.float32)

    return on_every_rank(state.comm, check, "set a parameter's values", _BAD_INPUT)


def _write(held: Held, value: Tensor) -> None:
    flat = value.reshape(-1)
    for one in held.fragments:
        one.values.copy_(flat[one.start : one.start + one.values.numel()])


def _write_own(held: Held, value: Tensor, factor: float = 1.0) -> None:
    numel = sum(one.values.numel() for one in held.fragments)
    if not isinstance(value, Tensor) or value.shape != (numel,):
        given = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(
            f"this rank has {numel} elements of the parameter: the value must be of shape ({numel},), got {given}"
        )
    done, value = 0, _times(value, factor)
    for one in held.fragments:
        one.values.copy_(value[done : done + one.values.numel()])
        done += one.values.numel()


def _times(value: Tensor, factor: float) -> Tensor:
    return value if factor == 1.0 else value * factor


def _copied(found: tuple[ParameterState, int], held: Held) -> Tensor:
    return local_values(held, found[0].parameter(found[1]).device)


def _has_its_share(state: ParameterState, number: int, held: Held) -> bool:
    """Whether this rank has every value of the state that it has of the weights."""
    have, want = (sum(one.values.numel() for one in of.fragments) for of in (held, state.weights(number)))
    return have >= want if not held.everywhere else have == state.parameter(number).numel()


def _no_such_state(state: ParameterState, kind: str) -> ValueError:
    kinds = ", ".join(state.kinds()) or "none yet: an optimizer's state begins with its first step"
    return ValueError(f"there is no optimizer state {kind!r} of this parameter; there is {kinds}")
