"""Notes on parameters for stage 3: the ranks that share one and the layer it is gathered with, those of other modules
that a forward uses; and one parameter of a model that is built shard by shard: a placeholder without elements, whose
values lie on all ranks."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from thinwire.comm import Communicator
from thinwire.zero.fsdp import is_sharded

_MARK = "_thinwire_mark"


class _Mark:
    """It keeps nothing alive, and is not saved with its parameter."""

    def __init__(self, comm: Communicator, layer: nn.Module | None) -> None:
        self.comm = weakref.ref(comm)
        self.layer = None if layer is None else weakref.ref(layer)
        self.now: weakref.ref[Tensor] | None = None
        self.before: weakref.ref[Tensor] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def mark(parameter: Tensor, comm: Communicator, layer: nn.Module | None, before: Tensor | None = None) -> None:
    """Note the ranks, and the layer with which it is gathered; None for the model.

    `before`: what stood in its place, which users may hold: it shows no elements from now on, and stands for this one.
    """
    noted = _Mark(comm, layer)
    setattr(parameter, _MARK, noted)
    if before is not None and before is not parameter:
        noted.before = weakref.ref(before)
        stands = _Mark(comm, layer)
        stands.now = weakref.ref(parameter)
        setattr(before, _MARK, stands)
        for name in filter(partial(hasattr, parameter), _DESCRIPTION):
            setattr(before, name, getattr(parameter, name))
        before.grad, before.data = None, before.data.new_empty(0)


def noted(parameter: Any, what: Literal["comm", "layer", "now", "before"]) -> Any:
    """What is noted of a parameter, if it is and there still.

    "comm": the ranks that share it. "layer": it is gathered with; none for the whole model. "now": what has taken the
    place of one that was taken before `initialize`; "before": what stood in its place then.
    """
    found: weakref.ref[Any] | None = getattr(getattr(parameter, _MARK, None), what, None)
    return None if found is None else found()


def current(parameter: Any) -> Any:
    """What stands now in the place of a parameter that was taken before `initialize`; any other is that itself."""
    now = noted(parameter, "now")
    return parameter if now is None else now


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
    parameter = current(parameter)
    layer = noted(parameter, "layer")
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


# Placeholders


_ATTRIBUTE = "_thinwire_shard"
_DESCRIPTION = ("ds_id", "ds_shape", "ds_numel", "ds_tensor", "ds_status", "ds_persist", "all_gather", "partition")


class ParameterCall:
    """A call that a parameter answers, for itself or for those of `param_list`; it is not saved with the parameter.

    `act`: takes one parameter, and the other arguments.
    """

    def __init__(self, parameter: Tensor, act: Callable[..., None]) -> None:
        self._parameter = weakref.ref(parameter)
        self._act = act

    def __call__(self, param_list: Iterable[Tensor] | None = None, *arguments: Any, **options: Any) -> None:
        """Do it, one parameter after the other."""
        for one in [self._parameter()] if param_list is None else param_list:
            self._act(one, *arguments, **options)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


class ZeroParamStatus(Enum):
    """Whether a parameter of stage 3 is whole on this rank. `INFLIGHT` is DeepSpeed's for one that is on its way."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


@dataclass(frozen=True)
class Cutting:
    """How whole parameters are cut.

    `dtype`: what floating-point values are kept in; None for their own. `device`: where shards are kept; None for the
    parameter's. `checks`: whether a change that would be dropped is an error.
    """

    dtype: torch.dtype | None = None
    device: torch.device | None = None
    pin_memory: bool = False
    checks: bool = False


class ParameterShard:
    """This rank's part of a parameter: its `ds_tensor`, [ceil(numel / ranks)], the last ones padded.

    The parameter shows no elements, but its dtype and device, which are those that it is gathered in and on.
    `seen`: what it was when it was gathered last.
    """

    def __init__(self, parameter: nn.Parameter, comm: Communicator, cutting: Cutting) -> None:
        """Cut a whole parameter, the same on every rank; rank 0's values count. Collective."""
        whole = parameter.detach().contiguous()
        comm.broadcast(whole)
        self.comm = comm
        self.checks = cutting.checks
        self.shape = whole.shape
        self.seen: tuple[int, int] | None = None
        self._numel = whole.numel()
        self._size = max(1, -(-self._numel // comm.size))
        dtype = cutting.dtype if cutting.dtype is not None and whole.is_floating_point() else whole.dtype
        kept = torch.zeros(self._size, dtype=dtype, device=cutting.device or whole.device)
        setattr(parameter, _ATTRIBUTE, self)
        kept = kept.pin_memory() if cutting.pin_memory else kept
        describe(parameter, self.shape, kept, _all_gather, _partition)
        self._write(parameter, whole)
        parameter.data = torch.empty(0, dtype=dtype, device=whole.device)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # it holds a communicator

    def whole(self, parameter: nn.Parameter, dtype: torch.dtype) -> Tensor:
        """All of its values, on the parameter's device. Collective."""
        kept = _kept(parameter).to(device=parameter.device, dtype=dtype)
        flat = kept.new_empty(self._size * self.comm.size)
        self.comm.all_gather(flat, kept)
        return flat[: self._numel].view(self.shape)

    def gather(self, parameter: nn.Parameter) -> None:
        """Have the parameter hold all of its values. Collective."""
        parameter.data = self.whole(parameter, parameter.dtype)
        set_status(parameter, ZeroParamStatus.AVAILABLE)
        self.seen = parameter._version, parameter.data_ptr()

    def changed(self, parameter: nn.Parameter) -> bool:
        """Whether it was written to since, as far as its count of versions tells."""
        return self.seen != (parameter._version, parameter.data_ptr())

    def keep(self, parameter: nn.Parameter, root: int) -> None:
        """Keep the values that the gathered parameter has on rank `root`, and give them to all. Collective."""
        if parameter.shape != self.shape:
            raise ValueError(
                f"a gathered parameter of shape {tuple(self.shape)} was given values of shape {tuple(parameter.shape)}"
            )
        whole = parameter.detach().contiguous()
        self.comm.broadcast(whole, root)
        parameter.data.copy_(whole)
        self._write(parameter, whole)
        self.seen = parameter._version, parameter.data_ptr()

    def take_own(self, parameter: nn.Parameter) -> None:
        """Keep the own part of the values that the gathered parameter has on this rank."""
        self._write(parameter, parameter.detach().contiguous())

    def release(self, parameter: nn.Parameter) -> None:
        """Let the parameter hold nothing again."""
        parameter.data = parameter.data.new_empty(0)
        set_status(parameter, ZeroParamStatus.NOT_AVAILABLE)

    def show_shape(self, parameter: nn.Parameter) -> None:
        """Have it show its shape, in the memory of one element, for what asks for shapes alone."""
        if parameter.ds_status is ZeroParamStatus.NOT_AVAILABLE:  # type: ignore[attr-defined]
            parameter.data = parameter.data.new_zeros(()).expand(self.shape)

    def forget(self, parameter: nn.Parameter) -> None:
        """Make it an ordinary parameter, of the values that it shows."""
        for name in (_ATTRIBUTE, *_DESCRIPTION):
            vars(parameter).pop(name, None)

    @torch.no_grad()
    def hand_over(self, parameter: nn.Parameter, wanted: Tensor) -> Tensor:
        """All of its values, in the dtype of `wanted`; the parameter is let go of. Collective."""
        values = self.whole(parameter, wanted.dtype)
        self.forget(parameter)
        parameter.data = values.new_empty(0)
        return values

    def _write(self, parameter: nn.Parameter, whole: Tensor) -> None:
        """Keep the own part; where `whole` is what was shown of more bits, those bits stay."""
        kept = _kept(parameter)
        first = self.comm.rank * self._size
        own = whole.reshape(-1)[first : first + self._size].to(kept.device)
        target = kept[: own.numel()]
        same = target.to(own.dtype) == own
        target.copy_(torch.where(same, target, own.to(target.dtype)))


def is_zero_param(parameter: Any) -> bool:
    """Whether ranks share a tensor, as zero.Init or stage 3 has cut it."""
    return isinstance(parameter, Tensor) and hasattr(parameter, "ds_id")


def shard_of(parameter: Any) -> ParameterShard | None:
    """What a placeholder stands for; None for any other parameter."""
    found: ParameterShard | None = getattr(parameter, _ATTRIBUTE, None)
    return found


def _all_gather(parameter: nn.Parameter, async_op: bool = False, hierarchy: int = 0) -> None:
    """Have it hold all of its values, until `partition`. Collective."""
    shard = shard_of(parameter)
    if shard is not None and parameter.ds_status is ZeroParamStatus.NOT_AVAILABLE:  # type: ignore[attr-defined]
        shard.gather(parameter)


def _partition(
    parameter: nn.Parameter, hierarchy: int = 0, has_been_updated: bool = False, free_data: bool = True
) -> None:
    """Hold the shard alone again, of the values that it has now if they have `been_updated`; with what is shown of
    them still there without `free_data`."""
    shard = shard_of(parameter)
    if shard is None or parameter.ds_status is ZeroParamStatus.NOT_AVAILABLE:  # type: ignore[attr-defined]
        return
    if has_been_updated:
        shard.take_own(parameter)
    if free_data:
        shard.release(parameter)
    set_status(parameter, ZeroParamStatus.NOT_AVAILABLE)


def shards_in(model: Any) -> Iterator[tuple[nn.Parameter, ParameterShard]]:
    """The placeholders of a model, each once, with what they stand for."""
    for parameter in model.parameters() if isinstance(model, nn.Module) else ():
        shard = shard_of(parameter)
        if shard is not None:
            yield parameter, shard


def describe(
    parameter: Tensor, shape: torch.Size, local: Tensor, all_gather: Callable[..., None], partition: Callable[..., None]
) -> None:
    """Give a sharded parameter the attributes by which DeepSpeed's users know one. None is kept whole, `ds_persist`;
    one without elements, of which nothing is cut, has no `ds_id`.

    `all_gather`, `partition`: what its calls by these names do, to one parameter.
    """
    calls = ParameterCall(parameter, all_gather), ParameterCall(parameter, partition)
    values = id(parameter), shape, shape.numel(), local, ZeroParamStatus.NOT_AVAILABLE, False, *calls
    for name, value in zip(_DESCRIPTION, values, strict=True):
        if name != "ds_id" or shape.numel():
            setattr(parameter, name, value)


def set_status(parameter: Tensor, status: ZeroParamStatus) -> None:
    """Say whether it is whole here."""
    parameter.ds_status = status  # type: ignore[attr-defined]


def _kept(parameter: Tensor) -> Tensor:
    kept: Tensor = parameter.ds_tensor  # type: ignore[attr-defined]
    return kept
