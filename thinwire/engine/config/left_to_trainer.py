"""The "auto" of files for Hugging Face's Trainer: what it writes there, for those who read such a file without one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from thinwire.engine.config.errors import shown
from thinwire.engine.config.keys import AUTO

__all__ = ["fill_as_trainer", "show_as_auto"]

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


def fill_as_trainer(tree: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
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


def show_as_auto(tree: Mapping[str, Any], params: Mapping[str, Any]) -> dict[str, Any]:
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
