"""ShardedOptimizer on workers that come and go: a torch optimizer's own step on gradients that are averaged, exactly or
through a codec, for ever. At stage 0 all workers have all of its state, in the buckets of a ReplicatedHome; at stage 1
they divide it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from thinwire.comm import Communicator, threads
from thinwire.comm.elastic import Elastic
from thinwire.compress.codecs import make_codec
from thinwire.compress.kernels.loading import prepare_kernels, wait_for_kernels
from thinwire.compress.packet_layout import CodecName
from thinwire.optim.options import HomeOptions, Recipe
from thinwire.optim.replicated.home import ReplicatedHome
from thinwire.optim.replicated.owned_steps import EverySetting, OwnedSteps
from thinwire.optim.replicated.torch_steps import Build, Groups, Shares, TorchSteps, is_of_elements
from thinwire.optim.settings import WarmupWire
from thinwire.optim.step import AdamSettings, OwnedParameters
from thinwire.zero.placement import Sharding
from thinwire.zero.saved_state import group_settings


class _Rates(AdamSettings):
    """The one hyperparameter that is known of a torch optimizer's groups."""

    @classmethod
    @override
    def of_group(cls, group: Mapping[str, Any]) -> AdamSettings:
        return cls(float(group["lr"]), 0.0, 0.0, 0.0, 0.0, bias_correction=False, eps_inside_sqrt=False)


def own_rank(elastic: object, sharding: Sharding, comm: Communicator | None, mesh: DeviceMesh | None) -> Communicator:
    """The communicator of this worker alone. Raises ValueError or TypeError for what elastic workers cannot have."""
    takes_whole = sharding.whole_parameters is not Sharding.whole_parameters and sharding.codecs is not None
    if not takes_whole and (sharding.stage == 2 or (sharding.stage and sharding.codecs is not None)):
        raise ValueError(
            f"elastic= goes with stage 0, or with stage 1 where weights travel exactly, got stage={sharding.stage}, "
            f"codec={sharding.codecs!r}: a step is sent again from gradients, which stage 2 gives away"
        )
    given = HomeOptions(elastic=elastic, comm=comm, mesh=mesh)  # type: ignore[arg-type]
    replace(given, nodes=sharding.nodes, averaging=sharding.averaging).check_elastic()
    there, back = sharding.rest_codecs or ("", "")
    if sharding.stage and there != back:
        raise ValueError(
            "with elastic= what has no owner has averages come back as gradients leave, got "
            f"rest_codec={(there, back)}: give one codec"
        )
    for name, value in (("offload", sharding.offload or sharding.disk), ("rest_codec", there and not sharding.stage)):
        if value:
            raise ValueError(f"{name} does not go with elastic=, with which every worker has all state: leave it out")
    assert isinstance(elastic, Elastic)
    return threads.single(elastic.timeout)


def elastic_home(
    optimizer: torch.optim.Optimizer,
    comm: Communicator,
    build: Build,
    name: str,
    sharding: Sharding,
    named: Iterable[tuple[str, Tensor]] | None,
    **options: Any,
) -> tuple[ReplicatedHome, Callable[[], torch.optim.Optimizer]]:
    """The home of one worker's ShardedOptimizer, and what tells the torch optimizer in it. Waits until the worker is in
    its job. `name`: of what `build` makes; `options`: of the home."""
    groups, owned = optimizer.param_groups, _owned(optimizer.param_groups, sharding)
    codecs = sharding.codecs if owned is None else sharding.rest_codecs or sharding.codecs
    codec = "none" if codecs is None else codecs[0]
    held = _kinds_of_elements(build, groups)
    dtypes = {one.dtype for group in groups for one in group["params"]}
    if sharding.stage and (sharding.param_dtype is not None or dtypes != {torch.float32}):
        which, instead = ("at stage 1", "use stage=0") if owned is None else ("of owners", "leave param_dtype out")
        raise ValueError(
            f"elastic= {which} takes fp32 parameters, in fp32, got {sharding.param_dtype or dtypes}: {instead}"
        )
    shares = Shares(set(range(sum(len(group["params"]) for group in groups)))) if sharding.stage else None
    averaging, (dtype, *others) = sharding.averaging, dtypes
    if codec == "none" and averaging.wire_dtype is None and not others:
        dtype = sharding.param_dtype or dtype if dtype == torch.float32 else dtype
        averaging = replace(averaging, wire_dtype=averaging.accumulated(dtype))
    chosen = HomeOptions(
        stage=sharding.stage,
        max_norm=sharding.max_norm,
        named_parameters=named,
        param_dtype=sharding.param_dtype,
        codec="none",
        block_size=sharding.shard_block,
        bucket_bytes=sharding.bucket_bytes,
        warmup_wire=cast(WarmupWire, "fp32" if codec == "none" else codec),
        averaging=averaging,
        owned=owned,
        **options,
    )
    _prepare(groups[0]["params"][0].device.type, (codec, *(sharding.codecs or ())), sharding.shard_block)
    recipe = Recipe(
        algorithm=partial(_steps, build, groups, held, shares, owned),
        settings={"steps": name},
        schedule={},
        stages=(0, 1),
        check=lambda: None,
        check_group=lambda group: None,
        hyperparameters=_Rates if owned is None else EverySetting,
    )
    home = ReplicatedHome(optimizer, comm, chosen, recipe)

    def shown() -> torch.optim.Optimizer:
        (group,) = home.groups
        assert isinstance(group.algorithm, TorchSteps)
        return group.algorithm.optimizer

    return home, shown


def _prepare(device: str, codecs: Sequence[CodecName], block_size: int) -> None:
    if any(make_codec(one, block_size).has_kernels for one in codecs):
        prepare_kernels(device, ("encode", "average_and_encode", "decode"))
        wait_for_kernels(device)


def _steps(
    build: Build, groups: Groups, held: Sequence[str], shares: Shares | None, owned: OwnedParameters | None
) -> TorchSteps:
    if owned is None or shares is None:
        return TorchSteps(build, groups, held, shares)
    return OwnedSteps(build, groups, shares, owned.shapes)


def _owned(groups: Groups, sharding: Sharding) -> OwnedParameters | None:
    """The parameters that have one owner each, if codecs carry them there and back."""
    if not sharding.stage or sharding.codecs is None:
        return None
    every = [(one, group) for group in groups for one in group["params"]]
    whole = {n: one.shape for n, (one, group) in enumerate(every) if sharding.whole_parameters(group)}
    return OwnedParameters(whole, sharding.codecs, sharding.low_rank)


def _kinds_of_elements(build: Build, groups: Groups) -> list[str]:
    """The kinds of state that have a value for each element, as steps of small stand-ins show them.

    Raises ValueError for state that is neither that, in fp32, nor one value for all elements.
    """
    trial = build([{**group_settings(group), "params": _stand_ins(group["params"])} for group in groups])
    held = set[str]()
    for group in trial.param_groups:
        for one in group["params"]:
            one.grad = torch.ones_like(one)
    trial.step()
    for one, state in trial.state.items():
        for kind, value in state.items():
            of_elements = is_of_elements(value, one)
            if not isinstance(value, Tensor | int | float | None) or (
                isinstance(value, Tensor) and (value.dtype != torch.float32 if of_elements else value.numel() != 1)
            ):
                form = f"of shape {tuple(value.shape)}, {value.dtype}" if isinstance(value, Tensor) else f"{value!r}"
                raise ValueError(
                    f"{type(trial).__name__} keeps {kind!r} {form} for a parameter of shape {tuple(one.shape)}: "
                    "elastic workers carry state that has an fp32 value for each element, or one for all: use another "
                    "class"
                )
            held |= {kind} if of_elements else set()
    return sorted(held)


def _stand_ins(parameters: Iterable[Tensor]) -> list[Tensor]:
    devices = {max(one.dim(), 1): one.device for one in parameters}
    return [torch.ones([2] * dim, device=device) for dim, device in devices.items()]
