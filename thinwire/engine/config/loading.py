"""A configuration, read within bounds and either complete and able to work, or refused with everything that is wrong.

A dialect, if one is registered, first puts another library's keys and spellings into the words of the models.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from thinwire.engine.checkpoint.files import NotAFileError, open_file
from thinwire.engine.config.errors import AUTO, ConfigError, dotted, left_auto, section_of, shown, validated
from thinwire.engine.config.models import EngineConfig, Remarks
from thinwire.engine.config.rules import check_combinations, settle_idle_keys
from thinwire.engine.config.sections import check_optimizer, check_scheduler
from thinwire.lazy_imports import provided
from thinwire.optim.settings import LARGEST_NUMBER

BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def parts_of_a_model(tree: Mapping[str, Any]) -> tuple[int, int]:
    """Stages of a pipeline, and ranks that share a layer, by the sections of `tree`; 1 for what is no size there."""
    found = [(tree.get("pipeline"), "stages"), (tree.get("tensor_parallel"), "autotp_size")]
    sizes = [section.get(key) if isinstance(section, Mapping) else None for section, key in found]
    stages, cut = (size if type(size) is int and size > 0 else 1 for size in sizes)
    return stages, cut


def count_replicas(tree: Mapping[str, Any], world_size: int) -> int:
    """Replicas of the model on `world_size` ranks. Raises ConfigError where they do not multiply out."""
    stages, cut = parts_of_a_model(tree)
    replicas, rest = divmod(world_size, stages * cut)
    if rest:
        near = [count * stages * cut for count in (replicas, replicas + 1) if count]
        raise ConfigError(
            f'"pipeline.stages" {stages} x "tensor_parallel.autotp_size" {cut} = {stages * cut} ranks hold a model, '
            f"and {_ranks(world_size)} are no multiple of that: start {' or '.join(map(str, near))}, or change one of "
            "the two"
        )
    return replicas


def complete_batch_sizes(
    train: int | None, micro: int | None, accumulation: int | None, world_size: int
) -> tuple[int, int, int]:
    """All three of `BATCH_KEYS` from those that are given, each at least 1, on `world_size` ranks.

    Two give the third. `train` or `micro` alone means one forward a step.

    Raises ConfigError where neither is given, or where they do not multiply out.
    """
    if train is not None and micro is not None:
        if accumulation is None:
            accumulation = _divide(train, micro, BATCH_KEYS[1], world_size, "accumulation steps")
        elif train != micro * accumulation * world_size:
            raise ConfigError(_conflict(train, micro, accumulation, world_size))
        return train, micro, accumulation
    forwards = accumulation or 1
    if train is not None:
        return train, _divide(train, forwards, BATCH_KEYS[2], world_size, "samples a micro-batch"), forwards
    if micro is not None:
        return micro * forwards * world_size, micro, forwards
    raise ConfigError(
        "the batch size is missing: give train_batch_size or train_micro_batch_size_per_gpu"
        + (" beside gradient_accumulation_steps" if accumulation is not None else "")
    )


def resized(
    config: EngineConfig, world_size: int, train_batch_size: int | None = None, micro_batch_size: int | None = None
) -> EngineConfig:
    """The configuration with another batch, by its micro-batches, or with other micro-batches, as many as before.

    Raises ValueError for what is no size, or no multiple of a micro-batch on every rank.
    """
    for name, size in (("train_batch_size", train_batch_size), ("micro_batch_size", micro_batch_size)):
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise ValueError(f"{name} is a whole number of samples, at least 1, not {size!r}")
    if micro_batch_size is None:
        sizes = complete_batch_sizes(train_batch_size, config.train_micro_batch_size_per_gpu, None, world_size)
    else:
        sizes = complete_batch_sizes(None, micro_batch_size, config.gradient_accumulation_steps, world_size)
    return config.model_copy(update=dict(zip(BATCH_KEYS, sizes, strict=True)))


def _divide(train: int, factor: int, factor_key: str, world_size: int, quotient: str) -> int:
    unit = factor * world_size
    if train % unit == 0:
        return train // unit
    below, above = train // unit * unit, (train // unit + 1) * unit
    nearest = f"{below} or {above}" if below else f"{above}"
    raise ConfigError(
        f"train_batch_size {train} is not a multiple of {factor_key} {factor} x {_ranks(world_size)} = {unit}, which "
        f"would make {train / unit:.4g} {quotient}: the nearest train_batch_size that works is {nearest}"
    )


def _conflict(train: int, micro: int, accumulation: int, world_size: int) -> str:
    product = micro * accumulation * world_size
    ways = [f"train_batch_size {product}"]
    if train % (micro * world_size) == 0:
        ways.append(f"gradient_accumulation_steps {train // (micro * world_size)}")
    if train % (accumulation * world_size) == 0:
        ways.append(f"train_micro_batch_size_per_gpu {train // (accumulation * world_size)}")
    return (
        f"train_batch_size {train} is not train_micro_batch_size_per_gpu {micro} x gradient_accumulation_steps "
        f"{accumulation} x {_ranks(world_size)} = {product}: give two of the three, or one of " + ", ".join(ways)
    )


def _ranks(world_size: int) -> str:
    return "1 rank" if world_size == 1 else f"{world_size} ranks"


DEEPEST = 16
"""Objects and lists inside one another; a configuration has four."""

_LARGEST_FILE = 1 << 20
_MOST_ENTRIES = 1 << 16
_MOST_BITS_SHOWN = 160
_NO_TEXT = re.compile("[\0\ud800-\udfff]")
# "auto" is a value like others there.
_AUTO_VALUES = ("progressive_layer_drop.gamma", "optimizer.params", "scheduler.params", "sparse_attention")


@dataclass
class Notes:
    """Findings of a dialect: `problems`; `without_effect`, what happens whatever the value is, by the path of each key;
    `unlisted`, paths of all keys that the dialect knows and the models do not."""

    problems: list[str] = field(default_factory=list)
    without_effect: dict[str, str] = field(default_factory=dict)
    unlisted: frozenset[str] = frozenset()


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


def read_json_object(path: Path) -> Mapping[str, Any]:
    """The object that the file holds.

    Raises ConfigError for a file that cannot be read, is larger than 1 MiB, is not JSON, nests too deeply, or holds
    something else than an object. A FIFO or a device is no file, and not waited for.
    """
    dialect = _dialect()
    try:
        text = _read(path)
        tree = json.loads(text) if dialect is None else dialect.read(text)
    except (ValueError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(str(error), str(path)) from None
    if not isinstance(tree, dict):
        raise ConfigError(f"must hold a JSON object, {{...}}, not a {type(tree).__name__}", str(path))
    return tree


def respelled(tree: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    """A copy of `tree` in today's spellings."""
    dialect = _dialect()
    found: dict[str, Any] = dict(tree) if dialect is None else dialect.respell(tree, problems)
    return found


def check_limits(tree: Mapping[Any, Any], source: str) -> None:
    """Raise ConfigError, naming the key, for a value of `tree` that is nested too deeply, too large a number, too long,
    no text, or another collection than a list: what reads it later would fail on it without naming the key."""
    _check(tree, "", source, 1)


def _load(tree: Mapping[str, Any], world_size: int, label: str) -> EngineConfig:
    check_limits(tree, label)
    dialect, notes = _dialect(), Notes()
    given = dict(tree) if dialect is None else dialect.translate(tree, notes)
    problems = notes.problems
    given = _meant(given, "", EngineConfig, problems)
    if isinstance(section := given.get("optimizer"), Mapping):
        given["optimizer"] = check_optimizer(section, problems, notes.unlisted)
    if isinstance(section := given.get("scheduler"), Mapping):
        given["scheduler"] = check_scheduler(section, problems, notes.unlisted)
    _fill_batch_sizes(given, world_size, problems)
    config = validated(EngineConfig, given, "", problems, unlisted=notes.unlisted)
    if config is not None:
        config = settle_idle_keys(config, notes.without_effect)
        problems += check_combinations(config)
    if problems or config is None:
        raise ConfigError(problems, label)
    unclipped, schedule = "gradient_clipping" not in config.model_fields_set, config.scheduler
    rises = schedule is not None and schedule.type in ("WarmupLR", "WarmupDecayLR")
    own_peak = rises and schedule is not None and schedule.params.get("warmup_max_lr") is None
    return config.with_remarks(Remarks(notes.without_effect, unclipped, own_peak))


def _dialect() -> Any:
    """The module that translates another library's configurations, None without one: `read` gives the content of a
    file, `respell` a copy of a tree in today's spellings, `translate` that without keys that have no effect."""
    return provided("dialect of configurations")


def _meant(tree: Mapping[str, Any], prefix: str, model: type[BaseModel], problems: list[str]) -> dict[str, Any]:
    """A copy of `tree` without null sections, and without "auto" where it is no value, which joins `problems`."""
    kept: dict[str, Any] = {}
    for key, value in tree.items():
        path = dotted(prefix, str(key))
        field = model.model_fields.get(key) if isinstance(key, str) else None
        section = None if field is None else section_of(field)
        if isinstance(value, str) and value == "auto" and not path.startswith(_AUTO_VALUES) and field is not None:
            problems.append(
                left_auto(path)
                if path in AUTO
                else f'"{path}" cannot be "auto": write the value, or delete the key for the default'
            )
        elif section is not None and isinstance(value, Mapping):
            kept[key] = _meant(value, path, section, problems)
        elif section is None or value is not None:
            kept[key] = value
    return kept


def _fill_batch_sizes(tree: dict[str, Any], world_size: int, problems: list[str]) -> None:
    """Puts the sizes that follow into `tree`; where one is no positive number, the model is left to say so."""
    given = [tree.get(key) for key in BATCH_KEYS]
    sizes = (1, 1, 1)
    if all(size is None or _is_positive(size) for size in given):
        try:
            train, micro, accumulation = (None if size is None else int(size) for size in given)
            split = "pipeline" in tree or "tensor_parallel" in tree
            replicas = count_replicas(tree, world_size) if split else world_size
            sizes = complete_batch_sizes(train, micro, accumulation, replicas)
        except ConfigError as error:
            problems.extend(error.problems)
    for key, size in zip(BATCH_KEYS, sizes, strict=True):
        if tree.get(key) is None:
            tree[key] = size


def _is_positive(size: Any) -> bool:
    return isinstance(size, int | float) and not isinstance(size, bool) and size >= 1 and float(size).is_integer()


def _read(path: Path) -> str:
    try:
        with os.fdopen(open_file(path), "rb") as file:
            content = file.read(_LARGEST_FILE + 1)
    except NotAFileError as error:
        raise ConfigError(
            "cannot be read: it is a folder, a pipe or a device. Give the path of a file, and write what comes through "
            "a pipe to one first",
            str(path),
        ) from error
    except (OSError, ValueError) as error:  # a ValueError for a path that holds a null character
        raise ConfigError(f"cannot be read: {getattr(error, 'strerror', None) or error}", str(path)) from error
    if len(content) > _LARGEST_FILE:
        raise ConfigError("is larger than 1 MiB: a configuration takes a few KB; is this the right file?", str(path))
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"is not UTF-8 text, at byte {error.start}", str(path)) from error


def _check(value: Any, path: str, source: str, depth: int) -> None:
    if isinstance(value, int) and not -LARGEST_NUMBER <= value < LARGEST_NUMBER:
        # A number of many bits cannot even be written out.
        text = shown(value) if value.bit_length() <= _MOST_BITS_SHOWN else f"one of more than {_MOST_BITS_SHOWN} bits"
        raise ConfigError(f'"{path}" must be a number of at most 64 bits, got {text}', source)
    if isinstance(value, str) and _NO_TEXT.search(value):
        raise ConfigError(
            f'"{path}" must be text, which has no null character and no half of a pair of surrogates, got '
            f"{shown(value)}",
            source,
        )
    if not isinstance(value, Mapping | list | tuple):
        if isinstance(value, Iterable) and not isinstance(value, str | bytes):
            raise ConfigError(f'"{path}" must be a list, where it holds several values, got {shown(value)}', source)
        return
    if depth > DEEPEST:
        raise ConfigError(f'"{path}" is nested more than {DEEPEST} deep: nothing in a configuration is', source)
    if len(value) > _MOST_ENTRIES:
        where = f'"{path}"' if path else "it"
        raise ConfigError(f"{where} has {len(value):,} entries, and may have {_MOST_ENTRIES:,}", source)
    entries = value.items() if isinstance(value, Mapping) else [("", entry) for entry in value]
    for key, entry in entries:
        inside = dotted(path, key if isinstance(key, str) else shown(key))
        if isinstance(key, str):
            _check(key, inside, source, depth)
        _check(entry, inside, source, depth + 1)
