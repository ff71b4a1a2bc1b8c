"""ShardedOptimizer on workers that come and go: a torch optimizer's own step on gradients that are averaged, exactly or
through a codec, for ever. At stage 0 all workers have all of its state, in the buckets of a ReplicatedHome; at stage 1
they divide it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from typing_extensions import override

from thinwire.comm import Communicator, threads
from thinwire.comm.elastic import Elastic
from thinwire.compress.codecs import make_codec
from thinwire.compress.kernels.loading import prepare_kernels, wait_for_kernels
from thinwire.optim.algorithm import Form, Keep
from thinwire.optim.options import HomeOptions, Recipe
from thinwire.optim.replicated.elastic_shards import DividedSteps, Shares
from thinwire.optim.replicated.home import ReplicatedHome
from thinwire.optim.settings import WarmupWire
from thinwire.optim.step import AdamSettings, Clock, Members
from thinwire.zero.placement import Sharding
from thinwire.zero.saved_state import group_settings

Build = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
Groups = Sequence[Mapping[str, Any]]


class TorchSteps(DividedSteps):
    """The steps of the torch optimizer that `build` makes of groups, over weights of parameters of these `groups`.

    State of the kinds `held`, which have a value for each element, lies in buckets once it has begun, and the rest, as
    step counts, are its scalars.
    """

    form = Form("", None, payload=None, update=None)

    def __init__(self, build: Build, groups: Groups, held: Iterable[str], shares: Shares | None) -> None:
        """`shares`: of state that workers divide, none of which lies in buckets."""
        self.state = {} if shares else dict.fromkeys(held, Keep.EVERY_RANK)
        self._build, self._groups, self.shares = build, groups, shares
        self._begin()

    def _begin(self) -> None:
        self._weights = [one.detach().float() for group in self._groups for one in group["params"]]
        left = iter(self._weights)
        groups = [{**group_settings(group), "params": [next(left) for _ in group["params"]]} for group in self._groups]
        self.optimizer = self._build(groups)
        self._held: dict[int, set[str]] = {}  # kinds that lie in buckets, by the number of a parameter that has begun

    @override
    def move(self, groups: Sequence[Members], clock: Clock) -> None:
        for inner, group in zip(self.optimizer.param_groups, self._groups, strict=True):
            inner.update(group_settings(group))
        moved = [(number, members, place) for members in groups for place, number in enumerate(members.parameters)]
        of_all = [one for one in moved if self.shares is None or one[0] in self.shares.mine]
        for number, members, place in of_all:
            weight, own = members.weights[place].detach(), self._weights[number]
            if own.data_ptr() != weight.data_ptr():
                own.data = weight
            own.grad = members.averages[place]
            for kind in self._held.get(number, ()):
                self.optimizer.state[own][kind] = members[kind][place]
        self.optimizer.step()
        for number, members, place in of_all:
            own, own.grad = self._weights[number], None
            state = self.optimizer.state[own]
            self._held[number] = {kind for kind in state.keys() & self.state if _is_of_elements(state[kind], own)}
            for kind in self._held[number]:
                if state[kind] is not members[kind][place]:
                    members[kind][place].copy_(state[kind])
        if self.shares is not None:
            self.shares.publish([number for number, *_ in moved])

    @override
    def state_of(self, number: int) -> dict[str, Any]:
        return dict(self.optimizer.state.get(self._weights[number], {}))

    @override
    def set_state(self, number: int, state: Mapping[str, Any]) -> None:
        own = self._weights[number]
        self.optimizer.state.pop(own, None)
        if state:
            self.optimizer.state[own] = {
                kind: one.clone().view(own.shape) if isinstance(one, Tensor) and one.shape == (own.numel(),) else one
                for kind, one in state.items()
            }

    @override
    def scalars(self, names: Sequence[str]) -> dict[str, Any]:
        if self.shares is not None:
            return {"torch": {names[number]: {"held": [], "beside": {}} for number in sorted(self.shares.mine)}}
        found: dict[str, Any] = {}
        for number, held in self._held.items():
            state = self.optimizer.state[self._weights[number]]
            beside = {kind: _told(one) for kind, one in state.items() if kind not in held and one is not None}
            found[names[number]] = {"held": sorted(held), "beside": beside}
        return {"torch": found}

    @override
    def load_scalars(self, saved: Mapping[str, Any], names: Sequence[str]) -> None:
        self._begin()
        if self.shares is not None:
            self.shares.mine = {number for number, name in enumerate(names) if name in saved["torch"]}
            return
        for number, name in enumerate(names):
            if (told := saved["torch"].get(name)) is not None:
                own = self._weights[number]
                self._held[number] = {*told["held"]}
                values = {kind: _of_told(one, own.device) for kind, one in told["beside"].items()}
                self.optimizer.state[own] = dict.fromkeys(told["held"]) | values


def _is_of_elements(value: Any, weight: Tensor) -> bool:
    return isinstance(value, Tensor) and value.shape == weight.shape


def _told(value: Any) -> dict[str, Any]:
    """A value as plain values."""
    if not isinstance(value, Tensor):
        return {"value": value, "dtype": None, "beside_weight": False}
    dtype = str(value.dtype).removeprefix("torch.")
    return {"value": value.tolist(), "dtype": dtype, "beside_weight": value.device.type != "cpu"}


def _of_told(told: Mapping[str, Any], device: torch.device) -> Any:
    if told["dtype"] is None:
        return told["value"]
    where = device if told["beside_weight"] else "cpu"
    return torch.tensor(told["value"], dtype=getattr(torch, told["dtype"]), device=where)


class _Rates(AdamSettings):
    """The one hyperparameter that is known of a torch optimizer's groups."""

    @classmethod
    @override
    def of_group(cls, group: Mapping[str, Any]) -> AdamSettings:
        return cls(float(group["lr"]), 0.0, 0.0, 0.0, 0.0, bias_correction=False, eps_inside_sqrt=False)


def own_rank(elastic: object, sharding: Sharding, comm: Communicator | None, mesh: DeviceMesh | None) -> Communicator:
    """The communicator of this worker alone. Raises ValueError or TypeError for what elastic workers cannot have."""
    if sharding.stage == 2 or (sharding.stage and sharding.codecs is not None):
        raise ValueError(
            f"elastic= goes with stage 0, or with stage 1 where weights travel exactly, got stage={sharding.stage}, "
            f"codec={sharding.codecs!r}: a step is sent again from gradients, which stage 2 gives away"
        )
    given = HomeOptions(elastic=elastic, comm=comm, mesh=mesh)  # type: ignore[arg-type]
    replace(given, nodes=sharding.nodes, averaging=sharding.averaging).check_elastic()
    for name, value in (("offload", sharding.offload or sharding.disk), ("rest_codec", sharding.rest_codecs)):
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
    groups, codec = optimizer.param_groups, "none" if sharding.codecs is None else sharding.codecs[0]
    held = _kinds_of_elements(build, groups)
    dtypes = {one.dtype for group in groups for one in group["params"]}
    if sharding.stage and (sharding.param_dtype is not None or dtypes != {torch.float32}):
        raise ValueError(
            f"elastic= at stage 1 takes fp32 parameters, in fp32, got {sharding.param_dtype or dtypes}: use stage=0"
        )
    shares = Shares(set(range(sum(len(group["params"]) for group in groups)))) if sharding.stage else None
    device = groups[0]["params"][0].device
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
        **options,
    )
    if make_codec(codec, sharding.shard_block).has_kernels:
        prepare_kernels(device.type, ("encode", "average_and_encode", "decode"))
        wait_for_kernels(device.type)
    recipe = Recipe(
        algorithm=lambda: TorchSteps(build, groups, held, shares),
        settings={"steps": name},
        schedule={},
        stages=(0, 1),
        check=lambda: None,
        check_group=lambda group: None,
        hyperparameters=_Rates,
    )
    home = ReplicatedHome(optimizer, comm, chosen, recipe)

    def shown() -> torch.optim.Optimizer:
        (group,) = home.groups
        assert isinstance(group.algorithm, TorchSteps)
        return group.algorithm.optimizer

    return home, shown


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
            of_elements = _is_of_elements(value, one)
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
