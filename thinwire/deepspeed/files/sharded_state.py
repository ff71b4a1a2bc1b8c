"""ZeRO's optimizer files: runs of flat groups, given back to the parameters that they are of.

Stages 1 to 3 have every rank's runs of flat groups; a universal checkpoint has a folder for each parameter."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinwire.deepspeed.files.fields import (
    CommonFile,
    OptimizerFile,
    OptimizerState,
    StateFile,
    moments_of,
    scalars_of,
    weight_kind,
)
from thinwire.deepspeed.files.model_files import ModelFiles
from thinwire.engine.errors import CheckpointError
from thinwire.zero import SavedSlice


@dataclass(frozen=True)
class _Run:
    """A rank's flat tensors of one group: `weights`, and the optimizer's `state` for it, maybe with padding behind."""

    weights: Tensor
    state: Mapping[str, Any]
    where: str


@dataclass(frozen=True)
class _Place:
    """Elements `start` to `start + numel` of a parameter, from `offset` on in a run."""

    start: int
    numel: int
    offset: int


def stage_of(files: Sequence[OptimizerFile]) -> int:
    """The ZeRO stage of optimizer files. Raises CheckpointError where they are not all of one checkpoint."""
    stages = {file.optimizer_state_dict.zero_stage for file in files}
    counts = {count for file in files for count in file.optimizer_state_dict.partition_count}
    if len(stages) > 1 or len(counts) > 1:
        raise CheckpointError(
            f"the optimizer files in {files[0].path.parent} are of several checkpoints: stages {sorted(stages)}, ranks "
            f"{sorted(counts)}. Remove the older one's files"
        )
    (stage,), (world,) = stages, counts
    if stage not in (1, 2, 3):
        raise CheckpointError(f"{files[0].path} is of ZeRO stage {stage}: there are 1, 2 and 3")
    if world != len(files):
        fault = "are missing" if world > len(files) else "are of another save"
        numbers = range(min(world, len(files)), max(world, len(files)))
        ranks = ", ".join(map(str, numbers))
        raise CheckpointError(
            f"{files[0].path.parent} was saved by {world} ranks and holds optimizer files of {len(files)}: those of "
            f"{'rank' if len(numbers) == 1 else 'ranks'} {ranks} {fault}"
        )
    return stage


def read_sharded(model: ModelFiles, files: Sequence[OptimizerFile], stage: int) -> OptimizerState:
    """What the optimizer files of all ranks hold. Raises CheckpointError for what does not fit the model's files."""
    if model.groups is None:
        raise CheckpointError(f"{model.files[0].path} holds no param_shapes, which tell what lies where beside it")
    first = files[0].optimizer_state_dict
    base = first.base_optimizer_state or first.optimizer_state_dict
    groups = base.param_groups if base is not None else []
    # Where only states were saved, a job goes on with the settings that it has.
    settings: list[Mapping[str, Any]] = [group.settings() for group in groups]
    settings = settings or [{} for _ in model.groups if stage < 3]
    runs = [list(_runs(file, stage)) for file in files]
    slices: list[SavedSlice] = []
    find = _shares if stage == 3 else _spread
    for name, places in find(model.groups, runs, files):
        kind = weight_kind(model.module[name].dtype if name in model.module else torch.float32)
        own: list[SavedSlice] = []
        for rank, number, place in places:
            run = runs[rank][number]
            own += _cut(kind, name, run, place)
            if place.start == 0:
                default = settings[number] if stage < 3 and number < len(settings) else {}
                of_group = next((group for group in settings if number in group.get("params", ())), default)
                own += scalars_of(run.state, of_group, name, run.where)
        if not model.sharded and name in model.module:
            _check_agreement(name, model.module[name], [one for one in own if one.kind == kind], files)
        slices += own
    return OptimizerState(slices, settings, first.loss_scaler)


def _runs(file: OptimizerFile, stage: int) -> Iterator[_Run]:
    state = file.optimizer_state_dict
    name = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"
    flats = state.fp32_flat_groups if stage == 3 else state.single_partition_of_fp32_groups
    if flats is None:
        raise CheckpointError(f"{file.path} holds no {name}: it is of another version, or not whole")
    base = state.base_optimizer_state or state.optimizer_state_dict
    states, groups = (base.state, base.param_groups) if base is not None else ({}, [])
    for number, flat in enumerate(flats):
        # An optimizer of one flat tensor a group, or sub-group, numbers its state by the group's parameters.
        numbered = stage < 3 and number < len(groups) and groups[number].params
        own = states.get(groups[number].params[0] if numbered else number, {})
        yield _Run(flat, own, f"flat group {number} in {file.path}")


def _spread(
    groups: Sequence[Mapping[str, tuple[int, ...]]], runs: Sequence[Sequence[_Run]], files: Sequence[OptimizerFile]
) -> Iterator[tuple[str, list[tuple[int, int, _Place]]]]:
    """Stages 1 and 2: where on which rank each parameter's elements are."""
    for number, group in enumerate(groups):
        if any(number >= len(own) for own in runs):
            raise CheckpointError(f"{files[0].path} holds {len(runs[0])} flat groups, the model's file {len(groups)}")
        ends, end = [], 0
        for own in runs:
            end += own[number].weights.numel()
            ends.append(end)
        begin = 0
        for name, shape in group.items():
            numel = math.prod(shape)
            if begin + numel > end:
                raise CheckpointError(
                    f"flat group {number} in {files[0].path.parent} ends at element {end}, within {name}, of which "
                    f"{numel} from {begin} on were expected: the files are of another model, or cut short"
                )
            places = []
            for rank, stop in enumerate(ends):
                first = stop - runs[rank][number].weights.numel()
                low, high = max(begin, first), min(begin + numel, stop)
                if low < high:
                    places.append((rank, number, _Place(low - begin, high - low, low - first)))
            yield name, places
            begin += numel


def _check_agreement(
    name: str, weights: Tensor, master_weights: Sequence[SavedSlice], files: Sequence[OptimizerFile]
) -> None:
    """Compare the model's weights with the optimizer's, most of which round to them but in files of several saves."""
    flat, same = weights.reshape(-1), 0
    for one in master_weights:
        mine = flat[one.start : one.start + one.tensor.numel()]
        theirs = one.tensor.to(weights.dtype)
        same += int(((mine == theirs) | (mine.isnan() & theirs.isnan())).sum())
    if 2 * same < flat.numel():
        raise CheckpointError(
            f"{name} has other values in the model's file than in the optimizer files of {files[0].path.parent}: they "
            "are of different saves, or of another model"
        )


def _shares(
    groups: Sequence[Mapping[str, tuple[int, ...]]], runs: Sequence[Sequence[_Run]], files: Sequence[OptimizerFile]
) -> Iterator[tuple[str, list[tuple[int, int, _Place]]]]:
    """Stage 3: each rank has the same share of every parameter, the last ones with padding; whole ones in a run."""
    world = len(runs)
    lengths = [[one.weights.numel() for one in own] for own in runs]
    if any(other != lengths[0] for other in lengths):
        raise CheckpointError(f"the ranks' files in {files[0].path.parent} hold flat groups of different lengths")
    number, offset = 0, 0
    for group in groups:
        for name, shape in group.items():
            numel = math.prod(shape)
            share = -(-numel // world)
            while number < len(lengths[0]) and offset == lengths[0][number] and share:
                number, offset = number + 1, 0
            if share and (number >= len(lengths[0]) or offset + share > lengths[0][number]):
                raise CheckpointError(
                    f"the flat groups in {files[0].path} end within {name}, of which {share} elements a rank were "
                    "expected: the files are of another model, or cut short"
                )
            yield (
                name,
                [
                    (rank, number, _Place(rank * share, min(share, numel - rank * share), offset))
                    for rank in range(world)
                    if rank * share < numel
                ],
            )
            offset += share
    if (number, offset) != (len(lengths[0]) - 1, lengths[0][-1]) and any(lengths[0][number:]):
        raise CheckpointError(
            f"the flat groups in {files[0].path} hold more than the model's parameters: another model"
        )


def _cut(kind: str, name: str, run: _Run, place: _Place) -> Iterator[SavedSlice]:
    """The weights and moments of one parameter in a run."""
    stop = place.offset + place.numel
    for what, flat in {kind: run.weights, **moments_of(run.state)}.items():
        if flat.dim() != 1 or flat.numel() < stop:
            raise CheckpointError(f"{what} of {run.where} has {tuple(flat.shape)} values, {name} needs {stop}")
        yield SavedSlice(what, name, place.start, flat[place.offset : stop])


_WEIGHTS = "fp32"
_STEP = "step"
_COMMON = "optimizer_state.pt"
# What a file says of a tensor that was put together from parts; whole ones have a dimension to join them on at most.
_TOLD = frozenset({"param", "cat_dim"})


def universal_files(model: ModelFiles, folder: Path) -> dict[tuple[str, str], Path]:
    """(parameter, kind of value) -> file, and ("", "") -> what is common to all, where there is such a file.

    Raises CheckpointError for a parameter without weights.
    """
    files: dict[tuple[str, str], Path] = {}
    for group in model.groups or ():
        for name in group:
            own = folder / name
            if "/" in name or not os.path.lexists(own / f"{_WEIGHTS}.pt"):
                raise CheckpointError(f"{own / _WEIGHTS}.pt is missing: the universal checkpoint is not whole")
            files |= {(name, path.stem): path for path in sorted(own.glob("*.pt"))}
    kinds = {kind for _, kind in files}
    for group in model.groups or ():
        for name, kind in ((name, kind) for name in group for kind in kinds if (name, kind) not in files):
            raise CheckpointError(f"{folder / name / kind}.pt is missing, and other parameters have it")
    if os.path.lexists(folder / _COMMON):
        files["", ""] = folder / _COMMON
    return files


def read_universal(model: ModelFiles, files: Mapping[tuple[str, str], Path], contents: Sequence[Any]) -> OptimizerState:
    """What the files of `universal_files` hold, given the content of each. Raises CheckpointError for another model."""
    values: dict[str, dict[str, Any]] = defaultdict(dict)
    for (name, kind), content in zip(files, contents, strict=True):
        values[name][kind] = content
    common = CommonFile.of(files["", ""], values[""][""]) if "" in values else None
    settings: list[Mapping[str, Any]] = [{} for _ in model.groups or () if not model.sharded]
    if common is not None:
        settings = [group.settings() for group in common.param_groups]
    # Stage 3's universal checkpoints have one step count for all parameters.
    states = common.optimizer_state_dict.state.values() if common and common.optimizer_state_dict else ()
    step = next((one[_STEP] for one in states if _STEP in one), None)
    slices: list[SavedSlice] = []
    for number, group in enumerate(model.groups or ()):
        for name, shape in group.items():
            own = {kind: _whole(content, math.prod(shape), files[name, kind]) for kind, content in values[name].items()}
            kind = weight_kind(model.module[name].dtype if name in model.module else own[_WEIGHTS].dtype)
            state = {_STEP: own.get(_STEP, step)}
            of_group = settings[number] if not model.sharded and number < len(settings) else {}
            tensors = {kind: own[_WEIGHTS], **{key: one for key, one in own.items() if key not in (_WEIGHTS, _STEP)}}
            slices += [SavedSlice(key, name, 0, one) for key, one in tensors.items() if one.numel()]
            slices += scalars_of(state, of_group, name, f"{files[name, _WEIGHTS].parent}")
    return OptimizerState(slices, settings, None if common is None else common.loss_scaler)


def _whole(content: Any, numel: int, path: Path) -> Any:
    """The values in a parameter's file, flat; a step count as it is."""
    if path.stem == _STEP:
        return StateFile.of(path, {"state": {_STEP: content}}).state[_STEP]
    StateFile.of(path, {"state": {path.stem: None}})
    if isinstance(content, Mapping):
        if strange := content.keys() - _TOLD:
            raise CheckpointError(
                f"{path} was put together from parts of tensors ({sorted(map(str, strange))[0]}), as tensor "
                "parallelism leaves them: only data-parallel checkpoints are imported"
            )
        content = content.get("param")
    if not isinstance(content, Tensor) or content.numel() != numel or not content.is_floating_point():
        given = tuple(content.shape) if isinstance(content, Tensor) else type(content).__name__
        raise CheckpointError(f"{path} holds {given}, a tensor of {numel} values was expected: it is of another model")
    return content.reshape(-1)
