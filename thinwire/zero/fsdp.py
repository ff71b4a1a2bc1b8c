"""ZeRO stage 3: parameters themselves are sharded, by torch's FSDP2, which gathers one layer at a time for as long as
it computes. It moves bytes over a torch process group, whatever the other stages use."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinwire.comm import Communicator
from thinwire.comm.launch import join_job
from thinwire.compress.fully_sharded import FsdpHooks, fsdp_hooks
from thinwire.compress.packet_layout import MemorylessCodec
from thinwire.zero.placement import Averaging
from thinwire.zero.tensor_on_disk import ParametersOnDisk, Shelf

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

WHOLE = "_thinwire_whole"
"""Attribute of a sharded parameter that answers as its value for a while."""


class Preparation:
    """What a user has said of a model before it is sharded; here nothing."""

    def gather(self, model: Any) -> None:
        """Make every placeholder an ordinary parameter that is whole on every rank. Collective."""

    def show_shapes(self, model: nn.Module) -> None:
        """Have placeholders show the shapes of what they stand for."""

    def hide_shapes(self, model: nn.Module) -> None:
        """Undo `show_shapes`."""

    def is_placeholder(self, parameter: Tensor) -> bool:
        """Whether its values lie on all ranks already."""
        return False

    def stand_ins(self, model: nn.Module) -> Mapping[str, Callable[[Tensor], Tensor]]:
        """Put parameters without memory in the place of placeholders; returns, by name, what reads the values of one in
        the dtype of its new parameter. Reading is collective."""
        return {}

    def is_unit(self, module: nn.Module) -> bool:
        """Whether a module is gathered as one, and nothing inside of it apart."""
        return False

    def external_parameters(self, module: nn.Module) -> Iterable[Tensor]:
        """Parameters of other modules that a module's forward uses."""
        return ()

    def describe(self, model: nn.Module, comm: Communicator, before: Mapping[str, weakref.ref[Tensor]]) -> None:
        """Note on a model that has been sharded what users ask of it, and on the parameters that it had `before`, by
        name, which users may hold."""


def is_sharded(parameter: Tensor) -> TypeGuard[DTensor]:
    """Whether a rank has a part of it only."""
    return hasattr(parameter, "device_mesh")


def gathered(parameter: Tensor) -> Tensor | None:
    """The whole tensor that a sharded parameter answers as for a while; None if it does not."""
    whole: Tensor | None = parameter.__dict__.get(WHOLE)
    return whole


def join_process_group(
    comm: Communicator,
    device: torch.device,
    what: str = "zero_optimization.stage 3",
    instead: str = "use stage 0, 1 or 2",
) -> Communicator:
    """The ranks of `comm` as a torch process group that FSDP2 can use, made where there is none. Collective.

    Raises ValueError, which says `what` needs it, for ranks in threads, which share one process, and for a part of the
    job's ranks.
    """
    if comm.backend == "threads":
        raise ValueError(
            f"{what} needs processes, and these ranks are threads: torch has one process group a process. Start the "
            f"script with torchrun, mpirun or srun, or {instead}"
        )
    joined = comm
    if comm.backend not in ("gloo", "nccl"):
        joined = join_job("nccl" if device.type == "cuda" else "gloo", comm.timeout, quiet=True)
    if (joined.rank, joined.size) != (comm.rank, comm.size) or comm.size != dist.get_world_size():
        raise ValueError(
            f"{what} takes all ranks of the job, {dist.get_world_size()}, and this communicator has {comm.size} of "
            f"them: pass none, or {instead}"
        )
    return joined


def computing_dtype(model: nn.Module, wanted: torch.dtype | None) -> torch.dtype:
    """What layers are gathered in: `wanted`, or the dtype of the parameters that train.

    Raises ValueError for parameters that cannot be cut, or gathered together.
    """
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not trained:
        raise ValueError("no parameter requires a gradient: there is nothing to optimize")
    for name, parameter in model.named_parameters():
        if parameter.dim() == 0:
            raise ValueError(
                f"parameter {name!r} has no dimension to cut along, and zero_optimization.stage 3 shards every "
                "parameter along its first: make it one of shape (1,), or use stage 0, 1 or 2"
            )
    if wanted is not None:
        return wanted
    first_name, first = trained[0]
    for name, parameter in trained:
        if parameter.dtype != first.dtype:
            raise ValueError(
                f"parameter {name!r} is {parameter.dtype} and {first_name!r} {first.dtype}: zero_optimization.stage 3 "
                "gathers a layer's parameters in one dtype. Enable bf16, convert the model, or use stage 0, 1 or 2"
            )
    return first.dtype


_sharded: weakref.WeakKeyDictionary[nn.Module, tuple[object, FsdpHooks, Shelf | None]] = weakref.WeakKeyDictionary()


def is_sharded_here(model: nn.Module) -> bool:
    """Whether `shard_model` has sharded this model, whose layers hold their shards alone from now on."""
    if model in _sharded:
        free_gathered(model)
    return model in _sharded


@torch.no_grad()
def shard_model(
    model: nn.Module,
    dtype: torch.dtype,
    device: torch.device,
    averaging: Averaging,
    prepared: Preparation,
    *,
    offload: bool,
    pin: bool,
    codecs: tuple[MemorylessCodec | None, MemorylessCodec | None, int] = (None, None, 1),
    begin: Callable[[nn.Module, int], None] | None = None,
    disk: tuple[Path, Communicator] | None = None,
) -> FsdpHooks:
    """Replace every parameter by this rank's shard of it, in place: fp32, gathered in `dtype` when it is used.

    Layers, the elements of repeated lists and the units of `prepared`, are gathered one at a time; the rest of the
    model as one. Nothing inside of a unit is a layer. Gradients are averaged over the ranks as soon as a layer's are
    complete, and add up in fp32; they travel in fp32 unless `averaging` says otherwise. Every rank must use the same
    parameters in a backward. `offload` keeps the shards in CPU memory, page-locked with `pin`. `codecs`: of
    weights and gradients, and the ranks of a node. Placeholders get their values here, one parameter at a time, and so
    does a model on the meta device, of which `begin` gives values to layer after layer, by number, and at last to the
    rest. `disk`: a folder for shards and gradients instead, and the ranks. Returns what counts the bytes sent.

    A model that was sharded so before is left as it is. Raises ValueError for one that was sharded otherwise, and where
    a disk cannot be used.
    """
    asked = dtype, averaging, device.type, offload, codecs, None if disk is None else disk[0]
    if (known := _sharded_before(model, asked)) is not None:
        return known
    # Imported here, and not for DTensor's sake either: it takes half a second that only stage 3 should cost.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    for parameter in model.parameters():
        if not prepared.is_placeholder(parameter):
            whole_dtype = torch.float32 if parameter.requires_grad else parameter.dtype
            parameter.data = parameter.to(whole_dtype).contiguous()
    layers = _layers(model, prepared)
    readers = prepared.stand_ins(model)
    policy = MixedPrecisionPolicy(
        param_dtype=None if dtype == torch.float32 else dtype,
        reduce_dtype=averaging.wire_dtype or torch.float32,
        cast_forward_inputs=False,
    )
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    # A parameter of no elements has nothing to gather: it rests in the dtype that the others are gathered in.
    empty = {parameter for parameter in model.parameters() if not parameter.numel()}
    for parameter in empty:
        parameter.data = parameter.to(dtype) if parameter.requires_grad else parameter.data
    offloading = CPUOffloadPolicy(pin_memory=pin) if offload and device.type != "cpu" else OffloadPolicy()
    for module in [*layers, model]:
        fully_shard(module, mesh=mesh, mp_policy=policy, offload_policy=offloading, ignored_params=empty)
    shelf = None if disk is None else Shelf(*disk, device)
    _give_values(model, layers, begin, readers, torch.device("cpu") if offload else device, shelf)
    weights, gradients, ranks = codecs
    hooks = fsdp_hooks(
        model, weights=weights, gradients=gradients, node_size=ranks, divide_first=averaging.divide_first
    )
    _sharded[model] = asked, hooks, shelf
    return hooks


def _sharded_before(model: nn.Module, asked: object) -> FsdpHooks | None:
    before, hooks, _ = _sharded.get(model, (asked, None, None))
    if before != asked:
        raise ValueError(
            "the model was sharded by an earlier thinwire.initialize, in another precision, averaging, codecs "
            "or offload_param, which cannot change any more: keep them, or build the model anew"
        )
    return hooks


def shelf_of(model: nn.Module) -> Shelf | None:
    """What the parameters of a model that `shard_model` has sharded rest on."""
    return _sharded[model][2]


def _give_values(
    model: nn.Module,
    layers: Sequence[nn.Module],
    begin: Callable[[nn.Module, int], None] | None,
    readers: Mapping[str, Callable[[Tensor], Tensor]],
    device: torch.device,
    shelf: Shelf | None,
) -> None:
    """Give a sharded model what values it lacks, layer by layer, and have all rest where they should."""
    resting = None if shelf is None else ParametersOnDisk(model, shelf)
    for number, module in enumerate([*layers, model] if begin is not None else []):
        assert begin is not None
        begin(module, number)
        if resting is not None:
            resting.move()
    if readers:
        _read_in(model, readers, device)
    if resting is not None:
        resting.move()
    if begin is not None or resting is not None:
        model._apply(lambda one: one)  # type: ignore[no-untyped-call]  # FSDP2 then takes its shards from parameters


def _read_in(model: nn.Module, readers: Mapping[str, Callable[[Tensor], Tensor]], device: torch.device) -> None:
    """Give sharded parameters without memory their values."""
    model._apply(lambda one: torch.empty_like(one, device=device) if one.is_meta else one)  # type: ignore[no-untyped-call]
    for name, parameter in model.named_parameters():
        if name in readers:
            values = readers[name](parameter).view(-1)
            fill(parameter, lambda start, numel, values=values: values[start : start + numel])  # type: ignore[misc]


def free_gathered(model: nn.Module) -> None:
    """Free what layers of a sharded model have gathered; of one that is whole, nothing."""
    if model in _sharded or any(map(is_sharded, model.parameters())):
        for module in model.modules():
            if (reshard := getattr(module, "reshard", None)) is not None:
                reshard()


@contextmanager
def keep_gathered(model: nn.Module) -> Iterator[None]:
    """Inside, every layer of a sharded model stays gathered, so that its forwards send nothing; of one that is whole,
    nothing. Collective at the beginning."""
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "reshard")]
    try:
        for layer in layers:
            layer.unshard()
            if layer is not model:  # which stays gathered after a forward anyway
                layer.set_reshard_after_forward(False, recurse=False)
        yield
    finally:
        for layer in layers:
            if layer is not model:
                layer.set_reshard_after_forward(True, recurse=False)
            layer.reshard()


def local_run(parameter: Tensor) -> tuple[int, Tensor]:
    """(where it begins within the flattened parameter, this rank's shard as a flat view); of a whole one, all."""
    if not is_sharded(parameter):
        return 0, parameter.detach().reshape(-1)
    rows, ranks = parameter.shape[0], parameter.device_mesh.size()
    first = min(parameter.device_mesh.get_local_rank() * -(-rows // ranks), rows)
    with torch.no_grad():
        return first * (parameter.numel() // rows), parameter.to_local().view(-1)


@torch.no_grad()
def fill(parameter: Tensor, read: Callable[[int, int], Tensor]) -> None:
    """Give this rank's shard of a parameter the values that `read(start, numel)` returns, flat."""
    if is_sharded(parameter):
        start, values = local_run(parameter)
        values.copy_(read(start, values.numel()))
    else:
        parameter.copy_(read(0, parameter.numel()).view(parameter.shape))


def whole(parameter: Tensor, device: torch.device) -> Tensor:
    """All of a parameter, on `device`. Collective where it is sharded."""
    shown = gathered(parameter)
    if shown is not None or not is_sharded(parameter):
        return parameter.detach() if shown is None else shown.to(device)
    on_device = parameter.to(device)
    assert is_sharded(on_device)
    return on_device.full_tensor().detach()


def _layers(model: nn.Module, prepared: Preparation) -> list[nn.Module]:
    """The modules to gather one at a time: elements of lists, alike and not simple, that share nothing with others."""
    everywhere = _uses(model, prepared)
    found = dict.fromkeys(() if prepared.is_unit(model) else _repeated(model, prepared))
    inside = ((layer, _uses(layer, prepared)) for layer in found)
    return [layer for layer, uses in inside if uses and all(everywhere[one] == uses[one] for one in uses)]


def _repeated(module: nn.Module, prepared: Preparation) -> Iterator[nn.Module]:
    for child in module.children():
        if prepared.is_unit(child):
            if _runs(child):
                yield child
            continue
        elements = list(child.children()) if isinstance(child, nn.ModuleList | nn.Sequential) else []
        alike = len(elements) > 1 and len({type(element) for element in elements}) == 1
        if alike and all(list(element.children()) and _runs(element) for element in elements):
            yield from elements
        else:
            yield from _repeated(child, prepared)


def _runs(module: nn.Module) -> bool:
    """Whether it has a forward, before which its parameters could be gathered."""
    return type(module).forward is not nn.Module.forward


def _uses(model: nn.Module, prepared: Preparation) -> Counter[int]:
    """How many modules use each parameter, by its id."""
    return Counter(
        id(parameter)
        for module in model.modules()
        for parameter in (*module._parameters.values(), *prepared.external_parameters(module))
        if parameter is not None
    )
