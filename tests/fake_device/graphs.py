"""What the device launches. Graphs: what is launched in a capture does not run, and is recorded with its arguments for
replays; what no graph could hold, such as a copy from or to the host, is an error. Kernels over whole buckets: those
for CPUs on the device's memory or the CUDA backend with all of its tables and launches, which the emulated GPU runs."""

from __future__ import annotations

import dataclasses
import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.compress.kernels import emulation
from thinwire.comm import Communicator
from thinwire.comm.collectives import Pending, Sizes
from thinwire.comm.errors import Call
from thinwire.compress.kernels import loading
from thinwire.compress.kernels.cuda.backend import CudaBackend
from thinwire.compress.kernels.cuda.launch import Launch

_GARBAGE = 0xFF  # NaN, as floats
_capturing = threading.local()


def recording() -> list[Callable[[], object]] | None:
    """What the graph that this thread captures has recorded so far; None where it captures none."""
    return getattr(_capturing, "launches", None)


class FakeGraphs:
    """Graphs of one rank."""

    def __init__(self, device: torch.device) -> None:
        assert device.type == _NAME

    def check(self, comm: Communicator) -> None:
        """All of this communicator's collectives can be recorded from now on."""
        for kind in ("all_to_all", "all_gather"):
            name = f"_start_{kind}"
            setattr(comm, name, _recorded(comm, getattr(comm, name)))

    def new(self) -> _FakeGraph:
        return _FakeGraph()

    def aside(self) -> Any:
        return nullcontext()


class _FakeGraph:
    def __init__(self) -> None:
        self._launches: list[Callable[[], object]] = []
        self._memory: list[Tensor] = []

    @contextmanager
    def capturing(self) -> Iterator[None]:
        assert recording() is None, "captures do not nest"
        _capturing.launches = self._launches
        try:
            with _Recorder(self._memory):
                yield
        finally:
            _capturing.launches = None

    def replay(self) -> None:
        assert self._launches, "nothing was captured"
        with torch.no_grad():
            for launch in self._launches:
                launch()


class _Recorder(TorchDispatchMode):
    """Records operators on the device's tensors. New tensors stay in `memory`, garbage until a replay fills them."""

    def __init__(self, memory: list[Tensor]) -> None:
        super().__init__()
        self._memory = memory

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        launches = recording()
        assert launches is not None
        _refuse_what_no_graph_holds(func, args, kwargs)
        if any(one.alias_info is not None and one.alias_info.is_write for one in func._schema.arguments):
            launches.append(lambda: func(*args, **kwargs))
            return _written(func, args, kwargs)
        result = func(*args, **kwargs)
        made = [one for one in _tensors(result) if one.device.type == _NAME]
        if any(one.alias_info is not None for one in func._schema.returns):
            return result  # a view
        self._memory += made
        if made and "empty" not in func._schema.name:
            launches.append(lambda: _fill(made, func(*args, **kwargs)))
        for one in made:
            if one.is_contiguous() and one.dtype != torch.bool:
                torch.ops.fake_device.as_host(one.detach()).view(-1).view(torch.uint8).fill_(_GARBAGE)
        return result


def _tensors(values: Any) -> list[Tensor]:
    return [one for one in tree_leaves(values) if isinstance(one, Tensor)]


def _refuse_what_no_graph_holds(func: Any, args: Any, kwargs: Any) -> None:
    """Waits of the host, and copies between it and the device."""
    given = [one for one in _tensors((args, kwargs)) if one.dim()]
    copies = {_NAME, "cpu"} <= {one.device.type for one in given}
    leaves = _NAME in {one.device.type for one in given} and str(kwargs.get("device", "")) == "cpu"
    if copies or leaves or kwargs.get("pin_memory") or func._schema.name == "aten::_local_scalar_dense":
        raise RuntimeError(f"{func} cannot be captured: the host takes part in it")


def _written(func: Any, args: Any, kwargs: Any) -> Any:
    """What an operator returns that writes into its arguments, without running it."""
    given = dict(zip((one.name for one in func._schema.arguments), args, strict=False)) | kwargs
    by_mark = {
        frozenset(one.alias_info.before_set): given.get(one.name)
        for one in func._schema.arguments
        if one.alias_info is not None
    }
    returned = [by_mark[frozenset(one.alias_info.before_set)] for one in func._schema.returns]
    return returned[0] if len(returned) == 1 else tuple(returned) if returned else None


def _fill(recorded: list[Tensor], result: Any) -> None:
    for one, new in zip(recorded, _tensors(result), strict=True):
        one.copy_(new)


class _Done:
    """A Pending of what takes place in replays."""

    def done(self) -> bool:
        return True

    def wait(self, seconds: float) -> bool:
        return True


def _recorded(comm: Communicator, start: Callable[..., Pending]) -> Callable[..., Pending]:
    """`start`, recorded where a graph is captured; its calls are numbered as the other ranks'."""

    def run(call: Call, output: Tensor, input: Tensor, sizes: Sizes) -> Pending:
        launches = recording()
        if launches is None:
            return start(call, output, input, sizes)
        number = sum(getattr(one, "of", None) is comm for one in launches) + 1

        def replay() -> None:
            assert start(Call(comm._sequence + number, call.signature), output, input, sizes).wait(60.0)

        replay.of = comm  # type: ignore[attr-defined]
        launches.append(replay)
        return _Done()

    return run


_NAME = "fake"


class HostBuckets:
    """One launch a call, as on a GPU."""

    def __getattr__(self, kernel: str) -> Any:
        if kernel == "adam_step":  # plain torch's, whose launches are counted one by one
            raise AttributeError(kernel)
        backend = importlib.import_module("thinwire.compress.kernels.cpu.backend")

        def run(call: Any) -> None:
            torch.ops.fake_device.launched(f"buckets::{kernel}")
            getattr(backend, kernel)(_on_host(call))

        return run


_ONE_AT_A_TIME = threading.Lock()


def _launch(launch: Launch, device: torch.device) -> None:
    """Stands for `Runner.run`: counts each launch."""
    assert device.type == _NAME
    if 0 in launch.grid:
        return

    def run() -> None:
        torch.ops.fake_device.launched(f"cuda::{launch.function}")
        with _ONE_AT_A_TIME:
            emulation.run(launch)

    launches = recording()
    if launches is None:
        run()
    else:
        launches.append(run)


class _BucketsAlone(CudaBackend):
    """Leaves the step of Adam to plain torch."""

    def __getattr__(self, kernel: str) -> Any:
        if kernel == "adam_step":
            raise AttributeError(kernel)
        return super().__getattr__(kernel)


def serve_buckets(backend: Any) -> None:
    """Have calls for the device reach `backend`."""
    loading._LOADERS[_NAME] = lambda: backend
    loading.compiled_backend.cache_clear()


@contextmanager
def on_an_emulated_gpu() -> Iterator[None]:
    """Have them go the way of the CUDA backend."""
    serve_buckets(_BucketsAlone(_launch))
    try:
        yield
    finally:
        serve_buckets(HostBuckets())


def _on_host(value: Any) -> Any:
    """A call with host tensors over the memory of the device's."""
    if isinstance(value, Tensor):
        return torch.ops.fake_device.as_host(value.detach())
    if isinstance(value, (list, tuple)):
        return type(value)(map(_on_host, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return dataclasses.replace(value, **{name: _on_host(one) for name, one in fields.items()})
    return value
