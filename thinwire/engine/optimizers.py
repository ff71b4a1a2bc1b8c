"""From what a user has, an optimizer of torch's, a function that builds one or a section of the configuration, to the
sharded optimizer that the engine steps."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.optimizer import ParamsT

from thinwire import comm as communication
from thinwire.comm import Communicator
from thinwire.comm.agreement import on_every_rank
from thinwire.engine.config import EngineConfig
from thinwire.engine.config.optimizer import ONEBIT_ADAM, ONEBIT_LAMB, ZERO_ONE_ADAM, check_optimizer
from thinwire.engine.model.precision import Precision
from thinwire.optim import ShardedOneBitAdam, ShardedOneBitLamb, ShardedZeroOneAdam
from thinwire.zero import ShardedOptimizer
from thinwire.zero import fsdp as stage3
from thinwire.zero.bucket_optimizer import OptimizerClass
from thinwire.zero.fsdp_optimizer import FullyShardedOptimizer
from thinwire.zero.rank_checks import broadcast_from_rank_0

__all__ = ["EngineOptimizer", "GivenOptimizer", "Recipe", "build_optimizer", "find_recipe"]

GivenOptimizer = torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer]

EngineOptimizer = ShardedOptimizer | FullyShardedOptimizer
"""What the engine steps: one surface, whatever the ZeRO stage."""

_BYTES_OF_FP32 = 4

_Own = type[ShardedOneBitAdam] | type[ShardedOneBitLamb] | type[ShardedZeroOneAdam]

_OWN: dict[str, _Own] = {
    ONEBIT_ADAM: ShardedOneBitAdam,
    ONEBIT_LAMB: ShardedOneBitLamb,
    ZERO_ONE_ADAM: ShardedZeroOneAdam,
}


@dataclass(frozen=True)
class Recipe:
    """What to shard: parameters or groups of them, the class that steps them, and its options. `own`: the optimizer of
    ours that was asked for, which is sharded already."""

    parameters: ParamsT
    optimizer_class: OptimizerClass
    options: dict[str, Any]
    own: _Own | None = None

    def trains(self) -> set[int]:
        """The ids of the parameters that the optimizer will hold."""
        every = [parameter for group in _groups(self.parameters) for parameter in group["params"]]
        return {id(parameter) for parameter in every if parameter.requires_grad}


def find_recipe(
    given: GivenOptimizer | None, model: nn.Module, model_parameters: ParamsT | None, config: EngineConfig
) -> Recipe:
    """What the user asked for, by `given` or by the configuration's optimizer section.

    An optimizer's groups are taken over as the same dicts, so that a schedule built on it goes on steering them.

    Raises ValueError where both or neither are given, or where an optimizer has stepped already or cannot be sharded;
    TypeError where `given` is, or returns, no optimizer.
    """
    section = config.optimizer
    parameters: list[Any] = list(model_parameters if model_parameters is not None else model.parameters())
    if given is None:
        if section is None:
            raise ValueError(
                'there is no optimizer: pass one to thinwire.initialize, or give the configuration an "optimizer" '
                'section, for example {"type": "AdamW", "params": {"lr": 1e-4}}'
            )
        if section.type in _OWN:
            return Recipe(parameters, torch.optim.AdamW, dict(section.params), own=_OWN[section.type])
        return Recipe(parameters, getattr(torch.optim, section.type), dict(section.params))
    if section is not None:
        raise ValueError(
            f'there are two optimizers: {_describe(given)} passed to thinwire.initialize, and "{section.type}" in the '
            'configuration\'s "optimizer" section. Remove one of them'
        )
    optimizer = given if isinstance(given, torch.optim.Optimizer) else _called(given, parameters)
    _check_can_be_taken_over(optimizer)
    if model_parameters is not None and _ids(parameters) != _ids(optimizer.param_groups):
        raise ValueError(
            "model_parameters are not the parameters of the optimizer that is passed beside them: leave "
            "model_parameters out"
        )
    return Recipe(optimizer.param_groups, type(optimizer), _constructor_options(optimizer))


def build_optimizer(
    recipe: Recipe,
    model: nn.Module,
    comm: Communicator,
    device: torch.device,
    config: EngineConfig,
    precision: Precision,
) -> EngineOptimizer:
    """The recipe's optimizer, sharded as `config` says; at stage 3 the model with it, in place. Collective.

    Raises ValueError or TypeError, on every rank, for what cannot be sharded.
    """
    if config.zero_optimization.stage == 3:
        return _build_stage_3(recipe, model, comm, device, config, precision)
    zero = config.zero_optimization
    width = precision.dtype.itemsize if precision.dtype is not None else _BYTES_OF_FP32
    shared: dict[str, Any] = {
        "stage": zero.stage,
        "comm": comm,
        "named_parameters": model.named_parameters(),
        "param_dtype": precision.dtype,
        "bucket_bytes": zero.reduce_bucket_size * width,
    }
    if recipe.own is not ShardedZeroOneAdam:  # which neither clips nor offloads
        shared |= {
            "max_norm": config.gradient_clipping,
            "offload": zero.offload_optimizer.device == "cpu",
            "pin_memory": zero.offload_optimizer.pin_memory,
        }
    if recipe.own is not None:
        options = dict(recipe.options)
        shared["comm"] = _communicator(options.pop("comm_backend_name", None), comm)
        shared["resync_interval"] = config.thinwire.resync_interval
        optimizer: ShardedOptimizer = recipe.own(recipe.parameters, **shared, **options)
    else:
        optimizer = ShardedOptimizer(recipe.parameters, recipe.optimizer_class, **shared, **recipe.options)
    if zero.overlap_comm:
        optimizer.gather_during_forward(model)
    return optimizer


def _build_stage_3(
    recipe: Recipe,
    model: nn.Module,
    comm: Communicator,
    device: torch.device,
    config: EngineConfig,
    precision: Precision,
) -> FullyShardedOptimizer:
    offload = config.zero_optimization.offload_param
    groups = _groups(recipe.parameters)
    held = [parameter for group in groups for parameter in group["params"] if parameter.requires_grad]
    broadcast_from_rank_0(comm, held)

    def plan() -> tuple[torch.dtype, list[list[str]]]:
        return stage3.computing_dtype(model, precision.dtype), _names(groups, model)

    dtype, names = on_every_rank(comm, plan, "shard its model", (ValueError, TypeError))
    joined = stage3.join_process_group(comm, device)
    traffic = stage3.shard_model(model, dtype, device, offload=offload.device == "cpu", pin=offload.pin_memory)
    sharded = dict(model.named_parameters())
    for group, names_in_group in zip(groups, names, strict=True):
        group["params"] = [sharded[name] for name in names_in_group]
    return FullyShardedOptimizer(
        model,
        groups,
        recipe.optimizer_class,
        comm=joined,
        traffic=traffic,
        names={id(parameter): name for name, parameter in sharded.items()},
        dtype=dtype,
        device=device,
        max_norm=config.gradient_clipping,
        **recipe.options,
    )


def _communicator(backend: Literal["gloo", "nccl", "mpi"] | None, comm: Communicator) -> Communicator:
    """The ranks of `comm` over the backend that the configuration names for its optimizer."""
    if backend is None or backend == comm.backend:
        return comm
    joined = communication.init(backend, comm.timeout, quiet=True)
    if (joined.rank, joined.size) != (comm.rank, comm.size):
        raise ValueError(
            f'"optimizer.params.comm_backend_name" "{backend}" joins all {joined.size} ranks of the job, and the '
            f"engine's communicator has {comm.size}: leave it out"
        )
    return joined


def _called(build: GivenOptimizer, parameters: list[Any]) -> torch.optim.Optimizer:
    if not callable(build):
        raise TypeError(
            f"optimizer must be a torch.optim.Optimizer, or a function from parameters to one, got {build!r}"
        )
    optimizer = build(parameters)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"{_describe(build)} returned {optimizer!r} instead of a torch.optim.Optimizer")
    return optimizer


def _check_can_be_taken_over(optimizer: torch.optim.Optimizer) -> None:
    name = type(optimizer).__name__
    if hasattr(optimizer, "comm"):
        raise ValueError(
            f"{name} synchronises ranks by itself: with the engine, name it in the configuration's "
            '"optimizer" section, or pass a torch optimizer'
        )
    if type(optimizer).__module__.startswith("torch.optim"):
        problems: list[str] = []
        check_optimizer({"type": name}, problems)
        if problems:
            raise ValueError(f"this optimizer cannot be sharded: {problems[0]}")
    # Adagrad has state from the start, with a step count of zero.
    if any(float(state.get("step", 1)) > 0 for state in optimizer.state.values()):
        raise ValueError(
            f"this {name} has stepped already, and its state would be lost: pass a new one, and load the state from a "
            "checkpoint of the engine"
        )


def _constructor_options(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Those of the optimizer's defaults that its class takes by name."""
    taken = inspect.signature(type(optimizer)).parameters
    return {key: value for key, value in optimizer.defaults.items() if key in taken}


def _groups(parameters: ParamsT) -> list[dict[str, Any]]:
    """As parameter groups; those that are some already stay the same dicts."""
    given: list[Any] = list(parameters)
    if not all(isinstance(one, dict) for one in given):
        return [{"params": [one[1] if isinstance(one, tuple) else one for one in given]}]
    for group in given:
        group["params"] = [group["params"]] if isinstance(group["params"], Tensor) else list(group["params"])
    return given


def _names(groups: list[dict[str, Any]], model: nn.Module) -> list[list[str]]:
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    foreign = sum(id(parameter) not in name_of for group in groups for parameter in group["params"])
    if foreign:
        raise ValueError(f"{foreign} of the optimizer's parameters are not in the model: pass the model's own")
    return [[name_of[id(parameter)] for parameter in group["params"]] for group in groups]


def _ids(parameters: ParamsT) -> set[int]:
    return {id(parameter) for group in _groups(parameters) for parameter in group["params"]}


def _describe(given: Any) -> str:
    return getattr(given, "__name__", type(given).__name__)
