"""`thinwire config check`: a file loaded as a job would load it, and a table of what it sets.

An "auto" for Hugging Face's Trainer is told as such, with what the Trainer writes there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from thinwire.engine.config.errors import AUTO, ConfigError, shown
from thinwire.engine.config.loading import load_config, read_json_object
from thinwire.engine.config.models import OWN_PEAK, UNCLIPPED, EngineConfig, Remarks
from thinwire.engine.config.options import SCHEDULES
from thinwire.engine.config.sections import options_of
from thinwire.engine.errors import printable

_BATCH_SIZES = {"train_batch_size": None, "train_micro_batch_size_per_gpu": 8, "gradient_accumulation_steps": 1}
# The defaults of transformers' TrainingArguments; what is not here the Trainer leaves to the engine.
_DEFAULTS: Mapping[str, Any] = {
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
}
# Follows from the length of the data: as long as any, so that other steps fit into it.
_TOTAL_STEPS = "scheduler.params.total_num_steps"
_ANY_NUMBER_OF_STEPS = 10**9


def check_file(path: Path, world_size: int | None) -> int:
    """Print what the file sets on `world_size` ranks, or everything that is wrong with it; 0 or 1.

    None: as many ranks as its three batch sizes ask for, or one.
    """
    try:
        given = read_json_object(path)
        tree, left_open = _fill_as_trainer(given)
        ranks = world_size if world_size is not None else _ranks_asked_for(tree)
        config = load_config(tree, ranks)
    except ConfigError as error:
        print(printable(f"{path} cannot train:"))
        for problem in error.told:
            print(f"- {problem}" if problem.endswith(("?", ".")) else f"- {problem}.")
        return 1
    print(printable(f"{path} can train:"))
    for sentence in left_open:
        print(printable(f"- {sentence}"))
    if (schedule := config.scheduler) is not None:
        schedule = schedule.model_copy(update={"params": _show_as_auto(given, schedule.params)})
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
    ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
    yield "train_batch_size", f"{config.train_batch_size} samples a step: {forwards} x {micro} on each of {ranks}"
    for key, value in config.describe().items():
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
    return train // product if product and train and train % product == 0 else 1


def _fill_as_trainer(tree: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """`tree` with TrainingArguments' defaults for every "auto" that the Trainer fills in, and a sentence that says so.

    No sentence where there is none. An "auto" that the Trainer does not know stays.
    """
    filled: dict[str, Any] = dict(tree)
    sizes = {key: tree[key] for key in _BATCH_SIZES if key in tree}
    # Where one is a number, the others follow from it.
    all_open = all(_is_auto(size) for size in sizes.values())
    told = []
    for path in (*AUTO, *_DEFAULTS, _TOTAL_STEPS):
        *parents, key = path.split(".")
        section = _own_section(filled, parents, path)
        if section is None:
            continue
        value = _DEFAULTS.get(path)
        if path in _BATCH_SIZES:
            value = _BATCH_SIZES[path] if all_open else None
        elif path == _TOTAL_STEPS:
            value = _ANY_NUMBER_OF_STEPS
        del section[key]
        if value is not None:
            section[key] = value
        plain = value is not None and path != _TOTAL_STEPS
        told.append(f"{path} {shown(value)}" if plain else path)
    if not told:
        return filled, []
    return filled, [
        'Filled in by Hugging Face\'s Trainer, as they are "auto", and shown here with the defaults of its '
        f"TrainingArguments where they have one: {', '.join(sorted(set(told)))}. Without a Trainer, write the values"
    ]


def _show_as_auto(tree: Mapping[str, Any], params: Mapping[str, Any]) -> dict[str, Any]:
    """A schedule's `params` as `tree` has them, where the Trainer alone knows the value."""
    section = tree.get("scheduler")
    given = section.get("params") if isinstance(section, Mapping) else None
    name = _TOTAL_STEPS.rpartition(".")[2]
    return {**params, name: "auto"} if isinstance(given, Mapping) and _is_auto(given.get(name)) else dict(params)


def _own_section(tree: dict[str, Any], parents: list[str], path: str) -> dict[str, Any] | None:
    """The object under these keys, copied so that it can be changed; None where the value at `path` is no "auto"."""
    found: Any = tree
    for key in parents:
        found = found.get(key) if isinstance(found, Mapping) else None
    if not isinstance(found, Mapping) or not _is_auto(found.get(path.rpartition(".")[2])):
        return None
    section = tree
    for key in parents:
        section[key] = dict(section[key])
        section = section[key]
    return section


def _is_auto(value: Any) -> bool:
    return isinstance(value, str) and value == "auto"
