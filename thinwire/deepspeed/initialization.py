"""The calls that a DeepSpeed script begins with, translated to thinwire's."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from thinwire import comm as communication
from thinwire import engine
from thinwire.comm import threads
from thinwire.deepspeed.lazy_names import NotOfferedError, not_offered
from thinwire.deepspeed.usage_error import DeepSpeedUsageError
from thinwire.engine import ConfigError, Engine
from thinwire.engine.config.json_file import read_json_object

__all__ = ["add_config_arguments", "init_distributed", "init_inference", "initialize"]

_TESTED = ("torch.", "thinwire.")
_HALF_AN_HOUR = timedelta(minutes=30)
_BACKENDS = {"ccl": "gloo", "hccl": "gloo"}
"""Those of DeepSpeed's for devices that thinwire moves bytes to by another."""

init_inference = not_offered(
    "init_inference", "thinwire trains; serve the weights of engine.save_16bit_model() with transformers or vLLM"
)


def initialize(
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
) -> tuple[Engine, Any, Any, Any]:
    """`deepspeed.initialize`: returns (engine, optimizer, data loader, schedule). Collective.

    The arguments are DeepSpeed's, in its order. `args` may have `deepspeed_config`, `config_params` is another name of
    `config`. The ranks meet as they were launched, so that `distributed_port` and `dist_init_required` are not needed.

    Raises NotOfferedError for an `mpu` with model parallelism and for `mesh_param`, TypeError for any other argument,
    DeepSpeedUsageError, which is a ValueError and an AssertionError, for arguments that cannot work together, and
    else what `thinwire.initialize` raises.
    """
    config = _only_configuration(args, config, others.pop("config_params", None))
    if others.pop("mesh_param", None) is not None:
        raise NotOfferedError("thinwire has no sequence parallelism: leave mesh_param out")
    if others:
        raise TypeError(f"initialize() got an unexpected keyword argument {next(iter(others))!r}")
    if mpu is not None and mpu.get_model_parallel_world_size() > 1:
        raise NotOfferedError(
            f"the mpu splits the model among {mpu.get_model_parallel_world_size()} ranks, and thinwire has data "
            "parallelism and ZeRO only: leave mpu out, and shard the model with zero_optimization stage 3"
        )
    if not isinstance(model, nn.Module):
        raise DeepSpeedUsageError(
            f"initialize() needs a model, a torch.nn.Module, got {type(model).__name__}: pass it as model=; the first "
            "argument is args, the command line's"
        )
    _check_tested(optimizer, config)
    try:
        return engine.initialize(
            model=model,
            optimizer=optimizer,
            model_parameters=model_parameters,
            training_data=training_data,
            lr_scheduler=lr_scheduler,
            collate_fn=collate_fn,
            config=config,
        )
    except ValueError as error:
        if type(error) is not ValueError:
            raise
        raise DeepSpeedUsageError(str(error)) from error


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: timedelta | None = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """`deepspeed.init_distributed`: have the ranks meet, and torch.distributed initialised. Collective.

    Whatever launched the processes is recognised, MPI too, so that `auto_mpi_discovery`, `distributed_port` and
    `config` are not needed; `init_method`, `rank` and `world_size` go to torch. A second call does nothing.

    Raises DeepSpeedUsageError for `dist_init_required` False where nothing is initialised.
    """
    if dist.is_initialized() or threads.current() is not None:
        return
    if dist_init_required is False:
        raise DeepSpeedUsageError(
            "dist_init_required is False, and torch.distributed is not initialised: call "
            "torch.distributed.init_process_group() before, or leave dist_init_required out"
        )
    limit = _HALF_AN_HOUR if timeout is None else timeout
    backend = _BACKENDS.get(dist_backend or "", dist_backend) or ("nccl" if torch.cuda.is_available() else "gloo")
    if init_method is not None:
        dist.init_process_group(backend, init_method=init_method, rank=rank, world_size=world_size, timeout=limit)
    else:
        communication.init(backend, timeout=limit.total_seconds(), quiet=not verbose)  # type: ignore[arg-type]


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """`deepspeed.add_config_arguments`: `--deepspeed` and `--deepspeed_config`, as DeepSpeed's scripts read them."""
    group = parser.add_argument_group("DeepSpeed", "thinwire's engine, by DeepSpeed's names")
    group.add_argument("--deepspeed", action="store_true", help="for the script's own use; nothing else reads it")
    group.add_argument("--deepspeed_config", help="the configuration, a JSON file with DeepSpeed's keys")
    group.add_argument("--deepscale", action="store_true", help="an old name of --deepspeed")
    group.add_argument("--deepscale_config", help="an old name of --deepspeed_config")
    return parser


def _only_configuration(args: Any, config: Any, params: Any) -> Any:
    """The one that is given: as an argument, by an old argument, on the command line."""
    named = {
        "config": config,
        "config_params": params,
        **{f"args.{name}": getattr(args, name, None) for name in ("deepspeed_config", "deepscale_config")},
    }
    given = {name: value for name, value in named.items() if value is not None}
    if len(given) > 1:
        raise ConfigError(f"there are two configurations, {' and '.join(given)}: remove one")
    if not given:
        raise ConfigError(
            "there is none: pass the path of a JSON file, or a dict, as config, or --deepspeed_config on the command "
            "line"
        )
    return next(iter(given.values()))


def _check_tested(optimizer: Any, config: Any) -> None:
    """Refuse what "zero_allow_untested_optimizer": false refuses: sharding a client's class that is not torch's."""
    if not isinstance(optimizer, torch.optim.Optimizer) or type(optimizer).__module__.startswith(_TESTED):
        return
    tree = config if isinstance(config, Mapping) else read_json_object(Path(config))
    zero = tree.get("zero_optimization")
    sharded = zero.get("stage") if isinstance(zero, Mapping) else zero
    allows = tree.get("zero_allow_untested_optimizer")
    if isinstance(allows, int) and not allows and sharded:
        raise DeepSpeedUsageError(
            f'"zero_allow_untested_optimizer" is false, and {type(optimizer).__name__} is none of torch\'s: delete the '
            "key where the class steps every element by itself, as any elementwise optimizer can be sharded"
        )
