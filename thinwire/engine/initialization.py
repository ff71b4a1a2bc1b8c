"""The one call that turns a model and a configuration into an engine, as DeepSpeed's users know it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import ParamsT

from thinwire import comm as communication
from thinwire.comm import Communicator, LoggedCommunicator, OperationLog
from thinwire.comm.agreement import on_every_rank
from thinwire.engine.config import ConfigError, EngineConfig, load_config
from thinwire.engine.config.models import ActivationCheckpointingConfig, CommsLoggerConfig
from thinwire.engine.config.rules import total_steps
from thinwire.engine.data.loader import ResumableLoader
from thinwire.engine.engine import Engine
from thinwire.engine.given_schedule import GivenSchedule, check_schedule, make_schedule
from thinwire.engine.job import Job
from thinwire.engine.job_checkpoints import JobCheckpoints, ModelNames
from thinwire.engine.job_reports import JobReports
from thinwire.engine.loss_scale import make_loss_scale
from thinwire.engine.model.activation_checkpointing import ActivationCheckpoints, checkpoint_activations
from thinwire.engine.model.plugs import LayerDropping, put_in_sparse_attention
from thinwire.engine.model.precision import Precision, check_model
from thinwire.engine.model.used_parameters import UsedParameters
from thinwire.engine.optimizers import EngineOptimizer, build_optimizer
from thinwire.engine.recipe import GivenOptimizer, Recipe, find_recipe
from thinwire.engine.same_job import agree_on_config, agree_on_model
from thinwire.engine.start_lines import say_at_start
from thinwire.sparse_attn import densify
from thinwire.zero.rank_checks import broadcast_from_rank_0

__all__ = ["ConfigSource", "initialize"]

ConfigSource = str | os.PathLike[str] | Mapping[str, Any] | EngineConfig

_BAD_INPUT = (ValueError, TypeError, OSError)


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: GivenOptimizer | None = None,
    model_parameters: ParamsT | None = None,
    training_data: Any = None,
    lr_scheduler: GivenSchedule | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: ConfigSource | None = None,
    comm: Communicator | None = None,
) -> tuple[Engine, EngineOptimizer, ResumableLoader | None, LRScheduler | None]:
    """Build the engine that trains `model`; returns (engine, optimizer, data loader, schedule). Collective.

    Args:
        args: a command line's namespace; its `thinwire_config` or `deepspeed_config` is the configuration's path where
            `config` is not given.
        model: on this rank's device; under NCCL it is moved there. Rank 0's weights and buffers are given to all.
        optimizer: an elementwise torch optimizer that has not stepped yet, whose class, groups and settings are taken
            over, or a function from parameters to one; None for the configuration's, which gives way to it.
        model_parameters: parameters or groups to train, by default all of the model's.
        training_data: a data set for the loader; None for no loader.
        lr_scheduler: a torch schedule built on `optimizer`, or a function from the engine's optimizer to one; None for
            the configuration's, which gives way to it. It steps once a step that moves the weights.
        collate_fn: makes a batch of samples, as in torch.utils.data.DataLoader.
        config: the path of a JSON file, or a dict.
        comm: a Communicator; by default `thinwire.comm.init()` finds out how the process was launched.

    Raises ValueError (ConfigError is one) or TypeError, on every rank, for what cannot work.
    """
    comm = comm if comm is not None else communication.init()
    settings = _load_settings(args, config, comm)
    comm = _logged(comm, settings.comms_logger)
    trained, device = on_every_rank(comm, lambda: check_model(model), "train this model", _BAD_INPUT)
    agree_on_model(comm, trained)

    def asked_for() -> Recipe:
        check_schedule(lr_scheduler, optimizer)
        return find_recipe(optimizer, trained, model_parameters, settings)

    recipe = on_every_rank(comm, asked_for, "build its optimizer", _BAD_INPUT)
    say_at_start(comm, settings, optimizer, lr_scheduler)
    precision = Precision.of(settings)
    device = _prepare(trained, recipe, precision, comm, device)
    names = ModelNames.of(trained, precision)
    with ExitStack() as undo:
        recomputed, layer_drop = _plug_in(trained, settings, comm, undo)
        sharded = build_optimizer(recipe, trained, comm, device, settings, precision)
        _watch_for_unused(trained, sharded, settings, comm, undo)
        schedule = on_every_rank(
            comm, lambda: make_schedule(lr_scheduler, sharded, settings), "build its schedule", _BAD_INPUT
        )
        loss_scale = make_loss_scale(settings.fp16, settings.zero_optimization.stage)
        loader = None if training_data is None else _make_loader(training_data, collate_fn, settings, comm, device)
        job = Job(
            trained, sharded, schedule, loader, loss_scale, precision, settings, comm, device, recomputed, layer_drop
        )
        engine = Engine(job, JobCheckpoints(job, names), JobReports(job))
        undo.pop_all()
    return engine, sharded, loader, schedule


def _load_settings(args: Any, config: ConfigSource | None, comm: Communicator) -> EngineConfig:
    """The configuration, the same on every rank."""

    def load() -> EngineConfig:
        return load_config(_source(args, config), comm.size)

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
    model: nn.Module, recipe: Recipe, precision: Precision, comm: Communicator, device: torch.device
) -> torch.device:
    """Put the model into its precision and on the device that is returned, with rank 0's values of what no optimizer
    holds: an optimizer gives its parameters to all ranks itself."""
    held = recipe.trains()
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


def _make_loader(
    data: Any,
    collate_fn: Callable[[list[Any]], Any] | None,
    config: EngineConfig,
    comm: Communicator,
    device: torch.device,
) -> ResumableLoader:
    return ResumableLoader(
        data,
        config.train_micro_batch_size_per_gpu,
        comm,
        seed=config.seed,
        drop_last=config.dataloader_drop_last,
        collate_fn=collate_fn,
        pin_memory=device.type == "cuda",
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
