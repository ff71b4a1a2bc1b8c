"""Reads a configuration and either returns one that can work, complete, or says everything that is wrong with it.
DeepSpeed's users bring their files as they are; what in them changes nothing is listed, and nothing else is ignored."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from thinwire.engine.config.batch import complete_batch_sizes
from thinwire.engine.config.errors import ConfigError
from thinwire.engine.config.idle import settle_idle_keys, take_idle_size
from thinwire.engine.config.json_file import read_json_object
from thinwire.engine.config.keys import keep_known_keys
from thinwire.engine.config.limits import check_limits
from thinwire.engine.config.models import EngineConfig
from thinwire.engine.config.old_spellings import respell
from thinwire.engine.config.optimizer import check_optimizer
from thinwire.engine.config.remarks import Remarks
from thinwire.engine.config.rules import check_combinations
from thinwire.engine.config.scheduler import check_scheduler
from thinwire.engine.config.types import explain

__all__ = ["load_config"]

_BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def load_config(source: str | os.PathLike[str] | Mapping[str, Any] | EngineConfig, world_size: int) -> EngineConfig:
    """The configuration in `source` (the path of a JSON file, a dict, or one already loaded) for `world_size` ranks.

    Local: ranks that may read different files have to agree on the outcome.

    Raises ConfigError, with every problem in one message: an unknown key or one that thinwire does not support, a wrong
    type or range, sizes that do not multiply out, options that exclude each other, a file that is not a JSON object.
    """
    if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
        raise ConfigError(f"world_size must be a whole number of ranks, at least 1, got {world_size!r}")
    if isinstance(source, EngineConfig):
        return _load(source.describe(), world_size, "the configuration").with_remarks(source.remarks)
    if isinstance(source, Mapping):
        return _load(source, world_size, "the configuration")
    if isinstance(source, str | os.PathLike):
        return _load(read_json_object(Path(source)), world_size, str(source))
    raise ConfigError(f"a configuration is the path of a JSON file or a dict, not {type(source).__name__}")


def _load(tree: Mapping[str, Any], world_size: int, label: str) -> EngineConfig:
    check_limits(tree, label)
    problems: list[str] = []
    without_effect: dict[str, str] = {}
    tree = keep_known_keys(respell(tree, problems), without_effect, problems)
    if isinstance(section := tree.get("optimizer"), Mapping):
        tree["optimizer"] = check_optimizer(section, problems, _stage(tree), without_effect)
    if isinstance(section := tree.get("scheduler"), Mapping):
        tree["scheduler"] = check_scheduler(section, problems)
    take_idle_size(tree, without_effect, problems)
    _fill_batch_sizes(tree, world_size, problems)
    try:
        config = EngineConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(problems + explain(error), label) from None
    config = settle_idle_keys(config, without_effect)
    problems += check_combinations(config)
    if problems:
        raise ConfigError(problems, label)
    unclipped = "gradient_clipping" not in config.model_fields_set
    return config.with_remarks(Remarks(without_effect, unclipped, own_peak=_leaves_peak_open(config)))


def _leaves_peak_open(config: EngineConfig) -> bool:
    schedule = config.scheduler
    return (
        schedule is not None
        and schedule.type in ("WarmupLR", "WarmupDecayLR")
        and schedule.params.get("warmup_max_lr") is None
    )


def _stage(tree: Mapping[str, Any]) -> Any:
    """ZeRO's, as it was given: it has not been checked yet."""
    section = tree.get("zero_optimization")
    return section.get("stage", 0) if isinstance(section, Mapping) else 0


def _fill_batch_sizes(tree: dict[str, Any], world_size: int, problems: list[str]) -> None:
    """Puts the sizes that follow into `tree`; where one is no positive number, the model is left to say so."""
    train, micro, accumulation = (tree.get(key) for key in _BATCH_KEYS)
    sizes = (1, 1, 1)
    if all(size is None or _is_positive(size) for size in (train, micro, accumulation)):
        try:
            found = complete_batch_sizes(_whole(train), _whole(micro), _whole(accumulation), world_size)
            sizes = (found.train, found.micro, found.accumulation)
        except ConfigError as error:
            problems.extend(error.problems)
    for key, size in zip(_BATCH_KEYS, sizes, strict=True):
        if tree.get(key) is None:
            tree[key] = size


def _is_positive(size: Any) -> bool:
    return isinstance(size, int | float) and not isinstance(size, bool) and size >= 1 and float(size).is_integer()


def _whole(size: Any) -> int | None:
    return None if size is None else int(size)
