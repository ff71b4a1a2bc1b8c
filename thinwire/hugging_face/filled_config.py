"""The engine's configuration under a Trainer: what it leaves out or has as "auto" is what TrainingArguments say, and
what it says otherwise than they do is told, all at once."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from thinwire.engine.config import ConfigError, EngineConfig, load_config
from thinwire.engine.config.errors import AUTO, expected, shown
from thinwire.engine.config.loading import check_limits, read_json_object, respelled
from thinwire.engine.config.sections import is_local_updates, options_of, with_lr_inside

# Kinds of schedule by the engine's names: TrainingArguments' name for the same, and the parameters that they decide.
_SCHEDULES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "WarmupLR": ("constant_with_warmup", ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps")),
    "WarmupDecayLR": ("linear", ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps")),
    "WarmupCosineLR": ("cosine", ("warmup_num_steps", "total_num_steps")),
}
_DEFAULT_SCHEDULE = "linear"
_DEFAULT_OPTIMIZERS = ("adamw_torch", "adamw_torch_fused")

_AUTO_OF_LOCAL_UPDATES = frozenset({"fragments", "nodes"})

_STEPS_UNTIL_KNOWN = 10**9

_WITHOUT_EFFECT = {
    "keep_last": (None, "the Trainer deletes old checkpoints: use save_total_limit"),
    "async_save": (False, "the Trainer deletes and loads checkpoints without waiting for one that is being written"),
}


class TrainerConfig:
    """A configuration for the engine that a Trainer drives, from the path of a JSON file or a dict.

    Raises ConfigError for a file that cannot be read or nests without end, TypeError for what is neither.
    """

    def __init__(self, source: str | os.PathLike[str] | Mapping[str, Any]) -> None:
        if isinstance(source, str | os.PathLike):
            self._tree, self._label = read_json_object(Path(source)), str(source)
        elif isinstance(source, Mapping):
            self._tree, self._label = source, "thinwire_config"
        else:
            raise TypeError(
                f"thinwire_config takes the path of a JSON file or a dict, got {type(source).__name__}: see the "
                "engine's keys in docs/guides/engine.md"
            )
        check_limits(self._tree, self._label)

    @property
    def names_optimizer(self) -> bool:
        """Whether it has an "optimizer" section."""
        return self._tree.get("optimizer") is not None

    @property
    def names_schedule(self) -> bool:
        """Whether it has a "scheduler" section."""
        return self._tree.get("scheduler") is not None

    def complete(self, arguments: Any, total_steps: int | None) -> EngineConfig:
        """The whole configuration under these TrainingArguments.

        `total_steps`: of the training; None while it is not known: then what follows from it is a placeholder.

        Raises ConfigError with every contradiction, and all else that is wrong with it.
        """
        misspelt: list[str] = []
        filling = _Filling(copy.deepcopy(respelled(self._tree, misspelt)), arguments)
        filling.refuse_parts(self._label)
        filling.problems += misspelt
        filling.fill_sizes()
        filling.fill_optimizer()
        filling.fill_schedule(total_steps)
        filling.check_checkpoints()
        problems = filling.problems
        try:
            config = load_config(filling.tree, arguments.world_size)
        except ConfigError as error:
            problems += error.problems
        if problems:
            raise ConfigError(problems, self._label)
        return config


class _Filling:
    """A configuration being completed; what contradicts joins `problems`."""

    def __init__(self, tree: dict[str, Any], arguments: Any) -> None:
        self.tree = tree
        self.problems: list[str] = []
        self._arguments = arguments

    def refuse_parts(self, label: str) -> None:
        """Raise ConfigError for a model that ranks hold together, to each of whom a Trainer gives other samples."""
        for name, key in (("pipeline", "stages"), ("tensor_parallel", "autotp_size")):
            size = (self._section([name]) or {}).get(key)
            if isinstance(size, int) and size > 1:
                raise ConfigError(
                    f'"{name}.{key}" is {size}, and a Trainer runs a whole model on every rank, of samples of its own: '
                    f'delete "{name}", and use zero_optimization stage 3 for a model that is too large for a rank, or '
                    "train with thinwire.initialize and engine.train_batch()",
                    label,
                )

    def fill_sizes(self) -> None:
        """Batch sizes, clipping, precision, seed; and the default for what only the engine knows."""
        given = self._arguments
        micro, accumulation = given.per_device_train_batch_size, given.gradient_accumulation_steps
        self._fill("train_micro_batch_size_per_gpu", micro, "per_device_train_batch_size")
        self._fill("gradient_accumulation_steps", accumulation, "gradient_accumulation_steps")
        product = "per_device_train_batch_size x gradient_accumulation_steps x ranks"
        self._fill("train_batch_size", micro * accumulation * given.world_size, product)
        self._fill("gradient_clipping", given.max_grad_norm, "max_grad_norm")
        self._fill("fp16.enabled", bool(given.fp16), "fp16")
        self._fill("bf16.enabled", bool(given.bf16), "bf16")
        self._fill("seed", given.seed, "seed")
        self._fill("dataloader_drop_last", bool(given.dataloader_drop_last), "dataloader_drop_last")
        for path in AUTO:
            *parents, key = path.split(".")
            section = self._section(parents)
            if section is not None and _is_auto(section.get(key)):
                del section[key]

    def fill_optimizer(self) -> None:
        """The optimizer's parameters that TrainingArguments have, where the file names an optimizer."""
        section, given = self._section(["optimizer"]), self._arguments
        if section is None or not isinstance(section.get("type"), str):
            return
        kind = section["type"]
        if str(given.optim.value) not in _DEFAULT_OPTIMIZERS or given.optim_args:
            self.problems.append(
                f'"optimizer.type" is {shown(kind)}, and TrainingArguments have optim={shown(given.optim.value)} and '
                f"optim_args={shown(given.optim_args)}: name the optimizer once"
            )
        values = {"lr": (given.learning_rate, "learning_rate"), "weight_decay": (given.weight_decay, "weight_decay")}
        where = "optimizer.params"
        if is_local_updates(kind):
            kind = self._inner_kind()
            where += ".inner.params"
        taken, own_autos = _parameters_of(kind)
        # TrainingArguments have those of the family of Adam; Muon's are of what AdamW steps beside it.
        if {"betas", "eps"} <= taken and "momentum" not in taken:
            if "omega" not in taken:  # quasi-hyperbolic, with a momentum that is far slower than AdamW's
                values["betas"] = [given.adam_beta1, given.adam_beta2], "adam_beta1, adam_beta2"
            values["eps"] = given.adam_epsilon, "adam_epsilon"
        for name, (value, argument) in values.items():
            if name in taken:
                self._fill(f"{where}.{name}", value, argument)
        self._refuse_what_is_left(where, own_autos)
        if where != "optimizer.params":
            self._refuse_what_is_left("optimizer.params", _AUTO_OF_LOCAL_UPDATES)

    def fill_schedule(self, total_steps: int | None) -> None:
        """The schedule's parameters that TrainingArguments have, where the file names a schedule."""
        section, given = self._section(["scheduler"]), self._arguments
        if section is None or not isinstance(section.get("type"), str):
            return
        kind, asked = section["type"], str(given.lr_scheduler_type.value)
        same, parameters = _SCHEDULES.get(kind, (None, ()))
        if asked not in (_DEFAULT_SCHEDULE, same) or given.lr_scheduler_kwargs:
            self.problems.append(
                f'"scheduler.type" is {shown(kind)}, and TrainingArguments have lr_scheduler_type={shown(asked)} and '
                f"lr_scheduler_kwargs={shown(given.lr_scheduler_kwargs)}: name the schedule once"
            )
        if "warmup_num_steps" not in parameters and given.warmup_steps:
            self.problems.append(
                f'"scheduler.type" {shown(kind)} has no use for warmup_steps={given.warmup_steps}, which the arguments '
                f"have: leave them out, or use one of {', '.join(_SCHEDULES)}"
            )
        if "warmup_max_lr" in parameters:
            params = section.setdefault("params", {})
            if isinstance(params, dict) and _is_open(params.get("warmup_min_lr")):
                params["warmup_min_lr"] = 0.0  # TrainingArguments' schedules all begin there
            self._fill("scheduler.params.warmup_max_lr", given.learning_rate, "learning_rate")
        steps = _STEPS_UNTIL_KNOWN if total_steps is None else total_steps
        known = {
            "total_num_steps": (steps, "the number of steps that follows from them", total_steps is not None),
            "warmup_num_steps": (
                given.get_warmup_steps(steps),
                "warmup_steps",
                total_steps is not None or given.warmup_steps >= 1 or not given.warmup_steps,
            ),
        }
        for name, (value, argument, compare) in known.items():
            if name in parameters:
                self._fill(f"scheduler.params.{name}", value, argument, compare)
        self._refuse_what_is_left("scheduler.params", frozenset())

    def check_checkpoints(self) -> None:
        """Refuse how the engine keeps checkpoints by itself."""
        section = self._section(["checkpoint"]) or {}
        for key, (default, instead) in _WITHOUT_EFFECT.items():
            if section.get(key, default) != default:
                self.problems.append(f'"checkpoint.{key}" does not go with a Trainer: {instead}')

    def _fill(self, path: str, value: Any, argument: str, compare: bool = True) -> None:
        *parents, key = path.split(".")
        section = self._section(parents, make=True)
        if section is None:
            return
        found = section.get(key)
        if _is_open(found):
            section[key] = value
        elif compare and (list(found) if isinstance(found, tuple) else found) != value:
            self.problems.append(
                f'"{path}" is {shown(found)}, and {argument} of TrainingArguments {shown(value)}: give both the same, '
                'or leave it to them with "auto"'
            )

    def _section(self, parents: list[str], make: bool = False) -> dict[str, Any] | None:
        """The object under these keys, one's own to change; None where there is none, or something else."""
        tree: Any = self.tree
        for parent in parents:
            if make and tree.get(parent) is None:
                tree[parent] = {}
            if not isinstance(tree.get(parent), Mapping):
                return None
            tree[parent] = dict(tree[parent])
            tree = tree[parent]
        found: dict[str, Any] = tree
        return found

    def _inner_kind(self) -> str:
        """The optimizer inside local updates, whose rate is with its other parameters from here on."""
        params = with_lr_inside(self._section(["optimizer", "params"], make=True) or {}, self.problems)
        self.tree["optimizer"]["params"] = params
        kind = params["inner"]["type"] if params["inner"] is not None else None
        return kind if isinstance(kind, str) else ""

    def _refuse_what_is_left(self, section: str, own: frozenset[str]) -> None:
        params = self._section(section.split("."))
        for name in [name for name, value in (params or {}).items() if _is_auto(value) and name not in own]:
            assert params is not None
            del params[name]
            self.problems.append(
                f'"{section}.{name}" is "auto", and TrainingArguments have nothing that it could be: write the '
                "value, or delete the key for the default"
            )


def _parameters_of(kind: str) -> tuple[frozenset[str], frozenset[str]]:
    """The parameters of an optimizer that a configuration names, in any case, none of an unknown one; and those of
    which "auto" is a value like others."""
    options = options_of(kind)
    fields = {} if options is None else options.model_fields
    return frozenset(fields), frozenset(name for name, field in fields.items() if '"auto"' in expected(field))


def _is_auto(value: Any) -> bool:
    return isinstance(value, str) and value == "auto"


def _is_open(value: Any) -> bool:
    return value is None or _is_auto(value)
