"""The calls that a DeepSpeed script begins with, translated to thinwire's, and what DeepSpeed refuses there: the same
errors, which scripts catch."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.optimizer import ParamsT

from thinwire import comm as communication
from thinwire.comm import Communicator
from thinwire.comm.agreement import on_every_rank
from thinwire.deepspeed.engine import DeepSpeedEngine, TrainingEngine
from thinwire.deepspeed.errors import DeepSpeedUsageError, NotOfferedError
from thinwire.deepspeed.optimizers import DeepSpeedCPUAdam, FusedLion
from thinwire.deepspeed.parameters.sharded import mark_configured
from thinwire.deepspeed.pipe import loss_of, with_stages
from thinwire.deepspeed.ranks import init_distributed, is_initialized
from thinwire.deepspeed.sections import ZeRORuntimeException
from thinwire.engine import ConfigError, EngineConfig
from thinwire.engine.config.loading import read_json_object
from thinwire.engine.config.models import FloatName
from thinwire.engine.data import ResumableLoader
from thinwire.engine.initialization import BAD_INPUT, ConfigSource, Given, build_engine, load_settings
from thinwire.engine.parts import Loss
from thinwire.engine.recipe import GivenOptimizer, GivenSchedule
from thinwire.zero.synchronized_optimizer import SynchronizedOptimizer

_TESTED = ("torch.", "thinwire.")
_ALIGNMENT = 2  # elements: fp16 values that fill 4 bytes, at which NCCL likes to begin
_FLOAT_NAME: TypeAdapter[str | None] = TypeAdapter(FloatName | None)


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
    loss_fn: Loss | None = None,
    comm: Communicator | None = None,
) -> tuple[TrainingEngine, SynchronizedOptimizer | None, ResumableLoader | None, LRScheduler | None]:
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
        mpu: None: the configuration says over which ranks a model is split.
        dist_init_required: changes nothing: a torch process group is made where one is needed and there is none.
        collate_fn: makes a batch of samples, as in torch.utils.data.DataLoader.
        config: the path of a JSON file, or a dict.
        mesh_param: None, as mpu.
        config_params: the old name of `config`.
        loss_fn: of a model's outputs and a batch's targets, for `train_batch` and a pipeline of an nn.Sequential.
        comm: a Communicator; by default `thinwire.comm.init()` finds out how the process was launched.

    Raises ValueError (ConfigError is one) or TypeError, on every rank, for what cannot work.
    """
    comm = comm if comm is not None else communication.init()
    on_every_rank(comm, lambda: _check_foreign(distributed_port, mpu, mesh_param), "take its arguments", BAD_INPUT)
    path = getattr(args, "thinwire_config", None) or getattr(args, "deepspeed_config", None)
    named = {"`config`": config, "`config_params`, its old name": config_params, "one on the command line": path}
    settings = load_settings(lambda: with_stages(_only(named, ""), model, comm.size), comm)
    loss = loss_of(model, loss_fn)
    given = Given(model, optimizer, model_parameters, training_data, lr_scheduler, collate_fn, loss)
    mark_configured(model, settings.zero_optimization.leaf_module)
    return build_engine(TrainingEngine, given, settings, comm)


def initialize_as_deepspeed(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Any = None,
    **others: Any,
) -> tuple[DeepSpeedEngine, Any, Any, Any]:
    """`deepspeed.initialize`: returns (engine, optimizer, data loader, schedule). Collective.

    The arguments are DeepSpeed's, in its order. `args` may have `deepspeed_config`, `config_params` is another name of
    `config`. The ranks meet as they were launched, so that `distributed_port` is not needed; `dist_init_required` False
    demands that they have met. In 16 bits master weights begin as what the model computes with, as DeepSpeed's do.

    Raises NotOfferedError, a NotImplementedError, for an `mpu` with model parallelism, for `mesh_param`, and at stage 0
    for gradients that add up in another dtype than the model's, which DeepSpeed refuses too; TypeError for any other
    argument; DeepSpeedUsageError, which is a ValueError and an AssertionError, for arguments that cannot work together;
    ZeRORuntimeException, a RuntimeError, for a torch optimizer over offloaded state where
    `zero_force_ds_cpu_optimizer` is true; and else what `thinwire.initialize` raises.
    """
    named = {"config": config, "config_params": others.pop("config_params", None)}
    named |= {f"args.{name}": getattr(args, name, None) for name in ("deepspeed_config", "deepscale_config")}
    config = _only(named, ", or --deepspeed_config on the command line")
    if others.pop("mesh_param", None) is not None:
        raise NotOfferedError("thinwire has no sequence parallelism: leave mesh_param out")
    if others:
        raise TypeError(f"initialize() got an unexpected keyword argument {next(iter(others))!r}")
    if mpu is not None and mpu.get_model_parallel_world_size() > 1:
        raise NotOfferedError(
            f"the mpu splits the model among {mpu.get_model_parallel_world_size()} ranks, and thinwire splits it by "
            'itself: leave mpu out, and give the configuration "tensor_parallel" or "pipeline"'
        )
    if not isinstance(model, nn.Module):
        raise DeepSpeedUsageError(
            f"initialize() needs a model, a torch.nn.Module, got {type(model).__name__}: pass it as model=; the first "
            "argument is args, the command line's"
        )
    if dist_init_required is False and not is_initialized():
        init_distributed(dist_init_required=False)
    given = Given(model, optimizer, model_parameters, training_data, lr_scheduler, collate_fn, loss_of(model))
    comm = communication.init()
    settings = load_settings(lambda: with_stages(config, model, comm.size), comm)
    tree = config if isinstance(config, Mapping) else read_json_object(Path(config))
    _refuse_as_deepspeed(settings, tree, optimizer)
    _round_as_deepspeed(model, settings)
    mark_configured(model, settings.zero_optimization.leaf_module)
    try:
        return build_engine(DeepSpeedEngine, given, settings, comm)
    except ValueError as error:
        if type(error) is not ValueError:
            raise
        raise DeepSpeedUsageError(str(error)) from error


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """`deepspeed.add_config_arguments`: `--deepspeed` and `--deepspeed_config`, as DeepSpeed's scripts read them."""
    group = parser.add_argument_group("DeepSpeed", "thinwire's engine, by DeepSpeed's names")
    group.add_argument("--deepspeed", action="store_true", help="for the script's own use; nothing else reads it")
    group.add_argument("--deepspeed_config", help="the configuration, a JSON file with DeepSpeed's keys")
    group.add_argument("--deepscale", action="store_true", help="an old name of --deepspeed")
    group.add_argument("--deepscale_config", help="an old name of --deepspeed_config")
    return parser


def _only(named: Mapping[str, Any], how: str) -> Any:
    """The one configuration that is given, of those that may be; `how` to give one."""
    given = {name: value for name, value in named.items() if value is not None}
    if len(given) > 1:
        raise ConfigError(f"there are two configurations, {' and '.join(given)}: remove one")
    if not given:
        raise ConfigError(f"there is none: pass the path of a JSON file, or a dict, as `config`{how}")
    return next(iter(given.values()))


@torch.no_grad()
def _round_as_deepspeed(model: nn.Module, settings: EngineConfig) -> None:
    """Have master weights begin as what the model computes with, in 16 bits, as DeepSpeed's do."""
    half = torch.float16 if settings.fp16.enabled else torch.bfloat16 if settings.bf16.enabled else None
    for one in model.parameters() if half is not None else ():
        if one.dtype in (torch.float32, torch.float64):
            one.copy_(one.to(half))


def _refuse_as_deepspeed(settings: EngineConfig, tree: Mapping[str, Any], optimizer: Any) -> None:
    """Refuse what DeepSpeed does, of a configuration as it was written, and a client's optimizer beside it."""
    section = tree.get("zero_optimization")
    zero, stage = section if isinstance(section, Mapping) else {}, settings.zero_optimization.stage
    if isinstance(optimizer, torch.optim.Optimizer):
        name = type(optimizer).__name__
        allows = tree.get("zero_allow_untested_optimizer")
        sharded = section.get("stage") if isinstance(section, Mapping) else section
        is_tested = type(optimizer).__module__.startswith(_TESTED)
        if not is_tested and isinstance(allows, int) and not allows and sharded:
            raise DeepSpeedUsageError(
                f'"zero_allow_untested_optimizer" is false, and {name} is none of torch\'s: delete the key where the '
                "class steps every element by itself, as any elementwise optimizer can be sharded"
            )
        offloads = settings.zero_optimization.offload_optimizer.device != "none"
        forced = tree.get("zero_force_ds_cpu_optimizer") is True
        if offloads and forced and not isinstance(optimizer, DeepSpeedCPUAdam | FusedLion):
            raise ZeRORuntimeException(
                f'"zero_force_ds_cpu_optimizer" is true, and {name} is not DeepSpeedCPUAdam: delete the key, as '
                "offloaded state is stepped by torch's own optimizer here, or name the optimizer in the configuration"
            )
    data_types = tree.get("data_types")
    given = data_types.get("grad_accum_dtype") if isinstance(data_types, Mapping) else None
    wanted = _FLOAT_NAME.validate_python(given)
    model = "fp16" if settings.fp16.enabled else "bf16" if settings.bf16.enabled else "fp32"
    if stage == 0 and wanted not in (None, model):
        raise NotOfferedError(
            f'"data_types.grad_accum_dtype" is {wanted!r}, and the model computes in {model}: DeepSpeed has no '
            "optimizer for both at stage 0, and neither has its door here. Delete the key, use zero_optimization stage "
            "1, or thinwire.initialize, which adds up in fp32 at stage 0 too"
        )
    if not settings.managed_gradient_accumulation and stage < 2 and zero.get("overlap_comm") is True:
        raise DeepSpeedUsageError(
            '"managed_gradient_accumulation" is false, which supports overlap_comm only with ZeRO stage 2 and above, '
            f"and the stage is {stage}: delete one of the two"
        )
    size = zero.get("allgather_bucket_size")
    if stage in (1, 2) and isinstance(size, int) and size % _ALIGNMENT:
        raise DeepSpeedUsageError(
            f'"zero_optimization.allgather_bucket_size" is {size}: allgather_bucket_size must be a multiple of '
            f"nccl_start_alignment_factor, {_ALIGNMENT}. Delete the key: weights are gathered in the buckets of "
            "reduce_bucket_size"
        )


def _check_foreign(port: object, mpu: object, mesh_param: object) -> None:
    """Raise for arguments of DeepSpeed's that would change something here and cannot."""
    if port is not None and (isinstance(port, bool) or not isinstance(port, int)):
        raise TypeError(f"distributed_port is a number or None, not {port!r}; ranks meet where their launcher says")
    for name, value in (("mpu", mpu), ("mesh_param", mesh_param)):
        if value is not None:
            raise ValueError(
                f"{name} is an object of another library's, and thinwire splits models by itself: leave it out, and "
                'give the configuration "tensor_parallel" or "pipeline", or the ranks that hold the same part of a '
                "model as `comm`, a Communicator's split()"
            )
