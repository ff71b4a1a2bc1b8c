"""Whole weights for a while, and changes of theirs for all ranks, at every ZeRO stage.

A stage 3 parameter answers as the whole tensor meanwhile, although this rank has a shard of it: the object that scripts
hold stays the same, and so does what FSDP2 finds in it.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from typing_extensions import override

from thinwire.comm import Communicator
from thinwire.comm.agreement import raise_together
from thinwire.deepspeed.parameters.fragments import safe_set_full_fp32_param
from thinwire.deepspeed.parameters.marks import (
    ParameterShard,
    ZeroParamStatus,
    current,
    noted,
    register_external_parameter,
    set_status,
    shard_of,
    shards_in,
)
from thinwire.zero.fsdp import WHOLE, gathered, is_sharded, keep_gathered, local_run, whole
from thinwire.zero.home import find_state

_tensor: Any = Tensor  # whose attributes are declared as their values' types, and are descriptors
_OF_THE_SHARD = frozenset(
    {
        _tensor.grad.__get__,
        _tensor.grad.__set__,
        _tensor.grad.__delete__,
        _tensor.requires_grad.__get__,
        _tensor.requires_grad.__set__,
        _tensor.requires_grad_,
        _tensor.is_leaf.__get__,
    }
)
"""What autograd and optimizers ask of the parameter itself."""


@cache
def _class() -> type[Tensor]:
    # Imported here: it takes half a second that only stage 3 should cost.
    from torch.distributed.tensor import DTensor

    class GatheredShards(DTensor):
        """A DTensor whose operations are those of the whole tensor that was gathered from it."""

        __slots__ = ()  # so that a DTensor can become one

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            with torch._C.DisableTorchFunctionSubclass():
                if func in _OF_THE_SHARD:
                    return func(*args, **(kwargs or {}))
                plain_args, plain_kwargs = tree_map_only(cls, gathered, (args, kwargs or {}))
                result = func(*plain_args, **plain_kwargs)
            # What writes to its first argument returns it.
            return args[0] if args and isinstance(args[0], cls) and result is plain_args[0] else result

        def __repr__(self) -> str:  # type: ignore[override]
            return f"GatheredShards({gathered(self)!r})"

    return GatheredShards


_DROPPED = (
    "is dropped: the shards keep what they had. Name the rank whose values count, "
    "GatheredParameters(..., modifier_rank=0)"
)


class GatheredParameters:
    """Inside, parameters that are sharded, or built shard by shard, are whole on every rank. Collective, both ends.

    At the end the values of rank `modifier_rank` are given to all, and master weights follow; other ranks' changes are
    dropped. Without `modifier_rank` all changes are, with a RuntimeWarning where one is noticed, or with a RuntimeError
    on every rank where zero.Init was told so by `enable_sanity_checks`. What is written through `.data` counts too, but
    is not noticed. At stages 0 to 2 parameters are whole anyway: the end gives `modifier_rank`'s values to all, and
    without it nothing happens. Parameters that neither an engine nor zero.Init knows are left alone.

    Args:
        params: a parameter or several; others are left alone.
        modifier_rank: whose values count at the end; None for none.
        fwd_module: a module that uses the parameters although they are another's: see register_external_parameter.
        enabled: False does nothing.

    A whole parameter has the values of the shards: at stage 3 fp32. Contexts may be nested. Raises ValueError for a
    rank that there is not, and, on every rank, where one raised an error inside.
    """

    def __init__(
        self,
        params: Tensor | Iterable[Tensor],
        modifier_rank: int | None = None,
        fwd_module: nn.Module | None = None,
        enabled: bool = True,
    ) -> None:
        given = [current(one) for one in ([params] if isinstance(params, Tensor) else params)]
        self._gatherings: list[_Gathering] = []
        self._comm: Communicator | None = None
        self._root = modifier_rank
        if not enabled:
            return
        if fwd_module is not None:
            for parameter in given:
                register_external_parameter(fwd_module, parameter)
        found = [_gathering_of(parameter) for parameter in {id(one): one for one in given}.values()]
        self._comm = next((one.comm for one in found if one is not None and one.comm is not None), None)
        if self._comm is None:
            return
        if modifier_rank is not None and not 0 <= modifier_rank < self._comm.size:
            raise ValueError(
                f"modifier_rank must be a rank, 0 to {self._comm.size - 1}, or None, got {modifier_rank!r}"
            )
        self._gatherings = [one for one in found if one is not None]

    @torch.no_grad()
    def __enter__(self) -> None:
        for one in self._gatherings:
            one.open(writes=self._root is not None)

    @torch.no_grad()
    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if self._comm is None:
            return
        try:
            if self._root is not None:
                raised = error if error is None or isinstance(error, Exception) else RuntimeError(repr(error))
                raise_together(self._comm, raised, "change gathered parameters")
                changed = _anywhere(self._comm, [one.may_have_changed() for one in self._gatherings])
                for one, counts in zip(self._gatherings, changed, strict=True):
                    if counts:
                        one.keep(self._comm, self._root)
            elif error is None:
                self._look_for_dropped_changes()
        finally:
            for one in reversed(self._gatherings):
                one.close()

    def _look_for_dropped_changes(self) -> None:
        assert self._comm is not None
        changed = [one for one in self._gatherings if one.drops_a_change()]
        if any(one.checks for one in self._gatherings):
            if any(_anywhere(self._comm, [bool(changed)])):
                raise RuntimeError(
                    "an in-place modification of a parameter inside GatheredParameters with modifier_rank=None "
                    + _DROPPED
                )
        elif changed:
            warnings.warn(
                f"a change of {len(changed)} parameters inside GatheredParameters with modifier_rank=None {_DROPPED}",
                RuntimeWarning,
                stacklevel=3,
            )


@contextmanager
def unwrap_model_for_generation(model: Any) -> Iterator[Any]:
    """Inside, the parameters of an engine or a model are whole on every rank, and forwards send nothing, so that every
    rank may generate by itself; gives what was given. Collective, both ends."""
    module = model if isinstance(model, nn.Module) else model.module
    with GatheredParameters([one for one, _ in shards_in(module)]), keep_gathered(module):
        yield model


class _Gathering(ABC):
    """One parameter, while it is gathered."""

    checks = False

    def __init__(self, parameter: Any, comm: Communicator | None) -> None:
        self.parameter = parameter
        self.comm = comm

    @abstractmethod
    def open(self, writes: bool) -> None:
        """Gather it; `writes`: to be kept at the end. Collective."""

    def may_have_changed(self) -> bool:
        """Whether this rank's values have to be looked at."""
        return True

    def drops_a_change(self) -> bool:
        """Whether there is a change that is not kept."""
        return False

    @abstractmethod
    def keep(self, comm: Communicator, root: int) -> None:
        """Give rank `root`'s values to all ranks. Collective."""

    def close(self) -> None:
        """Hold the shard alone again, where it did."""


class _Placeholder(_Gathering):
    """Of a model that is built shard by shard."""

    def __init__(self, parameter: nn.Parameter, shard: ParameterShard) -> None:
        super().__init__(parameter, shard.comm)
        self.checks = shard.checks
        self._shard = shard
        self._opened = False

    @override
    def open(self, writes: bool) -> None:
        self._opened = self.parameter.ds_status is ZeroParamStatus.NOT_AVAILABLE
        if self._opened:
            self._shard.gather(self.parameter)

    @override
    def drops_a_change(self) -> bool:
        return self._opened and self._shard.changed(self.parameter)

    @override
    def keep(self, comm: Communicator, root: int) -> None:
        self._shard.keep(self.parameter, root)

    @override
    def close(self) -> None:
        if self._opened:
            self._shard.release(self.parameter)


class _Sharded(_Gathering):
    """Of an engine at stage 3."""

    def __init__(self, parameter: Tensor, comm: Communicator | None) -> None:
        super().__init__(parameter, comm)
        self._before: Tensor | None = noted(parameter, "before")  # which a script may read and write as well
        self.opened = False
        self._seen: list[tuple[int, int]] = []

    @override
    def open(self, writes: bool) -> None:
        self.opened = gathered(self.parameter) is None
        if self.opened:
            setattr(self.parameter, WHOLE, whole(self.parameter, self.parameter.device).clone())
            self.parameter.__class__ = _class()
            set_status(self.parameter, ZeroParamStatus.AVAILABLE)
            if self._before is not None:
                self._before.data = self._whole()
                set_status(self._before, ZeroParamStatus.AVAILABLE)
        self._seen = self._look()

    def _look(self) -> list[tuple[int, int]]:
        shown = (self._whole(), *([] if self._before is None else [self._before]))
        return [(one._version, one.data_ptr()) for one in shown]

    @override
    def drops_a_change(self) -> bool:
        return self.opened and self._look() != self._seen

    @override
    def keep(self, comm: Communicator, root: int) -> None:
        values = self._whole()
        if self._before is not None and self._before.data_ptr() != self._seen[1][1]:  # `.data` was replaced
            values.copy_(self._before)
        comm.broadcast(values, root)
        self.take_own()
        self._seen = self._look()

    def take_own(self) -> None:
        """Keep the own part of the gathered values of this rank."""
        start, own = local_run(self.parameter)
        own.copy_(self._whole().view(-1)[start : start + own.numel()])
        found = find_state(self.parameter)
        if found is not None:
            found[0].after_writing_weights(found[1], None)

    @override
    def close(self) -> None:
        if self.opened and gathered(self.parameter) is not None:  # not partitioned meanwhile
            self.parameter.__class__ = _class().__bases__[0]
            delattr(self.parameter, WHOLE)
            set_status(self.parameter, ZeroParamStatus.NOT_AVAILABLE)
            if self._before is not None:
                self._before.data = self._before.data.new_empty(0)
                set_status(self._before, ZeroParamStatus.NOT_AVAILABLE)

    def _whole(self) -> Tensor:
        values = gathered(self.parameter)
        assert values is not None, "open() gathers it"
        return values


@torch.no_grad()
def all_gather(parameter: Tensor, async_op: bool = False, hierarchy: int = 0) -> None:
    """Have a parameter of stage 3 answer as the whole one, until `partition`. Collective."""
    _Sharded(parameter, noted(parameter, "comm")).open(writes=False)


@torch.no_grad()
def partition(parameter: Tensor, hierarchy: int = 0, has_been_updated: bool = False, free_data: bool = True) -> None:
    """Have it be its shard again, of the values that it has now if they have `been_updated`. Whole values are let go,
    with `free_data` or without."""
    one = _Sharded(parameter, noted(parameter, "comm"))
    if gathered(parameter) is not None:
        if has_been_updated:
            one.take_own()
        one.opened = True
        one.close()


class _Whole(_Gathering):
    """On every rank all the time."""

    def __init__(self, parameter: Tensor) -> None:
        self._found = find_state(parameter)
        super().__init__(parameter, None if self._found is None else self._found[0].comm)
        self._before: Tensor | None = None

    @override
    def open(self, writes: bool) -> None:
        if self._found is not None:
            self._found[0].weights(self._found[1])  # waits for new ones that are on their way
        self._before = self.parameter.detach().clone() if writes else None

    @override
    def may_have_changed(self) -> bool:
        # What has not keeps the bits that its master weight has more.
        return self._before is None or not torch.equal(self._before, self.parameter.detach())

    @override
    def keep(self, comm: Communicator, root: int) -> None:
        values = self.parameter.detach().clone(memory_format=torch.contiguous_format)
        comm.broadcast(values, root)
        self.parameter.copy_(values)
        if self._found is not None and self._found[0].cuts_parameters:  # what a forward has left gathered
            safe_set_full_fp32_param(self.parameter, values)


def _gathering_of(parameter: Any) -> _Gathering | None:
    if not isinstance(parameter, Tensor):
        return None
    shard = shard_of(parameter)
    if shard is not None:
        assert isinstance(parameter, nn.Parameter)
        return _Placeholder(parameter, shard)
    return _Sharded(parameter, noted(parameter, "comm")) if is_sharded(parameter) else _Whole(parameter)


def _anywhere(comm: Communicator, flags: list[bool]) -> list[bool]:
    """Which of them hold on some rank. Collective."""
    of_ranks = comm.all_gather_bytes(bytes(flags), "find changed parameters")
    return [any(of_rank[place] for of_rank in of_ranks) for place in range(len(flags))]
