"""The one call that turns a model and a configuration into an engine, as DeepSpeed's users know it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import ParamsT

from thinwire import comm as communication
from thinwire.comm import Communicator, LoggedCommunicator, OperationLog
from thinwire.comm.agreement import on_every_rank
from thinwire.engine.activation_checkpointing import ActivationCheckpoints, checkpoint_activations
from thinwire.engine.config import ConfigError, EngineConfig, load_config
from thinwire.engine.config.models import ActivationCheckpointingConfig, CommsLoggerConfig
from thinwire.engine.config.rules import total_steps
from thinwire.engine.data import ResumableLoader, make_loader
from thinwire.engine.engine import Engine
from thinwire.engine.job import Job, agree_on_config, agree_on_model
from thinwire.engine.job_checkpoints import JobCheckpoints, ModelNames
from thinwire.engine.job_reports import JobReports
from thinwire.engine.loss_scale import make_loss_scale
from thinwire.engine.model import LayerDropping, Precision, UsedParameters, check_model, put_in_sparse_attention
from thinwire.engine.optimizers import EngineOptimizer, NoOptimizer, build_optimizer, shard_for_evaluation, steps_alone
from thinwire.engine.recipe import GivenOptimizer, GivenSchedule, Recipe, check_schedule, find_recipe, make_schedule
from thinwire.sparse_attn import densify
from thinwire.zero.built_model import gather_model, hide_shapes, show_shapes
from thinwire.zero.rank_checks import broadcast_from_rank_0

__all__ = ["AnyEngine", "ConfigSource", "Given", "build_engine", "initialize", "load_settings", "say_at_start"]

# What rank 0 says of a job's configuration once, when its engine is built, unless `thinwire.comm.init(quiet=True)`.


def say_at_start(
    comm: Communicator,
    settings: EngineConfig,
    optimizer: GivenOptimizer | None,
    schedule: GivenSchedule | None,
    passed_over: int,
) -> None:
    """Say which keys have no effect, which sections give way to an optimizer or schedule passed beside them, and how
    many of `model_parameters` that optimizer passes over."""
    if not comm.speaks:
        return
    lines = [settings.remarks.line()]
    if optimizer is not None and settings.optimizer is not None:
        lines.append(_gives_way("optimizer", settings.optimizer.type, _name(optimizer, torch.optim.Optimizer)))
    if schedule is not None and settings.scheduler is not None:
        lines.append(_gives_way("scheduler", settings.scheduler.type, _name(schedule, LRScheduler)))
    if passed_over:
        lines.append(f"{passed_over} of model_parameters are not trained: the optimizer passed beside them lacks them")
    for line in filter(None, lines):
        print(f"thinwire: {line}", file=sys.stderr, flush=True)


def _gives_way(section: str, named: str, given: str) -> str:
    return f'{given}, passed to initialize, is used in place of "{named}" in the configuration\'s "{section}" section'


def _name(given: object, kind: type) -> str:
    if isinstance(given, kind):
        return f"the {type(given).__name__}"
    return f"the function {getattr(given, '__name__', type(given).__name__)}"


AnyEngine = TypeVar("AnyEngine", bound=Engine)
ConfigSource = str | os.PathLike[str] | Mapping[str, Any] | EngineConfig

_BAD_INPUT = (ValueError, TypeError, OSError)


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: GivenOptimizer | None = None,
    model_parameters: ParamsT | None = None,
    training_data: Any = None,
    lr_scheduler: GivenSchedule | None = None,
    distributed_port: int | None = None,
    mpu: None = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: ConfigSource | None = None,
    mesh_param: None = None,
    config_params: ConfigSource | None = None,
    *,
    comm: Communicator | None = None,
) -> tuple[Engine, EngineOptimizer | None, ResumableLoader | None, LRScheduler | None]:
    """Build the engine that trains `model`; returns (engine, optimizer, data loader, schedule). Collective.

    Arguments come in DeepSpeed's order. Without an optimizer, here or in the configuration, the engine evaluates only.

    Args:
        args: a command line's namespace; its `thinwire_config` or `deepspeed_config` is the configuration's path where
            `config` is not given.
        model: on this rank's device; under NCCL it is moved there. Rank 0's weights and buffers are given to all.
        optimizer: an elementwise torch optimizer that has not stepped yet, whose class, groups and settings are taken
            over, or a function from parameters to one; None for the configuration's, which gives way to it.
        model_parameters: parameters or groups to train, by default all of the model's; beside an `optimizer`, which may
            lack some of them, nothing that it does not say.
        training_data: a data set for the loader; None for no loader.
        lr_scheduler: a torch schedule built on `optimizer`, or a function from the engine's optimizer to one; None for
            the configuration's, which gives way to it. It steps once a step that moves the weights.
        distributed_port: changes nothing: ranks meet where their launcher says.
        mpu: None: there is data parallelism alone.
        dist_init_required: changes nothing: a torch process group is made where one is needed and there is none.
        collate_fn: makes a batch of samples, as in torch.utils.data.DataLoader.
        config: the path of a JSON file, or a dict.
        mesh_param: None, as mpu.
        config_params: the old name of `config`.
        comm: a Communicator; by default `thinwire.comm.init()` finds out how the process was launched.

    Raises ValueError (ConfigError is one) or TypeError, on every rank, for what cannot work.
    """
    comm = comm if comm is not None else communication.init()
    on_every_rank(comm, lambda: _check_foreign(distributed_port, mpu, mesh_param), "take its arguments", _BAD_INPUT)
    settings = load_settings(args, config, config_params, comm)
    given = Given(model, optimizer, model_parameters, training_data, lr_scheduler, collate_fn)
    return build_engine(Engine, given, settings, comm)


@dataclass(frozen=True)
class Given:
    """What a user gives beside a configuration; see `initialize`."""

    model: nn.Module | None
    optimizer: GivenOptimizer | None
    model_parameters: ParamsT | None
    training_data: Any
    lr_scheduler: GivenSchedule | None
    collate_fn: Callable[[list[Any]], Any] | None


def build_engine(
    kind: type[AnyEngine], given: Given, settings: EngineConfig, comm: Communicator
) -> tuple[AnyEngine, EngineOptimizer | None, ResumableLoader | None, LRScheduler | None]:
    """What `initialize` returns, the engine one of class `kind`. Collective; raises what `initialize` raises."""
    comm = _logged(comm, settings.comms_logger)
    if settings.zero_optimization.stage < 3:
        gather_model(given.model)
    trained, device = on_every_rank(comm, lambda: check_model(given.model), "train this model", _BAD_INPUT)
    agree_on_model(comm, trained)
    recipe = on_every_rank(comm, lambda: _asked_for(given, trained, settings), "build its optimizer", _BAD_INPUT)
    passed_over = 0 if recipe is None else recipe.passed_over
    say_at_start(comm, settings, given.optimizer, given.lr_scheduler, passed_over)
    precision = Precision.of(settings)
    device = _prepare(trained, recipe, precision, comm, device)
    with ExitStack() as undo:
        show_shapes(trained)
        undo.callback(hide_shapes, trained)
        names = ModelNames.of(trained, precision)
        recomputed, layer_drop = _plug_in(trained, settings, comm, undo)
        sharded, schedule = _build_steps(recipe, given.lr_scheduler, trained, comm, device, settings, precision)
        if not isinstance(sharded, NoOptimizer):
            _watch_for_unused(trained, sharded, settings, comm, undo)
        loader = None
        if given.training_data is not None:
            loader = make_loader(given.training_data, settings, comm, device, collate_fn=given.collate_fn)
        job = Job(
            model=trained,
            optimizer=sharded,
            schedule=schedule,
            loader=loader,
            # At the smallest scale a worker alone is no error: the others go on.
            loss_scale=make_loss_scale(settings.fp16, 0 if steps_alone(sharded) else settings.zero_optimization.stage),
            precision=precision,
            config=settings,
            comm=comm,
            device=device,
            recomputed=recomputed,
            layer_drop=layer_drop,
            collate_fn=given.collate_fn,
            given_optimizer=given.optimizer is not None,
            given_schedule=given.lr_scheduler is not None,
        )
        engine = kind(job, JobCheckpoints(job, names), JobReports(job))
        undo.pop_all()
    return engine, engine.optimizer, loader, schedule


def _asked_for(given: Given, model: nn.Module, settings: EngineConfig) -> Recipe | None:
    """The optimizer to build; None where there is none, and no schedule that would need one."""
    check_schedule(given.lr_scheduler, given.optimizer)
    recipe = find_recipe(given.optimizer, model, given.model_parameters, settings)
    if recipe is None and (given.lr_scheduler is not None or settings.scheduler is not None):
        raise ValueError(
            "there is a schedule and no optimizer: pass one to thinwire.initialize, or give the configuration an "
            '"optimizer" section, for example {"type": "AdamW", "params": {"lr": 1e-4}}'
        )
    return recipe


def _build_steps(
    recipe: Recipe | None,
    lr_scheduler: GivenSchedule | None,
    model: nn.Module,
    comm: Communicator,
    device: torch.device,
    settings: EngineConfig,
    precision: Precision,
) -> tuple[EngineOptimizer | NoOptimizer, LRScheduler | None]:
    """What moves the weights, and the schedule that steers it, if there is one."""
    if recipe is None:
        return NoOptimizer(shard_for_evaluation(model, comm, device, settings, precision)), None
    sharded = build_optimizer(recipe, model, comm, device, settings, precision)
    schedule = on_every_rank(
        comm, lambda: make_schedule(lr_scheduler, sharded, settings), "build its schedule", _BAD_INPUT
    )
    return sharded, schedule


def _check_foreign(port: object, mpu: object, mesh_param: object) -> None:
    """Raise for arguments of DeepSpeed's that would change something here and cannot."""
    if port is not None and (isinstance(port, bool) or not isinstance(port, int)):
        raise TypeError(f"distributed_port is a number or None, not {port!r}; ranks meet where their launcher says")
    for name, value in (("mpu", mpu), ("mesh_param", mesh_param)):
        if value is not None:
            raise ValueError(
                f"{name} asks for model, pipeline or sequence parallelism, and thinwire has data parallelism alone: "
                "leave it out, or give the ranks that hold the same part of a model as `comm`, a Communicator's split()"
            )


def load_settings(
    args: Any, config: ConfigSource | None, config_params: ConfigSource | None, comm: Communicator
) -> EngineConfig:
    """The configuration, the same on every rank. Collective; raises ConfigError on every rank."""

    def load() -> EngineConfig:
        if config is not None and config_params is not None:
            raise ConfigError("there are two configurations: `config`, and `config_params`, its old name; remove one")
        return load_config(_source(args, config if config is not None else config_params), comm.size)

    settings = on_every_rank(comm, load, "load its configuration", _BAD_INPUT)
    agree_on_config(comm, settings)
    return settings


def _logged(comm: Communicator, section: CommsLoggerConfig) -> Communicator:
    """`comm`, or one around it that counts and times what `section` asks for."""
    if not section.enabled:
        return comm
    report = partial(print, file=sys.stderr, flush=True) if section.verbose and comm.rank == 0 else None
    names = None if section.prof_all else section.prof_ops
    return LoggedCommunicator(comm, OperationLog(names, caller=section.debug, report=report))


def _prepare(
    model: nn.Module, recipe: Recipe | None, precision: Precision, comm: Communicator, device: torch.device
) -> torch.device:
    """Put the model into its precision and on the device that is returned, with rank 0's values of what no optimizer
    holds: an optimizer gives its parameters to all ranks itself."""
    held = set() if recipe is None else recipe.trains()
    precision.convert(model, held)
    if comm.backend == "nccl" and device.type == "cpu":
        device = torch.device("cuda", torch.cuda.current_device())
        model.to(device)
    others = [parameter for parameter in model.parameters() if id(parameter) not in held]
    broadcast_from_rank_0(comm, [*others, *model.buffers()])
    return device


def _plug_in(
    model: nn.Module, settings: EngineConfig, comm: Communicator, undo: ExitStack
) -> tuple[ActivationCheckpoints | None, LayerDropping | None]:
    """Change the model as its configuration asks; `undo` changes it back."""
    if settings.sparse_attention is not None:
        section = settings.sparse_attention
        on_every_rank(comm, lambda: put_in_sparse_attention(model, section), "plug in its attention", _BAD_INPUT)
        undo.callback(densify, model)
    recomputed = _checkpoint_activations(model, settings.activation_checkpointing, comm)
    if recomputed is not None:
        undo.callback(recomputed.restore)
    layer_drop = _drop_layers(model, settings, comm)
    if layer_drop is not None:
        undo.callback(layer_drop.remove)
    return recomputed, layer_drop


def _watch_for_unused(
    model: nn.Module, optimizer: EngineOptimizer, settings: EngineConfig, comm: Communicator, undo: ExitStack
) -> None:
    if not settings.zero_optimization.ignore_unused_parameters:
        used = UsedParameters(model, comm)
        undo.callback(used.remove)
        optimizer.register_step_post_hook(used.check)


def _drop_layers(model: nn.Module, config: EngineConfig, comm: Communicator) -> LayerDropping | None:
    if not config.progressive_layer_drop.enabled:
        return None
    steps = total_steps(config)
    return on_every_rank(
        comm,
        lambda: LayerDropping(model, config.progressive_layer_drop, steps, config.seed),
        "drop its layers",
        _BAD_INPUT,
    )


def _checkpoint_activations(
    model: nn.Module, settings: ActivationCheckpointingConfig, comm: Communicator
) -> ActivationCheckpoints | None:
    if not settings.modules:
        return None
    return on_every_rank(
        comm,
        lambda: checkpoint_activations(model, settings.modules, cpu_checkpointing=settings.cpu_checkpointing),
        "recompute its activations",
        _BAD_INPUT,
    )


def _source(args: Any, config: ConfigSource | None) -> ConfigSource:
    on_command_line = [
        (name, getattr(args, name, None)) for name in ("thinwire_config", "deepspeed_config") if hasattr(args, name)
    ]
    found = [path for _, path in on_command_line if path is not None]
    if config is not None and found:
        raise ConfigError(
            "there are two configurations: initialize's `config`, and one on the command line; remove one"
        )
    if config is None and not found:
        raise ConfigError("there is none: pass the path of a JSON file, or a dict, as `config`")
    return config if config is not None else found[0]
