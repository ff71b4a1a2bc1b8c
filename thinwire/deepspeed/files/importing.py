"""`thinwire checkpoint import`: a checkpoint of DeepSpeed's becomes one that any number of ranks load at any stage."""

from __future__ import annotations

import argparse
import inspect
import secrets
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from thinwire.comm import threads
from thinwire.comm.errors import first_fault
from thinwire.deepspeed.files.fields import (
    ClassByName,
    Configuration,
    LossScale,
    ModelFile,
    OptimizerFile,
    OptimizerState,
    ScheduleFile,
)
from thinwire.deepspeed.files.model_files import DeepSpeedFiles, ModelFiles, find_files, find_tag
from thinwire.deepspeed.files.pickles import Reader, Record, read_apart
from thinwire.deepspeed.files.sharded_state import read_sharded, read_universal, stage_of, universal_files
from thinwire.deepspeed.files.unsharded_state import read_unsharded
from thinwire.engine.checkpoint.client_state import ClientState, pack_client_state
from thinwire.engine.checkpoint.folder import CheckpointFolder
from thinwire.engine.checkpoint.store import CheckpointStore, Snapshot
from thinwire.engine.errors import CheckpointError, UsageError, printable
from thinwire.engine.saved_job import SavedJob, json_part
from thinwire.optim import registry

_ALONE_SECONDS = 3600.0
_WORK = "import"
_COUNTERS = ("global_steps", "global_samples", "skipped_steps")


@dataclass
class Imported:
    """What became of a checkpoint: its `path`, the parameters it has, and `notes` of what could not be taken over."""

    path: Path
    parameters: int
    optimizer: str | None
    notes: list[str] = field(default_factory=list)


def import_checkpoint(
    folder: Path,
    output: Path,
    tag: str | None = None,
    *,
    optimizer: str | None = None,
    scheduler: str | None = None,
    weights_only: bool = False,
    read: Reader = read_apart,
) -> Imported:
    """Write DeepSpeed's checkpoint `folder`/`tag`, the one that `latest` names without a tag, to `output`/`tag`.

    Args:
        folder: where DeepSpeed's save_checkpoint wrote.
        output: where this engine's load_checkpoint will read; made if need be.
        tag: one of the folders in `folder`.
        optimizer: the class that its state is for, where DeepSpeed's configuration does not say.
        scheduler: likewise of the schedule.
        weights_only: leave the optimizer's state out.
        read: reads the pickles; by default a process of its own does.

    Tensors are maps of temporary files in `output`, as large as the checkpoint: they are gone at the end.

    Raises UsageError where there is no such checkpoint, CheckpointError where it cannot be imported, naming the file.
    """
    source = find_tag(folder, tag)
    if folder.absolute() == output.absolute():
        raise UsageError(f"{output} holds the checkpoint that is imported: give another folder with --output")
    files = find_files(source)
    with _work_folder(output) as (work, problems):
        model, state = _read(files, work, read, weights_only)
        try:
            imported, snapshot = _snapshot(model, state, optimizer, scheduler, weights_only)
        except ValidationError as error:
            raise CheckpointError(f"{source} holds values that no job goes on from: {first_fault(error)}") from None
        imported.path = output / source.name
        imported.notes += problems
        store = CheckpointStore(output, threads.single(_ALONE_SECONDS))
        try:
            saved = store.save(source.name, snapshot)
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"{source} is not whole: {error}") from error
        if not saved:
            raise CheckpointError(f"{imported.path} could not be written: a warning above says why")
    return imported


@contextmanager
def _work_folder(output: Path) -> Iterator[tuple[Path, list[str]]]:
    """A folder in `output` until the end, and what could not be cleared up there. As a save's own it is told from one
    that was killed, which the next import or save removes."""
    folder, nonce = CheckpointFolder(output), secrets.token_hex(4)
    claim, problems = folder.prepare(_WORK, nonce, _ALONE_SECONDS)
    try:
        yield folder.hidden(_WORK, nonce), problems
    finally:
        claim.release()
        folder.discard(_WORK, nonce)


def _read(files: DeepSpeedFiles, work: Path, read: Reader, weights_only: bool) -> tuple[ModelFiles, OptimizerState]:
    """The model and its optimizer; each of the two readings has a folder of its own."""
    parts = [work / "first", work / "second"]
    for part in parts:
        part.mkdir()
    contents = read([*files.models, *files.optimizers], parts[0])
    count = len(files.models)
    models = [ModelFile.of(path, one) for path, one in zip(files.models, contents[:count], strict=True)]
    optimizers = [OptimizerFile.of(path, one) for path, one in zip(files.optimizers, contents[count:], strict=True)]
    sharded = files.models[0].name.startswith(("zero_pp", "bf16_zero_pp", "fp16_zero_pp"))
    model = ModelFiles.read(models, sharded)
    if sharded and files.optimizers and len(models) != len(optimizers):
        raise CheckpointError(
            f"{files.folder} holds model files of {len(models)} ranks and optimizer files of {len(optimizers)}: some "
            "are missing, or of another save"
        )
    if files.universal is not None:
        found = universal_files(model, files.universal)
        return model, read_universal(model, found, read(list(found.values()), parts[1]))
    if optimizers:
        stage = stage_of(optimizers)
        if (stage == 3) != sharded:
            raise CheckpointError(f"{files.folder} holds optimizer files of stage {stage} and model files of another")
        return model, read_sharded(model, optimizers, stage)
    if model.groups is not None:
        raise CheckpointError(
            f"{files.folder} holds no optimizer files, zero_pp_rank_*_optim_states.pt, though it was saved with ZeRO: "
            "they hold the fp32 weights and the optimizer's state"
        )
    return model, OptimizerState() if weights_only else read_unsharded(model)


def _snapshot(
    model: ModelFiles, state: OptimizerState, optimizer: str | None, scheduler: str | None, weights_only: bool
) -> tuple[Imported, Snapshot]:
    description = model.description()
    first = model.files[0]
    config = first.ds_config or Configuration()
    imported = Imported(Path(), len(description.parameters), None)
    slices = [*model.other_weights(), *_weights_too(state, model)]
    counters: dict[str, Any] | None = None
    if not weights_only:
        counters, why = optimizer_counters(state.groups, config, optimizer)
        if counters is None:
            imported.notes.append(
                f"the optimizer's state is left out: {why}. Load with load_optimizer_states=False, or import again "
                "with the class that it is for, --optimizer AdamW say"
            )
        else:
            imported.optimizer = counters["optimizer"]
    if counters is None:
        slices = [one for one in slices if one.kind in ("weight", "master")]
        counters = {"optimizer": "none", "groups": []}
    schedule = schedule_of(first, scheduler)
    if schedule is None and first.lr_scheduler is not None:
        imported.notes.append("the schedule's state is left out: DeepSpeed's configuration names none. Use --scheduler")
    client = _client_state(model, imported.notes)
    held = {name for group in model.groups or () for name in group}
    shared = SavedJob.plain(
        progress={name: getattr(first, name) for name in _COUNTERS},
        optimizer=counters,
        schedule=schedule,
        loss_scale=loss_scale_of(state.loss_scale, first.path.parent),
        data=None,
        client_state=client.plain,
        client_values=client.special,
        tied={alias: name for alias, name in model.tied.items() if name in description.parameters},
        frozen=[name for name in description.parameters if name not in held] if held else [],
    )
    return imported, Snapshot(
        slices, description, rank_tensors=client.tensors, shared=shared, buffers=dict(model.buffers)
    )


# Of a parameter group: beside what a class takes by name, what schedules put there.
_OF_SCHEDULES = frozenset({"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum"})
_DEEPSPEEDS_SCHEDULES = frozenset({"LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR"})
_OF_ADAM = frozenset({"betas", "eps", "weight_decay"})


def optimizer_counters(
    groups: Sequence[Mapping[str, Any]], config: Configuration, asked_for: str | None
) -> tuple[dict[str, Any] | None, str]:
    """What an optimizer of this engine takes up as its counters, and why: None where the class cannot be told.

    `asked_for`: the class by name, instead of what DeepSpeed's configuration and the groups themselves say.
    """
    section = config.optimizer or ClassByName()
    name, why = asked_for, "as asked for"
    if name is None and section.type is not None:
        by_lower = {one.lower(): one for one in (*dir(torch.optim), *registry.NAMES) if one[:1].isupper()}
        name = by_lower.get(section.type.lower(), section.type)
        why = f'DeepSpeed\'s configuration says "{section.type}"'
    if name is None and groups:
        why = "the settings of its parameter groups are that class's"
        if groups[0].keys() >= _OF_ADAM:
            name = "AdamW" if groups[0].get("decoupled_weight_decay", True) else "Adam"
        elif "momentum" in groups[0] and "nesterov" in groups[0]:
            name = "SGD"
    if name is None:
        return None, "neither DeepSpeed's configuration nor the parameter groups say of which class"
    if name in registry.NAMES:
        return None, f"{name} keeps another state than DeepSpeed's, and begins anew from the weights"
    decoupled = (section.params or {}).get("adam_w_mode", True)
    return {"optimizer": name, "groups": [_settings(name, one, decoupled) for one in groups]}, why


def schedule_of(file: ModelFile, asked_for: str | None) -> dict[str, Any] | None:
    """A schedule's class and state; None where there is none, or its class cannot be told."""
    state, section = file.lr_scheduler, (file.ds_config or Configuration()).scheduler
    name = asked_for if asked_for is not None or section is None else section.type
    if state is None or name is None:
        return None
    if name in _DEEPSPEEDS_SCHEDULES:
        # DeepSpeed counts steps from -1.
        last = ScheduleFile.of(file.path, {"lr_scheduler": state}).lr_scheduler.last_batch_iteration
        return {"type": name, "state": {"last_epoch": last + 1}}
    return {"type": name, "state": _plain(state)}


def loss_scale_of(scale: LossScale | None, where: Path) -> dict[str, Any] | None:
    """The state of a dynamic loss scale; None where it is fixed, or there is none. Raises CheckpointError for one that
    cannot be."""
    if scale is None or not (scale.dynamic_loss_scale if scale.dynamic is None else scale.dynamic):
        return None
    if scale.cur_scale is None or scale.cur_scale <= 0:
        raise CheckpointError(f"{where} holds a loss scale of {scale.cur_scale}: a number above 0 was expected")
    state = {
        "value": scale.cur_scale,
        "steps_without_overflow": max(0, scale.cur_iter - 1 - scale.last_overflow_iter),
    }
    if scale.cur_hysteresis is not None:
        state["forbearance"] = max(0, scale.cur_hysteresis)
    return state


def _settings(name: str, group: Mapping[str, Any], decoupled: Any) -> dict[str, Any]:
    """A group's settings that the class has, as plain values."""
    optimizer = getattr(torch.optim, name, None)
    known: Collection[str] = group.keys()
    if isinstance(optimizer, type):
        known = set(inspect.signature(optimizer).parameters) | _OF_SCHEDULES
    settings = {key: _plain(value) for key, value in group.items() if key in known and key != "params"}
    if name in ("Adam", "AdamW"):
        settings["decoupled_weight_decay"] = bool(group.get("decoupled_weight_decay", decoupled or name == "AdamW"))
    # Where a step runs is this job's own matter.
    return {key: value for key, value in settings.items() if key not in ("foreach", "fused", "capturable")}


def _plain(value: Any) -> Any:
    """What JSON keeps of a value, tensors of one value among it; entries that it does not keep are left out."""
    return json_part(_with_numbers(value))


def _with_numbers(value: Any) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    if isinstance(value, Mapping):
        return {key: _with_numbers(one) for key, one in value.items()}
    return [_with_numbers(one) for one in value] if isinstance(value, list | tuple) else value


def _weights_too(state: OptimizerState, model: ModelFiles) -> list[Any]:
    """The optimizer's slices, with 16-bit weights made of master weights where no file has them: at stage 3."""
    slices = list(state.slices)
    if model.sharded:
        for one in state.slices:
            if one.kind == "master":
                dtype = model.module[one.name].dtype
                slices.append(type(one)("weight", one.name, one.start, one.tensor.to(dtype)))
    return slices


def _client_state(model: ModelFiles, notes: list[str]) -> ClientState:
    """What the user saved, entry by entry: one that a checkpoint cannot keep is left out, and said."""
    kept: dict[str, Any] = {}
    for key, given in model.client_state().items():
        value = _without_records(given)
        try:
            pack_client_state({key: value})
        except TypeError as error:
            notes.append(f"left out: {error}")
            continue
        kept[key] = value
    return pack_client_state(kept)


def _without_records(value: Any) -> Any:
    """`value` with the fields, or the one argument, of an object in its place."""
    if isinstance(value, Record):
        return _without_records(value.args[0] if len(value.args) == 1 and not value.fields else value.fields)
    if isinstance(value, Mapping):
        return {key: _without_records(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_without_records(one) for one in value)
    return value


def import_deepspeed(arguments: argparse.Namespace) -> int:
    """Turn a checkpoint of DeepSpeed's into one of this engine's, and say what could not be taken over."""
    folder: Path = arguments.folder
    if not folder.is_dir():
        raise UsageError(f"{folder} is no folder: give the one that DeepSpeed's save_checkpoint was given")
    output = arguments.output or folder.absolute().with_name(f"{folder.absolute().name}-thinwire")
    imported = import_checkpoint(
        folder,
        output,
        arguments.tag,
        optimizer=arguments.optimizer,
        scheduler=arguments.scheduler,
        weights_only=arguments.weights_only,
    )
    for note in imported.notes:
        print(printable(f"thinwire: {note}"), file=sys.stderr)
    state = f"the state of {imported.optimizer}" if imported.optimizer else "no optimizer's state"
    print(printable(f"{imported.path}: {imported.parameters} parameters, {state}"))
    return 0
