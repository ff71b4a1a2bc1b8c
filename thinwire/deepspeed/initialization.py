"""The calls that a DeepSpeed script begins with, translated to thinwire's."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from thinwire import comm as communication
from thinwire.deepspeed.lazy_names import NotOfferedError, not_offered
from thinwire.deepspeed.refusals import check_buckets, check_dtypes, check_optimizer
from thinwire.deepspeed.runtime.engine import DeepSpeedEngine
from thinwire.deepspeed.usage_error import DeepSpeedUsageError
from thinwire.engine import ConfigError
from thinwire.engine.config.json_file import read_json_object
from thinwire.engine.initialization import Given, build_engine, load_settings

__all__ = ["add_config_arguments", "init_inference", "initialize"]

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
) -> tuple[DeepSpeedEngine, Any, Any, Any]:
    """`deepspeed.initialize`: returns (engine, optimizer, data loader, schedule). Collective.

    The arguments are DeepSpeed's, in its order. `args` may have `deepspeed_config`, `config_params` is another name of
    `config`. The ranks meet as they were launched, so that `distributed_port` and `dist_init_required` are not needed.

    Raises NotOfferedError, a NotImplementedError, for an `mpu` with model parallelism, for `mesh_param`, and at stage 0
    for gradients that add up in another dtype than the model's, which DeepSpeed refuses too; TypeError for any other
    argument; DeepSpeedUsageError, which is a ValueError and an AssertionError, for arguments that cannot work together;
    ZeRORuntimeException, a RuntimeError, for a torch optimizer over offloaded state where
    `zero_force_ds_cpu_optimizer` is true; and else what `thinwire.initialize` raises.
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
    given = Given(model, optimizer, model_parameters, training_data, lr_scheduler, collate_fn)
    comm = communication.init()
    settings = load_settings(None, config, None, comm)
    tree = _tree(config)
    check_optimizer(settings, tree, optimizer)
    check_dtypes(settings, tree)
    check_buckets(settings, tree)
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


def _tree(config: Any) -> Mapping[str, Any]:
    """A configuration as it was written."""
    return config if isinstance(config, Mapping) else read_json_object(Path(config))
