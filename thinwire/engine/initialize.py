"""The one call that turns a model and a configuration into an engine, as DeepSpeed's users know it."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import ParamsT

from thinwire import comm as communication
from thinwire.comm.agreement import on_every_rank
from thinwire.engine.config import ConfigError, EngineConfig, load_config
from thinwire.engine.config.models import ActivationCheckpointingConfig
from thinwire.engine.config.rules import total_steps
from thinwire.engine.data.loader import ResumableLoader
from thinwire.engine.engine import Engine
from thinwire.engine.given_schedule import GivenSchedule, check_schedule, make_schedule
from thinwire.engine.job import Parts
from thinwire.engine.job_checkpoints import Checkpoints, ModelNames
from thinwire.engine.job_reports import Reporter
from thinwire.engine.loss_scale import make_loss_scale
from thinwire.engine.model.activation_checkpointing import ActivationCheckpoints, checkpoint_activations
from thinwire.engine.model.plugs import LayerDropping, put_in_sparse_attention
from thinwire.engine.model.precision import Precision, check_model
from thinwire.engine.optimizers import EngineOptimizer, GivenOptimizer, Recipe, build_optimizer, find_recipe
from thinwire.engine.same_job import agree_on_config, agree_on_model
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
    comm: communication.Communicator | None = None,
) -> tuple[Engine, EngineOptimizer, ResumableLoader | None, LRScheduler | None]:
    """Build the engine that trains `model`; returns (engine, optimizer, data loader, schedule). Collective.

    Args:
        args: a command line's namespace; its `thinwire_config` or `deepspeed_config` is the configuration's path where
            `config` is not given.
        model: on this rank's device; under NCCL it is moved there. Rank 0's weights and buffers are given to all.
        optimizer: an elementwise torch optimizer that has not stepped yet, whose class, groups and settings are taken
            over, or a function from parameters to one; None for the configuration's.
        model_parameters: parameters or groups to train, by default all of the model's.
        training_data: a data set for the loader; None for no loader.
        lr_scheduler: a torch schedule built on `optimizer`, or a function from the engine's optimizer to one; None for
            the configuration's. It steps once a step that moves the weights.
        collate_fn: makes a batch of samples, as in torch.utils.data.DataLoader.
        config: the path of a JSON file, or a dict.
        comm: a Communicator; by default `thinwire.comm.init()` finds out how the process was launched.

    Raises ValueError (ConfigError is one) or TypeError, on every rank, for what cannot work.
    """
    comm = comm if comm is not None else communication.init()
    world = comm

    def settings() -> EngineConfig:
        return load_config(_source(args, config), world.size)

    loaded = on_every_rank(comm, settings, "load its configuration", _BAD_INPUT)
    agree_on_config(comm, loaded)
    trained, device = on_every_rank(comm, lambda: check_model(model), "train this model", _BAD_INPUT)
    agree_on_model(comm, trained)

    def ingredients() -> Recipe:
        check_schedule(lr_scheduler, optimizer, loaded)
        return find_recipe(optimizer, trained, model_parameters, loaded)

    recipe = on_every_rank(comm, ingredients, "build its optimizer", _BAD_INPUT)
    precision = Precision.of(loaded)
    held = recipe.trains()  # the optimizer gives those to all ranks
    precision.convert(trained, held)
    if comm.backend == "nccl" and device.type == "cpu":
        device = torch.device("cuda", torch.cuda.current_device())
        trained.to(device)
    others = [parameter for parameter in trained.parameters() if id(parameter) not in held]
    broadcast_from_rank_0(comm, [*others, *trained.buffers()])
    names = ModelNames.of(trained, precision)
    with ExitStack() as undo:
        if loaded.sparse_attention is not None:
            section = loaded.sparse_attention
            on_every_rank(comm, lambda: put_in_sparse_attention(trained, section), "plug in its attention", _BAD_INPUT)
            undo.callback(densify, trained)
        recomputed = _checkpoint_activations(trained, loaded.activation_checkpointing, comm)
        if recomputed is not None:
            undo.callback(recomputed.restore)
        layer_drop = _drop_layers(trained, loaded, comm)
        if layer_drop is not None:
            undo.callback(layer_drop.remove)
        sharded = build_optimizer(recipe, trained, comm, device, loaded, precision)
        schedule = on_every_rank(
            comm, lambda: make_schedule(lr_scheduler, sharded, loaded), "build its schedule", _BAD_INPUT
        )
        loss_scale = make_loss_scale(loaded.fp16)
        loader = None if training_data is None else _make_loader(training_data, collate_fn, loaded, comm, device)
        parts = Parts(
            trained, sharded, schedule, loader, loss_scale, precision, loaded, comm, device, recomputed, layer_drop
        )
        engine = Engine(parts, Checkpoints(parts, names), Reporter(parts))
        undo.pop_all()
    return engine, sharded, loader, schedule


def _drop_layers(model: nn.Module, config: EngineConfig, comm: communication.Communicator) -> LayerDropping | None:
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
    model: nn.Module, settings: ActivationCheckpointingConfig, comm: communication.Communicator
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
    comm: communication.Communicator,
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
