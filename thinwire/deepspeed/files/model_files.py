"""DeepSpeed's files of one checkpoint by their names, and what its model files say."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from thinwire.deepspeed.files.fields import ModelFile
from thinwire.engine.checkpoint.files import read_file
from thinwire.engine.checkpoint.manifest import ModelDescription
from thinwire.engine.errors import CheckpointError, UsageError
from thinwire.zero import SavedSlice

_LATEST = ("latest", "latest_universal")
_LONGEST_POINTER = 4096
_MODEL = re.compile(r"mp_rank_(?P<model>\d+)_model_states\.pt")
_SHARDED_MODEL = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<model>\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<model>\d+)_optim_states\.pt")
_STATE_OF_A_PARAMETER = "zero"


@dataclass(frozen=True)
class DeepSpeedFiles:
    """The files of one checkpoint. `models`: one, or at stage 3 each rank's. `optimizers`: each rank's, none where the
    model's file has all. `universal`: the folder with a folder for each parameter, or None."""

    folder: Path
    models: list[Path]
    optimizers: list[Path]
    universal: Path | None


def looks_like_deepspeed(folder: Path) -> bool:
    """Whether there are files of DeepSpeed's in a folder, or right below it."""
    try:
        return any(_is_one(path) for path in [*folder.glob("*_states.pt"), *folder.glob("*/*_states.pt")])
    except OSError:
        return False


def find_tag(folder: Path, tag: str | None) -> Path:
    """The folder of one checkpoint: that of `tag`, or the one that `latest` names.

    Raises UsageError where there is none, or `folder` is one itself.
    """
    if any(_is_one(path) for path in folder.glob("*_states.pt")):
        raise UsageError(f"{folder} is one checkpoint: give {folder.absolute().parent} --tag {folder.absolute().name}")
    tags = sorted({path.parent.name for path in folder.glob("*/*_states.pt") if _is_one(path)})
    if not tags:
        raise UsageError(f"there is no checkpoint of DeepSpeed's in {folder}: no *_model_states.pt right below it")
    if tag is None:
        tag = _latest(folder, tags)
    if tag not in tags:
        raise UsageError(f"there is no checkpoint {tag!r} of DeepSpeed's in {folder}, only {', '.join(tags)}")
    return folder / tag


def find_files(folder: Path) -> DeepSpeedFiles:
    """The files of the checkpoint in `folder`. Raises CheckpointError, naming a file, where they make none."""
    names = sorted(path.name for path in folder.iterdir())
    _refuse_other_parallelism(folder, names)
    models = _by_rank(folder, names, _SHARDED_MODEL)
    optimizers = _by_rank(folder, names, _OPTIMIZER)
    whole = [folder / name for name in names if _MODEL.fullmatch(name)]
    if whole and models:
        raise CheckpointError(
            f"{folder} holds {whole[0].name} and {models[0].name}: the first is of stages 0 to 2, the second of "
            "stage 3. Two checkpoints were saved there; remove the older one's files"
        )
    if not whole and not models:
        raise CheckpointError(f"{folder} holds no mp_rank_00_model_states.pt, nor stage 3's zero_pp_rank_0_...")
    universal = folder / _STATE_OF_A_PARAMETER
    is_universal = universal.is_dir() and not optimizers
    return DeepSpeedFiles(folder, whole or models, optimizers, universal if is_universal else None)


def _is_one(path: Path) -> bool:
    return any(pattern.fullmatch(path.name) for pattern in (_MODEL, _SHARDED_MODEL, _OPTIMIZER))


def _latest(folder: Path, tags: list[str]) -> str:
    for name in _LATEST:
        try:
            return read_file(folder / name, _LONGEST_POINTER).decode(errors="backslashreplace").strip()
        except FileNotFoundError:
            continue
        except OSError as error:
            raise UsageError(f"{folder / name} cannot be read, {error}: say which with --tag") from error
    raise UsageError(f"{folder / _LATEST[0]} cannot be read: say which with --tag, of {', '.join(tags)}")


def _refuse_other_parallelism(folder: Path, names: list[str]) -> None:
    for name in names:
        reason = None
        if re.fullmatch(r"layer_.*model_states\.pt", name):
            reason = "of pipeline parallelism, or of experts, where every layer has a file"
        elif "expert" in name or name.startswith("expp_rank"):
            reason = "of a mixture of experts, whose parameters are not the same on every rank"
        else:
            for pattern in (_MODEL, _SHARDED_MODEL, _OPTIMIZER):
                match = pattern.fullmatch(name)
                if match and int(match["model"]):
                    reason = "of tensor or pipeline parallelism, where a rank holds parts of tensors"
        if reason:
            raise CheckpointError(
                f"{folder / name} is {reason}: only data-parallel checkpoints are imported. Merge it with DeepSpeed's "
                "tools first, or load its exported weights into the model"
            )


def _by_rank(folder: Path, names: list[str], pattern: re.Pattern[str]) -> list[Path]:
    found: dict[int, str] = {}
    for name in names:
        if not (match := pattern.fullmatch(name)):
            continue
        rank = int(match["rank"])
        if rank in found:
            raise CheckpointError(
                f"{folder} holds {found[rank]} and {name}, both of rank {rank}: two checkpoints were saved there; "
                "remove the older one's files"
            )
        found[rank] = name
    for rank in range(max(found, default=-1)):
        if rank not in found:
            one = next(iter(found.values()))
            raise CheckpointError(
                f"{folder} holds files of {len(found)} ranks and none of rank {rank}: "
                f"{re.sub('rank_[0-9]+', f'rank_{rank}', one, count=1)} is missing"
            )
    return [folder / found[rank] for rank in sorted(found)]


# Every other key of a model's file is what its user gave as client_state.
_DEEPSPEEDS = (
    "module buffer_names optimizer param_shapes frozen_param_shapes shared_params frozen_param_fragments "
    "lr_scheduler data_sampler random_ltd sparse_tensor_module_names skipped_steps global_steps global_samples "
    "dp_world_size mp_world_size ds_config ds_version universal_checkpoint_info"
)


@dataclass(frozen=True)
class ModelFiles:
    """The model's files, each rank's at stage 3.

    `groups`: name -> shape of the parameters that are in the optimizer's files, group by group, in the order in which
    they lie there; None at stage 0, where the optimizer is in the model's file. `tied`: other names of a parameter ->
    the one that holds it. `module`: what lies under the model's names, buffers left out; at stage 3 without values.
    """

    files: Sequence[ModelFile]
    module: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    tied: Mapping[str, str]
    groups: Sequence[Mapping[str, tuple[int, ...]]] | None
    sharded: bool

    @classmethod
    def read(cls, files: Sequence[ModelFile], sharded: bool) -> ModelFiles:
        """What these files hold; `sharded` at stage 3. Raises CheckpointError for what does not fit together."""
        first = files[0]
        names = {name: one for name, one in first.module.items() if isinstance(one, Tensor)}
        named_buffers = set(first.buffer_names)
        kept = {name: one for name, one in names.items() if name not in named_buffers}
        tied = {**(first.shared_params or {}), **(same_objects(kept) if not sharded else {})}
        for alias, name in tied.items():
            if alias in kept and (name not in kept or name in tied or not (sharded or _same(kept[alias], kept[name]))):
                raise CheckpointError(
                    f"{first.path} has {alias} as another name of {name} in shared_params, which is no parameter of "
                    "its own, or has other values"
                )
        for file in files[1:]:
            for name, one in file.module.items():
                if name in names and one.dtype != names[name].dtype:
                    raise CheckpointError(f"{file.path} has {name} in {one.dtype}, {first.path} in {names[name].dtype}")
        buffers = {name: one for name, one in names.items() if name in named_buffers}
        module = {name: one for name, one in kept.items() if name not in tied}
        model = cls(files, module, buffers, tied, first.param_shapes, sharded)
        model.description()  # every parameter has one shape
        return model

    def description(self) -> ModelDescription:
        """Shape and dtype of every parameter."""
        return ModelDescription({name: (self._shape(name), one.dtype) for name, one in self.module.items()})

    def other_weights(self) -> list[SavedSlice]:
        """The weights of parameters that no optimizer holds, and at stages 0 to 2 of all parameters in 16 bits."""
        held = {name for group in self.groups or () for name in group}
        slices = []
        for name, tensor in self.module.items():
            if self.sharded:
                if name not in held:
                    slices += self._frozen(name)
            elif name not in held or tensor.dtype != torch.float32:
                slices.append(SavedSlice("weight", name, 0, tensor.reshape(-1)))
        return [one for one in slices if one.tensor.numel()]

    def client_state(self) -> dict[str, Any]:
        """What the user has saved beside the model."""
        return {key: value for key, value in self.files[0].content.items() if key not in _DEEPSPEEDS.split()}

    def _shape(self, name: str) -> tuple[int, ...]:
        for group in self.groups or ():
            if name in group:
                shape = group[name]
                if not self.module[name].is_floating_point():
                    raise CheckpointError(f"{self.files[0].path} has {name}, which was trained, in whole numbers")
                if not self.sharded and shape != tuple(self.module[name].shape):
                    raise CheckpointError(
                        f"{self.files[0].path} has {name} in the shapes {shape} and {tuple(self.module[name].shape)}"
                    )
                return shape
        if not self.sharded:
            return tuple(self.module[name].shape)
        frozen = self.files[0].frozen_param_shapes or {}
        if name not in frozen:
            raise CheckpointError(
                f"no file holds the values of {name}: it was in no optimizer and not frozen, and DeepSpeed saves no "
                "such parameter at stage 3. Freeze it there with requires_grad_(False), and save again"
            )
        return frozen[name]

    def _frozen(self, name: str) -> list[SavedSlice]:
        """Each rank's run of a frozen parameter; the last ones are padded."""
        wanted, start, slices = math.prod(self._shape(name)), 0, []
        for file in self.files:
            fragment = (file.frozen_param_fragments or {}).get(name)
            if fragment is None or fragment.dim() != 1:
                raise CheckpointError(f"frozen_param_fragments of {file.path} has no one-dimensional tensor of {name}")
            run = fragment[: max(0, wanted - start)]
            slices.append(SavedSlice("weight", name, start, run))
            start += fragment.numel()
        if start < wanted:
            raise CheckpointError(f"the files of {len(self.files)} ranks hold {start} of the {wanted} values of {name}")
        return slices


def _same(one: Tensor, other: Tensor) -> bool:
    if one is other:
        return True
    whole = one.dtype == other.dtype and one.shape == other.shape
    return whole and torch.equal(
        one.contiguous().flatten().view(torch.uint8), other.contiguous().flatten().view(torch.uint8)
    )


def same_objects(named: Mapping[str, object]) -> dict[str, str]:
    """Names under which an object is there again -> the first."""
    first: dict[int, str] = {}
    names = {name: first.setdefault(id(one), name) for name, one in named.items()}
    return {name: known for name, known in names.items() if name != known}
