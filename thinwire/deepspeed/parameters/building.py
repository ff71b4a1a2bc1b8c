"""Build a model shard by shard, as its modules are constructed: one too large for a rank's memory, for stage 3."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from thinwire import comm as communication
from thinwire.comm import Communicator
from thinwire.deepspeed.parameters.gathering import GatheredParameters
from thinwire.deepspeed.parameters.marks import Cutting, ParameterShard, shard_of
from thinwire.engine.config.loading import read_json_object
from thinwire.zero.fsdp import is_sharded, join_process_group
from thinwire.zero.memory import with_subclasses

Apply = Callable[[nn.Module, Callable[[nn.Module], None]], nn.Module]


@contextmanager
def _constructions(finished: Callable[[nn.Module], None], apply: Apply) -> Iterator[None]:
    """Inside, call `finished` with every module that this thread constructs, once its `__init__` has returned.

    A class's own `__init__` and those of its bases are one construction. Classes are changed for as long, those defined
    inside too, since torch has no hook for this; the last one that was entered is the first to be left.
    `nn.Module.apply` is `apply` meanwhile, and modules that get memory by `to_empty`, torch.nn.utils.skip_init's above
    all, are constructed then; the memory holds zeros, and not what others have left in it.
    """
    constructing: set[int] = set()
    thread = threading.get_ident()
    make_empty, define = nn.Module.to_empty, vars(nn.Module).get("__init_subclass__")

    @functools.wraps(make_empty)
    def emptied(module: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        make_empty(module, *args, **kwargs)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.zero_()
        for one in module.modules() if threading.get_ident() == thread else ():
            if id(one) not in constructing:
                finished(one)
        return module

    def defined(kind: Any, /, **arguments: Any) -> None:
        if define is None:
            super(nn.Module, kind).__init_subclass__(**arguments)
        else:
            define.__get__(None, kind)(**arguments)
        watch(kind)

    def watch(kind: type) -> None:
        init = vars(kind).get("__init__")
        if init is None:
            return

        @functools.wraps(init)
        def watched(module: nn.Module, *args: Any, **kwargs: Any) -> None:
            if id(module) in constructing or threading.get_ident() != thread:
                init(module, *args, **kwargs)
                return
            constructing.add(id(module))
            try:
                init(module, *args, **kwargs)
            finally:
                constructing.discard(id(module))
            finished(module)

        _replace(undo, kind, "__init__", watched)

    with ExitStack() as undo:
        for kind in with_subclasses([nn.Module]):
            watch(kind)
        _replace(undo, nn.Module, "apply", apply)
        _replace(undo, nn.Module, "to_empty", emptied)
        _replace(undo, nn.Module, "__init_subclass__", classmethod(defined))
        yield


def _replace(undo: ExitStack, kind: type, name: str, new: Any) -> None:
    before = (setattr, kind, name, vars(kind)[name]) if name in vars(kind) else (delattr, kind, name)
    undo.callback(*before)
    setattr(kind, name, new)


class Init:
    """Inside, every module's parameters are cut as soon as its `__init__` returns: each rank keeps its shard.

    No rank ever holds more of the model than its shards and one module. Rank 0's values count. A parameter is then a
    placeholder without elements, with `ds_shape`, `ds_numel`, `ds_status`, `ds_tensor` (this rank's elements) and
    `ds_id`; read and change it in GatheredParameters. `module.apply(fn)` gathers every module for `fn`, and keeps rank
    0's changes. Give the model to `thinwire.initialize`: at stage 3 it is sharded from these shards, at other stages
    gathered. Constructing is collective: every rank builds the same model. Contexts may be nested.

    Args:
        module: a model that is there already, cut at once; there is nothing to enter then.
        data_parallel_group: None, or the process group of all ranks.
        mem_efficient_linear: accepted; torch's linear keeps no gathered weights.
        remote_device: where shards are kept, "cpu" say; by default where parameters are constructed.
        pin_memory: page-lock shards in CPU memory.
        config_dict_or_path, config: two names of the configuration, a dict or a JSON file's path, whose
            `zero_optimization.enable_sanity_checks` makes a change that GatheredParameters would drop an error. bf16
            and fp16 change nothing here: parameters stay as they are constructed, so that master weights begin there.
        enabled: False does nothing.
        dtype: what floating-point parameters are converted to.
        mpu: None, or one without model parallelism.

    Raises ValueError for ranks in threads, for groups of a part of the ranks, and for DeepSpeed's other arguments
    unless they are off; `zero_quantized_weights` goes with a configuration that says so too.
    """

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        **others: Any,
    ) -> None:
        del mem_efficient_linear
        settings = _read(config_dict_or_path if config is None else config) if enabled else {}
        _check_others(others, settings)
        self._constructions = ExitStack()
        self._comm: Communicator | None = None
        self._enabled = enabled
        if not enabled:
            return
        self._cutting = _cutting(settings, dtype, remote_device, pin_memory)
        self._comm = _join(data_parallel_group, mpu)
        for one in [] if module is None else module.modules():
            self._cut(one)

    def __enter__(self) -> None:
        if self._enabled:
            self._constructions.enter_context(_constructions(self._cut, _apply_gathered))

    def __exit__(self, *_: object) -> None:
        self._constructions.close()

    @torch.no_grad()
    def _cut(self, module: nn.Module) -> None:
        assert self._comm is not None
        for parameter in module._parameters.values():
            if parameter is None or parameter.is_meta or torch.nn.parameter.is_lazy(parameter):
                continue
            if shard_of(parameter) is None and not is_sharded(parameter):
                ParameterShard(parameter, self._comm, self._cutting)


def _apply_gathered(module: nn.Module, fn: Callable[[nn.Module], None]) -> nn.Module:
    """What nn.Module.apply does, on whole parameters."""
    for child in module.children():
        child.apply(fn)
    with GatheredParameters(list(module.parameters(recurse=False)), modifier_rank=0):
        fn(module)
    return module


def _check_others(others: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    known = {
        "zero_param_parallel_group",
        "zero_quantized_weights",
        "zero_quantized_nontrainable_weights",
        "sequence_data_parallel_group",
        "param_swapper",
    }
    if unknown := sorted(others.keys() - known):
        raise TypeError(f"zero.Init takes no {', '.join(unknown)}")
    asked = {name for name, value in others.items() if value not in (None, False)}
    zero, quantized = settings.get("zero_optimization"), "zero_quantized_weights"
    if quantized in asked and not (isinstance(zero, Mapping) and zero.get(quantized) is True):
        raise ValueError(
            f"zero.Init: {quantized} says how initialize has weights gathered: set it under zero_optimization of the "
            "configuration that both get"
        )
    if others_asked := sorted(asked - {quantized}):
        raise ValueError(f"zero.Init does not offer {', '.join(others_asked)}: leave it out")


def _read(config: Any) -> Mapping[str, Any]:
    """A configuration as the script has it; initialize checks it."""
    if config is None:
        return {}
    if isinstance(config, str | os.PathLike):
        return read_json_object(Path(config))
    if not isinstance(config, Mapping):
        raise ValueError(f"zero.Init: config is a dict or the path of a JSON file, got {type(config).__name__}")
    return config


def _cutting(
    settings: Mapping[str, Any], dtype: torch.dtype | None, remote_device: str | None, pin_memory: bool
) -> Cutting:
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"zero.Init: dtype must be a floating-point dtype, torch.bfloat16 say, or None, got {dtype!r}")
    if remote_device not in (None, "cpu") and not str(remote_device).startswith("cuda"):
        raise ValueError(f'zero.Init: remote_device is None, "cpu" or a GPU, got {remote_device!r}')
    zero = settings.get("zero_optimization")
    return Cutting(
        dtype,
        device=None if remote_device is None else torch.device(remote_device),
        pin_memory=pin_memory and torch.cuda.is_available(),
        checks=isinstance(zero, Mapping) and zero.get("enable_sanity_checks") is True,
    )


def _join(group: Any, mpu: Any) -> Communicator:
    if mpu is not None and mpu.get_model_parallel_world_size() != 1:
        raise ValueError("zero.Init: there is no model parallelism: leave mpu out")
    comm = communication.init(quiet=True)
    joined = join_process_group(comm, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    if group is not None and dist.get_world_size(group) != joined.size:
        raise ValueError(
            f"zero.Init: data_parallel_group has {dist.get_world_size(group)} ranks and the job {joined.size}: models "
            "are built over all ranks, leave it out"
        )
    return joined
