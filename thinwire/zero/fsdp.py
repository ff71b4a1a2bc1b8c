"""ZeRO stage 3: parameters themselves are sharded, by torch's FSDP2, which gathers one layer at a time for as long as
it computes. It moves bytes over a torch process group, whatever the other stages use."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinwire import comm as communication
from thinwire.comm import Communicator, Traffic
from thinwire.zero.averaging import Averaging
from thinwire.zero.built_model import stand_ins, values_of
from thinwire.zero.external import external_parameters
from thinwire.zero.fsdp_traffic import count_traffic
from thinwire.zero.gathered_shards import gathered
from thinwire.zero.leaf_modules import complete_gradients, is_leaf_module
from thinwire.zero.parameter_shard import shard_of
from thinwire.zero.shard_comparison import compare_shards
from thinwire.zero.shard_marks import is_sharded

__all__ = ["computing_dtype", "fill", "free_gathered", "join_process_group", "local_run", "shard_model", "whole"]


def join_process_group(comm: Communicator, device: torch.device) -> Communicator:
    """The ranks of `comm` as a torch process group that FSDP2 can use, made where there is none. Collective.

    Raises ValueError for ranks in threads, which share one process, and for a part of the job's ranks.
    """
    if comm.backend == "threads":
        raise ValueError(
            "zero_optimization.stage 3 needs processes, and these ranks are threads: torch's FSDP2 has one process "
            "group a process. Start the script with torchrun, mpirun or srun, or use stage 0, 1 or 2"
        )
    joined = comm
    if comm.backend not in ("gloo", "nccl"):
        joined = communication.init("nccl" if device.type == "cuda" else "gloo", comm.timeout, quiet=True)
    if (joined.rank, joined.size) != (comm.rank, comm.size) or comm.size != dist.get_world_size():
        raise ValueError(
            f"zero_optimization.stage 3 shards over all ranks of the job, {dist.get_world_size()}, and this "
            f"communicator has {comm.size} of them: pass none, or use stage 0, 1 or 2"
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


@torch.no_grad()
def shard_model(
    model: nn.Module, dtype: torch.dtype, device: torch.device, averaging: Averaging, *, offload: bool, pin: bool
) -> Traffic:
    """Replace every parameter by this rank's shard of it, in place: fp32, gathered in `dtype` when it is used.

    Layers, the elements of repeated lists and leaf modules, are gathered one at a time; the rest of the model as one.
    Nothing inside of a leaf module is a layer, see leaf_modules.complete_gradients. Gradients are
    averaged over the ranks as soon as a layer's are complete, and add up in fp32; they travel in fp32 unless
    `averaging` says otherwise. Every rank must use the same parameters in a backward. `offload` keeps the shards in CPU
    memory, page-locked with `pin`. What zero.Init has built comes here one parameter at a time. Returns what counts the
    bytes sent.
    """
    # Imported here, and not for DTensor's sake either: it takes half a second that only stage 3 should cost.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    compare_shards()
    for parameter in model.parameters():
        if shard_of(parameter) is None:
            whole_dtype = torch.float32 if parameter.requires_grad else parameter.dtype
            parameter.data = parameter.to(whole_dtype).contiguous()
    layers = _layers(model)
    placeholders = stand_ins(model)
    policy = MixedPrecisionPolicy(
        param_dtype=None if dtype == torch.float32 else dtype,
        reduce_dtype=averaging.wire_dtype or torch.float32,
        cast_forward_inputs=False,
    )
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    # A parameter of no elements has nothing to gather.
    empty = {parameter for parameter in model.parameters() if not parameter.numel()}
    offloading = CPUOffloadPolicy(pin_memory=pin) if offload and device.type != "cpu" else OffloadPolicy()
    for module in [*layers, model]:
        fully_shard(module, mesh=mesh, mp_policy=policy, offload_policy=offloading, ignored_params=empty)
    for module in filter(is_leaf_module, model.modules()):
        complete_gradients(module)
    if placeholders:
        _bring_in(model, placeholders, torch.device("cpu") if offload else device)
    return count_traffic(model, averaging.divide_first)


def _bring_in(model: nn.Module, placeholders: Mapping[str, nn.Parameter], device: torch.device) -> None:
    """Give sharded parameters without memory their values."""
    model._apply(lambda one: torch.empty_like(one, device=device) if one.is_meta else one)  # type: ignore[no-untyped-call]
    for name, parameter in model.named_parameters():
        if name in placeholders:
            values = values_of(placeholders, name, parameter).view(-1)
            fill(parameter, lambda start, numel, values=values: values[start : start + numel])  # type: ignore[misc]


def free_gathered(model: nn.Module) -> None:
    """Free what layers of a sharded model have gathered; of one that is whole, nothing."""
    if any(map(is_sharded, model.parameters())):
        for module in model.modules():
            if (reshard := getattr(module, "reshard", None)) is not None:
                reshard()


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


def _layers(model: nn.Module) -> list[nn.Module]:
    """The modules to gather one at a time: elements of lists, alike and not simple, that share nothing with others."""
    uses = Counter(
        id(parameter)
        for module in model.modules()
        for parameter in (*module._parameters.values(), *external_parameters(module))
        if parameter is not None
    )
    found = () if is_leaf_module(model) else _repeated(model)
    return [layer for layer in dict.fromkeys(found) if _is_closed(layer, uses)]


def _repeated(module: nn.Module) -> Iterator[nn.Module]:
    for child in module.children():
        if is_leaf_module(child):
            if _runs(child):
                yield child
            continue
        elements = list(child.children()) if isinstance(child, nn.ModuleList | nn.Sequential) else []
        alike = len(elements) > 1 and len({type(element) for element in elements}) == 1
        if alike and all(list(element.children()) and _runs(element) for element in elements):
            yield from elements
        else:
            yield from _repeated(child)


def _runs(module: nn.Module) -> bool:
    """Whether it has a forward, before which its parameters could be gathered."""
    return type(module).forward is not nn.Module.forward


def _is_closed(layer: nn.Module, uses: Counter[int]) -> bool:
    """Whether no parameter of the layer is used outside of it, where it would not be gathered."""
    inside = Counter(
        id(parameter)
        for module in layer.modules()
        for parameter in (*module._parameters.values(), *external_parameters(module))
        if parameter is not None
    )
    return all(uses[one] == count for one, count in inside.items()) and bool(inside)
