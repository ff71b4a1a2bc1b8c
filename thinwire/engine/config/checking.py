"""`thinwire config check`: a file loaded as a job would load it, and a table of what it sets.

An "auto" for Hugging Face's Trainer is told as such, with what the Trainer writes there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from thinwire.engine.config.errors import AUTO, ConfigError, dotted, shown
from thinwire.engine.config.loading import load_config, parts_of_a_model, read_json_object
from thinwire.engine.config.models import OWN_PEAK, UNCLIPPED, EngineConfig, Remarks
from thinwire.engine.config.options import SCHEDULES
from thinwire.engine.config.sections import options_of
from thinwire.engine.errors import printable

_BATCH_SIZES = {"train_batch_size": None, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 1}
# Follows from the length of the data: as long as any, so that other steps fit into it.
_TOTAL_STEPS, _ANY_NUMBER_OF_STEPS = "scheduler.params.total_num_steps", 10**9
# The defaults of transformers' TrainingArguments; what is None the Trainer leaves to the engine.
_FILLED: Mapping[str, Any] = {
    **dict.fromkeys(AUTO),
    **_BATCH_SIZES,
    "gradient_clipping": 1.0,
    "fp16.enabled": False,
    "bf16.enabled": False,
    "optimizer.params.lr": 5e-5,
    "optimizer.params.weight_decay": 0.0,
    "optimizer.params.betas": [0.9, 0.999],
    "optimizer.params.eps": 1e-8,
    "scheduler.params.warmup_min_lr": 0.0,
    "scheduler.params.warmup_max_lr": 5e-5,
    "scheduler.params.warmup_num_steps": 0,
    _TOTAL_STEPS: _ANY_NUMBER_OF_STEPS,
}
_SECTIONS = {path[:end] for path in _FILLED for end in range(len(path)) if path[end] == "."}


def check_file(path: Path, world_size: int | None) -> int:
    """Print what the file sets on `world_size` ranks, or everything that is wrong with it; 0 or 1.

    None: as many ranks as its three batch sizes ask for, or one.
    """
    try:
        tree, filled = _fill_as_trainer(read_json_object(path))
        ranks = world_size if world_size is not None else _ranks_asked_for(tree)
        config = load_config(tree, ranks)
    except ConfigError as error:
        print(printable(f"{path} cannot train:"))
        for problem in error.told:
            print(f"- {problem}" if problem.endswith(("?", ".")) else f"- {problem}.")
        return 1
    print(printable(f"{path} can train:"))
    if filled:
        told = ", ".join(sorted(path + default for path, default in filled.items()))
        print(
            printable(
                '- Filled in by Hugging Face\'s Trainer, as they are "auto", and shown here with the defaults of its '
                f"TrainingArguments where they have one: {told}. Without a Trainer, write the values"
            )
        )
    if (schedule := config.scheduler) is not None and _TOTAL_STEPS in filled:
        schedule = schedule.model_copy(update={"params": {**schedule.params, "total_num_steps": "auto"}})
    rows = list(_rows(config.model_copy(update={"scheduler": schedule}), ranks))
    width = max(len(key) for key, _ in rows)
    for key, value in rows:
        print(printable(f"  {key:<{width}}  {value}"))
    for sentence in _remarks(config.remarks):
        print(printable(f"- {sentence}"))
    return 0


def _rows(config: EngineConfig, world_size: int) -> Iterator[tuple[str, str]]:
    """(key, its value in words) for each key or section that is on, defaults included."""
    forwards, micro = config.gradient_accumulation_steps, config.train_micro_batch_size_per_gpu
    replicas = world_size // config.ranks_of_a_model
    ranks = "1 rank" if world_size == 1 else f"{world_size} ranks" if replicas == world_size else f"{replicas} replicas"
    yield "train_batch_size", f"{config.train_batch_size} samples a step: {forwards} x {micro} on each of {ranks}"
    for key, value in config.describe().items():
        if key in ("pipeline", "tensor_parallel") and config.ranks_of_a_model == 1:
            continue
        if key in ("optimizer", "scheduler") and value is not None:
            yield key, _named(value)
        elif isinstance(value, dict) and value.get("enabled", True):
            told = _values({name: one for name, one in value.items() if name != "enabled"})
            yield key, told or "on"
        elif not isinstance(value, dict) and value is not None and value is not False and key not in _BATCH_SIZES:
            yield key, shown(value)


def _named(section: Mapping[str, Any]) -> str:
    """The optimizer or schedule of a section, with all that it is given."""
    params = dict(section["params"])
    inner = params.pop("inner", None)
    options = SCHEDULES.get(section["type"]) or options_of(section["type"])
    fields = {} if options is None else options.model_fields
    defaults = {
        name: field.default for name, field in fields.items() if field.description is None and not field.is_required()
    }
    around = f", around {_named(inner)}" if inner is not None else ""
    return f"{section['type']}: {_values(defaults | params)}{around}"


def _values(options: Mapping[str, Any]) -> str:
    told = []
    for name, value in options.items():
        if isinstance(value, dict):
            if value.get("device") != "none":
                told.append(f"{name} {{{_values(value)}}}")
        elif value not in (None, []):
            told.append(f"{name} {shown(value)}")
    return ", ".join(told)


def _remarks(remarks: Remarks) -> Iterator[str]:
    if remarks.unclipped:
        yield f"{UNCLIPPED}."
    if remarks.own_peak:
        yield f"{OWN_PEAK}."
    for path, why in remarks.without_effect.items():
        yield f'No effect: "{path}". Whatever it says, {why}.'


def _ranks_asked_for(tree: Mapping[str, Any]) -> int:
    train, *factors = (size if isinstance(size := tree.get(key), int) and size > 0 else 0 for key in _BATCH_SIZES)
    product = factors[0] * factors[1]
    replicas = train // product if product and train and train % product == 0 else 1
    return replicas * math.prod(parts_of_a_model(tree))


def _fill_as_trainer(tree: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """`tree` with TrainingArguments' defaults for every "auto" that the Trainer fills in, and these by their paths, in
    words; an empty one where it leaves the value to the engine. An "auto" that the Trainer does not know stays."""
    # Where one is a number, the others follow from it.
    all_open = all(tree.get(key, "auto") == "auto" for key in _BATCH_SIZES)
    told: dict[str, str] = {}

    def fill(section: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        filled: dict[str, Any] = {}
        for key, value in section.items():
            path = dotted(prefix, key)
            if isinstance(value, Mapping) and path in _SECTIONS:
                filled[key] = fill(value, path)
            elif value != "auto" or path not in _FILLED:
                filled[key] = value
            else:
                default = None if path in _BATCH_SIZES and not all_open else _FILLED[path]
                told[path] = "" if default in (None, _ANY_NUMBER_OF_STEPS) else f" {shown(default)}"
                if default is not None:
                    filled[key] = default
        return filled

    return fill(tree, ""), told
