"""The engine's configuration of a run: a DeepSpeed-style file on top of what the command line says."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from experiments.common.errors import InputError
from experiments.training.optimizers import COMPRESSED, ENGINE, FREEZE_OPTIONS, OPTIMIZERS, engine_section
from thinwire.engine import ConfigError, EngineConfig, load_config

__all__ = ["COMPARED", "EngineSettings", "load"]

COMPARED = ("adamw", "onebit-adam")
"""What is trained where nobody says otherwise."""

_BATCH_KEYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")

_SAME: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("zero", ("zero_optimization", "stage")),
    ("lr", ("optimizer", "params", "lr")),
    ("weight_decay", ("optimizer", "params", "weight_decay")),
    *(("freeze_step", ("optimizer", "params", option)) for option in FREEZE_OPTIONS),
    ("batch_size", ("train_micro_batch_size_per_gpu",)),
    ("seed", ("seed",)),
)
"""Options, and the keys of a file that say the same."""

_DECIDED_BY_SCHEDULER = ("lr", "warmup_steps")


class EngineSettings:
    """Configurations for `thinwire.initialize`, one an optimizer, that differ in the optimizer only."""

    def __init__(self, options: argparse.Namespace, default_freeze_step: int) -> None:
        """Takes the command line: `config`, a path or None, and options that are None where they were not given.

        Raises:
            InputError: the file cannot be used, or says other than the command line.
        """
        self.file = {} if options.config is None else _read(options.config)
        _refuse_contradictions(options, self.file)
        self._options = options
        self._default_freeze_step = default_freeze_step
        self.optimizers = self._choose_optimizers()

    @property
    def scheduled(self) -> bool:
        """Whether the file decides the learning rates."""
        return self.file.get("scheduler") is not None

    def config(self, optimizer: str) -> dict[str, Any]:
        """The configuration of one of `ENGINE`, as the engine takes it."""
        given = self._options
        ours: dict[str, Any] = {
            "optimizer": engine_section(
                optimizer,
                _first(given.lr, 1e-3),
                _first(given.freeze_step, self._default_freeze_step),
                weight_decay=_first(given.weight_decay, 0.01),
            ),
            "zero_optimization": {"stage": _first(given.zero, 1)},
            "seed": _first(given.seed, 0),
        }
        if all(self.file.get(key) in (None, "auto") for key in _BATCH_KEYS[:2]):
            ours["train_micro_batch_size_per_gpu"] = _first(given.batch_size, 16)
        return _overlaid(ours, self.file)

    def check(self, optimizer: str) -> EngineConfig:
        """The loaded configuration, but for batch sizes, which depend on the number of ranks.

        Raises:
            InputError: the engine refuses it; with its reasons.
        """
        config = {key: value for key, value in self.config(optimizer).items() if key not in _BATCH_KEYS}
        return load(config | {"train_micro_batch_size_per_gpu": 1}, 1)

    def _choose_optimizers(self) -> tuple[str, ...]:
        asked = self._options.optimizer and tuple(dict.fromkeys(self._options.optimizer))
        section = self.file.get("optimizer")
        if isinstance(section, Mapping) and "type" in section:
            types = {name: OPTIMIZERS[name].class_name for name in ENGINE}
            found = [name for name, kind in types.items() if kind.lower() == str(section["type"]).lower()]
            if not found:
                raise InputError(
                    f'--config: this trains with {" or ".join(types.values())}, and "optimizer.type" is '
                    f'"{section["type"]}": change it, or delete the section'
                )
            if asked not in (None, tuple(found)):
                raise InputError(
                    f'--optimizer {" ".join(asked)} and "optimizer.type" "{section["type"]}" in --config disagree: '
                    "leave one of them out"
                )
            return tuple(found)
        if asked:
            return asked
        # What a stage does not shard is refused there only where it is asked for.
        stage = self.check("adamw").zero_optimization.stage
        return tuple(name for name in COMPARED if name not in COMPRESSED or stage in COMPRESSED[name].stages)


def load(config: Mapping[str, Any], ranks: int) -> EngineConfig:
    """The engine's `load_config`, whose complaints are about what the user gave.

    Raises:
        InputError: instead of ConfigError.
    """
    try:
        return load_config(config, ranks)
    except ConfigError as error:
        raise InputError(str(error)) from error


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"--config {path} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise InputError(f"--config {path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise InputError(f"--config {path} must hold a JSON object, not a {type(content).__name__}")
    return content


def _refuse_contradictions(options: argparse.Namespace, file: Mapping[str, Any]) -> None:
    for option, path in _SAME:
        given, found = getattr(options, option), _look_up(file, path)
        if None not in (given, found) and found not in (given, "auto"):
            _refuse(option, given, f'"{".".join(path)}" {json.dumps(found)}')
    if options.batch_size is not None and file.get("train_batch_size") not in (None, "auto"):
        _refuse("batch_size", options.batch_size, f'"train_batch_size" {file["train_batch_size"]}, which decides it')
    if file.get("scheduler") is not None:
        for option in _DECIDED_BY_SCHEDULER:
            if getattr(options, option) is not None:
                _refuse(option, getattr(options, option), 'a "scheduler", which decides the learning rates')


def _refuse(option: str, given: Any, found: str) -> None:
    raise InputError(f"--{option.replace('_', '-')} {given} was given, and --config has {found}: leave one of them out")


def _look_up(tree: Any, path: tuple[str, ...]) -> Any:
    for key in path:
        if not isinstance(tree, Mapping):
            return None
        tree = tree.get(key)
    return tree


def _overlaid(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> dict[str, Any]:
    """`ours` with the keys of `theirs` in their places, sections merged; "auto" leaves ours."""
    merged = dict(ours)
    for key, value in theirs.items():
        if isinstance(value, Mapping) and isinstance(merged.get(key), Mapping):
            merged[key] = _overlaid(merged[key], value)
        elif value != "auto" or key not in ours:
            merged[key] = value
    return merged


def _first(given: Any, default: Any) -> Any:
    return default if given is None else given
