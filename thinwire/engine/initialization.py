"""Build an engine of a model and a configuration, and say on rank 0 what of it has no effect."""

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

from thinwire.comm import Communicator, LoggedCommunicator, OperationLog
from thinwire.comm.agreement import on_every_rank
from thinwire.engine.activation_checkpointing import ActivationCheckpoints, checkpoint_activations
from thinwire.engine.config import EngineConfig, load_config
from thinwire.engine.config.models import CommsLoggerConfig
from thinwire.engine.config.rules import total_steps
from thinwire.engine.data import ResumableLoader, make_loader, refuse_elastic_data
from thinwire.engine.engine import Engine
from thinwire.engine.job import Job, ModelNames, agree_on_config, agree_on_model
from thinwire.engine.job_checkpoints import JobCheckpoints
from thinwire.engine.loss_scale import make_loss_scale
from thinwire.engine.model import LayerDropping, Precision, UsedParameters, check_model, put_in_sparse_attention
from thinwire.engine.optimizers import NoOptimizer, OptimizerBuilder
from thinwire.engine.part_checkpoints import PartCheckpoints
from thinwire.engine.parts import Loss, ModelPart, part_of
from thinwire.engine.recipe import GivenOptimizer, GivenSchedule, Recipe, check_schedule, find_recipe, make_schedule
from thinwire.engine.reports import JobReports
from thinwire.inference import rounding_in_training
from thinwire.sparse_attn import densify
from thinwire.transformers import fast_encoder
from thinwire.zero.fsdp import is_sharded
from thinwire.zero.initial_values import values_device
from thinwire.zero.rank_checks import broadcast_from_rank_0
from thinwire.zero.synchronized_optimizer import SynchronizedOptimizer

AnyEngine = TypeVar("AnyEngine", bound=Engine)
ConfigSource = str | os.PathLike[str] | Mapping[str, Any] | EngineConfig

BAD_INPUT = (ValueError, TypeError, OSError)


@dataclass(frozen=True)
class Given:
    """What a user gives beside a configuration; see `thinwire.initialize`."""

    model: nn.Module | None
    optimizer: GivenOptimizer | None
    model_parameters: ParamsT | None
    training_data: Any
    lr_scheduler: GivenSchedule | None
    collate_fn: Callable[[list[Any]], Any] | None
    loss_fn: Loss | None = None


def build_engine(
    kind: type[AnyEngine], given: Given, settings: EngineConfig, comm: Communicator
) -> tuple[AnyEngine, SynchronizedOptimizer | None, ResumableLoader | None, LRScheduler | None]:
    """Return (an engine of class `kind`, optimizer, data loader, schedule). Collective; raises ValueError or TypeError,
    on every rank, for what cannot work."""
    world, stage = _logged(comm, settings.comms_logger), settings.zero_optimization.stage
    if stage < 3:
        kind.prepared.gather(given.model)
    check = partial(check_model, given.model, stage, settings.ranks_of_a_model, settings.initial_weights)
    whole, device = on_every_rank(world, check, "train this model", BAD_INPUT)
    agree_on_model(world, whole)
    recipe = on_every_rank(world, lambda: _asked_for(given, whole, settings), "build its optimizer", BAD_INPUT)
    _say_at_start(world, settings, given, 0 if recipe is None else recipe.passed_over)
    precision = Precision.of(settings)
    device = _prepare(whole, recipe, world, device, settings)
    with ExitStack() as undo:
        kind.prepared.show_shapes(whole)
        undo.callback(kind.prepared.hide_shapes, whole)
        names = ModelNames.of(whole, precision)
        recomputed, layer_drop = _plug_in(whole, settings, world, undo)
        parts = ModelPart(whole, world)
        if settings.ranks_of_a_model > 1:
            parts = part_of(whole, settings, world, device, given.loss_fn)
            recipe = recipe and recipe.over(parts.moved)
            precision.convert(parts.model, set() if recipe is None else recipe.trains())
            if recomputed is not None and parts.pipeline is not None:  # stages are copies of the model's modules
                recomputed.restore()
                recomputed = None
        builder = OptimizerBuilder(parts.model, parts.replicas, device, settings, precision, kind.prepared)
        optimizer, schedule = _build_optimizer(builder, recipe, given, world, undo)
        loader = None
        if given.training_data is not None:
            loader = make_loader(given.training_data, settings, parts.replicas, device, collate_fn=given.collate_fn)
        job = Job(
            model=parts.model,
            optimizer=optimizer,
            schedule=schedule,
            loader=loader,
            # At the smallest scale a worker alone is no error: the others go on.
            loss_scale=make_loss_scale(settings.fp16, 0 if optimizer.steps_alone else stage),
            precision=precision,
            config=settings,
            comm=parts.replicas,
            world=world,
            mesh=parts.mesh,
            pipeline=parts.pipeline,
            loss_fn=given.loss_fn,
            device=device,
            recomputed=recomputed,
            layer_drop=layer_drop,
            collate_fn=given.collate_fn,
            given_optimizer=given.optimizer is not None,
            given_schedule=given.lr_scheduler is not None,
            names=names,
        )
        checkpoints = JobCheckpoints if parts.mesh is None else PartCheckpoints
        engine = kind(job, checkpoints(job), JobReports(job))
        undo.pop_all()
    return engine, engine.optimizer, loader, schedule


def _build_optimizer(
    builder: OptimizerBuilder, recipe: Recipe | None, given: Given, world: Communicator, undo: ExitStack
) -> tuple[SynchronizedOptimizer | NoOptimizer, LRScheduler | None]:
    """What steps the model, and its schedule."""
    if recipe is None:
        return NoOptimizer(builder.shard_for_evaluation()), None
    optimizer, settings = builder.build(recipe), builder.config
    make = partial(make_schedule, given.lr_scheduler, optimizer, settings)
    schedule = on_every_rank(world, make, "build its schedule", BAD_INPUT)
    if not settings.zero_optimization.ignore_unused_parameters:
        used = UsedParameters(builder.model, world)
        undo.callback(used.remove)
        optimizer.register_step_post_hook(used.check)
    return optimizer, schedule


def _asked_for(given: Given, model: nn.Module, settings: EngineConfig) -> Recipe | None:
    """The optimizer to build; None where there is none, and no schedule that would need one."""
    check_schedule(given.lr_scheduler, given.optimizer)
    recipe = find_recipe(given.optimizer, model, given.model_parameters, settings)
    if recipe is None and (given.lr_scheduler is not None or settings.scheduler is not None):
        raise ValueError(
            "there is a schedule and no optimizer: pass one to thinwire.initialize, or give the configuration an "
            '"optimizer" section, for example {"type": "AdamW", "params": {"lr": 1e-4}}'
        )
    if recipe is not None and recipe.elastic and given.training_data is not None:
        refuse_elastic_data()
    return recipe


def load_settings(find: Callable[[], ConfigSource], comm: Communicator) -> EngineConfig:
    """The configuration that `find` returns, the same on every rank. Collective; raises ConfigError on every rank."""
    settings = on_every_rank(comm, lambda: load_config(find(), comm.size), "load its configuration", BAD_INPUT)
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
    model: nn.Module, recipe: Recipe | None, comm: Communicator, device: torch.device, settings: EngineConfig
) -> torch.device:
    """Put the model into its precision and on the device that is returned, with rank 0's values of what no optimizer
    holds: an optimizer gives its parameters to all ranks itself. A model that ranks hold together is alike before."""
    held = set() if recipe is None or settings.ranks_of_a_model > 1 else recipe.trains()
    if settings.ranks_of_a_model == 1 or settings.tensor_parallel.autotp_size > 1:  # a DTensor stays as it is cut
        Precision.of(settings).convert(model, held)
    if device.type == "meta":
        return values_device(comm)
    if comm.backend == "nccl" and device.type == "cpu":
        device = values_device(comm)
        model.to(device)
    others = [one for one in model.parameters() if not (id(one) in held or is_sharded(one))]
    broadcast_from_rank_0(comm, [*others, *model.buffers()])
    return device


def _plug_in(
    model: nn.Module, settings: EngineConfig, comm: Communicator, undo: ExitStack
) -> tuple[ActivationCheckpoints | None, LayerDropping | None]:
    """Change the model as its configuration asks; `undo` changes it back."""
    if settings.sparse_attention is not None:
        change_attention = partial(put_in_sparse_attention, model, settings.sparse_attention)
        on_every_rank(comm, change_attention, "plug in its attention", BAD_INPUT)
        undo.callback(densify, model)
    if settings.fast_encoder:
        on_every_rank(comm, partial(fast_encoder.accelerate, model), "do without padding", BAD_INPUT)
        undo.callback(fast_encoder.undo, model)
    if (how := settings.quantized_training) is not None:
        on_every_rank(comm, partial(rounding_in_training.prepare_qat, model, how), "round its layers", BAD_INPUT)
        undo.callback(rounding_in_training.undo_qat, model)
    recomputed = layer_drop = None
    if (section := settings.activation_checkpointing).modules:
        change = partial(checkpoint_activations, model, section.modules, cpu_checkpointing=section.cpu_checkpointing)
        recomputed = on_every_rank(comm, change, "recompute its activations", BAD_INPUT)
        undo.callback(recomputed.restore)
    if (dropping := settings.progressive_layer_drop).enabled:
        change_layers = partial(LayerDropping, model, dropping, total_steps(settings), settings.seed)
        layer_drop = on_every_rank(comm, change_layers, "drop its layers", BAD_INPUT)
        undo.callback(layer_drop.remove)
    return recomputed, layer_drop


def _say_at_start(comm: Communicator, settings: EngineConfig, given: Given, passed_over: int) -> None:
    """Say what of the configuration, and how many of `model_parameters`, have no effect."""
    if not comm.speaks:
        return
    lines = [settings.remarks.line()]
    for name, section, passed, kind in (
        ("optimizer", settings.optimizer, given.optimizer, torch.optim.Optimizer),
        ("scheduler", settings.scheduler, given.lr_scheduler, LRScheduler),
    ):
        if section is not None and passed is not None:
            own = type(passed).__name__
            who = f"the {own}" if isinstance(passed, kind) else f"the function {getattr(passed, '__name__', own)}"
            lines.append(
                f'{who}, passed to initialize, is used in place of "{section.type}" in the configuration\'s "{name}" '
                "section"
            )
    if passed_over:
        lines.append(f"{passed_over} of model_parameters are not trained: the optimizer passed beside them lacks them")
    for line in filter(None, lines):
        print(f"thinwire: {line}", file=sys.stderr, flush=True)
